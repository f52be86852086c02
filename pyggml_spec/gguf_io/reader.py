"""Reads a GGUF (versions 2 and 3, little endian) from a memory map.

Layout: magic, version u32, n_tensors u64, n_kv u64, key-values, tensor infos, padding to `general.alignment`, tensor data.
ggml aborts on an inconsistent file, so everything that it asserts is checked here first, and allocations are bounded by the file's size.
"""

import copy
import hashlib
import itertools
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from blake3 import blake3

from ..errors import GGUFError
from ..ggml.library import ffi, lib, text
from . import split
from .identity import Progress, content_hash
from .mapped import MappedFile

T = TypeVar("T")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NUMPY = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}

MAX_NAME = 64  # GGML_MAX_NAME, with the terminating zero
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 16
LONG_STRING = 1 << 20  # longer values (an embedded tokenizer.json) stay in the file, as a StringArray of one
MAX_TEXT = 12 << 20  # bytes of keys, names and shorter values; Python strings can take four times as much


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor: ``shape`` in ggml order (innermost first); ``offset`` and ``nbytes`` absolute in the file, which is ``part`` (from 0) of a split model."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0

    @property
    def type_name(self) -> str:
        return text(lib.ggml_type_name(self.type))


class StringArray:
    """A string array that stays in the file until accessed. ``bounds``: the offset of each string's length field, and the end of the array."""

    __slots__ = ("_bounds", "_data")

    def __init__(self, data: Any, bounds: np.ndarray) -> None:
        self._data, self._bounds = data, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def raw(self, i: int) -> bytes:
        if not -len(self) <= i < len(self):
            raise IndexError(f"string {i} of {len(self)}")
        i %= len(self)
        return bytes(self._data[int(self._bounds[i]) + 8 : int(self._bounds[i + 1])])

    def raws(self) -> Iterator[bytes]:
        """``raw`` of every string, in a third of the time."""
        return (bytes(self._data[start + 8 : end]) for start, end in itertools.pairwise(self._bounds.tolist()))

    def distinct(self) -> bool:
        """Whether no string is empty or equal to another, up to a zero in each."""
        with memoryview(self._data) as data, ffi.from_buffer(data) as start, ffi.from_buffer("int64_t[]", self._bounds) as bounds:
            return lib.pgs_strings_differ(start, bounds, len(self))

    def same(self, other: "StringArray") -> bool:
        """Whether both arrays are equal: their bytes, lengths included, are the same."""
        return bool(self._bytes() == other._bytes())

    def _bytes(self) -> Any:
        return self._data[int(self._bounds[0]) : int(self._bounds[-1])]

    def __getitem__(self, i: int) -> str:
        return self.raw(i).decode("utf-8", "replace")


def brief(value: Any, limit: int = 72) -> str:
    """A metadata value as one printable line."""
    if isinstance(value, StringArray):
        shown = ", ".join(repr(value.raw(i)[:limit].decode("utf-8", "replace")) for i in range(min(4, len(value))))
        out = f"[{shown}{', ...' if len(value) > 4 else ''}] ({len(value)} strings)"
    elif isinstance(value, np.ndarray):
        out = f"[{', '.join(str(v) for v in value[:8])}{', ...' if len(value) > 8 else ''}] ({len(value)} values)"
    else:
        out = repr(value[: limit + 1]) if isinstance(value, str) else str(value)
    return out if len(out) <= limit else out[: limit - 3] + "..."


