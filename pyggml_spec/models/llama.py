"""llama: the dense transformer of Llama 3. qwen3 without norms on q and k, with rope pairs (2 i, 2 i + 1) whose frequencies may be divided
by a table in the file (`rope_freqs`, Llama 3.1 and later).

Source of the formulae: llama.cpp, src/models/llama.cpp.
"""

from ..ggml.graph import Graph
from ..ggml.library import Tensor
from .model import ATTENTION, FFN
from .qwen3 import Hparams, Qwen3
from .weights import VECTOR, Spec

FACTORS = "rope_freqs.weight"


class Llama(Qwen3):
    """The llama target."""

    arch = "llama"
    hp: Hparams
    biased = (*ATTENTION, "attn_output", *FFN)
    neox = False
    head_norms = ()

    def _more_specs(self) -> list[Spec]:
        return [Spec(FACTORS, (self.hp.rope.n_rot // 2,), VECTOR)] if FACTORS in self.file.tensors else []

    def _rotate(self, g: Graph, x: Tensor, positions: Tensor, norm: str) -> Tensor:
        return self.hp.rope(g, x, positions, self.weights.get(FACTORS))
