"""How many drafts of a block to verify, by what the drafter says of each of them (DSpark's confidence head).

Drafting and verifying are two graphs then, and rows are verified for as long as they win more than their milliseconds bring at the pace of such
blocks. What the drafter says is a number between 0 and 1 that nobody has to believe: how often drafts that it says so much of were right is
learnt, and what it says is the prior.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # drafts are counted together between two of them
PRIOR_WEIGHT = 8.0  # drafts that what is said counts for
DECAY = 0.995  # per draft of a level


class Confidence:
    """For the sequence of an engine with one slot. ``costs``: milliseconds of a step by rows, which verifies given ids; 1: a plain one."""

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._costs = dict(sorted(costs.items()))
        self._tries, self._hits = [0.0] * (len(LEVELS) + 1), [0.0] * (len(LEVELS) + 1)
        self._said: list[float] = []  # of the last block's drafts

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
        for i, said in enumerate(self._said[: min(verified, matched + 1)]):
            level = bisect_right(LEVELS, said)
            self._tries[level] = DECAY * self._tries[level] + 1
            self._hits[level] = DECAY * self._hits[level] + (i < matched)
        self._said = []
