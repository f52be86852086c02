"""Random-weight GGUFs of an architecture, from its description alone.

All sizes differ, and biases and scales are random: equal or zero values would hide wrong formulas.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pyggml_spec.errors import GGUFError
from pyggml_spec.models.model import FFN
from pyggml_spec.models.registry import TARGETS
from pyggml_spec.models.weights import EXPERTS, HEADS, MATMUL, ROWS, Spec

from .model import Shape, Writer, type_id

T = TypeVar("T")
UNCHECKED = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")


def samples(s: Shape) -> dict[str, Any]:
    """Values of keys without the architecture prefix. Of keys with a default, only UNCHECKED and ``keys`` are written."""
    return {
        "block_count": s.n_layer,
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.head_size,
        "attention.value_length": s.head_size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-6,
        "rope.dimension_count": s.head_size,
        "rope.freq_base": s.rope_base,
        "expert_count": s.n_expert,
        "expert_used_count": s.n_used,
        "expert_feed_forward_length": s.n_ff_expert,
        "expert_shared_feed_forward_length": s.n_ff_shared,
    }


SCALES = {"logit_scale": 3.5, "residual_scale": 0.22, "embedding_scale": 1.7, "attention.scale": 0.19}
KEYS: dict[str, dict[str, Any]] = {  # that a description has defaults for, and that its files differ by
    "cohere2": {"logit_scale": 0.3},
    "ernie4_5-moe": {"leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    "gemma2": {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 11.0},
    "glm4moe": {
        "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.3, "expert_gating_func": 2,
    },
    "granite": SCALES,
    "granitemoe": SCALES | {"expert_count": 8, "expert_used_count": 3},
}  # fmt: skip
OPTIONAL = {"glm4moe": ("blk.0.attn_q_norm.weight",), "ernie4_5-moe": ("blk.{last}.exp_probs_b.bias",)}  # tensors
WINDOWED = ("cohere2", "gemma2", "gemma3", "olmo2")
TIED = ("cohere2", "gemma", "gemma2")  # llama.cpp reads no head of theirs
UNGROUPED = ("olmoe",)  # as many KV heads as query heads


def own_shape(arch: str, s: Shape) -> Shape:
    """``s`` as far as files of the architecture can have it."""
    s = replace(s, tied=s.tied or arch in TIED)
    return replace(s, n_head_kv=s.n_head) if arch in UNGROUPED else s


def own_keys(arch: str, s: Shape) -> dict[str, Any]:
    keys = dict(KEYS.get(arch, {}))
    if "expert_count" in keys:
        keys |= {"expert_count": s.n_expert, "expert_used_count": s.n_used}
    if arch in WINDOWED:
        keys["attention.sliding_window"] = s.target_window or 32
    return keys


class Asked:
    """A fake GGUF file for a description: returns sample values and records the keys that were read."""

    path, rope = Path("random.gguf"), None

    def __init__(self, arch: str, s: Shape, keys: dict[str, Any], optional: tuple[str, ...]) -> None:
        self._known, self._always = samples(s) | keys, {*UNCHECKED, *keys}
        self.arch, self.metadata = arch, {f"{arch}.{name}": self._known[name] for name in self._always}
        # only whether they are there, and the vocabulary, is looked at
        there = ("token_embd.weight", *(() if s.tied else ("output.weight",)), *optional)
        self.tensors = {name: Spec(name, (s.n_embd, s.n_vocab)) for name in there}

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        name = key.removeprefix(f"{self.arch}.")
        if default is not None and name not in self._always:
            return default
        if name not in self._known:
            raise GGUFError(f"there is no sample of {name}: add it to samples() in {Path(__file__).name}, or hand it over in `keys`")
        self.metadata[key] = value = self._known[name]
        return kind(value)  # type: ignore[call-arg]

    def array(self, key: str, kinds: str = "iub") -> np.ndarray | None:
        value = self.metadata.get(key)
        return value if isinstance(value, np.ndarray) else None


def write_described(
    arch: str, path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False,
    keys: dict[str, Any] | None = None, optional: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """Writes a random target of an architecture that ``registry`` knows.

    ``mixed`` gives attn_v and ffn_down another type, as real k-quant files do; ``keys`` are further ones, without the architecture; ``optional`` names
    tensors that the file shall have though it need not.
    """
    shape = own_shape(arch, shape)
    optional = (*optional, *(name.format(last=shape.n_layer - 1) for name in OPTIONAL.get(arch, ())))
    asked = Asked(arch, shape, own_keys(arch, shape) | (keys or {}), optional)
    target = TARGETS[arch](asked)  # type: ignore[arg-type]
    w = Writer(Path(path), arch, quant, seed, shape.n_layer)
    for key, value in asked.metadata.items():
        if not key.startswith("tokenizer."):
            _add(w, key, value)
    w.embedding_and_head(shape)
    kinds = dict.fromkeys(("attn_v", "ffn_down"), type_id("q6_K")) if mixed else {}
    for spec in target.tensors():
        if spec.name not in ("token_embd.weight", "output.weight", "output_norm.weight"):
            _tensor(w, spec, kinds.get(spec.name.split(".")[-2]))
        short = spec.name.removesuffix(".weight").split(".")[-1]
        if (
            spec.use == MATMUL and spec.name.startswith("blk.") and short in target.biased and not (quant == "NVFP4" and short in FFN)
        ):  # refused
            w.vector(spec.name.removesuffix("weight") + "bias", spec.shape[1], -0.5, 0.5)
    w.close()
    return Path(path)


def _add(w: Writer, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        w.out.add_array(key, value.tolist())
    elif isinstance(value, bool):
        w.out.add_bool(key, value)
    elif isinstance(value, str):
        w.out.add_string(key, value)
    elif isinstance(value, float):
        w.out.add_float32(key, value)
    else:
        w.out.add_uint32(key, value)


def _tensor(w: Writer, spec: Spec, kind: int | None) -> None:
    if spec.use == EXPERTS:
        w.experts(spec.name, *spec.shape, kind=kind)
    elif spec.use == HEADS:
        w.heads(spec.name, *spec.shape)
    elif spec.use in (MATMUL, ROWS) and len(spec.shape) == 2:
        router = spec.name.endswith("ffn_gate_inp.weight")
        w.matrix(spec.name, *spec.shape, gain=2.0 if router else 1.0, kind=type_id("f32") if router else kind)
    elif spec.name.endswith("norm.weight") or "rope" in spec.name:
        w.vector(spec.name, spec.shape[0], 0.5, 1.5)
    else:
        size = int(np.prod(spec.shape))
        values = w.rng.uniform(-0.5, 0.5, size).astype(np.float32)
        w.out.add_tensor(spec.name, values.reshape(spec.shape[::-1]))
