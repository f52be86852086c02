"""What a target and a drafter are to the engine.

A target's ``forward`` adds its layers to a graph and returns the last normalised hidden state together with the captured layer outputs;
a drafter adds a denoising block, or the K/V rows of freshly captured features. Neither knows about steps, cursors or buffers: all of
that comes in through ``TargetInputs`` and ``BlockInputs``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .weights import Spec, Weights


@dataclass(frozen=True)
class DeltaShape:
    """Delta-net geometry: ``layers`` of ``n_head_v`` states [head_size, head_size]; ``conv`` taps; k and q have ``n_head_k`` heads.

    A v-head h goes with head h % n_head_k of q and k, or with h // (n_head_v / n_head_k) where ``grouped``.
    """

    layers: int
    head_size: int
    n_head_k: int
    n_head_v: int
    conv: int
    grouped: bool = False

    @property
    def repeat(self) -> int:
        """How often each head of q and k is there for the recurrence, which takes them in turn."""
        return self.n_head_v // self.n_head_k if self.grouped else 1

    @property
    def channels(self) -> int:
        return self.head_size * (2 * self.n_head_k + self.n_head_v)


@dataclass(frozen=True)
class KVShape:
    """K/V rows of one attention layer: ``n_head_kv`` heads of ``size`` values each; ``sliding`` layers see the target's window only.

    ``latent``: V is the first so many values of the one row that K is, as in multi-head latent attention; 0 where V has rows of its own.
    ``index``: values of a row that says which positions are attended to, one for all of ``index_heads`` heads; 0 for layers without an indexer.
    """

    n_head_kv: int
    size: int
    sliding: bool = False
    latent: int = 0
    index: int = 0
    index_heads: int = 0


class KVLayer(NamedTuple):
    """The rows of one layer: cache tensors [size * n_head_kv, rows], and what K and V are rotated with (None: stored as they are).

    Of a latent layer ``v`` is a view of ``k``. ``indexer``: the indexer's rows [index, rows] and what they are rotated with, None without an indexer.
    """

    k: Tensor
    v: Tensor
    rotation_k: Tensor | None = None
    rotation_v: Tensor | None = None
    indexer: Tensor | None = None
    rotation_indexer: Tensor | None = None

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that hold its rows."""
        attended = (self.k,) if self.v.view_src == self.k else (self.k, self.v)
        return attended if self.indexer is None else (*attended, self.indexer)


class DeltaLayers(Protocol):
    """The recurrent state as a graph under construction sees it (``cache.recurrent``)."""

    def layer(
        self, g: Graph, index: int, proj: Tensor, beta: Tensor, alpha: Tensor, conv_w: Tensor, dt: Tensor, a: Tensor, eps: float
    ) -> Tensor:
        """One delta-net layer over the graph's rows; returns F32 [S, H_v, T]."""


@dataclass(frozen=True)
class AttentionInputs:
    """What the layers of one kind write and see: ``kv_rows``, ``mask`` and ``kv_bucket`` as in ``TargetInputs``."""

    kv_rows: Tensor
    mask: Tensor
    kv_bucket: int


@dataclass(frozen=True)
class TargetInputs:
    """The rows of one target graph.

    Attributes:
        tokens: I32 [T] token ids.
        positions: I32 [T] absolute positions.
        kv_rows: I64 [T] cache rows that K and V are written to.
        mask: F16 [kv_bucket, T], 0 where visible and -inf elsewhere.
        kv_bucket: cache rows that attention reads.
        sliding: rows, mask and kv_bucket of the layers with a sliding window; None for models without one.
        kv: a KVLayer per attention layer, in layer order.
        delta: the recurrent state, or None for models without one.
        cross: where the layers are split over several devices, what ``at`` does at the first layer of another one.
    """

    tokens: Tensor
    positions: Tensor
    kv_rows: Tensor
    mask: Tensor
    kv_bucket: int
    sliding: AttentionInputs | None
    kv: tuple[KVLayer, ...]
    delta: DeltaLayers | None
    cross: Callable[[int, tuple], tuple["TargetInputs", tuple] | None] | None = None

    def at(self, layer: int, *tensors: Any) -> tuple[Any, ...]:
        """The rows, and the ``tensors`` that are carried from layer to layer, where ``layer`` is computed: call it before each layer.

        If that is on another device, nodes are added there from now on. A tensor may be None.
        """
        crossed = self.cross(layer, tensors) if self.cross is not None else None
        return (self, *tensors) if crossed is None else (crossed[0], *crossed[1])

    @property
    def sliding_inputs(self) -> AttentionInputs:
        """``sliding`` of a model that has such layers."""
        assert self.sliding is not None
        return self.sliding


class Target(Protocol):
    """An architecture that can be a target. Construct with an open GGUF; attach weights before ``forward``."""

    arch: str
    file: GGUFFile
    weights: Weights
    n_embd: int
    n_layer: int
    n_vocab: int
    context_length: int
    window: int  # positions that the sliding layers see, 0 for none
    softcap: float  # of the logits, applied by ``logits``; 0 for none
    ggml_attention: str  # why ggml attends where native kernels run, empty where they do
    embedding_scale: float  # what the target multiplies ``embed`` with; a drafter that borrows the embedding does too

    @property
    def rope(self) -> Any:
        """That of the first layer that sees everything and is rotated; None where there is none."""

    def specs(self) -> list[Spec]: ...
    def unused_in_file(self) -> dict[str, str]: ...
    def groups(self) -> dict[str, tuple[str, ...]]: ...
    def kv_shapes(self) -> list[KVShape]: ...
    def fused_alike(self) -> list[tuple[str, ...]]: ...
    def delta_shape(self) -> DeltaShape | None: ...
    def delta_row(self, first: int = 0) -> int: ...
    def caches_before(self, layer: int) -> tuple[int, int]:
        """How many K/V caches and how many recurrent states the layers before ``layer`` have."""

    def last_cut(self) -> int:
        """The last layer that may be the first one on another device: some layers read what earlier ones wrote."""

    def embed(self, g: Graph, tokens: Tensor) -> Tensor: ...
    def forward(self, g: Graph, rows: TargetInputs, capture: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]: ...
    def logits(self, g: Graph, hidden: Tensor, tokens: int = 0) -> Tensor: ...
