"""The target's hidden state of each sequence's last committed token, which a chain of drafts begins with (``drafters.mtp``).

Of every slot the rows are: what stood before the last block, the block's own rows, and one for what counts nowhere. Which of them belongs to the
last committed token is known when rows of the block were accepted, so it is an index that the host gives: nothing is copied, and a
rollback to before the block finds what it needs.
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
        """Before the first token stands zero."""
        lib.ggml_backend_tensor_memset(self.table, 0, slot * self.rows * self.table.nb[1], self.rows * self.table.nb[1])
        self.at[slot] = 0

    def row(self, slot: int) -> int:
        """Of the table: the one that belongs to the slot's last committed token."""
        return slot * self.rows + int(self.at[slot])

    def fill(self, slot: int, rows: int, out: np.ndarray) -> None:
        """Where hidden states of the slot go, I64 ``out``: the first ``rows`` into its rows, the others count nowhere."""
        first = slot * self.rows
        out[:rows] = first + np.arange(rows)
        out[rows:] = first + self.rows - 1

    @property
    def nbytes(self) -> int:
        return lib.ggml_backend_buffer_get_size(self._buffer)

    def close(self) -> None:
        if self._buffer is not None:
            lib.ggml_backend_buffer_free(self._buffer)
            lib.ggml_free(self._ctx)
            self._buffer = None
