"""Hidden states of the target that drafters read later.

``LastHiddenState`` has the state of each sequence's last committed token, the first input of a drafter that drafts token by token. Rows of a slot: the
state before the last block, one row per row of the block, and a trash row. The host selects a row by index once the number of accepted rows is known,
so nothing is copied and a rollback to before the block works.

``HiddenStateBuffer`` keeps the states of drafters that are not drafting until their K/V rows are needed. Computing these in every step costs about 20 %
of a plain step; instead one batched graph computes them when the drafter starts to draft, or when the slot's ring is full.
"""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from ..errors import DeviceError
from ..ggml.device import Backend
from ..ggml.library import ffi, lib, new_context

BATCH = 64
FEW = 8  # rows per slot of the narrowest catch-up graph
BETWEEN = 16, 32  # further widths on CPUs, where every row costs; GPUs take as long for BATCH
AT_ONCE = 512  # rows of all slots per catch-up graph, which bounds its memory
MEMORY, MOST = 16 << 20, 2048  # bytes of all rings with more than BATCH rows, and rows of the largest ring


def room(row_bytes: int, slots: int) -> int:
    """Rows of each ring: as many as fit into MEMORY, at least BATCH, whatever the context and the slots."""
    return max(BATCH, min(MOST, MEMORY // max(row_bytes * slots, 1)))


def batch_of(slots: int) -> int:
    """Rows per slot of the widest catch-up graph: BATCH, or AT_ONCE divided by the slots."""
    return max(FEW, min(BATCH, AT_ONCE // slots // FEW * FEW))


class _Tables:
    """``count`` zeroed tables F32 [n_embd, rows]. Owns their buffer. ``rows``: of a slot."""

    rows: int

    def __init__(self, backend: Backend, n_embd: int, rows: int, count: int) -> None:
        self.backend, self._buffer, self.tables = backend, None, list[Any]()
        if not count:
            return
        self._ctx = new_context(count)
        self.tables = [lib.ggml_new_tensor(self._ctx, lib.GGML_TYPE_F32, 2, (n_embd, rows)) for _ in range(count)]
        self._buffer = backend.allocate(self._ctx)
        if self._buffer == ffi.NULL:
            lib.ggml_free(self._ctx)
            raise DeviceError(f"no memory for {rows} hidden states of {count * n_embd} values on {backend.device.name}")
        lib.ggml_backend_buffer_clear(self._buffer, 0)

    def clear(self, slot: int) -> None:
        """Zeroes the slot's rows, which may be NaN."""
        for table in self.tables:
            lib.ggml_backend_tensor_memset(table, 0, slot * self.rows * table.nb[1], self.rows * table.nb[1])

    @property
    def nbytes(self) -> int:
        return self.backend.size_of(self._buffer) if self._buffer is not None else 0

    def close(self) -> None:
        if self._buffer is not None:
            lib.ggml_backend_buffer_free(self._buffer)
            lib.ggml_free(self._ctx)
            self._buffer = None


class PictureTable(_Tables):
    """Rows of pictures for one step, F32 [n, rows + 1], and at the end a row of zeros, which tokens have. Owns its buffer."""

    def __init__(self, backend: Backend, n: int, rows: int) -> None:
        self.rows = rows
        super().__init__(backend, n, rows + 1, 1)
        self.table = self.tables[0]

    def put(self, rows: np.ndarray) -> None:
        """Writes F32 [m, n] into the first rows; no step may be under way."""
        rows = np.ascontiguousarray(rows, np.float32)
        lib.ggml_backend_tensor_set(self.table, ffi.from_buffer(rows), 0, rows.nbytes)


class LastHiddenState(_Tables):
    """F32 [n_embd, rows * slots], zeroed. Owns its buffer. ``at``: I64 [slots], the row of each slot's last committed token."""

    def __init__(self, backend: Backend, n_embd: int, width: int, slots: int) -> None:
        self.rows = width + 2
        super().__init__(backend, n_embd, self.rows * slots, 1)
        self.table = self.tables[0]
        self.at = np.zeros(slots, np.int64)

    def reset(self, slot: int) -> None:
        """The state before the first token is zero."""
        self.clear(slot)
        self.at[slot] = 0

    def row(self, slot: int) -> int:
        """Row of the table for the slot's last committed token."""
        return slot * self.rows + int(self.at[slot])

    def fill(self, slot: int, rows: int, out: np.ndarray) -> None:
        """Writes the target rows of a step into I64 ``out``: the first ``rows`` are the slot's, the others are trash."""
        first = slot * self.rows
        out[:rows] = first + np.arange(rows)
        out[rows:] = first + self.rows - 1


class HiddenStateBuffer(_Tables):
    """F32 [n_embd, (most + width) * slots + 1] for each of ``count`` hidden states of a row, zeroed. Owns its buffer.

    Position p of a slot is in row p mod ``rows`` of the slot's ring; the last row of the table is trash.

    Whole models read tokens alone: with ``count`` 0 nothing else is stored.

    Attributes:
        whole_model: the drafting method that is one, "" for none.
        most: rows of a slot that may be stored while a block of ``width`` rows is computed.
        batch: rows of a slot per catch-up graph.
        catch_ups: rows per slot of all catch-up graphs, ascending.
        lacking: by slot and method, the position of the first token without K/V rows; no entry where it has all of them.
    """

    def __init__(
        self, backend: Backend, n_embd: int, count: int, width: int, slots: int, methods: Iterable[str], whole_model: str = ""
    ) -> None:
        self.most = room(4 * n_embd * count, slots)
        self.batch = batch_of(slots)
        between = BETWEEN if backend.device.kind == "cpu" else ()
        self.catch_ups = tuple(sorted({FEW, *(n for n in between if n < self.batch), self.batch}))
        self.rows, self.width = self.most + width, width
        self.trash = self.rows * slots
        super().__init__(backend, n_embd, self.trash + 1, count)
        self.tokens = np.zeros(self.trash, np.int32)  # of each row
        self._every = np.arange(self.trash)
        self._every.flags.writeable = False
        self.methods, self.whole_model = tuple(methods), whole_model
        self.others = tuple(method for method in self.methods if method != whole_model)
        self.lacking: dict[tuple[int, str], int] = {}

    def reset(self, slot: int = 0) -> None:
        """Begins another sequence."""
        for method in self.methods:
            self.set_complete(method, slot)

    def at(self, first: int, count: int, slot: int = 0) -> np.ndarray:
        """Table rows of ``count`` positions of a slot, I64, read only; a view without a wrap."""
        begin = first % self.rows
        if begin + count <= self.rows:
            begin += slot * self.rows
            return self._every[begin : begin + count]
        return slot * self.rows + (first + np.arange(count)) % self.rows

    def stored(self, first: int, tokens: np.ndarray, ready: Collection[str], slot: int = 0, drafted: int = 0) -> None:
        """Notes that the hidden states of ``tokens`` I32 from position ``first`` on were stored; ``ready`` methods have their K/V rows, the whole model
        those of the first ``drafted``."""
        begin = first % self.rows
        if begin + len(tokens) <= self.rows:
            begin += slot * self.rows
            self.tokens[begin : begin + len(tokens)] = tokens
        else:
            self.tokens[self.at(first, len(tokens), slot)] = tokens
        for method in self.methods:
            if method == self.whole_model:
                if drafted or self.lacking.get((slot, method), first + 1) > first:
                    self.lacking[slot, method] = first + drafted
            elif method not in ready:
                self.lacking.setdefault((slot, method), first)

    def has_room(self, committed: int, rows: int, slot: int = 0) -> bool:
        """Whether ``rows`` more hidden states fit after ``committed`` tokens of a slot."""
        least = committed - max(self.most - rows, 0)
        for method in self.methods:  # noqa: SIM110  (in every step)
            if self.lacking.get((slot, method), least) < least:
                return False
        return True

    def missing(self, method: str, committed: int, slot: int = 0) -> int:
        """Number of the last of ``committed`` tokens whose K/V rows the method lacks."""
        return max(committed - self.lacking.get((slot, method), committed), 0)  # a whole model's first may be a rejected draft

    def filled(self, method: str, count: int, slot: int = 0) -> None:
        """Notes that the method has the K/V rows of ``count`` more tokens."""
        if count:
            self.lacking[slot, method] += count

    def set_complete(self, method: str, slot: int = 0) -> None:
        self.lacking.pop((slot, method), None)
