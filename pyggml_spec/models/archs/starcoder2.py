"""starcoder2, nemotron, arcee: FFNs without a gate; the first two have layer norms with biases.

Source of the formulae: llama.cpp, src/models/starcoder2.cpp, nemotron.cpp, arcee.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MAY, MLP, QKV, Attention, Layer
from ..model import ATTENTION, FFN


@register("starcoder2", "nemotron")
def starcoder2(f: Hparams) -> Decoder:
    size, coder = f.head_dim(), f.arch == "starcoder2"
    rope = f.rope(size)
    if coder:
        f.whole_heads(rope, size)
    attention = Attention(f.heads, f.kv_heads, size, rope, out_bias=MAY)
    layer = Layer(attention, MLP(f.ff, "gelu" if coder else "relu_squared"))
    biased = (*ATTENTION, QKV, "attn_output", *FFN)
    return Decoder(f, [layer] * f.n_layer, layer_norms=True, norm_biases=True, biased=biased, unscaled=FFN)


@register("arcee")
def arcee(f: Hparams) -> Decoder:
    size = f.head_dim()
    rope = f.whole_heads(f.rope(size, neox=False), size)
    layer = Layer(Attention(f.heads, f.kv_heads, size, rope, factors=True), MLP(f.ff, "relu_squared"))
    return Decoder(f, [layer] * f.n_layer, biased=ATTENTION, unscaled=FFN)
