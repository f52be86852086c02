"""Whether two groups of sequences decode beside each other, where a target is split over devices: measured, for each kind of step.

A round is what brings every sequence one step: a whole step, or one of each group. Half of the rows can take nearly as long as all of them, because
every step reads all weights (multi_device/lanes.py); then groups are worth nothing. So both kinds of rounds are run, TRIES times each, and the other one
is looked at again every LOOK rounds.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..ggml.cores import default_threads
from ..speculation.policy import StepPlan

WARMUP = 3  # rounds of new graphs: they are built, captured by ggml-cuda, and the first one of groups begins with nobody beside it
TRIES = WARMUP + 5
LOOK, AGAIN = 500, 3  # rounds between looks, and of a look
MARGIN = 1.02  # the other kind of round has to be this much faster
RATE = 0.1  # weight of a round in the running cost


@dataclass
class _Use:
    """Of a number of slots and a kind of step: milliseconds of a round, rounds of either kind so far, and which is in use."""

    cost: dict[bool, float] = field(default_factory=dict)
    tries: Counter = field(default_factory=Counter)
    grouped: bool = False
    since: int = 0  # rounds since the other kind was looked at


class GroupControl:
    """Decides for each round. ``pinned``: what it always is; None where it is measured."""

    def __init__(self, pinned: bool | None = None) -> None:
        self.pinned = pinned
        self._uses: dict[tuple[int, StepPlan], _Use] = {}

    def choose(self, covered: int, kind: StepPlan) -> bool:
        """Whether the next round of this kind, in graphs that cover so many slots together, is one of groups."""
        if self.pinned is not None:
            return self.pinned
        use = self._uses.setdefault((covered, kind), _Use())
        for grouped in (False, True):
            if use.tries[grouped] < TRIES:
                return grouped
        use.since += 1
        if use.since > LOOK:
            use.since, use.tries[not use.grouped] = 0, TRIES - AGAIN
            use.cost.pop(not use.grouped, None)
            return not use.grouped
        return use.grouped

    def observe(self, covered: int, kind: StepPlan, grouped: bool, milliseconds: float) -> None:
        """A round, and how long it took: of groups, from the end of the one before it."""
        use = self._uses.setdefault((covered, kind), _Use())
        use.tries[grouped] += 1
        if use.tries[grouped] <= WARMUP:
            return
        known = use.cost.get(grouped)
        if known is None:
            use.cost[grouped] = milliseconds
        elif use.tries[grouped] <= TRIES:
            use.cost[grouped] = min(known, milliseconds)
        else:
            use.cost[grouped] = known + RATE * (min(milliseconds, 2 * known) - known)
        mine, other = use.cost.get(use.grouped), use.cost.get(not use.grouped)
        if mine is not None and other is not None and other * MARGIN < mine and use.tries[not use.grouped] >= TRIES:
            use.grouped = not use.grouped

    def gain(self, covered: int, kind: StepPlan) -> float | None:
        """Milliseconds of a whole step over those of a round of groups; None until both were measured."""
        use = self._uses.get((covered, kind))
        return use.cost[False] / use.cost[True] if use is not None and len(use.cost) == 2 else None


def control_of(engine: Any, groups: int | None) -> GroupControl | None:
    """Of an engine that has groups. ``groups``: 1 for none, 2 for always; None measures, unless threads of its CPUs would wait for each other's cores.

    Cores: a whole step computes on one device at a time, and each may have all of them.
    """
    if not engine.groups or groups == 1:
        return None
    threads = [segment.backend.threads for segment in engine.resources.segments if segment.backend.device.kind == "cpu"]
    if groups is None and len(threads) > 1 and sum(threads) > default_threads():
        return None
    return GroupControl(True if groups is not None else None)
