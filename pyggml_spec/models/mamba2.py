"""The Mamba-2 mixer; verification leaves its recurrent state uncommitted (``cache.recurrent``)."""

from dataclasses import dataclass

from ..ggml.library import Tensor
from .base import Recurrence, RecurrentShape
from .hparams import Hparams
from .layers import LayerContext, Part, product, specs
from .weights import VECTOR, Spec


@dataclass(frozen=True)
class Mamba2(Part):
    """Projection, causal convolution, selective scan, gate, norm by groups if ``normalised``, output (Dao, Gu 2024)."""

    recurrent: RecurrentShape
    normalised: bool = True

    @classmethod
    def from_gguf(cls, f: Hparams, layers: int, normalised: bool = True) -> "Mamba2":
        """Reads `ssm.*`; ``layers``: number of recurrent layers."""
        inner, heads = f.positive("ssm.inner_size"), f.positive("ssm.time_step_rank")
        state, groups = f.positive("ssm.state_size", limit=1024), f.positive("ssm.group_count")
        if inner % heads or heads % groups:
            raise f.refuse(
                f"ssm.inner_size {inner}, time_step_rank {heads} and group_count {groups} contradict each other: each has to be a multiple of the next"
            )
        conv = f.positive("ssm.conv_kernel", limit=16)
        if conv < 2:
            raise f.refuse("ssm.conv_kernel is 1, but a convolution needs 2 taps or more")
        return cls(RecurrentShape(layers, inner // heads, groups, heads, conv, False, state, Recurrence.SCAN), normalised)

    @property
    def inner(self) -> int:
        return self.recurrent.n_head_v * self.recurrent.head_size

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        s, inner = self.recurrent, self.inner
        out = specs(prefix, {"ssm_in": (f.n_embd, inner + s.channels + s.n_head_v), "ssm_out": (inner, f.n_embd)})
        vectors = {"ssm_conv1d.weight": (s.conv, s.channels), "ssm_conv1d.bias": (s.channels,), "ssm_dt.bias": (s.n_head_v,)}
        vectors |= {"ssm_a": (1, s.n_head_v), "ssm_d": (1, s.n_head_v)}
        if self.normalised:
            vectors["ssm_norm.weight"] = (inner // s.n_head_k, s.n_head_k)
        return out + [Spec(f"{prefix}{name}", shape, VECTOR) for name, shape in vectors.items()]

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        g, w, b, s, inner = c.g, c.w, c.prefix, self.recurrent, self.inner
        projected = c.product("ssm_in", x)
        z, dt = g.cont(g.slice(projected, 0, 0, inner)), g.slice(projected, 0, inner + s.channels, s.n_head_v)
        assert c.recurrent is not None
        y = c.recurrent(
            g, c.state, g.cont(g.slice(projected, 0, inner, s.channels)), c["ssm_conv1d"], beta=w[f"{b}ssm_d"], alpha=dt, dt=w[f"{b}ssm_dt.bias"],
            a=w[f"{b}ssm_a"], conv_b=w[f"{b}ssm_conv1d.bias"],
        )  # fmt: skip
        y = g.gated("swiglu", z, g.flat(y))
        if self.normalised:
            y = g.flat(c.rms_norm(g.heads(y, inner // s.n_head_k, s.n_head_k), "ssm_norm"))
        return product(g, c.matrix("ssm_out"), y)
