"""kimi-linear (Kimi Linear): Kimi delta attention, and latent attention without RoPE where layers have K/V heads; dense layers, then experts.

Kimi delta attention is a gated delta-net with a decay for each row of a head's state, g = A softplus(W_fb W_fa h + b), three convolutions, and an
output norm that is gated by sigmoid(W_gb W_ga h). Source of the formulae: llama.cpp, src/models/kimi-linear.cpp.
"""

from dataclasses import dataclass
from typing import Any

from ...ggml.library import Tensor
from ..base import Recurrence, RecurrentShape
from ..decoder import Decoder, register
from ..hparams import Hparams, inverse_root
from ..layers import Layer, LayerContext, Part, specs
from ..mla import MLA
from ..model import ATTENTION, EXPERT, FFN, SHARED
from ..weights import VECTOR, Spec
from .deepseek import ffns, shared_moe
from .ernie4_5 import UNADDED

CONVS = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")


@dataclass(frozen=True)
class KimiDelta(Part):
    """Kimi delta attention; ``recurrent``: geometry of the states. ``bound``: see ``pgs_delta_inputs``; ``whole_gate``: the gate is one matrix;
    ``l2_eps``: epsilon of the norms of q and k, 0 for the model's."""

    recurrent: RecurrentShape
    bound: float = 0.0
    whole_gate: bool = False
    l2_eps: float = 0.0

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        size, heads = self.recurrent.head_size, self.recurrent.n_head_v
        n, inner = f.n_embd, size * heads
        shapes = dict.fromkeys(ATTENTION, (n, inner)) | {"ssm_beta": (n, heads), "attn_output": (inner, n)}
        for name in ("ssm_f",) if self.whole_gate else ("ssm_f", "ssm_g"):
            shapes |= {f"{name}_a": (n, size), f"{name}_b": (size, inner)}
        shapes |= {"ssm_g": (n, inner)} if self.whole_gate else {}
        out = specs(prefix, shapes, {"ssm_norm": size}) + [
            Spec(f"{prefix}{name}.weight", (self.recurrent.conv, 1, inner), VECTOR) for name in CONVS
        ]
        return [
            *out,
            Spec(f"{prefix}ssm_a", (1, heads) if f.arch == "kimi-linear" else (heads,), VECTOR),
            Spec(f"{prefix}ssm_dt.bias", (inner,), VECTOR),
        ]

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        return {"mixer": ATTENTION}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g, w, b, s = c.g, c.w, c.prefix, self.recurrent
        # separate products: joined, ggml's F32 matmul sums beta in another order
        decay, gate, beta = (c.product(name, x) for name in ("ssm_f_a", "ssm_g" if self.whole_gate else "ssm_g_a", "ssm_beta"))
        gate = gate if self.whole_gate else c.product("ssm_g_b", gate)
        convs = g.stack([g.reshape(c[name], s.conv, s.head_size * s.n_head_v) for name in CONVS])
        assert c.recurrent is not None
        out = c.recurrent(
            g, c.state, g.concat(c.project("mixer", x)), convs, beta=beta, alpha=c.product("ssm_f_b", decay), dt=w[f"{b}ssm_dt.bias"],
            a=g.reshape(w[f"{b}ssm_a"], 1, s.n_head_v), eps=self.l2_eps or c.eps, bound=self.bound,
        )  # fmt: skip
        return c.product(
            "attn_output",
            g.flat(g.mul(c.rms_norm(out, "ssm_norm"), g.heads(g.sigmoid(gate), s.head_size, s.n_head_v))),
        )


def delta(f: Hparams, **how: Any) -> KimiDelta:
    """From `kda.head_dim` and `ssm.conv_kernel`; ``how``: further arguments."""
    heads, size = max(n for n, _ in f.hybrid_heads), f.positive("kda.head_dim", limit=1024)
    n_recurrent = sum(not kv for _, kv in f.hybrid_heads)
    if not n_recurrent:
        raise f.refuse(f"it has no recurrent layer, which every {f.arch} model has")
    conv = f.positive("ssm.conv_kernel", limit=16)
    if conv < 2:
        raise f.refuse("ssm.conv_kernel is 1, but a convolution needs 2 taps or more")
    return KimiDelta(RecurrentShape(n_recurrent, size, heads, heads, conv, False, size, Recurrence.KDA), **how)


def latent_attention(f: Hparams, lora_q: int = 0) -> MLA:
    """Latent attention without RoPE."""
    heads = max(n for n, _ in f.hybrid_heads)
    key, value = f.positive("attention.key_length_mla", limit=4096), f.positive("attention.value_length_mla", limit=4096)
    rope = f.rope(key, neox=False)
    if rope.n_rot >= key:
        raise f.refuse(f"rope.dimension_count is {rope.n_rot}, which leaves nothing of heads of {key}")
    latent = f.positive("attention.kv_lora_rank", limit=4096)
    if {kv for _, kv in f.hybrid_heads} - {0, 1} or f.get("attention.key_length", int, latent + rope.n_rot) != latent + rope.n_rot:
        raise f.refuse(
            f"attention.head_count_kv and key_length are not the 1 and {latent + rope.n_rot} that latent rows of {latent} values call for"
        )
    return MLA(heads, lora_q, latent, key, value, rope, inverse_root(key), rotated=False)


@register("kimi-linear")
def kimi_linear(f: Hparams) -> Decoder:
    kda, mla = delta(f), latent_attention(f)
    moe = shared_moe(f, gating=f.gating(), biased=True)
    layers = [Layer(mla if kv else kda, ffn) for (_, kv), ffn in zip(f.hybrid_heads, ffns(f, moe), strict=True)]
    unused = {f"blk.{i}.{name}.bias": UNADDED for i in range(f.n_layer) for name in ATTENTION}
    return Decoder(f, layers, unused=unused, unscaled=(*ATTENTION, "attn_output", "ssm_beta", "output", *FFN, *EXPERT, *SHARED))
