"""dspark: DFlash with a Markov head, so that each draft depends on the one before it.

    draft_i = argmax(u_i + W_2 W_1[draft_{i-1}]), u_i the logits of the block's row i, capped where the file says so; W_1 and W_2 of a small rank
    confidence_i = sigmoid(conf_proj . [h_i ; W_1[draft_{i-1}]] + b), h_i the row's normalised hidden state, where the file has such a head
The chain begins with the last token. Whether its own row drafts too (`sample_from_anchor`, as in most files) or only the mask rows after
it: in the first case a block of B rows gives B drafts, and B + 1 rows are verified. Files without a Markov head draft in parallel.
Sources of the formulae: llama.cpp, src/models/dflash.cpp (build_dspark_markov_head) and common/speculative.cpp (which rows draft); DeepSpec,
modeling/dspark, whose Gemma 4 caps logits before the bias, which llama.cpp does not.
"""

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.decoder import Decoder
from ..models.layers import product
from ..models.weights import ROWS, VECTOR, Spec
from .base import TOKEN_MAP, DraftOutput
from .dflash import HEAD, DFlash

FROM, TO = "markov_w1.weight", "markov_w2.weight"
CONFIDENCE, OFFSET = "conf_proj.weight", "conf_proj.bias"


class DSpark(DFlash):
    """The drafter."""

    method = "draft-dspark"

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        self.by_position = any(name in file.tensors for name in (FROM, TO, CONFIDENCE))  # it has a Markov head
        for name in (FROM, TO) if self.by_position else ():
            if name not in file.tensors or len(file.tensors[name].shape) != 2:
                raise ModelError(f"{file.path} has no matrix {name!r}, which a drafter with a Markov head needs; convert it again")
        self.rank = file.tensors[FROM].shape[0] if self.by_position else 0
        self.confident = CONFIDENCE in file.tensors
        self.from_anchor = file.get(f"{self.arch}.sample_from_anchor", bool, True)
        self.block_size += self.from_anchor

    @property
    def extra_nodes(self) -> int:
        """12 per draft, plus those of its matrices."""
        return 24 * self.block_size

    def block_rows(self, width: int) -> int:
        return width - self.from_anchor

    # -- tensors

    def tensors(self) -> list[Spec]:
        tensors = self.file.tensors
        if not self.by_position:
            return super().tensors()
        out = [Spec(FROM, (self.rank, tensors[FROM].shape[1]), ROWS), Spec(TO, (self.rank, tensors[TO].shape[1]))]
        if self.confident:
            out.append(Spec(CONFIDENCE, (self.hp.n_embd + self.rank, 1)))
        if self.confident and OFFSET in tensors:
            out.append(Spec(OFFSET, (1,), VECTOR))
        return super().tensors() + out

    def vocab_sizes(self) -> dict[str, int]:
        names = (FROM,) if TOKEN_MAP in self.file.tensors else (FROM, TO)
        return super().vocab_sizes() | {name: self.file.tensors[name].shape[1] for name in names if self.by_position}

    def head_sizes(self) -> dict[str, int]:
        return super().head_sizes() | ({TO: self.file.tensors[TO].shape[1]} if self.by_position else {})

    # -- graph

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        """Logits before the Markov head, unscaled."""
        logits = product(g, (self.weights if HEAD in self.weights else target.weights).matrix(HEAD), hidden)
        return g.soft_cap(logits, self.hp.softcap)

    def limit_vocab(self, count: int, target: Decoder) -> None:
        raise PairError(f"{self.title} adds to the logits of every token: its head cannot be cut, so leave `draft_vocab` out")

    def drafts(self, g: Graph, hidden: Tensor, block: Tensor, slots: int, target: Decoder, draws: Tensor | None) -> DraftOutput:
        if not self.by_position:
            return super().drafts(g, hidden, block, slots, target, draws)
        w, count = self.weights, hidden.ne[1] // slots
        logits = self.logits(g, hidden, target)
        token, ids, confidences = g.group_firsts(block, block.ne[0] // slots), [], []
        for i in range(count):
            before = g.rows(w[FROM], token)
            if self.confident:
                confidences.append(self._confidence(g, g.every_nth(hidden, count, i), before))
            after = product(g, w.matrix(TO), before)
            ids.append(self.choose(g, g.add(after, g.every_nth(logits, count, i)), draws, i * slots))
            token = g.reshape(ids[-1], slots) if ids[-1].ne[0] != slots else ids[-1]
        return DraftOutput(tuple(ids), logits, g.concat(confidences) if confidences else None)

    def _confidence(self, g: Graph, hidden: Tensor, before: Tensor) -> Tensor:
        """F32 [n_embd, S] and [rank, S] -> [1, S]."""
        x = product(g, self.weights.matrix(CONFIDENCE), g.concat([hidden, before]))
        return g.sigmoid(g.add(x, self.weights[OFFSET]) if OFFSET in self.weights else x)
