"""gpt-oss: routed experts with biases, attention with sinks, every other layer with a sliding window of 128 tokens.

    a_j = exp(q . k_j / sqrt(D)) / (exp(s) + sum_i exp(q . k_i / sqrt(D))), s a number of the head's own (`attn_sinks`)
The router takes the largest of W_r n + b_r and a softmax over these alone. An expert is W_down h + b_down, with g = W_gate n + b_gate and
u = W_up n + b_up, h = min(g, 7) sigmoid(1.702 min(g, 7)) * (clamp(u, -7, 7) + 1).
Source of the formulae: llama.cpp, src/models/openai-moe.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import OF_SLIDING, Hparams
from ..layers import MUST, Attention, Layer, MoE
from ..model import ATTENTION, EXPERT
from ..moe import SOFTMAX_OF_CHOSEN


@register("gpt-oss")
def gpt_oss(f: Hparams) -> Decoder:
    size = f.head_dim(*OF_SLIDING, "rope.dimension_count")
    full = f.rope(size, windowed=True)
    window, sliding = f.window(2, full_last=True)
    moe = MoE(f.experts(gating=SOFTMAX_OF_CHOSEN, normalise=False, glu="swiglu_oai", biases=True))
    mixers = [
        Attention(f.heads, f.kv_heads, size, f.sliding_base(full) if s else full, out_bias=MUST, sliding=s, sinks=True) for s in sliding
    ]
    layers = [Layer(mixer, moe, ffn_norm="post_attention_norm") for mixer in mixers]
    return Decoder(f, layers, window=window, biased=ATTENTION, unscaled=EXPERT)
