"""exaone4: norms of what both parts give only; the model of 64 layers has a window, and rotates its sliding layers only.

Source of the formulae: llama.cpp, src/models/exaone4.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN

LAYERS_32B = 64


@register("exaone4")
def exaone4(f: Hparams) -> Decoder:
    size, large = f.head_dim(), f.n_layer == LAYERS_32B
    window, sliding = f.window(4, full_last=True) if large else (0, (False,) * f.n_layer)
    rope = f.whole_heads(f.rope(size, windowed=large), size)
    layers = [
        Layer(
            Attention(f.heads, f.kv_heads, size, rope if s or not large else None, factors=True, norm=HEAD, sliding=s),
            GatedMLP(f.ff),
            mixer_norm="",
            ffn_norm="",
            post_mixer="post_attention_norm",
            post_ffn="post_ffw_norm",
        )
        for s in sliding
    ]
    return Decoder(f, layers, window=window, biased=ATTENTION, unscaled=FFN)
