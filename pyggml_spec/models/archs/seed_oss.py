"""seed_oss: as qwen2, with another name for the norm in front of the FFN.

Source of the formulae: llama.cpp, src/models/seed-oss.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN


@register("seed_oss")
def seed_oss(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size))
    layers = [Layer(attention, GatedMLP(f.ff), ffn_norm="post_attention_norm")] * f.n_layer
    return Decoder(f, layers, biased=ATTENTION, unscaled=FFN)
