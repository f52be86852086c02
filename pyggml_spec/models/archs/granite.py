"""granite, granitemoe, granitehybrid, minicpm: embedding, scores, residual stream and logits are scaled by numbers of the file; granitemoe has routed experts.

granitehybrid has Mamba-2 layers; minicpm has defaults for the scales.
Source of the formulae: llama.cpp, src/models/granite.cpp, granite-moe.cpp, granite-hybrid.cpp, minicpm.cpp.
"""

import numpy as np

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MAY, Attention, GatedMLP, Layer, MoE, Part
from ..mamba2 import Mamba2
from ..model import ATTENTION, EXPERT, FFN, SCALED, SHARED


@register("granite", "granitemoe", "granitehybrid", "minicpm")
def granite(f: Hparams) -> Decoder:
    own, hybrid = f.arch == "minicpm", f.arch == "granitehybrid"
    size = f.hybrid_head_dim if hybrid else f.head_dim()
    rope = f.rope(size, neox=False)
    rotated = f.arch in ("granitemoe", "minicpm") or f.get("rope.scaling.finetuned", bool, True)
    residual = float(np.float32(1.4) / np.sqrt(np.float32(f.n_layer))) if own else 0.0
    scale = (0.0 if own else f.number("attention.scale", 0.0)) or None
    heads = f.hybrid_heads if hybrid else ((f.heads, f.kv_heads),) * f.n_layer
    n_recurrent = sum(not kv for _, kv in heads)
    mamba = Mamba2.from_gguf(f, n_recurrent) if n_recurrent else None
    if mamba and mamba.inner != 2 * f.n_embd:
        raise f.refuse(f"ssm.inner_size is {mamba.inner}, but {f.arch} models have twice the embedding, {2 * f.n_embd}")
    if not hybrid:
        f.whole_heads(rope, size)
    n_shared = 0 if own else f.number("expert_shared_feed_forward_length", 0)
    shared = GatedMLP(n_shared, suffix="_shexp") if n_shared else None
    ffn = MoE(f.experts(f.ff, own_size=False), shared) if f.number("expert_count", 0) else GatedMLP(f.ff)
    mixers: list[Part] = [
        Attention(n, kv, size, rope if rotated else None, factors=True, out_bias=MAY, scale=scale) if kv or not mamba else mamba
        for n, kv in heads
    ]
    return Decoder(
        f,
        [Layer(mixer, ffn, residual=f.number("residual_scale", residual)) for mixer in mixers],
        embedding_scale=f.number("embedding_scale", 12.0 if own else 0.0) or 1.0,
        logit_scale=float(1 / np.float32(f.get("logit_scale", float, 256 / f.n_embd if own else None))),
        long_from=f.long_from,
        biased=(*ATTENTION, "attn_output", *FFN),
        scaled=(*SCALED, "ssm_in"),
        unscaled=(*FFN, *EXPERT, *SHARED),
    )
