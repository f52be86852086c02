"""Steps over several devices: what a runner needs on top of one device (``engine.devices``).

A step is a chain of graphs (chain.py). Drafts are on the last device, then come the layers from the first device on, then what drafters keep of them, on
the last again. A chunk that computes the first device's layers with streamed copies of their weights embeds there and does everything else on the
second. Chunks of a prompt are launched one after another without waiting, so that the first device computes the next
chunk while the others finish this one. Two micro-batches can be in flight together: while one is on the second device, the other is on the first.

    launch(A)  launch(B)  land(A)  launch(A)  land(B)  launch(B)  ...

Wide chunks compute layers of the host with streamed copies of their weights (offload.py).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

from ..cache.kv import KVCache
from ..cache.recurrent import RecurrentInputs, RecurrentSegment, RecurrentState
from ..cache.slots import SlotRange, covering
from ..cache.snapshot import SequenceMemory
from ..checks import whole
from ..engine.batch import Batch, BatchItem, Draft, GraphKey, Prefill, StepOutput
from ..engine.devices import GROUPS, Devices, Segment
from ..engine.graph_cache import Step
from ..engine.graph_prebuilder import GraphPrebuilder
from ..engine.graphs import Done, GraphBuilder, Inputs, StepGraphs
from ..engine.options import MOST_SLOTS
from ..engine.resources import Resources
from ..engine.runner import Meanwhile, ModelRunner
from ..errors import DeviceError, EngineError
from ..ggml.graph import Graph, GraphAllocator
from ..ggml.library import Tensor
from ..ggml.step_io import StepFields, StepIO, StepTimes
from ..models.base import RecurrentLayers, TargetInputs
from .chain import ChainFields, ChainGraph, DeviceQueues
from .offload import OffloadCache


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
        offloaded, first = RecurrentInputs(states, 0, False, *cast(RecurrentInputs, own).inputs), states.shape.layers
        return lambda g, index, *tensors, **more: (offloaded if index < first else own)(g, index, *tensors, **more)

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
        nothing: dict = dict.fromkeys(("positions", "kv_rows", "mask"), tokens) | {"kv_bucket": 0, "sliding": None, "kv": ()}
        nothing["pictures"] = self._pictures() if self.key.pictures else None
        return Inputs(nothing, None, None, tokens)

    def _streamed(self, layer: int, x: Tensor) -> None:
        """Nodes of ``layer`` come next, after its weights have arrived if they are copies, and the layer before is done with its own."""
        weights: Any = self.target.weights
        (stream,), end = weights.streams, self.segments[1].first
        if 0 < layer <= end:
            self.g.expand(x)
            stream.cut(self.g, layer - 1, False)
        if layer < end:
            stream.cut(self.g, layer, True)
            weights.visit()
        elif layer == end:
            weights.enter(1)


class LaneRunner(ModelRunner):
    """Runs the steps of one lane over the caches of another runner, from which it borrows all but its graphs. ``flight``: its step in flight.

    A lane is a thread, a step buffer and graphs of its own (csrc/step_lanes.c). Its micro-batch covers half of an aligned range of slots, so that no
    step writes what the other one reads.
    """

    flight: tuple[Step, Batch] | None = None

    def __init__(self, runner: ModelRunner, graphs: StepGraphs) -> None:
        self.__dict__.update(runner.__dict__)
        self.graphs, self.prebuilder = graphs, GraphPrebuilder(runner.resources, graphs)

    def launch(self, batch: Batch) -> None:
        """Begins a pass of plain tokens or blocks; ``land`` waits for it."""
        step = self.graph_of(batch)
        self.flight = step, batch
        self.devices.flying.update(dict.fromkeys(batch.slots.slots, step))
        try:
            step.fields.launch()
            if self.prebuilder.overlaps:
                self.prebuilder.while_computing(batch)
        except BaseException:  # or else nothing would land it
            self.abandon()
            raise

    def land(self) -> dict[int, StepOutput]:
        """Waits for the pass; its outputs."""
        assert self.flight is not None
        step, batch = self.flight
        try:
            times = step.fields.wait()
        finally:
            self._forget()
        self.resources.last = step
        step.read()
        return self.after(step, batch, times)

    def abandon(self) -> None:
        """Waits for the pass, if any, and drops its output."""
        if self.flight is not None:
            with suppress(DeviceError, EngineError):
                self.flight[0].fields.wait()
            self._forget()

    def _forget(self) -> None:
        assert self.flight is not None
        for slot in self.flight[1].slots.slots:
            self.devices.flying.pop(slot, None)
        self.flight = None


def half_of(slots: int) -> int:
    """The most slots that a micro-batch of a runner with so many can have."""
    return 1 << max(0, (slots - 1).bit_length() - 1)


def halves(slots: Collection[int], n_slots: int) -> tuple[list[int], list[int]]:
    """Two groups of at least two of a runner's slots, whose steps cover no slot of the other group."""
    low, high, size = min(slots), max(slots), 1
    while low // size != high // size:
        size *= 2
    middle = low // size * size + size // 2
    groups = sorted(slot for slot in slots if slot < middle), sorted(slot for slot in slots if slot >= middle)
    assert not set(covering(groups[0], n_slots).slots) & set(covering(groups[1], n_slots).slots)
    return groups


