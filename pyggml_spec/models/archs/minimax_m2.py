"""minimax-m2: routed experts in every layer, sigmoid gating with a bias; q and k are normalised over all heads, then partially rotated.

Source of the formulae: llama.cpp, src/models/minimax-m2.cpp.
"""

from dataclasses import replace

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import ROW, Attention, Layer, MoE
from ..model import ATTENTION, EXPERT


@register("minimax-m2")
def minimax_m2(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), norm=ROW)
    experts = replace(f.experts(gating=f.gating(), biased=True), n_ff=f.ff)  # as in llama.cpp
    return Decoder(f, [Layer(attention, MoE(experts))] * f.n_layer, biased=ATTENTION, unscaled=EXPERT)
