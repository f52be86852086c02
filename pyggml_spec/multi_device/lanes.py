"""Two micro-batches in flight together: while one is on the second device, the other is on the first.

    launch(A)  launch(B)  land(A)  launch(A)  land(B)  launch(B)  ...

A micro-batch runs in a lane: a thread, a step buffer and graphs of its own (csrc/step_lanes.c). It covers the halves of an aligned range of slots, so
that no step writes what the other one reads. Half of the rows have to take about half the time for this to pay (``pipeline_policy``).
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..cache.slots import covering
from ..engine.batch import Batch, StepOutput
from ..engine.devices import GROUPS
from ..engine.graph_cache import Step
from ..engine.graph_prebuilder import GraphPrebuilder
from ..engine.graphs import StepGraphs
from ..engine.runner import ModelRunner
from ..errors import DeviceError, EngineError


class Flight(NamedTuple):
    """A step in flight."""

    step: Step
    batch: Batch


class LaneRunner(ModelRunner):
    """Runs the steps of one lane over the caches of another runner, from which it borrows all but its graphs."""

    def __init__(self, runner: ModelRunner, graphs: StepGraphs) -> None:
        self.__dict__.update(runner.__dict__)
        self.graphs, self.prebuilder = graphs, GraphPrebuilder(runner.resources, graphs)

    def launch(self, batch: Batch) -> Flight:
        """Begins a pass of plain tokens or blocks; ``land`` waits for it."""
        step = self.graph_of(batch)
        flight = Flight(step, batch)
        self.devices.flying.update(dict.fromkeys(batch.slots.slots, step))
        try:
            step.fields.launch()
            if self.prebuilder.overlaps:
                self.prebuilder.while_computing(batch)
        except BaseException:  # or else nothing would land it
            with suppress(DeviceError, EngineError):
                step.fields.wait()
            self._forget(batch)
            raise
        return flight

    def land(self, flight: Flight) -> dict[int, StepOutput]:
        """Waits for a pass; its outputs."""
        step, batch = flight
        try:
            times = step.fields.wait()
        finally:
            self._forget(batch)
        self.resources.last = step
        step.read()
        return self.after(step, batch, times)

    def _forget(self, batch: Batch) -> None:
        for slot in batch.slots.slots:
            self.devices.flying.pop(slot, None)


def half_of(slots: int) -> int:
    """The most slots that a micro-batch of a runner with so many can have."""
    half = 1
    while 2 * half < slots:
        half *= 2
    return half


def halves(slots: Collection[int], n_slots: int) -> tuple[list[int], list[int]]:
    """Two groups of at least two of a runner's slots, whose steps cover no slot of the other group."""
    low, high, size = min(slots), max(slots), 1
    while low // size != high // size:
        size *= 2
    middle = low // size * size + size // 2
    groups = sorted(slot for slot in slots if slot < middle), sorted(slot for slot in slots if slot >= middle)
    assert not set(covering(groups[0], n_slots).slots) & set(covering(groups[1], n_slots).slots)
    return groups


def why_no_groups(segments: Sequence[object], slots: int, host_experts: bool) -> str:
    """Why a runner has no micro-batches; empty where it has."""
    if len(segments) < 2:
        return "the layers are on one device"
    if slots < GROUPS:
        return "there is one slot"
    return "experts are computed in host memory, by one step at a time" if host_experts else ""
