"""The plan of a decode step: what each sequence verifies, chosen before the step and learnt from after it.

jump-forward tokens, then n-gram matches where they gain more, then the policy's choice: a drafter and a number of drafts, or plain decoding
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import numpy as np

from ..engine.batch import Batch, BatchItem, Draft, GraphKey, StepOutput, Verify
from ..engine.options import candidate_widths
from ..engine.runner import ModelRunner
from ..engine.sequence import CONSTRAINT, REFERENCE, SCRIPT, SPECULATIVE
from ..engine.sequence import Sequence as SequenceState
from ..ggml.cores import CORE_MONITOR
from .confidence import Confidence
from .ngram import NOTHING, PLAINLY, Choice, NgramDrafts, NgramMethod
from .policy import PLAIN_STEP, SpeculationPolicy, SpeculationState, StepPlan

CHOOSE_EVERY = 32  # steps without news between two choices: n-gram steps save 20 us each
PLAIN_RUN, CHOOSE_EVERY_PLAIN = 16, 8  # after so many plain steps in a row, the policy hears of so many at once: each saves 10 us

PLAIN_ITEM = Verify()  # shared: an item takes half a microsecond to make


@cache
def draft_item(plan: StepPlan) -> Draft:
    return Draft(plan.tokens, padded_len=plan.verify_len if plan.verify_len > plan.tokens else 0, drafter=plan.method)


class Planner:
    """Chooses for the decoding sequences of one runner.

    Attributes:
        policy: chooses drafter and number of drafts; None where the verify length is pinned to ``width``.
        ngram: n-gram drafting, None for none.
        graph_rows: rows of the graph that verifies n rows, by n.
        plan: of the last decode step, or what it would have been without n-gram drafts.
        slots: that decode steps cover.
    """

    def __init__(self, runner: ModelRunner, width: int | None, ngram: NgramMethod | None, kinds: Iterable[StepPlan] = ()) -> None:
        self._runner, self.ngram = runner, ngram
        self.policy: SpeculationPolicy | None = None
        widths = candidate_widths(runner.options.width)
        if width is None and runner.drafter is not None:
            drafting = [StepPlan.of(m.method, n) for m in runner.drafter.methods for n in widths if 1 < n <= m.block_size]
            self.policy = SpeculationPolicy([*drafting, *kinds])
        self.width, self.width_reason = width or runner.options.width, ""
        self._pinned = StepPlan.of("", self.width)
        self.plan, self.slots = PLAIN_STEP, 1
        self.graph_rows = [next((w for w in (1, *widths) if n <= w), n) for n in range(runner.options.width + 1)]
        # of the decoding sequences
        self._decoding: Sequence[SequenceState] = []
        self._acceptance: list[SpeculationState | None] = []
        self._drafting = False  # whether any of them drafts
        self._indexes: list[NgramDrafts | None] = []  # empty where none has one
        self._plain_tokens: list[float] = []
        self._jump_forward: list[SequenceState] = []
        self._simple = False  # whether they do what the plan says, whatever they have emitted
        # of the step
        self._repeated: tuple[StepPlan, dict[int, BatchItem]] | None = None  # the items of a plan, where the last step had these
        self._since_choice = 0  # steps since the policy learnt something: until then it would choose the same
        self._plain_run = 0  # plain steps in a row
        self._unheard: list[float] = []  # milliseconds of those that the policy has not heard of
        self._expected: tuple[list[float], float] | None = None  # tokens per sequence, and milliseconds, of the step without n-gram drafts
        self._ngram_choice: Choice | None = None
        self._weighed = False  # whether drafts were cut by the drafter's confidence
        self._catch_up_us = self._waited_us = 0  # counters of the runner before the step

    def pin_width(self, width: int, reason: str = "") -> None:
        """Every verify step has ``width`` rows from now on, 1 for plain decoding; ``reason`` goes into the statistics of later sequences."""
        self.width, self.policy, self.width_reason, self._since_choice = width, None, reason, 0
        self._pinned = StepPlan.of("", width)

    @property
    def settled(self) -> bool:
        """Whether step costs are known for the decoding sequences."""
        return self.policy is None or self.policy.calibrated(self.slots)

    # -- a sequence

    def admit(self, seq: SequenceState) -> None:
        """``seq`` has a slot; its drafter rows are written where the slot drafts."""
        if seq.speculating and self.policy is not None:
            sampling = seq.options.sampler.sampling.temperature_class if seq.options.sampler is not None else ""
            if seq.options.adapters:
                sampling = f"{sampling} adapters {seq.options.adapters}".lstrip()
            seq.acceptance = self.policy.begin(not self._runner.slots[seq.slot].drafting, seq.options.max_tokens, sampling)

    def prefilled(self, seq: SequenceState) -> None:
        """``seq`` has its first token."""
        options = seq.options
        if self.ngram is not None and options.mode == SPECULATIVE and options.drafts is None and options.synthetic is None:
            seq.ngram = self.ngram.begin(seq.history, options.owner)

    def prepare(self, seq: SequenceState) -> None:
        """Builds the graphs that a lone sequence can need, so that no step waits for one."""
        runner = self._runner
        if self.policy is None and not runner.rows_alike:
            seq.pin_verify_len(self.width)
        if len(runner.slots) > 1:
            return
        keys = self._graph_keys(seq)
        if seq.jump_forward is not None or seq.ngram is not None:
            verify = [runner.verify_key(w) for w in candidate_widths(seq.options.width) if w > 1]
            keys = list(dict.fromkeys([*keys, *verify]))
        runner.prepare(keys, seq.limits.left)

    def _graph_keys(self, seq: SequenceState) -> list[GraphKey]:
        """Graphs of the steps that a lone sequence may take."""
        runner, constraint = self._runner, seq.constraint
        if seq.options.mode == REFERENCE:
            return [runner.verify_key(seq.verify_len)]
        if not seq.speculating or (seq.options.drafts is None and not runner.slots[0].drafting):
            return [runner.verify_key(1)]
        plans = [self._pinned] if self.policy is None else self.policy.plans
        if seq.options.drafts is not None:
            return [runner.verify_key(width) for width in sorted({plan.tokens for plan in plans})]
        drafting = [plan for plan in plans if plan.tokens > 1]
        plain = [runner.verify_key(1)] if len(drafting) < len(plans) else []
        proposing = [plan for plan in drafting if constraint is not None or self._confidence(plan) is not None]
        fused = [runner.drafting_key("fused", plan.method, plan.tokens, plan.verify_len) for plan in drafting if plan not in proposing]
        if not proposing:
            return [*plain, *fused]
        if constraint is not None and self.policy is not None:
            constraint.widths = self.policy.useful
        rows = [(plan.method, runner.graphs.width_for(plan.tokens)) for plan in proposing]
        draft = dict.fromkeys(runner.drafting_key("draft", drafter, width, width) for drafter, width in rows)
        verify = {min(width, plan.tokens) for plan in proposing for width in candidate_widths(seq.options.width)}
        return [runner.verify_key(1), *fused, *draft, *(runner.verify_key(width, deferred=False) for width in sorted(verify) if width > 1)]

    def end(self, seq: SequenceState) -> None:
        """``seq`` ends: its text becomes n-gram material of later ones."""
        if seq.ngram is not None:
            seq.ngram.end()
            seq.ngram = None

    def learn(self, seq: SequenceState) -> None:
        """``seq`` has ended: costs are kept between sessions as they were after texts that other processes left alone."""
        if self.policy is not None and seq.decoding and not seq.stats.contended and (learnt := self.policy.learnt):
            self.policy.undisturbed = learnt

    def reason(self, seq: SequenceState) -> str | None:
        """Why the last step of a lone sequence was planned as it was, in one sentence; None where that is not known."""
        if seq.acceptance is None or self.policy is None or len(self._runner.slots) > 1 or not self.policy.calibrated(1):
            return None
        return self.policy.reason(seq.acceptance)

    # -- a step

    def regroup(self, decoding: Sequence[SequenceState], slots: int) -> None:
        """Other sequences decode than before, in graphs that cover ``slots`` slots."""
        self._since_choice = self._plain_run = 0
        self._unheard.clear()
        self._decoding, self.slots = decoding, slots
        self._jump_forward = [s for s in decoding if s.jump_forward is not None]
        self._acceptance = [s.acceptance if s.speculating else None for s in decoding]
        self._drafting = any(s.speculating for s in decoding)
        self._indexes = [s.ngram for s in decoding] if any(s.ngram is not None for s in decoding) else []
        self._plain_tokens = [1.0] * len(decoding)
        self._repeated = None
        self._simple = not any(s.constraint is not None or s.options.drafts is not None or s.options.mode == REFERENCE for s in decoding)

    def next_plan(self) -> StepPlan:
        """The policy's choice for the next step."""
        return self._pinned if self.policy is None else self.policy.choose(self.slots, self._acceptance)

    def choose(self, batch: Batch) -> None:
        """Fills ``batch.plan``, unless it is set, and the items of decoding sequences."""
        decoding, items = batch.decoding, dict[int, BatchItem]()
        batch.items = items
        self._catch_up_us, self._waited_us = self._runner.state.catch_up_us, self._runner.graphs.waited_us
        for s in self._jump_forward:
            if (jump := self._jump(s)) is not None:
                items[s.slot] = jump
        self._ngram_choice, self._weighed, repeated = None, False, self._repeated
        self._repeated = None
        if items and len(items) == len(decoding):
            batch.plan = self._pinned
            return
        if batch.plan is not None or not self._since_choice % CHOOSE_EVERY:
            self.plan, self._expected = batch.plan or self.next_plan(), None
        plan = self.plan
        if self._indexes and self._match(batch, plan.tokens) == 1:
            plan = PLAIN_STEP
        batch.plan, weigh = plan, self._weigher(plan) if self.policy is not None and self.policy.confidence else None
        if self._simple and not items and weigh is None and not batch.prefilling:
            if repeated is None or repeated[0] != plan:
                repeated = plan, {s.slot: self.item(s, plan) for s in decoding}
            self._repeated, batch.items = repeated, repeated[1]
            return
        for s in decoding:
            if s.slot not in items:
                items[s.slot] = self.item(s, plan, weigh)

    def item(self, seq: SequenceState, plan: StepPlan, weigh: Callable[[Mapping[int, np.ndarray]], int] | None = None) -> BatchItem:
        """What ``seq`` does in a step of this plan. ``weigh``: as of ``Draft``."""
        if not seq.speculating:
            seq.offer("", [])
            return PLAIN_ITEM if seq.options.mode != REFERENCE else _fill(seq, seq.verify_len)
        if not plan.draft_tokens or (seq.constraint is not None and seq.constraint.slow):
            seq.offer("", [])
            return _fill(seq, seq.pinned_len) if seq.pinned_len > 1 else PLAIN_ITEM
        if seq.options.drafts is None:
            drafter = self._runner.drafter
            method = plan.method or (drafter.method if drafter is not None else "")
            seq.offer(method, [], True, plan.verify_len if weigh is None else 0)
            if seq.constraint is None and weigh is None:
                return draft_item(plan)
            check = seq.constraint.check if seq.constraint is not None else None
            return Draft(plan.tokens, check=check, drafter=plan.method, weigh=weigh)
        try:
            drafts = seq.scripted(plan.tokens - 1)
        except Exception as error:
            seq.failure = error
            seq.offer("", [])
            return PLAIN_ITEM
        seq.offer(SCRIPT, drafts)
        return Verify(drafts)

    def _jump(self, seq: SequenceState) -> Verify | None:
        """The tokens that the constraint leaves no choice about, padded to a verify length."""
        assert seq.jump_forward is not None
        try:
            drafts = seq.jump_forward.next()
        except Exception as error:
            seq.failure, drafts = error, []
        if not drafts:
            return None
        seq.offer(CONSTRAINT, drafts)
        return _verify(drafts, seq.jump_forward.width(drafts))

    def _matched(self, seq: SequenceState, drafts: list[int]) -> BatchItem:
        """Verifies n-gram ``drafts``, as far as the constraint allows them; a plain token if it allows none."""
        assert self.ngram is not None
        constraint = seq.constraint
        if constraint is not None:
            if constraint.slow:
                return self.item(seq, PLAIN_STEP)
            constraint.begin(drafts)
            drafts = drafts[: constraint.check(np.array(drafts))]
        if not drafts:
            return self.item(seq, PLAIN_STEP)
        seq.source, seq.offered = self.ngram.method, drafts[: seq.pinned_len - 1] if seq.pinned_len else drafts
        seq.by_drafter, seq.planned_rows = False, 0
        return _verify(seq.offered, seq.pinned_len or next(w for w in (1, *self.ngram.widths) if len(drafts) < w))

    def _match(self, batch: Batch, width: int) -> int:
        """Adds items of n-gram drafts where they gain more than a step of this ``width``; returns the width of the other sequences."""
        ngram, decoding, indexes = self.ngram, batch.decoding, self._indexes
        assert ngram is not None
        n = len(decoding)
        if not ngram.timed and self.policy is not None and (plain_ms := self.policy.plain_ms(self.slots)) is not None:
            ngram.tell(self.slots, plain_ms)
        if width == 1 and n == 1 and indexes[0] is not None and ngram.finds_nothing(self.slots, indexes[0]):
            self._ngram_choice = NOTHING[1]
            return 1
        rows, tokens, milliseconds = width, self._plain_tokens, None
        if width == 1 or not self._drafting:
            rows, milliseconds = 1, ngram.cost(self.slots, 1)
        elif self._expected is not None:
            tokens, milliseconds = self._expected
        elif self.policy is None:
            tokens = [s.stats.tokens_per_draft if s.speculating else 1.0 for s in decoding]
        else:
            if (self.slots, self.plan) not in self.policy.costs:  # being measured
                return width
            milliseconds = self.policy.cost(self.slots, self.plan)
            tokens = self.policy.expected_tokens_each(self.slots, self.plan, self._acceptance)
            self._expected = tokens, milliseconds
        self._ngram_choice = choice = ngram.choose(self.slots, indexes, tokens, milliseconds, rows)
        if choice is not NOTHING[n] and choice is not PLAINLY[n]:
            for s, drafts in zip(decoding, choice.drafts):
                if drafts and s.slot not in batch.items:
                    batch.items[s.slot] = self._matched(s, drafts)
        if choice is PLAINLY[n] and self.policy is not None and self.policy.fall_back(self.slots, self._acceptance):
            self.plan, self._ngram_choice = PLAIN_STEP, NOTHING[n]  # the policy's choice from now on
        return width if choice.otherwise else 1

    def _weigher(self, plan: StepPlan) -> Callable[[Mapping[int, np.ndarray]], int] | None:
        """How many drafts to verify by the drafter's confidence, where it has one."""
        confidence = self._confidence(plan)
        if self.policy is None or confidence is None or not self.policy.calibrated(self.slots):  # whole blocks are being measured
            return None
        self._weighed = True
        confidence.tell(self.policy.costs[self.slots, PLAIN_STEP])
        pace, slots = self.policy.tokens_per_ms(self.slots, plan, self._acceptance), self.slots
        return lambda of: confidence.worth({slot: chances.tolist() for slot, chances in of.items()}, pace, slots)

    def _confidence(self, plan: StepPlan) -> Confidence | None:
        return self.policy.confidence.get(plan.method) if self.policy is not None and plan.tokens > 1 else None

    # -- after a step

    def observe(self, batch: Batch, output: Mapping[int, StepOutput]) -> None:
        """Learns from a decode step: its tokens, and its duration without the time in which graphs were built."""
        if self.policy is None and self.ngram is None:
            return
        decoding, items = batch.decoding, batch.items
        built = 1e-3 * (self._runner.graphs.waited_us - self._waited_us)
        late = 1e-3 * (self._runner.state.catch_up_us - self._catch_up_us)
        ms = batch.ms - built
        contended, steps = self._contended(), 1
        if contended:
            self._plain_run = 0
            self._unheard.clear()
        elif self._plain_run >= PLAIN_RUN and self.plan == PLAIN_STEP and self._simple and not (self._indexes or batch.prefilling):
            self._unheard.append(ms - late)
            if (steps := len(self._unheard)) < CHOOSE_EVERY_PLAIN:
                self._since_choice = 1
                return
            ms, late = sum(self._unheard) / steps, 0.0
            self._unheard.clear()
        alone = not batch.prefilling or len(items) == len(decoding)  # no prompt in the step
        matched = [s.matched for s in decoding]
        if self.ngram is not None and self._indexes and alone:
            given = not contended and not any(s.by_drafter for s in decoding)
            self.ngram.observe(self.slots, batch.graph_rows if given else None, ms, len(matched) + sum(matched))
        if self._weighed:
            self._observe_confidence(batch, output, alone)
        if self.policy is None or (self._ngram_choice is not None and not self._ngram_choice.otherwise):
            self._since_choice += 1
            return
        acceptance, known = self._acceptance, alone and not contended
        matches = self._ngram_choice is not None and self._ngram_choice is not NOTHING[len(decoding)]
        other = (CONSTRAINT, self.ngram.method if self.ngram is not None else CONSTRAINT)
        if (matches or self._jump_forward) and any(s.source in other for s in decoding):
            acceptance, known = [None if s.source in other else s.acceptance for s in decoding], False
        if known or acceptance is self._acceptance or any(acceptance):
            known = known and batch.graph_rows == self.graph_rows[self.plan.verify_len]
            self.policy.observe(self.slots, self.plan, ms, acceptance, matched, known, late, built, steps)
        self._plain_run = self._plain_run + steps if self.plan == PLAIN_STEP else 0
        self._since_choice = 1 if steps == 1 and self._plain_run > PLAIN_RUN and self._plain_run % CHOOSE_EVERY_PLAIN else 0

    def observe_round(self, part: Sequence[SequenceState], ms: float, known: bool) -> None:
        """Learns from a pipelined round, of some of the decoding sequences. ``known``: its duration is that of such a round alone."""
        if self.policy is not None:
            chosen = [(self._acceptance[i], s.matched) for i, s in enumerate(self._decoding) if s in part]
            self.policy.observe(self.slots, self.plan, ms, [a for a, _ in chosen], [n for _, n in chosen], known)

    def _observe_confidence(self, batch: Batch, output: Mapping[int, StepOutput], alone: bool) -> None:
        confidence = self._confidence(self.plan)
        weighed = [s for s in batch.decoding if s.by_drafter and s.slot not in batch.errors]
        if confidence is None or not weighed:
            return
        times = output[weighed[-1].slot].times
        ms = 1e-3 * (times.upload + times.compute + times.read)
        verified = {s.slot: (len(s.offered), s.matched) for s in weighed}
        confidence.observe(verified, self.slots, ms if alone and len(weighed) == len(batch.decoding) else None)

    def _contended(self) -> bool:
        """Whether other processes took or freed cores during the step, so that its duration says nothing of costs."""
        condition, looks = self._runner.threads.condition, CORE_MONITOR.polls
        changed = self.ngram is not None and self.ngram.set_condition(condition, looks)
        if self.policy is not None and self.policy.condition_changed(condition, looks, self._acceptance):
            self._since_choice, changed = 0, True
        return changed


def skip_drafter_rows(policy: SpeculationPolicy | None, known: Callable[[bool], int]) -> bool:
    """Whether a lone sequence is computed without drafter rows, because speculation is disabled for it. ``known``: cached prompt chunks with such rows
    (True) or without: to recompute a prompt takes longer than to write them."""
    if policy is None:
        return False
    return policy.never_pays or (policy.should_disable() and known(True) <= known(False))


def _fill(seq: SequenceState, rows: int) -> Verify:
    """The last token in a step of ``rows`` rows; the others are padding."""
    return Verify([seq.history[-1]] * (rows - 1))


def _verify(drafts: list[int], rows: int) -> Verify:
    """``drafts``, padded to ``rows`` rows."""
    return Verify([*drafts, *[drafts[-1]] * (rows - 1 - len(drafts))])
