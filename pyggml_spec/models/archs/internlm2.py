"""internlm2: as llama, without a table of frequencies.

Source of the formulae: llama.cpp, src/models/internlm2.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN


@register("internlm2")
def internlm2(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size, neox=False), size))
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=ATTENTION, unscaled=FFN)
