"""qwen3vl, qwen3vlmoe (Qwen3-VL): as qwen3 and qwen3moe over text; the axes of a picture have equal positions there.

Source of the formulae: llama.cpp, src/models/qwen3vl.cpp, qwen3vlmoe.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN


@register("qwen3vl", "qwen3vlmoe")
def qwen3vl(f: Hparams) -> Decoder:
    size = f.head_dim()
    rope = f.whole_heads(f.rope(size), size)
    f.check_sections(rope, interleaved=True)
    ffn = MoE(f.experts(f.ff_of_used_experts())) if f.arch == "qwen3vlmoe" else GatedMLP(f.ff)
    attention = Attention(f.heads, f.kv_heads, size, rope, norm=HEAD)
    return Decoder(f, [Layer(attention, ffn)] * f.n_layer, biased=ATTENTION, unscaled=(*FFN, *EXPERT))
