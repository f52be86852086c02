"""Interface of drafters.

A drafter names the target's hidden states that it reads, writes its own K/V rows for committed tokens (``context_rows``), and adds nodes to the
step's graph that compute draft ids on the device. Three kinds:

blocks  all drafts of a block in one pass, from mask tokens after the last token (dflash)
chains  one draft after another, each from the previous token and its hidden state (MTP, EAGLE-3)
models  one draft after another by a whole small model, which reads tokens alone (draft-simple)

A head may have a reduced vocabulary, which ``Drafter.choose`` maps to the target's tokens.
"""

from typing import NamedTuple

import numpy as np

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.base import AttentionInputs, KVLayer, KVShape, PictureInputs, RecurrentLayers
from ..models.decoder import Decoder
from ..models.model import Model
from ..models.weights import INDEX, Spec, Weights

TOKEN_MAP = "d2t"  # tensor: the target's token of each output of a reduced head
NAN_IS_A_TOKEN = ("cpu",)  # device kinds whose argmax of NaN is a valid index; CUDA gives -1, an invalid row
MOST_LOGIT = 1e30  # below the initial value of CUDA's argmax


class ContextInputs(NamedTuple):
    """Target rows that are, or may become, committed.

    Attributes:
        tokens: I32 [T] token ids; None where only hidden states are known.
        features: captured hidden states, F32 [n_embd, T] for each of ``Drafter.captures``.
        prev_hidden: F32 [n, T / slots, slots]: the ``carry`` of each previous token, zeros at the start; None unless ``chained``.
        positions: I32 [T], minus ``Drafter.position_lag``.
        kv_rows: I64 [T] rows of the drafter's caches.
        recurrent: states of a whole model's recurrent layers, which are written directly.
        pictures: rows of pictures among the tokens, or None.
        attention, sliding: what the layers of a whole model read, or of a chain with ``rows_read_rows``; None for others.
        sliding_rows: I64 [T] as ``kv_rows``, in the ring of sliding layers; None without a ring.
    """

    tokens: Tensor | None
    features: list[Tensor]
    prev_hidden: Tensor | None
    positions: Tensor
    kv_rows: Tensor
    attention: AttentionInputs | None = None
    sliding: AttentionInputs | None = None
    recurrent: RecurrentLayers | None = None
    pictures: PictureInputs | None = None
    sliding_rows: Tensor | None = None


class ChainInputs(NamedTuple):
    """One row of each of S sequences: ``tokens`` I32 [S], ``prev_hidden`` F32 [n, S] carried from the previous token, ``positions`` I32 [S]; all drafts'
    rows, one sequence after the other, where they are one pass.

    ``kv``: the drafter's caches, or the target's with ``shares_kv``; ``sliding``: inputs of layers with the target's window. ``number``: which of
    ``drafts`` it is.
    """

    tokens: Tensor
    prev_hidden: Tensor
    positions: Tensor
    attention: AttentionInputs
    kv: tuple[KVLayer, ...]
    sliding: AttentionInputs | None = None
    number: int = 0
    drafts: int = 1


class DraftOutput(NamedTuple):
    """Drafts of a block.

    Attributes:
        ids: I32 nodes.
        logits: F32 [head outputs, T] of the drafts, or of the last one.
        confidence: F32 [drafts, S] in [0, 1]: probability of acceptance given that the previous drafts are accepted; None without an estimate.
    """

    ids: tuple[Tensor, ...]
    logits: Tensor
    confidence: Tensor | None = None


