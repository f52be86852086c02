"""ggml's quantisers and dequantisers for numpy arrays."""

from typing import Any

import numpy as np

from ..checks import whole
from ..errors import ModelError
from ..ggml.library import ffi, lib, text

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs",
         "mxfp4", "nvfp4")  # fmt: skip
"""Types that need no importance matrix; ggml aborts on the others."""


def type_id(name: str, offered: tuple[str, ...] = TYPES) -> int:
    """The ggml type called ``name`` (any case). Raises ModelError: no such type."""
    for kind in range(lib.GGML_TYPE_COUNT):
        if lib.ggml_blck_size(kind) and text(lib.ggml_type_name(kind)).lower() == name.lower():
            return kind
    raise ModelError(f"{name!r} is not a tensor type; use one of {', '.join(offered)}")


def _known(kind: int) -> str:
    """The type's name. Raises ModelError for unknown types."""
    kind = whole(kind, "a tensor type", 0, lib.GGML_TYPE_COUNT - 1, ModelError)
    if not lib.ggml_blck_size(kind):
        raise ModelError(f"there is no tensor type {kind}; use one of {', '.join(TYPES)}")
    return text(lib.ggml_type_name(kind))


def quantise(values: np.ndarray, kind: int) -> np.ndarray:
    """F32 [rows, n] to U8 [rows, row bytes] of the ggml type. Raises ModelError: the type is not in TYPES, or rows are not whole blocks."""
    name = _known(kind)
    if name not in TYPES:
        raise ModelError(f"{name} cannot be quantised to without an importance matrix; use one of {', '.join(TYPES)}")
    values = np.asarray(values)
    if values.ndim < 1 or values.size == 0 or values.dtype.kind not in "fiu" or values.shape[-1] % lib.ggml_blck_size(kind):
        rows = f"rows of whole blocks of {lib.ggml_blck_size(kind)} numbers can"
        raise ModelError(f"{values.dtype} {list(values.shape)} cannot become {name}: {rows}")
    flat = np.ascontiguousarray(values.reshape(-1, values.shape[-1]), np.float32)
    out = np.empty((flat.shape[0], lib.ggml_row_size(kind, flat.shape[1])), np.uint8)
    source = ffi.cast("float *", ffi.from_buffer(flat))
    lib.ggml_quantize_chunk(kind, source, ffi.from_buffer(out), 0, flat.shape[0], flat.shape[1], ffi.NULL)
    return out.reshape(*values.shape[:-1], out.shape[-1])


def dequantise(data, kind: int, count: int) -> np.ndarray:
    """F32 [count] from the bytes of a ggml type; ``count`` is a multiple of its block size. Raises ModelError: unknown type, or one without
    conversion to float."""
    name, count = _known(kind), whole(count, "the number of values", 0, 1 << 62, ModelError)
    if count % lib.ggml_blck_size(kind) or len(data) < lib.ggml_row_size(kind, count):
        raise ModelError(f"{count} values of {name} do not fit {len(data)} bytes; pass whole blocks")
    if kind == lib.GGML_TYPE_F32:
        return np.frombuffer(data, np.float32, count)
    to_float: Any = lib.ggml_get_type_traits(kind).to_float
    if to_float == ffi.NULL:
        raise ModelError(f"ggml cannot turn {name} into floats; compare files of floating-point or quantised weights")
    out = np.empty(count, np.float32)
    with ffi.from_buffer(data) as pointer:
        to_float(pointer, ffi.cast("float *", ffi.from_buffer(out)), count)
    return out
