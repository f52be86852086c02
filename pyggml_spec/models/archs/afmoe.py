"""afmoe (Trinity): sliding layers, every fourth layer full and not rotated, a sigmoid gate after attention, experts after leading dense layers.

Source of the formulae: llama.cpp, src/models/afmoe.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, Layer
from ..model import ATTENTION, EXPERT, FFN, SHARED
from ..moe import SIGMOID
from .deepseek import ffns, shared_moe


@register("afmoe")
def afmoe(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(4, full_last=True, needed=False)
    rope = f.rope(size, windowed=window > 0)
    moe = shared_moe(f, gating=f.gating(SIGMOID), biased=True, normalise=f.get("expert_weights_norm", bool, False))
    layers = []
    for i, (s, ffn) in enumerate(zip(sliding, ffns(f, moe), strict=True)):
        turn = (f.sliding_base(rope) if s else rope) if (i + 1) % 4 else None
        attention = Attention(f.heads, f.kv_heads, size, turn, norm=HEAD, sliding=s, gate="sigmoid")
        layers.append(Layer(attention, ffn, post_mixer="post_attention_norm", post_ffn="post_ffw_norm"))
    unscaled = ("attn_gate", *FFN, *EXPERT, *SHARED)
    return Decoder(f, layers, window=window, embedding_scale=f.root_embd, biased=ATTENTION, unscaled=unscaled)
