"""Steps over several devices: what a runner needs on top of one device (``engine.devices``).

A step is a chain of graphs (chain.py). Chunks of a prompt are launched one after another without waiting, so that the first device computes the next
chunk while the others finish this one. Two micro-batches can be in flight together (lanes.py). Wide chunks compute layers of the host with streamed
copies of their weights (offload.py, offload_cache.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

from ..cache.recurrent import DeltaSegment, DeltaState
from ..cache.slots import SlotRange
from ..cache.snapshot import SequenceMemory
from ..checks import whole
from ..engine.batch import Batch, BatchItem, Draft, Prefill, StepOutput
from ..engine.devices import GROUPS, Devices, Segment
from ..engine.graph_cache import Step
from ..engine.graphs import StepGraphs
from ..engine.options import MOST_SLOTS
from ..engine.resources import Resources
from ..engine.runner import Meanwhile, ModelRunner
from ..errors import DeviceError, EngineError
from ..ggml.graph import Graph, GraphAllocator
from ..ggml.step_io import StepFields, StepIO, StepTimes
from .chain import ChainFields, ChainGraph, DeviceQueues
from .graphs import ChainBuilder
from .lanes import Flight, LaneRunner, half_of, why_no_groups
from .offload_cache import OffloadCache


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
        self._flights: dict[int, Flight] = {}

    def open(self, resources: Resources) -> None:
        self.resources = resources
        self.offload = self._offload_cache()
        self.queues = resources.own(DeviceQueues(resources.io))

    def attach(self, runner: ModelRunner) -> None:
        self.runner, r, slots = runner, self.resources, len(runner.slots)
        if not r.options.groups or why_no_groups(self.segments, slots, self._weights.expert_counts() is not None):
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
        for step in self._in_lanes() if self.flying else ():
            step.fields.wait()

    def abandon(self) -> None:
        for step in self._in_lanes():
            with suppress(DeviceError, EngineError):
                step.fields.wait()
        self.flying.clear()
        self._flights.clear()

    def _in_lanes(self) -> list[Step]:
        """The steps in flight in lanes, each once."""
        return list({id(step): step for step in self.flying.values()}.values())

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
        if not 0 <= whole(group, "the group", 0, MOST_SLOTS) < len(self.lanes) or group in self._flights:
            raise EngineError(f"group {group} cannot begin a step: it is under way, or there is none of this number")
        if any(isinstance(item, Prefill) or (isinstance(item, Draft) and item.proposes) for item in items.values()):
            raise EngineError("prompts, and drafts that are looked at, are no group's work: use step")
        if self.under_way is not None:
            self.synchronize()
        batch = Batch(dict(items))
        self.lanes[group].choose_graph(batch)
        self.check_landed(batch.slots)
        self._flights[group] = self.lanes[group].launch(batch)

    def land(self, group: int) -> dict[int, StepOutput]:
        """Waits for a group's step; outputs as of ``forward``."""
        if group not in self._flights:
            raise EngineError(f"group {group} has no step under way: launch one")
        return self.lanes[group].land(self._flights.pop(group))

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
            return (self._launch(step, meanwhile), False) if more else (runner.run(step, batch, meanwhile), True)
        had = [(slot, runner.slots[slot].cursor.committed) for slot in batch.slots.slots]
        self.synchronize()
        for slot in batch.slots.slots:
            self.offload.bring(slot, runner.slots[slot].cursor)
        times = runner.run(step, batch, meanwhile)
        for slot, n in had:
            self.offload.take_back(slot, n, batch.rows.get(slot, 0))
        return times, not more

    def _launch(self, step: Step, meanwhile: Meanwhile) -> StepTimes:
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
            home = DeltaSegment(1, backend, first[1], r.target.recurrent_row(0))
            weights.enter(len(self.segments) - 1)
            delta = r.own(DeltaState([home], replace(shape, layers=first[1]), opt.width, opt.slots))
        there = SequenceMemory(kv, None, delta, shapes, window, first=first)
        home_memory = SequenceMemory(r.kv, None, r.recurrent, shapes, window, first=first)
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
