"""exaone (EXAONE 3.5): as llama, with NEOX pairs. exaone4: norms of what both parts give only; the model of 64 layers has a window, and rotates its sliding layers only.

exaone-moe (K-EXAONE) has norms of what both parts read, and routed plus shared experts after dense layers.
Source of the formulae: llama.cpp, src/models/exaone.cpp, exaone4.cpp, exaone-moe.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, post_normed
from ..model import ATTENTION, EXPERT, FFN, SHARED
from .deepseek import ffns, shared_moe

LAYERS_32B = 64


@register("exaone")
def exaone(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size), factors=True)
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=ATTENTION, unscaled=FFN)


@register("exaone4")
def exaone4(f: Hparams) -> Decoder:
    size, large = f.head_dim(), f.n_layer == LAYERS_32B
    window, sliding = f.window(4, full_last=True) if large else (0, (False,) * f.n_layer)
    rope = f.whole_heads(f.rope(size, windowed=large), size)
    mixers = [Attention(f.heads, f.kv_heads, size, rope if s or not large else None, factors=True, norm=HEAD, sliding=s) for s in sliding]
    layers = [post_normed(mixer, GatedMLP(f.ff), before=False) for mixer in mixers]
    return Decoder(f, layers, window=window, biased=ATTENTION, unscaled=FFN)


@register("exaone-moe")
def exaone_moe(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(4, full_last=True)
    rope = f.whole_heads(f.rope(size, windowed=True), size)
    biased = f.shape(f"blk.{f.n_layer - 1}.exp_probs_b.bias") is not None
    moe = shared_moe(
        f,
        f.number("expert_shared_feed_forward_length", 0),
        1,
        gating=f.gating(),
        biased=biased,
        normalise=f.get("expert_weights_norm", bool, False),
    )
    layers = [
        Layer(Attention(f.heads, f.kv_heads, size, rope if s else None, factors=True, norm=HEAD, sliding=s), ffn)
        for s, ffn in zip(sliding, ffns(f, moe), strict=True)
    ]
    return Decoder(f, layers, window=window, biased=ATTENTION, unscaled=(*FFN, *EXPERT, *SHARED))
