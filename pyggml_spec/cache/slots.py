"""Ranges of slots. A slot holds one sequence for its whole life."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True)
class SlotRange:
    """The slots [first, first + count) of a graph, also as a range (``slots``) and a slice (``part``)."""

    first: int
    count: int
    slots: range = field(init=False, repr=False, compare=False)
    part: slice = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", range(self.first, self.first + self.count))
        object.__setattr__(self, "part", slice(self.first, self.first + self.count))

    def __hash__(self) -> int:  # part of every graph lookup
        return self.first << 8 | self.count


def covering(slots: Collection[int], n_slots: int) -> SlotRange:
    """The smallest aligned range of 1, 2, 4, 8, ... slots with all of ``slots``, without its last quarter if that is unused, cut at ``n_slots``.

    This keeps the number of graphs below 3 N.
    """
    return _covering(min(slots), max(slots), n_slots)


@lru_cache(maxsize=1 << 12)
def _covering(low: int, high: int, n_slots: int) -> SlotRange:
    size = 1
    while low // size != high // size:
        size *= 2
    first, less = low // size * size, size - size // 4
    return SlotRange(first, min(less if high < first + less else size, n_slots - first))
