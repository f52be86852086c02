"""hunyuan-dense, hunyuan_vl (text): q and k are normalised after the rotation. hunyuan-moe: routed experts plus a shared one.

Source of the formulae: llama.cpp, src/models/hunyuan-vl.cpp, hunyuan-moe.cpp.
"""

from dataclasses import replace

import numpy as np

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN, SHARED


@register("hunyuan-dense", "hunyuan_vl")
def hunyuan(f: Hparams) -> Decoder:
    size = f.head_dim()
    f.has_sections(size)  # of a picture's axes: NEOX pairs over text, if the sections cover them
    rope, alpha = f.whole_heads(f.rope(size), size), f.number("rope.scaling.alpha", 0.0)
    if alpha:
        rope = replace(rope, base=float(np.float32(rope.base) * np.float32(alpha) ** np.float32(size / (size - 2))))
    attention = Attention(f.heads, f.kv_heads, size, rope, norm=HEAD, norm_last=True)
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=ATTENTION, unscaled=FFN)


@register("hunyuan-moe")
def hunyuan_moe(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size), norm=HEAD, norm_last=True)
    shared = GatedMLP(f.number("expert_shared_feed_forward_length", 0) or f.ff, suffix="_shexp")
    f.per_layer("expert_feed_forward_length")  # llama.cpp requires it, and does not use it
    moe = MoE(f.experts(f.ff, own_size=False), shared)
    return Decoder(f, [Layer(attention, moe)] * f.n_layer, biased=ATTENTION, unscaled=(*EXPERT, *SHARED))
