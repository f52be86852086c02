"""Jump-forward decoding: tokens that a constraint leaves no choice about are drafts that need no drafter."""

from collections.abc import Sequence

from ..sampling.sampler import Sampler

ROW_COST = 1 / 8  # of one more row, in plain steps: an upper bound for GPUs, about right for the embedded target on two cores
DRAFTER_DECAY = 0.9  # of the drafter's accepted tokens, per step


class JumpForward:
    """One sequence's choice between jump-forward tokens and other drafts. ``drafted``, ``matched``: of the former, those verified and accepted."""

    def __init__(self, sampler: Sampler, widths: Sequence[int]) -> None:
        """``widths``: verify lengths that there are graphs for."""
        self._sampler, self._widths = sampler, sorted(width for width in widths if width > 1)
        self._drafter = 0.0  # mean accepted tokens of other drafts
        self.drafted = self.matched = 0

    def next(self) -> list[int]:
        """The drafts of the next step, as many as pay; empty where other drafts are expected to give more."""
        tokens = self._sampler.forced(max(self._widths, default=1) - 1)
        if not tokens or len(tokens) < self._drafter:
            return []
        return tokens[: max(self._widths, key=lambda width: (1 + min(len(tokens), width - 1)) / (1 + ROW_COST * (width - 1))) - 1]

    def width(self, drafts: Sequence[int]) -> int:
        """Rows of the verify step for ``drafts``."""
        return next(width for width in self._widths if width > len(drafts))

    def observe(self, drafts: int, matched: int) -> None:
        """A step verified ``drafts`` jump-forward tokens and accepted the first ``matched``."""
        self.drafted, self.matched = self.drafted + drafts, self.matched + matched

    def observe_drafter(self, matched: int) -> None:
        """A step accepted ``matched`` other drafts."""
        self._drafter = DRAFTER_DECAY * self._drafter + (1 - DRAFTER_DECAY) * matched
