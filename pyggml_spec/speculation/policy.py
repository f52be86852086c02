"""Which method drafts how many tokens in the next step, or none: the plan with the most expected tokens per millisecond.

Expected tokens come from ``acceptance.py``, costs from ``cost_model.py``. A plan that is not expected to be the fastest runs only as far as an exploration
budget goes, which bounds the regret against plain decoding: each sequence has one of its own. Plans that would pay even if DOUBT more blocks were
rejected need no budget. Where sequences gain too little, speculation is disabled for the next ones, with longer waits between tries.
"""

import copy
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .acceptance import AcceptancePrior, AcceptanceTracker
from .confidence import Confidence
from .cost_model import CLAMP, CostModel


class StepPlan(NamedTuple):
    """What a decoding step does.

    Attributes:
        method: which drafter drafts; "" for none, or for the only one.
        draft_tokens: draft tokens per sequence; 0 is plain decoding.
        verify_len: rows of the verification graph per sequence, at least ``draft_tokens`` + 1.
    """

    method: str
    draft_tokens: int
    verify_len: int

    @classmethod
    def of(cls, method: str, tokens: int, verify_len: int = 0) -> "StepPlan":
        """A plan by the tokens that a sequence gets at most, one more than its draft tokens."""
        return cls(method, tokens - 1, verify_len or tokens)

    @property
    def tokens(self) -> int:
        """Tokens that a sequence gets at most."""
        return self.draft_tokens + 1

    @property
    def label(self) -> str:
        """For messages."""
        if not self.draft_tokens:
            return "plain decoding"
        return f"width {self.tokens}" + (f" in {self.verify_len} rows" if self.verify_len > self.tokens else "")


PLAIN_STEP = StepPlan("", 0, 1)
NEVER_PAYS = "plain decoding: no block width would be faster here even if every draft were accepted"

MARGIN = 1.03  # another plan has to be faster by this factor to replace the one in use
DOUBT = 2.0  # rejected blocks that are added to what was observed, for plans that run without budget
USUAL_TOKENS, SHORT_TOKENS = 192, 48  # of a sequence whose length is not limited: usually, and at least
BUDGET_SHARE = 0.02  # of the tokens that a sequence may get: its exploration budget, in plain steps
MOST_BUDGET = 6.0  # plain steps of that at most, and half of what a budget grows to
BUDGET_RATE = 0.005  # share of the time that is added to the budget
MOST_REGRET = 0.05  # share of its time that a sequence may lose without budget, and that sequences have to gain for speculation to stay on
MOST_WAIT = 8  # sequences in a row without speculation, at most; each try that gains nothing doubles the wait
FIRST_PLAIN, FIRST_BLOCKS = (
    6,
    3,
)  # steps of plain decoding before the first block, and of a plan before another one, where costs are estimates
ROW_COST = {"cpu": 0.15, "gpu": 0.05}  # of a further row, in plain steps: an estimate
HOPED = 0.9  # acceptance of draft tokens that is hoped for of a plan that is explored
LEAST_MS = 1.0  # of a plain step: where it takes less, first blocks count as what they are expected to take
CATCH_UP = "catch up"  # key of the cost that blocks after plain steps add


def chain_plans(method: str, rows: Sequence[int], tokens: Sequence[int] = (2, 3, 4, 5, 6, 8, 12, 16)) -> list[StepPlan]:
    """Plans of a drafter whose every draft token takes a pass of its own: each number of ``tokens`` in the narrowest graph that holds it, and in the next
    one where that has no more than twice the rows, because it may cost less."""
    out = []
    for n in (n for n in tokens if n <= max(rows)):
        fitting = [r for r in sorted(rows) if r >= n][:2]
        out += [StepPlan.of(method, n, r) for r in fitting if r <= 2 * n or r == fitting[0]]
    return out


def estimate(plans: Iterable[StepPlan], row_cost: float, shares: Mapping[str, float], chained: Container[str]) -> dict[StepPlan, float]:
    """Estimated costs, in plain steps. ``shares``: matrix bytes of each method's drafter by those of the target; ``chained``: methods with a pass for each
    draft token."""
    out = {PLAIN_STEP: 1.0}
    for plan in plans:
        rows, share = 1 + row_cost * (plan.verify_len - 1), shares.get(plan.method, 0.0)
        out[plan] = rows + share * (plan.draft_tokens if plan.method in chained else rows)
    return out


