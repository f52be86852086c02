"""Forced tokens as drafts: where a constraint leaves one continuation, its tokens cost no drafter and are accepted like any other draft."""

from collections.abc import Sequence

from ..sampling.sampler import Sampler

ROW_COST = 1 / 8  # of another row, in plain steps: less on GPUs, about this with the embedded target on two cores
MEMORY = 0.9  # per step of the drafter's


class ForcedDrafts:
    """One generation's choice between forced tokens and the drafter's.

    Attributes:
        steps, drafted, matched: blocks of forced tokens, how many there were in them, and how many the target chose.
    """

    def __init__(self, sampler: Sampler, widths: Sequence[int]) -> None:
        """
        Args:
            widths: rows that a block may have.
        """
        self._sampler, self._widths = sampler, [width for width in widths if width > 1]
        self._drafter = 0.0  # tokens per step that the drafter gave lately
        self.steps = self.drafted = self.matched = 0

    def next(self) -> list[int]:
        """The drafts of the next block, as many as pay; none where there are none, or where the drafter is worth more."""
        tokens = self._sampler.forced(max(self._widths, default=1) - 1)
        if not tokens or len(tokens) < self._drafter:
            return []
        return tokens[: max(self._widths, key=lambda width: (1 + min(len(tokens), width - 1)) / (1 + ROW_COST * (width - 1))) - 1]

    def width(self, drafts: Sequence[int]) -> int:
        """Rows of the block that holds ``drafts``."""
        return next(width for width in sorted(self._widths) if width > len(drafts))

    def observe(self, drafts: int, matched: int) -> None:
        """A block of forced tokens, the first ``matched`` of which were accepted."""
        self.steps, self.drafted, self.matched = self.steps + 1, self.drafted + drafts, self.matched + matched

    def observe_drafter(self, matched: int) -> None:
        """A block of the drafter's."""
        self._drafter = MEMORY * self._drafter + (1 - MEMORY) * matched
