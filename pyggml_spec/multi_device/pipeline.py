"""Rounds of groups: each of two groups of sequences has a step under way, and the older one is waited for.

    launch(0)  launch(1)  land(0)  launch(0)  land(1)  launch(1)  ...
               `--------- a round ---------'

A group is launched again as soon as its sequences have what its step brought them: what is counted and learnt of that step, and what callers do with
its tokens, is done while both groups are under way. The device that the group's next step begins on waits for everything before that.
Which sequences those are is found out when somebody came, went or has read its prompt (``arrange``); until both steps have landed, nothing
changes. ``groups.py`` says before each round whether it is one of groups, and learns from each what it took; a step of all is a round as well.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..engine.batch import BatchItem, StepOutput
from ..engine.request import REFERENCE
from ..engine.runner import ModelRunner
from ..engine.stats import BatchStats
from ..engine.stream import Stream
from ..ggml.device import release_threads
from ..speculation.policy import SpeculationPolicy, SpeculationState, StepPlan
from .lanes import halves
from .pipeline_policy import GroupControl


class Steps(Protocol):
    """Who has the sequences, and does with a group's step what is done with each: the scheduler.

    ``_kind`` is that of the last decoding step; ``_decoding``, ``_sequences`` and ``_covered`` are who decodes, ``_changed`` whether
    somebody came or goes.
    """

    engine: ModelRunner
    policy: SpeculationPolicy | None
    _kind: StepPlan
    _covered: int
    _changed: bool
    _decoding: list[Stream]
    _sequences: list[SpeculationState | None]
    _stats: BatchStats

    def _choose(self) -> StepPlan: ...

    def _bring(self, work: Mapping[int, BatchItem], results: Mapping[int, StepOutput]) -> None: ...

    def _count(self, work: Mapping[int, BatchItem], results: Mapping[int, StepOutput], decoding: Sequence[Stream], began: int) -> Any: ...

    def _fail_all(self, error: BaseException) -> None: ...


class Flying(NamedTuple):
    """A group's step that is under way. ``began``: by the clock of nanoseconds."""

    group: int
    streams: list[Stream]
    work: Mapping[int, BatchItem]
    began: int


class Rounds:
    """Of a scheduler's sequences, where its engine has groups.

    Attributes:
        control: decides about each round; None where there are no groups.
        next: the kind of the next round, once it is chosen.
        flying: the steps under way, the older one first.
    """

    def __init__(self, steps: Steps, control: GroupControl | None) -> None:
        self.control, self._steps = control, steps
        self.next: StepPlan | None = None
        self.flying: deque[Flying] = deque()
        self._groups: tuple[list[Stream], ...] = ()  # that can decode beside each other now
        self._landed = self._ended = 0  # by the clock of nanoseconds; the latter 0 where the next round is not to be measured
        self._grouped = False  # the round that has ended last

    def arrange(self, apart: bool) -> None:
        """Who decodes is known anew. ``apart``: none of them has to share its steps with what the scheduler does beside them."""
        steps, self.next, self._groups = self._steps, None, ()
        if self.control is None or not apart or len(steps._decoding) < 2:
            return
        if any(_shares(s) for s in steps._decoding):
            return
        by_slot = {s.slot: s for s in steps._decoding}
        self._groups = tuple([by_slot[slot] for slot in slots] for slots in halves(by_slot, len(steps.engine.slots)))

    def step(self, meanwhile: Callable[[], object] | None) -> bool:
        """Waits for the older step under way. False if the next step is one of all, and nothing is under way."""
        if not self._groups:
            return False
        self._launch_due()
        if not self.flying:
            return False
        self.land(meanwhile)
        return True

    def _launch_due(self) -> None:
        """Launches each group that is not under way, unless the next round is one of all."""
        try:
            begins = not self.flying or self.flying[0].group == 1
            if begins and len(self.flying) < 2 and self._begins():
                self._launch(0)
            if len(self.flying) == 1 and self.flying[0].group == 0:
                self._launch(1)
        except BaseException as error:
            self._steps._fail_all(error)
            raise

    def land(self, meanwhile: Callable[[], object] | None = None, again: bool = True) -> None:
        """Waits for the older step under way, gives its sequences what it brought, and launches their next one, if the other group is under way
        still and nobody came or goes. ``again`` False: launches nothing."""
        steps, flying = self._steps, self.flying.popleft()
        try:
            if meanwhile is not None:
                meanwhile()
            results = steps.engine.land(flying.group)
            steps._bring(flying.work, results)
        except BaseException as error:
            steps._fail_all(error)
            raise
        if again and self.flying and not steps._changed:
            self._launch_due()
        steps._count(flying.work, results, flying.streams, max(flying.began, self._landed))
        steps._stats.grouped += 1
        self._landed = time.perf_counter_ns()
        self._teach(flying)

    def land_all(self) -> None:
        while self.flying:
            self.land(again=False)

    def whole(self) -> None:
        """A step of all that decode has ended: that was a round."""
        if self._groups:
            self._measure(False)

    def broken(self) -> None:
        """What came last was no round: the next one is not to be measured."""
        self._ended = 0

    def _begins(self) -> bool:
        """Whether a round of groups begins now. Not while an older step is under way whose blocks have another width: all blocks have one."""
        assert self.control is not None
        steps = self._steps
        if self.next is None:
            self.next = steps._choose()
        costs_known = steps.policy is None or steps.policy.calibrated(steps._covered)
        if not costs_known or not self.control.choose(steps._covered, self.next) or (self.flying and self.next != steps._kind):
            return False
        steps._kind, self.next = self.next, None
        if not self.flying:
            self._ended = 0
            release_threads()  # this thread's: the groups' have their own
            if steps._kind.tokens > 1:
                # one group may decode plainly, and the other one's blocks may be of another width than the last
                steps.engine.lay_out(steps._kind.verify_len)
        return True

    def _launch(self, group: int) -> None:
        steps, streams, began = self._steps, self._groups[group], time.perf_counter_ns()
        work = {s.slot: s._request.work(steps._kind) for s in streams}
        steps.engine.launch(group, work)
        self.flying.append(Flying(group, streams, work, began))

    def _measure(self, grouped: bool) -> tuple[bool, float]:
        """A round has ended. Whether another one of its kind came before it at once, and milliseconds since then: what callers do between steps
        is in it, because it can be done while a group's step is under way."""
        assert self.control is not None
        now, before = time.perf_counter_ns(), self._ended if grouped == self._grouped else 0
        self._ended, self._grouped = now, grouped
        if before:
            self.control.observe(self._steps._covered, self._steps._kind, grouped, 1e-6 * (now - before))
        return before > 0, 1e-6 * (now - before)

    def _teach(self, flying: Flying) -> None:
        """Tells width control and group control of a round that has ended, or of the half of one that no other half follows."""
        whole, alone = flying.group == 1, not self.flying and flying.group == 0
        if not whole and not alone:
            return
        steady, milliseconds = self._measure(True)
        if not whole:
            self._ended, steady = 0, False
        steps = self._steps
        if steps.policy is not None:
            at = [i for i, s in enumerate(steps._decoding) if whole or s in flying.streams]
            streams, sequences = [steps._decoding[i] for i in at], [steps._sequences[i] for i in at]
            steps.policy.observe(steps._covered, steps._kind, milliseconds, sequences, [s._matched for s in streams], steady)


def _shares(stream: Stream) -> bool:
    """Whether a sequence has to share steps: the host looks at its drafts or logits before it knows what comes next."""
    options = stream._request.options
    return stream._suffix is not None or options.drafts is not None or options.mode == REFERENCE or options.masked
