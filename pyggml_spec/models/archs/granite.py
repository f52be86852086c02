"""granite, granitemoe: embedding, scores, residual stream and logits are scaled by numbers of the file; granitemoe has routed experts.

Source of the formulae: llama.cpp, src/models/granite.cpp, granite-moe.cpp.
"""

import numpy as np

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MAY, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN, SHARED


@register("granite", "granitemoe")
def granite(f: Hparams) -> Decoder:
    size = f.head_dim()
    rotated = f.arch == "granitemoe" or f.get("rope.scaling.finetuned", bool, True)
    rope = f.whole_heads(f.rope(size, neox=False), size)
    scale = f.number("attention.scale", 0.0) or None
    attention = Attention(f.heads, f.kv_heads, size, rope if rotated else None, factors=True, out_bias=MAY, scale=scale)
    n_shared = f.number("expert_shared_feed_forward_length", 0)
    shared = GatedMLP(n_shared, suffix="_shexp") if n_shared else None
    ffn = MoE(f.experts(f.ff, own_size=False), shared) if f.number("expert_count", 0) else GatedMLP(f.ff)
    return Decoder(
        f,
        [Layer(attention, ffn, residual=f.number("residual_scale", 0.0))] * f.n_layer,
        embedding_scale=f.number("embedding_scale", 0.0) or 1.0,
        logit_scale=float(1 / np.float32(f.get("logit_scale", float))),
        biased=(*ATTENTION, "attn_output", *FFN),
        unscaled=(*FFN, *EXPERT, *SHARED),
    )
