"""Which neighbouring slots a step covers. A slot is one sequence for its whole life and never moves."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True)
class SlotRange:
    """The slots [first, first + count) that one graph covers; ``slots`` and ``part`` are the same as a range and as a slice."""

    first: int
    count: int
    slots: range = field(init=False, repr=False, compare=False)
    part: slice = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", range(self.first, self.first + self.count))
        object.__setattr__(self, "part", slice(self.first, self.first + self.count))

    def __hash__(self) -> int:  # graphs are looked up by it in every step
        return self.first << 8 | self.count


def covering(slots: Collection[int], n_slots: int) -> SlotRange:
    """The smallest range of 1, 2, 4, 8, ... slots, aligned to its size, that holds all of ``slots``; without its last quarter if nothing is in
    that; cut at the last slot there is.

    Few graphs follow from it (less than 3 N ranges), and few rows that are switched off, as long as the lowest slots are taken first.
    """
    return _covering(min(slots), max(slots), n_slots)


@lru_cache(maxsize=1 << 12)
def _covering(low: int, high: int, n_slots: int) -> SlotRange:
    size = 1
    while low // size != high // size:
        size *= 2
    first, less = low // size * size, size - size // 4
    return SlotRange(first, min(less if high < first + less else size, n_slots - first))
