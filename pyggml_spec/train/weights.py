"""Tensors of a GGUF as torch tensors, with the interface of ``models.weights.Weights``."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gguf_io import GGUFFile
from ..models.model import Model
from ..models.weights import INDEX, VECTOR, Group, Matrix, Run, Spec, find_tensor
from ..tools.quants import dequantise
from .ops import Weight

INIT = 0.02  # standard deviation of new matrices


class TorchWeights:
    """``values`` by name: torch tensors, innermost dimension last. ``model`` reads them as its weights."""

    def __init__(self, model: Any, values: dict[str, Tensor]) -> None:
        self.values, self._companions = values, dict[str, dict[str, str]]()
        for spec in model.specs():
            if spec.of is not None:
                self._companions.setdefault(spec.of, {})[spec.name.rsplit(".", 1)[1]] = spec.name
        self._groups: dict[str, tuple[str, ...]] = model.groups()
        model.weights = self

    def __getitem__(self, name: str) -> Any:
        return Weight(self.values[name])

    def get(self, name: str) -> Any:
        return self[name] if name in self.values else None

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def matrix(self, name: str) -> Matrix:
        own = self._companions.get(name, {})
        return Matrix(self[name], self.get(own.get("scale", "")), self.get(own.get("bias", "")), ".ffn_" in name)

    def group(self, name: str) -> Group:
        return Group(tuple(Run(self.matrix(m), (self.values[m].shape[0],)) for m in self._groups[name]), ())


def read_weights(model: Model, device: torch.device, dtype: torch.dtype, ends: bool = False) -> TorchWeights:
    """The tensors of the model's file, matrices as ``dtype``, the others as F32; ``ends``: none of layers. Raises ModelError: a type that cannot be
    dequantised."""
    values: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}  # a tied head is the embedding
    for spec in model.specs():
        if ends and spec.name.startswith("blk."):
            continue
        info = find_tensor(model.file, spec)
        if info.name not in stored:
            stored[info.name] = read_tensor(model.file, spec).to(
                device, torch.float32 if spec.use == VECTOR else dtype if spec.use != INDEX else None
            )
        values[spec.name] = stored[info.name]
    return TorchWeights(model, values)


def read_tensor(file: GGUFFile, spec: Spec) -> Tensor:
    """Dequantised. Raises ModelError: its type cannot be."""
    info = find_tensor(file, spec)
    with file.read(info.name) as data:
        if spec.use == INDEX:
            return torch.from_numpy(np.frombuffer(data, np.int64 if info.type_name == "i64" else np.int32).astype(np.int64))
        values = np.array(dequantise(data, info.type, math.prod(info.shape)))
    return torch.from_numpy(values).reshape(spec.shape[::-1])


def new_weights(model: Model, head: Tensor, device: torch.device, seed: int) -> TorchWeights:
    """Trainable F32 tensors: norms are 1, matrices random. The last norm is so small that logits of ``head`` [n_vocab, n_embd] deviate by 1 at first:
    larger ones, which are wrong, would have to be unlearnt."""
    generator, values = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    last = 1 / float(head.float().norm(dim=-1).mean())
    for spec in model.specs():
        value = torch.ones(spec.shape[::-1]) if spec.use == VECTOR else torch.randn(spec.shape[::-1], generator=generator) * INIT
        values[spec.name] = (
            value * last if spec.name == "output_norm.weight" or spec.name.endswith(".shared_head_norm.weight") else value
        ).to(device)
    return TorchWeights(model, values)
