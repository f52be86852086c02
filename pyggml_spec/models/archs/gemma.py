"""gemma, gemma2, gemma3: a scaled embedding, scaled queries and GELU; from gemma2 on sliding layers, and norms of the outputs of both parts.

gemma2 caps scores and logits; gemma3 normalises q and k, and its sliding layers have a rope of their own.
Source of the formulae: llama.cpp, src/models/gemma.cpp, gemma2.cpp, gemma3.cpp.
"""

from typing import Any

from ..decoder import Decoder, register
from ..hparams import Hparams, inverse_root
from ..layers import HEAD, Attention, GatedMLP, Layer, post_normed
from ..model import ATTENTION, FFN

LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # whose scores are scaled by the share of a head in the embedding


@register("gemma")
def gemma(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), scale_q=True)
    return _decoder(f, [Layer(attention, GatedMLP(f.ff, "gelu"))] * f.n_layer)


@register("gemma2")
def gemma2(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(2, full_last=True)
    rope = f.whole_heads(f.rope(size, windowed=True), size)
    scale, cap = _scale(f, size), f.number("attn_logit_softcapping", 50.0)
    mixers = [
        Attention(f.heads, f.kv_heads, size, f.sliding_base(rope) if s else rope, scale=scale, scale_q=True, sliding=s, cap=cap)
        for s in sliding
    ]
    return _decoder(
        f,
        [post_normed(mixer, GatedMLP(f.ff, "gelu")) for mixer in mixers],
        window=window,
        softcap=f.number("final_logit_softcapping", 30.0),
    )


@register("gemma3")
def gemma3(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(6, full_last=True, needed=False)
    rope = f.rope(size, windowed=window > 0)
    local, scale = f.sliding_rope(rope, size, 10000.0), _scale(f, size)
    mixers = [Attention(f.heads, f.kv_heads, size, local if s else rope, norm=HEAD, scale=scale, scale_q=True, sliding=s) for s in sliding]
    return _decoder(
        f, [post_normed(mixer, GatedMLP(f.ff, "gelu")) for mixer in mixers], window=window, softcap=f.number("final_logit_softcapping", 0.0)
    )


def _scale(f: Hparams, size: int) -> float:
    return inverse_root(f.n_embd // f.heads if f.n_layer == LAYERS_27B[f.arch] else size)


def _decoder(f: Hparams, layers: list[Layer], **more: Any) -> Decoder:
    return Decoder(f, layers, embedding_scale=f.root_embd, scales_pictures=False, biased=ATTENTION, unscaled=FFN, **more)
