"""What a drafter is to the engine, whichever method it drafts by.

It names the hidden states of the target that it reads, writes K/V rows of its own for committed tokens (``context_rows``), and adds nodes to
the step's graph that end in ids on the device. Two kinds draft:

blocks  all drafts of a block in one pass, mask tokens behind the last token (dflash)
chains  one draft after the other, each from the one before and from the hidden state that it left (MTP, EAGLE-3)

A head may know fewer tokens than the target: ``Drafter.choose`` says which of the target's its choices are.
"""

from typing import NamedTuple

import numpy as np

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.base import AttentionInputs, KVLayer, KVShape
from ..models.decoder import Decoder
from ..models.model import Model
from ..models.weights import INDEX, Spec, Weights

TOKEN_MAP = "d2t"  # of a head's choices, which of the target's tokens each is
NAN_IS_A_TOKEN = ("cpu",)  # kinds of devices whose argmax of NaN is one: on CUDA it is -1, and the next draft would look that row up
MOST_LOGIT = 1e30  # below the largest float, which CUDA's argmax begins with


class ContextInputs(NamedTuple):
    """Rows of the target whose tokens are, or may become, committed.

    Attributes:
        tokens: I32 [T] token ids; None where only captured states are at hand.
        features: F32 [n_embd, T] for each layer of ``Drafter.captures``.
        prev_hidden: F32 [n, T / slots, slots]: what the row of the token before each one ``left``; zeros where there is none. None for drafters
            that are not ``chained``.
        positions: I32 [T], less ``Drafter.position_lag``.
        kv_rows: I64 [T] rows of the drafter's caches.
    """

    tokens: Tensor | None
    features: list[Tensor]
    prev_hidden: Tensor | None
    positions: Tensor
    kv_rows: Tensor


class ChainInputs(NamedTuple):
    """One row of each of S sequences: ``tokens`` I32 [S], ``prev_hidden`` F32 [n, S] what the token before left, ``positions`` I32 [S].

    ``kv``: the drafter's caches, or the target's for one that ``shares_kv``; ``sliding``: what layers with the target's window see of these.
    """

    tokens: Tensor
    prev_hidden: Tensor
    positions: Tensor
    attention: AttentionInputs
    kv: tuple[KVLayer, ...]
    sliding: AttentionInputs | None = None


class DraftOutput(NamedTuple):
    """Drafts of a block.

    Attributes:
        ids: I32 nodes.
        logits: F32 [tokens of the head, T] that they, or the last of them, were chosen by.
        confidence: F32 [drafts, S], between 0 and 1, what the drafter says of each: that it is right if those before it are. None where it says nothing.
    """

    ids: tuple[Tensor, ...]
    logits: Tensor
    confidence: Tensor | None = None


class Drafter(Model):
    """A drafter. ``weights`` has to be set before graphs are built.

    Attributes:
        method: llama.cpp's name of what it does, as `--spec-type` takes it.
        block_size: rows of its widest block: the last token, and what it drafts behind it.
        n_layer: layers with K/V rows of its own.
        captures: v is the input of target layer v; the target's ``n_layer`` is its last layer's output.
        chained: whether it drafts one by one, and reads the hidden state of the token before.
        shares_kv: whether a chain writes no rows, and reads the target's: all of its drafts see the committed tokens.
        draft_tokens: it drafts none but the first so many tokens of the vocabulary; 0 for all of them.
        confident: whether it says of each draft how likely that is right.
        position_lag: how far positions are behind those of the tokens, 1 where a row counts as the hidden state's; the first row is nobody's then.
    """

    method: str
    chained = False
    shares_kv = False
    draft_tokens = 0
    position_lag = 0
    confident = False

    @property
    def weights(self) -> Weights:
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def methods(self) -> "tuple[Drafter, ...]":
        """Itself; of a ``MultiDrafter`` all of them."""
        return (self,)

    @property
    def title(self) -> str:
        """What it is called where there is one line for everything."""
        return self.file.path.name

    @property
    def block_size(self) -> int:
        raise NotImplementedError

    @property
    def n_layer(self) -> int:
        raise NotImplementedError

    @property
    def captures(self) -> tuple[int, ...]:
        return ()

    @property
    def extra_nodes(self) -> int:
        """Nodes that its part of a step has beyond what layers and heads of all kinds have, at most."""
        return 0

    def groups(self) -> dict[str, tuple[str, ...]]:
        return {}

    def fused_alike(self) -> list[tuple[str, ...]]:
        return []

    def kv_shapes(self) -> list[KVShape]:
        raise NotImplementedError

    def check_pair(self, target: Decoder) -> None:
        """Raises PairError unless this drafter can read the target's hidden states and draft for it."""
        raise NotImplementedError

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        """Writes the K/V rows of ``rows``."""
        raise NotImplementedError

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        """F32 [n_embd, T] -> F32 [tokens of the head, T]."""
        raise NotImplementedError

    def choose(self, g: Graph, logits: Tensor) -> Tensor:
        """The target's tokens with the largest logits: I32 [T], or [1, T] where the head's are fewer."""
        chosen = g.argmax(clamp_nan(g, logits))
        tokens = self.weights.get(TOKEN_MAP)
        return chosen if tokens is None else g.rows(tokens, chosen)

    # -- of chains

    def carry_size(self, target: Decoder) -> int:
        """Values of what a row leaves to the next one."""
        return target.n_embd

    def carry(self, g: Graph, hidden: Tensor, features: list[Tensor], target: Decoder) -> Tensor:
        """What the target's rows leave to the next ones, F32 [carried, T]: by default ``hidden``, F32 [n_embd, T] behind its last norm."""
        return hidden

    def step(self, g: Graph, rows: ChainInputs, target: Decoder) -> tuple[Tensor, Tensor]:
        """Of the tokens of ``rows``: what the head reads, and what they leave to the next draft, F32 [carried, S]."""
        raise NotImplementedError

    # -- heads with fewer tokens than the target

    def limit_vocab(self, count: int, target: Decoder) -> None:
        """Drafts none but the first ``count`` tokens from now on: in vocabularies of merges the frequent ones come first. Before graphs are built.

        Raises:
            PairError: its head cannot be cut, or knows fewer tokens already.
        """
        if TOKEN_MAP in self.file.tensors:
            known = self.file.tensors[TOKEN_MAP].shape[0]
            raise PairError(f"{self.title} chooses among {known} tokens of its own ({TOKEN_MAP}): leave `draft_vocab` out")
        self.draft_tokens = count if count < target.n_vocab else 0

    def token_map_specs(self) -> list[Spec]:
        """The table of a head that knows fewer tokens than the target, if the file has one."""
        info = self.file.tensors.get(TOKEN_MAP)
        return [Spec(TOKEN_MAP, (info.shape[0],), INDEX)] if info is not None else []


def clamp_nan(g: Graph, logits: Tensor) -> Tensor:
    """``logits`` F32 as argmax may have them; NaN counts as some number where it would be none of the tokens. In place."""
    return logits if g.backend.device.kind in NAN_IS_A_TOKEN else g.clamp(logits, -MOST_LOGIT, MOST_LOGIT)


def check_tokens(file: GGUFFile, n_vocab: int) -> None:
    """Raises ModelError if a head of the file's chooses tokens that the target does not have."""
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
