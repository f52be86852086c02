"""Captured hidden states of the last plainly decoded tokens, kept on the device until the drafter needs their K/V rows.

While width control decodes plainly, computing drafter rows token by token costs what speculation was meant to save (8 % of a plain step of
the embedded pair). So a plain step only stores the token's features here, and one batched graph turns up to RING of them into K/V rows when
the next block is drafted, or when the ring is full.
"""

from typing import Any

from ..errors import DeviceError
from ..ggml.device import Backend
from ..ggml.library import ffi, lib

RING = 64


class FeatureRing:
    """F32 [n_features, RING], zeroed. Owns its buffer. ``waiting`` rows, from row 0 on, belong to the last committed tokens."""

    def __init__(self, backend: Backend, n_features: int) -> None:
        params = ffi.new("struct ggml_init_params *", {"mem_size": 2 * lib.ggml_tensor_overhead(), "no_alloc": True})
        self._ctx = lib.ggml_init(params[0])
        self.rows = lib.ggml_new_tensor(self._ctx, lib.GGML_TYPE_F32, 2, (n_features, RING))
        self._buffer: Any = backend.allocate(self._ctx)
        if self._buffer == ffi.NULL:
            lib.ggml_free(self._ctx)
            raise DeviceError(f"no memory for {RING} rows of {n_features} captured features on {backend.device.name}")
        lib.ggml_backend_buffer_clear(self._buffer, 0)
        self.waiting = 0

    @property
    def nbytes(self) -> int:
        return lib.ggml_backend_buffer_get_size(self._buffer)

    def close(self) -> None:
        if self._buffer is not None:
            lib.ggml_backend_buffer_free(self._buffer)
            lib.ggml_free(self._ctx)
            self._buffer = None