def with_known(
    estimates: Mapping[StepPlan, float], known: Mapping[StepPlan, float], told: Container[StepPlan] = ()
) -> dict[StepPlan, float]:
    """Known costs, and estimates in proportion to the nearest known one, as the machine may have been busy: at most CLAMP times the estimate, and more than
    plain decoding by at least 1 / CLAMP of what is estimated. Those that this session's steps have ``told`` are as they are, and left out where they do
    not pay. Without plain decoding nothing is known."""
    if PLAIN_STEP not in known:
        return dict(estimates)
    unit, seen, out = known[PLAIN_STEP], [plan for plan in known if plan in estimates], dict[StepPlan, float]()
    for plan, ms in estimates.items():
        near = min(seen, key=lambda p: (p != plan, p.method != plan.method, p.method != "", abs(p.verify_len - plan.verify_len)))
        cost = ms * known[near] / estimates[near]
        if plan not in told:
            out[plan] = min(max(cost, unit * (1 + (ms - 1) / CLAMP)), unit * ms * CLAMP)
        elif plan == PLAIN_STEP or plan.tokens * unit > cost:
            out[plan] = cost
    return out


def worth_keeping(costs: Mapping[StepPlan, float]) -> dict[StepPlan, float]:
    """Without plans for which one of the same method has as many draft tokens or more and costs no more."""
    return {
        plan: ms
        for plan, ms in costs.items()
        if not any(
            other.method == plan.method and other != plan and other.tokens >= plan.tokens and (cost, -other.tokens) < (ms, -plan.tokens)
            for other, cost in costs.items()
        )
    }


def useful_widths(costs: Mapping[int, float]) -> list[int]:
    """Rows, ascending, that no wider step undercuts, and whose full acceptance would beat plain decoding."""
    return [
        rows
        for rows in sorted(costs)
        if rows == 1 or (rows * costs[1] > costs[rows] and not any(other > rows and costs[other] <= costs[rows] for other in costs))
    ]


class SpeculationState:
    """Of one sequence: its trackers, and its exploration budget in plain steps.

    ``disabled``: decoded plainly to its end. ``tokens``: that it may get at most.
    """

    def __init__(self, trackers: dict[str, AcceptanceTracker], disabled: bool = False, tokens: int | None = None) -> None:
        self.acceptance, self.disabled = trackers, disabled
        self.budget = self.least_budget = min(BUDGET_SHARE * (tokens or USUAL_TOKENS), MOST_BUDGET)
        self.least_tokens = min(tokens or SHORT_TOKENS, USUAL_TOKENS)
        self.won = self.time = 0.0  # plain steps that its plans have saved, and that it has taken

    @property
    def may_lose(self) -> float:
        """Plain steps, at most: MOST_REGRET of what it has taken, or will if it is as long as it may be or, without a limit, short."""
        return self.won + MOST_REGRET * max(self.time, self.least_tokens)


@dataclass
class _Phase:
    """Of a number of slots."""

    plan: StepPlan | None = None  # in use
    plain: int = 0  # steps since the last block
    look: int = 0  # how many of them there are when blocks are looked at again, where plain decoding is in use
    weigh: int = 0  # the same of blocks that no budget pays for
    blocks: int = 0  # since the last plain step
    probing: bool = False


