"""Cost of a step: phases, nodes, and bytes moved relative to the device's bandwidth."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ..api import Session
from ..engine.batch import StepOutput
from ..engine.runner import ModelRunner
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


def median_ms(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Milliseconds of ``run``: the median of RUNS calls after WARMUP. ``before``: called before each, untimed."""
    taken = []
    for _ in range(WARMUP + RUNS):
        before()
        began = time.perf_counter()
        run()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken[WARMUP:])


@contextmanager
def device_tensor(backend: Backend, nbytes: int) -> Iterator[Any]:
    """An F32 tensor of zeros on the device, of a multiple of 4 KiB; None if memory is short."""
    ctx = new_context(1)
    tensor = lib.ggml_new_tensor(ctx, lib.GGML_TYPE_F32, 2, (1024, nbytes // 4096))
    buffer = backend.allocate(ctx)
    try:
        if buffer == ffi.NULL:
            yield None
        else:
            lib.ggml_backend_buffer_clear(buffer, 0)
            yield tensor
    finally:
        if buffer != ffi.NULL:
            lib.ggml_backend_buffer_free(buffer)
        lib.ggml_free(ctx)


def copy_bandwidth(backend: Backend) -> float:
    """Bytes per second of a large copy on the device, reads and writes counted; 0 if memory is short."""
    half, err = (COPY_CPU if backend.device.kind == "cpu" else COPY_GPU) // 2, new_err()
    with ExitStack() as stack:
        pair = [stack.enter_context(device_tensor(backend, half)) for _ in range(2)]
        if None in pair:
            return 0.0
        graph = stack.enter_context(closing(Graph(stack.enter_context(closing(GraphAllocator(backend, "copy"))))))
        graph.expand(lib.ggml_cpy(graph.ctx, *pair))
        graph.plan()

        def copy() -> None:
            check(lib.pgs_graph_compute(graph.handle, err), err)
            backend.synchronize()

        return 2 * half / (median_ms(copy, backend.synchronize) / 1000)


def anatomy(session: Session, widths: tuple[int, ...], depth: int = 8) -> list[Anatomy]:
    """Measures a step of each width after a prompt of ``depth`` tokens. Discards the sequence. Widths beyond the context are left out."""
    bandwidth = copy_bandwidth(session.backend)
    return [dissect(session.runner, width, depth, bandwidth) for width in widths if fits(session.runner, width, depth)]


def fits(engine: ModelRunner, width: int, depth: int = 8) -> bool:
    """Whether the context has room for the steps that ``dissect`` measures."""
    return depth + 3 * (WARMUP + RUNS) + width < engine.options.n_ctx


def one_step(engine: ModelRunner, width: int, given: bool = False) -> StepOutput:
    """A step of ``width`` rows with one accepted row: plain, drafting, or without a drafter (or if ``given``) verifying zeros."""
    if width == 1:
        result = engine.plain_step()
    elif given or engine.drafter is None:
        result = engine.verify_step([0] * (width - 1))
    else:
        result = engine.fused_step(width)
    engine.accept(1, int(result.ids[0]))
    return result


def dissect(engine: ModelRunner, width: int, depth: int = 8, bandwidth: float = 0.0) -> Anatomy:
    """One step at one width. ``bandwidth``: of copies, in bytes per second; 0 if unknown. Discards the sequence."""
    engine.reset(drafting=width > 1)
    engine.prefill([i % 100 for i in range(depth)])
    others = []  # milliseconds of launch and waiting

    def step() -> None:
        times = one_step(engine, width).times
        others.append((times.compute + times.read) / 1000)

    whole = median_ms(step)
    graph, commit, verify = engine.step_graph("plain" if width == 1 else "fused", width), 0.0, whole
    if width > 1:
        verify = median_ms(lambda: one_step(engine, width, given=True))
        commit = median_ms(engine.settle, lambda: one_step(engine, width, given=True)) if engine.recurrent is not None else 0.0
    nodes, moved = sum(n for op, n in graph.op_counts().items() if op not in VIEWS), graph.traffic()
    share = moved / (whole / 1000) / bandwidth if bandwidth else 0.0
    return Anatomy(width, whole, commit, whole - verify, verify, whole - statistics.median(others[WARMUP:]), nodes, moved, share)
