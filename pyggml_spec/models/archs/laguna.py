"""laguna: routed experts plus a shared one, one full-attention layer per three sliding-window ones, a softplus gate after attention.

The gate has one value per head or one per attention output, by its tensor's shape. Layers may differ in their number of heads. Full
layers stretch positions by yarn if the file has it, sliding ones never. The router adds a bias to the sigmoids it chooses by.
Smaller models of the family have no sliding window. Source of the formulae: llama.cpp, src/models/laguna.cpp.
"""

from ..decoder import Decoder, register
from ..hparams import OF_SLIDING, Hparams
from ..layers import HEAD, Attention, GatedMLP, Layer, MoE
from ..model import ATTENTION, EXPERT, FFN, SHARED
from ..moe import SIGMOID


@register("laguna")
def laguna(f: Hparams) -> Decoder:
    heads, kv_heads = f.heads_by_layer
    size = f.head_dim(*OF_SLIDING, default=f.n_embd // heads[0])
    full = f.rope(size, windowed=True)
    window, sliding = f.window(needed=False)
    local = f.sliding_rope(full, size) if window else full
    experts = f.experts(
        gating=f.gating(SIGMOID),
        normalise=f.get("expert_weights_norm", bool, False),
        scale=f.get("expert_weights_scale", float, 0.0),
        biased=True,
    )
    n_dense, shared = f.leading_dense(), f.get("expert_shared_feed_forward_length", int, 0)
    moe = MoE(experts, GatedMLP(f.positive("expert_shared_feed_forward_length") if shared else experts.n_ff, suffix="_shexp"))
    dense = GatedMLP(f.per_layer("feed_forward_length")[0]) if n_dense else moe
    mixers = [
        Attention(heads[i], kv_heads[i], size, local if s else full, norm=HEAD, sliding=s, gate="softplus") for i, s in enumerate(sliding)
    ]
    layers = [Layer(mixer, dense if i < n_dense else moe) for i, mixer in enumerate(mixers)]
    return Decoder(f, layers, window=window, biased=ATTENTION, unscaled=("attn_gate", "output", *FFN, *SHARED, *EXPERT))
