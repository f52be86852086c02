"""How wide the next step over several slots is: the width with the most expected tokens per millisecond of all slots together.

What a step costs depends on how many slots it covers as well as on its width (27B shape on one H200: 16 rows 24 ms, 64 rows 39), so costs
are learnt per (slots, width) from the steps themselves: every width is tried TRIES times when a number of slots is first seen. Acceptance
is tracked per sequence, as for one (``width.Acceptance``).
"""

from collections import Counter
from collections.abc import Sequence

from .width import COST_RATE, MARGIN, Acceptance

WARMUP = 2  # steps of a new graph that do not count: it is built, and captured by ggml-cuda
TRIES = WARMUP + 2


class BatchWidths:
    """Chooses among ``widths``; 1 is plain decoding."""

    def __init__(self, widths: Sequence[int]):
        self.widths = tuple(sorted({1, *widths}))
        self.costs: dict[tuple[int, int], float] = {}  # milliseconds by (slots that the graph covers, width)
        self._tries: Counter = Counter()
        self._last: dict[int, int] = {}  # width in use, by slots

    def expected(self, width: int, acceptances: Sequence[Acceptance | None]) -> float:
        """Tokens that a step of this width is expected to give; None is a sequence that is decoded plainly."""
        return sum(1.0 + (sum(a.survival()[: width - 1]) if a is not None else 0.0) for a in acceptances)

    def choose(self, covered: int, acceptances: Sequence[Acceptance | None]) -> int:
        if all(a is None for a in acceptances):
            return 1
        untried = [w for w in self.widths if self._tries[covered, w] < TRIES]
        if untried:
            return untried[-1]
        speed = {w: self.expected(w, acceptances) / self.costs[covered, w] for w in self.widths}
        best, last = max(speed, key=speed.get), self._last.get(covered)
        if last is None or speed[best] > MARGIN * speed[last]:
            self._last[covered] = best
        return self._last[covered]

    def settled(self, covered: int) -> bool:
        """Whether every width was tried with this number of slots."""
        return all(self._tries[covered, w] >= TRIES for w in self.widths)

    def observe(self, covered: int, width: int, milliseconds: float) -> None:
        key = covered, width
        self._tries[key] += 1
        if self._tries[key] <= WARMUP:
            return
        known = self.costs.setdefault(key, milliseconds)
        if self._tries[key] <= TRIES:
            self.costs[key] = min(known, milliseconds)
        else:  # one stalled step proves nothing
            self.costs[key] += COST_RATE * (min(milliseconds, 2 * known) - known)
