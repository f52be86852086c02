"""Devices of the ggml registry, and the backend (a stream on one device) that a model runs on."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import whole
from ..errors import DeviceError
from ..suggest import meant
from . import host_memory
from .cores import CORE_MONITOR, ThreadRule, default_threads
from .kernels import pick_level
from .library import (
    FITNESS,
    LIBRARIES,
    Buffer,
    BufferType,
    CData,
    Context,
    DeviceHandle,
    LevelHandle,
    Tensor,
    check_present,
    ffi,
    lib,
    text,
)
from .workers import is_worker

if TYPE_CHECKING:
    from .rpc import Traffic

_KINDS = {getattr(lib, f"GGML_BACKEND_DEVICE_TYPE_{kind.upper()}"): kind for kind in ("cpu", "gpu", "igpu", "accel")}
SMALL_BATCH, DRAW = "SMALL_BATCH", "DRAW"  # features of ggml-cuda built with patches/0020 and 0038
NARROW_MASK = "NARROW_MASK"  # with patches/0052, of ggml-cpu too


@dataclass(frozen=True)
class Device:
    """One device. ``name`` as `--device` takes it; ``kind``: cpu, gpu, igpu, accel or rpc; memory in bytes; ``index`` in ggml's list, -1 for rpc."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int
    index: int


def devices() -> list[Device]:
    """Every device of the installed ggml on this machine."""
    return [_device(index) for index in range(lib.ggml_backend_dev_count())]


def _device(index: int) -> Device:
    """The device of this index in ggml's list. It is asked for its memory, which starts a GPU: 0.3 seconds each."""
    dev, memory = lib.ggml_backend_dev_get(index), ffi.new("size_t[2]")
    lib.ggml_backend_dev_memory(dev, memory, memory + 1)
    kind, (free, total) = _kind(index), memory
    free = host_memory.free(total) if kind == "cpu" else free  # of which ggml reports all
    return Device(text(lib.ggml_backend_dev_name(dev)), text(lib.ggml_backend_dev_description(dev)), kind, free, total, index)


def _kind(index: int) -> str:
    return _KINDS.get(lib.ggml_backend_dev_type(lib.ggml_backend_dev_get(index)), "other")


def pick_device(name: str | None = None) -> Device:
    """The device called ``name`` (any case), or the first GPU, or the CPU. ``RPC:host:port`` connects to a worker.

    Raises:
        DeviceError: an unknown name (the message lists the known ones), or a worker that cannot be used.
    """
    if is_worker(name):
        from .rpc import open_worker

        address, description, free, total = open_worker(str(name))
        return Device(address.name, description, "rpc", free, total, -1)
    kinds = [_kind(index) for index in range(lib.ggml_backend_dev_count())]
    names = [text(lib.ggml_backend_dev_name(lib.ggml_backend_dev_get(index))) for index in range(len(kinds))]
    if name is None:
        return _device(next((i for i, kind in enumerate(kinds) if kind in ("gpu", "igpu")), kinds.index("cpu")))
    for index, own in enumerate(names):
        if own.lower() == str(name).lower():
            return _device(index)
    remedy = "" if any(kind in ("gpu", "igpu") for kind in kinds) else "; a GPU needs a build that was made for it (docs/install.md)"
    raise DeviceError(
        f"no device is called {name!r}; this build of llama-cpp-python offers {', '.join(names)}{meant(name, names) or remedy}"
    )


def device_handle(device: Device) -> DeviceHandle:
    """The ggml device."""
    if device.kind == "rpc":
        from .rpc import workers

        return workers[device.name].handle
    return lib.ggml_backend_dev_get(device.index)


def present(device: Device) -> Device:
    """The same device with its present free memory."""
    return pick_device(device.name) if device.kind == "rpc" else _device(device.index)


def device_feature(device: Device, name: str) -> str | None:
    """The feature ``name`` of the device's backend; None if unknown."""
    value = lib.device_feature(device_handle(device), name.encode())
    return text(value) if value != ffi.NULL else None


def reads_quantised(device: Device) -> bool:
    """Whether attention reads rows of q8_0 and q4_0 as they lie: patches/0037, which came before 0038, on the cards that 0020 runs on."""
    if not device.name.startswith("CUDA") or any(device_feature(device, name) is None for name in (DRAW, SMALL_BATCH)):
        return False
    wanted, invariant = (
        os.environ.get(f"GGML_CUDA_{name}", by_default) for name, by_default in (("QUANTIZED_KV", "1"), ("BATCH_INVARIANT", "0"))
    )
    return wanted not in ("", "0") and invariant in ("", "0")  # in invariant steps another kernel attends


