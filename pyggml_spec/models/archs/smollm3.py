"""smollm3: every fourth layer is not rotated.

Source of the formulae: llama.cpp, src/models/smollm3.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN


@register("smollm3")
def smollm3(f: Hparams) -> Decoder:
    size = f.head_dim()
    rope = f.whole_heads(f.rope(size, neox=False), size)
    layers = [Layer(Attention(f.heads, f.kv_heads, size, rope if (i + 1) % 4 else None), GatedMLP(f.ff)) for i in range(f.n_layer)]
    return Decoder(f, layers, biased=ATTENTION, unscaled=FFN)