class Drafter(Model):
    """A drafter. ``weights`` has to be set before graphs are built.

    Attributes:
        method: llama.cpp's name, as `--spec-type` takes it.
        block_size: rows of the widest block: the last token and its drafts.
        n_layer: layers with K/V rows of their own.
        captures: target layers whose input it reads; ``n_layer`` is the last layer's output.
        chained: drafts one by one, each from the previous hidden state.
        whole_model: reads tokens alone, and drafts one by one; its K/V rows of drafts stay.
        window: the widest one of its sliding layers, 0 for none.
        shares_kv: a chain that reads the target's K/V and writes none; all drafts see committed tokens only.
        parallel: a chain whose drafts are one pass: every row after the first has ``masked`` in place of a token and its hidden state.
        rows_read_rows: its K/V rows depend on those of earlier tokens, because it has several layers.
        draft_tokens: drafts only the first tokens of the vocabulary; 0 for all.
        confident: estimates the confidence of each draft.
        position_lag: offset of its positions from the tokens' (1: positions of the hidden states; the first row is unused).
    """

    weights: Weights
    method: str
    block_size: int
    n_layer: int
    captures: tuple[int, ...] = ()
    chained = False
    whole_model = False
    window = 0
    shares_kv = False
    parallel = False
    rows_read_rows = False
    draft_tokens = 0
    position_lag = 0
    confident = False

    @property
    def methods(self) -> "tuple[Drafter, ...]":
        """Itself; of a ``MultiDrafter`` all drafters."""
        return (self,)

    @property
    def one_by_one(self) -> bool:
        """Whether each draft takes a pass of its own."""
        return self.whole_model or (self.chained and not self.parallel)

    @property
    def title(self) -> str:
        """Display name."""
        return self.file.path.name

    @property
    def extra_nodes(self) -> int:
        """Upper bound of nodes beyond those of layers and heads."""
        return 0

    def groups(self) -> dict[str, tuple[str, ...]]:
        return {}

    def fused_alike(self) -> list[tuple[str, ...]]:
        return []

    def kv_shapes(self) -> list[KVShape]:
        """Of its layers, ``sliding`` where ``context_rows`` writes ``sliding_rows``."""
        raise NotImplementedError

    def check_pair(self, target: Decoder) -> None:
        """Raises PairError unless it can draft for this target."""
        raise NotImplementedError

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        """Writes the K/V rows of ``rows``."""
        raise NotImplementedError

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        """F32 [n_embd, T] -> F32 [head outputs, T]."""
        raise NotImplementedError

    def choose(self, g: Graph, logits: Tensor, draws: Tensor | None = None, first: int = 0) -> Tensor:
        """The target's tokens with the largest logits, or drawn as of ``Graph.draw``: I32 [T], or [1, T] of a reduced head."""
        tokens = self.weights.get(TOKEN_MAP)
        if draws is None:
            chosen = g.argmax(clamp_nan(g, logits))
        else:
            chosen = g.draw(logits, draws, first, g.reshape(tokens, logits.ne[0]) if tokens is not None else None)
        return chosen if tokens is None else g.rows(tokens, chosen)

    # -- chains

    def carry_size(self, target: Decoder) -> int:
        """Values per row that are carried to the next draft."""
        return target.n_embd

    def carry(self, g: Graph, hidden: Tensor, features: list[Tensor], target: Decoder) -> Tensor:
        """The carry of the target's rows, F32 [carry_size, T]; by default ``hidden``, F32 [n_embd, T], normalised."""
        return hidden

    def step(self, g: Graph, rows: ChainInputs, target: Decoder) -> tuple[Tensor, Tensor]:
        """Input of the head for the tokens of ``rows``, and their carry, F32 [carry_size, S]."""
        raise NotImplementedError

    def masked(self) -> tuple[int, Tensor]:
        """The token, and the carry F32 [carry_size], of rows whose own are not known, if ``parallel``."""
        raise NotImplementedError

    def draft_logits(self, g: Graph, hidden: Tensor, target: Decoder, number: int) -> Tensor:
        """``logits`` of the draft ``number``, where layers have heads of their own."""
        return self.logits(g, hidden, target)

    # -- reduced vocabularies

    def limit_vocab(self, count: int, target: Decoder) -> None:
        """Drafts only the first ``count`` tokens (BPE vocabularies begin with frequent ones); before graphs are built.

        Raises:
            PairError: its head has a reduced vocabulary already.
        """
        if TOKEN_MAP in self.file.tensors:
            known = self.file.tensors[TOKEN_MAP].shape[0]
            raise PairError(f"{self.title} has a reduced vocabulary of {known} tokens ({TOKEN_MAP}): leave `draft_vocab` out")
        self.draft_tokens = count if count < target.n_vocab else 0

    def token_map_specs(self) -> list[Spec]:
        """The token map of a reduced head, if the file has one."""
        info = self.file.tensors.get(TOKEN_MAP)
        return [Spec(TOKEN_MAP, (info.shape[0],), INDEX)] if info is not None else []


def clamp_nan(g: Graph, logits: Tensor) -> Tensor:
    """``logits`` F32 for argmax, with NaN clamped where argmax of NaN is no token. In place."""
    return logits if g.backend.device.kind in NAN_IS_A_TOKEN else g.clamp(logits, -MOST_LOGIT, MOST_LOGIT)


def check_tokens(file: GGUFFile, n_vocab: int) -> None:
    """Raises ModelError if the token map names tokens that the target does not have."""
    info = file.tensors.get(TOKEN_MAP)
    if info is None:
        return
    if info.type_name not in ("i64", "i32") or len(info.shape) != 1:
        raise ModelError(f"{file.path}: {TOKEN_MAP!r} is {info.type_name} {list(info.shape)}, but it has to be a list of token ids (I64)")
    with file.read(TOKEN_MAP) as data:
        ids = np.frombuffer(data, np.int64 if info.type_name == "i64" else np.int32)
        low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= n_vocab:
        raise ModelError(f"{file.path}: {TOKEN_MAP!r} names the token {low if low < 0 else high}, but the target has {n_vocab}")
