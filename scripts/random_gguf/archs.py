"""Random-weight GGUFs of architectures other than qwen35; ``model`` has the writer, the shapes and the drafter."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np

from pyggml_spec.models.registry import TARGETS

from .described import write_described
from .model import Shape, Writer, type_id, write_hybrid, write_qwen35


def attention_shapes(s: Shape, n_head: int | None = None) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of q, k, v and the output matrix."""
    wide, wide_kv = (n_head or s.n_head) * s.head_size, s.n_head_kv * s.head_size
    return {"attn_q": (s.n_embd, wide), "attn_k": (s.n_embd, wide_kv), "attn_v": (s.n_embd, wide_kv), "attn_output": (wide, s.n_embd)}


def ffn_shapes(n_embd: int, n_ff: int, suffix: str = "") -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of gate, up and down."""
    return {f"ffn_gate{suffix}": (n_embd, n_ff), f"ffn_up{suffix}": (n_embd, n_ff), f"ffn_down{suffix}": (n_ff, n_embd)}


def start_dense(path: str | Path, arch: str, s: Shape, quant: str, seed: int, mixed: bool, routed: bool = False) -> Writer:
    """A transformer up to the norms and tables that only one architecture has; ``routed``: with experts for its FFN."""
    w = Writer(Path(path), arch, quant, seed)
    w.sizes(s)
    w.out.add_rope_dimension_count(s.head_size)
    w.out.add_rope_freq_base(s.rope_base)
    if routed:
        expert_keys(w, s)
    w.embedding_and_head(s)
    kinds = dict.fromkeys(("attn_v", "ffn_down"), type_id("q6_K")) if mixed else {}
    for i in range(s.n_layer):
        w.matrices(f"blk.{i}.", attention_shapes(s) | ({} if routed else ffn_shapes(s.n_embd, s.n_ff)), kinds)
        if routed:
            write_experts(w, f"blk.{i}.", s, kinds.get("ffn_down"))
        w.norms(f"blk.{i}.", {"attn_norm": s.n_embd, "ffn_norm": s.n_embd})
    return w


def write_qwen3(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, yarn: float = 0.0
) -> Path:
    """Writes a random qwen3 target. ``yarn`` above 1 stretches positions by that factor."""
    return _write_qwen3("qwen3", path, shape, quant, seed, mixed, yarn)


def _write_qwen3(arch: str, path: str | Path, shape: Shape, quant: str, seed: int, mixed: bool, yarn: float) -> Path:
    w = start_dense(path, arch, shape, quant, seed, mixed, arch == "qwen3moe")
    if yarn:
        write_yarn(w, yarn, 64)
    for i in range(shape.n_layer):
        w.norms(f"blk.{i}.", {"attn_q_norm": shape.head_size, "attn_k_norm": shape.head_size})
    w.close()
    return Path(path)


def write_qwen3moe(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, yarn: float = 0.0
) -> Path:
    """Writes a random qwen3moe target. ``yarn`` as for `write_qwen3`."""
    return _write_qwen3("qwen3moe", path, shape, quant, seed, mixed, yarn)


def write_yarn(w: Writer, factor: float, n_ctx_orig: int, attn_factor: float = 1.25) -> None:
    """The keys of a yarn scaling."""
    w.out.add_string(f"{w.arch}.rope.scaling.type", "yarn")
    w.out.add_float32(f"{w.arch}.rope.scaling.factor", factor)
    w.out.add_uint32(f"{w.arch}.rope.scaling.original_context_length", n_ctx_orig)
    w.out.add_float32(f"{w.arch}.rope.scaling.attn_factor", attn_factor)


def write_llama(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, factors: bool = True
) -> Path:
    """Writes a random llama target; ``factors`` adds the frequency table of Llama 3.1 and later."""
    w = start_dense(path, "llama", shape, quant, seed, mixed)
    if factors:
        w.out.add_tensor("rope_freqs.weight", w.rng.uniform(1.0, 8.0, shape.head_size // 2).astype(np.float32))
    w.close()
    return Path(path)


def write_gpt_oss(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False,
    yarn: float = 4.0, pattern: bool = False
) -> Path:  # fmt: skip
    """Writes a random gpt-oss target. MXFP4 is the type of the experts alone, as in published files; the others are Q8_0 then.

    ``pattern`` says in a list which layers slide, the last two, and gives them a rope base of their own.
    """
    s, w = shape, Writer(Path(path), "gpt-oss", "Q8_0" if quant == "MXFP4" else quant, seed)
    w.sizes(s)
    w.out.add_rope_dimension_count(s.head_size)
    w.out.add_rope_freq_base(s.rope_base)
    w.out.add_sliding_window(s.target_window)
    if pattern:
        w.out.add_array("gpt-oss.attention.sliding_window_pattern", [i + 2 >= s.n_layer for i in range(s.n_layer)])
        w.out.add_float32("gpt-oss.rope.freq_base_swa", 1e4)
    if yarn:
        write_yarn(w, yarn, 64)
    expert_keys(w, s)
    w.embedding_and_head(s)
    kinds = dict.fromkeys(("attn_v", "ffn_down"), type_id("q6_K")) if mixed else {}
    for i in range(s.n_layer):
        b, shapes = f"blk.{i}.", attention_shapes(s)
        w.matrices(b, shapes, kinds)
        w.norms(b, {"attn_norm": s.n_embd, "post_attention_norm": s.n_embd})
        for name, (_, n_out) in shapes.items():
            w.vector(f"{b}{name}.bias", n_out, -0.5, 0.5)
        w.vector(b + "attn_sinks.weight", s.n_head, -1.0, 3.0)
        write_experts(w, b, s, kinds.get("ffn_down"), kind=type_id(quant))
        w.vector(b + "ffn_gate_inp.bias", s.n_expert, -1.0, 1.0)
        for name, n in (("gate", s.n_ff_expert), ("up", s.n_ff_expert), ("down", s.n_embd)):
            # up to where the gate clamps
            w.rows(f"{b}ffn_{name}_exps.bias", n, s.n_expert, 4.0 if name != "down" else 0.5)
    w.close()
    return Path(path)


def write_minimax_m2(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, sigmoid: bool = True
) -> Path:
    """Writes a random minimax-m2 target; ``sigmoid`` False routes by a softmax."""
    s, w = shape, Writer(Path(path), "minimax-m2", quant, seed)
    w.sizes(replace(s, n_ff=s.n_ff_expert))
    w.out.add_rope_dimension_count(s.n_rot)
    w.out.add_rope_freq_base(s.rope_base)
    expert_keys(w, s)
    w.out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    w.embedding_and_head(s)
    kinds = dict.fromkeys(("attn_v", "ffn_down"), type_id("q6_K")) if mixed else {}
    for i in range(s.n_layer):
        b = f"blk.{i}."
        w.matrices(b, attention_shapes(s), kinds)
        norms = {"attn_q_norm": s.n_head * s.head_size, "attn_k_norm": s.n_head_kv * s.head_size}
        w.norms(b, {"attn_norm": s.n_embd, "ffn_norm": s.n_embd} | norms)
        write_experts(w, b, s, kinds.get("ffn_down"))
        w.vector(b + "exp_probs_b.bias", s.n_expert, -0.3, 0.3)
    w.close()
    return Path(path)


def write_muse_glimmer(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False,
    softcap: float | None = 20.0, pattern: bool = True
) -> Path:  # fmt: skip
    """Writes a random muse-glimmer target; ``pattern`` False omits the pattern of sliding layers (default: all but the last of every four)."""
    s, w = shape, Writer(Path(path), "muse-glimmer", quant, seed)
    w.sizes(s)
    w.out.add_rope_dimension_count(s.head_size)
    w.out.add_rope_freq_base(s.rope_base)
    w.out.add_sliding_window(s.target_window)
    if pattern:
        w.out.add_sliding_window_pattern([i % 2 == 0 for i in range(s.n_layer)])
    w.out.add_logit_scale(0.19611613513818404)
    if softcap is not None:
        w.out.add_final_logit_softcapping(softcap)
    w.embedding_and_head(s)
    kinds = dict.fromkeys(("attn_v", "ffn_down"), type_id("q6_K")) if mixed else {}
    for i in range(s.n_layer):
        b = f"blk.{i}."
        w.matrices(b, attention_shapes(s) | {"attn_gate": (s.n_embd, s.n_head * s.head_size)} | ffn_shapes(s.n_embd, s.n_ff), kinds)
        norms = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), s.n_embd)
        w.norms(b, norms | dict.fromkeys(("attn_q_norm", "attn_k_norm"), s.head_size))
    w.close()
    return Path(path)


def write_deepseek2(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, yarn: float = 4.0,
    multiplier: float = 0.0707, groups: int = 1, sigmoid: bool = True, joined: bool = False, shared: int = 2, arch: str = "deepseek2"
) -> Path:  # fmt: skip
    """Writes a random deepseek2 or mistral4 target: a leading dense layer, then routed experts plus ``shared`` ones in one matrix.

    ``multiplier`` is that of yarn's magnitude, 0 for none; with ``groups`` a token's experts lie in all of them but one; ``sigmoid`` False is the router
    of the first models: a softmax without a bias. ``joined`` stores gate and up of the experts as one tensor.
    """
    w = Writer(Path(path), arch, quant, seed)
    if arch == "mistral4":
        w.out.add_float32(f"{arch}.attention.temperature_scale", 0.3)
        w.out.add_uint32(f"{arch}.attention.temperature_length", 24)
    _write_deepseek2(w, shape, mixed, yarn, multiplier, groups, sigmoid, joined, shared)
    w.close()
    return Path(path)


def write_glm_dsa(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, yarn: float = 4.0,
    full: tuple[bool, ...] | None = None, shared: int = 2, arch: str = "glm-dsa"
) -> Path:  # fmt: skip
    """Writes a random glm-dsa or deepseek32 target: deepseek2 with an indexer in every layer, or in the ``full`` ones; ``shared`` experts."""
    s, w = shape, Writer(Path(path), arch, quant, seed)
    key = f"{w.arch}.attention.indexer"
    w.out.add_uint32(f"{key}.head_count", s.index_heads)
    w.out.add_uint32(f"{key}.key_length", s.index_size)
    w.out.add_uint32(f"{key}.top_k", s.top_k)
    if full is not None:
        w.out.add_array(f"{key}.types", list(full))
    _write_deepseek2(w, s, mixed, yarn, 0.0 if arch == "glm-dsa" else 0.0707, 1, True, False, shared)
    kinds = {"attn_k": type_id("q6_K")} if mixed else {}
    shapes = {"attn_k": (s.n_embd, s.index_size), "attn_q_b": (s.n_lora_q, s.index_heads * s.index_size), "proj": (s.n_embd, s.index_heads)}
    for i in range(s.n_layer):
        if full is None or full[i]:
            w.matrices(f"blk.{i}.indexer.", shapes, kinds)
            w.norms(f"blk.{i}.indexer.", {"k_norm": s.index_size})
            w.vector(f"blk.{i}.indexer.k_norm.bias", s.index_size, -0.5, 0.5)
    w.close()
    return Path(path)


def _write_deepseek2(
    w: Writer, s: Shape, mixed: bool, yarn: float, multiplier: float, groups: int, sigmoid: bool, joined: bool, shared: int
) -> None:
    stored = s.n_latent + s.n_rot
    w.sizes(replace(s, n_head_kv=1, head_size=stored), size_v=s.n_latent)
    out = w.out
    if s.n_lora_q:
        out.add_q_lora_rank(s.n_lora_q)
    out.add_kv_lora_rank(s.n_latent)
    out.add_key_length_mla(s.head_size)
    out.add_value_length_mla(s.head_size_v)
    out.add_rope_dimension_count(s.n_rot)
    out.add_rope_freq_base(s.rope_base)
    if yarn:
        write_yarn(w, yarn, 64)
    if yarn and multiplier:
        out.add_rope_scaling_yarn_log_mul(multiplier)
    expert_keys(w, s)
    out.add_leading_dense_block_count(s.n_dense)
    out.add_expert_shared_count(shared)
    if groups > 1:
        out.add_expert_group_count(groups)
        out.add_expert_group_used_count(groups - 1)
    out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    if sigmoid:
        out.add_expert_weights_norm(True)
    out.add_expert_weights_scale(2.5)
    w.embedding_and_head(s)
    kinds = dict.fromkeys(("attn_kv_a_mqa", "ffn_down", "ffn_up_shexp"), type_id("q6_K")) if mixed else {}
    wide = s.n_head * s.head_size
    for i in range(s.n_layer):
        b, norms = f"blk.{i}.", {"attn_norm": s.n_embd, "ffn_norm": s.n_embd, "attn_kv_a_norm": s.n_latent}
        shapes = {"attn_q_a": (s.n_embd, s.n_lora_q), "attn_q_b": (s.n_lora_q, wide)} if s.n_lora_q else {"attn_q": (s.n_embd, wide)}
        w.matrices(b, shapes | {"attn_kv_a_mqa": (s.n_embd, stored), "attn_output": (s.n_head * s.head_size_v, s.n_embd)}, kinds)
        w.heads(b + "attn_k_b.weight", s.head_size - s.n_rot, s.n_latent, s.n_head)
        w.heads(b + "attn_v_b.weight", s.n_latent, s.head_size_v, s.n_head)
        w.norms(b, norms | ({"attn_q_a_norm": s.n_lora_q} if s.n_lora_q else {}))
        if i < s.n_dense:
            w.matrices(b, ffn_shapes(s.n_embd, s.n_ff), kinds)
            continue
        write_experts(w, b, s, kinds.get("ffn_down"), joined)
        if sigmoid:
            w.vector(b + "exp_probs_b.bias", s.n_expert, -0.3, 0.3)
        w.matrices(b, ffn_shapes(s.n_embd, shared * s.n_ff_expert, "_shexp"), kinds)


def write_experts(w: Writer, prefix: str, s: Shape, other: int | None = None, joined: bool = False, kind: int | None = None) -> None:
    """Router and expert matrices of one layer; ``joined`` stores gate and up as one tensor, ``kind`` is their type, ``other`` that of down."""
    other = kind if other is None else other
    w.matrix(prefix + "ffn_gate_inp.weight", s.n_embd, s.n_expert, kind=type_id("f32"), gain=2.0)
    if joined:
        w.experts(prefix + "ffn_gate_up_exps.weight", s.n_embd, 2 * s.n_ff_expert, s.n_expert, kind=kind)
    else:
        w.experts(prefix + "ffn_gate_exps.weight", s.n_embd, s.n_ff_expert, s.n_expert, kind=kind)
        w.experts(prefix + "ffn_up_exps.weight", s.n_embd, s.n_ff_expert, s.n_expert, kind=kind)
    w.experts(prefix + "ffn_down_exps.weight", s.n_ff_expert, s.n_embd, s.n_expert, kind=other)


def expert_keys(w: Writer, s: Shape) -> None:
    """Counts and size of the experts."""
    w.out.add_expert_count(s.n_expert)
    w.out.add_expert_used_count(s.n_used)
    w.out.add_expert_feed_forward_length(s.n_ff_expert)


def write_qwen35moe(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, joined: bool = False
) -> Path:
    """Writes a random qwen35moe target."""
    return write_hybrid(path, "qwen35moe", shape, quant, seed, mixed, shared_and_routed(shape, joined))


def shared_and_routed(s: Shape, joined: bool) -> Callable:
    """A writer of routed experts and a gated shared one."""

    def ffn(w: Writer, prefix: str, other: int | None) -> None:
        if prefix == "blk.0.":
            expert_keys(w, s)
            w.out.add_expert_shared_feed_forward_length(s.n_ff_shared)
        write_experts(w, prefix, s, other, joined)
        w.out.add_tensor(prefix + "ffn_gate_inp_shexp.weight", w.rng.standard_normal(s.n_embd).astype(np.float32) / s.n_embd**0.5)
        w.matrices(prefix, ffn_shapes(s.n_embd, s.n_ff_shared, "_shexp"))

    return ffn


def write_qwen3next(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, joined: bool = False
) -> Path:
    """Writes a random qwen3next target; ``joined`` has q, k, v and z in one matrix, as its first files do."""
    return write_hybrid(path, "qwen3next", shape, quant, seed, mixed, shared_and_routed(shape, False), joined)


def write_laguna(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False,
    wide_gate: bool = False, yarn: float = 4.0
) -> Path:  # fmt: skip
    """Writes a random laguna target: sliding layers have twice the heads and half the rotated values; one leading dense layer.

    ``wide_gate`` gates every attention output instead of every head; ``yarn`` 0 leaves positions as they are.
    """
    s, w = shape, Writer(Path(path), "laguna", quant, seed)
    heads = [(s.n_head_sliding or 2 * s.n_head) if s.target_window and i % 4 else s.n_head for i in range(s.n_layer)]
    w.sizes(s, heads)
    w.out.add_rope_dimension_count(s.n_rot_full or s.head_size)
    w.out.add_rope_freq_base(s.rope_base)
    if yarn:
        write_yarn(w, yarn, 64)
    if s.target_window:
        w.out.add_sliding_window(s.target_window)
        w.out.add_uint32("laguna.rope.dimension_count_swa", s.n_rot_sliding or s.head_size // 2)
        w.out.add_float32("laguna.rope.freq_base_swa", 1e4)
    w.out.add_leading_dense_block_count(1)
    expert_keys(w, s)
    w.out.add_expert_shared_feed_forward_length(s.n_ff_shared)
    w.out.add_expert_weights_norm(True)
    w.out.add_expert_weights_scale(2.5)
    w.embedding_and_head(s)
    kinds = dict.fromkeys(("attn_v", "ffn_down", "ffn_down_shexp"), type_id("q6_K")) if mixed else {}
    for i in range(s.n_layer):
        b = f"blk.{i}."
        gate = heads[i] * (s.head_size if wide_gate else 1)
        w.matrices(b, attention_shapes(s, heads[i]) | {"attn_gate": (s.n_embd, gate)}, kinds)
        w.norms(b, {"attn_norm": s.n_embd, "ffn_norm": s.n_embd, "attn_q_norm": s.head_size, "attn_k_norm": s.head_size})
        if i == 0:
            w.matrices(b, ffn_shapes(s.n_embd, s.n_ff), kinds)
            continue
        write_experts(w, b, s, kinds.get("ffn_down"))
        w.vector(b + "exp_probs_b.bias", s.n_expert, -0.3, 0.3)
        w.matrices(b, ffn_shapes(s.n_embd, s.n_ff_shared, "_shexp"), kinds)
    w.close()
    return Path(path)


def write_gemma4(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False,
    n_per_layer: int = 64, shared: bool = True, routed: bool = False, softcap: float | None = 30.0, alike: bool = False, n_own: int = 2
) -> Path:  # fmt: skip
    """Writes a random gemma4 target: the last of every ``full_every`` layers is full, with K/V heads of twice the size and no attn_v.

    ``shared`` lets all layers but the first ``n_own`` read the K/V of the last of those; ``routed`` adds experts to every layer but the first.
    ``alike`` routes in the first one too and stores gate and up of all layers as one tensor, as published files do.
    """
    s, w = shape, Writer(Path(path), "gemma4", quant, seed)
    full = [(i + 1) % s.full_every == 0 for i in range(s.n_layer)]
    heads_kv = [s.n_head_kv_full if f else s.n_head_kv for f in full]
    w.sizes(replace(s, head_size=2 * s.head_size), heads_kv=heads_kv)
    out = w.out
    out.add_uint32("gemma4.attention.key_length_swa", s.head_size)
    out.add_uint32("gemma4.attention.value_length_swa", s.head_size)
    out.add_sliding_window(s.target_window)
    out.add_array("gemma4.attention.sliding_window_pattern", [not f for f in full])
    out.add_uint32("gemma4.attention.shared_kv_layers", s.n_layer - n_own if shared else 0)
    out.add_uint32("gemma4.embedding_length_per_layer_input", n_per_layer)
    out.add_rope_dimension_count(2 * s.head_size)
    out.add_uint32("gemma4.rope.dimension_count_swa", s.head_size)
    out.add_rope_freq_base(s.rope_base)
    out.add_float32("gemma4.rope.freq_base_swa", 1e4)
    if softcap is not None:
        out.add_final_logit_softcapping(softcap)
    if routed:
        expert_keys(w, s)
    w.embedding_and_head(s)
    out.add_tensor("rope_freqs.weight", w.rng.uniform(1.0, 8.0, s.head_size).astype(np.float32))
    if n_per_layer:
        w.matrix("per_layer_token_embd.weight", n_per_layer * s.n_layer, s.n_vocab, gain=2.0)
        w.matrix("per_layer_model_proj.weight", s.n_embd, n_per_layer * s.n_layer)
        w.norms("", {"per_layer_proj_norm": n_per_layer})
    kinds = {"ffn_down": type_id("q6_K")} if mixed else {}
    for i in range(s.n_layer):
        own_kv, size = i < n_own or not shared, (2 if full[i] else 1) * s.head_size
        norms, shapes = _gemma4_layer(s, size, heads_kv[i], own_kv, full[i], n_per_layer)
        if routed and (i > 0 or alike):
            norms |= dict.fromkeys(("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"), s.n_embd)
            write_experts(w, f"blk.{i}.", s, kinds.get("ffn_down"), joined=alike or i % 2 == 0)
            w.vector(f"blk.{i}.ffn_gate_inp.scale", s.n_embd, 2.0, 6.0)
            w.vector(f"blk.{i}.ffn_down_exps.scale", s.n_expert, 0.5, 1.5)
        w.matrices(f"blk.{i}.", shapes, kinds)
        w.norms(f"blk.{i}.", norms)
    w.close()
    return Path(path)


def _gemma4_layer(s: Shape, size: int, heads_kv: int, own_kv: bool, full: bool, n_per_layer: int) -> tuple[dict, dict]:
    """Sizes of the norms, shapes of the matrices."""
    n = s.n_embd
    shapes = attention_shapes(replace(s, head_size=size, n_head_kv=heads_kv)) | ffn_shapes(n, s.n_ff)
    for name in () if own_kv and not full else ("attn_v",) if own_kv else ("attn_k", "attn_v"):
        del shapes[name]
    norms = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), n) | {"attn_q_norm": size}
    norms["layer_output_scale"] = 1
    if own_kv:
        norms["attn_k_norm"] = size
    if n_per_layer:
        shapes |= {"inp_gate": (n, n_per_layer), "proj": (n_per_layer, n)}
        norms["post_norm"] = n
    return norms, shapes


WRITERS: dict[str, Callable[..., Path]] = {arch: partial(write_described, arch) for arch in TARGETS} | {  # those with options of their own
    "deepseek2": write_deepseek2, "gemma4": write_gemma4, "glm-dsa": write_glm_dsa, "gpt-oss": write_gpt_oss, "laguna": write_laguna, "llama": write_llama,
    "minimax-m2": write_minimax_m2, "mistral4": partial(write_deepseek2, arch="mistral4"), "deepseek32": partial(write_glm_dsa, arch="deepseek32"), "muse-glimmer": write_muse_glimmer, "qwen3": write_qwen3, "qwen3moe": write_qwen3moe,
    "qwen3next": write_qwen3next, "qwen35": write_qwen35, "qwen35moe": write_qwen35moe,
}  # fmt: skip
