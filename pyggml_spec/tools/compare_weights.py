"""Compares two GGUFs tensor by tensor after dequantisation, to check a converter or quantiser."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from ..errors import ModelError
from ..ggml.library import lib
from ..gguf_io import GGUFFile, TensorInfo
from .quants import dequantise

OUTLIER = 3.0  # times the median of its type
UNRELATED = 0.5  # quantisation stays below 0.3; independent tensors have 1.4
CHUNK_VALUES = 4 << 20


@dataclass(frozen=True)
class TensorDifference:
    """One tensor. ``relative_rms``: rms(b - a) / rms(a), or None; ``flag``: why it is an outlier, or empty."""

    name: str
    types: tuple[str, str]
    relative_rms: float | None
    flag: str = ""


@dataclass(frozen=True)
class WeightComparison:
    """Tensors in the order of the first file; those in one file only come last."""

    a: str
    b: str
    tensors: tuple[TensorDifference, ...]

    @property
    def flagged(self) -> tuple[TensorDifference, ...]:
        """The outliers."""
        return tuple(t for t in self.tensors if t.flag)

    def as_dict(self) -> dict:
        return {**asdict(self), "flagged": [t.name for t in self.flagged]}


def _shape(info: TensorInfo) -> tuple[int, ...]:
    shape = info.shape
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _relative_rms(a: GGUFFile, b: GGUFFile, name: str) -> float:
    """In double precision, in pieces; NaN if a tensor holds NaN or Inf."""
    left, right = a.tensors[name], b.tensors[name]
    row = left.shape[0]
    count = int(np.prod(left.shape))
    step = max(1, CHUNK_VALUES // row) * row
    error = scale = 0.0
    with a.read(name) as data_a, b.read(name) as data_b:
        for first in range(0, count, step):
            n = min(step, count - first)
            x, y = (
                dequantise(data[lib.ggml_row_size(t.type, first) : lib.ggml_row_size(t.type, first + n)], t.type, n).astype(np.float64)
                for data, t in ((data_a, left), (data_b, right))
            )
            error += float(((y - x) ** 2).sum())
            scale += float((x**2).sum())
            del x, y
    if scale == 0:
        return 0.0 if error == 0 else float("inf")
    return (error / scale) ** 0.5


def _compare(a: GGUFFile, b: GGUFFile, name: str) -> TensorDifference:
    left, right = a.tensors[name], b.tensors[name]
    difference = partial(TensorDifference, name, (left.type_name, right.type_name))
    if _shape(left) != _shape(right):
        return difference(None, f"shape {list(left.shape)} against {list(right.shape)}")
    value = _relative_rms(a, b, name)
    if not np.isfinite(value):
        return difference(None, "all zero in one file" if np.isinf(value) else "NaN or Inf")
    return difference(value, "not the same weights" if value > UNRELATED else "")


def _flag_outliers(tensors: list[TensorDifference]) -> list[TensorDifference]:
    """Outliers: more than OUTLIER times the median of tensors with the same types."""
    by_types: dict[tuple, list[float]] = {}
    for t in tensors:
        if t.relative_rms is not None:
            by_types.setdefault(t.types, []).append(t.relative_rms)
    out = []
    for t in tensors:
        if t.relative_rms is not None and not t.flag and t.relative_rms > OUTLIER * (usual := median(by_types[t.types])):
            more = f"{t.relative_rms / usual:.1f} times the median of its type" if usual else "differs, although its type is equal"
            t = replace(t, flag=more)
        out.append(t)
    return out


def compare_weights(
    a: str | Path, b: str | Path, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> WeightComparison:
    """Compares every tensor of ``a`` (the reference) with the one of that name in ``b``. Raises GGUFError: a file cannot be read;
    ModelError: no common tensors."""
    with GGUFFile(a) as left, GGUFFile(b) as right:
        common = [name for name in left.tensors if name in right.tensors]
        if not common:
            raise ModelError(f"{left.path} and {right.path} have no tensor in common; compare two files of the same model")
        total = sum(left.tensors[name].nbytes for name in common)
        tensors, done = [], 0
        for name in common:
            tensors.append(_compare(left, right, name))
            done += left.tensors[name].nbytes
            progress("weights", done, total)
        tensors = _flag_outliers(tensors)
        for file, other in ((left, right), (right, left)):
            for info in file.tensors.values():
                if info.name not in other.tensors:
                    types = (info.type_name, "-") if file is left else ("-", info.type_name)
                    tensors.append(TensorDifference(info.name, types, None, f"only in {file.path.name}"))
        return WeightComparison(str(left.path), str(right.path), tuple(tensors))
