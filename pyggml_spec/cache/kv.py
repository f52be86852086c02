"""K/V rows of one model: row = absolute position, with a few trash rows at the end, zeroed at creation.

Sliding-window layers keep a ring: row = position mod ring, which holds the window and the widest block or chunk, so that no overwritten row,
rejected or not, is visible to a later query.

Rows below the cursor are live. Rejected rows are not cleared: the mask hides them, and the next block overwrites them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import DeviceError
from ..ggml.device import Backend, free_bytes
from ..ggml.library import Buffer, Context, Tensor, ffi, lib, new_context
from ..models.base import KVLayer, KVShape
from .kv_types import KVTypes, hadamard

KV_BUCKET = 256  # attention reads a multiple of this many rows, as the fast CUDA kernels require
GPU_KV_BUCKET = 1024  # minimum for generation on GPUs, see least_bucket
MAX_ROWS = 1 << 16  # rows that one graph may write
NOWHERE = -1073741824.0  # mask base of an empty ring row: later than every query


def padded(n: int) -> int:
    """n rounded up to a multiple of KV_BUCKET."""
    return (n + KV_BUCKET - 1) // KV_BUCKET * KV_BUCKET


@lru_cache(maxsize=1 << 12)  # called three times per step
def bucket_for(n: int, least: int = KV_BUCKET) -> int:
    """KV bucket of ``n`` tokens: a multiple of ``least``, above 8 times that of an eighth of the next power of two."""
    step = max(least, (1 << (n - 1).bit_length()) // 8)
    return (n + step - 1) // step * step


def least_bucket(row_bytes: int) -> int:
    """The ``least`` for generation on GPUs, by bytes of K/V per token: 1,024, above 64 KiB 512, above 256 KiB 256.

    A new bucket costs ggml-cuda one eager launch and one capture; the cost of masked rows grows with the square of the bucket size.
    """
    least = KV_BUCKET
    while least < GPU_KV_BUCKET and (2 * least) ** 2 * row_bytes <= GPU_KV_BUCKET**2 << 16:
        least *= 2
    return least


def buckets_up_to(live: int) -> list[int]:
    """All KV buckets of a cache of ``live`` rows, ascending; the last one is ``live``."""
    out = [min(KV_BUCKET, live)]
    while out[-1] < live:
        out.append(min(bucket_for(out[-1] + 1), live))
    return out


@dataclass
class _Home:
    """The rows on one device, and the constants for its masks."""

    backend: Backend
    ctx: Context
    mask_base: Tensor = ffi.NULL
    rotations: dict[int, Tensor] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    buffer: Any = None


class KVCache:
    """One K and one V tensor [size * n_head_kv, rows (, slots)] per attention layer, of ``types``. Owns its buffers.

    A latent layer has one tensor, with V a view of its first values; a layer with an indexer has its rows in addition, of K's type.

    Args:
        trash: rows at the end for padding.
        window, widest: sizes of the ring of sliding layers: the window and the widest block or chunk.
        homes: (device, layers) in order, of a model split over several devices.

    Attributes:
        ring: live rows of sliding layers; 0 if they keep every position.
        mask_base: F32 [rows] = 0.5 - position of each row; ``mask_bases`` per device.
    """

    def __init__(
        self,
        backend: Backend,
        shapes: list[KVShape],
        n_ctx: int,
        trash: int,
        window: int = 0,
        widest: int = 0,
        types: KVTypes = KVTypes(),
        slots: int = 1,
        homes: Sequence[tuple[Backend, int]] = (),
    ) -> None:
        self.live = padded(n_ctx)
        self.ring = padded(window + widest) if window and padded(window + widest) < self.live else 0
        self.trash, self.slots = trash, slots
        self._iota = np.arange(MAX_ROWS)
        rows = self.live + trash
        self._homes: list[_Home] = []
        layers: list[KVLayer] = []
        for home_backend, count in homes or ((backend, len(shapes)),):
            layers += self._layers_on(home_backend, shapes[len(layers) : len(layers) + count], rows, types)
        self.layers = tuple(layers)
        self.mask_bases = [home.mask_base for home in self._homes]
        self.mask_base = self.mask_bases[-1]
        row_bytes = sum(tensor.nb[1] for layer in self.layers for tensor in layer.stored)
        self._least = KV_BUCKET if backend.device.kind == "cpu" else least_bucket(row_bytes)
        try:
            for home in self._homes:
                home.buffer = self._allocate(home, n_ctx)
        except BaseException:
            self.close()
            raise
        self._write_constants()

    def _layers_on(self, backend: Backend, shapes: Sequence[KVShape], rows: int, types: KVTypes) -> list[KVLayer]:
        sizes = {n for s in shapes for n in (*types.rotations(s), s.index) if n}
        home = _Home(backend, new_context(3 * len(shapes) + len(sizes) + 1))
        self._homes.append(home)
        home.mask_base = self._tensor(home, lib.GGML_TYPE_F32, rows)
        home.rotations = {n: self._tensor(home, lib.GGML_TYPE_F32, n, n) for n in sizes}
        return [self._layer(home, s, self.ring + self.trash if s.sliding and self.ring else rows, types) for s in shapes]

    def _allocate(self, home: _Home, n_ctx: int) -> Buffer:
        buffer = home.backend.allocate_zeroed(home.ctx)
        if buffer == ffi.NULL:
            need = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(home.ctx, home.backend.default_buffer_type)
            device = home.backend.device
            raise DeviceError(
                f"a context of {n_ctx} tokens needs {need >> 20} MiB for K/V on {device.name}, which has {free_bytes(device) >> 20} MiB free; "
                "use a smaller `n_ctx`"
            )
        return buffer

    def _tensor(self, home: _Home, kind: int, *ne: int) -> Tensor:
        home.tensors.append(lib.ggml_new_tensor(home.ctx, kind, len(ne), ne))
        return home.tensors[-1]

    def _layer(self, home: _Home, s: KVShape, rows: int, types: KVTypes) -> KVLayer:
        index = self._tensor(home, types.ids[0], s.index, rows, self.slots) if s.index else None
        if s.latent:
            k = self._tensor(home, types.ids[0], s.size, rows, self.slots)
            v = lib.ggml_view_3d(home.ctx, k, s.latent, rows, self.slots, k.nb[1], k.nb[2], 0)
        else:
            k, v = (self._tensor(home, kind, s.size * s.n_head_kv, rows, self.slots) for kind in types.ids)
        of_k, of_v, of_index = (home.rotations.get(n) for n in (*types.rotations(s), s.index))
        return KVLayer(k, v, of_k, of_v, index, of_index)

    def bucket(self, n: int, least: int | None = None) -> int:
        """KV bucket of ``n`` tokens; ``least`` defaults to that of generation on this device."""
        return min(bucket_for(n, least or self._least), self.live)

    def fill(self, value: int) -> None:
        """Sets every byte of every row; tests poison with 0xff (NaN) and 0x3e."""
        for home in self._homes:
            lib.ggml_backend_buffer_clear(home.buffer, value)
        self._write_constants()

    def _write_constants(self) -> None:
        for home in self._homes:
            if home.backend.counting:
                continue
            constants = {home.mask_base: 0.5 - np.arange(self.live + self.trash, dtype=np.float32)}
            constants |= {tensor: hadamard(n) for n, tensor in home.rotations.items()}
            for tensor, values in constants.items():
                lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(values), 0, values.nbytes)

    def fill_slot(self, slot: int, value: int, rows: int | None = None) -> None:
        """Sets every byte of a slot's rows: 0 between sequences, because a masked NaN still poisons attention (0 * NaN).

        ``rows``: the number of written positions; trash rows and rings are always set.
        """
        for tensor in (t for layer in self.layers for t in layer.stored):
            begin, row = slot * tensor.nb[2], tensor.nb[1]
            if rows is None or rows >= self.live or tensor.ne[1] != self.live + self.trash:
                lib.ggml_backend_tensor_memset(tensor, value, begin, tensor.nb[2])
            else:
                lib.ggml_backend_tensor_memset(tensor, value, begin, rows * row)
                lib.ggml_backend_tensor_memset(tensor, value, begin + self.live * row, self.trash * row)

    def rows_for(self, first: int, count: int, real: int, out: np.ndarray) -> None:
        """Writes the cache rows of positions first .. first + count - 1 into ``out``; rows past ``real`` or past the end are trash rows."""
        np.add(self._iota[:count], first, out=out)
        visible = max(0, min(real, self.live - first))
        if visible < count:
            out[visible:] = self.live + self._iota[: count - visible] % self.trash

    def positions_of_ring(self, n: int, out: np.ndarray) -> None:
        """Writes the mask base of the ring's first rows with ``n`` committed tokens into F32 ``out``."""
        last = n - 1
        held = last - last % self.ring + self._iota[: out.size]
        held[held > last] -= self.ring
        np.subtract(0.5, held, out=out, casting="unsafe")
        out[held < 0] = NOWHERE

    def backend_of(self, tensor: Tensor) -> Backend:
        """The backend of one of the layers' tensors."""
        return next(home.backend for home in self._homes if tensor in home.tensors)

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_by_home)

    @property
    def nbytes_by_home(self) -> list[int]:
        """Bytes on each device."""
        return [home.backend.size_of(home.buffer) for home in self._homes]

    def close(self) -> None:
        for home in self._homes:
            if home.buffer is not None:
                home.backend.free_temporary(home.buffer)
            lib.ggml_free(home.ctx)
        self._homes = []
