"""One sequence: what is asked of it, what it does in its next step, and what a step brings it. Alone or among others, this is its life."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..checks import token_ids, whole
from ..constraints.jump_forward import ForcedDrafts
from ..errors import ContextError, EngineError
from ..sampling.sampler import Sampler
from ..speculation.policy import PLAIN_STEP, StepPlan
from ..speculation.synthetic import SyntheticAcceptance
from ..speculation.verify import Choices, choose_block, first_token
from .batch import BatchItem, Draft, StepOutput, Verify
from .constrained import Guide
from .limits import Limits
from .options import candidate_widths
from .runner import ModelRunner
from .stats import Stats

SPECULATIVE, PLAIN, REFERENCE = "speculative", "plain", "reference"

ALONE = Verify()  # work that says nothing of its sequence is made once: half a microsecond each


@cache
def drafted(kind: StepPlan) -> Draft:
    """A step of this kind."""
    return Draft(kind.tokens, verified=kind.verify_len if kind.verify_len > kind.tokens else 0, drafter=kind.method)


Drafts = Callable[[Sequence[int], int], Sequence[int]]
"""A scripted drafter: (all tokens so far, count) -> that many draft ids."""


@dataclass(frozen=True)
class LoopOptions:
    """Attributes:
    max_tokens: tokens to emit; None for as many as the context holds.
    mode: SPECULATIVE, PLAIN, or REFERENCE (plain decoding on the W-wide graph, whose text equals the speculative text byte for byte).
    width: rows per block.
    is_end: whether a token ends the text.
    ignore_end: go on after end tokens.
    sampler: chooses the tokens, of this generation alone; None: the greedy ones.
    completes: why the text ends with a token, "stop" or "length", "" where it goes on; asked once about each that comes out, in order. None: nothing does.
    drafts: drafts instead of the drafter.
    forced: whether tokens that the sampler's constraint leaves no choice about are drafts, ahead of the drafter's and without one.
    reuse: whether a prompt may go on behind what another one has computed; of sequences that share an engine.
    owner: whose text it is: nothing of one owner's is reused for, or drafted in, another's.
    """

    max_tokens: int | None = None
    mode: str = SPECULATIVE
    width: int = 16
    is_end: Callable[[int], bool] = lambda token: False
    ignore_end: bool = False
    synthetic: SyntheticAcceptance | None = None
    sampler: Sampler | None = None
    completes: Callable[[int], str] | None = None
    drafts: Drafts | None = None
    forced: bool = False
    reuse: bool = True
    owner: str = ""

    def __post_init__(self) -> None:
        if self.mode not in (SPECULATIVE, PLAIN, REFERENCE):
            raise EngineError(f"the mode is {self.mode!r}; use {SPECULATIVE}, {PLAIN} or {REFERENCE}")
        if self.max_tokens is not None:
            whole(self.max_tokens, "the number of tokens", 0, 1 << 62)

    def limits(self) -> Limits:
        """Of one sequence with these options."""
        return Limits(self.max_tokens, (lambda token: False) if self.ignore_end else self.is_end, self.completes)

    def forced_drafts(self) -> ForcedDrafts | None:
        """Of one sequence with these options; None where nothing is forced."""
        if not self.forced or self.mode == REFERENCE or self.sampler is None or self.sampler.grammar is None:
            return None
        return ForcedDrafts(self.sampler, candidate_widths(self.width))

    def check(self, drafter: object | None) -> None:
        """Raises EngineError for a mode that needs drafts where nobody makes any; ``drafter``: who does, None for nobody."""
        if self.mode == SPECULATIVE and drafter is None and self.drafts is None:
            raise EngineError(f"there is no drafter: use {PLAIN} mode, or load one")

    @property
    def candidates(self) -> int | None:
        """What ``ModelRunner.read_candidates`` is to be told."""
        return self.sampler.sampling.candidates() if self.sampler is not None else 0

    @property
    def masked(self) -> bool:
        """Whether choices are to be asked for among some of the tokens."""
        return self.sampler is not None and self.sampler.grammar is not None


class Request:
    """A sequence in a slot of an engine.

    Attributes:
        history: the tokens of the prompt, and what came out.
        speculating: whether its next step drafts.
        width: rows of a block in reference mode.
        may_force: whether a constraint may leave no choice about tokens.
        forced: the drafts of its last step, if a constraint left no choice about them.
        found: the drafts of its last step, if they were looked up (``lookup``).
        drafts: the drafts that its last step verified, whoever made them.
        guide: its constraint, step by step; None if it has none.
        failed: what its constraint or its scripted drafter has raised before a step, which others share: it ends with it behind the step.
    """

    def __init__(self, prompt: Sequence[int], options: LoopOptions, stats: Stats, width: int, n_vocab: int) -> None:
        self.options, self.stats, self.limits, self._n_vocab = options, stats, options.limits(), n_vocab
        self.history, self.width = list(prompt), width
        self.speculating = options.mode == SPECULATIVE and options.width > 1
        self.forced: list[int] = []
        self.found: list[int] = []
        self.method = ""  # by which they were looked up
        self.drafts: list[int] = []
        self.failed: Exception | None = None
        self._whole = 0  # rows of all of its blocks; 0 where they may differ
        self._fills = False  # whether its last step had no drafts in its block
        self._forced = options.forced_drafts()
        self.may_force = self._forced is not None
        self.guide = Guide(options.sampler, options.synthetic) if options.masked and options.sampler is not None else None

    def keep_width(self, width: int) -> None:
        """Its blocks have ``width`` rows under a constraint, too, whatever that forbids: narrower ones would have other bits."""
        if self.guide is None or width == 1 or not self.speculating:
            return
        self.guide.widths, self._whole = (width,), width
        if self._forced is not None and self.options.sampler is not None:
            self._forced = ForcedDrafts(self.options.sampler, [width])

    def _plain(self) -> BatchItem:
        """A token without drafts."""
        self._fills = self._whole > 1
        return Verify([self.history[-1]] * (self._whole - 1)) if self._fills else ALONE

    def found_work(self, drafts: list[int], widths: Sequence[int]) -> BatchItem:
        """Verifies ``drafts``, filled up to one of the ``widths`` that there are graphs for; a plain token if none of them may come."""
        if self.guide is not None and self.guide.slow:
            return self.work(PLAIN_STEP)
        self._begin(drafts)
        self.forced, self.found = [], drafts if self.guide is None else drafts[: self.guide.check(np.array(drafts))]
        if not self.found:
            return self.work(PLAIN_STEP)
        self.found = self.found[: self._whole - 1] if self._whole else self.found
        rows = self._whole or next(w for w in widths if len(self.found) < w)
        return Verify([*self.found, *[self.found[-1]] * (rows - 1 - len(self.found))])

    def forced_work(self) -> BatchItem | None:
        """Its next step, if that verifies what a constraint leaves no choice about, filled up to a width that there are graphs for."""
        if self._forced is None:
            return None
        self.forced, self.found = [], []
        try:
            self.forced = self._forced.next()
        except Exception as error:
            self.failed = error
        if not self.forced:
            return None
        self._begin(self.forced)
        return Verify([*self.forced, *[self.forced[-1]] * (self._forced.width(self.forced) - 1 - len(self.forced))])

    def work(self, kind: StepPlan, weigh: Callable[[Mapping[int, np.ndarray]], int] | None = None) -> BatchItem:
        """What it does in a step of this kind. ``weigh``: as in ``Draft``."""
        self._begin()
        self.found, self._fills = [], False
        if self.speculating:
            if kind.tokens == 1 or (self.guide is not None and self.guide.slow):
                return self._plain()
            if self.options.drafts is None:
                if self.guide is None and weigh is None:
                    return drafted(kind)
                return Draft(kind.tokens, check=self.guide.check if self.guide is not None else None, drafter=kind.method, weigh=weigh)
            try:
                drafts = self._scripted(self.options.drafts, kind.tokens - 1)
            except Exception as error:
                self.failed = error
                return ALONE
            self._begin(drafts)
            return Verify(drafts)
        return ALONE if self.options.mode != REFERENCE else Verify([self.history[-1]] * (self.width - 1))

    def _scripted(self, drafter: Drafts, count: int) -> list[int]:
        """What it gives, ``count`` ids at most.

        Raises:
            ContextError: something else, which the engine would refuse, and with it the step that others share.
        """
        drafts = drafter(self.history, count)
        ids = token_ids(drafts, self._n_vocab, "what the scripted drafter gave").tolist() if len(drafts) else []
        if len(ids) > count:
            raise ContextError(f"the scripted drafter gave {len(ids)} ids where {count} were asked for")
        return ids

    def _begin(self, drafts: Sequence[int] = ()) -> None:
        if self.guide is not None:
            self.guide.begin(drafts)

    def first(self, greedy: int, engine: ModelRunner, slot: int = 0) -> int:
        """The token behind the prompt, which has been computed; ``greedy`` is the largest logit's."""
        self.limits.begin(engine.slots[slot].cursor.room)
        token = first_token(Choices([greedy], engine, slot), self.history, self.limits, self.options.sampler)
        engine.choose(token, slot)
        self.stats.target_forwards += 1
        self.stats.emitted = 1
        self.history.append(token)
        return token

    def take(self, item: BatchItem, result: StepOutput, engine: ModelRunner, slot: int = 0) -> list[int]:
        """The tokens that a step brought, which the engine has accepted then.

        Raises:
            EngineError: the target produced NaN or Inf.
            Exception: what its constraint or its scripted drafter has raised.
        """
        failed = self.failed or (self.guide.failed if self.guide is not None else None)
        if failed is not None:
            raise failed
        if not result.target_finite:
            raise EngineError(engine.not_finite(slot))
        if not result.draft_finite:
            self.stats.nan_drafts += 1
            self.speculating = False
        options, accepted, imposed = self.options, self._offered(result), False
        self.drafts = accepted
        if options.synthetic is not None and not self.forced:
            most = options.synthetic.draw
            accepted, imposed = self.guide.imposed(accepted) if self.guide is not None else accepted[: most(len(accepted))], True
        choices = Choices(result.ids.tolist(), engine, slot, self.guide.allowed if self.guide is not None else None)
        block = choose_block(choices, accepted, self.limits, options.sampler, imposed)
        engine.accept(len(block), block[-1], slot)
        self.history += block
        rows = result.tokens.size  # fewer than asked for where a constraint forbids a draft
        self.stats.add_block(rows, matched := len(block) - 1, isinstance(item, Draft), len(self.drafts))
        self._credit(item, engine, matched)
        if self._forced is not None and self.forced:
            self._forced.observe(len(self.forced), matched)
            self.stats.forced, self.stats.forced_matched = self._forced.drafted, self._forced.matched
        elif self._forced is not None and item.rows > 1:
            self._forced.observe_drafter(matched)
        return block

    def _credit(self, item: BatchItem, engine: ModelRunner, matched: int) -> None:
        """Counts the drafts for whoever made them."""
        if not self.drafts:
            return
        who = self.method if self.found else "script"
        if self.forced:
            who = "constraint"
        elif isinstance(item, Draft) and engine.drafter is not None:
            who = item.drafter or engine.drafter.method
        self.stats.credit(who, len(self.drafts), matched)

    def _offered(self, result: StepOutput) -> list[int]:
        """The drafts of a step, without what only fills it up."""
        return self.forced or self.found or ([] if self.options.mode == REFERENCE or self._fills else result.tokens[1:].tolist())

    def ended(self) -> None:
        """Says in the statistics whether the text is whole."""
        self.stats.cut = self.options.sampler is not None and self.options.sampler.incomplete
