"""How many draft tokens of a block to verify, by the drafter's confidence in each (DSpark's confidence head).

Drafting and verifying are two graphs then, and draft tokens are verified for as long as they win more than their milliseconds bring at the pace of such
blocks. Confidence is a number between 0 and 1, and a prior only: how often draft tokens of a confidence are accepted is learnt.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from .cost_model import WARMUP, CostModel

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # bounds between which draft tokens are counted together
PRIOR_WEIGHT, DECAY = 8.0, 0.995  # draft tokens that the confidence itself counts for; weight of one draft token of a level later
CUT_RATE = 0.05  # weight of a block in what cuts save


class Confidence:
    """Of one drafter and engine; sequences that share a step verify as many draft tokens. ``costs``: milliseconds of verifying by rows, one slot; 1: a plain
    step. ``relative``: in plain steps, of which ``tell`` says what they take."""

    def __init__(self, costs: Mapping[int, float], relative: bool = False) -> None:
        self._rows, self._relative = sorted(costs), relative
        self.costs = CostModel({(1, rows): ms for rows, ms in costs.items()}, relative)
        self._tries, self._hits = [0.0] * (len(LEVELS) + 1), [0.0] * (len(LEVELS) + 1)
        self._ratings: dict[int, list[float]] = {}  # of the last blocks' draft tokens, by slot
        self._cuts: dict[int, dict[int, float]] = {}  # by slots: share of the blocks that were cut to so many rows

    def tell(self, plain_ms: float) -> None:
        """Milliseconds of a plain step, before the first block is cut."""
        while self._relative and self.costs.steps((1, 1)) <= WARMUP:
            self.costs.observe((1, 1), plain_ms)

    def chance(self, rating: float) -> float:
        """That a draft token of this confidence is accepted if those before it are."""
        level = bisect_right(LEVELS, rating)
        return (self._hits[level] + PRIOR_WEIGHT * rating) / (self._tries[level] + PRIOR_WEIGHT)

    def cost(self, slots: int, rows: int) -> float:
        """Milliseconds of verifying so many rows of each slot; until such steps have run, what as many rows of one slot cost."""
        return self.costs.of_rows(slots, rows, self._rows)

    def worth(self, ratings: Mapping[int, Sequence[float]], pace: float, slots: int = 1) -> int:
        """How many draft tokens of each block to verify, by the confidence in those of each slot, where other steps bring ``pace`` tokens per millisecond."""
        self._ratings = {slot: [float(one) if 0 <= one <= 1 else 0.0 for one in of] for slot, of in ratings.items()}
        curves = [list(accumulate(accumulate(map(self.chance, of), mul), initial=1.0)) for of in self._ratings.values()]
        tokens = [sum(column) for column in zip(*curves)]
        fitting = [rows for rows in self._rows if rows <= len(tokens)]
        return max(fitting, key=lambda rows: tokens[rows - 1] - pace * self.cost(slots, rows), default=1) - 1

    def observe(self, taken: Mapping[int, tuple[int, int]], slots: int = 1, ms: float | None = None) -> None:
        """(verified, accepted) draft tokens of each slot's last block. ``ms``: of verifying them, where nothing else was in that step."""
        rows = 1 + max((verified for verified, _ in taken.values()), default=0)
        cut = rows <= max(map(len, self._ratings.values()), default=0)
        shares = self._cuts.setdefault(slots, dict.fromkeys(self._rows, 0.0))
        for other in shares:
            shares[other] += CUT_RATE * ((cut and other == rows) - shares[other])
        for slot, (verified, matched) in taken.items():
            for i, rating in enumerate(self._ratings.get(slot, ())[: min(verified, matched + 1)]):
                level = bisect_right(LEVELS, rating)
                self._tries[level] = DECAY * self._tries[level] + 1
                self._hits[level] = DECAY * self._hits[level] + (i < matched)
        self._ratings = {}
        if ms is not None and rows in self._rows:
            self.costs.observe((slots, rows), ms)

    def saved_ms(self, rows: int, slots: int = 1) -> float:
        """Milliseconds that a block of so many rows takes less on average, because some are cut."""
        if slots not in self._cuts or rows not in self._rows:
            return 0.0
        whole = self.cost(slots, rows)
        return sum(share * max(whole - self.cost(slots, cut), 0.0) for cut, share in self._cuts[slots].items() if share and cut < rows)
