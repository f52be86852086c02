"""The recurrent state of several sequences, one per slot. A slot is one sequence for its whole life and never moves.

All slots share one block width at a time, because the pools are compact per width. A slot that has nothing to do in a step takes part with
rows that are switched off: its state is then committed up to what was accepted, and otherwise left as it is, bit for bit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.library import Tensor, check, ffi, lib
from ..models.base import DeltaShape
from .recurrent import DeltaState


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


class DeltaSlots(DeltaState):
    """Owns the device pools. ``accepted`` [slots]: rows of each slot's block that the next step over the slot commits."""

    def __init__(self, backend: Backend, shape: DeltaShape, row: int, max_width: int, slots: int, planned: bool = False) -> None:
        self.slots = slots
        super().__init__(backend, shape, row, max_width, planned)
        hist = self.history_rows
        self._table_rows = (hist + max_width + 1) * slots  # of one layer, see csrc/delta_net.c
        self._tables = self._table_rows * np.arange(shape.layers).reshape(-1, 1, 1)
        self._every = np.arange(slots).reshape(-1, 1)
        self._taken: dict[tuple, np.ndarray] = {}  # what fill_take has been asked for

    def reset_cursor(self) -> None:
        self.width, self.accepted = 0, np.zeros(self.slots, np.int64)

    def lay_out(self, width: int) -> None:
        """Blocks of ``width`` rows from now on; nothing may be pending."""
        lib.pgs_delta_clear_blocks(self.handle, width)
        self.width = width

    def fill_slot(self, slot: int, value: int) -> None:
        """Sets every byte that belongs to one slot: 0 is the state before the first token, by a write and not by 0 * what was there."""
        lib.pgs_delta_fill_slot(self.handle, slot, self.width, value)
        self.accepted[slot] = 0

    def fill_tail(self, tail: np.ndarray, seats: SlotRange) -> None:  # type: ignore[override]  # one more argument: never called as its base
        """Of every layer's table, the rows that become the slots' histories: those before the first row that is not accepted."""
        rows = self._rows(self.accepted[seats.part, None] + self._history, self.width, seats)
        np.add(self._tables, rows, out=tail.reshape(self.shape.layers, *rows.shape), casting="same_kind")

    def fill_take(self, take: np.ndarray, width: int, seats: SlotRange, single: bool = False) -> None:
        """Of one layer's table, the rows [history ; block of ``width`` rows] of every slot; ``single``: the block is one plain token."""
        key = width, seats, single
        if key not in self._taken:
            start = self.max_width * self.slots if single else 0
            self._taken[key] = self._rows(np.arange(self.history_rows + width), width, seats, start).astype(np.int32)
        take.reshape(seats.count, -1)[:] = self._taken[key]

    def _rows(self, numbers: np.ndarray, width: int, seats: SlotRange, start: int = 0) -> np.ndarray:
        """Where the rows ``numbers`` of [history ; block] of each slot lie in a layer's table, whose blocks begin ``start`` rows late."""
        hist, slots = self.history_rows, self._every[seats.part]
        return np.where(numbers < hist, slots * hist + numbers, start + self.slots * hist + slots * width + numbers - hist)

    def fill_keep(self, keep: np.ndarray, seats: SlotRange) -> None:  # type: ignore[override]
        keep.reshape(seats.count, self.width)[:] = np.arange(self.width) < self.accepted[seats.part, None]

    def begin_slots(self, g: Graph, seats: SlotRange, width: int, keep: Tensor | None, tail: Tensor | None) -> None:
        """Adds the commit of these slots' blocks; ``keep`` and ``tail`` None where nothing can be pending."""
        keep, tail = (x if x is not None else ffi.NULL for x in (keep, tail))
        check(lib.pgs_delta_begin(self.handle, g.ctx, g.gf, seats.first, seats.count, width, width, keep, tail, self._err), self._err)
