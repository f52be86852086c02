"""Random DFlash 2 and DSpark drafters, as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import numpy as np

from .model import Shape, Writer, write_dflash


def write_dflash2(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 2, *,
    taps: int = 2, group_size: int = 16, rank: int = 32, top_k: int = 8, logit_scale: float = 0.0, block: int = 8, **dflash: Any
) -> Path:  # fmt: skip
    """Writes a random DFlash2 drafter: convolutions of ``taps`` rows, a selector of ``top_k`` candidates; ``dflash`` as for `write_dflash`."""
    s = shape

    def more(w: Writer) -> None:
        for key, value in (("conv_kernel_size", taps), ("conv_group_size", group_size), ("selector_rank", rank), ("selector_top_k", top_k)):
            w.out.add_uint32(f"dflash.{key}", value)
        if logit_scale:
            w.out.add_logit_scale(logit_scale)
        # as large as the differences of logits: smaller scores would choose the largest logit every time
        for name in ("predecessor", "successor"):
            w.matrix(f"selector_{name}.weight", rank, s.n_vocab, gain=rank**0.5)
        w.matrix("selector_hidden.weight", s.n_embd, rank, gain=0.5)
        for i in range(s.draft_layers):
            for part in ("attn", "ffn"):
                base = w.rng.standard_normal((2, taps, s.n_embd)) * 0.5
                w.out.add_tensor(f"blk.{i}.{part}_conv_base", base.astype(np.float32))
                w.matrix(f"blk.{i}.{part}_conv_proj.weight", s.n_embd, 2 * taps * (s.n_embd // group_size), gain=0.5)

    return write_dflash(path, s, quant, seed, block=block, more=more, **dflash)


def write_dspark(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 2, *,
    rank: int = 32, from_anchor: bool | None = None, confidence: bool = False, block: int = 8, tokens: int = 0, **dflash: Any
) -> Path:  # fmt: skip
    """Writes a random DSpark drafter. ``from_anchor``: the key, None for none; ``tokens`` and ``dflash`` as for `write_dflash`."""
    s = shape

    def more(w: Writer) -> None:
        if from_anchor is not None:
            w.out.add_bool("dflash.sample_from_anchor", from_anchor)
        w.out.add_bool("dflash.has_confidence_head", confidence)
        # as large as the differences of logits: a smaller bias would choose the largest logit every time
        w.matrix("markov_w1.weight", rank, s.n_vocab, gain=rank**0.5)
        w.matrix("markov_w2.weight", rank, tokens or s.n_vocab)
        if confidence:
            w.matrix("conf_proj.weight", s.n_embd + rank, 1)
            w.vector("conf_proj.bias", 1, -1.0, 1.0)

    return write_dflash(path, s, quant, seed, block=block, tokens=tokens, more=more, **dflash)