def build_notes(device: Device) -> list[str]:
    """Notes on the installed build for this device: unused buffer types, the kernels used on NVIDIA GPUs."""
    if device.kind == "cpu":
        return FITNESS.notes
    if device.kind == "rpc":
        from .rpc import workers

        return list(workers[device.name].notes)
    if not device.name.startswith("CUDA"):
        return []
    loader = device_feature(device, SMALL_BATCH)
    return [
        f"blocks by the patched kernels ({loader})" if loader else "blocks by ggml's own kernels; `pyspec build --cuda` builds faster ones"
    ]


SWITCHES = tuple(
    f"GGML_CUDA_{name}"
    for name in [
        "SMALL_BATCH",
        "SMALL_BATCH_TMA",
        "SMALL_BATCH_WGMMA",
        "SMALL_BATCH_TYPES",
        "LARGE_BATCH",
        "LARGE_BATCH_WGMMA",
        "LARGE_BATCH_EXPERTS",
        "SHARED_EXPERT",
        "MOE_STEP",
        "DELTA_CHUNKS",
        "ROW_BY_MMA",
        "QUANTIZED_KV",
        "QUANTIZED_HOPPER",
        "BATCH_INVARIANT",
        "PDL",
        "FORCE_CUBLAS",
    ]
)


def kernels_in_use() -> tuple:
    """The build note and ggml-cuda's switches: all that selects kernels within one version."""
    from ..building import build_note

    return sorted(build_note(LIBRARIES).items(), key=repr), [os.environ.get(name) for name in SWITCHES]


def free_bytes(device: Device) -> int:
    """Free bytes: of the CPU now, of other devices when they were listed."""
    return host_memory.free(device.memory_total) if device.kind == "cpu" else device.memory_free


MAX_THREADS = 512  # GGML_MAX_N_THREADS
MAX_DEVICES = 16  # of one run
_NO_GRAPHS = "GGML_CUDA_DISABLE_GRAPHS"  # ggml-cuda reads it once, with its first graph


def graph_replay_enabled() -> bool:
    """Whether ggml-cuda may replay steps as CUDA graphs in this process."""
    return _NO_GRAPHS not in os.environ


def disable_graph_replay() -> None:
    """Makes ggml-cuda launch every step kernel by kernel. Only before the first backend of the process is opened.

    Raises:
        DeviceError: a backend was opened before.
    """
    if graph_replay_enabled() and Backend.opened:
        raise DeviceError("graph replay can only be switched off before the first model is loaded; start a new process for it")
    os.environ[_NO_GRAPHS] = "1"


