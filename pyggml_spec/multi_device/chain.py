"""A step over several devices: one graph for each stretch of it that a device computes, and what is copied from one to the next.

To the models it is one graph: verbs add to the part that is being built, ``enter`` begins the next one on another device, and ``bring`` gives a
tensor of an earlier part as an input of this one. Copies are queued after the part that makes them (csrc/step_chain.c), without the host.

Fields have the same place in every device's step buffer. There is one mirror, which is uploaded to each device; what is read comes from the last.

A step runs in its caller's thread, or in its step buffer's lane (csrc/step_lanes.c): then others run at the same time, each in a lane of its own, and every
device computes for one of them at a time (``DeviceQueues``).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ..errors import EngineError
from ..ggml.graph import Graph, GraphAllocator
from ..ggml.library import Tensor, check, check_present, ffi, lib, new_err, text
from ..ggml.step_io import StepFields, StepIO, StepTimes


def _sum_over_parts(name: str) -> property:
    return property(lambda chain: sum(getattr(graph, name) for graph in chain.parts))


class ChainGraph(Graph):
    """Owns the graphs of its parts.

    Attributes:
        segment, part: which device's part is being built, and its number in the order in which they run.
        segments: those of all parts.
        chain: C's handle, after ``plan``.
    """

    n_cuts, n_nodes = map(_sum_over_parts, ("n_cuts", "n_nodes"))

    def __init__(self, io: StepIO, role_of: Callable[[int, int], GraphAllocator], entered: Callable[[int], None]) -> None:
        """``role_of``: the role of a part, by its number and segment. ``entered`` is told which segment is being built."""
        self._io, self._role_of, self._entered = io, role_of, entered
        self.segments: list[int] = []
        self._graphs: list[Graph] = []
        self._hops: list[tuple[int, int, Tensor, Tensor]] = []
        self._brought: dict[tuple[int, int], Tensor] = {}
        self._activations, self._orders, self._whole = {}, {}, {}
        self.chain: Any = None
        self.part, self.segment = -1, -1

    # -- building

    def enter(self, segment: int) -> None:
        """Nodes from now on are computed by this segment's device, after all nodes before."""
        if segment == self.segment:
            return
        self.part, self.segment = self.part + 1, segment
        graph = Graph(self._role_of(self.part, segment))
        self._graphs.append(graph)
        self.segments.append(segment)
        for name in ("allocator", "backend", "handle", "ctx", "gf", "_err"):
            setattr(self, name, getattr(graph, name))
        self._entered(segment)

    def bring(self, tensor: Tensor, part: int) -> Tensor:
        """``tensor`` of this or an earlier ``part``, for nodes of this one. An unused input costs nothing."""
        if part == self.part:
            return tensor
        key = int(ffi.cast("uintptr_t", tensor)), self.part
        if key not in self._brought:
            if not lib.ggml_is_contiguous(tensor):
                raise EngineError("only a contiguous tensor can go from one device to another")
            landing = lib.ggml_new_tensor(self.ctx, tensor.type, 4, tuple(tensor.ne))
            lib.ggml_set_output(tensor)  # its memory is its own until the copy is done
            lib.ggml_build_forward_expand(self._graphs[part].gf, tensor)
            self._hops.append((part, self.part, tensor, landing))
            self._brought[key] = landing
        return self._brought[key]

    # -- life

    def plan(self) -> None:
        for graph in self._graphs:
            graph.plan()
        if self.allocator.backend.counting:
            return
        read = [hop for hop in self._hops if hop[3].data != ffi.NULL]
        hops = ffi.new("pgs_hop[]", [list(hop) for hop in sorted(read, key=lambda hop: hop[0])])
        parts = ffi.new("pgs_graph *[]", [graph.handle for graph in self._graphs])
        ios = ffi.new("pgs_io *[]", [self._io.handles[segment] for segment in self.segments])
        self.chain = lib.pgs_chain_new(parts, ios, len(self._graphs), hops, len(read), self._err)
        if self.chain == ffi.NULL:
            raise EngineError(text(self._err))

    def capture(self) -> None:
        """Never ahead: a lane's thread may use the devices."""

    @property
    def parts(self) -> list[Graph]:
        return self._graphs

    @property
    def hops(self) -> list[tuple[int, int, int]]:
        """Copies: after which part, to which, and bytes."""
        return [(after, to, lib.ggml_nbytes(tensor)) for after, to, tensor, landing in self._hops if landing.data != ffi.NULL]

    def measure(self) -> int:
        return sum(graph.measure() for graph in self._graphs)

    @property
    def stale(self) -> bool:
        return any(graph.stale for graph in self._graphs)

    def expand(self, node: Tensor) -> None:
        self._graphs[-1].expand(node)

    def op_counts(self) -> Counter[str]:
        return sum((graph.op_counts() for graph in self._graphs), Counter())

    def traffic(self) -> int:
        return sum(graph.traffic() for graph in self._graphs)

    def close(self) -> None:
        if self.chain is not None and self.chain != ffi.NULL:
            lib.pgs_chain_free(self.chain)
        self.chain = None
        for graph in self._graphs:
            graph.close()
        self._graphs = []


