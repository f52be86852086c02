"""draft-simple: a whole small model of the same vocabulary drafts, one token per forward pass.

All passes and the verification are one graph. The K/V rows of drafts are those of the tokens that are accepted, so that verification computes none.
After a step in which all drafts were right the last one has no row yet: the next step's first pass has two rows, the last committed token (switched
off where it has its row) and the last token.
"""

from ..errors import PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..gguf_io.reader import StringArray
from ..models.base import KVLayer, KVShape, TargetInputs
from ..models.decoder import ARCHITECTURES, Decoder
from ..models.weights import Spec, Weights
from .base import ContextInputs, Drafter, clamp_nan
from .mtp import has_layer
from .vocabulary import LEAST_COVERAGE, TOKENS, TokenTables, VocabularyMap, map_vocabulary


def is_whole_model(file: GGUFFile) -> bool:
    """Whether a drafter's file is a model of its own."""
    return file.metadata.get("general.architecture") in ARCHITECTURES and not has_layer(file)


class ModelDrafter(Drafter):
    """A supported target architecture as drafter."""

    method = "draft-simple"
    whole_model = True
    block_size = 16

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch = file, file.get("general.architecture", str)
        self.model = m = ARCHITECTURES[self.arch](file)
        self.n_layer, self.n_embd, self.n_vocab, self.window = m.n_layer, m.n_embd, m.n_vocab, m.window
        self.vocabulary: VocabularyMap | None = None
        self._pair: GGUFFile | None = None  # the target's file that was checked
        self.tables: TokenTables | None = None
        self.scaled, self.unscaled, self.biased, self.ggml_attention = m.scaled, m.unscaled, m.biased, m.ggml_attention

    @property
    def weights(self) -> Weights:
        return self.model.weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self.model.weights = weights
        self.tables = TokenTables(weights, self.vocabulary) if self.vocabulary is not None else None

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
        if self._pair is target.file:
            return
        pair, tokens = f"{self.file.path.name} cannot draft for {target.file.path.name}", self.file.metadata.get(TOKENS)
        found = self.vocabulary = map_vocabulary(target.file, self.file)
        known = len(tokens) if isinstance(tokens, StringArray) else target.n_vocab
        if self.n_vocab < known:
            raise PairError(f"{pair}: its embedding has {self.n_vocab} rows for {known} tokens")
        if found is not None and found.coverage < LEAST_COVERAGE:
            raise PairError(
                f"{pair}: {found.description()}, and {100 * LEAST_COVERAGE:.0f} % are needed; use a small model of the target's family"
            )
        if found is None and self.n_vocab > target.n_vocab:
            self.draft_tokens = self.draft_tokens or target.n_vocab
        self._pair = target.file

    # -- graphs

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        """Only what K/V rows depend on: the last layer has neither attention nor FFN."""
        assert rows.tokens is not None and rows.attention is not None
        own = rows.attention
        self.model.forward(
            g,
            TargetInputs(
                rows.kv_rows, own.mask, own.kv_bucket, self.own_tokens(g, rows.tokens), rows.positions, rows.sliding, kv, rows.recurrent
            ),
        )

    def own_tokens(self, g: Graph, tokens: Tensor) -> Tensor:
        """The drafter's ids of the target's tokens, I32 [T]."""
        return tokens if self.tables is None else g.reshape(g.rows(self.tables.to_draft, tokens), tokens.ne[0])

    def choose(self, g: Graph, logits: Tensor, draws: Tensor | None = None, first: int = 0) -> Tensor:
        """Only tokens that the target has."""
        if self.tables is None or self.vocabulary is None:
            return super().choose(g, logits, draws, first)
        count = logits.ne[0]
        ids, mask = (g.slice(g.reshape(x, len(self.vocabulary.drafted)), 0, 0, count) for x in (self.tables.to_target, self.tables.mask))
        logits = g.add(logits, mask)
        chosen = g.argmax(clamp_nan(g, logits)) if draws is None else g.draw(logits, draws, first, ids)
        return g.rows(self.tables.to_target, chosen)

    def hidden(self, g: Graph, rows: TargetInputs) -> Tensor:
        """F32 [n_embd, T], normalised for the head."""
        return self.model.forward(g, rows)[0]

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        return self.model.logits(g, hidden, self.draft_tokens)
