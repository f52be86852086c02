"""deepseek (DeepSeek MoE), dots1, bailingmoe and bailingmoe2 (Ling): leading dense layers, then routed plus shared experts.

Source of the formulae: llama.cpp, src/models/deepseek.cpp, dots1.cpp, bailingmoe.cpp, bailingmoe2.cpp.
"""

from typing import Any

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN, SHARED


@register("deepseek", "bailingmoe")
def deepseek(f: Hparams) -> Decoder:
    size = f.head_dim()
    rope = f.whole_heads(f.rope(size, neox=False), size)
    normalise = f.arch == "bailingmoe" and f.get("expert_weights_norm", bool, False)
    moe = shared_moe(f, normalise=normalise)
    layers = [Layer(Attention(f.heads, f.kv_heads, size, rope), ffn) for ffn in ffns(f, moe, 0 if f.arch == "bailingmoe" else None)]
    return Decoder(f, layers, biased=ATTENTION, unscaled=(*FFN, *EXPERT, *SHARED))


@register("dots1", "bailingmoe2")
def dots1(f: Hparams) -> Decoder:
    size, dense = f.head_dim(), f.leading_dense(0)
    rope = f.rope(size)
    if f.arch == "dots1":
        f.whole_heads(rope, size)
    size_shared = 0 if f.arch == "dots1" else f.number("expert_shared_feed_forward_length", 0)
    moe = shared_moe(
        f,
        size_shared,
        gating=f.gating(),
        biased=f.shape(f"blk.{dense}.exp_probs_b.bias") is not None,
        normalise=f.get("expert_weights_norm", bool, False),
    )
    layers = [Layer(Attention(f.heads, f.kv_heads, size, rope, norm=HEAD), ffn) for ffn in ffns(f, moe)]
    biased = ATTENTION if f.arch == "dots1" else ()
    return Decoder(f, layers, biased=biased, unscaled=(*FFN, *EXPERT, *SHARED))


def shared_moe(f: Hparams, size: int = 0, times: int | None = None, **how: Any) -> MoE:
    """Routed experts with a scale of the file, and ``times`` shared ones of ``size`` values; by default as many as the file says, as large as the others."""
    experts = f.experts(scale=f.number("expert_weights_scale", 0.0), **how)
    times = f.positive("expert_shared_count", limit=64) if times is None else times
    return MoE(experts, GatedMLP((size or experts.n_ff) * times, suffix="_shexp"))


def ffns(f: Hparams, moe: MoE, dense: int | None = None) -> list[GatedMLP | MoE]:
    """The FFN of each layer; ``dense``: number of leading dense layers, None for the file's."""
    dense = f.leading_dense(0) if dense is None else dense
    return [GatedMLP(f.ff)] * dense + [moe] * (f.n_layer - dense) if dense else [moe] * f.n_layer
