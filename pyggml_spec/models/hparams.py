"""Hyper-parameters of a target."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import ModelError
from ..gguf_io import GGUFFile
from .keys import epsilon, kv_heads, layer_heads, per_layer, positive, size_of_heads, sliding_layers, vocabulary, windowed_layers
from .moe import SIGMOID, SOFTMAX, Experts
from .rope import Rope


class Hparams:
    """Hyper-parameters of a target's file, read and checked on access. ``n_layer`` excludes MTP layers, ``n_block`` includes them."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file, self.arch = file, arch
        self.n_block = positive(file, f"{arch}.block_count", limit=1024)
        self.n_layer = self.n_block - file.get(f"{arch}.nextn_predict_layers", int, 0)
        if not 0 < self.n_layer <= self.n_block:
            raise ModelError(f"{file.path}: nextn_predict_layers leaves {self.n_layer} layers of block_count ({self.n_block})")
        self.n_embd, self.n_vocab = positive(file, f"{arch}.embedding_length"), vocabulary(file)
        self.routed = False  # whether the description has read the experts

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key without its architecture prefix; only the type is checked."""
        return self.file.get(f"{self.arch}.{key}", kind, default)

    def positive(self, key: str, default: int | None = None, limit: int = 1 << 24) -> int:
        """An integer in [1, limit]."""
        return positive(self.file, f"{self.arch}.{key}", default, limit)

    def number(self, key: str, default: Any, low: float = 0, high: float = 1 << 31) -> Any:
        """A number of the type of ``default``. Raises ModelError outside [low, high]."""
        value = self.get(key, type(default), default)
        if not low <= value <= high:
            raise ModelError(f"{self.file.path}: {key} is {value}, but it has to be between {low} and {high}")
        return value

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the file; None without it."""
        info = self.file.tensors.get(tensor)
        return None if info is None else info.shape

    def refuse(self, why: str) -> ModelError:
        return ModelError(f"{self.file.path}: {why}")

    @cached_property
    def eps(self) -> float:
        return epsilon(self.file, self.arch)

    @property
    def root_embd(self) -> float:
        """The square root of ``n_embd``, in single precision as llama.cpp takes it."""
        return float(np.sqrt(np.float32(self.n_embd)))

    @cached_property
    def layer_norm_eps(self) -> float:
        """What layer norms add to the variance; ggml asserts that it is not negative."""
        eps = self.get("attention.layer_norm_epsilon", float)
        if eps < 0:
            raise self.refuse(f"attention.layer_norm_epsilon is {eps}, but it cannot be negative")
        return eps

    @cached_property
    def context_length(self) -> int:
        return self.positive("context_length", limit=1 << 31)

    @cached_property
    def heads(self) -> int:
        return self.positive("attention.head_count")

    @cached_property
    def kv_heads(self) -> int:
        return kv_heads(self.file, self.arch, self.heads)

    @cached_property
    def hybrid_heads(self) -> tuple[tuple[int, int], ...]:
        """Query heads and K/V heads of each layer; 0 K/V heads for layers without attention."""
        heads, kv = (per_layer(self.file, f"{self.arch}.attention.{key}", self.n_layer, least=0) for key in ("head_count", "head_count_kv"))
        for i, (n, n_kv) in enumerate(zip(heads, kv, strict=True)):
            if n_kv and (not n or n % n_kv):
                raise self.refuse(f"the {n} query heads of layer {i} cannot share {n_kv} K/V heads (attention.head_count_kv)")
        return tuple(zip(heads, kv, strict=True))

    @property
    def hybrid_head_dim(self) -> int:
        """Values per head where layers differ in their number of heads."""
        return self.head_dim(default=self.n_embd // max(1, *(heads for heads, _ in self.hybrid_heads)))

    @cached_property
    def heads_by_layer(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Query heads and K/V heads of each layer."""
        return layer_heads(self.file, self.arch, self.n_layer)

    def head_dim(self, *same: str, default: int | None = None) -> int:
        """Values per head; the keys ``same``, where present, must be equal."""
        return size_of_heads(self.file, self.arch, default or self.n_embd // self.heads, *same)

    @cached_property
    def ff(self) -> int:
        return self.positive("feed_forward_length")

    def rope(self, head_dim: int, neox: bool = True, yarn: bool = True, windowed: bool = False, own_yarn: bool = False) -> Rope:
        """``windowed``: the model has sliding layers, for which llama.cpp keeps separate positions, so RoPE options are refused."""
        return Rope.from_gguf(self.file, self.arch, head_dim, neox, yarn, not windowed, own_yarn)

    def whole_heads(self, rope: Rope, head_dim: int) -> Rope:
        """``rope``, checked to rotate all values of a head."""
        if rope.n_rot != head_dim:
            raise self.refuse(f"rope.dimension_count is {rope.n_rot}, but {self.arch} rotates whole heads of {head_dim}")
        return rope

    def sliding_base(self, rope: Rope) -> Rope:
        """``rope`` with the frequency base of sliding layers."""
        base = self.get("rope.freq_base_swa", float, rope.base)
        if base <= 0:
            raise self.refuse(f"rope.freq_base_swa is {base}, but it has to be above 0")
        return replace(rope, base=base)

    def window(self, period: int = 4, full_last: bool = False, needed: bool = True) -> tuple[int, tuple[bool, ...]]:
        """Window (0 for none), and which layers slide; a model without a window is refused if ``needed``."""
        read = windowed_layers if needed else sliding_layers
        return read(self.file, self.arch, self.n_layer, period=period, full_last=full_last)

    def gating(self, default: int | None = None) -> int:
        """Router activation: SOFTMAX or SIGMOID."""
        value = self.get("expert_gating_func", int, default)
        value = default if default and not value else value
        if value not in (SOFTMAX, SIGMOID):
            raise self.refuse(f"expert_gating_func is {value}; {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are supported")
        return value

    def experts(self, n_ff: int | None = None, **how: Any) -> Experts:
        """``n_ff``: hidden size of an expert if the file lacks it, or if ``own_size`` is False; ``how``: further arguments of ``Experts``."""
        self.routed = True
        return Experts.from_gguf(self.file, self.arch, self.n_layer, n_ff, **how)

    @property
    def original_context(self) -> int:
        """Tokens of context before it was stretched."""
        return self.positive("rope.scaling.original_context_length", self.context_length, 1 << 31)

    @property
    def long_from(self) -> int:
        """As in ``Decoder``, of architectures whose files say that they have tables of long contexts."""
        return self.original_context if self.get("rope.scaling.type", str, "") == "longrope" else 0

    def temperature(self, key: str = "attention.temperature_length", default: int = 0) -> tuple[float, int]:
        """As in ``Decoder``; ``key``: of the length."""
        scale = self.number("attention.temperature_scale", 0.0, -1e3, 1e3)
        return (scale, self.positive(key, default, 1 << 31)) if scale else (0.0, 0)

    def has_sections(self, head_dim: int) -> bool:
        """Whether the file rotates by the axes of a picture; over text these are NEOX pairs, if the sections cover them."""
        sections = self.file.array(f"{self.arch}.rope.dimension_sections")
        if sections is None or len(sections) < 2 or sections[0] <= 0 or sections[1] <= 0:
            return False
        self.rope(head_dim).check_sections(self.file, self.arch, interleaved=False)
        return True

    def ff_of_used_experts(self) -> int | None:
        """Hidden size of an expert in files that give the total of the used ones; else None."""
        if f"{self.arch}.expert_feed_forward_length" in self.file.metadata:
            return None
        return self.ff // self.positive("expert_used_count")

    def leading_dense(self, default: int | None = None) -> int:
        """Number of leading layers with a dense FFN."""
        n = self.get("leading_dense_block_count", int, default)
        if not 0 <= n <= self.n_layer:
            raise self.refuse(f"leading_dense_block_count is {n}, but the model has {self.n_layer} layers")
        return n
