"""Hyper-parameters of a model's file, read and checked on access: ggml aborts on bad shapes."""

from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from ..errors import ModelError
from ..gguf_io import GGUFFile
from .moe import SIGMOID, SOFTMAX, Experts
from .rope import KINDS, Rope, RopeOptions

OF_SLIDING = ("attention.key_length_swa", "attention.value_length_swa")  # head sizes of sliding layers


@cache
def inverse_root(n: int) -> float:
    """1 / sqrt(n) in single precision, as llama.cpp rounds it."""
    return float(np.float32(1) / np.sqrt(np.float32(n)))


def _positive(key: str, limit: int = 1 << 24) -> cached_property[int]:
    return cached_property(lambda f: f.positive(key, limit=limit))


class Hparams:
    """Hyper-parameters of a target or drafter. ``n_layer`` excludes MTP layers, ``n_block`` includes them. Keys go without their architecture prefix.

    Raises:
        ModelError: by all methods, for a value of another type or out of range.
    """

    n_block, n_embd = _positive("block_count", 1024), _positive("embedding_length")
    heads, ff = _positive("attention.head_count"), _positive("feed_forward_length")
    context_length = _positive("context_length", 1 << 31)

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file, self.arch = file, arch
        self.routed = False  # whether the description has read the experts

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key; only the type is checked."""
        return self.file.get(f"{self.arch}.{key}", kind, default)

    def positive(self, key: str, default: int | None = None, limit: int = 1 << 24) -> int:
        """An integer in [1, limit]."""
        value = self.get(key, int, default)
        if not 0 < value <= limit:
            raise self.refuse(f"{self.arch}.{key} is {value}, but it has to be between 1 and {limit}")
        return value

    def number(self, key: str, default: Any, low: float = 0, high: float = 1 << 31) -> Any:
        """A number in [low, high] of the type of ``default``."""
        value = self.get(key, type(default), default)
        if not low <= value <= high:
            raise self.refuse(f"{key} is {value}, but it has to be between {low} and {high}")
        return value

    def per_layer(self, key: str, default: int | None = None, limit: int = 1 << 24, least: int = 1, mtp: bool = False) -> tuple[int, ...]:
        """An integer in [least, limit] per layer: one number for all, which is 1 at least, or a list. ``mtp``: of MTP layers, too."""
        n = self.n_block if mtp else self.n_layer
        if not isinstance(self.file.metadata.get(f"{self.arch}.{key}"), np.ndarray):
            return (self.positive(key, default, limit),) * n
        numbers = self.file.array(f"{self.arch}.{key}", "iu")
        assert numbers is not None
        values = [int(v) for v in numbers[:n]]
        if len(values) < n or not all(least <= v <= limit for v in values):
            raise self.refuse(f"{self.arch}.{key} is {values}, but it has to be {n} numbers between {least} and {limit}")
        return tuple(values)

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the file; None without it."""
        info = self.file.tensors.get(tensor)
        return None if info is None else info.shape

    def refuse(self, why: str) -> ModelError:
        return ModelError(f"{self.file.path}: {why}")

    # -- sizes

    @cached_property
    def n_layer(self) -> int:
        n = self.n_block - self.get("nextn_predict_layers", int, 0)
        if not 0 < n <= self.n_block:
            raise self.refuse(f"nextn_predict_layers leaves {n} layers of block_count ({self.n_block})")
        return n

    @cached_property
    def root_embd(self) -> float:
        """The square root of ``n_embd``, in single precision as llama.cpp takes it."""
        return float(np.sqrt(np.float32(self.n_embd)))

    @cached_property
    def n_vocab(self) -> int:
        """Tokens of the embedding; 0 without one, which ``specs`` then reports."""
        return (self.shape("token_embd.weight") or (0,))[-1]

    @cached_property
    def eps(self) -> float:
        """Epsilon of the RMS norms; ggml asserts that no epsilon is negative."""
        return self._epsilon("attention.layer_norm_rms_epsilon")

    @cached_property
    def layer_norm_eps(self) -> float:
        return self._epsilon("attention.layer_norm_epsilon")

    def _epsilon(self, key: str) -> float:
        eps = self.get(key, float)
        if eps < 0:
            raise self.refuse(f"{key} is {eps}, but it cannot be negative")
        return eps

    @cached_property
    def kv_heads(self) -> int:
        n = self.positive("attention.head_count_kv", self.heads)
        if self.heads % n:
            raise self.refuse(f"{self.heads} query heads cannot share {n} K/V heads")
        return n

    @cached_property
    def hybrid_heads(self) -> tuple[tuple[int, int], ...]:
        """Query heads and K/V heads of each layer; 0 K/V heads for layers without attention."""
        heads, kv = (self.per_layer(f"attention.{key}", least=0) for key in ("head_count", "head_count_kv"))
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
        """Query heads and K/V heads of each layer, MTP layers included."""
        heads = self.per_layer("attention.head_count", mtp=True)
        kv_heads = self.per_layer("attention.head_count_kv", heads[0], mtp=True)
        for i, (n, kv) in enumerate(zip(heads, kv_heads, strict=True)):
            if n % kv:
                raise self.refuse(f"the {n} query heads of layer {i} cannot share {kv} K/V heads (attention.head_count_kv)")
        return heads, kv_heads

    def head_dim(self, *same: str, default: int | None = None) -> int:
        """Values per head; `attention.value_length` and the keys ``same``, where present, must be equal."""
        size = self.positive("attention.key_length", default or self.n_embd // self.heads, 4096)
        for name in ("attention.value_length", *same):
            if self.get(name, int, size) != size:
                raise self.refuse(f"{name} differs from key_length {size}, which {self.arch} does not have")
        return size

    def window(self, period: int = 4, full_last: bool = False, needed: bool = True, mtp: bool = False) -> tuple[int, tuple[bool, ...]]:
        """The sliding window (0 for none, which is refused if ``needed``), and which layers (``mtp``: MTP layers, too) have it: a list of the file, or
        all but the first of every ``period`` layers (``full_last``: the last)."""
        key, pattern_key, n = "attention.sliding_window", "attention.sliding_window_pattern", self.n_block if mtp else self.n_layer
        window = self.get(key, int, 0)
        if not 0 <= window < 1 << 31:
            raise self.refuse(f"{key} is {window}, but it has to be between 0 and {(1 << 31) - 1}")
        if not window:
            if needed:
                raise ModelError(f"{self.file.path} has no {key}, which every {self.arch} model has; convert it again")
            return 0, (False,) * n
        if not isinstance(self.file.metadata.get(f"{self.arch}.{pattern_key}"), np.ndarray):
            period = self.positive(pattern_key, period)
            return window, tuple(i % period != (period - 1 if full_last else 0) for i in range(n))
        flags = self.file.array(f"{self.arch}.{pattern_key}")
        assert flags is not None
        if len(flags) < n:
            raise self.refuse(f"{pattern_key} names {len(flags)} of {n} layers")
        return window, tuple(bool(v) for v in flags[:n])

    # -- RoPE

    def rope(self, head_dim: int, neox: bool = True, yarn: bool = True, windowed: bool = False, own_yarn: bool = False) -> Rope:
        """From `rope.dimension_count`, `rope.freq_base` and `rope.scaling.*`; ``yarn``: whether yarn is supported. ``windowed``: the model has sliding
        layers, for which llama.cpp keeps separate positions, so RoPE options are refused. ``own_yarn``: `yarn_beta_*` and `yarn_log_multiplier` are
        read."""
        kinds, path = KINDS if yarn else KINDS[:2], self.file.path
        if self.file.rope is not None and windowed:
            raise ModelError(
                f"{self.arch} models take no rope options: they have sliding layers, which would keep other positions; leave them out"
            )
        overrides = self.file.rope or RopeOptions()
        # a factor without a type is linear scaling, as in llama.cpp
        kind = overrides.scaling or self.get("rope.scaling.type", str, "linear")
        kind = "linear" if kind == "longrope" else kind  # which divides frequencies by tables of the file, and is no other scaling
        factor = self.get("rope.scaling.factor", float, self.get("rope.scale_linear", float, 0.0))
        if kind not in kinds or (not yarn and overrides.ext_factor):
            raise ModelError(f"{path} uses rope scaling of the type {kind!r}; {self.arch} files with {', '.join(kinds)} are supported")
        if factor < 0:
            raise self.refuse(f"rope.scaling.factor is {factor}, but it cannot be negative")
        n_rot, base = self._rotated(head_dim, "", head_dim, 10000.0)
        base = overrides.freq_base or base
        scale = overrides.freq_scale or (float(np.float32(1) / np.float32(factor)) if factor > 0 else 1.0)
        scale = scale if kind != "none" else 1.0
        magnitude = self.get("rope.scaling.attn_factor", float, 1.0)
        betas = [
            self.get(f"rope.scaling.yarn_{name}", float, n) if own_yarn else n for name, n in (("beta_fast", 32.0), ("beta_slow", 1.0))
        ]
        fast, slow = (n if wanted is None else wanted for n, wanted in zip(betas, (overrides.beta_fast, overrides.beta_slow)))
        multiplier = self.get("rope.scaling.yarn_log_multiplier", float, 0.0) if own_yarn else 0.0
        extrapolation = (1.0 if kind == "yarn" else 0.0) if overrides.ext_factor is None else overrides.ext_factor
        if not extrapolation:
            magnitude *= 1.0 if overrides.attn_factor is None else overrides.attn_factor
            return Rope(n_rot, base, scale, neox, (0.0, magnitude, fast, slow))
        if base <= 1 or not 0 < scale <= 1:
            raise self.refuse(f"yarn scaling needs rope.freq_base {base} above 1 and rope.scaling.factor {1 / scale:g} of 1 or more")
        trained = self.get("context_length", int)
        n_ctx_orig = overrides.orig_ctx or self.positive("rope.scaling.original_context_length", trained, (1 << 31) - 1)
        magnitude = float(Rope.magnitude(scale, multiplier) * np.float32(magnitude))
        return Rope(n_rot, base, scale, neox, (extrapolation, magnitude, fast, slow), n_ctx_orig)

    def _rotated(self, head_dim: int, suffix: str, n_rot: int, base: float) -> tuple[int, float]:
        """Rotated values per head and frequency base; ``suffix`` selects a kind of layers, the others are the defaults."""
        n_rot = self.get(f"rope.dimension_count{suffix}", int, n_rot)
        if not 0 < n_rot <= head_dim or n_rot % 2:
            raise self.refuse(f"rope.dimension_count{suffix} is {n_rot}, which does not fit heads of {head_dim}")
        return n_rot, self._base(suffix, base)

    def _base(self, suffix: str, default: float) -> float:
        base = self.get(f"rope.freq_base{suffix}", float, default)
        if base <= 0:
            raise self.refuse(f"rope.freq_base{suffix} is {base}, but it has to be above 0")
        return base

    def sliding_rope(self, rope: Rope, head_dim: int, base: float | None = None) -> Rope:
        """RoPE of sliding layers: keys with `_swa`, no scaling; defaults are those of ``rope``, or ``base``."""
        return Rope(*self._rotated(head_dim, "_swa", rope.n_rot, base or rope.base), neox=rope.neox)

    def sliding_base(self, rope: Rope) -> Rope:
        """``rope`` with the frequency base of sliding layers."""
        return replace(rope, base=self._base("_swa", rope.base))

    def whole_heads(self, rope: Rope, head_dim: int) -> Rope:
        """``rope``, checked to rotate all values of a head."""
        if rope.n_rot != head_dim:
            raise self.refuse(f"rope.dimension_count is {rope.n_rot}, but {self.arch} rotates whole heads of {head_dim}")
        return rope

    def by_axis(self, rope: Rope, interleaved: bool) -> Rope:
        """``rope`` with the file's sections. Multi-axis RoPE over text equals NEOX only if every pair belongs to one of the first three axes; the fourth has
        position 0 for text.

        Raises:
            ModelError: `rope.dimension_sections` leaves other pairs.
        """
        sections = self.file.array(f"{self.arch}.rope.dimension_sections")
        if sections is None:
            return rope
        numbers, pairs = [int(n) for n in sections], range(rope.n_rot // 2)
        counts = numbers[:3]
        if len(counts) < 3 or not (all(i < 3 * counts[i % 3] for i in pairs) if interleaved else sum(counts) >= len(pairs)):
            raise self.refuse(
                f"rope.dimension_sections {numbers} do not cover the {len(pairs)} rotated pairs of {self.arch}; "
                "the file was converted with other hyper-parameters"
            )
        return replace(rope, sections=(*numbers, 0)[:4], interleaved=interleaved)

    def has_sections(self, head_dim: int) -> bool:
        """Whether the file rotates by the axes of a picture; over text these are NEOX pairs, if the sections cover them."""
        sections = self.file.array(f"{self.arch}.rope.dimension_sections")
        if sections is None or len(sections) < 2 or sections[0] <= 0 or sections[1] <= 0:
            return False
        self.by_axis(self.rope(head_dim), interleaved=False)
        return True

    def seeing(self, rope: Rope, head_dim: int) -> Rope:
        """``rope`` by the axes of a picture, in NEOX pairs, where the file has sections; else unchanged."""
        return self.by_axis(replace(rope, neox=True), interleaved=False) if self.has_sections(head_dim) else rope

    # -- experts

    def gating(self, default: int | None = None) -> int:
        """Router activation: SOFTMAX or SIGMOID."""
        value = self.get("expert_gating_func", int, default)
        value = default if default and not value else value
        if value not in (SOFTMAX, SIGMOID):
            raise self.refuse(f"expert_gating_func is {value}; {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are supported")
        return value

    def experts(self, n_ff: int | None = None, own_size: bool = True, **how: Any) -> Experts:
        """Reads `expert_count`, `expert_used_count`, `expert_group_count`, `expert_group_used_count` and, if ``own_size``,
        `expert_feed_forward_length` (default ``n_ff``). ``how``: further arguments of ``Experts``."""
        self.routed = True
        n_expert = self.positive("expert_count", limit=1024)
        used = set(self.per_layer("expert_used_count", limit=n_expert))
        sizes = set(self.per_layer("expert_feed_forward_length", n_ff)) if own_size or n_ff is None else {n_ff}
        if n_expert < 2:
            raise self.refuse("expert_count is 1, and a router between one expert routes nothing")
        if len(used) > 1 or len(sizes) > 1:
            raise ModelError(f"{self.file.path} has layers with different expert counts or sizes; {self.arch} files without are supported")
        groups, groups_used = self.get("expert_group_count", int, 0), self.get("expert_group_used_count", int, 0)
        if groups in (0, 1):
            groups = groups_used = 1
        elif groups < 0 or n_expert % groups or n_expert < 2 * groups or not 0 < groups_used < groups:
            raise self.refuse(
                f"expert_group_used_count is {groups_used} of expert_group_count {groups}, which cannot be for {n_expert} experts; "
                "groups need the same size of two experts or more, and fewer are used than exist"
            )
        return Experts(n_expert, used.pop(), sizes.pop(), groups=groups, groups_used=groups_used, **how)

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
