"""qwen3next (Qwen3-Next, Qwen3-Coder-Next): qwen35moe with another head order in its delta-net, and RoPE without sections.

r = H_v / H_k neighbouring v-heads share a head of q and k: v-head h goes with h // r, where qwen35 has h % H_k. `ssm_ba` is beta and alpha in one
matrix, r rows of beta and then r of alpha for each k-head. Files of the first converter have q, k, v and z in one matrix too, `ssm_in`, the parts
of each k-head side by side. Source of the formulae: llama.cpp, src/models/qwen3next.cpp.
"""

from dataclasses import dataclass

from ...ggml.library import Tensor
from ..decoder import Decoder, register
from ..delta_net import QKV, GatedDeltaNet, Z
from ..hparams import Hparams
from ..layers import GatedMLP, LayerContext, MoE
from ..model import SCALED
from ..weights import Group
from .qwen35 import hybrid, hybrid_mixers

IN, BA = "ssm_in", "ssm_ba"


@register("qwen3next")
def qwen3next(f: Hparams) -> Decoder:
    shared = "expert_shared_feed_forward_length" if f.get("expert_shared_feed_forward_length", int, 0) else "feed_forward_length"
    moe = MoE(f.experts(f.ff_of_used_experts()), GatedMLP(f.positive(shared), suffix="_shexp"), gated=True)
    return hybrid(f, hybrid_mixers(f, JoinedDeltaNet, grouped=True), moe, scaled=(*SCALED, IN), unscaled=(QKV, Z, "ssm_out", IN))


def joined(f: Hparams) -> bool:
    """Whether q, k, v and z are one matrix."""
    return not any(name.endswith(f".{QKV}.weight") for name in f.file.tensors)


@dataclass(frozen=True)
class JoinedDeltaNet(GatedDeltaNet):
    """A delta-net layer with beta and alpha in one matrix, and possibly q, k, v and z in another."""

    def inputs(self, f: Hparams) -> dict[str, tuple[int, ...]]:
        d = self.recurrent
        inner = d.head_size * d.n_head_v
        rows = {IN: d.channels + inner} if joined(f) else {QKV: d.channels, Z: inner}
        return {name: (f.n_embd, n) for name, n in (rows | {BA: 2 * d.n_head_v}).items()}

    def unused(self, f: Hparams, prefix: str) -> dict[str, str]:
        return {} if joined(f) else {f"{prefix}{IN}.weight": "q, k, v and z in one matrix, which the file has apart, too"}

    def row(self, group: Group | None) -> int:
        assert group is not None
        return super().row(group) if self._apart(group) else self.recurrent.channels

    def _apart(self, group: Group) -> bool:
        return sum(len(run.rows) for run in group.runs) > 2

    def projections(self, c: LayerContext, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        g, d = c.g, self.recurrent
        *first, ba = c.project("mixer", x)
        r, size = d.n_head_v // d.n_head_k, d.head_size
        beta, alpha = (self._of_k_heads(c, ba, r, 2 * r, at) for at in (0, r))
        if len(first) > 1:
            return g.view_source(first[0]), first[1], beta, alpha
        wide = r * size
        every = 2 * (size + wide)
        q, k = (self._of_k_heads(c, first[0], size, every, at) for at in (0, size))
        v, z = (self._of_k_heads(c, first[0], wide, every, at) for at in (2 * size, 2 * size + wide))
        return g.concat([q, k, v]), z, beta, alpha

    def _of_k_heads(self, c: LayerContext, x: Tensor, n: int, every: int, first: int) -> Tensor:
        """Values [first, first + n) of each k-head's ``every``, F32 [n * H_k, T], a copy."""
        return c.g.cont_flat(c.g.heads(x, n, self.recurrent.n_head_k, every, first))