class Backend:
    """One execution stream on a device. Owns its ggml backend; ``close`` is idempotent.

    Args:
        threads: of a CPU, fixed; None: adaptive, ``default_threads`` at most.
        kernels: as of ``pick_level``.

    Attributes:
        threads: of a CPU without other load; 0 on other devices.
        level, level_handle: of the native kernels, and for csrc; None and NULL for ggml's kernels.
        kernels: the native level's name, or "ggml".
        draws: whether drafts can be drawn on this device (``Graph.draw``).
        narrow_masks: whether attention takes masks of the last columns only (``Graph.kv_mask``).
        default_buffer_type: the buffer type that every op of this device supports.
    """

    opened = 0  # backends opened in this process
    counting = False  # whether buffers are counted instead of allocated

    def __init__(self, device: Device, threads: int | None = None, kernels: str | None = None) -> None:
        most = default_threads() if threads is None else whole(threads, "the number of threads", 1, MAX_THREADS, DeviceError)
        self.level = pick_level(kernels, device.kind)
        self.level_handle: LevelHandle = self.level.handle if self.level is not None else ffi.NULL
        self.kernels = self.level.name if self.level is not None else "ggml"
        Backend.opened += 1
        self.device = device
        self._dev = device_handle(device)
        self.draws = device.kind == "cpu" or device_feature(device, DRAW) is not None
        self.narrow_masks = self.level is None and device_feature(device, NARROW_MASK) is not None
        self.workers: tuple[str, ...] = ()  # the endpoint of an rpc device; devices of one worker share a connection
        if device.kind == "rpc":
            from .rpc import workers

            self.workers = (workers[device.name].address.endpoint,)
        self.handle: Any = lib.ggml_backend_dev_init(self._dev, ffi.NULL)
        if self.handle == ffi.NULL:
            check_present(self.workers)
            raise DeviceError(f"the device {device.name} ({device.description}) could not be opened; pick another `device`")
        self.default_buffer_type: BufferType = lib.ggml_backend_dev_buffer_type(self._dev)
        self.threads = most if device.kind == "cpu" else 0
        self.rule: ThreadRule | None = None
        if device.kind == "cpu":
            set_threads, handle = self._proc("ggml_backend_set_n_threads"), self.handle
            lib.call_set_n_threads(set_threads, handle, most)
            self.rule = ThreadRule(most, threads is None and bool(lib.pgs_threads_begin(handle, set_threads, most)))
            CORE_MONITOR.add(self.rule, lambda threads: lib.pgs_threads_now(handle, threads))

    def _proc(self, name: str) -> CData:
        return lib.ggml_backend_reg_get_proc_address(lib.ggml_backend_dev_backend_reg(self._dev), name.encode())

    def allocate(self, ctx: Context, buffer_type: BufferType | None = None) -> Buffer:
        """Allocates the tensors of ``ctx`` in ``buffer_type`` (default: the device's); NULL without memory for them.

        Linux overcommits and kills the process on write, so CPU allocations are limited to the free memory.
        """
        buffer_type = buffer_type or self.default_buffer_type
        need = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buffer_type)
        if self.device.kind == "cpu" and need > host_memory.with_swap(self.device.memory_total):
            return ffi.NULL
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(ctx, buffer_type)
        if buffer == ffi.NULL:
            check_present(self.workers)
        if self.device.kind == "cpu" and buffer != ffi.NULL:
            lib.pgs_large_pages(buffer)
        return buffer

    def allocate_temporary(self, ctx: Context) -> Buffer:
        """``allocate`` for short-lived tensors: on the CPU in separate pages that ``free_temporary`` returns to the system."""
        if self.device.kind != "cpu":
            return self.allocate(ctx)
        need = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, self.default_buffer_type)
        return lib.pgs_pages_buffer(ctx) if need <= host_memory.with_swap(self.device.memory_total) else ffi.NULL

    def allocate_zeroed(self, ctx: Context) -> Buffer:
        """``allocate_temporary`` with zeros; on Linux CPUs untouched pages cost no memory. Freed by ``free_temporary``."""
        buffer, on_cpu = self.allocate_temporary(ctx), self.device.kind == "cpu"
        if buffer != ffi.NULL and on_cpu:
            lib.pgs_large_pages(buffer)
        if buffer != ffi.NULL and not (on_cpu and sys.platform == "linux"):
            lib.ggml_backend_buffer_clear(buffer, 0)
        return buffer

    def free_temporary(self, buffer: Buffer) -> None:
        """Frees a buffer of ``allocate_temporary`` or ``allocate_zeroed``."""
        free = lib.pgs_pages_buffer_free if self.device.kind == "cpu" and buffer != ffi.NULL else lib.ggml_backend_buffer_free
        free(buffer)

    def size_of(self, buffer: Buffer) -> int:
        """Bytes of a buffer that an ``allocate`` method returned; 0 for NULL."""
        return lib.ggml_backend_buffer_get_size(buffer) if buffer != ffi.NULL else 0

    def counted(self) -> "CountingBackend":
        """The same device, counting."""
        return CountingBackend(self)

    def extra_buffer_types(self) -> list[BufferType]:
        """Buffer types with their own weight layout (repacked, AMX), best first, without those that the probe refused."""
        proc = self._proc("ggml_backend_dev_get_extra_bufts")
        found: list[BufferType] = []
        if proc != ffi.NULL:
            array, i = lib.call_get_extra_bufts(proc, self._dev), 0
            while array != ffi.NULL and array[i] != ffi.NULL:
                if text(lib.ggml_backend_buft_name(array[i])) not in FITNESS.refused:
                    found.append(array[i])
                i += 1
        return found

    def supports_matmul(self, buffer_type: BufferType, ggml_type: int, shape: Sequence[int]) -> bool:
        """Whether matrix products of weights of this shape (ggml order) are correct in this buffer type.

        ggml's AMX kernel reads uninitialised memory for one block of inputs and packs only the first of stacked matrices (patches/0012).
        """
        if text(lib.ggml_backend_buft_name(buffer_type)) != "AMX":
            return True
        return (shape[0] > 32 or lib.ggml_blck_size(ggml_type) != shape[0]) and all(n == 1 for n in shape[2:])

    @property
    def traffic(self) -> "Traffic | None":
        """Network traffic so far; None for a local device."""
        if self.device.kind != "rpc":
            return None
        from .rpc import traffic

        return traffic(self.device.name)

    def supports(self, node: Tensor) -> bool:
        """Whether the device can run this operation, allocated or not."""
        return bool(lib.ggml_backend_dev_supports_op(self._dev, node))

    def synchronize(self) -> None:
        lib.ggml_backend_synchronize(self.handle)

    def close(self) -> None:
        if self.handle is not None:
            if self.rule is not None:
                CORE_MONITOR.remove(self.rule)
                lib.pgs_threads_end(self.handle)
            lib.ggml_backend_free(self.handle)
            self.handle = None


