"""Graphs of a target whose layers are split over devices: a chain of parts, in which the layers change devices.

Drafts are on the last device, then come the layers from the first device on, then what drafters keep of them, on the last again. A chunk that computes
the first device's layers with streamed copies of their weights embeds there and does everything else on the second.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from ..cache.kv import KVCache
from ..cache.recurrent import DeltaInputs
from ..engine.batch import GraphKey
from ..engine.graphs import Done, GraphBuilder, Inputs
from ..engine.resources import Resources
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..ggml.step_io import StepFields
from ..models.base import RecurrentLayers, TargetInputs
from .chain import ChainGraph
from .offload_cache import OffloadCache


class BothRows(NamedTuple):
    """The states of offloaded layers, which are the ``first`` so many, and those of the others."""

    offloaded: DeltaInputs
    first: int
    own: DeltaInputs

    def layer(self, g: Graph, index: int, *tensors: Any, **more: Any) -> Tensor:
        return (self.offloaded if index < self.first else self.own).layer(g, index, *tensors, **more)


class ChainBuilder(GraphBuilder):
    """Attributes:
    offload: caches of the first device's layers on the second one, where this chunk computes them there.
    """

    one_part = False

    def __init__(self, resources: Resources, key: GraphKey, g: Graph, f: StepFields) -> None:
        super().__init__(resources, key, g, f)
        self.chain, self.segments = cast(ChainGraph, g), resources.segments
        devices = cast(Any, resources.devices)
        self.offload: OffloadCache | None = devices.offload if key.streamed else None

    def enter(self, segment: int) -> None:
        self.chain.enter(segment % len(self.segments))

    def bring(self, tensor: Tensor, part: int) -> Tensor:
        return self.chain.bring(tensor, part)

    def cache_layers(self, kv: KVCache) -> list:
        moved = self.offload.kv.layers if self.offload is not None and kv is self.kv else ()
        return [*moved, *kv.layers[len(moved) :]]

    def local_caches(self, kv: KVCache) -> list[int]:
        if kv is not self.kv:
            return super().local_caches(kv)
        segment, before = self.segments[self.g.segment], self.target.caches_before
        moved = len(self.offload.kv.layers) if self.offload is not None else 0
        return [*range(moved), *range(before(segment.first)[0], before(segment.end)[0])]

    def chunk_states(self, take: Tensor | None = None) -> RecurrentLayers | None:
        own = super().chunk_states(take)
        states = self.offload.delta if self.offload is not None else None
        if states is None or own is None:
            return own
        states.begin(self.g, self.key.slots, 0, 0, None, None)
        own = cast(DeltaInputs, own)
        there = DeltaInputs(states, 0, False, own.on, own.last, own.take)
        return BothRows(there, states.shape.layers, own)

    def forward(self, inputs: Callable[[], Inputs], now: Inputs | None = None, capture: tuple[int, ...] | None = None) -> Done:
        capture = self.captures if capture is None else capture
        chain, here = self.chain, [self._embedding_only() if self.offload is not None else inputs()]
        parts = [chain.part]  # of each segment's layers
        firsts, ends = [segment.first for segment in self.segments], [segment.end for segment in self.segments]
        if self.offload is not None:
            firsts[1] = ends[0] = 0

        def rows() -> TargetInputs:
            return TargetInputs(tokens=here[-1].tokens, delta=here[-1].recurrent, cross=cross, **here[-1].rows)

        def cross(layer: int, tensors: tuple) -> tuple[TargetInputs, tuple] | None:
            crossed = None
            if len(parts) < len(self.segments) and layer == firsts[len(parts)]:
                chain.enter(len(parts))
                parts.append(chain.part)
                here.append(inputs())
                tensors = tuple(x if x is None else chain.bring(x, parts[-2]) for x in tensors)
                crossed = rows(), tensors
            if self.offload is not None:
                self._streamed(layer, tensors[0])
            return crossed

        hidden, features = self.target.forward(self.g, rows(), capture)
        made = [next((i for i, end in enumerate(ends) if v < end), len(ends) - 1) for v in capture]
        return Done(hidden, [chain.bring(x, parts[i]) for x, i in zip(features, made, strict=True)], here[-1])

    def _embedding_only(self) -> Inputs:
        """Of the first device, where it computes no layer."""
        tokens = self.f.tokens(self.key.total)
        nothing = dict.fromkeys(("positions", "kv_rows", "mask"), tokens) | {"kv_bucket": 0, "sliding": None, "kv": ()}
        return Inputs(nothing, None, None, tokens)

    def _streamed(self, layer: int, x: Tensor) -> None:
        """Nodes of ``layer`` come next, after its weights have arrived if they are copies, and the layer before is done with its own."""
        weights: Any = self.target.weights
        (stream,), end = weights.streams, self.segments[1].first
        if 0 < layer <= end:
            self.g.expand(x)
            stream.end(self.g, layer - 1)
        if layer < end:
            stream.begin(self.g, layer)
            weights.visit()
        elif layer == end:
            weights.enter(1)