class ChainFields(StepFields):
    """The fields of such a step. A field that another part adds again is the same one on another device."""

    graph: ChainGraph

    def __init__(self, io: StepIO, graph: ChainGraph) -> None:
        super().__init__(io, graph)
        self._here: dict[tuple[int, str], Tensor] = {}

    def input(self, name: str, kind: str, *shape: int) -> Tensor:
        key = (self.graph.part, name)
        if key not in self._here:
            known, (ne0, ne1) = self._offsets.get(name), (*shape, 1)[:2]
            new = super().tokens if name == "tokens" else partial(super().input, name, kind)
            self._here[key] = new(*shape) if known is None else self._tensor(kind, ne0, ne1, known)
        return self._here[key]

    def tokens(self, count: int) -> Tensor:
        return self.input("tokens", "i32", count)

    def _queue(self, read_start: int, size: int) -> None:
        if self.io.lane is not None:
            self._times.upload = self._times.compute = 0
            lib.pgs_lane_start(self.io.lane, self.graph.chain, self._upload_end, read_start, size)
            return
        args = (self.graph.chain, self.io.flow, self._upload_end, read_start, size, self.ahead, self._times, self._err)
        check(lib.pgs_chain_launch(*args), self._err)

    def wait(self) -> StepTimes:
        start, status = time.perf_counter_ns(), 0
        if self.io.lane is not None:
            status = lib.pgs_lane_wait(self.io.lane, self._err)
        else:
            lib.pgs_flow_settle(self.io.flow)
        check_present(self.io.workers)
        check(status, self._err)
        return StepTimes(self._times.upload, self._times.compute, (time.perf_counter_ns() - start) // 1000)


class Spent(NamedTuple):
    """What one device did in the steps of lanes: parts computed, uploads and reads included; copies to other devices after them; microseconds of
    both, and those that lanes waited for their turn on it."""

    parts: int
    computed_us: int
    copies: int
    copied_us: int
    copied_bytes: int
    queued_us: int


class DeviceQueues:
    """One queue per device: steps in lanes use a device one at a time. ``handle``: C's, for step buffers with a lane."""

    def __init__(self, io: StepIO) -> None:
        """``io``: a step buffer of the same devices."""
        self.count, err = len(io.handles), new_err()
        self.handle: Any = lib.pgs_turns_new(ffi.new("pgs_io *[]", io.handles), self.count, err)
        if self.handle == ffi.NULL:
            raise EngineError(text(err))

    def spent(self) -> list[Spent]:
        """Of each device, since the last call."""
        out = ffi.new("pgs_spent[]", self.count)
        lib.pgs_turns_spent(self.handle, out)
        return [Spent(s.parts, s.computed_us, s.copies, s.copied_us, s.copied_bytes, s.queued_us) for s in out]

    @contextmanager
    def lane(self, io: StepIO) -> Iterator[None]:
        """Steps of ``io`` run in a lane in here, part by part."""
        err = new_err()
        lane = lib.pgs_lane_new(self.handle, err)
        if lane == ffi.NULL:
            raise EngineError(text(err))
        io.lane = lane
        try:
            yield
        finally:
            io.lane = None
            lib.pgs_lane_free(lane)

    def close(self) -> None:
        if self.handle is not None:
            lib.pgs_turns_free(self.handle)
            self.handle = None
