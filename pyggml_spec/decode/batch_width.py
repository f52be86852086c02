"""How wide the next step over several slots is: the width with the most expected tokens per millisecond of all slots together.

What a step costs depends on how many slots it covers as well as on its width (27B shape on one H200: 16 rows 24 ms, 64 rows 39), so costs
are learnt per (slots, width) from the steps themselves: every width is tried TRIES times when a number of slots is first seen, unless fewer
and more slots are known, between which the costs then are taken to lie. Acceptance is tracked per sequence, as for one
(``width.Acceptance``). While plain decoding is best, drafting is tried again now and then.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .width import COST_RATE, LAST_PROBE, MARGIN, PROBE_LOSS, Acceptance

WARMUP = 2  # steps of a new graph that do not count: it is built, and captured by ggml-cuda
TRIES = WARMUP + 2
FIRST_PROBE = 12  # plain steps at least before drafting is tried again
PROBE_STEPS = 4  # in a row: what was seen has a memory of 13 steps


@dataclass
class _Use:
    """What is in use for a number of slots. While it is plain decoding: steps since the last probe, least steps until the next, and how many
    steps are left of the one that is under way."""

    width: int = 0
    plain: int = 0
    wait: int = FIRST_PROBE
    left: int = 0


class BatchWidths:
    """Chooses among ``widths``; 1 is plain decoding."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(sorted({1, *widths}))
        self.costs: dict[tuple[int, int], float] = {}  # milliseconds by (slots that the graph covers, width)
        self._tries: Counter = Counter()
        self._guesses: set[tuple[int, int]] = set()  # costs that nothing was measured of yet
        self._between: set[int] = set()  # numbers of slots that began with guesses
        self._uses: dict[int, _Use] = {}

    def expected(self, acceptances: Sequence[Acceptance | None]) -> dict[int, float]:
        """Tokens that a step of each width is expected to give; None is a sequence that is decoded plainly."""
        curves = [a.survival() for a in acceptances if a is not None]
        sums = list(accumulate(map(sum, zip(*curves)), initial=len(acceptances)))
        return {w: sums[min(w, len(sums)) - 1] for w in self.widths}

    def choose(self, covered: int, acceptances: Sequence[Acceptance | None]) -> int:
        if all(a is None for a in acceptances):
            return 1
        untried = [w for w in self.widths if self._tries[covered, w] < TRIES]
        if untried and not self._guess(covered):
            return untried[-1]
        speed = {w: tokens / self.costs[covered, w] for w, tokens in self.expected(acceptances).items()}
        best, use = max(speed, key=speed.__getitem__), self._uses.setdefault(covered, _Use())
        if not use.width or speed[best] > MARGIN * speed[use.width]:
            if use.width == 1 != best:
                use.wait = FIRST_PROBE
            use.width, use.plain, use.left = best, 0, 0
        return use.width if use.width > 1 else self._plain_or_probe(covered, use, speed)

    def _plain_or_probe(self, covered: int, use: _Use, speed: dict[int, float]) -> int:
        """1, but the best block after so many plain steps that it costs PROBE_LOSS of their time at most; twice as many the next time."""
        drafting = max((w for w in self.widths if w > 1), key=speed.__getitem__, default=1)
        if use.left:
            use.left -= 1
            return drafting
        use.plain += 1
        extra = PROBE_STEPS * self.costs[covered, drafting] / self.costs[covered, 1]
        if drafting > 1 and use.plain > max(use.wait, extra / PROBE_LOSS):
            use.plain, use.wait, use.left = 0, min(2 * use.wait, LAST_PROBE), PROBE_STEPS - 1
            return drafting
        return 1

    def _guess(self, covered: int) -> bool:
        """Costs between those of fewer and of more slots; whether there are such."""
        if covered in self._between:
            return True
        known = {c for c, _ in self.costs if c not in self._between and self.settled(c)}
        fewer, more = max((c for c in known if c < covered), default=0), min((c for c in known if c > covered), default=0)
        if not fewer or not more:
            return False
        share = (covered - fewer) / (more - fewer)
        for w in self.widths:
            if (covered, w) not in self.costs:
                self.costs[covered, w] = (1 - share) * self.costs[fewer, w] + share * self.costs[more, w]
                self._guesses.add((covered, w))
        self._between.add(covered)
        return True

    def settled(self, covered: int) -> bool:
        """Whether the cost of every width is known with this number of slots, or guessed."""
        return covered in self._between or all(self._tries[covered, w] >= TRIES for w in self.widths)

    def observe(self, covered: int, width: int, milliseconds: float) -> None:
        key = covered, width
        self._tries[key] += 1
        if self._tries[key] <= WARMUP:
            return
        if key in self._guesses:
            self._guesses.remove(key)
            self.costs[key] = milliseconds
        known = self.costs.setdefault(key, milliseconds)
        if self._tries[key] <= TRIES:
            self.costs[key] = min(known, milliseconds)
        else:  # one stalled step proves nothing
            self.costs[key] += COST_RATE * (min(milliseconds, 2 * known) - known)
