"""K/V rows of one model: row = absolute position, with a few trash rows at the end, zeroed at creation.

Sliding-window layers keep a ring: row = position mod ring, which holds the window and the widest block or chunk, so that no overwritten row,
rejected or not, is visible to a later query.

Rows below the cursor are live. Rejected rows are not cleared: the mask hides them, and the next block overwrites them.

Rows of quantised types are first rotated: every n values of a head are multiplied by an orthonormal Hadamard matrix, which spreads outliers. q is
rotated like K, and the output of attention is rotated back, so results differ by rounding only. Types, sizes and the order of operations are
llama.cpp's (src/llama-kv-cache.cpp); the rows that a drafter has by default are not rotated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import DeviceError, ModelError, PyspecError
from ..ggml.device import Backend, free_bytes, reads_quantised
from ..ggml.library import Context, Tensor, ffi, lib, new_context, text
from ..models.base import KVLayer, KVShape

KV_BUCKET = 256  # attention reads a multiple of this many rows, as the fast CUDA kernels require
GPU_KV_BUCKET = 1024  # minimum for generation on GPUs, see least_bucket
MAX_ROWS = 1 << 16  # rows that one graph may write
NOWHERE = -1073741824.0  # mask base of an empty ring row: later than every query


def padded(n: int) -> int:
    """n rounded up to a multiple of KV_BUCKET."""
    return (n + KV_BUCKET - 1) // KV_BUCKET * KV_BUCKET


def bucket_step(n: int, least: int = KV_BUCKET, fine: bool = False) -> int:
    """What the bucket of ``n`` tokens is a multiple of; not less for more tokens."""
    return max(least, (1 << (n // 17).bit_length()) // 2 if fine else (1 << (n - 1).bit_length()) // 8)


@lru_cache(maxsize=1 << 12)  # called three times per step
def bucket_for(n: int, least: int = KV_BUCKET, fine: bool = False) -> int:
    """KV bucket of ``n`` tokens: a multiple of ``least``, above 8 times that of an eighth of the next power of two. ``fine``: above 17 times that, of a
    power of two that pads by at most 6 %."""
    step = bucket_step(n, least, fine)
    return (n + step - 1) // step * step


def least_bucket(row_bytes: int) -> int:
    """The ``least`` for generation on GPUs, by bytes of K/V per token: 1,024, above 64 KiB 512, above 256 KiB 256.

    A new bucket costs ggml-cuda one eager launch and one capture; the cost of masked rows grows with the square of the bucket size.
    """
    least = KV_BUCKET
    while least < GPU_KV_BUCKET and (2 * least) ** 2 * row_bytes <= GPU_KV_BUCKET**2 << 16:
        least *= 2
    return least


def buckets_up_to(live: int, fine: bool = False) -> list[int]:
    """All KV buckets of a cache of ``live`` rows, ascending; the last one is ``live``."""
    out = [min(KV_BUCKET, live)]
    while out[-1] < live:
        out.append(min(bucket_for(out[-1] + 1, fine=fine), live))
    return out


TYPES = ("f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
# no f32: llama.cpp rounds such rows to f16 before attention
_IDS = {text(lib.ggml_type_name(i)): i for i in range(lib.GGML_TYPE_COUNT) if lib.ggml_blck_size(i)}
MOST_CONTEXT = 1 << 23  # rows: masks compare positions and halves as F32, exact up to here
READ_SIZES = 128, 256  # values per head of the quantised rows that patches/0037 reads as they lie, for three heads of q and more
SMALLEST_ROTATION = 64  # values; heads that it does not divide are stored unrotated


@dataclass(frozen=True)
class KVTypes:
    """ggml's type names of K and V rows, each one of ``TYPES``; ``rotated``: whether rows of quantised ones are."""

    k: str = "f16"
    v: str = "f16"
    rotated: bool = True

    def __post_init__(self) -> None:
        for name in (self.k, self.v):
            if name not in TYPES:
                raise PyspecError(f"K/V cannot be stored as {name!r}; use one of {', '.join(TYPES)}")

    def __str__(self) -> str:
        return (self.k if self.k == self.v else f"K {self.k} V {self.v}") + " unrotated" * (not self.rotated)

    @property
    def ids(self) -> tuple[int, int]:
        """The ggml types of K and V."""
        return _IDS[self.k], _IDS[self.v]

    def of(self, shape: KVShape) -> tuple[int, int]:
        """The ggml types of a layer's rows."""
        return (lib.GGML_TYPE_F32,) * 2 if shape.exact else self.ids

    def row_bytes(self, shape: KVShape) -> int:
        """Bytes per position and layer: K, V and an indexer's row."""
        sizes = (shape.size,) if shape.latent else (shape.size, shape.size_v)
        attended = sum(lib.ggml_row_size(kind, size * shape.n_head_kv) for kind, size in zip(self.of(shape), sizes))
        return attended + (lib.ggml_row_size(self.ids[0], shape.index) if shape.index else 0)

    def rotations(self, shape: KVShape) -> tuple[int, int]:
        """Sizes of the rotations of K and V, 0 for none: of K the largest power of two that divides the head, of V SMALLEST_ROTATION.

        Latent rows are not rotated, as in llama.cpp.
        """
        if shape.latent or shape.exact or not self.rotated:
            return 0, 0
        sizes = zip(self.ids, (shape.size, shape.size_v), strict=True)
        quantised_k, quantised_v = (lib.ggml_is_quantized(kind) and size % SMALLEST_ROTATION == 0 for kind, size in sizes)
        return (shape.size & -shape.size) * quantised_k, SMALLEST_ROTATION * quantised_v


