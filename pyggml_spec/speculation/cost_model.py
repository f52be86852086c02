"""What steps cost: milliseconds by key, clamped moving averages, apart for each condition of the machine."""

import copy
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

RATE = 0.05  # least weight of one step
MEASURED_WEIGHT = 4  # steps that a cost counts for which was measured beforehand
WARMUP, TRIES = 2, 4  # steps of a new graph that do not count (it is built, then captured), and steps after which its cost is known
FIRST_STEPS = 6  # of which the cheapest one counts, where costs are estimates
CLAMP = 2.0  # a step counts as at most so many times the known cost, and at least the same part of it: stalls prove nothing
SLOW_RATE = 0.02  # weight of a step beyond that: after long texts steps do take longer
FORGET_EVERY, FORGET_RATE = 8, 0.15  # steps of a key, and how far costs of the others return to what was measured then
COLD_RATE, COLD = 0.9, 0.9  # weight of a step with cold caches, and the part of the known cost that it has to stay below to count


class CostModel(dict[Hashable, float]):
    """Milliseconds by key; the policy's keys are (slots, plan).

    ``measured``: of these, those that were measured beforehand. ``relative``: in a unit of their own, which the first steps tell.
    """

    def __init__(self, measured: Mapping[Hashable, float], relative: bool = False) -> None:
        super().__init__(measured)
        self.measured, self._relative = dict(measured), relative
        self._steps = Counter[Hashable]()
        # of another condition, where a key has no step under this one
        self._base: dict[Hashable, float] = dict(measured) if relative else {}
        self._unseen: set[Hashable] = set(measured) if relative else set()
        self._condition: Hashable = None
        self._looks = -1
        self._stored: dict[Hashable, tuple[tuple, tuple]] = {}

    def steps(self, key: Hashable) -> int:
        """Observed under this condition."""
        return self._steps[key]

    def known(self, key: Hashable) -> bool:
        """Whether the cost was measured, or learnt from enough steps."""
        return key in self.measured or self._steps[key] >= TRIES

    def told(self, key: Hashable) -> bool:
        """Whether steps have told the cost under this condition, or it was measured."""
        return self._steps[key] > WARMUP if self._relative else self.known(key)

    def of_rows(self, slots: int, rows: int, widths: Sequence[int]) -> float:
        """Where keys are (slots, rows): until such steps have run, what as many rows of one slot cost: those of the next wider step, or in proportion
        beyond the widest of ``widths``, which are ascending."""
        if (known := self.get((slots, rows))) is not None:
            return known
        total, widest = slots * rows, widths[-1]
        return self[1, next((width for width in widths if total <= width), widest)] * max(1.0, total / widest)

    def learnt(self, slots: int = 1) -> dict[Hashable, float]:
        """Of the keys (slots, other): costs by the other part, where steps have told them."""
        told = (key for key in self if isinstance(key, tuple) and key[0] == slots and self._steps[key] > WARMUP and key not in self._unseen)
        return {key[1]: self[key] for key in told}

    def guess(self, key: Hashable, ms: float) -> None:
        """A cost until steps with this key say otherwise."""
        self.setdefault(key, ms)

    def learn(self, key: Hashable, ms: float, rate: float = 0.2) -> None:
        """A plain moving average."""
        known = self.get(key, 0.0)
        self[key] = known + rate * (ms - known)

    def observe(self, key: Hashable, ms: float, cold: bool = False, steps: int = 1) -> None:
        """A step. ``cold``: caches were, so that it counts only where it is cheaper than known. ``steps``: so many, which took ``ms`` on average."""
        known = self.get(key)
        if cold and known is not None and self.known(key):
            if ms < COLD * known:
                self._set(key, known + COLD_RATE * (max(ms, known / CLAMP) - known))
            return
        self._steps[key] += steps
        n, measured = self._steps[key], self.measured.get(key)
        if self._relative and n <= WARMUP:
            return
        if key in self._unseen:
            most = CLAMP * self[key] if self._relative and key != next(iter(self.measured), None) else ms
            if ms <= most:  # a longer one may have stalled: the next step may say so
                self._unseen.discard(key)
            self._set(key, min(ms, most))
        elif self._relative and measured is not None and n <= FIRST_STEPS:
            if ms < self[key]:
                self._set(key, ms)
        elif measured is None and n <= TRIES:
            if n > WARMUP:
                self[key] = ms if known is None or n == WARMUP + 1 else min(known, ms)
        else:
            assert known is not None
            least, most, weight = known / CLAMP, CLAMP * (measured or known), 1 / (n - WARMUP if self._relative else n + MEASURED_WEIGHT)
            if weight < RATE:  # noqa: PLR1730  (in every step)
                weight = RATE
            weight = 1 - (1 - weight) ** steps if steps > 1 else weight
            cost = known + weight * ((ms if least < ms < most else min(max(ms, least), most)) - known)
            if measured is not None and ms > most:
                cost = max(cost, known + SLOW_RATE * (min(ms, CLAMP * max(measured, known)) - known))
            if self._unseen:
                self._set(key, cost)
            else:
                self[key] = cost
            if measured is not None and n % FORGET_EVERY < steps and not self._relative:
                self._forget(key)

    def _set(self, key: Hashable, ms: float) -> None:
        """Keys without a step under this condition are taken to differ from their base as this one does."""
        self[key] = ms
        if self._unseen and key in self._base:
            ratio = ms / self._base[key]
            self.update({other: ratio * self._base[other] for other in self._unseen})

    def _forget(self, seen: Hashable) -> None:
        """Costs of other keys return to what was measured, or longer where the first key takes longer: keys that stalled would never be tried again."""
        first = next(iter(self.measured))
        longer = max(1.0, self[first] / self.measured[first])
        for key, measured in self.measured.items():
            if key not in (first, seen) and (self[key] > longer * measured or longer > 1):
                self[key] += FORGET_RATE * (longer * measured - self[key])

    def set_condition(self, condition: Hashable, looks: int = 0) -> bool:
        """The condition of the machine, before each step; True where it has changed. Costs then are those that were last known under it.

        ``looks``: how often the condition was looked up so far; costs are stored at the second last look, as it may have changed before it was seen.
        """
        if self._condition is None:
            self._condition = condition
        if condition != self._condition:
            self._condition, self._looks = condition, -1
            if condition in self._stored:
                costs, self._steps, self._base, self._unseen = map(copy.copy, self._stored[condition][0])
                self.clear()
                self.update(costs)
            else:
                self._base, self._unseen = dict(self), set(self)
            return True
        if looks != self._looks:
            self._looks, now = looks, (dict(self), *map(copy.copy, (self._steps, self._base, self._unseen)))
            self._stored[condition] = self._stored.get(condition, (now, now))[1], now
        return False
