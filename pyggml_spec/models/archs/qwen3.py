"""qwen3: q and k are RMS-normalised per head before RoPE. qwen3moe: routed experts instead of the FFN.

Source of the formulae: llama.cpp, src/models/qwen3.cpp, qwen3moe.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION


@register("qwen3")
def qwen3(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), norm=HEAD)
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=ATTENTION)


@register("qwen3moe")
def qwen3moe(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size), norm=HEAD)
    return Decoder(f, [Layer(attention, MoE(f.experts(f.ff_of_used_experts())))] * f.n_layer, biased=ATTENTION)
