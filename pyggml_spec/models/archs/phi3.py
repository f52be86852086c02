"""phi3 (Phi-3, Phi-4): scaled queries, gate and up in one tensor, tables of RoPE divisors for short and long contexts. phimoe: experts and biases.

Source of the formulae: llama.cpp, src/models/phi3.cpp, phimoe.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MUST, QKV, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN


@register("phi3")
def phi3(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), factors=True, scale_q=True)
    layer = Layer(attention, GatedMLP(f.ff, packed=True))
    return Decoder(f, [layer] * f.n_layer, long_from=f.original_context, biased=(*ATTENTION, QKV), unscaled=FFN)


@register("phimoe")
def phimoe(f: Hparams) -> Decoder:
    size = f.head_dim()
    rope = f.whole_heads(f.rope(size), size)
    attention = Attention(f.heads, f.kv_heads, size, rope, factors=True, scale_q=True, out_bias=MUST)
    layer = Layer(attention, MoE(f.experts(f.ff, own_size=False)))
    return Decoder(
        f, [layer] * f.n_layer, norm_biases=True, long_from=f.original_context, biased=(*ATTENTION, QKV, "output"), unscaled=EXPERT
    )
