"""llama (Llama 2 and 3, Mistral, SmolLM2; Mixtral with experts): RoPE pairs (2 i, 2 i + 1), with optional frequency factors.

mistral3 (Ministral 3) is the same. Source of the formulae: llama.cpp, src/models/llama.cpp, mistral3.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MAY, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, FFN


@register("llama", "mistral3")
def llama(f: Hparams) -> Decoder:
    if f.number("attention.temperature_scale", 0.0):
        raise f.refuse("attention.temperature_scale is not 0: scores that are scaled by position are not supported")
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size, neox=False), factors=True, out_bias=MAY)
    ffn = MoE(f.experts(f.ff, own_size=False)) if f.number("expert_count", 0) else GatedMLP(f.ff)
    return Decoder(f, [Layer(attention, ffn)] * f.n_layer, biased=(*ATTENTION, "attn_output", *FFN))
