"""qwen35moe: qwen35 with routed experts and one shared expert behind a gate in place of the dense FFN.

    n = rms(x; post_attention_norm);  x += experts(n) + sigmoid(w_shexp . n) * SwiGLU_shared(n)
The router takes a softmax over all experts and divides the weights of the chosen ones by their sum.
Source of the formulae: llama.cpp, src/models/qwen35moe.cpp.
"""

from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .blocks import swiglu_ffn
from .hparams import positive
from .moe import Experts
from .qwen35 import Qwen35
from .weights import Spec


class Qwen35MoE(Qwen35):
    """The qwen35moe target."""

    arch = "qwen35moe"

    def _read_ffn(self, file: GGUFFile) -> None:
        self.experts = Experts.from_gguf(file, self.arch, self.hp.n_layer)
        self.n_ff_shared = positive(file, f"{self.arch}.expert_shared_feed_forward_length")

    def _ffn_specs(self, i: int) -> list[Spec]:
        n, n_ff, b = self.n_embd, self.n_ff_shared, f"blk.{i}."
        return [
            *self.experts.specs(self.file, b, n),
            Spec(f"{b}ffn_gate_inp_shexp.weight", (n,)),
            Spec(f"{b}ffn_gate_shexp.weight", (n, n_ff)),
            Spec(f"{b}ffn_up_shexp.weight", (n, n_ff)),
            Spec(f"{b}ffn_down_shexp.weight", (n_ff, n)),
        ]

    def ffn_members(self) -> tuple[str, ...]:
        return ("ffn_gate_shexp", "ffn_up_shexp")

    def ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        w, b = self.weights, f"blk.{i}."
        routed = self.experts(g, w, b, n)
        shared = swiglu_ffn(g, w.group(f"{b}ffn"), w.matrix(f"{b}ffn_down_shexp.weight"), n)
        gate = g.sigmoid(g.matmul(w[f"{b}ffn_gate_inp_shexp.weight"], n))
        return g.add(routed, g.mul(shared, gate))
