"""Where the layers of a target are computed: one device here, several in ``multi_device.devices``, which has the same interface."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..cache.slots import SlotRange
from ..errors import EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph, GraphAllocator
from ..ggml.step_io import StepFields, StepIO, StepTimes

GROUPS = 2  # micro-batches of a target that is split over devices


class Segment(NamedTuple):
    """The layers ``first`` to ``end`` - 1, on ``backend``."""

    backend: Backend
    first: int
    end: int

    def __str__(self) -> str:
        layers = f"layers {self.first} to {self.end - 1}" if self.end - self.first > 1 else f"layer {self.first}"
        return f"{layers} on {self.backend.device.name}"


class Devices:
    """One device: a step is one graph, and the caller waits for it.

    Attributes:
        segments: of the target's layers, one per device; the last one's also has the head and the drafter.
        graphs: those of micro-batches.
        groups: micro-batches that can be in flight together; 0 for none.
        flying: slots whose step is in flight.
        under_way: the step that was launched last, if it was not waited for.
    """

    groups = 0
    graphs: Sequence[Any] = ()
    flying: dict[int, Any] = {}  # noqa: RUF012  (never written here)
    under_way: Any = None
    builder: Any = None  # of graphs, in place of graphs.GraphBuilder

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments

    def open(self, resources: Any) -> None:
        """Allocates what steps over several devices need."""

    def attach(self, runner: Any) -> None:
        """Makes the runners of micro-batches."""

    def new_graph(self, io: StepIO, role_of: Callable[[int, int], GraphAllocator]) -> tuple[Graph, StepFields]:
        """An empty graph and its fields. ``role_of``: the role of a part of the step, by its number and segment."""
        graph = Graph(role_of(0, -1))
        return graph, StepFields(io, graph)

    def run_chunk(self, runner: Any, step: Any, batch: Any, meanwhile: Any) -> tuple[StepTimes, bool]:
        """Computes a chunk of prompts; also whether its outputs were read."""
        return runner.run(step, batch, meanwhile), True

    def agree(self, batch: Any) -> None:
        """The rows of a streamed chunk are committed."""

    def synchronize(self) -> None:
        """Waits for every step in flight. Whatever reads or writes device memory without a step calls this first."""

    def abandon(self) -> None:
        """Waits for every step in flight and drops its output."""

    def check_landed(self, slots: SlotRange) -> None:
        """Raises EngineError if the step of one of these slots is in flight."""

    def clear(self, slot: int) -> None:
        """Zeroes copies of a slot's rows on other devices."""

    def drop_offload(self) -> None:
        """Frees what chunks with copies of layers need. No graph over it may be left."""

    def memory(self, segment: int) -> dict[str, int]:
        """Bytes on a segment's device that neither caches nor graphs count, by purpose."""
        return {}

    @contextmanager
    def apart(self) -> Iterator[Any]:
        """Runs steps device by device, to measure each (``DeviceQueues.spent``)."""
        raise EngineError("the layers are on one device: a step has one part")
        yield
