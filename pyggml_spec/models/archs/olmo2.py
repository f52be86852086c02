"""olmo2 (OLMo 2 and 3): norms of what both parts give only, of whole rows of q and k; sliding layers keep positions as they are. olmoe: experts.

Source of the formulae: llama.cpp, src/models/olmo2.cpp, olmoe.cpp.
"""

from dataclasses import replace

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import ROW, Attention, GatedMLP, Layer, MoE, post_normed
from ..model import ATTENTION, EXPERT, FFN


@register("olmo2")
def olmo2(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(4, full_last=True, needed=False)
    rope = f.whole_heads(f.rope(size, windowed=window > 0), size)
    local = replace(rope, scale=1.0, yarn=(0.0, 1.0, *rope.yarn[2:]))
    layers = [
        post_normed(Attention(f.heads, f.kv_heads, size, local if s else rope, norm=ROW, sliding=s), GatedMLP(f.ff), before=False)
        for s in sliding
    ]
    return Decoder(f, layers, window=window, biased=ATTENTION, unscaled=FFN)


@register("olmoe")
def olmoe(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size), norm=ROW)
    moe = MoE(f.experts(f.ff, own_size=False, normalise=False))
    return Decoder(f, [Layer(attention, moe)] * f.n_layer, biased=ATTENTION, unscaled=EXPERT)
