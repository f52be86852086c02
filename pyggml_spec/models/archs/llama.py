"""llama (Llama 2 and 3, Mistral, SmolLM2; Mixtral with experts): RoPE pairs (2 i, 2 i + 1), with optional frequency factors.

mistral3 (Ministral 3) may scale queries by position, and reads more of yarn's keys. internlm2: as llama, without a table of frequencies.
smollm3: every fourth layer is not rotated. Source of the formulae: llama.cpp, src/models/llama.cpp, mistral3.cpp, internlm2.cpp, smollm3.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MAY, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, FFN


@register("llama", "mistral3")
def llama(f: Hparams) -> Decoder:
    newer, size = f.arch == "mistral3", f.head_dim()
    temperature = f.temperature("rope.scaling.original_context_length", f.context_length)
    if temperature[0] and not newer:
        raise f.refuse("attention.temperature_scale is not 0: llama models with scores that are scaled by position are not supported")
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size, neox=False, own_yarn=newer), factors=True, out_bias=MAY)
    ffn = MoE(f.experts(f.ff, own_size=False)) if f.number("expert_count", 0) else GatedMLP(f.ff)
    biased = (*ATTENTION, "attn_output", *FFN)
    return Decoder(f, [Layer(attention, ffn)] * f.n_layer, long_from=f.long_from, temperature=temperature, biased=biased)


@register("internlm2")
def internlm2(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size, neox=False), size))
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=ATTENTION, unscaled=FFN)


@register("smollm3")
def smollm3(f: Hparams) -> Decoder:
    size = f.head_dim()
    rope = f.whole_heads(f.rope(size, neox=False), size)
    layers = [Layer(Attention(f.heads, f.kv_heads, size, rope if (i + 1) % 4 else None), GatedMLP(f.ff)) for i in range(f.n_layer)]
    return Decoder(f, layers, biased=ATTENTION, unscaled=FFN)
