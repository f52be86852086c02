"""qwen2 (Qwen2, Qwen2.5, Qwen2.5-Coder): biases on q, k and v. qwen2vl (Qwen2-VL, Qwen2.5-VL): the same over text.

qwen2moe: routed experts plus a gated shared one. seed_oss: another name for the norm in front of the FFN.
Source of the formulae: llama.cpp, src/models/qwen2.cpp, qwen2vl.cpp, qwen2moe.cpp, seed-oss.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN, SHARED
from .ernie4_5 import UNADDED


@register("qwen2")
def qwen2(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size))
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=(*ATTENTION, "output"), unscaled=FFN)


@register("qwen2vl")
def qwen2vl(f: Hparams) -> Decoder:
    f.eps = 0.0  # llama.cpp reads none for this architecture
    size = f.head_dim()
    rope = f.whole_heads(f.rope(size), size)
    rope = f.by_axis(rope, interleaved=False)
    layer = Layer(Attention(f.heads, f.kv_heads, size, rope), GatedMLP(f.ff))
    return Decoder(f, [layer] * f.n_layer, biased=ATTENTION, unscaled=FFN, unused={"output.bias": UNADDED})


@register("qwen2moe")
def qwen2moe(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size))
    experts = f.experts(f.ff_of_used_experts(), normalise=False)
    shared = GatedMLP(f.number("expert_shared_feed_forward_length", 0) or f.ff, suffix="_shexp")
    moe = MoE(experts, shared, gated=True, gate_by_silu=True)
    return Decoder(f, [Layer(attention, moe)] * f.n_layer, biased=ATTENTION, unscaled=(*EXPERT, *SHARED))


@register("seed_oss")
def seed_oss(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size), size))
    layers = [Layer(attention, GatedMLP(f.ff), ffn_norm="post_attention_norm")] * f.n_layer
    return Decoder(f, layers, biased=ATTENTION, unscaled=FFN)
