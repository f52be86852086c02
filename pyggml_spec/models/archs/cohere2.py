"""command-r (Command R, Command R+, Aya), cohere2 (Command R7B, Command A): attention and FFN read the same layer norm.

Only sliding layers of cohere2 are rotated. Source of the formulae: llama.cpp, src/models/command-r.cpp, cohere2.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import EACH, Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN

LAYERS_PLUS = 64  # from which q and k are normalised


@register("command-r")
def command_r(f: Hparams) -> Decoder:
    size = f.head_dim()
    norm = EACH if f.n_layer >= LAYERS_PLUS else ""
    layer = Layer(Attention(f.heads, f.kv_heads, size, f.rope(size, neox=False), norm=norm), GatedMLP(f.ff), parallel=True)
    scale = f.get("logit_scale", float, 0.0) or 1.0
    return Decoder(f, [layer] * f.n_layer, layer_norms=True, logit_scale=scale, biased=ATTENTION, unscaled=FFN)


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
