"""Random gemma4-assistant drafters, as llama.cpp's converter lays them out."""

from pathlib import Path

import numpy as np

from .archs import ffn_shapes
from .model import Shape, Writer

ARCH = "gemma4-assistant"


def write_gemma4_assistant(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 2, *, n_embd: int = 128, layers: int = 3, tables: bool = False
) -> Path:
    """Writes a random drafter of ``layers`` layers of width ``n_embd`` for a random gemma4 target of the same shape; its last layer is full.

    ``tables`` adds those of a reduced head, which are unused.
    """
    s, n, w = shape, n_embd, Writer(Path(path), ARCH, quant, seed, layers)
    out, sliding = w.out, [i + 1 < layers for i in range(layers)]
    out.add_block_count(layers)
    out.add_uint32(f"{ARCH}.nextn_predict_layers", layers)
    out.add_context_length(s.n_ctx)
    out.add_embedding_length(n)
    out.add_uint32(f"{ARCH}.embedding_length_out", s.n_embd)
    out.add_feed_forward_length(s.draft_ff)
    out.add_head_count(s.draft_heads)
    out.add_head_count_kv([s.n_head_kv if slides else s.n_head_kv_full for slides in sliding])
    out.add_layer_norm_rms_eps(1e-6)
    out.add_key_length(2 * s.head_size)
    out.add_value_length(2 * s.head_size)
    out.add_uint32(f"{ARCH}.attention.key_length_swa", s.head_size)
    out.add_uint32(f"{ARCH}.attention.value_length_swa", s.head_size)
    out.add_sliding_window(s.target_window)
    out.add_array(f"{ARCH}.attention.sliding_window_pattern", sliding)
    out.add_uint32(f"{ARCH}.attention.shared_kv_layers", 0)
    out.add_rope_dimension_count(2 * s.head_size)
    out.add_uint32(f"{ARCH}.rope.dimension_count_swa", s.head_size)
    out.add_rope_freq_base(s.rope_base)
    out.add_float32(f"{ARCH}.rope.freq_base_swa", 1e4)
    w.tokenizer(s.n_vocab)
    w.matrix("token_embd.weight", n, s.n_vocab)
    w.vector("output_norm.weight", n, 0.5, 1.5)
    out.add_tensor("rope_freqs.weight", w.rng.uniform(1.0, 8.0, s.head_size).astype(np.float32))
    w.matrix("nextn.pre_projection.weight", 2 * s.n_embd, n)
    w.matrix("nextn.post_projection.weight", n, s.n_embd)
    if tables:
        w.matrix("masked_embd_centroids.weight", n, 32)
        out.add_tensor("masked_embd_ordering", np.arange(s.n_vocab, dtype=np.int64))
    for i, slides in enumerate(sliding):
        b, wide = f"blk.{i}.", s.draft_heads * s.head_size * (1 if slides else 2)
        w.matrices(b, {"attn_q": (n, wide), "attn_output": (wide, n)} | ffn_shapes(n, s.draft_ff))
        w.norms(b, dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), n))
        w.norms(b, {"attn_q_norm": s.head_size * (1 if slides else 2), "layer_output_scale": 1})
    w.close()
    return Path(path)
