"""Pipelined decoding over several devices: each of two groups of sequences has a step under way, and the older step is waited for.

    launch(0)  launch(1)  land(0)  launch(0)  land(1)  launch(1)  ...
               `--------- a round ---------'

A group is launched again as soon as its sequences have their tokens; what callers do with these takes place while both groups compute. When sequences
come or go, both steps land first. ``PipelinePolicy`` decides before each round whether it is pipelined or one step of all, and learns from its duration:
half of the rows can take nearly as long as all of them, because every step reads all weights. So both kinds of rounds run TRIES times, and the slower
one again every RETRY_EVERY rounds.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from ..engine.batch import Batch
from ..engine.engine import Engine
from ..engine.runner import ModelRunner
from ..engine.sequence import REFERENCE, Sequence
from ..ggml.cores import default_threads
from ..ggml.device import release_threads
from ..speculation import verify
from ..speculation.policy import StepPlan
from .devices import MultiDevice, halves

WARMUP = 3  # rounds of new graphs: built, captured by ggml-cuda, and first pipelined
TRIES = WARMUP + 5
RETRY_EVERY, RETRIES = 500, 3  # rounds
MIN_GAIN = 1.02
RATE = 0.1  # weight of one round in the moving average


@dataclass
class _Rounds:
    """Of a number of slots and a plan, by kind of round (pipelined or not): milliseconds, and rounds so far; the kind in use."""

    cost: dict[bool, float] = field(default_factory=dict)
    tries: Counter = field(default_factory=Counter)
    pipelined: bool = False
    since: int = 0  # rounds since the other kind ran


class PipelinePolicy:
    """``pinned``: the kind of every round; None measures."""

    def __init__(self, pinned: bool | None = None) -> None:
        self.pinned = pinned
        self._rounds: dict[tuple[int, StepPlan], _Rounds] = {}

    def choose(self, slots: int, kind: StepPlan) -> bool:
        """Whether the next round of this plan, in graphs that cover so many slots, is pipelined."""
        if self.pinned is not None:
            return self.pinned
        use = self._rounds.setdefault((slots, kind), _Rounds())
        for pipelined in (False, True):
            if use.tries[pipelined] < TRIES:
                return pipelined
        use.since += 1
        if use.since > RETRY_EVERY:
            use.since, use.tries[not use.pipelined] = 0, TRIES - RETRIES
            use.cost.pop(not use.pipelined, None)
            return not use.pipelined
        return use.pipelined

    def observe(self, slots: int, kind: StepPlan, pipelined: bool, milliseconds: float) -> None:
        """A round took so long, a pipelined one from the end of the round before."""
        use = self._rounds.setdefault((slots, kind), _Rounds())
        use.tries[pipelined] += 1
        if use.tries[pipelined] <= WARMUP:
            return
        known = use.cost.get(pipelined)
        if known is None:
            use.cost[pipelined] = milliseconds
        elif use.tries[pipelined] <= TRIES:
            use.cost[pipelined] = min(known, milliseconds)
        else:
            use.cost[pipelined] = known + RATE * (min(milliseconds, 2 * known) - known)
        mine, other = use.cost.get(use.pipelined), use.cost.get(not use.pipelined)
        if mine is not None and other is not None and other * MIN_GAIN < mine and use.tries[not use.pipelined] >= TRIES:
            use.pipelined = not use.pipelined


def policy_of(runner: Any, groups: int | None) -> PipelinePolicy | None:
    """Of a runner with groups. ``groups``: 1 for none, 2 for always; None measures, unless CPU threads of the devices would share cores: a step of all
    computes on one device at a time, with all cores."""
    if not runner.devices.groups or groups == 1:
        return None
    threads = [segment.backend.threads for segment in runner.resources.segments if segment.backend.device.kind == "cpu"]
    if groups is None and len(threads) > 1 and sum(threads) > default_threads():
        return None
    return PipelinePolicy(True if groups is not None else None)


class PipelinedEngine(Engine):
    """An engine whose runner has groups of slots.

    Args:
        groups: 2: pipelined whenever possible; 1: never; None: where that is measured to be faster.

    Attributes:
        flying: (group, batch) of steps under way, the older one first.
    """

    def __init__(self, runner: ModelRunner, *args: Any, groups: int | None = None, **options: Any) -> None:
        super().__init__(runner, *args, **options)
        self._pipeline = policy_of(runner, groups)
        self._devices = cast(MultiDevice, runner.devices)
        self.flying: deque[tuple[int, Batch]] = deque()
        self._decoding: list[Sequence] = []  # of the last regrouping
        self._groups: tuple[list[Sequence], ...] = ()
        self._next: StepPlan | None = None  # plan of the next round
        self._landed = self._round_end = 0  # nanoseconds; the latter 0 where the next round is not to be measured
        self._pipelined = False  # the last round

    def _step(self, meanwhile: Callable[[], object] | None = None, batch: Batch | None = None) -> bool:
        if self._pipeline is None:
            return super()._step(meanwhile)
        try:
            if self.flying and self.scheduler.changed:
                self._land(meanwhile)
                return True
            batch = self.scheduler.next_batch()
            if batch.decoding is not self._decoding:
                self._regroup(batch.decoding)
            if self._groups:
                self._launch_due()
                if self.flying:
                    self._land(meanwhile)
                    return True
        except BaseException as error:
            self._fail_all(error)
            raise
        batch.plan, self._next = self._next, None
        ran = super()._step(meanwhile, batch)
        if not batch.decoding:
            self._round_end = 0
        elif self._groups:
            self._measure(False)
        return ran

    def _fail_all(self, error: BaseException) -> None:
        self.flying.clear()
        super()._fail_all(error)

    def _settle(self) -> None:
        try:
            while self.flying:
                self._land(again=False)
        except BaseException as error:
            self._fail_all(error)
            raise

    def _regroup(self, decoding: list[Sequence]) -> None:
        self._decoding, self._groups, self._next = decoding, (), None
        # of these the host reads drafts or logits before it knows the next step
        asks = any(
            s.ngram is not None or s.options.drafts is not None or s.options.mode == REFERENCE or s.options.constrained for s in decoding
        )
        if self.scheduler.undisturbed and len(decoding) > 1 and not asks:
            by_slot = {s.slot: s for s in decoding}
            self._groups = tuple([by_slot[slot] for slot in slots] for slots in halves(by_slot, len(self.runner.slots)))

    def _launch_due(self) -> None:
        """Launches each group that is not under way, unless the next round is one step of all."""
        first = not self.flying or self.flying[0][0] == 1
        if first and len(self.flying) < 2 and self._begins():
            self._launch(0)
        if len(self.flying) == 1 and self.flying[0][0] == 0:
            self._launch(1)

    def _begins(self) -> bool:
        """Whether a pipelined round begins now. All blocks have one width: not while a step of another one is under way."""
        assert self._pipeline is not None
        planner = self.planner
        if self._next is None:
            self._next = planner.next_plan()
        if not planner.settled or not self._pipeline.choose(planner.slots, self._next) or (self.flying and self._next != planner.plan):
            return False
        planner.plan, self._next = self._next, None
        if not self.flying:
            self._round_end = 0
            release_threads()  # of this thread: groups have their own
            if planner.plan.tokens > 1:
                self._devices.lay_out(planner.plan.verify_len)
        return True

    def _launch(self, group: int) -> None:
        sequences, plan = self._groups[group], self.planner.plan
        batch = Batch({}, plan, sequences, sequences={s.slot: s for s in sequences})
        batch.began = time.perf_counter_ns()
        batch.items = {s.slot: self.planner.item(s, plan) for s in sequences}
        self._devices.launch(group, batch.items)
        self.flying.append((group, batch))

    def _land(self, meanwhile: Callable[[], object] | None = None, again: bool = True) -> None:
        """Waits for the older step, hands its sequences their tokens, and launches their next one. ``again`` False: launches none."""
        group, batch = self.flying.popleft()
        if meanwhile is not None:
            meanwhile()
        output = self._devices.land(group)
        batch.began = max(batch.began, self._landed)
        accepted = verify.accept(batch, output, self.runner)
        self.runner.commit(batch, accepted)
        self.scheduler.finish(batch, accepted, output)
        if again and self.flying and not self.scheduler.changed:
            self._launch_due()
        self.scheduler.stats.pipelined += 1
        self._landed = time.perf_counter_ns()
        self._observe(group, batch)

    def _observe(self, group: int, batch: Batch) -> None:
        """The second step ends a round. A first step that no second one follows has brought its own sequences tokens."""
        if group == 1:
            steady, milliseconds = self._measure(True)
            self.planner.observe_round(self._decoding, milliseconds, steady)
        elif not self.flying:
            _, milliseconds = self._measure(True)
            self._round_end = 0
            self.planner.observe_round(batch.decoding, milliseconds, False)

    def _measure(self, pipelined: bool) -> tuple[bool, float]:
        """A round has ended: whether one of the same kind came right before it, and milliseconds since then, the callers' time included: pipelined
        steps go on meanwhile."""
        assert self._pipeline is not None
        now, before = time.perf_counter_ns(), self._round_end if pipelined == self._pipelined else 0
        self._round_end, self._pipelined = now, pipelined
        if before:
            self._pipeline.observe(self.planner.slots, self.planner.plan, pipelined, 1e-6 * (now - before))
        return before > 0, 1e-6 * (now - before)
