"""cohere2 (Command R7B, Command A): attention and FFN read the same layer norm; only sliding layers are rotated.

Source of the formulae: llama.cpp, src/models/cohere2.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer
from ..model import ATTENTION


@register("cohere2")
def cohere2(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(4, full_last=True)
    rope = f.whole_heads(f.rope(size, neox=False, windowed=True), size)
    layers = [
        Layer(Attention(f.heads, f.kv_heads, size, rope if s else None, factors=True, sliding=s), GatedMLP(f.ff), parallel=True)
        for s in sliding
    ]
    return Decoder(f, layers, window=window, layer_norms=True, logit_scale=f.get("logit_scale", float), biased=ATTENTION)