def draft_types(shapes: Sequence[KVShape], backend: Backend) -> KVTypes:
    """Types of a drafter's rows where nobody names them: q8_0 where attention of the device reads those as they lie, f16 elsewhere.

    They are not rotated, unlike llama.cpp's: rotations take time, and 8 bits hold outliers.
    """
    read = all(shape.size == shape.size_v in READ_SIZES and shape.queries > 2 and not shape.index for shape in shapes)
    return KVTypes("q8_0", "q8_0", rotated=False) if shapes and read and reads_quantised(backend.device) else KVTypes()


def hadamard(n: int) -> np.ndarray:
    """The orthonormal Hadamard matrix F32 [n, n], n a power of two (Sylvester's construction)."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(np.float32(n))


def check_types(types: KVTypes, shapes: Iterable[KVShape], backend: Backend, draft: bool) -> None:
    """Checks that rows of these types can hold these heads, and that the device can write and attend to them.

    Raises:
        ModelError: a head is not a whole number of blocks.
        DeviceError: the backend lacks a kernel.
    """
    whose, option = ("the drafter's", "draft_cache_type") if draft else ("the target's", "cache_type")
    for shape in {shape for shape in shapes if not shape.exact}:
        if shape.latent and types.k != types.v:
            raise ModelError(
                f"{whose} K and V are one row, which cannot be {types.k} and {types.v}; give `{option}_k` and `{option}_v` the same type"
            )
        for letter, name, kind, size in zip("kv", (types.k, types.v), types.ids, (shape.size, shape.size_v), strict=True):
            block = lib.ggml_blck_size(kind)
            if size % block or shape.latent % block or shape.index % block:
                raise ModelError(
                    f"{whose} heads of {size} values are not whole blocks of {block}, which {name} rows consist of; "
                    f"use `{option}_{letter}` f16"
                )
        if shape.index and not _scores(types, shape, backend):
            other = types.k != "f16" and _scores(KVTypes(), shape, backend)
            raise DeviceError(
                f"{backend.device.name} cannot score {types.k} rows of {shape.index} values for {shape.index_heads} heads of an indexer in this "
                f"llama-cpp-python; use {f'`{option}_k` and `{option}_v` f16' if other else 'another device, the CPU scores any'}"
            )
        if not _runs(types, shape, backend) and _runs(KVTypes(), shape, backend):
            raise DeviceError(
                f"{backend.device.name} cannot attend over {types} rows with heads of {shape.size} values in this llama-cpp-python; "
                f"use other types with `{option}_k` and `{option}_v` (f16 works)"
            )


@contextmanager
def _shapes() -> Iterator[tuple[Any, Callable[..., Tensor]]]:
    """A context of unallocated tensors for support queries, and a constructor (type, *ne)."""
    ctx = new_context(31)
    try:
        yield ctx, lambda kind, *ne: lib.ggml_new_tensor(ctx, kind, len(ne), ne)
    finally:
        lib.ggml_free(ctx)


def _scores(types: KVTypes, s: KVShape, backend: Backend) -> bool:
    """Whether the device supports an indexer's operations."""
    with _shapes() as (ctx, new):
        size, kind = (s.index // 2, lib.GGML_TYPE_F32) if s.pooled else (s.index, types.ids[0])
        mask = new(lib.GGML_TYPE_F16, 4 * 256, 2)
        if s.multiplied:
            keys = lib.ggml_cast(ctx, new(kind, size, 4 * 256), lib.GGML_TYPE_F32)
            scores = lib.ggml_mul_mat(ctx, keys, new(lib.GGML_TYPE_F32, size, 2))
        else:
            q, keys = new(lib.GGML_TYPE_F32, size, s.index_heads, 2), new(kind, size, 1, 4 * 256)
            scores = lib.ggml_lightning_indexer(ctx, q, keys, new(lib.GGML_TYPE_F32, s.index_heads, 2), mask)
        chosen = lib.ggml_top_k(ctx, scores, 256)
        hidden = lib.ggml_fill(ctx, new(lib.GGML_TYPE_F16, 1, 4 * 256, 2), float("-inf"))
        seen = lib.ggml_set_rows(ctx, hidden, new(lib.GGML_TYPE_F32, 1, 256, 2), chosen)
        return all(backend.supports(node) for node in (keys, scores, chosen, hidden, seen, lib.ggml_add(ctx, mask, mask)))


def _runs(types: KVTypes, s: KVShape, backend: Backend) -> bool:
    with _shapes() as (ctx, new):
        index, sizes = new(lib.GGML_TYPE_I64, 1), [n * s.n_head_kv for n in (s.size, s.size if s.latent else s.size_v)]
        caches = [new(kind, n, 256) for kind, n in zip(types.ids, sizes, strict=True)]
        values = caches[1] if not s.latent else lib.ggml_view_2d(ctx, caches[0], s.latent, 256, caches[0].nb[1], 0)
        q, mask = new(lib.GGML_TYPE_F32, s.size, 2 * s.n_head_kv, 1), new(lib.GGML_TYPE_F16, 256, 1)
        nodes = [lib.ggml_set_rows(ctx, cache, new(lib.GGML_TYPE_F32, cache.ne[0], 1), index) for cache in caches]
        attention = lib.pgs_flash_attention(ctx, q, caches[0], values, mask, s.n_head_kv, 256, 1.0, 0.0, ffi.NULL, backend.level_handle)
        return all(backend.supports(node) for node in (*nodes, attention.view_src))


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
    """One K and one V tensor [values * n_head_kv, rows (, slots)] per attention layer, of ``types``. Owns its buffers.

    A latent layer has one tensor, with V a view of its first values; a layer with an indexer has its rows in addition, of K's type.

    Args:
        trash: rows at the end for padding.
        window, widest: sizes of the ring of sliding layers: the window and the widest block, or chunk if its rows see each other. No chunk may be wider than both.
        homes: (device, layers) in order, of a model split over several devices.

    Attributes:
        ring: live rows of sliding layers; 0 if they keep every position.
        in_ring: whether each layer is one of those.
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
        self.window, self.trash, self.slots = window, trash, slots
        self.in_ring = [bool(shape.sliding and self.ring) for shape in shapes]
        self._iota = np.arange(MAX_ROWS)
        self._bases = 0.5 - np.arange(self.ring, dtype=np.float32)
        rows = self.live + trash
        self._homes: list[_Home] = []
        layers: list[KVLayer] = []
        for home_backend, count in homes or ((backend, len(shapes)),):
            layers += self._layers_on(home_backend, shapes[len(layers) : len(layers) + count], rows, types)
        self.layers = tuple(layers)
        self.mask_bases = [home.mask_base for home in self._homes]
        self.mask_base = self.mask_bases[-1]
        row_bytes = sum(tensor.nb[1] for layer in self.layers for tensor in layer.stored)
        self.fine = backend.device.kind != "cpu"  # graphs are built while the device computes
        self._least = least_bucket(row_bytes) if self.fine else KV_BUCKET
        try:
            for home in self._homes:
                self._allocate(home, n_ctx)
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

    def _allocate(self, home: _Home, n_ctx: int) -> None:
        home.buffer, device = home.backend.allocate_zeroed(home.ctx), home.backend.device
        if home.buffer == ffi.NULL:
            home.buffer, need = None, lib.ggml_backend_alloc_ctx_tensors_from_buft_size(home.ctx, home.backend.default_buffer_type)
            what, less = f"a context of {n_ctx} tokens needs", "a smaller `n_ctx`"
            if self.slots > 1:
                what, less = f"{self.slots} slots of {n_ctx} tokens need", f"fewer `slots` or {less}"
            free = free_bytes(device) >> 20
            raise DeviceError(f"{what} {need >> 20} MiB for K/V on {device.name}, which has {free} MiB free; use {less}")

    def _tensor(self, home: _Home, kind: int, *ne: int) -> Tensor:
        home.tensors.append(lib.ggml_new_tensor(home.ctx, kind, len(ne), ne))
        return home.tensors[-1]

    def _layer(self, home: _Home, s: KVShape, rows: int, types: KVTypes) -> KVLayer:
        index = self._tensor(home, types.ids[0], s.index, rows, self.slots) if s.index else None
        if s.latent:
            k = self._tensor(home, types.ids[0], s.size, rows, self.slots)
            v = lib.ggml_view_3d(home.ctx, k, s.latent, rows, self.slots, k.nb[1], k.nb[2], 0)
        else:
            sizes = zip(types.of(s), (s.size, s.size_v), strict=True)
            k, v = (self._tensor(home, kind, size * s.n_head_kv, rows, self.slots) for kind, size in sizes)
        of_k, of_v, of_index = (home.rotations.get(n) for n in (*types.rotations(s), s.index))
        return KVLayer(k, v, of_k, of_v, index, of_index)

    def bucket(self, n: int, least: int | None = None) -> int:
        """KV bucket of ``n`` tokens; ``least`` defaults to that of generation on this device."""
        return min(bucket_for(n, least or self._least, self.fine), self.live)

    def unsettled(self, bucket: int, rows: int) -> int:
        """The last rows of a prompt's bucket, a multiple of KV_BUCKET, in front of which all was written before the ``rows`` tokens that it ends with."""
        return padded(bucket_step(bucket, KV_BUCKET, self.fine) + rows)

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

    def in_rings(self, rows: np.ndarray) -> np.ndarray:
        """The rows of rings for rows of ``rows_for``, of several slots one after the other."""
        slot, row = np.divmod(rows, self.live + self.trash)
        return slot * (self.ring + self.trash) + np.where(row < self.live, row % max(self.ring, 1), row - self.live + self.ring)

    def ring_rows_for(self, first: int, count: int, real: int, out: np.ndarray) -> None:
        """As ``rows_for``, of the ring."""
        begin = first % self.ring
        np.remainder(self._iota[begin : begin + count], self.ring, out=out)
        if real < count:
            out[real:] = self.ring + self._iota[: count - real] % self.trash

    def positions_of_ring(self, n: int, out: np.ndarray) -> None:
        """Writes the mask base of the ring's first rows with ``n`` tokens, at least one, into F32 ``out``."""
        turn = (n - 1) // self.ring * self.ring
        begun, count = n - turn, out.size
        np.subtract(self._bases[: min(begun, count)], turn, out=out[:begun])
        if turn:
            np.subtract(self._bases[begun:count], turn - self.ring, out=out[begun:])
        else:
            out[begun:] = NOWHERE

    @property
    def backends(self) -> dict[Tensor, Backend]:
        """The backend of each of the layers' tensors."""
        return {tensor: home.backend for home in self._homes for tensor in home.tensors}

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
