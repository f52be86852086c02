"""The small inputs and outputs of a step: one device buffer, one upload, one read.

Layout: inputs, then ``tokens`` (written by the host and the drafter), then outputs. The host writes numpy views of a pinned mirror; ``launch``
queues upload, graph and read, ``wait`` waits for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checks import whole
from ..errors import EngineError
from .device import Backend
from .graph import Graph, require
from .library import Tensor, check, check_present, ffi, lib, new_err, raise_error, text

_TYPES: dict[str, tuple[int, Any, Any]] = {  # ggml's type, NumPy's, and that of a pointer in C
    "i32": (lib.GGML_TYPE_I32, np.dtype(np.int32), ffi.typeof("int32_t *")),
    "i64": (lib.GGML_TYPE_I64, np.dtype(np.int64), ffi.typeof("int64_t *")),
    "f16": (lib.GGML_TYPE_F16, np.dtype(np.float16), ffi.typeof("uint16_t *")),
    "f32": (lib.GGML_TYPE_F32, np.dtype(np.float32), ffi.typeof("float *")),
    "u8": (lib.GGML_TYPE_I8, np.dtype(np.uint8), ffi.typeof("uint8_t *")),
}
_SIGNS = next((i for i in range(lib.GGML_TYPE_COUNT) if lib.ggml_type_name(i) != ffi.NULL and text(lib.ggml_type_name(i)) == "q1_0"), -1)
_BITS, _ONE = 128, np.frombuffer(np.float16(1).tobytes(), np.uint8)  # bits per q1_0 block, and its scale
_ALIGN = 64  # CUDA kernels read inputs as vectors


# Replayed CUDA graphs are inferred from launch times, because ggml-cuda has no counter: an eager launch costs the host about 1.8 us per node, a replay 0.05.
REPLAY_US_PER_NODE = 0.5
WARMUP_CALLS = 2  # ggml-cuda runs a graph's first call eagerly and captures the second
FEWEST_NODES = 64  # launches of smaller graphs are too short to classify


@dataclass
class ReplayCounters:
    """Steps of graphs with at least FEWEST_NODES nodes on a CUDA device.

    Attributes:
        warmup: first and second calls of graphs without early capture.
        captured: graphs that were replayed at least once.
        replayed: later calls that were replays.
        eager: later calls that launched kernel by kernel.
        ahead: graphs captured before their first call.
        ahead_us: microseconds spent on that.
        inside: graphs captured within their second call although early capture was requested.
    """

    warmup: int = 0
    captured: int = 0
    replayed: int = 0
    eager: int = 0
    ahead: int = 0
    ahead_us: int = 0
    inside: int = 0

    def count(self, call: int, launch_us: int, nodes: int, captured: bool | None = None) -> bool:
        """Counts the ``call``-th (from 1) launch of a graph; returns whether it was a replay. ``captured``: early capture."""
        if nodes < FEWEST_NODES:
            return False
        if call <= WARMUP_CALLS and not captured:
            self.warmup += 1
            return False
        replay = launch_us < REPLAY_US_PER_NODE * nodes
        self.replayed += replay
        self.eager += not replay
        return replay


class StepIO:
    """Owns the buffer and its mirror; one per engine, because steps run one after the other.

    Args:
        before: devices of a split model before ``backend``, each with its own buffer, uploaded from the same mirror.
        turns: the device queues (chain.py) for steps in a thread of their own.

    Attributes:
        handles, homes: of each device's buffer in order; ``handle`` is the last one, which is read.
        lane: the thread of ``turns``; None without one.
        workers: workers whose loss ends the steps.
    """

    def __init__(self, backend: Backend, capacity: int, before: Sequence[Backend] = (), turns: Any = None) -> None:
        self.capacity = capacity
        self._err = new_err()
        self.workers = tuple(dict.fromkeys(name for b in (*before, backend) for name in b.workers))
        self.handles: list[Any] = []
        self.flow: Any = None  # of a split model: state of overlapping steps
        self.lane: Any = None
        self.handle: Any = ffi.NULL
        for other in (backend, *reversed(before)):
            self.handles.insert(0, self._made(lib.pgs_io_new(other.handle, capacity, self.handle, self._err)))
            self.handle = self.handles[-1]
        self.homes = [lib.pgs_io_home(handle) for handle in self.handles]
        self.host = ffi.cast("char *", lib.pgs_io_host(self.handle))
        self.mirror: np.ndarray = np.frombuffer(ffi.buffer(self.host, capacity), np.uint8)
        if turns is not None:
            self.lane = self._made(lib.pgs_lane_new(turns, self._err))
        elif before:
            self.flow = self._made(lib.pgs_flow_new(ffi.new("pgs_io *[]", self.handles), len(self.handles), capacity, self._err))
        self.uploads = self.upload_bytes = self.reads = self.read_bytes = 0
        self.replay = ReplayCounters() if backend.device.name.startswith("CUDA") else None

    def _made(self, handle: Any) -> Any:
        if handle == ffi.NULL:
            self._free()
            raise_error(self._err)
        return handle

    def _free(self) -> None:
        if self.lane is not None:
            lib.pgs_lane_free(self.lane)
        if self.flow is not None:
            lib.pgs_flow_free(self.flow)
        self.lane = self.flow = None
        for handle in self.handles:
            lib.pgs_io_free(handle)
        self.handles, self.handle = [], None

    def close(self) -> None:
        if self.handle is not None:
            del self.mirror  # a view of freed memory
            self._free()


@dataclass(slots=True)
class StepTimes:
    """Host microseconds of a step: ``compute`` is the launch, ``read`` includes waiting."""

    upload: int
    compute: int
    read: int


def _values(*nodes: Tensor) -> int:
    return sum(node.ne[0] * node.ne[1] * node.ne[2] for node in nodes)


class StepFields:
    """The fields of one graph inside the StepIO, in the order of their creation.

    Attributes:
        host, at: fields by name, as arrays of the mirror and as C pointers.
        ahead: whether the next launch is asynchronous (chain.py): another step may follow before ``wait``, and nothing is read.
        captured: whether the device captured the graph before its first launch; None if not requested.
    """

    ahead = False
    captured: bool | None = None

    def __init__(self, io: StepIO, graph: Graph) -> None:
        self.io, self.graph = io, graph
        self.host: dict[str, np.ndarray] = {}
        self.at: dict[str, Any] = {}
        self._offsets: dict[str, int] = {}
        self._end = 0
        self._upload_end = 0
        self._read_start: int | None = None
        self._err = new_err()
        self._times = ffi.new("pgs_step_times *")
        self._calls, self._replayed = 0, False

    def _take(self, name: str, kind: str, count: int) -> int:
        """Places a field; returns its offset."""
        if name in self._offsets or kind not in _TYPES:
            raise EngineError(
                f"a field {name!r} of the type {kind!r} cannot be added: the name is in use, or the type is none of {', '.join(_TYPES)}"
            )
        _, dtype, pointer = _TYPES[kind]
        start = (self._end + _ALIGN - 1) // _ALIGN * _ALIGN
        self._end = start + count * dtype.itemsize
        if self._end > self.io.capacity:
            raise EngineError(f"the step's field {name!r} ends at byte {self._end}, but the step buffer has {self.io.capacity}")
        self._offsets[name] = start
        self.host[name] = self.io.mirror[start : self._end].view(dtype)
        self.at[name] = ffi.cast(pointer, self.io.host + start)
        return start

    def _tensor(self, kind: str, ne0: int, ne1: int, offset: int, after: Tensor = ffi.NULL) -> Tensor:
        """A tensor of a field; ``kind`` "signs" for that of ``signs``."""
        ggml_type = _SIGNS if kind == "signs" else _TYPES[kind][0]
        t = lib.pgs_io_tensor(self.io.handles[self.graph.segment], self.graph.ctx, ggml_type, ne0, ne1, offset, after, self._err)
        check(t == ffi.NULL, self._err)
        return t

    def input(self, name: str, kind: str, *shape: int) -> Tensor:
        """An input tensor that the host writes as ``host[name]`` before each run; shape in ggml order, 1 or 2 values."""
        ne0, ne1 = (whole(n, f"a dimension of the field {name!r}", 1, self.io.capacity) for n in (*shape, 1)[:2])
        offset = self._take(name, kind, ne0 * ne1)
        self._upload_end = self._end
        return self._tensor(kind, ne0, ne1, offset)

    def signs(self, name: str, count: int, rows: int) -> Tensor:
        """An input of ``rows`` x ``count`` bits, [count rounded up to 128, rows], read as 1 and -1; written by ``put_bits``.

        Stored as ggml's 1-bit type: blocks of a scale and 128 bits, lowest bit first.
        """
        require(_SIGNS >= 0, "a type of one bit in this ggml", type=_SIGNS)
        blocks = -(-count // _BITS)
        offset = self._take(name, "u8", rows * blocks * (2 + _BITS // 8))
        self.host[name] = self.host[name].reshape(rows, blocks, 2 + _BITS // 8)
        self._upload_end = self._end
        return self._tensor("signs", blocks * _BITS, rows, offset)

    def put_bits(self, name: str, row: int, bits: np.ndarray) -> None:
        """Writes a row of ``signs``: U8 [n], lowest bit first, padded with 0; with the scales, which other graphs overwrite."""
        blocks = self.host[name][row]
        blocks[:, :2] = _ONE
        if bits.size != blocks.shape[0] * (blocks.shape[1] - 2):
            bits = np.concatenate([bits, np.zeros(blocks.shape[0] * (blocks.shape[1] - 2) - bits.size, np.uint8)])
        blocks[:, 2:] = bits.reshape(blocks.shape[0], -1)

    def tokens(self, count: int) -> Tensor:
        """Token ids [count], written by the host."""
        offset = self._take("tokens", "i32", count)
        self._upload_end = self._read_start = self._end
        return self._tensor("i32", count, 1, offset)

    def drafted_tokens(self, count: int, drafts: Sequence[Tensor]) -> Tensor:
        """Token ids [count]: row 0 from the host, the others from the nodes ``drafts`` (I32, count - 1 ids, each depending on the one before).
        Readable after the run."""
        self._read_start = offset = self._take("tokens", "i32", count)
        self._upload_end = offset + 4
        self._place(offset + 4, drafts)
        return self._tensor("i32", count, 1, offset, after=drafts[-1])

    def _place(self, offset: int, nodes: Sequence[Tensor]) -> None:
        for node in nodes:
            self.graph.place(self.io.homes[self.graph.segment], offset, node)
            offset += 4 * _values(node)

    def picked_tokens(self, count: int, drafts: Sequence[Tensor]) -> Tensor:
        """Token ids [count] = ``given[source]``: the host writes ``source`` and the first ``count`` of ``given``, the nodes ``drafts`` (I32, each
        depending on the one before) the rest. Readable after the run."""
        source, total = self.input("source", "i32", count), count + _values(*drafts)
        offset = self._take("given", "i32", total)
        self._upload_end = offset + 4 * count
        self._place(offset + 4 * count, drafts)
        picked = self.graph.rows(self._tensor("i32", 1, total, offset, after=drafts[-1]), source)
        self.output("tokens", "i32", picked)
        return self.graph.reshape(picked, count)

    def output(self, name: str, kind: str, *nodes: Tensor) -> None:
        """Places the nodes' results, concatenated, where the host reads them after the run (``host[name]``)."""
        for node in nodes:
            require(kind in _TYPES and node.type == _TYPES[kind][0], f"an output of the type {kind}", node=node)
        if self._read_start is None:
            self._read_start = (self._end + _ALIGN - 1) // _ALIGN * _ALIGN
        offset = self._take(name, kind, _values(*nodes))
        self._place(offset, nodes)
        for node in nodes:
            self.graph.expand(node)

    def launch(self) -> None:
        """Queues upload, graph and read. Asynchronous on GPUs; complete on return on CPUs."""
        read_start, io = self._end if self._read_start is None else self._read_start, self.io
        size = self._end - read_start
        self._queue(read_start, size)
        io.uploads += 1
        io.upload_bytes += self._upload_end
        if size:
            io.reads += 1
            io.read_bytes += size
        if io.replay is not None and not self.graph.n_cuts:  # a launch with cuts includes host work
            self._calls += 1
            replayed = io.replay.count(self._calls, self._times.compute, self.graph.n_nodes, self.captured)
            if replayed and not self._replayed:
                self._replayed = True
                io.replay.captured += 1
                io.replay.inside += self.captured is False

    def _queue(self, read_start: int, size: int) -> None:
        err = self._err
        if lib.pgs_step_launch(self.io.handle, self.graph.handle, self._upload_end, read_start, size, self._times, err):
            raise_error(err)

    def wait(self) -> StepTimes:
        """Blocks until the outputs are available; releases the GIL."""
        times = self._times
        lib.pgs_step_wait(self.io.handle, times)
        if self.io.workers:
            check_present(self.io.workers)
        return StepTimes(times.upload, times.compute, times.read)

    def run(self, meanwhile: Callable[[], object] | None = None) -> StepTimes:
        """``launch`` and ``wait``; ``meanwhile`` is called between them."""
        self.launch()
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            times = self.wait()
        return times
