"""qwen2 (Qwen2, Qwen2.5, Qwen2.5-Coder): biases on q, k and v.

Source of the formulae: llama.cpp, src/models/qwen2.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN


@register("qwen2")
def qwen2(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size))
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=(*ATTENTION, "output"), unscaled=FFN)
