"""Engines that cannot run, for their sizes: weights, caches and graphs are made as an engine makes them, without memory behind them."""

from collections.abc import Callable
from typing import Any, cast

from ..cache.kv import KV_BUCKET, KVCache
from ..drafters.multi import AnyDrafter
from ..ggml.device import Backend
from ..ggml.graph import GraphAllocator
from ..ggml.library import Buffer, BufferType, Context, Tensor, ffi, lib
from ..ggml.weight_stream import WeightStream
from ..models.decoder import Decoder
from ..models.placement import Placement
from ..models.weights import Weights
from ..multi_device.offload import GuestWeights
from ..multi_device.split import Segment, SplitWeights
from .graph_cache import Step
from .graphs import StepGraphs
from .options import EngineOptions
from .resources import Resources
from .runner import ModelRunner

WEIGHTS = ("weights", "draft_weights")  # what engines share, as their memory is named by purpose
Placed = tuple[Placement | None, Backend | None]
_ADDRESS = 1 << 20  # of tensors without memory: not NULL, aligned, and never read


class _Pretence:
    """Gives the tensors of a context an address and an empty buffer, so that graphs take them for allocated. Owns the buffer."""

    def __init__(self, ctx: Context, tensors: list[Tensor], buft: BufferType) -> None:
        self.nbytes = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buft)
        self.buffer = lib.ggml_backend_buft_alloc_buffer(buft, 0)
        for tensor in tensors:
            tensor.data, tensor.buffer = ffi.cast("void *", _ADDRESS), self.buffer


class PlannedStream(WeightStream):
    """Copies without memory, and nothing to copy."""

    def _allocate(self, home: Tensor) -> Buffer:
        return _Pretence(self._home_ctx, [home], self.device.default_buffer_type).buffer

    def _fill(self, *_: Any) -> None:
        """There is nothing to fill."""

    @property
    def nbytes(self) -> int:
        return self.need


class PlannedWeights(Weights):
    """Weights without memory: each tensor has the buffer type and the fusion that it will have."""

    stream_class = PlannedStream

    def __init__(self, backend: Backend, model: Any, placement: Placement | None = None, host: Backend | None = None) -> None:
        self._planned = 0
        super().__init__(backend, model.file, model.specs(), model.groups(), model.fused_alike(), None, placement, host)

    @classmethod
    def of_part(cls, *args: Any) -> "PlannedWeights":
        """Of some layers, as ``Weights`` is made."""
        weights = cls.__new__(cls)
        weights._planned = 0
        Weights.__init__(weights, *args)
        return weights

    def _allocate(self, home: int, jobs: list) -> None:
        ctx = self._context(len(jobs))
        pretence = _Pretence(ctx, self._new_tensors(ctx, home, jobs), self._buffer_type(home))
        self._buffers.append(pretence.buffer)
        self._planned += pretence.nbytes
        if home < len(self._bufts) - 1:
            self.repacked_bytes += pretence.nbytes

    def _upload(self, *_: Any, **__: Any) -> None:
        """There is nothing to fill."""

    _upload_experts = _upload_values = _pack = _upload

    def _host_tensor(self, ctx: Context, info: Any, shape: tuple[int, ...]) -> Tensor:
        tensor = lib.ggml_new_tensor(ctx, info.type, len(shape), shape)
        self._buffers.append(_Pretence(ctx, [tensor], lib.ggml_backend_cpu_buffer_type()).buffer)
        return tensor

    def _inside(self, ctx: Context, whole: Tensor, rows: tuple[int, ...]) -> tuple:
        parts = tuple(lib.ggml_new_tensor(ctx, whole.type, 2, (whole.ne[0], n)) for n in rows)
        for part in parts:
            part.data, part.buffer = whole.data, whole.buffer
        return parts

    @property
    def buffer_bytes(self) -> int:
        return self._planned


