"""nemotron_h, nemotron_h_moe (Nemotron Nano 2 and 3): every layer is one part: Mamba-2, attention without RoPE, or an FFN with squared ReLU.

A layer with no K/V heads and no FFN size is Mamba-2; one with an FFN size is that FFN. nemotron_h_moe routes, possibly in a smaller latent space:
W_up experts(W_down n), and adds a shared FFN. Source of the formulae: llama.cpp, src/models/nemotron-h.cpp.
"""

from dataclasses import dataclass

from ...ggml.library import Tensor
from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import MAY, MLP, Attention, Layer, LayerContext, Part, specs
from ..mamba2 import Mamba2
from ..model import ATTENTION, FFN, SCALED
from ..moe import SIGMOID, Experts
from ..weights import Spec

ROUTER, DOWN, UP = "ffn_gate_inp", "ffn_latent_down", "ffn_latent_up"


@dataclass(frozen=True)
class LatentMoE(Part):
    """Routed experts on ``latent`` values, 0 for the embedding's, plus a ``shared`` FFN."""

    shared: MLP
    latent: int
    experts: Experts

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        size = self.latent or f.n_embd
        out = [spec for spec in self.experts.specs(f.file, prefix, size) if not spec.name.endswith(f"{ROUTER}.weight")]
        shapes = {ROUTER: (f.n_embd, self.experts.n_expert)} | ({DOWN: (f.n_embd, size), UP: (size, f.n_embd)} if self.latent else {})
        return specs(prefix, shapes) + out + self.shared.tensors(f, prefix)

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        logits = c.product(ROUTER, x)
        out = self.experts(c.g, c.w, c.prefix, c.product(DOWN, x) if self.latent else x, logits)
        return c.g.add(c.product(UP, out) if self.latent else out, self.shared(c, x))


@register("nemotron_h", "nemotron_h_moe")
def nemotron_h(f: Hparams) -> Decoder:
    f.eps = f.number("attention.layer_norm_rms_epsilon", f.layer_norm_eps)
    size, heads = f.hybrid_head_dim, f.hybrid_heads
    ff = f.per_layer("feed_forward_length", least=0)
    n_recurrent = sum(not kv and not n_ff for (_, kv), n_ff in zip(heads, ff, strict=True))
    if not n_recurrent:
        raise f.refuse(f"it has no recurrent layer, which every {f.arch} model has")
    mamba, moe = Mamba2.from_gguf(f, n_recurrent), _moe(f, max(ff)) if f.number("expert_count", 0) else None
    layers: list[Layer] = []
    for (n, kv), n_ff in zip(heads, ff, strict=True):
        attention = Attention(n, kv, size, None, out_bias=MAY) if kv else mamba
        layers.append(Layer((moe or MLP(n_ff, "relu_squared")) if n_ff else attention, None))
    return Decoder(f, layers, scaled=(*SCALED, "ssm_in"), biased=(*ATTENTION, "attn_output", *FFN))


def _moe(f: Hparams, n_ff: int) -> LatentMoE:
    used = f.positive("expert_used_count")
    experts = f.experts(
        n_ff // used, gating=SIGMOID, biased=True, glu="relu_squared", gated=False, normalise=f.get("expert_weights_norm", bool, False),
        scale=f.number("expert_weights_scale", 0.0),
    )  # fmt: skip
    latent = f.number("moe_latent_size", 0) if any(f".{DOWN}." in name for name in f.file.tensors) else 0
    return LatentMoE(MLP(f.positive("expert_shared_feed_forward_length"), "relu_squared", "_shexp"), latent, experts)
