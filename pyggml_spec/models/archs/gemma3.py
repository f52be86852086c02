"""gemma3: five sliding layers to a full one, each kind with its own rope base; norms of what both parts read and give; GELU.

Source of the formulae: llama.cpp, src/models/gemma3.cpp.
"""

import numpy as np

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..keys import inverse_root
from ..layers import HEAD, Attention, GatedMLP, Layer
from ..model import ATTENTION, FFN

LAYERS_27B = 62  # whose scores are scaled by the share of a head in the embedding


@register("gemma3")
def gemma3(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(6, full_last=True, needed=False)
    rope = f.rope(size, windowed=window > 0)
    local = rope.swa(f.file, f.arch, size, 10000.0)
    scale = inverse_root(f.n_embd // f.heads if f.n_layer == LAYERS_27B else size)
    layers = [
        Layer(
            Attention(f.heads, f.kv_heads, size, local if s else rope, norm=HEAD, scale=scale, scale_q=True, sliding=s),
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
        softcap=f.number("final_logit_softcapping", 0.0),
        biased=ATTENTION,
        unscaled=FFN,
    )
