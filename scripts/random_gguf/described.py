"""Random-weight GGUFs of an architecture, from its description alone.

All sizes differ, and biases and scales are random: equal or zero values would hide wrong formulas.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np

from pyggml_spec.errors import GGUFError
from pyggml_spec.models.decoder import Decoder
from pyggml_spec.models.model import FFN
from pyggml_spec.models.registry import TARGETS
from pyggml_spec.models.weights import EXPERTS, HEADS, MATMUL, ROWS, VECTOR, Spec

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
        "shortconv.l_cache": 3,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * s.n_embd,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 2 * s.n_embd // 32,
        "ssm.group_count": 2,
    }


SCALES = {"logit_scale": 3.5, "residual_scale": 0.22, "embedding_scale": 1.7, "attention.scale": 0.19}
LEADING = {
    "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.3, "expert_gating_func": 2,
}  # fmt: skip
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.attn_factor": 1.25,
}
TEMPERED = {"attention.temperature_scale": 0.3}
LATENT = LEADING | {
    "attention.key_length_mla": 80, "attention.value_length_mla": 40, "attention.kv_lora_rank": 64, "rope.dimension_count": 32,
    "attention.key_length": 96, "attention.value_length": 64, "attention.head_count_kv": 1,
}  # fmt: skip
INDEXED = {
    "attention.q_lora_rank": 48, "attention.indexer.key_length": 64, "attention.indexer.head_count": 3, "attention.indexer.top_k": 32,
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {  # that a description has defaults for, and that its files differ by
    "afmoe": LEADING | {"rope.freq_base_swa": 2e4},
    "bailingmoe": {"expert_shared_count": 2, "expert_weights_norm": True, "expert_weights_scale": 0.7},
    "bailingmoe2": LEADING | {"expert_shared_count": 2, "expert_shared_feed_forward_length": 96},
    "cohere2moe": LEADING | {"logit_scale": 0.3, "expert_shared_count": 2},
    "hy_v3": LEADING | {"expert_shared_feed_forward_length": 96},
    "cohere2": {"logit_scale": 0.3},
    "command-r": {"logit_scale": 0.3},
    "deepseek2": LATENT | {"attention.q_lora_rank": 48},
    "deepseek32": LATENT | INDEXED,
    "glm-dsa": LATENT | INDEXED,
    "deepseek": {"expert_shared_count": 2, "expert_weights_scale": 1.3, "leading_dense_block_count": 1},
    "dots1": LEADING,
    "ernie4_5-moe": {"leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    "gemma2": {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 11.0},
    "exaone-moe": LEADING | {"expert_shared_feed_forward_length": 96},
    "glm4moe": LEADING,
    "granite": SCALES,
    "granite_swa": SCALES | {"expert_count": 8, "expert_used_count": 3, "expert_shared_feed_forward_length": 96},
    "granitemoe": SCALES | {"expert_count": 8, "expert_used_count": 3},
    "falcon-h1": {"attention.scale": 0.19},
    "granitehybrid": SCALES,
    "hunyuan-moe": {"expert_feed_forward_length": 48, "expert_shared_feed_forward_length": 96},
    "kimi-linear": LEADING | {
        "kda.head_dim": 64, "attention.key_length_mla": 80, "attention.value_length_mla": 40, "attention.kv_lora_rank": 64, "rope.dimension_count": 32,
        "attention.key_length": 96, "attention.value_length": 64,
    },
    "kimi-k3": LEADING | {
        "kda.head_dim": 64, "kda.gate_lower_bound": -5.0, "attention.key_length_mla": 80, "attention.value_length_mla": 40,
        "attention.kv_lora_rank": 64, "attention.q_lora_rank": 48, "rope.dimension_count": 32, "attention.key_length": 96, "attention.value_length": 64,
        "attn_res.block_size": 2, "activation.situ_beta": 1.3, "activation.situ_linear_beta": 0.8, "expert_latent_length": 128,
    },
    "glm5-next": LEADING | {
        "kda.head_dim": 64, "kda.gate_lower_bound": -5.0, "attention.key_length_mla": 64, "attention.value_length_mla": 40, "attention.kv_lora_rank": 64,
        "attention.key_length": 64, "attention.value_length": 64, "attention.q_lora_rank": 48, "rope.dimension_count": 0, "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 3, "hyper_connection.epsilon": 1e-5, "attention.indexer.key_length": 64,
        "attention.indexer.head_count": 3, "attention.indexer.top_k": 64, "attention.indexer.kpool": 4, "attention.indexer.kpool_select_tail": True,
        "attention.layer_norm_epsilon": 1e-5,
    },
    "llama4": {"interleave_moe_layer_step": 2, "rope.freq_base_swa": 2e4},
    "lfm2moe": {"leading_dense_block_count": 1, "expert_gating_func": 2},
    "mimo2": {"attention.value_scale": 0.7, "rope.dimension_count": 16, "rope.freq_base_swa": 2e4},
    "minimax-m3": LEADING | {
        "attention.indexer.key_length": 32, "attention.indexer.head_count": 2, "attention.indexer.top_k": 3, "attention.indexer.block_size": 16,
        "attention.indexer.local_blocks": 1, "rope.dimension_count": 32,
    },
    "minicpm": {"attention.scale": 0.19},
    "mistral3": TEMPERED | YARN | {"rope.scaling.yarn_beta_fast": 24.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_log_multiplier": 0.7},
    "nemotron_h": {"attention.layer_norm_epsilon": 1e-5},
    "nemotron_h_moe": {"expert_count": 8, "expert_used_count": 3, "expert_weights_norm": True, "expert_weights_scale": 1.3, "moe_latent_size": 96},
    "qwen4exp": {
        "hyper_connection.count": 3, "hyper_connection.low_rank": 64, "attention.indexer.head_count": 3, "attention.indexer.top_k": 64, "ple.ngram_size": 3, "ple.heads_per_ngram": 2, "ple.conv_kernel": 4,
        "ple.eos_token_id": 7, "ple.layer_multipliers": np.array([35184372088831, 9, 8796093022207], np.uint64),
        "ple.head_vocab_sizes": np.array([101, 103, 107, 109], np.uint64), "ple.head_offsets": np.array([0, 101, 204, 311], np.uint64),
    },
    "step35": {"expert_gating_func": 2, "expert_weights_scale": 1.3, "expert_shared_feed_forward_length": 96, "rope.freq_base_swa": 2e4},
    "phi3": {"rope.scaling.attn_factor": 1.2, "rope.scaling.original_context_length": 64},
    "phimoe": {"rope.scaling.attn_factor": 1.2, "rope.scaling.original_context_length": 4000},
}  # fmt: skip
FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
PACKED, BIASED = "blk.{i}.attn_qkv.weight", "blk.{i}.exp_probs_b.bias"
GATED = (
    "blk.{i}.attn_gate.weight",
    "blk.{i}.attn_q_norm.weight",
    *(f"blk.{i}.{name}" for i in range(1, 9) for name in ("ffn_gate_inp.weight", "exp_probs_b.bias")),
)
OPTIONAL = {  # tensors, of each layer i
    "bailingmoe2": (PACKED, BIASED), "deepseek2": (BIASED,), "deepseek32": (BIASED,), "glm-dsa": (BIASED,), "dots1": (BIASED,), "ernie4_5-moe": (BIASED,), "exaone-moe": (BIASED,), "falcon-h1": ("blk.0.ssm_norm.weight", "blk.{i}.ffn_norm"),
    "glm4moe": ("blk.0.attn_q_norm.weight",), "hy_v3": tuple(f"blk.{i}.{name}" for i in range(1, 9) for name in ("ffn_gate_inp.weight", "exp_probs_b")),
    "kimi-k3": ("blk.{i}.attn_q_a_norm.weight", "blk.{i}.attn_gate.weight", "blk.1.ffn_routed_norm.weight"),
    "chatglm": (PACKED,), "stablelm": ("blk.0.attn_q_norm.weight", "blk.0.ffn_norm.weight"), "mimo2": (PACKED, *(name for name in GATED if "ffn" in name or "exp" in name), *(f"blk.{i}.attn_sinks.weight" for i in range(1, 9, 2))),
    "nemotron_h_moe": ("blk.1.ffn_latent_down.weight",), "phi3": (PACKED, *FACTORS), "phimoe": FACTORS, "step35": (*GATED, "rope_freqs.weight"),
}  # fmt: skip
WINDOWED = ("afmoe", "cohere2", "cohere2moe", "exaone-moe", "gemma2", "gemma3", "gemma3n", "olmo2")
MTP_LAYERS = {"hy_v3": 2, "mimo2": 3, "step35": 3}
LISTED = ("granite_swa", "mimo2", "step35")  # every other layer slides, by a list
TIED = ("cohere2", "command-r", "gemma", "gemma2")  # llama.cpp reads no head of theirs
HYBRID = ("glm5-next", "granitehybrid", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe")  # every third layer is recurrent
UNGROUPED = ("dots1", "olmoe")  # as many KV heads as query heads


def own_shape(arch: str, s: Shape) -> Shape:
    """``s`` as far as files of the architecture can have it."""
    s = replace(s, tied=s.tied or arch in TIED)
    return replace(s, n_head_kv=s.n_head) if arch in UNGROUPED else s


def own_keys(arch: str, s: Shape) -> dict[str, Any]:
    keys = dict(KEYS.get(arch, {}))
    if "expert_count" in keys:
        keys |= {"expert_count": s.n_expert, "expert_used_count": s.n_used}
    if arch in ("qwen3vl", "qwen3vlmoe"):
        keys["rope.dimension_sections"] = np.array([(s.head_size // 2 + 2 - i) // 3 for i in range(3)] + [0])
    if arch in ("hunyuan_vl", "qwen2vl"):
        keys["rope.dimension_sections"] = np.array([s.head_size // 8, s.head_size // 4, s.head_size // 8, 0])
    if arch in HYBRID:
        kv_heads = 1 if arch.startswith(("kimi", "glm5")) else s.n_head_kv
        keys["attention.head_count_kv"] = np.array([0 if i % 3 == 0 else kv_heads for i in range(s.n_layer)])
    if arch == "apertus":
        keys |= {f"xielu.{name}": np.array([0.3 + j + i / 8 for i in range(s.n_layer)]) for j, name in enumerate(("alpha_n", "alpha_p"))}
        keys |= {"xielu.beta": 0.5, "xielu.eps": -1e-6}
    if arch == "granite_swa":
        keys["attention.rope_pattern"] = np.array([i % 3 for i in range(s.n_layer)])
    if arch == "llama4":
        keys["expert_used_count"] = 1
    if arch == "deci":  # layers with attention, without, and with a matrix in its place
        keys["attention.head_count"] = np.array([0 if i % 4 == 2 else s.n_head for i in range(s.n_layer)])
        keys["attention.head_count_kv"] = np.array([0 if i % 4 > 1 else s.n_head_kv for i in range(s.n_layer)])
        keys["feed_forward_length"] = np.array([s.n_ff * (1 + i % 2) for i in range(s.n_layer)])
    if arch in ("chatglm", "phi2", "stablelm"):
        keys["rope.dimension_count"] = s.head_size // 2
    if arch == "minimax-m3":
        keys |= {
            "attention.indexer.head_count": s.n_head_kv,
            "attention.indexer.key_length": 2 * s.head_size,
            "rope.dimension_count": s.head_size // 2,
        }
    if arch == "qwen4exp":
        ratios = np.array([0 if (i + 1) % s.every else 4 for i in range(s.n_layer)])
        keys |= {"full_attention_interval": s.every, "ple.layers": np.array([int(s.every > 2)])}
        keys |= {
            "embedding_length_per_layer_input": s.n_embd // 4,
            "attention.compress_ratios": ratios,
            "attention.indexer.key_length": s.head_size,
        }
        keys |= {"ssm.inner_size": s.delta_v * s.delta_head, "ssm.state_size": s.delta_head}
        keys |= {"ssm.time_step_rank": s.delta_v, "ssm.group_count": s.delta_k}
        keys["rope.dimension_sections"] = np.array([(s.head_size // 2 + 2 - i) // 3 for i in range(3)] + [0])
    if arch == "mimo2":
        kv_heads = np.array([s.n_head_kv * (1 + (i % 2) * (s.n_head % (2 * s.n_head_kv) == 0)) for i in range(s.n_layer)])
        keys |= {"attention.value_length": 2 * s.head_size, "attention.head_count_kv": kv_heads}
    if arch == "step35":
        keys |= {"attention.head_count": np.array([s.n_head * (1 + i % 2) for i in range(s.n_layer)])}
        keys |= {"swiglu_clamp_exp": np.resize([0.3, 0, 0.4], s.n_layer), "swiglu_clamp_shexp": np.resize([0.2, 0.5, 0], s.n_layer)}
    if arch == "glm5-next":
        keys |= {"swiglu_clamp_exp": np.resize([0.3, 0, 0.4], s.n_layer), "swiglu_clamp_shexp": np.resize([0.2, 0.5, 0], s.n_layer)}
    if arch in LISTED:
        keys |= {
            "attention.sliding_window": s.target_window or 32,
            "attention.sliding_window_pattern": np.array([i % 2 for i in range(s.n_layer)]),
        }
    if arch.startswith("nemotron_h"):  # Mamba-2, FFN, attention, FFN
        keys["attention.head_count_kv"] = np.array([s.n_head_kv if i % 4 == 2 else 0 for i in range(s.n_layer)])
        keys["feed_forward_length"] = np.array([s.n_ff if i % 2 else 0 for i in range(s.n_layer)])
    if arch in WINDOWED:
        keys["attention.sliding_window"] = s.target_window or 32
    return keys


class Asked:
    """A fake GGUF file for a description: returns sample values and records the keys that were read."""

    path, rope = Path("random.gguf"), None

    def __init__(self, arch: str, s: Shape, keys: dict[str, Any], optional: tuple[str, ...]) -> None:
        self._known, self._always = samples(s) | keys, {*UNCHECKED, *keys}
        self.arch = arch
        self.metadata = {self._key(name): self._known[name] for name in self._always}
        # only whether they are there, and the vocabulary, is looked at
        there = ("token_embd.weight", *(() if s.tied else ("output.weight",)), *optional)
        self.tensors = {name: Spec(name, (s.n_embd, s.n_vocab)) for name in there}

    def _key(self, name: str) -> str:
        return name if name.startswith("xielu.") else f"{self.arch}.{name}"  # apertus's are without it

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
    keys: dict[str, Any] | None = None, optional: tuple[str, ...] = (), mtp: tuple[str, ...] | None = None,
) -> Path:  # fmt: skip
    """Writes a random target of an architecture that ``registry`` knows.

    ``mixed`` gives attn_v and ffn_down another type, as real k-quant files do; ``keys`` are further ones, without the architecture; ``optional`` names
    tensors that the file shall have though it need not; ``mtp`` adds MTP layers, with these tensors of their own: "embedding", "norm", "head".
    """
    shape = own_shape(arch, shape)
    drafting = MTP_LAYERS.get(arch, 1) if mtp is not None else 0
    n_block = shape.n_layer + drafting
    optional = (*optional, *dict.fromkeys(name.format(i=i) for name in OPTIONAL.get(arch, ()) for i in range(n_block)))
    if arch == "mimo2":  # llama.cpp's MTP layers of mimo2 have no experts
        optional = tuple(name for name in optional if not any(f"blk.{i}.ffn_gate_inp" in name for i in range(shape.n_layer, n_block)))
    keys = own_keys(arch, replace(shape, n_layer=n_block)) | (keys or {})
    if drafting:
        keys |= {"block_count": n_block, "nextn_predict_layers": drafting}
    asked = Asked(arch, shape, keys, optional)
    target = TARGETS[arch](asked)  # type: ignore[arg-type]
    w = Writer(Path(path), arch, quant, seed, shape.n_layer)
    for key, value in asked.metadata.items():
        if not key.startswith("tokenizer."):
            _add(w, key, value)
    w.embedding_and_head(shape, next((spec.source or spec.name for spec in target.tensors() if spec.name == "output_norm.weight"), ""))
    kinds = dict.fromkeys(("attn_v", "ffn_down"), type_id("q6_K")) if mixed else {}
    for spec in [*target.tensors(), *(_mtp_specs(target, mtp) if mtp is not None else ()), *_unread(target)]:
        if spec.name not in ("token_embd.weight", "output.weight", "output_norm.weight"):
            _tensor(w, spec, kinds.get(spec.name.split(".")[-2]))
        short = spec.name.removesuffix(".weight").split(".")[-1]
        if (
            spec.use == MATMUL
            and spec.source != "token_embd.weight"
            and short in target.biased
            and not (quant == "NVFP4" and short in {*FFN} - target.unscaled)
        ):  # refused
            w.vector(spec.name.removesuffix("weight") + "bias", spec.shape[1], -0.5, 0.5)
    w.close()
    return Path(path)


def _mtp_specs(target: Decoder, own: tuple[str, ...]) -> list[Spec]:
    n, out, names = target.n_embd, list[Spec](), {"embedding": "embed_tokens", "head": "shared_head_head"}
    for i, layer in enumerate(target.mtp):
        b = f"blk.{target.n_layer + i}."
        out += layer.tensors(target.f, b)
        # which llama.cpp requires and does not use
        out += [spec for spec in target.layers[-1].tensors(target.f, b) if ".indexer." in spec.name]
        out.append(Spec(f"{b}nextn.eh_proj.weight", (2 * n, n)))
        norms = ("enorm", "hnorm", *(("shared_head_norm",) if "norm" in own else ()))
        out += [Spec(f"{b}nextn.{name}.weight", (n,), VECTOR) for name in norms]
        out += [Spec(f"{b}nextn.{names[name]}.weight", (n, target.n_vocab)) for name in own if name in names]
    return out


def _unread(target: Decoder) -> list[Spec]:
    """K/V matrices of gemma3n's layers that read those of others: its files have them."""
    shared = [i for i, layer in enumerate(target.layers) if target.arch == "gemma3n" and layer.mixer.kv is None]
    own = {spec.name: spec for spec in target.layers[0].tensors(target.f, "")}
    return [replace(own[name], name=f"blk.{i}.{name}") for i in shared for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")]


def _add(w: Writer, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        wide = gguf.GGUFValueType.UINT64 if value.dtype == np.uint64 else None
        w.out.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, wide)
    elif isinstance(value, bool):
        w.out.add_bool(key, value)
    elif isinstance(value, str):
        w.out.add_string(key, value)
    elif isinstance(value, float):
        w.out.add_float32(key, value)
    else:
        w.out.add_uint32(key, value)


def _tensor(w: Writer, spec: Spec, kind: int | None) -> None:
    if ("altup" in spec.name or "laurel" in spec.name) and w.kind != type_id("f32"):
        kind = type_id("f32" if spec.name.endswith("_coef.weight") else "f16")  # as in published files, whatever their type
    if spec.use == EXPERTS:
        w.experts(spec.name, *spec.shape, kind=kind)
    elif spec.use == HEADS:
        w.heads(spec.name, *spec.shape, kind=kind)
    elif spec.use in (MATMUL, ROWS) and len(spec.shape) == 2:
        router = spec.name.endswith("ffn_gate_inp.weight")
        w.matrix(spec.name, *spec.shape, gain=2.0 if router else 1.0, kind=type_id("f32") if router else kind)
    else:
        positive, decay = spec.name.endswith("norm.weight") or "rope" in spec.name, spec.name.endswith("ssm_a")
        low, high = (0.5, 1.5) if positive else (-2.0, -0.05) if decay else (-0.5, 0.5)
        values = w.rng.uniform(low, high, int(np.prod(spec.shape))).astype(np.float32)
        w.out.add_tensor(spec.source or spec.name, values.reshape(spec.shape[::-1]))
