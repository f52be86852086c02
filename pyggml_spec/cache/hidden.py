"""The target's hidden state of each sequence's last committed token: the first input of a drafter that drafts token by token (``drafters.mtp``).

Rows of a slot: the state before the last block, one row per row of the block, and a trash row. The host selects a row by index once the number of
accepted rows is known, so nothing is copied and a rollback to before the block works.
"""

from typing import Any

import numpy as np

from ..errors import DeviceError
from ..ggml.device import Backend
from ..ggml.library import ffi, lib


class LastHiddenState:
    """F32 [n_embd, rows * slots], zeroed. Owns its buffer. ``at``: I64 [slots], the row of each slot's last committed token."""

    def __init__(self, backend: Backend, n_embd: int, width: int, slots: int) -> None:
        self.rows, self.backend = width + 2, backend
        params = ffi.new("struct ggml_init_params *", {"mem_size": 2 * lib.ggml_tensor_overhead(), "no_alloc": True})
        self._ctx = lib.ggml_init(params[0])
        self.table = lib.ggml_new_tensor(self._ctx, lib.GGML_TYPE_F32, 2, (n_embd, self.rows * slots))
        self._buffer: Any = backend.allocate(self._ctx)
        if self._buffer == ffi.NULL:
            lib.ggml_free(self._ctx)
            raise DeviceError(f"no memory for {self.rows * slots} hidden states of {n_embd} values on {backend.device.name}")
        lib.ggml_backend_buffer_clear(self._buffer, 0)
        self.at = np.zeros(slots, np.int64)

    def reset(self, slot: int) -> None:
        """The state before the first token is zero."""
        lib.ggml_backend_tensor_memset(self.table, 0, slot * self.rows * self.table.nb[1], self.rows * self.table.nb[1])
        self.at[slot] = 0

    def row(self, slot: int) -> int:
        """Row of the table for the slot's last committed token."""
        return slot * self.rows + int(self.at[slot])

    def fill(self, slot: int, rows: int, out: np.ndarray) -> None:
        """Writes the target rows of a step into I64 ``out``: the first ``rows`` are the slot's, the others are trash."""
        first = slot * self.rows
        out[:rows] = first + np.arange(rows)
        out[rows:] = first + self.rows - 1

    @property
    def nbytes(self) -> int:
        return self.backend.size_of(self._buffer)

    def close(self) -> None:
        if self._buffer is not None:
            lib.ggml_backend_buffer_free(self._buffer)
            lib.ggml_free(self._ctx)
            self._buffer = None
