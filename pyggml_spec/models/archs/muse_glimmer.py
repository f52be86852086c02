"""muse-glimmer: RoPE (pairs 2 i, 2 i + 1) in sliding-window layers only; a sigmoid gate after attention, norms after both parts.

The embedding is RMS-normalised. Logits are multiplied by a number of the file, then capped: c tanh(l / c).
Source of the formulae: llama.cpp, src/models/muse-glimmer.cpp.
"""

from dataclasses import replace

from ..decoder import Decoder, register
from ..hparams import OF_SLIDING, Hparams
from ..layers import HEAD, Attention, GatedMLP, post_normed
from ..model import ATTENTION, FFN

POST_EPS = 1e-8  # of the norms after attention and FFN


@register("muse-glimmer")
def muse_glimmer(f: Hparams) -> Decoder:
    size = f.head_dim(*OF_SLIDING)
    # context scaling applies to full layers only, which have no RoPE
    rope = replace(f.sliding_base(f.rope(size, neox=False, yarn=False, windowed=True)), scale=1.0)
    window, sliding = f.window(full_last=True)
    layers = [
        post_normed(
            Attention(f.heads, f.kv_heads, size, rope if s else None, norm=HEAD, sliding=s, gate="sigmoid"), GatedMLP(f.ff), eps=POST_EPS
        )
        for s in sliding
    ]
    scale = f.get("logit_scale", float)
    if scale <= 0:
        raise f.refuse(f"logit_scale is {scale}, but it has to be above 0")
    return Decoder(
        f,
        layers,
        window=window,
        norm_embedding=True,
        logit_scale=scale,
        softcap=f.number("final_logit_softcapping", 30.0),  # llama.cpp's default
        biased=ATTENTION,
        unscaled=("attn_gate", *FFN),
    )
