"""Steps of a split model by device: compute, copies at cuts, waiting, and copy speeds."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from ..engine.runner import ModelRunner
from ..errors import EngineError
from ..ggml import peer
from ..ggml.device import Backend
from ..ggml.library import lib
from .anatomy import RUNS, WARMUP, device_tensor, median_ms, one_step

HOST_ONLY = "without peer access"
SMALL, LARGE, OVER_NETWORK = 4096, 64 << 20, 1 << 20  # bytes of the timed copies


@dataclass(frozen=True)
class DeviceShare:
    """One device's share of a step; milliseconds are medians.

    Attributes:
        layers: as text.
        compute_ms: with uploads and, on the last device, drafts and the read.
        copies, copied_bytes, copy_ms: sent to other devices per step.
        waits: share of the step in which the device neither computes nor copies.
    """

    device: str
    layers: str
    compute_ms: float
    copies: int
    copied_bytes: int
    copy_ms: float
    waits: float


@dataclass(frozen=True)
class SplitStep:
    """A step of ``width`` rows (1: plain): ``step_ms`` as run, and its devices' shares, measured part by part."""

    width: int
    step_ms: float
    devices: tuple[DeviceShare, ...]

    @property
    def cut_share(self) -> float:
        """Share of copies in all devices' time."""
        copying = sum(share.copy_ms for share in self.devices)
        return copying / (copying + sum(share.compute_ms for share in self.devices)) if copying else 0.0

    def as_dict(self) -> dict:
        return {**asdict(self), "cut_share": self.cut_share}


@dataclass(frozen=True)
class CopySpeed:
    """Copies between two devices: microseconds of a small one, bytes per second of a large one, and their path as text."""

    source: str
    target: str
    small_us: float
    bandwidth: float
    way: str

    def as_dict(self) -> dict:
        return asdict(self)


def split_steps(engine: ModelRunner, widths: tuple[int, ...], depth: int = 8, copies: Sequence[CopySpeed] | None = None) -> list[SplitStep]:
    """Measures steps of these widths by part, after a prompt of ``depth`` tokens. Discards the sequence. Widths beyond the context are left
    out. ``copies``: result of ``copy_speeds``; None measures it. Raises EngineError: the layers are on one device."""
    if len(engine.resources.segments) < 2:
        raise EngineError("the layers are on one device: there is no cut to measure")
    out, copies = [], copy_speeds(engine) if copies is None else copies
    for width in widths:
        if depth + 2 * (WARMUP + RUNS) + width < engine.options.n_ctx:
            engine.reset(drafting=width > 1 and engine.drafter is not None)
            engine.prefill([i % engine.target.n_vocab for i in range(depth)])
            whole = median_ms(lambda: one_step(engine, width))  # noqa: B023
            out.append(without_waiting(_by_device(engine, width, whole, lambda: one_step(engine, width), RUNS), copies))  # noqa: B023
    return out


def without_waiting(step: SplitStep, copies: Sequence[CopySpeed]) -> SplitStep:
    """A worker does not report completion, so copies include waiting: their excess over idle copies is compute time."""
    alone, shares = {one.source: one for one in copies if "network" in one.way}, []
    for share in step.devices:
        copying = share.copy_ms
        if (one := alone.get(share.device)) is not None:
            large = 1e3 * share.copied_bytes / one.bandwidth if one.bandwidth else 0.0
            copying = min(copying, share.copies * one.small_us / 1e3 + large)
        shares.append(replace(share, compute_ms=share.compute_ms + share.copy_ms - copying, copy_ms=copying))
    return _with_waits(replace(step, devices=tuple(shares)))


def split_chunk(engine: ModelRunner, copies: Sequence[CopySpeed] | None = None) -> SplitStep | None:
    """The widest prefill chunk that fits the context, by part; ``step_ms`` is the sequential time. Discards the sequence. None if no chunk
    fits."""
    rows = max((n for n in engine.resources.chunks if n < engine.options.n_ctx), default=0)
    if not rows:
        return None
    ids = [i % engine.target.n_vocab for i in range(rows)]

    def chunk() -> float:
        engine.reset(drafting=engine.drafter is not None)
        began = time.perf_counter()
        engine.prefill(ids)
        return 1e3 * (time.perf_counter() - began)

    copies = copy_speeds(engine) if copies is None else copies
    whole = statistics.median(chunk() for _ in range(WARMUP))
    out = without_waiting(_by_device(engine, rows, whole, chunk, WARMUP), copies)
    engine.reset()
    return out


def _by_device(engine: ModelRunner, width: int, whole: float, step: Callable[[], object], n_runs: int) -> SplitStep:
    with engine.devices.apart() as turns:
        turns.spent()
        runs = []
        for _ in range(WARMUP + n_runs):
            step()
            runs.append(turns.spent())
    shares = []
    for index, segment in enumerate(engine.resources.segments):
        mine = [run[index] for run in runs[WARMUP:]]
        compute_ms, copy_ms = (statistics.median(getattr(s, name) for s in mine) / 1e3 for name in ("computed_us", "copied_us"))
        layers, last = str(segment).rsplit(" on ", 1)[0], mine[-1]
        shares.append(DeviceShare(segment.backend.device.name, layers, compute_ms, last.copies, last.copied_bytes, copy_ms, 0.0))
    return _with_waits(SplitStep(width, whole, tuple(shares)))


def _with_waits(step: SplitStep) -> SplitStep:
    total = sum(share.compute_ms + share.copy_ms for share in step.devices) or 1.0
    return replace(step, devices=tuple(replace(share, waits=1 - (share.compute_ms + share.copy_ms) / total) for share in step.devices))


def copy_speeds(engine: ModelRunner) -> list[CopySpeed]:
    """From each device to the next, and from the last to the first (drafts)."""
    backends = [segment.backend for segment in engine.resources.segments]
    engine.resources.synchronize()
    out = []
    for source, target in zip(backends, [*backends[1:], backends[0]]):
        large = OVER_NETWORK if "rpc" in (source.device.kind, target.device.kind) else LARGE
        small_us, large_us = (_copy_us(source, target, nbytes) for nbytes in (SMALL, large))
        names = source.device.name, target.device.name
        out.append(CopySpeed(*names, small_us, large / (large_us * 1e-6) if large_us else 0.0, way_of_copies(*names)))
    return out


def way_of_copies(source: str, target: str) -> str:
    """Path of copies between two devices."""
    if source.startswith("CUDA") and target.startswith("CUDA"):
        if peer.BY_GGML in os.environ:
            return f"directly where the driver can, {peer.BY_GGML} is set"
        why = peer.no_peer_reason(source, target)
        return f"{HOST_ONLY}: {why}" if why else "directly"
    if "RPC" in source or "RPC" in target:
        return "over the network, through this machine"
    return "through the host"


def _copy_us(source: Backend, target: Backend, nbytes: int) -> float:
    """Microseconds of a copy, median of RUNS; 0 if memory is short."""

    def synchronize() -> None:
        source.synchronize()
        target.synchronize()

    def copy() -> None:
        lib.ggml_backend_tensor_copy_async(source.handle, target.handle, *ends)
        synchronize()

    with ExitStack() as stack:
        ends = [stack.enter_context(device_tensor(backend, nbytes)) for backend in (source, target)]
        return 0.0 if None in ends else 1e3 * median_ms(copy, synchronize)
