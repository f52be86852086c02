"""How many drafts of a block to verify, by what the drafter says of each of them (DSpark's confidence head).

Drafting and verifying are two graphs then, and rows are verified for as long as they win more than their milliseconds bring at the pace of such
blocks. What the drafter says is a number between 0 and 1 that nobody has to believe: how often drafts that it says so much of were right is
learnt, and what it says is the prior. Width control is told what such cuts save: a block of eight rows of which three are verified is no dear one.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # drafts are counted together between two of them
PRIOR_WEIGHT = 8.0  # drafts that what is said counts for
DECAY = 0.995  # per draft of a level
CUT_DECAY, WHOLE = 0.95, 2.0  # per block: half of the weight lies on the last 13; whole blocks that are assumed before any was seen


class Confidence:
    """For the sequence of an engine with one slot. ``costs``: milliseconds of a step by rows, which verifies given ids; 1: a plain one."""

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._costs = dict(sorted(costs.items()))
        self._tries, self._hits = [0.0] * (len(LEVELS) + 1), [0.0] * (len(LEVELS) + 1)
        self._said: list[float] = []  # of the last block's drafts
        self._blocks, self._cut = WHOLE, dict.fromkeys(self._costs, 0.0)  # those that were cut by the rows that were verified
        self._saves: dict[int, float] = {}

    def chance(self, said: float) -> float:
        """That a draft is right of which ``said`` was said, if those before it are."""
        level = bisect_right(LEVELS, said)
        return (self._hits[level] + PRIOR_WEIGHT * said) / (self._tries[level] + PRIOR_WEIGHT)

    def worth(self, said: Sequence[float], pace: float) -> int:
        """How many of a block's drafts are to be verified, where other steps bring ``pace`` tokens per millisecond."""
        self._said = [float(one) if 0 <= one <= 1 else 0.0 for one in said]
        tokens = list(accumulate(accumulate(map(self.chance, self._said), mul), initial=1.0))
        rows = [rows for rows in self._costs if rows <= len(tokens)]
        return max(rows, key=lambda rows: tokens[rows - 1] - pace * self._costs[rows], default=1) - 1

    def observe(self, verified: int, matched: int) -> None:
        """Of the last block's drafts so many were verified, and the first ``matched`` of them right."""
        self._blocks = CUT_DECAY * self._blocks + 1
        self._cut = {rows: CUT_DECAY * n + (verified < len(self._said) and rows == verified + 1) for rows, n in self._cut.items()}
        self._saves = {}
        for i, said in enumerate(self._said[: min(verified, matched + 1)]):
            level = bisect_right(LEVELS, said)
            self._tries[level] = DECAY * self._tries[level] + 1
            self._hits[level] = DECAY * self._hits[level] + (i < matched)
        self._said = []

    def saves(self, rows: int) -> float:
        """Milliseconds that a block of so many rows takes less than all of them, on average: of those that were cut, as far as it reaches beyond."""
        if rows not in self._saves:
            whole = self._costs.get(rows)
            less = 0.0 if whole is None else sum(n * max(whole - self._costs[cut], 0.0) for cut, n in self._cut.items() if cut < rows)
            self._saves[rows] = less / self._blocks
        return self._saves[rows]
