"""Reads a safetensors file from a memory map, without torch.

Layout: header length u64, header (JSON: name -> dtype, shape, [begin, end) in the data), data. BF16 is widened to F32, which is exact; the safetensors
package cannot return it to numpy.
"""

import itertools
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..errors import ConvertError
from .mapped import MappedFile
from .reader import brief

MAX_HEADER = 16 << 20
MAX_TENSORS = 1 << 16
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1}
_INTEGERS = {"I64": "<i8", "I32": "<i4"}
_READ = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor: ``shape`` as stored (outermost first), ``start`` absolute in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def parse_json(data: bytes, what: str, limit: int = MAX_HEADER) -> dict:
    """A JSON object. Raises ConvertError: too long, invalid JSON, no object, or a duplicate name."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a name appears twice")
        return out

    if len(data) > limit:
        raise ConvertError(f"{what} has {len(data)} bytes, more than the {limit} that it can have; the file is damaged")
    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{what} is no valid JSON ({brief(str(error))}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{what} is no JSON object; fetch the file again")
    return value


class SafetensorsFile(MappedFile):
    """An open safetensors file: ``tensors`` (name to SafeTensor). Close it, or use it in a ``with`` block. Raises ConvertError: the file is
    missing, not safetensors, or inconsistent."""

    kind, error = "safetensors", ConvertError

    def __init__(self, path: str | Path) -> None:
        self.tensors: dict[str, SafeTensor] = {}
        self._open_map(path)

    def _fail(self, what: str) -> NoReturn:
        raise ConvertError(f"{self.path}: {what}; the file is damaged or was cut short, fetch it again")

    def _read(self) -> None:
        if len(self._map) < 8:
            self._fail(f"{len(self._map)} bytes are no safetensors file")
        (length,) = struct.unpack_from("<Q", self._map)
        if length > min(MAX_HEADER, len(self._map) - 8):
            self._fail(f"the header claims {length} bytes, but at most {min(MAX_HEADER, len(self._map) - 8)} are possible")
        header = parse_json(self._map[8 : 8 + length], f"the header of {self.path}")
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            self._fail(f"{len(header)} tensors are more than any model has ({MAX_TENSORS})")
        data = 8 + length
        for name, entry in header.items():
            self.tensors[name] = self._tensor(name, entry, data)
        ordered = sorted(self.tensors.values(), key=lambda t: t.start)
        for a, b in itertools.pairwise(ordered):
            if a.start + a.nbytes > b.start:
                self._fail(f"the tensors {brief(a.name)} and {brief(b.name)} overlap")

    def _tensor(self, name: str, entry: Any, data: int) -> SafeTensor:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            self._fail(f"the entry of {brief(name)} has no dtype, shape and data_offsets")
        if not isinstance(dtype, str) or dtype not in _SIZES:
            self._fail(f"the tensor {brief(name)} has the unknown type {brief(dtype)}")
        if not isinstance(shape, list) or len(shape) > 8 or any(type(n) is not int or not 0 < n < 1 << 40 for n in shape):
            self._fail(f"the tensor {brief(name)} has the impossible shape {brief(shape)}")
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= len(self._map) - data:
            self._fail(f"the tensor {brief(name)} lies at {brief([begin, end])}, outside the file's data of {len(self._map) - data} bytes")
        if math.prod(shape) * _SIZES[dtype] != end - begin:
            self._fail(f"the tensor {brief(name)} of {dtype} {shape} has {end - begin} bytes instead of {math.prod(shape) * _SIZES[dtype]}")
        return SafeTensor(name, dtype, tuple(shape), data + begin, end - begin)

    def rows(self, name: str, first: int, count: int) -> np.ndarray:
        """Rows [first, first + count) of the tensor (outermost dimension; a vector is one row) as F32 [count, row]. Raises ConvertError:
        not a floating-point type."""
        t = self.tensors[name]
        if t.dtype not in _READ:
            hint = "F32, F16 and BF16 are supported, so use the unquantised checkpoint"
            raise ConvertError(f"{self.path}: the tensor {brief(name)} is stored as {t.dtype}; {hint}")
        width = t.shape[-1] if t.shape else 1
        raw = np.frombuffer(self._map, _READ[t.dtype], count * width, t.start + first * width * _SIZES[t.dtype])
        if t.dtype == "BF16":
            return (raw.astype("<u4") << 16).view("<f4").reshape(count, width)
        return raw.astype(np.float32).reshape(count, width)

    def integers(self, name: str) -> np.ndarray:
        """An integer tensor as I64 in its shape. Raises ConvertError: another type."""
        t = self.tensors[name]
        if t.dtype not in _INTEGERS:
            raise ConvertError(f"{self.path}: the tensor {brief(name)} is stored as {t.dtype}, but it holds whole numbers (I64 or I32)")
        return np.frombuffer(self._map, _INTEGERS[t.dtype], math.prod(t.shape), t.start).astype(np.int64).reshape(t.shape)
