"""minimax-m2: routed experts in every layer, with norms over all heads of q and of k at once.

Per layer, with rms(x; w) = x / sqrt(mean x^2 + eps) * w:
    h = rms(x; attn_norm);  q = rms(W_q h; attn_q_norm), k = rms(W_k h; attn_k_norm), each over the whole row; then a part of each head is
    rotated (NEOX pairs);  x += W_o attention(q, k, v)
    n = rms(x; ffn_norm);  x += experts(n)
The router adds a bias to the sigmoids it chooses by, and divides the weights of the chosen ones by their sum.
Source of the formulae: llama.cpp, src/models/minimax-m2.cpp.
"""

from dataclasses import replace

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import Rows
from .blocks import attend, product, project
from .hparams import inverse_root, positive
from .model import EXPERT
from .moe import SIGMOID, SOFTMAX, Experts
from .qwen3 import Hparams, Qwen3
from .weights import VECTOR, Spec


class MiniMaxM2(Qwen3):
    """The minimax-m2 target."""

    arch = "minimax-m2"
    hp: Hparams
    unscaled = frozenset(EXPERT)
    head_norms = ()
    routed = True

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        gating = file.get(f"{self.arch}.expert_gating_func", int)
        if gating not in (SOFTMAX, SIGMOID):
            raise ModelError(f"{file.path}: expert_gating_func is {gating}; {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are supported")
        experts = Experts.from_gguf(file, self.arch, self.n_layer, gating=gating, biased=True)
        # the size that llama.cpp takes for its tensors
        self.experts = replace(experts, n_ff=positive(file, f"{self.arch}.feed_forward_length"))

    def _more_specs(self) -> list[Spec]:
        heads = {"attn_q_norm": self.hp.n_head, "attn_k_norm": self.hp.n_head_kv}
        sizes = {name: n * self.hp.head_size for name, n in heads.items()}
        return [Spec(f"blk.{i}.{name}.weight", (size,), VECTOR) for i in range(self.n_layer) for name, size in sizes.items()]

    def _ffn_specs(self, i: int) -> list[Spec]:
        return self.experts.specs(self.file, f"blk.{i}.", self.n_embd)

    # -- the graph

    def _attention(self, g: Graph, rows: Rows, h: Tensor, i: int) -> Tensor:
        hp, w, b, size = self.hp, self.weights, f"blk.{i}.", self.hp.head_size
        q, k, v = project(g, w.group(f"{b}mixer"), h)
        q, k = (g.rms_norm(x, w[f"{b}attn_{name}_norm.weight"], hp.eps) for name, x in (("q", q), ("k", k)))
        q = hp.rope(g, g.heads(q, size, hp.n_head), rows.positions)
        k = hp.rope(g, g.heads(k, size, hp.n_head_kv), rows.positions)
        v = g.heads(v, size, hp.n_head_kv)
        out = attend(g, q, k, v, rows.kv[i], rows.kv_rows, rows.mask, rows.span, hp.n_head_kv, inverse_root(size))
        return product(g, w.matrix(f"{b}attn_output.weight"), out)

    def _ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        return self.experts(g, self.weights, f"blk.{i}.", n)
