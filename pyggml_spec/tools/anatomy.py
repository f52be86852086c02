"""Cost of a step: phases, nodes, and bytes moved relative to the device's bandwidth."""

import statistics
import time
from dataclasses import asdict, dataclass

from ..api import Session
from ..ggml.device import Backend
from ..ggml.graph import Graph, GraphAllocator
from ..ggml.library import check, ffi, lib, new_context, new_err

WARMUP, RUNS = 3, 8
COPY_CPU, COPY_GPU = 256 << 20, 2 << 30  # bytes per bandwidth test, larger than every cache
VIEWS = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE"}


@dataclass(frozen=True)
class Anatomy:
    """One step at one width. Times are medians in milliseconds at the current depth.

    Attributes:
        width: rows; 1 is plain decoding.
        step_ms: the whole step, host included.
        commit_ms: commit of the last block by a graph of its own; also part of ``verify_ms``.
        draft_ms: the fused step minus verification.
        verify_ms: verification of given drafts, with commit and drafter context rows.
        host_ms: time outside of launch and waiting.
        nodes: operations that launch kernels (no views).
        bytes: weights, K/V and state moved at least, see ``Graph.traffic``.
        bandwidth_share: ``bytes`` / ``step_ms``, relative to the measured copy bandwidth.
    """

    width: int
    step_ms: float
    commit_ms: float
    draft_ms: float
    verify_ms: float
    host_ms: float
    nodes: int
    bytes: int
    bandwidth_share: float

    def as_dict(self) -> dict:
        return asdict(self)


def copy_bandwidth(backend: Backend) -> float:
    """Bytes per second of a large copy on the device, reads and writes counted; median of RUNS."""
    half = (COPY_CPU if backend.device.kind == "cpu" else COPY_GPU) // 2
    ctx, allocator, err = new_context(1), GraphAllocator(backend, "copy"), new_err()
    pair = [lib.ggml_new_tensor(ctx, lib.GGML_TYPE_F32, 2, (1024, half // 4096)) for _ in range(2)]
    buffer = backend.allocate(ctx)
    if buffer == ffi.NULL:
        lib.ggml_free(ctx)
        allocator.close()
        return 0.0
    graph = Graph(allocator)
    try:
        lib.ggml_backend_buffer_clear(buffer, 1)
        graph.expand(lib.ggml_cpy(graph.ctx, *pair))
        graph.plan()
        seconds = []
        for _ in range(WARMUP + RUNS):
            backend.synchronize()
            began = time.perf_counter()
            check(lib.pgs_graph_compute(graph.handle, err), err)
            backend.synchronize()
            seconds.append(time.perf_counter() - began)
        return 2 * half / statistics.median(seconds[WARMUP:])
    finally:
        graph.close()
        allocator.close()
        lib.ggml_backend_buffer_free(buffer)
        lib.ggml_free(ctx)


def anatomy(session: Session, widths: tuple[int, ...], depth: int = 8) -> list[Anatomy]:
    """Measures a step of each width after a prompt of ``depth`` tokens. Discards the sequence. Widths beyond the context are left out."""
    bandwidth = copy_bandwidth(session.backend)
    room = session.engine.options.n_ctx
    return [_dissect(session, width, depth, bandwidth) for width in widths if depth + 3 * (WARMUP + RUNS) + width < room]


def _dissect(session: Session, width: int, depth: int, bandwidth: float) -> Anatomy:
    engine = session.engine
    engine.reset(drafting=width > 1)
    engine.prefill([i % 100 for i in range(depth)])
    allocator = "plain" if width == 1 else "fused"
    step, host = _median(engine, engine.plain_step if width == 1 else lambda: engine.fused_step(width))
    graph = engine.step_graph(allocator, width)
    nodes = sum(n for op, n in graph.op_counts().items() if op not in VIEWS)
    commit = draft = 0.0
    verify = step
    if width > 1:
        verify, _ = _median(engine, lambda: engine.verify_step([0] * (width - 1)))
        draft = step - verify
        commit = _commit_ms(engine, width) if engine.delta is not None else 0.0
    moved = graph.traffic()
    share = moved / (step / 1000) / bandwidth if bandwidth else 0.0
    return Anatomy(width, step, commit, draft, verify, host, nodes, moved, share)


def _median(engine, run) -> tuple[float, float]:
    """(milliseconds of a step, of which host), with one accepted row per step."""
    whole, host = [], []
    for _ in range(WARMUP + RUNS):
        began = time.perf_counter()
        result = run()
        engine.accept(1, int(result.ids[0]))
        spent = 1000 * (time.perf_counter() - began)
        whole.append(spent)
        host.append(spent - (result.times.compute + result.times.read) / 1000)
    return statistics.median(whole[WARMUP:]), statistics.median(host[WARMUP:])


def _commit_ms(engine, width: int) -> float:
    times = []
    for _ in range(WARMUP + RUNS):
        result = engine.verify_step([0] * (width - 1))
        engine.accept(1, int(result.ids[0]))
        began = time.perf_counter()
        engine.settle()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[WARMUP:])
