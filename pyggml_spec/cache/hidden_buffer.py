"""What drafters will read of the target's last tokens, kept on the device until their K/V rows are wanted.

Rows of a drafter that is not drafting now are for nothing unless it drafts again, and row by row they are dear: with both drafters of the
embedded pair a plain step took 1.21 times what it takes without them. So a step stores captured hidden states here for those that did not draft it,
and one batched graph turns them into K/V rows when their drafter is about to draft, or there is no room for more: 0.012 ms per token of the 1.25 ms of
a plain step. Where drafts from what came before bring 15 tokens in 4.5 ms that were 4 % of the time, for a drafter that may not draft again in this text:
so as many rows wait as MEMORY has room for. Each slot has a ring of its own; one graph catches up for all slots of the step that needs it.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import DeviceError
from ..ggml.device import Backend
from ..ggml.library import ffi, lib

BATCH = 64
FEW = 8  # rows of each slot that the narrow graph catches up with
# Rows of further such graphs on CPUs, where every row costs: behind 9 to 16 plain tokens a block of the embedded pair waited for 64 rows, 0.32 ms of two
# threads where 8 take 0.10 and a plain step 0.38. GPUs take as long for either.
BETWEEN = 16, 32
AT_ONCE = 512  # rows of all slots that a graph catches up with: 64 slots of the embedded pair with 64 rows each took 67 MB, now 8
MEMORY, MOST = 16 << 20, 2048  # bytes that rings of more than BATCH rows may take, of all slots together, and rows of such a ring


def room(row_bytes: int, slots: int) -> int:
    """Rows of each slot that may wait: as many as MEMORY has room for, BATCH at least.

    Whatever the context: what a token of it takes, by which the longest one is planned, is then that of K/V rows alone. And BATCH whatever the slots: with less,
    blocks of 16 rows would be caught up with one by one. 64 slots of a 27B shape take some 500 MB for that, beside 17 GB of K/V rows for 4,096 tokens each.
    """
    return max(BATCH, min(MOST, MEMORY // (row_bytes * slots)))


def batch_of(slots: int) -> int:
    """Rows of each slot that one graph catches up with: BATCH, or as many as are AT_ONCE of all slots."""
    return max(FEW, min(BATCH, AT_ONCE // slots // FEW * FEW))


class HiddenStateBuffer:
    """F32 [n_embd, (most + width) * slots + 1] for each of ``count`` hidden states of a row, zeroed. Owns its buffer.

    Position p of a slot has the row p modulo ``rows`` of those that are its own; the last row of all is for what counts nowhere.

    Attributes:
        most: rows of a slot that may wait while a block of ``width`` rows comes.
        batch: rows of a slot that are caught up with at once.
        catch_ups: rows per slot of the graphs that catch up, ascending.
    """

    def __init__(self, backend: Backend, n_embd: int, count: int, width: int, slots: int, methods: Iterable[str]) -> None:
        self.most = room(4 * n_embd * count, slots)
        self.batch = batch_of(slots)
        between = BETWEEN if backend.device.kind == "cpu" else ()
        self.catch_ups = tuple(sorted({FEW, *(n for n in between if n < self.batch), self.batch}))
        self.rows, self.width = self.most + width, width
        self.trash = self.rows * slots
        params = ffi.new("struct ggml_init_params *", {"mem_size": (count + 1) * lib.ggml_tensor_overhead(), "no_alloc": True})
        self._ctx = lib.ggml_init(params[0])
        self.tables = [lib.ggml_new_tensor(self._ctx, lib.GGML_TYPE_F32, 2, (n_embd, self.trash + 1)) for _ in range(count)]
        self._buffer: Any = backend.allocate(self._ctx)
        if self._buffer == ffi.NULL:
            lib.ggml_free(self._ctx)
            raise DeviceError(f"no memory for {self.trash + 1} rows of {count * n_embd} captured features on {backend.device.name}")
        lib.ggml_backend_buffer_clear(self._buffer, 0)
        self.tokens = np.zeros(self.trash, np.int32)  # of each row
        self._every = np.arange(self.trash)
        self._every.flags.writeable = False
        self.methods = tuple(methods)
        # of each slot, the position of the first token whose rows a method lacks
        self._first: list[dict[str, int | None]] = [dict.fromkeys(self.methods) for _ in range(slots)]

    def reset(self, slot: int = 0) -> None:
        """Another sequence: nothing waits."""
        self._first[slot] = dict.fromkeys(self.methods)

    def clear(self, slot: int) -> None:
        """Writes zeros over what the slot's sequence left, which may be NaN."""
        for table in self.tables:
            lib.ggml_backend_tensor_memset(table, 0, slot * self.rows * table.nb[1], self.rows * table.nb[1])

    def at(self, first: int, count: int, slot: int = 0) -> np.ndarray:
        """Rows of so many positions of a slot, I64 [count], read only: mostly a part of an array that is there, for a fifth of the time."""
        begin = first % self.rows
        if begin + count <= self.rows:
            begin += slot * self.rows
            return self._every[begin : begin + count]
        return slot * self.rows + (first + np.arange(count)) % self.rows

    def stored(self, first: int, tokens: np.ndarray, ready: Iterable[str], slot: int = 0) -> None:
        """The rows of ``tokens`` I32 from position ``first`` on were stored; methods that are ``ready`` have theirs."""
        begin = first % self.rows
        if begin + len(tokens) <= self.rows:  # in a row, mostly
            begin += slot * self.rows
            self.tokens[begin : begin + len(tokens)] = tokens
        else:
            self.tokens[self.at(first, len(tokens), slot)] = tokens
        firsts = self._first[slot]
        for method, before in firsts.items():
            if before is None and method not in ready:
                firsts[method] = first

    def has_room(self, committed: int, rows: int, slot: int = 0) -> bool:
        """Whether so many rows may come behind ``committed`` tokens of a slot, and wait."""
        least = committed - max(self.most - rows, 0)
        for first in self._first[slot].values():  # noqa: SIM110  (in every step)
            if first is not None and first < least:
                return False
        return True

    def missing(self, method: str, committed: int, slot: int = 0) -> int:
        """Of ``committed`` tokens of a slot those whose rows the method lacks, the last ones."""
        first = self._first[slot][method]
        return 0 if first is None else committed - first

    def has_missing(self, method: str, slot: int = 0) -> bool:
        """Whether the method lacks the rows of the slot's last block, if any of them counts."""
        return self._first[slot][method] is not None

    def filled(self, method: str, count: int, slot: int = 0) -> None:
        """The method has the rows of the first ``count`` tokens of a slot that waited."""
        first = self._first[slot][method]
        assert first is not None
        self._first[slot][method] = first + count

    def set_complete(self, method: str, slot: int = 0) -> None:
        self._first[slot][method] = None

    @property
    def nbytes(self) -> int:
        return lib.ggml_backend_buffer_get_size(self._buffer)

    def close(self) -> None:
        if self._buffer is not None:
            lib.ggml_backend_buffer_free(self._buffer)
            lib.ggml_free(self._ctx)
            self._buffer = None