class CountingBackend(Backend):
    """Counts the bytes of buffers instead of allocating them. Tensors in them have an address and a buffer type, and no memory.

    Borrows the stream of another backend, which supports the same operations.
    """

    counting = True

    def __init__(self, of: Backend) -> None:
        vars(self).update(vars(of))
        self._sizes: dict[int, int] = {}

    def _count(self, ctx: Context, buffer_type: BufferType, nbytes: int) -> Buffer:
        buffer = lib.pgs_counted_buffer(ctx, buffer_type)
        self._sizes[int(ffi.cast("uintptr_t", buffer))] = nbytes
        return buffer

    def allocate(self, ctx: Context, buffer_type: BufferType | None = None) -> Buffer:
        buffer_type = buffer_type or self.default_buffer_type
        return self._count(ctx, buffer_type, lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buffer_type))

    def allocate_temporary(self, ctx: Context) -> Buffer:
        if self.device.kind != "cpu":
            return self.allocate(ctx)
        return self._count(ctx, self.default_buffer_type, lib.pgs_pages_size(ctx))

    allocate_zeroed = allocate_temporary

    def free_temporary(self, buffer: Buffer) -> None:
        lib.ggml_backend_buffer_free(buffer)

    def size_of(self, buffer: Buffer) -> int:
        return self._sizes.get(int(ffi.cast("uintptr_t", buffer)), 0)

    def counted(self) -> "CountingBackend":
        return self

    def close(self) -> None:
        """The stream is borrowed."""


def pick_devices(names: str | None = None) -> list[Device]:
    """The devices in the comma-separated list ``names``; None for ``pick_device()``.

    The CPU may be named several times, each a backend of its own; that tests a split without a second GPU.

    Raises:
        DeviceError: an unknown or empty name, a GPU named twice, or too many devices.
    """
    if names is None:
        return [pick_device()]
    wanted = [name.strip() for name in str(names).split(",")]
    if not all(wanted):
        raise DeviceError(
            f"the list of devices {names!r} has an empty name; give names as `pyspec devices` lists them, separated by commas"
        )
    if len(wanted) > MAX_DEVICES:
        raise DeviceError(f"{len(wanted)} devices are named; a model is split over at most {MAX_DEVICES}")
    found = [pick_device(name) for name in wanted]
    for device in found:
        if device.kind != "cpu" and [other.name for other in found].count(device.name) > 1:
            raise DeviceError(f"{device.name} is named twice; a model is split over different devices")
    return found


def execution_order(found: Sequence[Device]) -> list[int]:
    """Indices into ``found`` in execution order. Next to GPUs, CPUs have the first layers: the last device also has the head and the drafter.
    With workers only, the named order holds."""
    first = any(device.kind in ("gpu", "igpu") for device in found)
    return sorted(range(len(found)), key=lambda i: first and found[i].kind != "cpu")


def open_backends(found: Sequence[Device], threads: int | None = None, kernels: str | None = None) -> list[Backend]:
    """One backend per device; the caller closes them. ``threads`` and ``kernels`` as of ``Backend``.

    Raises:
        DeviceError: a device cannot be opened; none stays open then.
    """
    opened: list[Backend] = []
    with ExitStack() as stack:
        for device in found:
            level = kernels if device.kind == "cpu" or len(found) == 1 else None  # native kernels are for CPUs only
            opened.append(stack.enter_context(closing(Backend(device, threads, level))))
        stack.pop_all()
    return opened


def cpu_wait_s() -> float | None:
    """Seconds that this thread was runnable without a core; None where the kernel does not report it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def release_threads() -> None:
    """Ends this thread's compute threads; its next step starts new ones (about 30 us each).

    For threads that finish or wait: with more compute threads than cores, every barrier of a step sleeps in the kernel (csrc/compute_threads.c).
    """
    lib.pgs_release_threads()
