"""llama (Llama 2 and 3, Mistral, SmolLM2): RoPE pairs (2 i, 2 i + 1), with optional frequency factors.

Source of the formulae: llama.cpp, src/models/llama.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MAY, Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN


@register("llama")
def llama(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size, neox=False), factors=True, out_bias=MAY)
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=(*ATTENTION, "attn_output", *FFN))
