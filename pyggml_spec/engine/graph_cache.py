"""Graphs by key: built once, planned once, and closed when too many are kept."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np

from ..cache.kv import KV_BUCKET
from ..cache.slots import NOTHING, SlotRange
from ..checks import whole
from ..errors import EngineError
from ..ggml.device import Backend
from ..ggml.graph import AllocatorCounters, Graph, GraphAllocator
from ..ggml.library import ffi, lib, read_tensor
from ..ggml.step_io import StepFields, StepIO, StepTimes
from .batch import NO_KEY, GraphKey
from .devices import Devices

MEASURED_BUCKETS = 16
# outputs with a value per row, which is not finite if anything in the row is not
SUMS = IDS_SUM, LOGITS_SUM, DRAFT_SUM = "ids_sum", "logits_sum", "draft_sum"
KEEP_BUCKETS, KEEP_GRAPHS = 12, 32  # kept per kind and verify_len besides the largest bucket: of one slot, of several
BY_CALLS = ("prefill", "logits", "capture")  # kinds that are not captured ahead: compute hides their launch, and many run once
# the host reads their results in the compute buffer: no other graph is planned beside these, or has the same one
EXACT = ("logits", "capture")
KEEP_CHUNKS = 16  # kept for prompts of other lengths than those that were planned for
KEEP_ALL = 192  # kept of all kinds together: 0.4 MB of host memory each for 6 layers, 2 MB for 64


def captures_ahead() -> bool:
    """Whether devices that can (patches/0026) capture graphs before their first call; ggml-cuda reads the same switch."""
    return os.environ.get("GGML_CUDA_CAPTURE_AHEAD", "1") != "0"


class HostLogits:
    """F32 [rows, n] logits in host memory and their largest ids. numpy's argmax is three times as fast as portable C; C checks for NaN and Inf."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, (self.rows, self._n) = values, values.shape
        self._ids = np.zeros(self.rows, np.int64)
        self._at, self._ids_at = ffi.from_buffer("float[]", values), ffi.from_buffer("int64_t[]", self._ids)

    def largest(self) -> np.ndarray:
        """I32 [rows] ids of the largest, or of NaN."""
        self.values.argmax(axis=1, out=self._ids)
        return self._ids.astype(np.int32)

    def finite(self, first: int = 0, count: int | None = None) -> bool:
        """Whether those are: NaN or Inf if there is one in the row, or nothing else than -Inf."""
        return lib.pgs_finite_at(self._at + first * self._n, self._n, self.rows if count is None else count, self._ids_at + first)


@dataclass
class Step:
    """One graph with its fields. ``host``: numpy views of them; ``extra``: tensors that a caller reads itself.

    Attributes:
        chosen, sound: ``ids`` and ``finite`` of the last run, as of ``read``.
    """

    graph: Graph
    fields: StepFields
    extra: dict
    rows: Any = None  # C's pointers to its fields, see inputs.py
    ready: bool = False  # whether the device has been told to capture the graph
    _logits: HostLogits | None = None  # where they are in host memory
    _lost: bool = False  # where they are not: some row has no largest logit, which a device reports as token -1

    def __post_init__(self) -> None:
        self.chosen, self.sound = NOTHING, True
        self.host: dict[str, np.ndarray] = self.fields.host
        self._sums = {name: (self.fields.at[name], self.host[name].size) for name in SUMS if name in self.host}

    def run(self, meanwhile: Callable[[], object] | None = None, read: bool = True) -> StepTimes:
        """Computes the graph, and reads its choices."""
        times = self.fields.run(meanwhile)
        if read:
            self.read()
        return times

    def read(self) -> None:
        self.chosen, self.sound = self.ids(), self.finite()

    def finite(self) -> bool:
        """Whether neither NaN nor Inf came out, of the target or the drafter, in any row. Call ``ids`` first."""
        if self._lost or (self._logits is not None and not self._logits.finite()):
            return False
        for sums, count in self._sums.values():  # noqa: SIM110  (half the time of all())
            if not lib.pgs_finite(sums, count):
                return False
        return True

    def finite_rows(self, first: int, count: int) -> bool:
        """Whether neither NaN nor Inf came out of the target in the rows first .. first + count - 1. Call ``ids`` first."""
        if self._logits is not None and not self._logits.finite(first, count):
            return False
        if self._lost and (self.host["ids"][first : first + count] < 0).any():
            return False
        return all(lib.pgs_finite(sums + first, count) for name, (sums, _) in self._sums.items() if name != DRAFT_SUM)

    def ids(self) -> np.ndarray:
        """I32 [rows] greedy choice after each row that has logits, once the step has run."""
        if "ids" in self.host:
            ids = self.host["ids"].copy()
            self._lost = bool((ids < 0).any())
            return ids
        return self._host_logits().largest()

    def _host_logits(self) -> HostLogits:
        if self._logits is None:
            self._logits = HostLogits(self.graph.host_view(self.extra["logits"]))
        return self._logits

    def candidates(self, row: int) -> tuple[np.ndarray | None, np.ndarray]:
        """I32 token ids (None: all of the vocabulary) and F32 logits after ``row``, copied. Rows in device memory are read one by one: most are
        never needed."""
        rows = self.host["ids"].size if "ids" in self.host else self._host_logits().rows
        row = whole(row, "the row of the candidates", 0, rows - 1)
        if "best_ids" in self.host:
            return self.host["best_ids"].reshape(rows, -1)[row].copy(), self.host["best_logits"].reshape(rows, -1)[row].copy()
        if "ids" not in self.host:
            return None, self._host_logits().values[row].copy()
        logits = self.extra["logits"]
        out = np.empty(logits.ne[0], np.float32)
        read_tensor(logits, out, row * logits.nb[1], self.fields.io.workers)
        self.fields.io.reads += 1
        self.fields.io.read_bytes += out.nbytes
        return None, out