class SpeculationPolicy:
    """``plans``: of all methods; ``costs``: milliseconds by plan for one slot, None to learn them from steps; ``relative``: in a unit of their own, which
    steps tell (``estimate`` makes such); ``told``: they are of earlier steps, so that blocks may come first.

    Attributes:
        undisturbed: ``learnt`` after the last sequence during which no other process used the processor.
        priors: by method, and by method and class of sampling ("draft-mtp temperature 0.75").
        confidence: by method, of drafters that rate their draft tokens.
    """

    def __init__(
        self, plans: Iterable[StepPlan], costs: Mapping[StepPlan, float] | None = None, relative: bool = False, told: bool = False
    ) -> None:
        plain, plans = costs[PLAIN_STEP] if costs else 0.0, list(plans)
        drafting = sorted(
            {plan for plan in plans if plan.draft_tokens and (relative or not costs or plan.tokens * plain > costs.get(plan, 0.0))}
        )
        self.plans = [PLAIN_STEP, *drafting]
        self.methods = list(dict.fromkeys(plan.method for plan in drafting))
        self.costs = CostModel({(1, plan): costs[plan] for plan in self.plans} if costs else {}, relative)
        self._told, self._relative, self._first_plain = told, relative, FIRST_PLAIN if relative and not told else 0
        most: dict[str, int] = {}  # draft tokens by method
        for plan in plans:
            if plan.draft_tokens:
                most[plan.method] = max(plan.draft_tokens, most.get(plan.method, 0))
        self._most = most
        self.priors = {method: AcceptancePrior(n) for method, n in most.items()}
        self.confidence: dict[str, Confidence] = {}
        self.changes, self.undisturbed = 0, dict[StepPlan, float]()
        self._built, self._last_build_ms = set[tuple[int, StepPlan]](), 0.0
        self._margin = MARGIN if len(self.methods) < 2 else 1.0
        self._phases: dict[int, _Phase] = {}
        self._calibrated: set[int] = {1} if costs else set()
        self._gain, self._tried, self._wait, self._waited = 0.0, 0.0, 1, 0
        self._saved = 0.0  # plain steps that earlier sequences might have lost, and have not
        self._last: SpeculationState | None = None

    @classmethod
    def measured_for(cls, method: str, costs: Mapping[int, float], others: Mapping[StepPlan, float] | None = None) -> "SpeculationPolicy":
        """Of one drafter, from milliseconds by tokens, 1 being plain decoding; ``others``: of further plans."""
        plans = {StepPlan.of(method, tokens) if tokens > 1 else PLAIN_STEP: ms for tokens, ms in costs.items()} | dict(others or {})
        return cls(plans, plans)

    # -- sequences

    def should_disable(self) -> bool:
        """Whether the next sequence is better off without speculation, and without what drafters need of its prompt."""
        self._learn_gain()
        if len(self.plans) == 1 or 1 not in self._calibrated or (self._relative and not self.costs.told((1, PLAIN_STEP))):
            return False
        if not self._tried or self._gain / self._tried >= MOST_REGRET or self._waited >= self._wait:
            return False
        speeds = self._speeds(1, [self._new()])
        return max(speeds[plan] for plan in self.plans[1:]) < speeds[PLAIN_STEP]

    def _learn_gain(self) -> None:
        last, self._last = self._last, None
        if last is None or not last.time:
            return
        self._saved = max(0.0, self._saved + MOST_REGRET * last.time + min(last.won, 0.0))
        gain = max(0.0, last.won) / last.time
        self._gain, self._tried = 0.8 * self._gain + gain, 0.8 * self._tried + 1
        if self._gain / self._tried >= MOST_REGRET:
            self._wait = 1
        elif self._waited:
            self._wait = min(2 * self._wait, MOST_WAIT)
        self._waited = 0

    def load_prior(self, name: str, known: AcceptancePrior) -> None:
        """Continues from ``known``, of another policy's ``priors``; those of other methods are left out."""
        if (positions := self._most.get(name.partition(" ")[0])) is not None:
            self.priors.setdefault(name, AcceptancePrior(positions)).load(known)

    def begin(self, disabled: bool = False, tokens: int | None = None, sampling: str = "") -> SpeculationState:
        """A sequence of at most so many ``tokens``; ``disabled``: without speculation, because it ``should_disable`` when it was admitted.

        ``sampling``: its class, as of ``Sampling.temperature_class``.
        """
        self._learn_gain()
        self._waited += disabled
        state = self._new(disabled, tokens, sampling)
        if 1 in self._phases:
            self._phases[1] = _Phase()
        if 1 in self._calibrated and not disabled and len(self.plans) > 1:
            cheapest = (min(self.cost(1, plan) for plan in self.plans[1:]) + self._catch_up_ms(1)) / self.costs[1, PLAIN_STEP] - 1
            if cheapest < 1.5 * BUDGET_SHARE * (tokens or USUAL_TOKENS):  # or else no block would ever be tried
                state.budget = state.least_budget = max(state.budget, cheapest)
            self._last = state
        return state

    def _new(self, disabled: bool = False, tokens: int | None = None, sampling: str = "") -> SpeculationState:
        priors = {m: self.priors.setdefault(f"{m} {sampling}".rstrip(), AcceptancePrior(n)) for m, n in self._most.items()}
        return SpeculationState({m: AcceptanceTracker(prior) for m, prior in priors.items()}, disabled, tokens)

    # -- a step

    def choose(self, slots: int, states: Sequence[SpeculationState | None]) -> StepPlan:
        """The plan of the next step of these sequences, in a graph of so many slots; None is a sequence that never drafts."""
        drafting = [s for s in states if s is not None]
        if not drafting or len(self.plans) == 1 or any(s.disabled for s in drafting):
            return PLAIN_STEP
        if self._first_plain and slots == 1 and self.costs.steps((1, PLAIN_STEP)) < self._first_plain:
            return PLAIN_STEP
        if not self.calibrated(slots):
            return next(plan for plan in reversed(self.plans) if not self.costs.known((slots, plan)))
        phase = self._phases.setdefault(slots, _Phase())
        phase.probing = False
        if phase.plan == PLAIN_STEP and phase.plain < phase.look:  # saves host time
            return PLAIN_STEP
        plain, late = self.costs[slots, PLAIN_STEP], self._catch_up_ms(slots) if phase.plain else 0.0
        budget = plain * (1 + sum(s.budget for s in drafting) / len(drafting))
        affordable = [plan for plan in self.plans[1:] if self.cost(slots, plan) + late + self._build_ms(slots, plan) <= budget]
        if phase.plan == PLAIN_STEP and not affordable and phase.plain < phase.weigh:
            phase.look = phase.plain + 4  # not a multiple: steps may be told together
            return PLAIN_STEP
        speeds = self._speeds(slots, states)
        if phase.plan is None:
            phase.plan = max(speeds, key=speeds.__getitem__)
        if phase.plan not in affordable:
            affordable += [plan for plan in self._safe(slots, states, late) if plan not in affordable]
        if self._relative and slots == 1:
            if phase.plan not in affordable and self._is_told(phase.plan) and speeds[phase.plan] > MARGIN * speeds[PLAIN_STEP]:
                affordable.append(phase.plan)
            affordable = [plan for plan in affordable if self._may_lose(drafting, plan, late)]
        if not affordable:
            phase.look, phase.weigh = phase.plain + 4, phase.plain + 16
            return PLAIN_STEP
        if phase.plan == PLAIN_STEP:
            phase.probing = True
            return self._probe(slots, affordable)
        return phase.plan if phase.plan in affordable else max((PLAIN_STEP, *affordable), key=speeds.__getitem__)

    def _may_lose(self, drafting: Sequence[SpeculationState], plan: StepPlan, late: float) -> bool:
        """Whether a rejected block of this plan leaves the loss within MOST_REGRET. Before any block of this method, in this or an earlier session,
        costs are estimates, and blocks may take CLAMP times as long with all that comes with them: texts that are too short for that save up for the cheapest of them."""
        told = self._any_told(plan.method)
        loss = (self.cost(1, plan) + late if told else CLAMP * self.cost(1, plan)) / self.costs[1, PLAIN_STEP] - 1
        if not told and loss > MOST_REGRET * min(s.least_tokens for s in drafting):
            loss -= self._saved * (self.cost(1, plan) <= min(self.cost(1, other) for other in self.plans if other.method == plan.method))
        return loss <= min(s.may_lose for s in drafting)

    def _any_told(self, method: str) -> bool:
        return self._told or any(self.costs.told((1, plan)) for plan in self.plans if plan.method == method)

    def _is_told(self, plan: StepPlan) -> bool:
        """Whether its cost was told by steps of this session, or of earlier ones."""
        return self._told or self.costs.told((1, plan))

    def _build_ms(self, slots: int, plan: StepPlan) -> float:
        """Milliseconds in which the graph of a plan is built that has not run yet, by what the last one took."""
        return 0.0 if (slots, plan) in self._built else self._last_build_ms

    def _safe(self, slots: int, states: Sequence[SpeculationState | None], late: float) -> list[StepPlan]:
        """Plans that would be faster than plain decoding by what was observed alone, with DOUBT more blocks rejected."""
        if any(s is not None and s.may_lose < 0 for s in states):
            return []
        plain, curves = self.costs[slots, PLAIN_STEP], {}
        for method in self.methods:
            each = [list(accumulate(s.acceptance[method].survival(0.0, DOUBT), initial=1.0)) for s in states if s is not None]
            curves[method] = [len(states) - len(each) + sum(column) for column in zip(*each)]
        return [
            p
            for p in self.plans[1:]
            if curves[p.method][p.draft_tokens] * plain > len(states) * (self.cost(slots, p) + (late + self._build_ms(slots, p)) / 4)
        ]

    def _probe(self, slots: int, affordable: Sequence[StepPlan]) -> StepPlan:
        """The plan that is best where a drafter has become good; methods take turns."""
        method = next(m for m in self.methods if any(plan.method == m for plan in affordable))
        self.methods.remove(method)
        self.methods.append(method)
        hoped = AcceptanceTracker(AcceptancePrior(self._most[method])).tokens()
        return max((p for p in affordable if p.method == method), key=lambda p: hoped[p.draft_tokens] / self.cost(slots, p))

    def observe(
        self, slots: int, plan: StepPlan, ms: float, states: Sequence[SpeculationState | None], matched: Sequence[int],
        alone: bool = True, catch_up: float = 0.0, built: float = 0.0, steps: int = 1,
    ) -> None:  # fmt: skip
        """A step, its milliseconds, and the accepted draft tokens of each sequence.

        Args:
            alone: the time is that of the plan alone, without a prompt or constrained tokens.
            catch_up: milliseconds of it in which a drafter caught up with plain steps.
            built: further milliseconds, in which its graph was built.
            steps: of plain decoding, so many in a row that took ``ms`` on average.
        """
        phase = self._phases.setdefault(slots, _Phase())
        if alone:
            self.costs.observe(
                (slots, plan), ms - catch_up, cold=plan != PLAIN_STEP and not phase.blocks and slots in self._calibrated, steps=steps
            )
        drafting = [(s, n) for s, n in zip(states, matched) if s is not None and not s.disabled]
        for s, n in drafting:
            for method, tracker in s.acceptance.items():
                tracker.observe(plan.tokens, n) if method == plan.method else tracker.pause(steps)
            if plan.method:
                s.acceptance[plan.method].prior.observe(plan.tokens, n)
        if not drafting or phase.plan is None:
            return
        cost = spent = 1.0
        if plan.draft_tokens:
            late, plain = 0.0, self.costs[slots, PLAIN_STEP]
            if (slots, plan) not in self._built:
                self._built.add((slots, plan))
                self._last_build_ms = built
            if phase.plain:
                whole = self.costs[slots, plan]
                if alone:
                    self.costs.learn((slots, CATCH_UP), min(max(ms - whole, catch_up), 2 * whole))
                late = max(self._catch_up_ms(slots), min(catch_up, 2 * whole))
            cost = spent = (self.cost(slots, plan) + late) / plain
            if alone and self._relative and plain >= LEAST_MS and not self.costs.told((1, plan)):  # costs are of no step of this session
                known = self.cost(slots, plan)
                cost = (min(max(ms - catch_up, known / CLAMP), CLAMP * known) + late) / plain
                spent = cost + min(built, known) / plain  # of small models a graph takes many steps to build, but once
        for s, n in drafting:
            s.won += 1 + n - spent
            s.time += steps * spent
            s.budget = min(max(0.0, s.budget + steps + n - steps * (1 - BUDGET_RATE) * cost), 2 * MOST_BUDGET)
        phase.plain, phase.blocks = (0, phase.blocks + 1) if plan.draft_tokens else (phase.plain + steps, 0)
        if plan.draft_tokens:
            phase.look = phase.weigh = 0
            speeds = self._speeds(slots, states)
            best = max(speeds, key=speeds.__getitem__)
            learning = self._relative and slots == 1 and self.costs.steps((1, phase.plan)) < FIRST_BLOCKS
            if best != phase.plan and (best == PLAIN_STEP or not learning) and speeds[best] > self._margin * speeds[phase.plan]:
                self.changes += 1
                phase.plan = best

    @contextmanager
    def not_learning(self) -> Iterator[None]:
        """Steps in this ``with`` block are no text's: costs are what they were before."""
        kept = copy.deepcopy(self.costs), dict(self.undisturbed)
        try:
            yield
        finally:
            self.costs, self.undisturbed = kept

    # -- n-gram drafts

    def expected_tokens_each(self, slots: int, plan: StepPlan, states: Sequence[SpeculationState | None]) -> list[float]:
        """Tokens that each sequence is expected to get; of a plan that is explored, as if most of its draft tokens were accepted."""
        phase = self._phases.get(slots)
        if phase is not None and phase.probing:
            hoped = AcceptanceTracker(AcceptancePrior(plan.draft_tokens, HOPED)).tokens()[-1]
            return [hoped if s is not None else 1.0 for s in states]
        return [s.acceptance[plan.method].tokens()[plan.draft_tokens] if s is not None else 1.0 for s in states]

    def fall_back(self, slots: int, states: Sequence[SpeculationState | None]) -> bool:
        """Whether the plan in use, which n-gram drafts displace, is not faster than plain decoding either; then that is in use from now on."""
        phase = self._phases.get(slots)
        if phase is None or phase.plan is None or phase.probing:
            return False
        speeds = self._speeds(slots, states)
        if phase.plan != PLAIN_STEP and speeds[phase.plan] > MARGIN * speeds[PLAIN_STEP]:
            return False
        phase.plan = PLAIN_STEP
        return True

    # -- tokens and costs

    def _speeds(self, slots: int, states: Sequence[SpeculationState | None]) -> dict[StepPlan, float]:
        """Expected tokens per millisecond."""
        drafting, speeds = [s for s in states if s is not None], {PLAIN_STEP: len(states) / self.costs[slots, PLAIN_STEP]}
        plain = len(states) - len(drafting)
        for method in self._most:
            curves = [s.acceptance[method].tokens() for s in drafting]
            sums = curves[0] if len(curves) == 1 else [sum(column) for column in zip(*curves)]
            for plan in self.plans:
                if plan.method == method:
                    speeds[plan] = (plain + sums[plan.draft_tokens]) / self.cost(slots, plan)
        return speeds

    def tokens_per_ms(self, slots: int, plan: StepPlan, states: Sequence[SpeculationState | None]) -> float:
        """Expected of steps of this plan, or of plain ones where those give more."""
        speeds = self._speeds(slots, states) if slots in self._calibrated else {}
        return max(speeds.get(plan, 0.0), speeds.get(PLAIN_STEP, 0.0))

    def cost(self, slots: int, plan: StepPlan) -> float:
        """Milliseconds that a step is expected to take; fewer where its drafter's confidence cuts blocks."""
        ms, confidence = self.costs[slots, plan], self.confidence.get(plan.method)
        if confidence is None:
            return ms
        return max(
            ms - confidence.saved_ms(plan.tokens, slots), self.costs.get((slots, PLAIN_STEP)) or 0.0
        )  # plain steps are measured last

    def _catch_up_ms(self, slots: int) -> float:
        """Milliseconds that a block after plain steps takes longer."""
        return self.costs.get((slots, CATCH_UP)) or 0.0

    def condition_changed(self, condition: Hashable, looks: int, states: Iterable[SpeculationState | None]) -> bool:
        """Whether the condition of the machine is another one than before the last step; then sequences explore again. ``looks``: as of ``CostModel``."""
        for confidence in self.confidence.values():
            confidence.costs.set_condition(condition, looks)
        if not self.costs.set_condition(condition, looks):
            return False
        self._phases = {}
        self._calibrated = {n for n in self._calibrated if all((n, plan) in self.costs for plan in self.plans)}  # under this condition
        for s in states:
            if s is not None:
                s.budget, s.won = max(s.budget, s.least_budget), max(s.won, 0.0)
        return True

    def calibrated(self, slots: int) -> bool:
        """Whether the cost of every plan is known with this number of slots, or lies between those of fewer and of more."""
        if slots in self._calibrated:
            return True
        if not all(self.costs.known((slots, plan)) for plan in self.plans):
            fewer, more = (
                max((n for n in self._calibrated if n < slots), default=0),
                min((n for n in self._calibrated if n > slots), default=0),
            )
            if not fewer or not more:
                return False
            share = (slots - fewer) / (more - fewer)
            for plan in self.plans:
                self.costs.guess((slots, plan), (1 - share) * self.costs[fewer, plan] + share * self.costs[more, plan])
        self._calibrated.add(slots)
        return True

    # -- for messages

    @property
    def worth_trying(self) -> list[StepPlan]:
        """Plans that could be faster than plain decoding by what steps of one slot are expected to cost, and plain decoding."""
        costs = {plan: self.costs.get((1, plan), 0.0) for plan in self.plans}
        kept = worth_keeping({plan: ms for plan, ms in costs.items() if plan.draft_tokens and plan.tokens * costs[PLAIN_STEP] > ms})
        return [PLAIN_STEP, *kept]

    @property
    def learnt(self) -> dict[StepPlan, float]:
        """Milliseconds of steps of one slot, by plan, as far as steps have told them; with those of plain steps, if any are told."""
        told = {plan: ms for plan, ms in self.costs.learnt().items() if isinstance(plan, StepPlan)}
        return {PLAIN_STEP: self.costs[1, PLAIN_STEP], **told} if told and (1, PLAIN_STEP) in self.costs else {}

    def plain_ms(self, slots: int) -> float | None:
        """Milliseconds of a plain step of so many slots, once steps have told them."""
        return self.costs.get((slots, PLAIN_STEP)) if self.costs.learnt(slots) else None

    @property
    def never_pays(self) -> bool:
        """Whether no plan could be faster than plain decoding, even if every draft token were accepted."""
        return len(self.plans) == 1

    @property
    def useful(self) -> list[int]:
        """``useful_widths`` by what steps of one slot cost now; empty where that is not known."""
        if 1 not in self._calibrated:
            return []
        least: dict[int, float] = {}
        for plan in self.plans:
            if plan.verify_len == plan.tokens:
                least[plan.tokens] = min(self.costs[1, plan], least.get(plan.tokens, float("inf")))
        return useful_widths(least)

    def reason(self, state: SpeculationState) -> str:
        """Why the last step of a sequence alone was what it was, in one sentence."""
        if self.never_pays:
            return NEVER_PAYS
        speeds = {plan: 1000 * speed for plan, speed in self._speeds(1, [state]).items()}
        phase = self._phases.get(1)
        plain = state.disabled or (phase is not None and (phase.plan is None or phase.plain > 0))  # the last step, but for n-gram drafts
        mine = PLAIN_STEP if plain else (phase and phase.plan) or max(speeds, key=speeds.__getitem__)
        best = max((plan for plan in speeds if plan != mine), key=speeds.__getitem__)
        out = f"{self._label(mine)}: {speeds[mine]:.0f} tok/s expected, {self._label(best)} would give {speeds[best]:.0f}"
        if mine != PLAIN_STEP:
            return out
        tracker = state.acceptance[best.method]
        share = f"{100 * tracker.survival()[0]:.0f} %"
        known = f"first draft accepted {share}" if tracker.prior.tries[0] else f"no draft yet, {share} of the first ones assumed right"
        of_earlier = ", costs are of earlier sessions" * (self._told and not self.costs.told((1, best)))
        return f"{out} ({known}{of_earlier})" + (self._why_plain(state, best.method) if plain and speeds[best] > speeds[mine] else "")

    def _why_plain(self, state: SpeculationState, method: str) -> str:
        """Why a lone sequence is decoded plainly although blocks of this method are expected to be faster."""
        if state.disabled:
            return "; earlier texts gained too little"
        if self._phases[1].plan is None:
            return "; the first steps of a session are plain"
        first = min((plan for plan in self.plans if plan.method == method), key=lambda plan: self.cost(1, plan))
        if self._relative and not self._any_told(method) and not self._may_lose([state], first, 0.0):
            return "; until a block's cost is known, a text has to be longer to try one"
        return "; a rejected block would cost more than this text may lose"

    def _label(self, plan: StepPlan) -> str:
        return f"{plan.label} of {plan.method}" if len(self.methods) > 1 and plan.method else plan.label
