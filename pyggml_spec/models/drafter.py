"""What a drafter is to the engine, whichever method it drafts by.

It names the hidden states of the target that it reads, writes K/V rows of its own for committed tokens (``context_rows``), and adds nodes to
the step's graph that end in ids on the device. Two kinds draft:

blocks  all drafts of a block in one pass, mask tokens behind the pending one (dflash)
chains  one draft after the other, each from the one before and from the hidden state that it left (MTP)
"""

from typing import NamedTuple

from ..ggml.graph import Graph
from ..ggml.library import Tensor
from .base import KVLayer, KVShape, Target
from .model import Model
from .weights import Weights


class ContextRows(NamedTuple):
    """Rows of the target whose tokens are, or may become, committed.

    Attributes:
        tokens: I32 [T] token ids; None where only captured states are at hand.
        features: F32 [n_embd, T] for each layer of ``Drafter.captures``.
        before: F32 [n_embd, T / slots, slots]: of each row the target's last normalised hidden state of the token before it; zeros where there
            is none. None for drafters that are not ``chained``.
        positions: I32 [T].
        kv_rows: I64 [T] rows of the drafter's caches.
    """

    tokens: Tensor | None
    features: list[Tensor]
    before: Tensor | None
    positions: Tensor
    kv_rows: Tensor


class Drafter(Model):
    """A drafter. ``weights`` has to be set before graphs are built.

    Attributes:
        method: llama.cpp's name of what it does, as `--spec-type` takes it.
        block_size: rows of its widest block: the pending token, and what it drafts behind it.
        n_layer: layers with K/V rows of its own.
        captures: v is the input of target layer v; the target's ``n_layer`` is its last layer's output.
        chained: whether it drafts one by one, and reads the hidden state of the token before.
        late: whether context rows of plain tokens may wait, so that many are computed at once: they need captured states only.
    """

    method: str
    chained = False
    late = False

    @property
    def weights(self) -> Weights:
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights

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

    def groups(self) -> dict[str, tuple[str, ...]]:
        return {}

    def fused_alike(self) -> list[tuple[str, ...]]:
        return []

    def kv_shapes(self) -> list[KVShape]:
        raise NotImplementedError

    def check_pair(self, target: Target) -> None:
        """Raises PairError unless this drafter can read the target's hidden states and draft for it."""
        raise NotImplementedError

    def context_rows(self, g: Graph, rows: ContextRows, kv: tuple[KVLayer, ...], target: Target) -> None:
        """Writes the K/V rows of ``rows``."""
        raise NotImplementedError

    def logits(self, g: Graph, hidden: Tensor, target: Target) -> Tensor:
        """F32 [n_embd, T] -> F32 [n_vocab, T]."""
        raise NotImplementedError
