"""phi2 (Phi-1, 1.5 and 2), stablelm: norms of layers with biases, partial RoPE; phi2's attention and FFN read the same norm.

Source of the formulae: llama.cpp, src/models/phi2.cpp, stablelm.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import EACH, MLP, MUST, QKV, Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN


@register("phi2")
def phi2(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), scale_q=True, out_bias=MUST)
    layer = Layer(attention, MLP(f.ff, "gelu"), parallel=True, parts_first=True)
    biased = (*ATTENTION, QKV, "ffn_up", "ffn_down", "output")
    return Decoder(f, [layer] * f.n_layer, layer_norms=True, norm_biases=True, biased=biased, unscaled=FFN)


@register("stablelm")
def stablelm(f: Hparams) -> Decoder:
    size = f.head_dim()
    if f.shape("blk.0.ffn_norm.weight") is None:
        raise f.refuse("it has no ffn_norm, as StableLM 2 12B, whose attention and FFN are parallel; smaller models are supported")
    norm = EACH if f.shape("blk.0.attn_q_norm.weight") else ""
    layer = Layer(Attention(f.heads, f.kv_heads, size, f.rope(size), norm=norm), GatedMLP(f.ff))
    return Decoder(f, [layer] * f.n_layer, layer_norms=True, norm_biases=True, biased=ATTENTION, unscaled=FFN)
