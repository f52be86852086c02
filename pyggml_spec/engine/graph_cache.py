"""The graphs that an engine keeps: one per (role, width, span, slots) and what else its steps differ in; built once, planned once."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ..cache.slots import SlotRange
from ..checks import whole
from ..errors import EngineError
from ..ggml.device import Backend
from ..ggml.graph import AllocatorCounters, Graph, GraphAllocator
from ..ggml.library import ffi, lib, read_tensor
from ..ggml.step_io import StepFields, StepIO
from ..multi_device.chain import ChainFields, ChainGraph
from ..multi_device.split import Segment

MEASURED_SPANS = 16
# outputs with a value per row, which is not finite if anything in the row is not
SUMS = IDS_SUM, LOGITS_SUM, DRAFT_SUM = "ids_sum", "logits_sum", "draft_sum"
KEEP_SPANS, KEEP_GRAPHS = 12, 32  # kept per (role, width) besides the widest span: of one slot, of several
# captured by their calls, if ever: what they launch hides behind what they compute, and many run once
BY_CALLS = ("prefill", "logits", "capture")
KEEP_CHUNKS = 16  # kept for prompts of other lengths than those that were planned for
KEEP_ALL = 192  # kept of all kinds together: 0.4 MB of host memory each for 6 layers, 2 MB for 64


def captures_ahead() -> bool:
    """Whether devices that can (patches/0026) are asked to capture graphs before their first call; ggml-cuda reads the same switch."""
    return os.environ.get("GGML_CUDA_CAPTURE_AHEAD", "1") != "0"


class HostLogits:
    """F32 [rows, n] ``values`` of a step in host memory, and what was chosen of them: numpy finds it, in a third of the time that C compiled for any
    processor takes; C looks whether it is finite, because four calls of numpy took 7 us more of a plain step and 14 of a block of eight rows."""

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
    """One graph with its input and output fields. ``host`` are numpy views; ``extra`` holds tensors that a caller reads itself."""

    graph: Graph
    fields: StepFields
    extra: dict
    rows: Any = None  # what C fills in of its fields, see fill.py
    ready: bool = False  # whether the device was asked to capture the graph
    _logits: HostLogits | None = None  # where they are in host memory
    _lost: bool = False  # where they are not: a row has no largest one, which a device says by a token of -1

    def __post_init__(self) -> None:
        self.host: dict[str, np.ndarray] = self.fields.host
        self._sums = {name: (self.fields.at[name], self.host[name].size) for name in SUMS if name in self.host}

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
        """I32 token ids (None: all of the vocabulary) and F32 logits after ``row``, which are the caller's: what a view showed was freed by closing the engine.

        Rows in device memory are read one by one: most of a block's rows are never asked for.
        """
        rows = self.host["ids"].size if "ids" in self.host else self._host_logits().rows
        row = whole(row, "the row whose candidates are asked for", 0, rows - 1)
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
    """Owns the roles and their graphs; a subclass knows how each is built."""

    def __init__(
        self,
        segments: Sequence[Segment],
        io: StepIO,
        widths: dict[str, tuple[int, ...]],
        spans: list[int],
        slots: int,
        widest: int,
        nodes: int,
        most: int = 0,
    ) -> None:
        """
        Args:
            segments: the devices that a step goes through.
            widths: of each role whose largest graph is planned first.
            spans: all that the caches have, ascending.
            widest: the most rows per slot that any graph has.
            nodes: that no graph exceeds.
            most: slots that any graph covers, 0 for all.
        """
        self.segments, self.backend, self.split = tuple(segments), segments[-1].backend, len(segments) > 1
        self.io, self._widths, self.spans, self.slots = io, widths, spans, slots
        self._widest, self._nodes = widest, nodes
        self.every = SlotRange(0, most or slots)
        self.roles: dict[str, GraphAllocator] = {}
        self.closed = False
        self.drafting = False  # whether target graphs also write drafter rows
        self.candidates: int | None = 0  # how many of a row's largest logits are read with the ids; None: whole rows, on demand
        self.kept = False  # whether logits stay on the device until the next step, for choices among some of the tokens
        self._steps: dict[tuple, Step] = {}  # the least recently used one first
        self.changes = 0  # grows whenever a graph was planned: what there is to say of their memory may be another
        # (role, width, what else it differs in) of graphs that are built when their steps come, on a CPU
        self.announced: set[tuple] = set()
        self.built_as_announced = 0
        self.waited_us = 0  # for graphs to be built or captured, all steps together
        self._reserved: set[tuple] = set()
        self._builders: dict[str, Callable[..., dict | None]] = {}

    def get(self, role: str, width: int, span: int, covered: SlotRange | None = None, *more: Any) -> Step:
        """The graph of this role, width, span and range of slots (None: all of them), as ``drafting`` and ``candidates`` ask, captured where the device can;
        built if it is not there or its memory has moved."""
        step = self.build(role, width, span, covered, *more)
        return step if step.ready else self._make_ready(step, role)

    def build(self, role: str, width: int, span: int, covered: SlotRange | None = None, *more: Any) -> Step:
        """As ``get``, for a step that may come: not captured yet."""
        if self.closed:
            raise EngineError("the session is closed: load the model again")
        covered = covered or self.every
        key = (role, width, span, covered, *more, *self.asked(role))
        step = self._steps.pop(key, None)
        if step is not None and not step.graph.stale:
            self._steps[key] = step  # used last, dropped last: never while it runs
            return step
        if step is not None:
            step.graph.close()
        began = time.perf_counter_ns()
        step = self._built(key, role, width, span, covered, *more)
        self.built_as_announced += (role, width, *more) in self.announced
        self.waited_us += (time.perf_counter_ns() - began) // 1000
        return step

    def reserve(self, role: str) -> bool:
        """Plans the largest graphs of a role, as ``candidates`` and ``kept`` ask now, unless that was done; says whether it did."""
        if role not in self._widths or (role, *self.asked(role)[1:]) in self._reserved:
            return False
        self._reserve(role)
        return True

    def _built(self, key: tuple, role: str, width: int, span: int, covered: SlotRange, *more: Any) -> Step:
        if self.reserve(role):
            step = self._steps.get(key)
            if step is not None:
                return step
        self._make_room(role, width, more)
        shape = (width, span, covered, *more)
        return self._keep(self._make(role, *shape), role, *shape)

    def _make_ready(self, step: Step, role: str) -> Step:
        """Has the device capture the graph before its first call: at load for those that calibration runs, later while it computes (see ahead.py), and right
        before the call otherwise. Graphs that are only reserved are never captured."""
        step.ready = True
        if role not in BY_CALLS and captures_ahead():
            took = step.graph.capture()
            step.fields.captured = took is not None
            self.waited_us += sum(took or ())
            if took is not None and (replay := self.io.replay) is not None:
                replay.ahead += 1
                replay.ahead_us += sum(took)
        return step

    def has(self, role: str, width: int, span: int, covered: SlotRange | None = None, *more: Any) -> bool:
        """Whether ``get`` would not have to build."""
        return self._find(role, width, span, covered, *more) is not None

    def waits(self, role: str, width: int, span: int, covered: SlotRange | None = None, *more: Any) -> bool:
        """Whether it is built, and the device was not asked to capture it."""
        step = self._find(role, width, span, covered, *more)
        return step is not None and not step.ready

    def _find(self, role: str, width: int, span: int, covered: SlotRange | None, *more: Any) -> Step | None:
        step = self._steps.get((role, width, span, covered or self.every, *more, *self.asked(role)))
        return None if step is None or step.graph.stale else step

    def reserves(self, role: str, width: int, covered: SlotRange) -> bool:
        """Whether graphs like this one were planned for: prompts go slot by slot, a chunk of several at once is planned when it is asked for."""
        return role != "prefill" or covered.count == 1

    def _reserve(self, role: str) -> None:
        """Plans the role's graph with the largest buffer first, so that no later one makes it grow.

        Which graph needs most is not a matter of its size alone: the allocator packs 16 rows over 256 worse than over 2,048, and over 1,280
        worst. So every width is measured at up to MEASURED_SPANS spans. The largest of all is planned, and for one slot each width's widest,
        which are kept. All slots take more than some of them, but not by much at one row. When requests of several slots want other candidates
        later, everybody waits for this: two spans have to do.
        """
        again = self.slots > 1 and any(reserved == role for reserved, *_ in self._reserved)
        few, live = len(self.spans) if again else max(1, len(self.spans) // MEASURED_SPANS), self.spans[-1]
        ranges = {"prefill": [SlotRange(0, 1)], "plain": list(dict.fromkeys((self.every, SlotRange(0, 1))))}.get(role, [self.every])
        sized = product(self._widths[role], dict.fromkeys((*self.spans[::few], live)), ranges)
        shapes = [(*shape, *more) for shape in sized for more in self.variants(role, shape[0])]
        kept: dict[tuple, Step] = {}
        sizes: dict[tuple, list[int]] = {}  # of each part, in bytes
        drafting, self.drafting = self.drafting, self.can_draft
        try:
            for shape in shapes:
                step = kept[shape] = self._make(role, *shape)
                sizes[shape] = [part.measure() for part in step.graph.parts]
                if self.slots > 1 or shape[1] != live:
                    kept.pop(shape).graph.close()
            count = len(next(iter(sizes.values())))
            for largest in dict.fromkeys(max(sizes, key=lambda shape: sizes[shape][i]) for i in range(count)):
                self._keep(kept.pop(largest) if largest in kept else self._make(role, *largest), role, *largest)
            for shape in list(kept):
                self._keep(kept.pop(shape), role, *shape)
            self._reserved.add((role, *self.asked(role)[1:]))
        finally:
            self.drafting = drafting
            for step in kept.values():
                step.graph.close()

    def asked(self, role: str) -> tuple:
        """What graphs of a role are made for now: whether drafters' rows are written, and how logits are read. Where there are none, that is no reason for
        another graph."""
        return self.drafting, self.candidates, self.kept

    @property
    def can_draft(self) -> bool:
        """Whether graphs can write drafter rows at all."""
        return False

    def variants(self, role: str, width: int) -> list[tuple]:
        """What else the graphs of a role differ in that are planned for at load."""
        return [()]

    def drop(self, role: str, *more: Any) -> None:
        """Closes the graphs of a role that differ in this from others."""
        for key in [key for key in self._steps if key[0] == role and key[4:-3] == more]:
            self._steps.pop(key).graph.close()

    def _make(self, role: str, width: int, span: int, covered: SlotRange, *more: Any) -> Step:
        if role not in self._builders:
            raise EngineError(f"there is no step called {role!r}: use one of {', '.join(self._builders)}")
        width = whole(width, f"the width of a {role} step", 0 if role == "commit" else 1, self._widest)
        graph, fields = self._new(role)
        try:
            extra = self._builders[role](graph, fields, width, span, covered, *more) or {}
        except BaseException:
            graph.close()
            raise
        return Step(graph, fields, extra)

    def _new(self, role: str) -> tuple[Graph, StepFields]:
        """An empty graph, over several devices one that has no part yet."""
        if not self.split:
            graph = Graph(self._role(role, -1))
            return graph, StepFields(self.io, graph)
        chain = ChainGraph(self.io, lambda part, segment: self._role(f"{role}.{part}" if part else role, segment), self._entered)
        return chain, ChainFields(self.io, chain)

    def _role(self, name: str, segment: int) -> GraphAllocator:
        if name not in self.roles:
            self.roles[name] = GraphAllocator(self.segments[segment].backend, name, self._nodes)
        return self.roles[name]

    def _entered(self, segment: int) -> None:
        """Nodes are added for this segment from now on."""

    def _keep(self, step: Step, role: str, *shape: Any) -> Step:
        """Plans the step's graph and keeps it; it is closed if it cannot be planned."""
        try:
            step.graph.plan()
        except BaseException:
            step.graph.close()
            raise
        key = (role, *shape, *self.asked(role))
        if key in self._steps:  # of a reservation that failed half-way
            self._steps[key].graph.close()
        self._steps[key] = step
        self.changes += 1
        return step

    def _make_room(self, role: str, width: int, more: tuple = ()) -> None:
        family = [key for key in self._steps if key[:2] == (role, width) and key[4:-3] == more]
        widest = max((key[2] for key in family), default=0)
        most = KEEP_SPANS if self.slots == 1 else KEEP_GRAPHS - 1
        surplus = [key for key in family if key[2] != widest or self.slots > 1][: max(0, len(family) - most)]
        if role == "prefill" and width not in (planned := self._widths[role]):
            others = [key for key in self._steps if key[0] == role and key[1] not in planned and key not in surplus]
            surplus += others[: max(0, len(others) - KEEP_CHUNKS + 1)]
        left = len(self._steps) - len(surplus)
        surplus += [key for key in self._steps if key not in surplus][: max(0, left - KEEP_ALL + 1)]
        for key in surplus:
            self._steps.pop(key).graph.close()

    def counters(self) -> dict[str, AllocatorCounters]:
        return {name: role.counters for name, role in self.roles.items()}

    def steps(self) -> dict[tuple, Step]:
        """The kept graphs by key (tests and inspection)."""
        return dict(self._steps)

    @property
    def compute_bytes(self) -> int:
        return sum(role.buffer_bytes for role in self.roles.values())

    def compute_bytes_on(self, backend: Backend) -> int:
        """Those of one device."""
        return sum(role.buffer_bytes for role in self.roles.values() if role.backend is backend)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the kept graphs take, whatever the device: their nodes."""
        return sum(part.host_bytes for step in self._steps.values() for part in step.graph.parts)

    def close(self) -> None:
        for step in self._steps.values():
            step.graph.close()
        for role in self.roles.values():
            role.close()
        self._steps, self.roles, self.closed = {}, {}, True