class GraphCache:
    """Owns graphs and the compute buffers of their roles. A subclass adds the nodes of a graph (``_nodes_of``).

    Attributes:
        every: all slots that any graph covers.
        buckets: K/V buckets of the caches, ascending.
        changes: grows whenever a graph is planned, so that sizes may have changed.
        announced: families of graphs that a CPU builds when their steps come.
        last_key, last: the graph that ``get`` returned last, while it can be used as it is; NO_KEY for none.
        built_as_announced, waited_us: of those, how many were built; microseconds that steps waited for graphs to be built or captured.
    """

    def __init__(
        self,
        devices: Devices,
        io: StepIO,
        widths: dict[str, tuple[int, ...]],
        buckets: list[int],
        slots: int,
        most: int,
        widest: int,
        nodes: int,
    ) -> None:
        """
        Args:
            widths: of each role whose largest graph is planned first.
            most: slots that a graph covers at most.
            widest: rows per slot that no graph exceeds.
            nodes: that no graph exceeds.
        """
        self.devices, self.backend, self.io = devices, devices.segments[-1].backend, io
        self.buckets, self.slots, self.every = buckets, slots, SlotRange(0, most)
        self._widths, self._widest, self._nodes = widths, widest, nodes
        self._on_cpus = all(segment.backend.device.kind == "cpu" for segment in devices.segments)
        self.roles: dict[str, GraphAllocator] = {}
        self._shared: GraphAllocator | None = None  # the last of those whose buffers others may use: one device computes one step at a time
        self.closed, self.changes, self.built_as_announced, self.waited_us = False, 0, 0, 0
        self.announced: set[GraphKey] = set()
        self._steps: dict[GraphKey, Step] = {}  # the least recently used one first
        self.last_key, self.last = NO_KEY, cast(Step, None)
        self._reserved: set[tuple] = set()

    # -- what a subclass knows

    def role(self, key: GraphKey) -> str:
        """Name of the compute buffer that a graph shares with others."""
        return key.kind

    def variants(self, key: GraphKey) -> list[GraphKey]:
        """Keys of the graphs of one shape that are planned for at load."""
        return [key]

    def _nodes_of(self, key: GraphKey, graph: Graph, fields: StepFields) -> dict:
        """Adds the nodes; returns ``Step.extra``."""
        raise NotImplementedError

    # -- graphs by key

    def get(self, key: GraphKey) -> Step:
        """The graph of this key, captured where the device can; built if it is missing or its memory has moved."""
        step = self.build(key)
        if not step.ready:
            self._capture(step, key)
        self.last_key, self.last = key, step
        return step

    def build(self, key: GraphKey) -> Step:
        """As ``get``, but not captured: for a step that may come."""
        if self.closed:
            raise EngineError("the session is closed: load the model again")
        step = self._steps.pop(key, None)
        if step is not None and not step.graph.stale:
            self._steps[key] = step  # most recently used: never dropped while it runs
            return step
        if step is not None:
            step.graph.close()
        began = time.perf_counter_ns()
        step = self._add(key)
        self.built_as_announced += bool(self.announced) and key.family in self.announced
        self.waited_us += (time.perf_counter_ns() - began) // 1000
        return step

    def find(self, key: GraphKey) -> Step | None:
        """The graph of this key if it need not be built."""
        step = self._steps.get(key)
        return None if step is None or step.graph.stale else step

    def _add(self, key: GraphKey) -> Step:
        if self.reserve(key) and (step := self._steps.get(key)) is not None:
            return step
        self._make_room(key)
        return self._keep(key, self._make(key))

    def _capture(self, step: Step, key: GraphKey) -> None:
        """Captures the graph before its first call: at load, while a device computes (graph_prebuilder.py), or now. Reserved ones never are."""
        step.ready = True
        if key.kind not in BY_CALLS and captures_ahead():
            took = step.graph.capture()
            step.fields.captured = took is not None
            self.waited_us += sum(took or ())
            if took is not None and (replay := self.io.replay) is not None:
                replay.ahead += 1
                replay.ahead_us += sum(took)

    def drop(self, kind: str, streamed: bool = False) -> None:
        """Closes the graphs of a kind."""
        self.last_key = NO_KEY
        for key in [key for key in self._steps if key.kind == kind and key.streamed == streamed]:
            self._steps.pop(key).graph.close()

    # -- memory

    def reserve(self, key: GraphKey) -> bool:
        """Plans the largest graphs of the key's role and sampling, unless that was done; returns whether it did.

        The largest graph does not need the largest buffer: the allocator packs 16 rows over 256 worse than over 2,048. So the largest width is
        measured at up to MEASURED_BUCKETS buckets (4 rows may need more than 5, too: widths above half of it are measured at the last one), and what
        needs most is planned first so that no later graph makes the buffer grow. On a GPU one slot keeps each width's longest graph. Other candidates of
        several slots reserve between two steps, so two buckets have to do then.
        """
        role = self.role(key)
        wanted = role, key.candidates, key.masked
        if role not in self._widths or wanted in self._reserved:
            return False
        again = self.slots > 1 and any(reserved == role for reserved, *_ in self._reserved)
        few, live = len(self.buckets) if again else max(1, len(self.buckets) // MEASURED_BUCKETS), self.buckets[-1]
        one, widest = SlotRange(0, 1), self._widths[role][-1]
        keep_all = self.slots == 1 and not self._on_cpus  # see graph_prebuilder.py
        widths = [width for width in self._widths[role] if keep_all or 2 * width > widest]
        ranges = {"prefill": [one], "plain": list(dict.fromkeys((self.every, one)))}.get(key.kind, [self.every])
        shapes = [
            more
            for width, bucket, slots in product(widths, dict.fromkeys((*self.buckets[::few], live)), ranges)
            if bucket == live or width == widest
            for more in self.variants(GraphKey(key.kind, width, bucket, slots, key.method, candidates=key.candidates, masked=key.masked))
        ]
        kept: dict[GraphKey, Step] = {}
        sizes: dict[GraphKey, list[int]] = {}  # of each part, in bytes
        largest: list[GraphKey] = []  # of each part
        try:
            for alike in self._by_bucket(shapes):
                self.measure(alike, kept, sizes)
                parts = range(len(sizes[alike[0]]))
                largest = list(dict.fromkeys(max(sizes, key=lambda shape: (sizes[shape][i], shape in kept)) for i in parts))
                for shape in [shape for shape in kept if (self.slots > 1 or shape.kv_bucket != live) and shape not in largest]:
                    kept.pop(shape).graph.close()
            for shape in largest:
                self._keep(shape, kept.pop(shape) if shape in kept else self._make(shape))
            for shape in list(kept):
                self._keep(shape, kept.pop(shape))
            self._reserved.add(wanted)
        finally:
            for step in kept.values():
                step.graph.close()
        return True

    @staticmethod
    def _by_bucket(shapes: list[GraphKey]) -> list[list[GraphKey]]:
        """Those that differ in the bucket alone, ascending."""
        found: dict[GraphKey, list[GraphKey]] = {}
        for shape in sorted(shapes, key=lambda shape: shape.kv_bucket):
            found.setdefault(shape.at(0), []).append(shape)
        return list(found.values())

    def measure(self, shapes: list[GraphKey], kept: dict[GraphKey, Step], sizes: dict[GraphKey, list[int]]) -> None:
        """Measures graphs that differ in the bucket alone; ``kept``: those that were built. Building takes most of the time, and shapes that grow evenly from one
        bucket to another tell what the graphs between need: the middle one is built as well, and has to agree. A ring of rows ends to grow: halves are then."""

        def built(shape: GraphKey) -> list[int]:
            kept[shape] = self._make(shape)
            return [part.measure() for part in kept[shape].graph.parts]

        def told(shape: GraphKey, low: GraphKey, high: GraphKey) -> int:
            above, most = shape.kv_bucket - low.kv_bucket, high.kv_bucket - low.kv_bucket
            return kept[low].graph.measure_between(kept[high].graph, above // KV_BUCKET, most // KV_BUCKET)

        def fill(between: list[GraphKey]) -> None:
            """Those between the first and the last one, which were built; where both need far less than the longest, nothing between needs more than that."""
            low, middle, high = between[0], between[len(between) // 2], between[-1]
            if all(8 * max(ends) < 7 * most for *ends, most in zip(sizes[low], sizes[high], sizes[shapes[-1]])):
                return
            if middle not in sizes:
                sizes[middle] = built(middle)
            even = len(between) > 3 and len(sizes[low]) == 1 and [told(middle, low, high)] == sizes[middle]
            for shape in between if even else ():
                if shape not in sizes:
                    sizes[shape] = [need] if (need := told(shape, low, high)) else built(shape)
            if not even and len(between) > 3:
                fill(between[: len(between) // 2 + 1])
                fill(between[len(between) // 2 :])

        sizes.update({shape: built(shape) for shape in dict.fromkeys((shapes[0], shapes[-1]))})
        if len(shapes) > 2:
            fill(shapes)

    def _make(self, key: GraphKey) -> Step:
        least = 0 if key.kind == "commit" else 1
        whole(key.verify_len, f"the width of a {self.role(key)} step", least, self._widest)
        graph, fields = self.devices.new_graph(self.io, partial(self._role, self.role(key)))
        try:
            return Step(graph, fields, self._nodes_of(key, graph, fields))
        except BaseException:
            graph.close()
            raise

    def _role(self, role: str, part: int, segment: int) -> GraphAllocator:
        name = f"{role}.{part}" if part else role
        if name not in self.roles:
            alone = len(self.devices.segments) == 1 and role not in EXACT
            before = self._shared if alone else None
            self.roles[name] = GraphAllocator(self.devices.segments[segment].backend, name, self._nodes, before)
            self._shared = self.roles[name] if alone else self._shared
        return self.roles[name]

    def _keep(self, key: GraphKey, step: Step) -> Step:
        """Plans a graph and keeps it; it is closed if it cannot be planned."""
        self.last_key = NO_KEY  # the buffer may move
        try:
            step.graph.plan()
        except BaseException:
            step.graph.close()
            raise
        if key in self._steps:  # of a reservation that failed half-way
            self._steps[key].graph.close()
        self._steps[key] = step
        self.changes += 1
        return step

    def _make_room(self, key: GraphKey) -> None:
        self.last_key = NO_KEY
        wanted = key.family
        family = [
            other for other in self._steps if other.kind == key.kind and other.verify_len == key.verify_len and other.family == wanted
        ]
        widest = max((other.kv_bucket for other in family), default=0)
        most = KEEP_BUCKETS if self.slots == 1 else KEEP_GRAPHS - 1
        surplus = [other for other in family if other.kv_bucket != widest or self.slots > 1][: max(0, len(family) - most)]
        if key.kind == "prefill" and key.verify_len not in (planned := self._widths["prefill"]):
            others = [k for k in self._steps if k.kind == "prefill" and k.verify_len not in planned and k not in surplus]
            surplus += others[: max(0, len(others) - KEEP_CHUNKS + 1)]
        left = len(self._steps) - len(surplus)
        surplus += [k for k in self._steps if k not in surplus][: max(0, left - KEEP_ALL + 1)]
        for other in surplus:
            self._steps.pop(other).graph.close()

    def counters(self) -> dict[str, AllocatorCounters]:
        return {name: role.counters for name, role in self.roles.items()}

    def steps(self) -> dict[GraphKey, Step]:
        """The kept graphs (tests and inspection)."""
        return dict(self._steps)

    @property
    def compute_bytes(self) -> int:
        return sum(role.buffer_bytes for role in self.roles.values())

    def compute_bytes_on(self, backend: Backend) -> int:
        """Those of one device."""
        return sum(role.buffer_bytes for role in self.roles.values() if role.backend is backend)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the nodes of the kept graphs take."""
        return sum(part.host_bytes for step in self._steps.values() for part in step.graph.parts)

    def close(self) -> None:
        for step in self._steps.values():
            step.graph.close()
        for role in self.roles.values():
            role.close()
        self._steps, self.roles, self.closed, self.last_key = {}, {}, True, NO_KEY
