"""Two groups of slots whose steps are under way together: while one group is on the second device, the other one is on the first.

    launch(A)  launch(B)  land(A)  launch(A)  land(B)  launch(B)  ...

A group's steps run in a lane: a thread, a step buffer and graphs of its own (csrc/step_lanes.c), so that no step writes what another one reads. What
is left is the slots', and a slot is in one group. A group is what the halves of an aligned range of slots hold: its graphs cover slots of
no other group, whoever decodes (cache/slots.py).

A group computes half of the rows. That is worth something where half the rows take half the time: the whole step of n rows takes T(n), and beside
each other both halves take T(n / 2) on two devices. 27B in Q4_K, patched kernels, one H200: 8 plain tokens 8.4 ms, 4 of them 7.7; 64 rows
30.1 ms, 32 rows 18.0. So slots are grouped where it is asked for, always or where it is measured to pay (multi_device/pipeline_policy.py).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..cache.slots import SlotRange, covering
from ..engine.batch import BatchItem
from ..engine.graph_cache import Step
from ..engine.graphs import StepGraphs
from ..ggml.step_io import StepIO

GROUPS = 2


class Lane(NamedTuple):
    """What one group's steps need for themselves."""

    io: StepIO
    graphs: StepGraphs


class Flight(NamedTuple):
    """A step that is under way: what was asked of it. ``block``: some of its rows may turn out wrong."""

    step: Step
    block: bool
    width: int
    work: Mapping[int, BatchItem]
    rows: Mapping[int, int]
    covered: SlotRange


def half_of(slots: int) -> int:
    """The most slots that a group of an engine with so many can have."""
    half = 1
    while 2 * half < slots:
        half *= 2
    return half


def halves(slots: Collection[int], n_slots: int) -> tuple[list[int], list[int]]:
    """Two groups of at least two of an engine's slots, whose steps cover no slot of the other group."""
    low, high, size = min(slots), max(slots), 1
    while low // size != high // size:
        size *= 2
    middle = low // size * size + size // 2
    groups = sorted(slot for slot in slots if slot < middle), sorted(slot for slot in slots if slot >= middle)
    assert not set(covering(groups[0], n_slots).slots) & set(covering(groups[1], n_slots).slots)
    return groups


def ready_for(segments: Sequence[object], slots: int, host_experts: bool) -> str:
    """Why an engine has no groups, in words; empty where it has."""
    if len(segments) < 2:
        return "the layers are on one device"
    if slots < GROUPS:
        return "there is one slot"
    return "experts are computed in host memory, by one step at a time" if host_experts else ""
