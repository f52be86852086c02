"""command-r (Command R, Command R+, Aya), cohere2 (Command R7B, Command A), cohere2moe: attention and FFN read the same layer norm.

Only sliding layers of cohere2 are rotated, and cohere2moe's leading dense ones. A shared expert of cohere2moe is averaged with the routed ones.
Source of the formulae: llama.cpp, src/models/command-r.cpp, cohere2.cpp, cohere2moe.cpp.
"""

from dataclasses import dataclass

from ...ggml.library import Tensor
from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import EACH, Attention, GatedMLP, Layer, LayerContext, MoE
from ..model import ATTENTION, FFN
from ..moe import SIGMOID

LAYERS_PLUS = 64  # from which q and k are normalised


@register("command-r")
def command_r(f: Hparams) -> Decoder:
    size = f.head_dim()
    norm = EACH if f.n_layer >= LAYERS_PLUS else ""
    layer = Layer(Attention(f.heads, f.kv_heads, size, f.rope(size, neox=False), norm=norm), GatedMLP(f.ff), parallel=True)
    scale = f.get("logit_scale", float, 0.0) or 1.0
    return Decoder(f, [layer] * f.n_layer, layer_norms=True, logit_scale=scale, biased=ATTENTION, unscaled=FFN)


@register("cohere2")
def cohere2(f: Hparams) -> Decoder:
    size = f.head_dim()
    window, sliding = f.window(4, full_last=True)
    rope = f.whole_heads(f.rope(size, neox=False, windowed=True), size)
    layers = [
        Layer(Attention(f.heads, f.kv_heads, size, rope if s else None, factors=True, sliding=s), GatedMLP(f.ff), parallel=True)
        for s in sliding
    ]
    return Decoder(f, layers, window=window, layer_norms=True, logit_scale=f.get("logit_scale", float), biased=ATTENTION)


@dataclass(frozen=True)
class AveragedMoE(MoE):
    """The mean of the routed experts and the shared one."""

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        out = super().__call__(c, x)
        return c.g.scale(out, 0.5) if self.shared else out


@register("cohere2moe")
def cohere2moe(f: Hparams) -> Decoder:
    size, dense, of_layers = f.head_dim(), f.leading_dense(), not f.number("attention.layer_norm_rms_epsilon", 0.0)
    window, sliding = f.window(4)
    rope = f.whole_heads(f.rope(size, neox=False, windowed=True), size)
    experts = f.experts(
        gating=f.gating(SIGMOID), normalise=f.get("expert_weights_norm", bool, False), scale=f.number("expert_weights_scale", 0.0)
    )
    n_shared = experts.n_ff * f.number("expert_shared_count", 0)
    n_shared = n_shared and f.number("expert_shared_feed_forward_length", n_shared)
    moe = AveragedMoE(experts, GatedMLP(n_shared, suffix="_shexp") if n_shared else None)
    layers = [
        Layer(
            Attention(f.heads, f.kv_heads, size, rope if s or i < dense else None, sliding=s),
            GatedMLP(f.ff) if i < dense else moe,
            parallel=True,
        )
        for i, s in enumerate(sliding)
    ]
    scale = f.get("logit_scale", float) or 1.0
    return Decoder(f, layers, window=window, layer_norms=of_layers, logit_scale=scale, biased=ATTENTION, unscaled=("output",))
