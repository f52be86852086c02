"""Random qwen35 and qwen35moe models with an MTP layer, in the target's file or in a separate one, as llama.cpp's converter lays them out."""

from pathlib import Path

import numpy as np

from .archs import expert_keys, ffn_shapes, write_experts
from .described import write_described
from .model import Shape, Writer, hybrid_keys, write_attention, write_hybrid

OWN_TENSORS = ("embedding", "norm", "head")  # what a layer may have of its own instead of the target's


def write_mtp_target(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False, *, arch: str = "qwen35",
    own: tuple[str, ...] = ()
) -> Path:  # fmt: skip
    """Writes a random target of an architecture with an additional MTP layer; ``own`` as in OWN_TENSORS."""
    if arch not in ("qwen35", "qwen35moe", "qwen3next"):
        return write_described(arch, path, shape, quant, seed, mixed, mtp=own)
    routed = arch != "qwen35"

    def ffn(w: Writer, prefix: str, other: int | None) -> None:
        _write_ffn(w, prefix, shape, other, routed)

    def write_layer(w: Writer, other: int | None) -> None:
        w.out.add_uint32(f"{arch}.nextn_predict_layers", 1)
        _write_layer(w, shape, other, routed, own)

    return write_hybrid(path, arch, shape, quant, seed, mixed, ffn, mtp=write_layer)


def write_mtp(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 2, mixed: bool = False, *, arch: str = "qwen35",
    own: tuple[str, ...] = ()
) -> Path:  # fmt: skip
    """Writes the MTP layer alone, with an embedding, a head and a last norm of the file's own: `mtp-*.gguf`, whose architecture is the target's."""
    path, routed = Path(path), arch != "qwen35"
    w = Writer(path, arch, quant, seed)
    hybrid_keys(w, arch, shape, n_mtp=1)
    if routed:
        expert_keys(w, shape)
        w.out.add_expert_shared_feed_forward_length(shape.n_ff_shared)
    w.out.add_uint32(f"{arch}.nextn_predict_layers", 1)
    w.embedding_and_head(shape)
    _write_layer(w, shape, None, routed, own)
    w.close()
    return path


def _write_layer(w: Writer, s: Shape, other: int | None, routed: bool, own: tuple[str, ...]) -> None:
    b = f"blk.{s.n_layer}."
    w.norms(b, {"attn_norm": s.n_embd, "post_attention_norm": s.n_embd, "nextn.enorm": s.n_embd, "nextn.hnorm": s.n_embd})
    w.matrix(b + "nextn.eh_proj.weight", 2 * s.n_embd, s.n_embd)
    write_attention(w, b, s, other)
    _write_ffn(w, b, s, other, routed)
    if "embedding" in own:
        w.matrix(b + "nextn.embed_tokens.weight", s.n_embd, s.n_vocab, gain=s.n_embd**0.5)
    if "norm" in own:
        w.vector(b + "nextn.shared_head_norm.weight", s.n_embd, 0.5, 1.5)
    if "head" in own:
        w.matrix(b + "nextn.shared_head_head.weight", s.n_embd, s.n_vocab)


def _write_ffn(w: Writer, prefix: str, s: Shape, other: int | None, routed: bool) -> None:
    if not routed:
        w.matrices(prefix, ffn_shapes(s.n_embd, s.n_ff), {"ffn_down": other} if other is not None else {})
        return
    if prefix == "blk.0.":
        expert_keys(w, s)
        w.out.add_expert_shared_feed_forward_length(s.n_ff_shared)
    write_experts(w, prefix, s, other)
    w.out.add_tensor(prefix + "ffn_gate_inp_shexp.weight", w.rng.standard_normal(s.n_embd).astype(np.float32) / s.n_embd**0.5)
    w.matrices(prefix, ffn_shapes(s.n_embd, s.n_ff_shared, "_shexp"))
