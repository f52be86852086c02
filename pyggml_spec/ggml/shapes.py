"""Checks what ggml asserts about the operands of a node, before ggml aborts the process without naming the shapes."""

import math
from collections.abc import Iterable, Sequence

from ..errors import EngineError
from .library import Tensor, lib, text

NOT_WEIGHTS = {"q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"}  # ggml aborts on products of these
F32, I32, I64 = lib.GGML_TYPE_F32, lib.GGML_TYPE_I32, lib.GGML_TYPE_I64


def described(tensor: Tensor) -> str:
    """Type and shape, like "F32 [64, 5]"."""
    ne = list(tensor.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return f"{text(lib.ggml_type_name(tensor.type)).upper()} {ne}"


def require(fits: bool, verb: str, **operands: object) -> None:
    """Raises EngineError that shows the operands, unless ``fits``."""
    if not fits:
        shown = ", ".join(f"{name} {described(x) if isinstance(x, Tensor) else x}" for name, x in operands.items())
        raise EngineError(f"{verb} cannot be computed of {shown}")


def can_repeat(small: Tensor, big_ne: Iterable[int]) -> bool:
    """Whether ``small`` repeats to the shape ``big_ne`` of up to 4 dimensions."""
    return all(n > 0 and big % n == 0 for n, big in zip(small.ne, (*big_ne, 1, 1, 1)))


def can_mul_mat(weight: Tensor, x: Tensor) -> bool:
    """Whether ggml multiplies ``weight`` with ``x``."""
    a, b = weight.ne, x.ne
    return a[0] == b[0] and b[2] % a[2] == 0 and b[3] % a[3] == 0 and weight.nb[0] <= weight.nb[1]


def in_range(x: Tensor, dim: int, first: int, count: int) -> bool:
    """Whether [first, first + count) is inside dimension ``dim``."""
    return first >= 0 and count > 0 and first + count <= x.ne[dim]


def view_fits(x: Tensor, shape: Sequence[int], strides: Sequence[int], first: int) -> bool:
    """Whether a view of F32 values, strides and first in bytes, is inside ``x``."""
    last = first + sum((n - 1) * s for n, s in zip(shape, strides)) + 4
    return x.type == F32 and min(shape) > 0 and min(first, *strides) >= 0 and last <= lib.ggml_nbytes(x)


def can_reshape(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether ``x`` is contiguous and has as many values as ``shape``."""
    return 1 <= len(shape) <= 4 and min(shape) > 0 and math.prod(shape) == math.prod(x.ne) and lib.ggml_is_contiguous(x)
