"""Random-weight GGUFs of the architectures besides qwen35; ``random_model`` has the writer, the shapes and the drafter."""

from pathlib import Path

import numpy as np

from .random_model import Shape, Writer, type_id, write_hybrid


def attention_shapes(s: Shape, n_head: int | None = None) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of q, k, v and the output matrix."""
    wide, wide_kv = (n_head or s.n_head) * s.head_size, s.n_head_kv * s.head_size
    return {"attn_q": (s.n_embd, wide), "attn_k": (s.n_embd, wide_kv), "attn_v": (s.n_embd, wide_kv), "attn_output": (wide, s.n_embd)}


def ffn_shapes(n_embd: int, n_ff: int, suffix: str = "") -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of gate, up and down."""
    return {f"ffn_gate{suffix}": (n_embd, n_ff), f"ffn_up{suffix}": (n_embd, n_ff), f"ffn_down{suffix}": (n_ff, n_embd)}


def start_dense(path: str | Path, arch: str, s: Shape, quant: str, seed: int, mixed: bool) -> Writer:
    """A dense transformer up to the norms and tables that only one architecture has."""
    w = Writer(Path(path), arch, quant, seed)
    w.sizes(s)
    w.out.add_rope_dimension_count(s.head_size)
    w.out.add_rope_freq_base(s.rope_base)
    w.ends(s)
    kinds = dict.fromkeys(("attn_v", "ffn_down"), type_id("q6_K")) if mixed else {}
    for i in range(s.n_layer):
        w.matrices(f"blk.{i}.", attention_shapes(s) | ffn_shapes(s.n_embd, s.n_ff), kinds)
        w.norms(f"blk.{i}.", {"attn_norm": s.n_embd, "ffn_norm": s.n_embd})
    return w


def write_qwen3(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, yarn: float = 0.0
) -> Path:
    """Writes a random qwen3 target. ``yarn`` above 1 stretches positions by that factor."""
    w = start_dense(path, "qwen3", shape, quant, seed, mixed)
    if yarn:
        write_yarn(w, yarn, 64)
    for i in range(shape.n_layer):
        w.norms(f"blk.{i}.", {"attn_q_norm": shape.head_size, "attn_k_norm": shape.head_size})
    w.close()
    return Path(path)


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


def write_experts(w: Writer, prefix: str, s: Shape, other: int | None = None, joined: bool = False) -> None:
    """Router and expert matrices of one layer; ``joined`` stores gate and up as one tensor, ``other`` is the type of down."""
    w.matrix(prefix + "ffn_gate_inp.weight", s.n_embd, s.n_expert, kind=type_id("f32"), gain=2.0)
    if joined:
        w.experts(prefix + "ffn_gate_up_exps.weight", s.n_embd, 2 * s.n_ff_expert, s.n_expert)
    else:
        w.experts(prefix + "ffn_gate_exps.weight", s.n_embd, s.n_ff_expert, s.n_expert)
        w.experts(prefix + "ffn_up_exps.weight", s.n_embd, s.n_ff_expert, s.n_expert)
    w.experts(prefix + "ffn_down_exps.weight", s.n_ff_expert, s.n_embd, s.n_expert, kind=other)


def expert_keys(w: Writer, s: Shape) -> None:
    w.out.add_expert_count(s.n_expert)
    w.out.add_expert_used_count(s.n_used)
    w.out.add_expert_feed_forward_length(s.n_ff_expert)


def write_qwen35moe(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, joined: bool = False
) -> Path:
    """Writes a random qwen35moe target."""
    s = shape

    def ffn(w: Writer, prefix: str, other: int | None) -> None:
        if prefix == "blk.0.":
            expert_keys(w, s)
            w.out.add_expert_shared_feed_forward_length(s.n_ff_shared)
        write_experts(w, prefix, s, other, joined)
        w.out.add_tensor(prefix + "ffn_gate_inp_shexp.weight", w.rng.standard_normal(s.n_embd).astype(np.float32) / s.n_embd**0.5)
        w.matrices(prefix, ffn_shapes(s.n_embd, s.n_ff_shared, "_shexp"))

    return write_hybrid(path, "qwen35moe", s, quant, seed, mixed, ffn)


def write_laguna(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, wide_gate: bool = False, yarn: float = 4.0
) -> Path:
    """Writes a random laguna target: sliding layers have twice the heads and half the rotated values; one leading dense layer.

    ``wide_gate`` gates every attention output instead of every head; ``yarn`` 0 leaves positions as they are.
    """
    s, w = shape, Writer(Path(path), "laguna", quant, seed)
    heads = [s.n_head * (2 if s.target_window and i % 4 else 1) for i in range(s.n_layer)]
    w.sizes(s, heads)
    w.out.add_rope_dimension_count(s.head_size)
    w.out.add_rope_freq_base(s.rope_base)
    if yarn:
        write_yarn(w, yarn, 64)
    if s.target_window:
        w.out.add_sliding_window(s.target_window)
        w.out.add_uint32("laguna.rope.dimension_count_swa", s.head_size // 2)
        w.out.add_float32("laguna.rope.freq_base_swa", 1e4)
    w.out.add_leading_dense_block_count(1)
    expert_keys(w, s)
    w.out.add_expert_shared_feed_forward_length(s.n_ff_shared)
    w.out.add_expert_weights_norm(True)
    w.out.add_expert_weights_scale(2.5)
    w.ends(s)
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
