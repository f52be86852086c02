"""The gated delta-net mixer; verification leaves its recurrent state uncommitted (``cache.recurrent``)."""

from dataclasses import dataclass

from ..ggml.library import Tensor
from .base import RecurrentShape
from .hparams import Hparams
from .layers import LayerContext, Part, product, specs
from .weights import VECTOR, Group, Spec

QKV, Z, BETA, ALPHA = "attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"


@dataclass(frozen=True)
class GatedDeltaNet(Part):
    """Projections, causal convolution, gated delta rule (Yang, Kautz, Hatamizadeh 2024), gated norm, output.

    ``recurrent``: geometry of the states; its ``layers`` counts all recurrent layers.
    """

    recurrent: RecurrentShape

    def inputs(self, f: Hparams) -> dict[str, tuple[int, ...]]:
        """Matrices that read the layer's input."""
        d = self.recurrent
        return {
            QKV: (f.n_embd, d.channels),
            Z: (f.n_embd, d.head_size * d.n_head_v),
            BETA: (f.n_embd, d.n_head_v),
            ALPHA: (f.n_embd, d.n_head_v),
        }

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        d = self.recurrent
        out = specs(prefix, self.inputs(f) | {"ssm_out": (d.head_size * d.n_head_v, f.n_embd)}, {"ssm_norm": d.head_size})
        out.append(Spec(f"{prefix}ssm_conv1d.weight", (d.conv, d.channels), VECTOR))
        return out + [Spec(f"{prefix}{name}", (d.n_head_v,), VECTOR) for name in ("ssm_dt.bias", "ssm_a")]

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        return {"mixer": tuple(self.inputs(f))}

    kept_group = "mixer"

    def row(self, group: Group | None) -> int:
        """Floats per projected row in the recurrent state: a fused projection is kept whole, channels first."""
        assert group is not None
        return sum(group.runs[0].rows)

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g, w, b = c.g, c.w, c.prefix
        proj, z, beta, alpha = self.projections(c, x)
        assert c.recurrent is not None
        o = c.recurrent(g, c.state, proj, c["ssm_conv1d"], beta=beta, alpha=alpha, dt=w[f"{b}ssm_dt.bias"], a=w[f"{b}ssm_a"], eps=c.eps)
        return product(g, c.matrix("ssm_out"), self.gated(c, o, z))

    def gated(self, c: LayerContext, out: Tensor, z: Tensor) -> Tensor:
        """The norm of the output F32 [S, H_v, T], gated by z; F32 [S * H_v, T]."""
        return c.g.gated_norm(out, c["ssm_norm"], c.eps, z)

    def projections(self, c: LayerContext, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """F32 rows of ``row`` values that begin with q | k | v; z [S * H_v, T]; beta and alpha [H_v, T]."""
        proj, z, beta, alpha = c.project("mixer", x)
        return c.g.view_source(proj), z, beta, alpha
