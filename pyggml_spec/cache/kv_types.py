"""Types of stored K and V rows.

Rows of quantised types are first rotated: every n values of a head are multiplied by an orthonormal Hadamard matrix, which spreads outliers. q is
rotated like K, and the output of attention is rotated back, so results differ by rounding only. Types, sizes and the order of operations are
llama.cpp's (src/llama-kv-cache.cpp).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DeviceError, ModelError, PyspecError
from ..ggml.device import Backend
from ..ggml.library import Tensor, ffi, lib, new_context, text
from ..models.base import KVShape

TYPES = ("f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
# no f32: llama.cpp rounds such rows to f16 before attention
_IDS = {text(lib.ggml_type_name(i)): i for i in range(lib.GGML_TYPE_COUNT) if lib.ggml_blck_size(i)}
MOST_CONTEXT = 1 << 23  # rows: masks compare positions and halves as F32, exact up to here
SMALLEST_ROTATION = 64  # values; heads that it does not divide are stored unrotated


@dataclass(frozen=True)
class KVTypes:
    """ggml's type names of K and V rows, each one of ``TYPES``."""

    k: str = "f16"
    v: str = "f16"

    def __post_init__(self) -> None:
        for name in (self.k, self.v):
            if name not in TYPES:
                raise PyspecError(f"K/V cannot be stored as {name!r}; use one of {', '.join(TYPES)}")

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"K {self.k} V {self.v}"

    @property
    def ids(self) -> tuple[int, int]:
        """The ggml types of K and V."""
        return _IDS[self.k], _IDS[self.v]

    def row_bytes(self, shape: KVShape) -> int:
        """Bytes per position and layer: K, V and an indexer's row."""
        attended = sum(lib.ggml_row_size(kind, shape.size * shape.n_head_kv) for kind in (self.ids[:1] if shape.latent else self.ids))
        return attended + (lib.ggml_row_size(self.ids[0], shape.index) if shape.index else 0)

    def rotations(self, shape: KVShape) -> tuple[int, int]:
        """Sizes of the rotations of K and V, 0 for none: of K the largest power of two that divides the head, of V SMALLEST_ROTATION.

        Latent rows are not rotated, as in llama.cpp.
        """
        if shape.latent:
            return 0, 0
        quantised_k, quantised_v = (lib.ggml_is_quantized(kind) and shape.size % SMALLEST_ROTATION == 0 for kind in self.ids)
        return (shape.size & -shape.size) * quantised_k, SMALLEST_ROTATION * quantised_v


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
    for shape in set(shapes):
        if shape.latent and types.k != types.v:
            raise ModelError(
                f"{whose} K and V are one row, which cannot be {types.k} and {types.v}; give `{option}_k` and `{option}_v` the same type"
            )
        for letter, name, kind in zip("kv", (types.k, types.v), types.ids, strict=True):
            block = lib.ggml_blck_size(kind)
            if shape.size % block or shape.latent % block or shape.index % block:
                raise ModelError(
                    f"{whose} heads of {shape.size} values are not whole blocks of {block}, which {name} rows consist of; "
                    f"use `{option}_{letter}` f16"
                )
        if shape.index and not _scores(types, shape, backend):
            raise DeviceError(
                f"{backend.device.name} cannot score {types.k} rows of {shape.index} values for {shape.index_heads} heads of an indexer in this "
                f"llama-cpp-python{_other_type(types, shape, backend, option)}"
            )
        if not _runs(types, shape, backend) and _runs(KVTypes(), shape, backend):
            raise DeviceError(
                f"{backend.device.name} cannot attend over {types} rows with heads of {shape.size} values in this llama-cpp-python; "
                f"use other types with `{option}_k` and `{option}_v` (f16 works)"
            )


def _other_type(types: KVTypes, shape: KVShape, backend: Backend, option: str) -> str:
    """The remedy where an indexer's rows cannot have this type."""
    if types.k != "f16" and _scores(KVTypes(), shape, backend):
        return f"; use `{option}_k` and `{option}_v` f16"
    return "; use another device, the CPU scores any"


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
        q, k, mask = (
            new(lib.GGML_TYPE_F32, s.index, s.index_heads, 2),
            new(types.ids[0], s.index, 1, 4 * 256),
            new(lib.GGML_TYPE_F16, 4 * 256, 2),
        )
        scores = lib.ggml_lightning_indexer(ctx, q, k, new(lib.GGML_TYPE_F32, s.index_heads, 2), mask)
        chosen = lib.ggml_top_k(ctx, scores, 256)
        hidden = lib.ggml_fill(ctx, new(lib.GGML_TYPE_F16, 1, 4 * 256, 2), float("-inf"))
        seen = lib.ggml_set_rows(ctx, hidden, new(lib.GGML_TYPE_F32, 1, 256, 2), chosen)
        return all(backend.supports(node) for node in (scores, chosen, hidden, seen, lib.ggml_add(ctx, mask, mask)))


def _runs(types: KVTypes, s: KVShape, backend: Backend) -> bool:
    with _shapes() as (ctx, new):
        rows, index = new(lib.GGML_TYPE_F32, s.size * s.n_head_kv, 1), new(lib.GGML_TYPE_I64, 1)
        caches = [new(kind, s.size * s.n_head_kv, 256) for kind in types.ids]
        values = caches[1] if not s.latent else lib.ggml_view_2d(ctx, caches[0], s.latent, 256, caches[0].nb[1], 0)
        q, mask = new(lib.GGML_TYPE_F32, s.size, 2 * s.n_head_kv, 1), new(lib.GGML_TYPE_F16, 256, 1)
        nodes = [lib.ggml_set_rows(ctx, cache, rows, index) for cache in caches]
        attention = lib.pgs_flash_attention(ctx, q, caches[0], values, mask, s.n_head_kv, 256, 1.0, 0.0, ffi.NULL, backend.level_handle)
        return all(backend.supports(node) for node in (*nodes, attention.view_src))
