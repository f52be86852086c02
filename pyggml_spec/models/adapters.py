"""LoRA adapters: low-rank matrices whose products are added to those of a target's matrices, as llama.cpp adds them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeviceError, ModelError
from ..ggml.device import Backend
from ..ggml.library import Tensor, ffi, lib, new_context
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief

MATMUL = "matmul"  # weights.MATMUL, which imports this module
TYPES = ("f32", "f16", "bf16", "q8_0")
Chosen = tuple[tuple[int, float], ...]
"""Adapters of a sequence: (index, scale) each, ascending, without scales of 0."""


class Delta(NamedTuple):
    """scale * B (A x) is added to a product with x: A [n_in, rank], B [rank, n_out]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Adapter:
    """One file. ``pairs``: A and B by the name of the matrix."""

    path: Path
    alpha: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    identity: str

    def delta(self, name: str, scale: float) -> Delta | None:
        if (pair := self.pairs.get(name)) is None:
            return None
        single = np.float32(scale)
        return Delta(
            *pair, float(single * np.float32(self.alpha) / np.float32(pair[1].ne[0]) if self.alpha else single)
        )  # in llama.cpp's precision


class Adapters:
    """Those of one target, in memory of its backend, which ``Weights.adopt`` owns.

    Attributes:
        default: of sequences that choose none.
    """

    def __init__(self, backend: Backend, target: Any, files: Sequence[tuple[str | Path, float]]) -> None:
        """``target``: a Decoder, with its weights. Raises ModelError: a file that is no adapter of it; DeviceError: no memory."""
        self._backend, self._target = backend, target
        self.all = [self._load(path) for path, _ in files]
        self.default: Chosen = self.chosen(dict(enumerate(scale for _, scale in files)))

    def _load(self, path: str | Path) -> Adapter:
        with GGUFFile(path) as file, ExitStack() as stack:
            kinds = [file.metadata.get(name) for name in ("general.type", "adapter.type", "general.architecture")]
            wanted = ["adapter", "lora", self._target.file.metadata["general.architecture"]]
            if kinds != wanted:
                what = ", ".join(map(brief, kinds))
                keys = "its general.type, adapter.type and general.architecture"
                raise ModelError(
                    f"{path} is no LoRA adapter of {self._target.file.path.name}: {keys} are {what}, not {', '.join(wanted)}; convert it for this model"
                )
            if "adapter.alora.invocation_tokens" in file.metadata:
                raise ModelError(f"{path} is an adapter that begins at certain tokens (aLoRA), which is not supported; use a LoRA adapter")
            pairs = self._names(file)
            ctx = new_context(2 * len(pairs))
            stack.callback(lib.ggml_free, ctx)
            new = lambda info: lib.ggml_new_tensor(ctx, info.type, 2, info.shape)  # noqa: E731
            made: dict[str, tuple[Tensor, Tensor]] = {
                name: (new(infos[0]), new(infos[1]))
                for name, infos in ((name, [file.tensors[f"{name}.lora_{part}"] for part in "ab"]) for name in pairs)
            }
            buffer = self._backend.allocate(ctx)
            if buffer == ffi.NULL:
                raise DeviceError(f"{path} needs more memory on {self._backend.device.name} than is free; use fewer adapters")
            stack.pop_all()
            self._target.weights.adopt(ctx, buffer)
            for name, tensors in made.items() if not self._backend.counting else ():
                for tensor, part in zip(tensors, "ab", strict=True):
                    with file.read(f"{name}.lora_{part}") as data:
                        lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, lib.ggml_nbytes(tensor))
            alpha = file.metadata.get("adapter.lora.alpha", 0.0)
            return Adapter(file.path, float(alpha), made, file.identity())

    def _names(self, file: GGUFFile) -> list[str]:
        """The matrices that it changes. Raises ModelError: one that cannot be changed."""
        specs = {spec.name: spec for spec in self._target.specs() if spec.use == MATMUL}
        names = [
            name.rsplit(".lora_", 1)[0] for name in file.tensors if not name.endswith("_norm.weight")
        ]  # which llama.cpp leaves out, too
        for name in dict.fromkeys(names):
            a, b = (file.tensors.get(f"{name}.lora_{part}") for part in "ab")
            spec = specs.get(name)
            if f"{name.removesuffix('.weight')}.scale" in self._target.file.tensors:
                raise ModelError(f"{file.path} changes {brief(name)}, whose products have a scale; use a target without scales (NVFP4)")
            if spec is None or a is None or b is None:
                why = "half of a pair" if spec is not None else "for no matrix of the model that an adapter can change"
                raise ModelError(f"{file.path} has {brief(name)}, which is {why}; merge it into the model file (llama-export-lora)")
            if other := next((t.type_name for t in (a, b) if t.type_name not in TYPES), None):
                raise ModelError(f"{file.path}: {brief(name)} is {other}, and adapters are {', '.join(TYPES)}; convert it to one of them")
            if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != tuple(spec.shape[:2]) or a.shape[1] != b.shape[0]:
                raise ModelError(
                    f"{file.path}: {brief(name)} has the shapes {list(a.shape)} and {list(b.shape)}, and the matrix {list(spec.shape)}; it was made for another model"
                )
        return list(dict.fromkeys(names))

    def chosen(self, scales: Mapping[int, float]) -> Chosen:
        """The choice of these adapters by index. Raises ModelError: there is none of an index."""
        for index in scales:
            if not 0 <= index < len(self.all):
                raise ModelError(f"there is no adapter {index}; {len(self.all)} are loaded, and the first one is 0")
        return tuple((index, float(scale)) for index, scale in sorted(scales.items()) if scale)

    def deltas(self, name: str, chosen: Chosen) -> tuple[Delta, ...]:
        """What is added to products of the matrix ``name``."""
        found = (self.all[index].delta(name, scale) for index, scale in chosen)
        return tuple(delta for delta in found if delta is not None)

    def check(self, applied: set[str]) -> None:
        """Raises ModelError: an adapter changes a matrix whose products no graph changes; ``applied``: those that one does."""
        for adapter in self.all:
            if left := [name for name in adapter.pairs if name not in applied]:
                what = f"{left[0]!r}, whose products have a form of their own in {self._target.arch} models"
                raise ModelError(f"{adapter.path} changes {what}; merge the adapter into the model file (llama-export-lora)")