class _Cursor:
    def __init__(self, data: Any, path: Path) -> None:
        self.data, self.at, self.path, self.text = data, 4, path, 0

    def fail(self, what: str) -> NoReturn:
        raise GGUFError(f"{self.path}: {what}; the file is damaged or was cut short, fetch it again")

    def need(self, n: int, what: str) -> int:
        if n > len(self.data) - self.at:
            self.fail(f"{what} needs {n} bytes at byte {self.at}, but the file has {len(self.data)}")
        start = self.at
        self.at += n
        return start

    def scalar(self, fmt: str, what: str) -> Any:
        return struct.unpack_from("<" + fmt, self.data, self.need(struct.calcsize("<" + fmt), what))[0]

    def string(self, what: str, limit: int) -> str:
        n = self.scalar("Q", what)
        if n > limit:
            self.fail(f"{what} claims a length of {n} bytes (at most {limit} is possible)")
        start = self.need(n, what)
        self.text += n
        if self.text > MAX_TEXT:
            self.fail(f"{what} brings the text of all keys and names to {self.text} bytes (at most {MAX_TEXT} is possible)")
        return bytes(self.data[start : start + n]).decode("utf-8", "replace")


class GGUFFile(MappedFile):
    """An open GGUF: ``metadata`` (str keys), ``tensors`` (name to TensorInfo). Close it, or use it in a ``with`` block.

    A split model is opened by any of its parts; ``path`` is then the first one. ``rope``: overrides, see ``models.rope.RopeOptions``.
    Raises GGUFError: the file is missing, no GGUF, or inconsistent, or a part is missing or of another model; with the offending value."""

    kind, magic, error = "GGUF", b"GGUF", GGUFError
    metadata: dict
    tensors: dict[str, TensorInfo]
    version: int
    rope: Any = None

    def __init__(self, path: str | Path) -> None:
        self._parts: list[GGUFFile] = []  # of a split model
        self._open_map(path)
        if split.COUNT in self.metadata:
            try:
                if self.get(split.COUNT, int) > 1:
                    self._join()
            except BaseException:
                self.close()
                raise

    def _join(self) -> None:
        paths = split.part_paths(self.path, self.metadata)
        own = copy.copy(self)
        own._parts = []
        for number, path in enumerate(paths):
            self._parts.append(own if path == own.path else GGUFFile._alone(path))
            split.check_part(path, self._parts[-1].metadata, number, self._parts[0].metadata)
        first = self._parts[0]
        self.path, self.version, self.metadata = first.path, first.version, first.metadata
        self.tensors, total = {}, first.metadata.get(split.TENSORS)
        for number, part in enumerate(self._parts):
            if twice := next(filter(self.tensors.__contains__, part.tensors), None):
                both = f"is in {part.path} and in a part before it; the parts are not of one model"
                raise GGUFError(f"the tensor {twice!r} {both}, fetch them again")
            self.tensors |= {name: replace(info, part=number) for name, info in part.tensors.items()}
        if total is not None and len(self.tensors) != total:
            declared = f"{first.path} declares that its {len(paths)} parts hold {total} tensors"
            raise GGUFError(f"{declared}, but they hold {len(self.tensors)}; fetch them again, all of one model")

    @classmethod
    def _alone(cls, path: Path) -> "GGUFFile":
        """A single file, whether part of a model or not."""
        file = cls.__new__(cls)
        file._parts = []
        file._open_map(path)
        return file

    # -- parsing

    def _read(self) -> None:
        self.metadata, self.tensors = {}, {}
        cur = _Cursor(self._map, self.path)
        version = cur.scalar("I", "the version")
        if version not in (2, 3):
            if version in (0x02000000, 0x03000000):
                raise GGUFError(f"{self.path} is a big-endian GGUF; convert it to little endian first")
            raise GGUFError(f"{self.path} has GGUF version {version}, but 2 and 3 are supported; convert it again with a current tool")
        self.version = version
        n_tensors, n_keys = cur.scalar("Q", "the tensor count"), cur.scalar("Q", "the key count")
        if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
            cur.fail(f"{n_tensors} tensors and {n_keys} keys are more than any model has ({MAX_TENSORS}, {MAX_KEYS})")
        for _ in range(n_keys):
            key = cur.string("a key", 65535)
            shown = brief(key)
            if key in self.metadata:
                cur.fail(f"the key {shown} appears twice")
            self.metadata[key] = self._read_value(cur, cur.scalar("I", f"the type of {shown}"), shown)
        self._read_tensors(cur, n_tensors)

    def _read_value(self, cur: _Cursor, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return cur.scalar(_SCALARS[kind], f"the value of {key}")
        if kind == _STRING:
            length = cur.scalar("Q", f"the value of {key}")
            cur.at -= 8
            return self._read_strings(cur, key, 1) if length > LONG_STRING else cur.string(f"the value of {key}", LONG_STRING)
        if kind != _ARRAY:
            cur.fail(f"the value of {key} has the unknown type {kind}")
        item, count = cur.scalar("I", f"the array {key}"), cur.scalar("Q", f"the array {key}")
        if item in _NUMPY:
            dtype = np.dtype(_NUMPY[item])
            if count == 0:
                return np.empty(0, dtype)
            start = cur.need(count * dtype.itemsize, f"the array {key} of {count} values")
            if dtype.kind == "b":  # any byte but 0 is true; numpy would keep a 2
                return np.frombuffer(cur.data, np.uint8, count, start) != 0
            return np.frombuffer(cur.data, dtype, count, start).copy()
        if item != _STRING:
            cur.fail(f"the array {key} holds values of the unsupported type {item}")
        return self._read_strings(cur, key, count)

    def _read_strings(self, cur: _Cursor, key: str, count: int) -> StringArray:
        if count > (len(cur.data) - cur.at) // 8:
            cur.fail(f"{key} claims {count} strings, more than the file can hold")
        bounds = np.empty(count + 1, np.int64)
        with memoryview(cur.data) as data, ffi.from_buffer(data) as start, ffi.from_buffer("int64_t[]", bounds) as into:
            inside = lib.pgs_string_bounds(start, cur.at, len(data), count, into)
        if inside < count:
            cur.fail(f"string {inside} of {key} runs past the end of the file")
        cur.at = int(bounds[count])
        return StringArray(cur.data, bounds)

    def _read_tensors(self, cur: _Cursor, count: int) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            cur.fail(f"general.alignment is {brief(alignment)}, which is not a power of two up to {1 << 20}")
        infos = []
        for i in range(count):
            name = cur.string(f"the name of tensor {i}", MAX_NAME - 1)
            n_dims = cur.scalar("I", f"tensor {name!r}")
            if not 1 <= n_dims <= 4:
                cur.fail(f"tensor {name!r} has {n_dims} dimensions (1 to 4 are possible)")
            shape = tuple(cur.scalar("Q", f"tensor {name!r}") for _ in range(n_dims))
            kind, offset = cur.scalar("I", f"tensor {name!r}"), cur.scalar("Q", f"tensor {name!r}")
            infos.append((name, kind, shape, offset))
        data = (cur.at + alignment - 1) // alignment * alignment
        for name, kind, shape, offset in infos:
            if name in self.tensors:
                cur.fail(f"the tensor {name!r} appears twice")
            nbytes = self._tensor_bytes(cur, name, kind, shape)
            if offset % alignment:
                cur.fail(f"tensor {name!r} starts at {offset}, which is not aligned to {alignment}")
            if data + offset + nbytes > len(self._map):
                cur.fail(f"tensor {name!r} ends at byte {data + offset + nbytes}, but the file has {len(self._map)}")
            self.tensors[name] = TensorInfo(name, kind, shape, data + offset, nbytes)
        ordered = sorted(self.tensors.values(), key=lambda t: t.offset)
        for a, b in itertools.pairwise(ordered):
            if a.offset + a.nbytes > b.offset:
                cur.fail(f"the tensors {a.name!r} and {b.name!r} overlap")

    def _tensor_bytes(self, cur: _Cursor, name: str, kind: int, shape: tuple[int, ...]) -> int:
        if kind >= lib.GGML_TYPE_COUNT or lib.ggml_blck_size(kind) == 0 or lib.ggml_type_size(kind) == 0:
            cur.fail(f"tensor {name!r} has the unknown type {kind}")
        total = math.prod(shape)
        if not 0 < total < 1 << 46:  # 64 Ti elements; keeps the products below in 63 bits
            cur.fail(f"tensor {name!r} has the impossible shape {list(shape)}")
        block = lib.ggml_blck_size(kind)
        if shape[0] % block:
            cur.fail(f"tensor {name!r} has rows of {shape[0]}, which {text(lib.ggml_type_name(kind))} cannot store (blocks of {block})")
        return total // block * lib.ggml_type_size(kind)

    # -- access

    @cached_property
    def beginning(self) -> tuple[int, str]:
        """Size and hash of the first MiB, of what is open: another file may have its name by now."""
        data = self._parts[0]._map if self._parts else self._map
        return len(data), hashlib.sha256(data[: 1 << 20]).hexdigest()

    def under_other_names(self, metadata: dict, tensors: dict[str, TensorInfo]) -> "GGUFFile":
        """A view of this file with other metadata and tensor names. Borrows the memory: only this file has to be closed."""
        view = copy.copy(self)
        view.metadata, view.tensors = metadata, {name: replace(info, name=name) for name, info in tensors.items()}
        return view

    def part_of(self, info: TensorInfo) -> "GGUFFile":
        """The file of a split model that has the tensor."""
        return self._parts[info.part] if self._parts else self

    def read(self, name: str) -> memoryview:
        """The tensor's bytes in the file. Valid until ``close``. Raises GGUFError: the file was truncated since it was opened."""
        info = self.tensors[name]
        file = self.part_of(info)
        data, end = file._map, info.offset + info.nbytes
        if (size := data.size()) < end:
            cut = f"it has {size} bytes, and the tensor {name!r} ended at {end}"
            raise GGUFError(f"{file.path} was cut while it was read: {cut}; fetch it again")
        return memoryview(data)[info.offset : end]

    def forget(self, name: str) -> None:
        """Releases the pages of a copied tensor; they are read again on the next access."""
        info = self.tensors[name]
        data = self.part_of(info)._map
        first, end = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE, (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first and hasattr(mmap, "MADV_DONTNEED"):  # Windows has none
            data.madvise(mmap.MADV_DONTNEED, first, end - first)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of ``key``, of type ``kind``; ``default`` if the key is absent. Raises GGUFError: another type, NaN or Inf, or absent
        without a default."""
        if key not in self.metadata:
            if default is None:
                raise GGUFError(f"{self.path} has no key {key!r}, which this architecture needs; convert the model again")
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise GGUFError(f"{self.path}: the key {key!r} holds {brief(value)}, which is not of the type that it must have")
        if isinstance(value, float) and not math.isfinite(value):
            raise GGUFError(f"{self.path}: the key {key!r} holds {value}, which is not a finite number; convert the model again")
        return value

    def array(self, key: str, kinds: str = "iub") -> np.ndarray | None:
        """The numeric array ``key`` (numpy kinds i, u, b or f); None if absent. Raises GGUFError: another type."""
        value = self.metadata.get(key)
        if value is not None and not (isinstance(value, np.ndarray) and value.dtype.kind in kinds):
            raise GGUFError(f"{self.path}: the key {key!r} holds {brief(value)}, which is not a list of the numbers that it must have")
        return value

    def identity(self, progress: Progress = lambda done, total: None) -> str:
        """BLAKE3 of the file in hex, cached; of a split model, of its parts' hashes. ``progress`` receives (bytes done, bytes of the file).
        Raises GGUFError: the file was modified or replaced since it was opened."""
        if not self._parts:
            return content_hash(self.path, self._map, self._opened, progress)
        before, names = 0, []
        for part in self._parts:
            names.append(part.identity(lambda done, _, before=before: progress(before + done, self.nbytes)))  # type: ignore[misc]
            before += part.nbytes
        return blake3("".join(names).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Size of the file, or of all parts."""
        return sum(len(part._map) for part in self._parts or [self])

    def close(self) -> None:
        # only memoryviews from read() can still hold the map
        for part in self._parts:
            part.close()
        super().close()