class PlannedGuests(GuestWeights):
    """What goes to the device has no memory, and neither has what lies in the host's."""

    _planned = 0
    _upload, _upload_experts, _upload_values, _inside = (
        PlannedWeights._upload,
        PlannedWeights._upload,
        PlannedWeights._upload,
        PlannedWeights._inside,
    )

    def _allocate(self, home: int, jobs: list) -> None:
        ctx = self._context(len(jobs))
        pretence = _Pretence(ctx, self._new_tensors(ctx, home, jobs), lib.ggml_backend_cpu_buffer_type())
        self._buffers.append(pretence.buffer)
        self._planned += pretence.nbytes

    @property
    def buffer_bytes(self) -> int:
        return self._planned


class PlannedKV(KVCache):
    """K/V rows without memory."""

    def _allocate(self, home: Any, n_ctx: int) -> Buffer:
        pretence = _Pretence(home.ctx, home.tensors, home.backend.default_buffer_type)
        pages = sum((lib.ggml_nbytes(t) + 63) // 64 * 64 for t in home.tensors)  # as ``Backend.zeros`` has them on a CPU
        self._planned = [*getattr(self, "_planned", []), pages if home.backend.device.kind == "cpu" else pretence.nbytes]
        return pretence.buffer

    def _write_constants(self) -> None:
        """There is nothing to write."""

    def _free(self, home: Any) -> None:
        lib.ggml_backend_buffer_free(home.buffer)

    @property
    def nbytes_by_home(self) -> list[int]:
        return self._planned


class PlannedGraphs(StepGraphs):
    """Graphs that are built, and whose buffers are only sized: one per role, as large as the graph that asks for most."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bytes_by_role: dict[str, int] = {}

    def _plan(self, step: Step) -> None:
        for part in step.graph.parts:
            role = part.allocator.name
            self.bytes_by_role[role] = max(self.bytes_by_role.get(role, 0), part.measure())

    def _stale(self, step: Step) -> bool:
        return False

    def bytes_of(self, role: GraphAllocator) -> int:
        return self.bytes_by_role.get(role.name, 0)


class PlannedResources(Resources):
    """Resources of an engine that cannot run."""

    kv_class, graphs_class, planned = PlannedKV, PlannedGraphs, True  # type: ignore[assignment]


class PlannedEngine(ModelRunner):
    """An engine that cannot run."""

    resources_class = PlannedResources


def plan_weights(
    target: Decoder, drafter: AnyDrafter | None, backend: Backend, segments: tuple[Segment, ...], placed: Placed, own: Callable[[Any], Any]
) -> None:
    """Gives the models weights without memory, which ``own`` takes care of."""
    if segments:
        split = SplitWeights(target, segments, drafter, *placed, lambda done, total: None, PlannedWeights.of_part)
        split.guests_class = PlannedGuests
        target.weights = cast(Weights, own(split))
    else:
        target.weights = own(PlannedWeights(backend, target, *placed))
    for member in drafter.methods if drafter is not None else ():
        member.weights = own(PlannedWeights(backend, member))


def bytes_taken(backend: Backend, target: Decoder, drafter: AnyDrafter | None, options: EngineOptions, weights: bool = True) -> list[int]:
    """Bytes that an engine takes on each device, with the models' ``weights`` or beside them.

    Raises:
        ContextError: a device cannot count the values of its masks.
    """
    engine = PlannedEngine(backend, target, drafter, options)
    try:
        return [sum(n for name, n in part.items() if weights or name not in WEIGHTS) for part in engine.memory_by_segment()]
    finally:
        engine.close()


def largest(fits: Callable[[int], bool], most: int, step: int = KV_BUCKET) -> int:
    """The longest context up to ``most`` for which ``fits`` holds, a multiple of ``step`` or ``most`` itself; 0 if none does."""
    if fits(most):
        return most
    low, high = 0, (most - 1) // step  # in steps: low fits (or is 0), high + 1 does not
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return low * step
