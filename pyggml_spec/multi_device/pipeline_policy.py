"""Whether two groups of sequences decode pipelined, where a target is split over devices: measured, for each plan.

A round brings every sequence one step: one step of all, or one of each group. Half of the rows can take nearly as long as all of them, because every step
reads all weights (multi_device/lanes.py). So both kinds of rounds run TRIES times, and the slower one again every RETRY_EVERY rounds.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..ggml.cores import default_threads
from ..speculation.policy import StepPlan

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

    def gain(self, slots: int, kind: StepPlan) -> float | None:
        """Milliseconds of a step of all over those of a pipelined round; None until both are measured."""
        use = self._rounds.get((slots, kind))
        return use.cost[False] / use.cost[True] if use is not None and len(use.cost) == 2 else None


def policy_of(runner: Any, groups: int | None) -> PipelinePolicy | None:
    """Of a runner with groups. ``groups``: 1 for none, 2 for always; None measures, unless CPU threads of the devices would share cores: a step of all
    computes on one device at a time, with all cores."""
    if not runner.devices.groups or groups == 1:
        return None
    threads = [segment.backend.threads for segment in runner.resources.segments if segment.backend.device.kind == "cpu"]
    if groups is None and len(threads) > 1 and sum(threads) > default_threads():
        return None
    return PipelinePolicy(True if groups is not None else None)
