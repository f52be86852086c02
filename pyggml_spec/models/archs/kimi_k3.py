"""kimi-k3 (Kimi K3): kimi-linear with attention over earlier layers' outputs, experts in a latent space, and gated latent attention.

Every B-th layer banks its input x and starts the residual stream anew, from its mixer's output. Mixers, FFNs and the head read, of the banked rows and x,
    sum over j of a_j x_j;  a = softmax(w . rms(x_j))
Kimi delta attention decays by bound * sigmoid(exp(A) (alpha + b)) if the file has a bound, and has its output gate as one matrix. The activation is
b tanh(g / b) sigmoid(g) * l tanh(u / l). Source of the formulae: llama.cpp, src/models/kimi-k3.cpp.
"""

from dataclasses import dataclass
from typing import Any

from ...ggml.graph import Graph
from ...ggml.library import Tensor
from ..decoder import Decoder, register
from ..hparams import Hparams
from ..layers import GatedMLP, Layer, LayerContext, Part, any_norm, specs
from ..mla import MLA
from ..model import ATTENTION, SCALED
from ..moe import Experts
from ..weights import VECTOR, Spec
from .ernie4_5 import UNADDED
from .kimi_linear import delta, latent_attention

ROUTER = "ffn_gate_inp"


@register("kimi-k3")
def kimi_k3(f: Hparams) -> Decoder:
    first = next((i for i, (_, kv) in enumerate(f.hybrid_heads) if kv), 0)
    lora_q = f.positive("attention.q_lora_rank", limit=4096) if f.shape(f"blk.{first}.attn_q_a_norm.weight") else 0
    mla = latent_attention(f, lora_q)
    gated = f.shape(f"blk.{first}.attn_gate.weight") is not None
    attention: Part = GatedMLA(**vars(mla)) if gated else mla
    kda = delta(f, bound=f.number("kda.gate_lower_bound", 0.0, -1e3, 0.0), whole_gate=True)
    situ = f.number("activation.situ_beta", 1.0, 1e-6, 1e6), f.number("activation.situ_linear_beta", 0.0, 0.0, 1e6)
    dense, every = f.leading_dense(0), f.number("attn_res.block_size", 0)
    experts = f.experts(
        gating=f.gating(),
        normalise=f.get("expert_weights_norm", bool, False),
        scale=f.number("expert_weights_scale", 0.0),
        biased=True,
        situ=situ,
    )
    shared = GatedMLP(experts.n_ff * f.positive("expert_shared_count", limit=64), suffix="_shexp", situ=situ)
    latent = f.number("expert_latent_length", 0)
    moe = LatentMoE(shared, latent, bool(latent) and f.shape(f"blk.{dense}.ffn_routed_norm.weight") is not None, experts)
    layers = [
        Banking(
            attention if kv else kda, GatedMLP(f.ff, situ=situ) if i < dense else moe, every=every, banks=bool(every) and i % every == 0
        )
        for i, (_, kv) in enumerate(f.hybrid_heads)
    ]
    unused = {f"blk.{i}.{name}.bias": UNADDED for i in range(f.n_layer) for name in ATTENTION}
    return KimiK3(f, layers, every=every, unused=unused, unscaled=(*SCALED, "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "output"))


@dataclass(frozen=True)
class GatedMLA(MLA):
    """Latent attention with a sigmoid gate of a further product."""

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        return [*super().tensors(f, prefix), *specs(prefix, {"attn_gate": (f.n_embd, self.heads * self.size_v)})]

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        assert c.attention is not None
        out = self.attended(c, *self.projected(c, x), c.attention.mask)
        return c.product("attn_output", c.g.mul(out, c.g.sigmoid(c.product("attn_gate", x))))


@dataclass(frozen=True)
class LatentMoE(Part):
    """Routed experts on ``latent`` values, 0 for the embedding's, possibly ``normed`` after, plus a ``shared`` FFN."""

    shared: GatedMLP
    latent: int
    normed: bool
    experts: Experts

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        n, size = f.n_embd, self.latent or f.n_embd
        out = [spec for spec in self.experts.specs(f.file, prefix, size) if not spec.name.endswith(f"{ROUTER}.weight")]
        shapes = {ROUTER: (n, self.experts.n_expert)} | ({"ffn_routed_down": (n, size), "ffn_routed_up": (size, n)} if self.latent else {})
        return specs(prefix, shapes, {"ffn_routed_norm": size} if self.normed else {}) + out + self.shared.tensors(f, prefix)

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        return self.shared.groups(f, prefix)

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        inner = c.product("ffn_routed_down", x) if self.latent else x
        out = self.experts(c.g, c.w, c.prefix, inner, c.product(ROUTER, x))
        out = c.rms_norm(out, "ffn_routed_norm") if self.normed else out
        return c.g.add(c.product("ffn_routed_up", out) if self.latent else out, self.shared(c, x))


def mixed(g: Graph, x: Tensor, banked: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """F32 [n, T] of x F32 [n, T] and the banked rows F32 [n, K, T]."""
    if banked is None:
        return x
    count, rows = list(banked.ne)[1:3]
    scores = g.reshape(g.sum_rows(g.rms_norm(banked, weight, eps)), count, rows)
    shares = g.softmax(g.concat([scores, g.sum_rows(g.rms_norm(x, weight, eps))]))
    of_banked, own = g.cont(g.slice(shares, 0, 0, count)), g.cont(g.slice(shares, 0, count, 1))
    return g.add(g.streams_sum(banked, of_banked), g.mul(x, own))


@dataclass(frozen=True)
class Banking(Layer):
    """A layer whose ``extra`` are the banked rows; it ``banks`` its input, as one of ``every`` (0 for none) layers does."""

    every: int = 0
    banks: bool = False

    @property
    def reads_extra(self) -> bool:
        return bool(self.every)

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        scores = ("attn_res_score", "ffn_res_score") if self.every else ()
        return super().tensors(f, prefix) + [Spec(f"{prefix}{name}.weight", (f.n_embd,), VECTOR) for name in scores]

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g, ffn = c.g, self.ffn
        assert ffn is not None
        h = self._read(c, x, "attn_res_score")
        if self.banks:
            own = g.reshape(x, x.ne[0], 1, x.ne[1])
            c.extra = own if c.extra is None else g.stack([c.extra, own])
        a = self.mixer(c, c.name(c.rms_norm(h, self.mixer_norm), "attn_norm"))
        x = a if self.banks else g.add(x, a)
        n = c.name(c.rms_norm(self._read(c, x, "ffn_res_score"), self.ffn_norm), "ffn_norm")
        return c.name(g.add(c.name(ffn(c, n), "ffn_out"), x), "l_out")  # x may be a product with other readers

    def _read(self, c: LayerContext, x: Tensor, name: str) -> Tensor:
        return mixed(c.g, x, c.extra, c[name], c.eps) if self.every else x


class KimiK3(Decoder):
    """kimi-k3."""

    def __init__(self, f: Hparams, layers: list[Banking], every: int, **more: Any) -> None:
        super().__init__(f, layers, **more)
        self.every = every

    def tensors(self) -> list[Spec]:
        return super().tensors() + ([Spec("output_res_score.weight", (self.n_embd,), VECTOR)] if self.every else [])

    def normed(self, g: Graph, x: Tensor, extra: Tensor | None) -> Tensor:
        x = mixed(g, x, extra, self.weights["output_res_score.weight"], self.eps) if self.every else x
        return any_norm(g, self.weights, "output_norm", x, self.eps, False)
