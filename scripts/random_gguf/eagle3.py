"""Random eagle3 drafters, as llama.cpp's converter lays them out."""

from pathlib import Path

import numpy as np

from .archs import ffn_shapes
from .model import Shape, Writer


def write_eagle3(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 2, *,
    own: tuple[str, ...] = ("head",), tokens: int = 0, norm_before_residual: bool = False, norm_before_fc: bool = False,
    factors: bool = False, n_embd: int = 0, chosen: int = 0, layers: int = 1, mask: int = -1
) -> Path:  # fmt: skip
    """Writes a random eagle3 drafter for a target of the same shape.

    ``own``: "embedding" and "head", where they are not the target's; ``tokens``: of the target's vocabulary, so many that the head chooses among;
    ``n_embd``: of the drafter, where it is not the target's; ``chosen``: the last of these, where it is to be another; ``mask``: the token of masks, of a
    drafter that makes all drafts in one pass.
    """
    s, n = shape, n_embd or shape.n_embd
    w = Writer(Path(path), "eagle3", quant, seed, layers)
    out = w.out
    out.add_block_count(layers)
    out.add_context_length(s.n_ctx)
    out.add_embedding_length(n)
    out.add_feed_forward_length(s.draft_ff)
    out.add_head_count(s.draft_heads)
    out.add_head_count_kv(s.draft_heads_kv)
    out.add_key_length(s.draft_head_size)
    out.add_value_length(s.draft_head_size)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(s.rope_base)
    out.add_rope_dimension_count(s.draft_head_size)
    out.add_array("eagle3.target_layers", list(s.target_layers))
    out.add_uint32("eagle3.target_hidden_size", s.n_embd)
    out.add_bool("eagle3.norm_before_residual", norm_before_residual)
    out.add_bool("eagle3.norm_before_fc", norm_before_fc)
    w.tokenizer(s.n_vocab)
    wide, wide_kv, rows = s.draft_heads * s.draft_head_size, s.draft_heads_kv * s.draft_head_size, 3 * s.n_embd
    w.matrix("fc.weight", rows, n)
    w.vector("output_norm.weight", n, 0.5, 1.5)
    if norm_before_fc:
        w.vector("enc.output_norm.weight", rows, 0.5, 1.5)
    if factors:
        out.add_tensor("rope_freqs.weight", w.rng.uniform(1.0, 8.0, s.draft_head_size // 2).astype(np.float32))
    if "embedding" in own:
        w.matrix("token_embd.weight", n, s.n_vocab, gain=n**0.5)
    if "head" in own:
        w.matrix("output.weight", n, tokens or s.n_vocab)
    if tokens:
        ids = np.sort(w.rng.permutation(s.n_vocab)[:tokens])
        ids[-1] = chosen or ids[-1]
        out.add_tensor("d2t", ids.astype(np.int64))
    if mask >= 0:
        out.add_bool("eagle3.parallel_drafting", True)
        out.add_uint32("eagle3.mask_token_id", mask)
        w.vector("enc.mask_hidden.weight", n, -1.0, 1.0)
    for i in range(layers):
        rows = n if i else 2 * n
        shapes = {"attn_q": (rows, wide), "attn_k": (rows, wide_kv), "attn_v": (rows, wide_kv), "attn_output": (wide, n)}
        w.matrices(f"blk.{i}.", shapes | ffn_shapes(n, s.draft_ff))
        w.norms(f"blk.{i}.", {"attn_norm": n, **({} if i else {"attn_norm_2": n}), "ffn_norm": n})
    w.close()
    return Path(path)
