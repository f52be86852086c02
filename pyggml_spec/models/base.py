"""Shapes of caches, and the inputs of target graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from ..ggml.graph import Graph
from ..ggml.library import Tensor, lib


class Recurrence(IntEnum):
    """What a recurrent layer does with the rows of its convolution."""

    DELTA = lib.PGS_DELTA_RULE  # gated delta rule, a decay per head
    KDA = lib.PGS_KDA  # the same, a decay per row of the state
    SCAN = lib.PGS_SCAN  # Mamba-2
    NONE = lib.PGS_CONVOLUTION


@dataclass(frozen=True)
class RecurrentShape:
    """Geometry of ``layers`` recurrent layers: ``n_head_v`` states [state_size, head_size]; ``conv`` taps; ``n_head_k`` heads of q and k.

    The convolution has n_head_v * head_size channels of v (x of Mamba-2), and n_head_k * state_size each of q and k (C and B of Mamba-2, by groups).
    v-head h uses q/k-head h % n_head_k, or h // (n_head_v / n_head_k) if ``grouped``. Without a recurrence n_head_k and n_head_v are 1, state_size 0.
    """

    layers: int
    head_size: int
    n_head_k: int
    n_head_v: int
    conv: int
    grouped: bool = False
    state_size: int = 0
    recurrence: Recurrence = Recurrence.DELTA

    @property
    def repeat(self) -> int:
        """Repetitions of each q/k-head."""
        return self.n_head_v // self.n_head_k if self.grouped else 1

    @property
    def channels(self) -> int:
        return 2 * self.n_head_k * self.state_size + self.n_head_v * self.head_size


@dataclass(frozen=True)
class KVShape:
    """K/V rows of an attention layer: ``n_head_kv`` heads of ``size`` values; ``sliding``: limited to the model's window.

    ``latent``: V is the first ``latent`` values of K's row (MLA); 0 for separate rows. ``index``: size of an indexer's row, shared by
    ``index_heads`` heads; 0 without an indexer. ``other_v``: values per head of separate V rows, 0 for ``size``. ``exact``: F32 rows, which
    attention does not read. ``pooled``: an indexer's row is a key and a gate of half its size, and pools are scored. ``multiplied``: products of
    matrices are an indexer's scores, not a kernel of its own. ``queries``: heads of q for each head, 0 where nobody asks.
    """

    n_head_kv: int
    size: int
    sliding: bool = False
    latent: int = 0
    index: int = 0
    index_heads: int = 0
    other_v: int = 0
    exact: bool = False
    pooled: bool = False
    multiplied: bool = False
    queries: int = 0

    @property
    def size_v(self) -> int:
        """Values per head of V."""
        return self.latent or self.other_v or self.size


class KVLayer(NamedTuple):
    """Cache tensors of a layer, [size * n_head_kv, rows], with the rotations of K and V (None: unrotated).

    ``v`` of a latent layer is a view of ``k``. ``indexer``: the indexer's rows [index, rows] with their rotation, or None.
    """

    k: Tensor
    v: Tensor
    rotation_k: Tensor | None = None
    rotation_v: Tensor | None = None
    indexer: Tensor | None = None
    rotation_indexer: Tensor | None = None

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Tensors with memory of their own."""
        attended = (self.k,) if self.v.view_src == self.k else (self.k, self.v)
        return attended if self.indexer is None else (*attended, self.indexer)


class PictureInputs(NamedTuple):
    """Rows that pictures have in place of tokens.

    Attributes:
        rows: F32 [n_embd * (1 + deepstack), T], zero for tokens: what is in place of the embedding, and what is added to the outputs of the first layers.
        is_token: F32 [1, T], 1 for tokens and 0 for rows of pictures.
    """

    rows: Tensor
    is_token: Tensor

    def mixed(self, g: Graph, x: Tensor) -> Tensor:
        """The embedding of tokens F32 [n_embd, T] with the rows of pictures in it."""
        return g.add(g.mul(x, self.is_token), self.part(g, 0, x.ne[0]))

    def part(self, g: Graph, i: int, n_embd: int) -> Tensor:
        """What layer i - 1 adds, of 0 the embedding; F32 [n_embd, T]."""
        return g.slice(self.rows, 0, i * n_embd, n_embd)


# the recurrent state as input of a graph (``cache.recurrent.RecurrentInputs``), called with the graph, the index of the state, and tensors as in
# pgs_delta_inputs: adds a layer and returns F32 [head_size, H_v, T], without a recurrence [channels, T]
RecurrentLayers = Callable[..., Tensor]


@dataclass(frozen=True)
class AttentionInputs:
    """Of one kind of layers: ``kv_rows`` I64 [T], the cache rows to write K and V to; ``mask`` F16 [kv_bucket, T], 0 where visible and -inf elsewhere;
    ``kv_bucket``, the cache rows that attention reads."""

    kv_rows: Tensor
    mask: Tensor
    kv_bucket: int


@dataclass(frozen=True)
class TargetInputs(AttentionInputs):
    """Inputs of a target graph, those of full-attention layers included.

    Attributes:
        tokens: I32 [T] token ids.
        positions: I32 [T] absolute positions, or [4 T] by axis.
        sliding: of sliding-window layers; None without any.
        kv: a KVLayer per attention layer.
        delta: the recurrent state, or None.
        n_ctx: tokens of context, a multiple of the smallest KV bucket; 0 in graphs of drafters.
        q_scale: F32 [1, 1, T] factors of queries by position, or None.
        pictures: rows of pictures among the tokens, or None.
        cross: of a split model: called by ``at`` for each layer.
    """

    tokens: Tensor
    positions: Tensor
    sliding: AttentionInputs | None
    kv: tuple[KVLayer, ...]
    delta: RecurrentLayers | None
    n_ctx: int = 0
    q_scale: Tensor | None = None
    pictures: PictureInputs | None = None
    cross: Callable[[int, tuple], tuple["TargetInputs", tuple] | None] | None = None

    def at(self, layer: int, *tensors: Any) -> tuple[Any, ...]:
        """The inputs and ``tensors`` (possibly None) on the device of ``layer``, copied there if needed; call it before each layer."""
        crossed = self.cross(layer, tensors) if self.cross is not None else None
        return (self, *tensors) if crossed is None else (crossed[0], *crossed[1])
