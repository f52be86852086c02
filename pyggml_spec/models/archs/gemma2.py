"""gemma, gemma2: a scaled embedding and GELU; gemma2 caps scores and logits, every other layer is sliding, and it has norms of what both parts give.

Source of the formulae: llama.cpp, src/models/gemma.cpp, gemma2.cpp.
"""

import numpy as np

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..keys import inverse_root
from ..layers import Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN

LAYERS_27B = 46  # whose scores are scaled by the share of a head in the embedding


@register("gemma")
def gemma(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size), scale_q=True)
    layers = [Layer(attention, GatedMLP(f.ff, "gelu"))] * f.n_layer
    return Decoder(f, layers, embedding_scale=float(np.sqrt(np.float32(f.n_embd))), biased=ATTENTION, unscaled=FFN)


@register("gemma2")
def gemma2(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(2, full_last=True)
    rope = f.whole_heads(f.rope(size, windowed=True), size)
    scale = inverse_root(f.n_embd // f.heads if f.n_layer == LAYERS_27B else size)
    cap = f.number("attn_logit_softcapping", 50.0)
    layers = [
        Layer(
            Attention(f.heads, f.kv_heads, size, f.sliding_base(rope) if s else rope, scale=scale, scale_q=True, sliding=s, cap=cap),
            GatedMLP(f.ff, "gelu"),
            post_mixer="post_attention_norm",
            post_ffn="post_ffw_norm",
        )
        for s in sliding
    ]
    return Decoder(
        f,
        layers,
        window=window,
        embedding_scale=float(np.sqrt(np.float32(f.n_embd))),
        softcap=f.number("final_logit_softcapping", 30.0),
        biased=ATTENTION,
        unscaled=FFN,
    )
