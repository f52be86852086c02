"""qwen3vl, qwen3vlmoe (Qwen3-VL): as qwen3 and qwen3moe over text, where all axes have equal positions. Of a picture's rows, further parts are added to the
outputs of the first layers.

Source of the formulae: llama.cpp, src/models/qwen3vl.cpp, qwen3vlmoe.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN


@register("qwen3vl", "qwen3vlmoe")
def qwen3vl(f: Hparams) -> Decoder:
    size = f.head_dim()
    rope = f.by_axis(f.whole_heads(f.rope(size), size), interleaved=True)
    ffn = MoE(f.experts(f.ff_of_used_experts())) if f.arch == "qwen3vlmoe" else GatedMLP(f.ff)
    attention = Attention(f.heads, f.kv_heads, size, rope, norm=HEAD)
    return Decoder(
        f,
        [Layer(attention, ffn)] * f.n_layer,
        biased=ATTENTION,
        unscaled=(*FFN, *EXPERT),
        deepstack=f.number("n_deepstack_layers", 0, 0, f.n_layer),
    )