class MultiDevice(Devices):
    """Of one runner.

    Attributes:
        queues: which step may use each device now; measures what each did.
        offload: K/V rows and states of the first device's layers on the second one, which computes chunks with copies of their weights; None where it
            does not.
        lanes: the runners of micro-batches.
    """

    builder = ChainBuilder
    queues: DeviceQueues
    runner: ModelRunner
    resources: Resources

    def __init__(self, segments: tuple[Segment, ...], weights: Any) -> None:
        super().__init__(segments)
        self._weights = weights
        self.flying: dict[int, Step] = {}
        self.graphs: list[StepGraphs] = []
        self.lanes: list[LaneRunner] = []
        self.offload: OffloadCache | None = None

    def open(self, resources: Resources) -> None:
        self.resources = resources
        self.offload = self._offload_cache()
        self.queues = resources.own(DeviceQueues(resources.io))

    def attach(self, runner: ModelRunner) -> None:
        self.runner, r, slots = runner, self.resources, len(runner.slots)
        # experts in host memory are computed by one step at a time
        if not r.options.groups or len(self.segments) < 2 or slots < GROUPS or self._weights.expert_counts() is not None:
            return
        for _ in range(GROUPS):
            graphs = r.own(StepGraphs(r, r.new_io(half_of(slots), self.queues.handle), half_of(slots)))
            self.graphs.append(graphs)
            self.lanes.append(LaneRunner(runner, graphs))
        for graphs in self.graphs:
            graphs.plan_decoding()

    def new_graph(self, io: StepIO, role_of: Callable[[int, int], GraphAllocator]) -> tuple[Graph, StepFields]:
        chain = ChainGraph(io, role_of, self._weights.enter)
        return chain, ChainFields(io, chain)

    # -- steps in flight

    def synchronize(self) -> None:
        if self.under_way is not None:
            step, self.under_way = self.under_way, None
            step.fields.wait()
        for lane in self.lanes if self.flying else ():
            if lane.flight is not None:
                lane.flight[0].fields.wait()

    def abandon(self) -> None:
        for lane in self.lanes:
            lane.abandon()

    def check_landed(self, slots: SlotRange) -> None:
        for slot in slots.slots if self.flying else ():
            if slot in self.flying:
                raise EngineError(f"the step of slot {slot} is still under way: land its group first")

    @contextmanager
    def apart(self) -> Iterator[DeviceQueues]:
        self.synchronize()
        with self.queues.lane(self.resources.io):
            yield self.queues

    # -- micro-batches

    @property
    def groups(self) -> int:  # type: ignore[override]
        return len(self.lanes)

    def launch(self, group: int, items: Mapping[int, BatchItem]) -> None:
        """Begins a pass of plain tokens and blocks over the slots of ``items``, none of them of another group; follow with ``land``.

        Until then nothing can be done with these slots, and no block of another width can be computed.

        Raises:
            EngineError: as of ``forward``; an unknown group, or one that is in flight, prompts, slots that another group's step covers, drafts that the
                host reads.
        """
        if not 0 <= whole(group, "the group", 0, MOST_SLOTS) < len(self.lanes) or self.lanes[group].flight is not None:
            raise EngineError(f"group {group} cannot begin a step: it is under way, or there is none of this number")
        if any(isinstance(item, Prefill) or (isinstance(item, Draft) and item.proposes) for item in items.values()):
            raise EngineError("prompts, and drafts that are looked at, are no group's work: use step")
        if self.under_way is not None:
            self.synchronize()
        batch = Batch(dict(items))
        self.lanes[group].choose_graph(batch)
        self.check_landed(batch.slots)
        self.lanes[group].launch(batch)

    def land(self, group: int) -> dict[int, StepOutput]:
        """Waits for a group's step; outputs as of ``forward``."""
        if not 0 <= group < len(self.lanes) or self.lanes[group].flight is None:
            raise EngineError(f"group {group} has no step under way: launch one")
        return self.lanes[group].land()

    def lay_out(self, width: int) -> None:
        """Makes the states of all slots ready for blocks of ``width`` rows: the first such block is too late for that while another group is in flight."""
        runner = self.runner
        self.check_landed(runner.graphs.every)
        runner.state.lay_out(runner.graphs.width_for(whole(width, "the block width", 2, runner.options.width)))

    # -- chunks of prompts

    def run_chunk(self, runner: ModelRunner, step: Step, batch: Batch, meanwhile: Meanwhile) -> tuple[StepTimes, bool]:
        """A chunk that another one follows is not waited for, and nothing of it is read; unless rows of offloaded layers have to go home."""
        more = all(isinstance(item, Prefill) and item.more for item in batch.computed.values())
        if self.offload is None or not batch.streamed:
            return (self._run_ahead(step, meanwhile), False) if more else (runner.run(step, batch, meanwhile), True)
        had = [(slot, runner.slots[slot].cursor.committed) for slot in batch.slots.slots]
        self.synchronize()
        for slot in batch.slots.slots:
            self.offload.bring(slot, runner.slots[slot].cursor)
        times = runner.run(step, batch, meanwhile)
        for slot, n in had:
            self.offload.take_back(slot, n, batch.rows.get(slot, 0))
        return times, not more

    def _run_ahead(self, step: Step, meanwhile: Meanwhile) -> StepTimes:
        self.resources.last = None
        step.fields.ahead = True
        try:
            step.fields.launch()
        finally:
            step.fields.ahead = False
        self.under_way = step
        if meanwhile is not None:
            meanwhile()
        return StepTimes(0, 0, 0)

    # -- offloaded layers

    def _offload_cache(self) -> OffloadCache | None:
        weights, r, shape = self._weights, self.resources, self.resources.target.recurrent_shape()
        if weights.offloaded is None:
            return None
        opt, first = r.options, r.target.caches_before(self.segments[1].first)
        shapes, window, backend = r.target.kv_shapes(), r.target.window, self.segments[1].backend
        kv = r.cache(shapes[: first[0]], opt.kv, window, max(opt.chunk, opt.width), homes=[(backend, first[0])])
        delta = None
        if shape is not None and first[1]:
            weights.visit()
            home = RecurrentSegment(1, backend, first[1], r.target.recurrent_row(0))
            weights.enter(len(self.segments) - 1)
            delta = r.own(RecurrentState([home], replace(shape, layers=first[1]), opt.width, opt.slots))
        there = SequenceMemory(kv, None, delta, first=first)
        home_memory = SequenceMemory(r.kv, None, r.recurrent, first=first)
        return OffloadCache(kv, delta, there, home_memory, opt.slots)

    def agree(self, batch: Batch) -> None:
        if self.offload is not None:
            for slot in batch.slots.slots:
                self.offload.agree(slot, self.runner.slots[slot].cursor)

    def clear(self, slot: int) -> None:
        if self.offload is not None:
            self.offload.clear(slot)

    def drop_offload(self) -> None:
        """Frees what chunks with copies of layers need. No graph over it may be left."""
        for part in (self.offload.kv, self.offload.delta) if self.offload is not None else ():
            if part is not None:
                self.resources.disown(cast(Any, part))
        self.offload = None

    def memory(self, segment: int) -> dict[str, int]:
        return self.offload.memory if segment == 1 and self.offload is not None else {}
