"""draft-simple: a whole small model of the same vocabulary drafts, one token per forward pass.

All passes and the verification are one graph. The K/V rows of drafts are those of the tokens that are accepted, so that verification computes none.
After a step in which all drafts were right the last one has no row yet: the next step's first pass has two rows, the last committed token (switched
off where it has its row) and the last token.
"""

from ..errors import PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.base import KVLayer, KVShape, TargetInputs
from ..models.decoder import ARCHITECTURES, Decoder
from ..models.weights import Spec, Weights
from .base import ContextInputs, Drafter


class ModelDrafter(Drafter):
    """A supported target architecture as drafter."""

    method = "draft-simple"
    whole_model = True
    block_size = 16

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch = file, file.get("general.architecture", str)
        self.model = m = ARCHITECTURES[self.arch](file)
        self.n_layer, self.n_embd, self.n_vocab, self.window = m.n_layer, m.n_embd, m.n_vocab, m.window
        self.scaled, self.unscaled, self.biased, self.ggml_attention = m.scaled, m.unscaled, m.biased, m.ggml_attention

    @property
    def weights(self) -> Weights:
        return self.model.weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self.model.weights = weights

    def tensors(self) -> list[Spec]:
        return self.model.tensors()

    def unused(self) -> dict[str, str]:
        return self.model.unused()

    def groups(self) -> dict[str, tuple[str, ...]]:
        return self.model.groups()

    def fused_alike(self) -> list[tuple[str, ...]]:
        return self.model.fused_alike()

    def kv_shapes(self) -> list[KVShape]:
        return self.model.kv_shapes()

    def check_pair(self, target: Decoder) -> None:
        if self.n_vocab < target.n_vocab:
            raise PairError(
                f"{self.file.path.name} cannot draft for {target.file.path.name}: its embedding has {self.n_vocab} tokens, the target's {target.n_vocab}"
            )
        self.draft_tokens = self.draft_tokens or (target.n_vocab if self.n_vocab > target.n_vocab else 0)

    # -- graphs

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        """Only what K/V rows depend on: the last layer has neither attention nor FFN."""
        assert rows.tokens is not None and rows.attention is not None
        own = rows.attention
        self.model.forward(g, TargetInputs(rows.kv_rows, own.mask, own.kv_bucket, rows.tokens, rows.positions, rows.sliding, kv, None))

    def hidden(self, g: Graph, rows: TargetInputs) -> Tensor:
        """F32 [n_embd, T], normalised for the head."""
        return self.model.forward(g, rows)[0]

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        return self.model.logits(g, hidden, self.draft_tokens)
