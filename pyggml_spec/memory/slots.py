"""Which neighbouring slots a step covers. A slot is one sequence for its whole life and never moves."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SlotRange:
    """The slots [first, first + count) that one graph covers."""

    first: int
    count: int

    @property
    def slots(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def part(self) -> slice:
        return slice(self.first, self.first + self.count)


def covering(slots: Iterable[int], n_slots: int) -> SlotRange:
    """The smallest range of 1, 2, 4, 8, ... slots, aligned to its size, that holds all of ``slots``; without its last quarter if nothing is in
    that; cut at the last slot there is.

    Few graphs follow from it (less than 3 N ranges), and few rows that are switched off, as long as the lowest slots are taken first.
    """
    low, high, size = min(slots), max(slots), 1
    while low // size != high // size:
        size *= 2
    first, less = low // size * size, size - size // 4
    return SlotRange(first, min(less if high < first + less else size, n_slots - first))
