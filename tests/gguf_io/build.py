"""GGUF files from bytes, so that a test can say exactly which of them are wrong."""

import copy
import json
import struct
from pathlib import Path

from random_gguf.model import Shape

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_FORMAT = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, v) -> bytes:
    """``v`` as it follows its type; an array is (item type, list)."""
    if kind == STR:
        return string(v)
    if kind == ARR:
        item, values = v
        if item in _FORMAT:
            return struct.pack(f"<IQ{len(values)}{_FORMAT[item]}", item, len(values), *values)
        return struct.pack("<IQ", item, len(values)) + b"".join(value(item, one) for one in values)
    return struct.pack("<" + _FORMAT[kind], v)


def key(name: str | bytes, kind: int, v) -> bytes:
    return string(name) + struct.pack("<I", kind) + value(kind, v)


def info(name: str | bytes, shape=(32,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)


def header(n_tensors: int = 0, n_keys: int = 0, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys)


def aligned(data: bytes, to: int = 32) -> bytes:
    return data + bytes(-len(data) % to)


def gguf(keys: list[bytes] = (), infos: list[bytes] = (), data: bytes = b"", alignment: int = 32) -> bytes:
    """A whole file of encoded keys and tensor infos."""
    return aligned((header(len(infos), len(keys)) + b"".join(keys) + b"".join(infos)), alignment) + data


class Model:
    """A valid GGUF taken apart: ``keys`` name -> (type, value), ``tensors`` name -> [shape, type, bytes]; ``write`` puts it together."""

    def __init__(self, path: str | Path):
        self._data, self._at = Path(path).read_bytes(), 8
        self.gap = 0  # bytes to leave between tensors
        n_tensors, n_keys = self._take("QQ")
        self.keys, self.tensors, offsets = {}, {}, {}
        for _ in range(n_keys):
            name, kind = self._text().decode(), self._take("I")[0]
            self.keys[name] = (kind, self._value(kind))
        for _ in range(n_tensors):
            name, shape = self._text().decode(), self._take(f"{self._take('I')[0]}Q")
            self.tensors[name] = [shape, *self._take("I"), b""]
            offsets[name] = self._take("Q")[0]
        start = len(aligned(self._data[: self._at]))
        ends = [*list(offsets.values())[1:], len(self._data) - start]
        for name, end in zip(offsets, ends):
            self.tensors[name][2] = self._data[start + offsets[name] : start + end]

    def copy(self) -> "Model":
        """Another one, whose keys and parts of tensors can be replaced."""
        other = copy.copy(self)
        other.keys, other.tensors = dict(self.keys), {name: [*parts] for name, parts in self.tensors.items()}
        return other

    def _take(self, fmt: str) -> tuple:
        out = struct.unpack_from("<" + fmt, self._data, self._at)
        self._at += struct.calcsize("<" + fmt)
        return out

    def _text(self) -> bytes:
        first = self._at + 8
        self._at = first + int.from_bytes(self._data[self._at : first], "little")
        return self._data[first : self._at]

    def _value(self, kind: int):
        if kind == STR:
            return self._text()
        if kind == ARR:
            item, count = self._take("IQ")
            if item in _FORMAT:
                return item, list(self._take(f"{count}{_FORMAT[item]}"))
            return item, [self._value(item) for _ in range(count)]
        return self._take(_FORMAT[kind])[0]

    def bytes(self) -> bytes:
        infos, parts, at = [], [], 0
        for name, (shape, kind, content) in self.tensors.items():
            infos.append(info(name, shape, kind, at))
            parts.append(aligned(content) + bytes(self.gap))
            at += len(parts[-1])
        return gguf([key(name, *kv) for name, kv in self.keys.items()], infos, b"".join(parts))

    def write(self, path: str | Path) -> Path:
        Path(path).write_bytes(self.bytes())
        return Path(path)


def split_gguf(path: str | Path, folder: Path, count: int, name: str = "model") -> list[Path]:
    """``path`` in ``count`` files as llama-gguf-split lays them out: the model's keys in the first, tensors in turn."""
    whole, parts = Model(path), []
    tensors = list(whole.tensors.items())
    for i in range(count):
        part = copy.copy(whole)
        numbers = {"split.no": (U16, i), "split.count": (U16, count), "split.tensors.count": (I32, len(tensors))}
        part.keys = {**(whole.keys if i == 0 else {}), **numbers}
        part.tensors = dict(tensors[i * len(tensors) // count : (i + 1) * len(tensors) // count])
        parts.append(part.write(folder / f"{name}-{i + 1:05}-of-{count:05}.gguf"))
    return parts


SMALL = Shape(
    n_layer=2, every=2, n_embd=32, n_ff=32, n_head=2, n_head_kv=1, head_size=16, n_rot=16, delta_head=16, delta_k=1, delta_v=2, n_vocab=260,
    draft_layers=2, draft_heads=2, draft_heads_kv=1, draft_head_size=16, draft_ff=32, target_layers=(1, 2),
)  # fmt: skip
DIED = "the process died"


def load_all(pairs: list[tuple], tokens: int = 3) -> list:
    """For each (target, draft or None): None if it loaded and generated, else [name of what was raised, message]."""
    from cli.process import pyspec  # which is imported where processes are started only

    left, out = [[str(t), str(d) if d is not None else None, tokens] for t, d in pairs], []
    while len(out) < len(left):
        run = pyspec("-c", Path(__file__).with_name("load_many.py").read_text(), stdin=json.dumps(left[len(out) :]).encode())
        out += [json.loads(line) for line in run.stdout.decode().splitlines() if line.endswith(("]", "null"))]
        if run.returncode != 0:
            out.append([DIED, f"exit status {run.returncode}: {run.stderr[-2000:]}"])
    return out
