"""qwen3moe: qwen3 with routed experts in place of the dense FFN.

    n = rms(x; ffn_norm);  x += experts(n)
The router takes a softmax over all experts and divides the weights of the chosen ones by their sum.
Source of the formulae: llama.cpp, src/models/qwen3moe.cpp.
"""

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .hparams import positive
from .moe import Experts
from .qwen3 import Hparams, Qwen3
from .weights import Spec


class Qwen3MoE(Qwen3):
    """The qwen3moe target."""

    arch = "qwen3moe"
    hp: Hparams
    routed = True

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        if self.hp.rope.n_rot != self.hp.head_size:
            raise ModelError(
                f"{file.path}: rope.dimension_count is {self.hp.rope.n_rot}, but {self.arch} rotates whole heads of {self.hp.head_size}"
            )
        n_ff = None
        if f"{self.arch}.expert_feed_forward_length" not in file.metadata:  # the first files of the family
            n_ff = positive(file, f"{self.arch}.feed_forward_length") // positive(file, f"{self.arch}.expert_used_count")
        self.experts = Experts.from_gguf(file, self.arch, self.n_layer, n_ff)

    def _ffn_specs(self, i: int) -> list[Spec]:
        return self.experts.specs(self.file, f"blk.{i}.", self.n_embd)

    def _ffn(self, g: Graph, n: Tensor, i: int) -> Tensor:
        return self.experts(g, self.weights, f"blk.{i}.", n)
