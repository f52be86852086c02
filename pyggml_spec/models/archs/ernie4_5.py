"""ernie4_5: as llama, without a table of frequencies. ernie4_5-moe: experts in every so many of the layers after the leading dense ones.

Source of the formulae: llama.cpp, src/models/ernie4-5.cpp, ernie4-5-moe.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN, SHARED

UNADDED = "a bias that llama.cpp reads and does not add"


@register("ernie4_5", "ernie4_5-moe")
def ernie4_5(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.whole_heads(f.rope(size, neox=False), size))
    dense, step, moe = f.n_layer, 1, None
    if f.arch == "ernie4_5-moe":
        n_shared = f.number("expert_shared_feed_forward_length", 0)
        experts = f.experts(biased=f.shape(f"blk.{f.n_layer - 1}.exp_probs_b.bias") is not None)
        moe = MoE(experts, GatedMLP(n_shared, suffix="_shexp") if n_shared else None)
        dense, step = f.leading_dense(0), f.positive("interleave_moe_layer_step", 1)
    layers = [Layer(attention, moe if moe and i >= dense and (i + 1) % step == 0 else GatedMLP(f.ff)) for i in range(f.n_layer)]
    unused = {f"blk.{i}.attn_output.bias": UNADDED for i in range(f.n_layer)}
    return Decoder(f, layers, biased=ATTENTION, unscaled=(*FFN, *EXPERT, *SHARED), unused=unused)
