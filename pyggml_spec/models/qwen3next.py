"""qwen3next: the hybrid of Qwen3-Next and Qwen3-Coder-Next, qwen35moe with other neighbours among the heads of its delta-net.

r = H_v / H_k neighbouring v-heads share a head of q and k: v-head h goes with h // r, where qwen35 has h % H_k. `ssm_ba` is beta and alpha in one
matrix, r rows of beta and then r of alpha for each k-head. Files of the first converter have q, k, v and z in one matrix too, `ssm_in`, the parts
of each k-head side by side. The rope has no axes.
Source of the formulae: llama.cpp, src/models/qwen3next.cpp.
"""

from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .blocks import project
from .hparams import positive
from .model import SCALED
from .moe import Experts
from .qwen35moe import Qwen35MoE
from .weights import Spec

JOINED = "ssm_in"


class Qwen3Next(Qwen35MoE):
    """The qwen3next target."""

    arch = "qwen3next"
    grouped = True
    scaled = (*SCALED, JOINED)
    unscaled = frozenset(("attn_qkv", "attn_gate", "ssm_out", JOINED))

    def _read_ffn(self, file: GGUFFile) -> None:
        a = self.arch
        n_ff = None
        if f"{a}.expert_feed_forward_length" not in file.metadata:  # the first files of the family
            n_ff = positive(file, f"{a}.feed_forward_length") // positive(file, f"{a}.expert_used_count")
        self.experts = Experts.from_gguf(file, a, self.hp.n_layer, n_ff)
        shared = file.get(f"{a}.expert_shared_feed_forward_length", int, 0)
        self.n_ff_shared = positive(file, f"{a}.expert_shared_feed_forward_length" if shared else f"{a}.feed_forward_length")
        self._joined = not any(name.endswith(".attn_qkv.weight") for name in file.tensors)

    def idle(self) -> dict[str, str]:
        both = [] if self._joined else [f"blk.{i}.{JOINED}.weight" for i in range(self.n_layer)]
        return super().idle() | dict.fromkeys(both, "q, k, v and z in one matrix, which the file has apart, too")

    # -- what it reads

    def _recurrent_specs(self, i: int) -> list[Spec]:
        d, b = self.hp.delta, f"blk.{i}."
        inner = d.head_size * d.n_head_v
        apart = {f"{b}{name}.weight" for name in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")}
        rows = {JOINED: d.channels + inner} if self._joined else {"attn_qkv": d.channels, "attn_gate": inner}
        projections = [Spec(f"{b}{name}.weight", (self.n_embd, n)) for name, n in (rows | {"ssm_ba": 2 * d.n_head_v}).items()]
        return projections + [spec for spec in super()._recurrent_specs(i) if spec.name not in apart]

    def _recurrent_members(self) -> tuple[str, ...]:
        return (JOINED, "ssm_ba") if self._joined else ("attn_qkv", "attn_gate", "ssm_ba")

    def delta_row(self, first: int = 0) -> int:
        return self.hp.delta.channels if self._joined else super().delta_row(first)

    # -- the graph

    def _projections(self, g: Graph, h: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        d = self.hp.delta
        *first, ba = project(g, self.weights.group(f"blk.{i}.mixer"), h)
        r = d.n_head_v // d.n_head_k
        beta, alpha = (self._of_k_heads(g, ba, r, 2 * r, at) for at in (0, r))
        if not self._joined:
            qkv, z = first
            return g.whole(qkv), z, beta, alpha
        size, wide = d.head_size, r * d.head_size
        every = 2 * (size + wide)
        q, k = (self._of_k_heads(g, first[0], size, every, at) for at in (0, size))
        v, z = (self._of_k_heads(g, first[0], wide, every, at) for at in (2 * size, 2 * size + wide))
        return g.concat([q, k, v]), z, beta, alpha

    def _of_k_heads(self, g: Graph, x: Tensor, n: int, every: int, first: int) -> Tensor:
        """Of each k-head's ``every`` values the n from ``first`` on, F32 [n * H_k, T], by copy."""
        return g.packed(g.heads(x, n, self.hp.delta.n_head_k, every, first))
