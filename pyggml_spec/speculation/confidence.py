"""How many drafts of a block to verify, by what the drafter says of each of them (DSpark's confidence head).

Drafting and verifying are two graphs then, and rows are verified for as long as they win more than their milliseconds bring at the pace of such
blocks. What the drafter says is a number between 0 and 1 that nobody has to believe: how often drafts that it says so much of were right is
learnt, and what it says is the prior. Width control is told what such cuts save: a block of eight rows of which three are verified is no dear one.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # drafts are counted together between two of them
PRIOR_WEIGHT = 8.0  # drafts that what is said counts for
DECAY = 0.995  # per draft of a level
CUT_DECAY, WHOLE = 0.95, 2.0  # per block: half of the weight lies on the last 13; whole blocks that are assumed before any was seen
WARMUP = 2  # steps of a new graph that do not count: it is built, and captured by ggml-cuda
COST_RATE = 0.1  # weight of one step in the running cost of its rows


def as_of_one(costs: Mapping[int, float], rows: int) -> float:
    """Milliseconds of so many rows of several sequences, by what rows of one cost, ``costs``: those of the next wider step, or in proportion
    beyond the widest."""
    widest = max(costs)
    return costs[min((width for width in costs if rows <= width), default=widest)] * max(1.0, rows / widest)


class Confidence:
    """For the sequences of one engine, of which all that share a step verify as many drafts. ``costs``: milliseconds of a step of one sequence by
    rows, which verifies given ids; 1: a plain one."""

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._alone = dict(sorted(costs.items()))
        self._costs: dict[tuple[int, int], float] = {}  # of several, by slots that the step covers and rows
        self._seen: Counter = Counter()
        self._tries, self._hits = [0.0] * (len(LEVELS) + 1), [0.0] * (len(LEVELS) + 1)
        self._said: dict[int, list[float]] = {}  # of the last blocks' drafts, by slot
        self._cuts: dict[int, _Cuts] = {}  # by slots that steps cover

    def chance(self, said: float) -> float:
        """That a draft is right of which ``said`` was said, if those before it are."""
        level = bisect_right(LEVELS, said)
        return (self._hits[level] + PRIOR_WEIGHT * said) / (self._tries[level] + PRIOR_WEIGHT)

    def cost(self, covered: int, rows: int) -> float:
        """Milliseconds of a step of so many slots and rows that verifies given ids. Until some have run, as many rows of one sequence cost that."""
        if covered == 1:
            return self._alone[rows]
        known = self._costs.get((covered, rows))
        if known is not None:
            return known
        return as_of_one(self._alone, covered * rows)

    def worth(self, said: Mapping[int, Sequence[float]], pace: float, covered: int = 1) -> int:
        """How many drafts of each block are to be verified, by what is ``said`` of those of each slot, where other steps bring ``pace`` tokens per
        millisecond."""
        self._said = {slot: [float(one) if 0 <= one <= 1 else 0.0 for one in of] for slot, of in said.items()}
        curves = [list(accumulate(accumulate(map(self.chance, of), mul), initial=1.0)) for of in self._said.values()]
        tokens = curves[0] if len(curves) == 1 else [sum(column) for column in zip(*curves)]
        rows = [rows for rows in self._alone if rows <= len(tokens)]
        return max(rows, key=lambda rows: tokens[rows - 1] - pace * self.cost(covered, rows), default=1) - 1

    def observe(self, taken: Mapping[int, tuple[int, int]], covered: int = 1, milliseconds: float | None = None) -> None:
        """Of each slot's last block so many drafts were verified, and so many of them right, the first ones. ``milliseconds``: what that took, if
        nothing else came with it."""
        most = max((verified for verified, _ in taken.values()), default=0)
        self._cuts.setdefault(covered, _Cuts(dict.fromkeys(self._alone, 0.0))).add(
            most + 1, most < max(map(len, self._said.values()), default=0)
        )
        for slot, (verified, matched) in taken.items():
            for i, said in enumerate(self._said.get(slot, ())[: min(verified, matched + 1)]):
                level = bisect_right(LEVELS, said)
                self._tries[level] = DECAY * self._tries[level] + 1
                self._hits[level] = DECAY * self._hits[level] + (i < matched)
        self._said = {}
        if covered > 1 and milliseconds is not None and most + 1 in self._alone:
            self._learn((covered, most + 1), milliseconds)

    def _learn(self, key: tuple[int, int], milliseconds: float) -> None:
        self._seen[key] += 1
        if self._seen[key] > WARMUP:
            known = self._costs.get(key, milliseconds)
            self._costs[key] = known + COST_RATE * (min(milliseconds, 2 * known) - known)  # one stalled step proves nothing
            self._cuts[key[0]].saves = {}

    def saves(self, rows: int, covered: int = 1) -> float:
        """Milliseconds that a block of so many rows takes less than all of them, on average: of those that were cut, as far as it reaches beyond."""
        cuts = self._cuts.get(covered)
        if cuts is None or rows not in self._alone:
            return 0.0
        if rows not in cuts.saves:
            whole = self.cost(covered, rows)
            less = sum(n * max(whole - self.cost(covered, cut), 0.0) for cut, n in cuts.cut.items() if n and cut < rows)
            cuts.saves[rows] = less / cuts.blocks
        return cuts.saves[rows]


@dataclass
class _Cuts:
    """Blocks, and those that were ``cut``, by the rows that were verified of them."""

    cut: dict[int, float]
    blocks: float = WHOLE
    saves: dict[int, float] = field(default_factory=dict)  # found from them

    def add(self, rows: int, cut: bool) -> None:
        self.blocks = CUT_DECAY * self.blocks + 1
        self.cut = {other: CUT_DECAY * n + (cut and other == rows) for other, n in self.cut.items()}
        self.saves = {}
