"""Devices of the ggml registry, and the backend (a stream on one device) that a model runs on."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import whole
from ..errors import DeviceError
from ..pin import installed_libraries
from ..suggest import meant
from . import host_memory
from .cores import CORE_MONITOR, ThreadRule, default_threads
from .kernels import pick_level
from .library import FITNESS, Buffer, BufferType, CData, Context, DeviceHandle, LevelHandle, Tensor, check_present, ffi, lib, text
from .workers import is_worker

if TYPE_CHECKING:
    from .rpc import Traffic

_KINDS = {
    lib.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
    lib.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    lib.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    lib.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
}


SMALL_BATCH = "SMALL_BATCH"  # how the products of patches/0020 load, where ggml-cuda was built with them and they are not switched off


@dataclass(frozen=True)
class Device:
    """One device: ``name`` is what ``--device`` takes; memory in bytes; ``kind`` is cpu, gpu, igpu, accel, or rpc for one of a worker.

    ``index``: in ggml's list, -1 of a worker's.
    """

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int
    index: int


def devices() -> list[Device]:
    """Every device that llama-cpp-python's ggml was built with and found on this machine."""
    found = []
    free, total = ffi.new("size_t *"), ffi.new("size_t *")
    for index in range(lib.ggml_backend_dev_count()):
        dev = lib.ggml_backend_dev_get(index)
        lib.ggml_backend_dev_memory(dev, free, total)
        kind = _KINDS.get(lib.ggml_backend_dev_type(dev), "other")
        if kind == "cpu":  # ggml calls all of it free
            free[0] = host_memory.free(total[0])
        found.append(
            Device(text(lib.ggml_backend_dev_name(dev)), text(lib.ggml_backend_dev_description(dev)), kind, free[0], total[0], index)
        )
    return found


def pick_device(name: str | None = None) -> Device:
    """The device called ``name`` (any case), or the first GPU, or the CPU. ``RPC:host:port`` is a worker's, which is connected to.

    Raises:
        DeviceError: no device has that name; the message lists those that exist. What is wrong with a worker.
    """
    if is_worker(name):
        from .rpc import open_worker

        address, description, free, total = open_worker(str(name))
        return Device(address.name, description, "rpc", free, total, -1)
    found = devices()
    if name is None:
        return next((d for d in found if d.kind in ("gpu", "igpu")), next(d for d in found if d.kind == "cpu"))
    for device in found:
        if device.name.lower() == str(name).lower():
            return device
    names = [d.name for d in found]
    remedy = "" if any(d.kind in ("gpu", "igpu") for d in found) else "; a GPU needs a build that was made for it (docs/guide.md)"
    raise DeviceError(
        f"no device is called {name!r}; this build of llama-cpp-python offers {', '.join(names)}{meant(name, names) or remedy}"
    )


def device_handle(device: Device) -> DeviceHandle:
    """ggml's device."""
    if device.kind == "rpc":
        from .rpc import handle_of

        return handle_of(device.name)
    return lib.ggml_backend_dev_get(device.index)


def workers_of(device: Device) -> tuple[str, ...]:
    """The address in numbers of the worker whose device this is; empty of a device of this machine. A worker's devices share one connection."""
    if device.kind != "rpc":
        return ()
    from .rpc import endpoint_of

    return (endpoint_of(device.name),)


def present(device: Device) -> Device:
    """The same device with the memory that is free now."""
    return pick_device(device.name) if device.kind == "rpc" else devices()[device.index]


def device_feature(device: Device, name: str) -> str | None:
    """What the device's backend says of itself by this name, None where it says nothing."""
    value = lib.device_feature(device_handle(device), name.encode())
    return text(value) if value != ffi.NULL else None


def build_notes(device: Device) -> list[str]:
    """What there is to say about the installed build on this device: buffer types that are not used, whose kernels run on an NVIDIA GPU."""
    if device.kind == "cpu":
        return FITNESS.notes
    if device.kind == "rpc":
        from .rpc import notes_of

        return notes_of(device.name)
    if not device.name.startswith("CUDA"):
        return []
    loader = device_feature(device, SMALL_BATCH)
    return [
        f"blocks by the patched kernels ({loader})" if loader else "blocks by ggml's own kernels; `pyspec build --cuda` builds faster ones"
    ]


SWITCHES = (
    "GGML_CUDA_SMALL_BATCH",
    "GGML_CUDA_SMALL_BATCH_TMA",
    "GGML_CUDA_SMALL_BATCH_WGMMA",
    "GGML_CUDA_LARGE_BATCH",
    "GGML_CUDA_LARGE_BATCH_WGMMA",
    "GGML_CUDA_DELTA_CHUNKS",
    "GGML_CUDA_ROW_BY_MMA",
    "GGML_CUDA_BATCH_INVARIANT",
    "GGML_CUDA_PDL",
    "GGML_CUDA_FORCE_CUBLAS",
)


def kernels_in_use() -> tuple:
    """What decides which kernels compute, as far as files of the same version can differ: the note of the build, and ggml-cuda's switches."""
    from ..building import build_note

    libraries = installed_libraries()
    note = build_note(libraries) if libraries is not None else {}
    return sorted(note.items(), key=repr), [os.environ.get(name) for name in SWITCHES]


def free_bytes(device: Device) -> int:
    """What the device has free, of the CPU's memory now, and of others when they were listed."""
    return host_memory.free(device.memory_total) if device.kind == "cpu" else device.memory_free


MOST_THREADS = 512  # GGML_MAX_N_THREADS
_NO_GRAPHS = "GGML_CUDA_DISABLE_GRAPHS"  # ggml-cuda reads it once, at its first graph


def graph_replay_enabled() -> bool:
    """Whether ggml-cuda may replay steps as CUDA graphs in this process."""
    return _NO_GRAPHS not in os.environ


def disable_graph_replay() -> None:
    """Makes ggml-cuda launch every step kernel by kernel, as a control. Only before the first backend of the process is opened.

    Raises:
        DeviceError: a backend was opened before, so ggml may have read its setting already.
    """
    if graph_replay_enabled() and Backend.opened:
        raise DeviceError("graph replay can only be switched off before the first model is loaded; start a new process for it")
    os.environ[_NO_GRAPHS] = "1"


class Backend:
    """One execution stream on a device. Owns its ggml backend; ``close`` is idempotent.

    ``threads``: of a CPU, always so many; None: as many as other work leaves cores for, ``default_threads`` at most. ``level``: of native kernels, None
    where ggml's are used; ``kernels`` as in ``pick_level``. ``workers``: see ``workers_of``.
    """

    opened = 0  # backends of this process so far

    def __init__(self, device: Device, threads: int | None = None, kernels: str | None = None) -> None:
        most = default_threads() if threads is None else whole(threads, "the number of threads", 1, MOST_THREADS, DeviceError)
        self.level = pick_level(kernels, device.kind)
        Backend.opened += 1
        self.device = device
        self._dev = device_handle(device)
        self.workers = workers_of(device)
        self.handle: Any = lib.ggml_backend_dev_init(self._dev, ffi.NULL)
        if self.handle == ffi.NULL:
            check_present(self.workers)
            raise DeviceError(f"the device {device.name} ({device.description}) could not be opened; pick another `device`")
        self.rule: ThreadRule | None = None  # of a CPU: how many threads compute
        if device.kind == "cpu":
            self.rule = ThreadRule(most, threads is None)
            self._begin_threads(self.rule)

    def _begin_threads(self, rule: ThreadRule) -> None:
        set_threads, handle = self._proc("ggml_backend_set_n_threads"), self.handle
        lib.call_set_n_threads(set_threads, handle, rule.most)
        if rule.adapts and not lib.pgs_threads_begin(handle, set_threads, rule.most):
            rule.adapts = False
        CORE_MONITOR.add(rule, lambda threads: lib.pgs_threads_now(handle, threads))

    @property
    def threads(self) -> int:
        """Of a CPU, that compute where no other work needs its cores; 0 of another device."""
        return self.rule.most if self.rule is not None else 0

    def _proc(self, name: str) -> CData:
        return lib.ggml_backend_reg_get_proc_address(lib.ggml_backend_dev_backend_reg(self._dev), name.encode())

    @property
    def level_handle(self) -> LevelHandle:
        """The level as csrc takes it; NULL for ggml's kernels."""
        return self.level.handle if self.level is not None else ffi.NULL

    @property
    def kernels(self) -> str:
        """Whose kernels multiply: the level of our own, or "ggml"."""
        return self.level.name if self.level is not None else "ggml"

    @property
    def default_buffer_type(self) -> BufferType:
        """The buffer type that every op of this device can use."""
        return lib.ggml_backend_dev_buffer_type(self._dev)

    def allocate(self, ctx: Context, buffer_type: BufferType | None = None) -> Buffer:
        """A buffer for the tensors of ``ctx``, of the default type without another one; NULL if there is no memory for them.

        Linux promises more memory than there is, and ends the process that then writes to it: on the CPU, nobody asks for more than is free.
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
        """``allocate`` for what comes and goes: on the CPU in pages of its own, which go back to the system with ``free_temporary``."""
        if self.device.kind != "cpu":
            return self.allocate(ctx)
        need = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, self.default_buffer_type)
        return lib.pgs_pages_buffer(ctx) if need <= host_memory.with_swap(self.device.memory_total) else ffi.NULL

    def allocate_zeroed(self, ctx: Context) -> Buffer:
        """Like ``allocate_temporary``, and zeros: on Linux's CPUs nothing is written for that, and pages cost memory when something is. Freed by ``free_temporary``."""
        buffer = self.allocate_temporary(ctx)
        if buffer == ffi.NULL:
            return buffer
        if self.device.kind == "cpu":
            lib.pgs_large_pages(buffer)
        if self.device.kind != "cpu" or sys.platform != "linux":
            lib.ggml_backend_buffer_clear(buffer, 0)
        return buffer

    def free_temporary(self, buffer: Buffer) -> None:
        """Frees what ``allocate_temporary`` or ``allocate_zeroed`` gave."""
        free = lib.pgs_pages_buffer_free if self.device.kind == "cpu" and buffer != ffi.NULL else lib.ggml_backend_buffer_free
        free(buffer)

    def extra_buffer_types(self) -> list[BufferType]:
        """Buffer types that store matmul weights in a layout of their own (the CPU's repacked one, AMX), best first; none that the probe refused."""
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
        """Whether products by weights of this shape, in ggml order, are what they should be in this buffer type.

        ggml's AMX kernel adds a product of 32 rows and one block of 32 inputs to what lay in the memory of the result (patches/0012): NMSE of
        the logits 0.004 to 0.3, or NaN. Of a stack of matrices it says that it takes them, packs the first, and reads behind it for the others.
        """
        if text(lib.ggml_backend_buft_name(buffer_type)) != "AMX":
            return True
        return (shape[0] > 32 or lib.ggml_blck_size(ggml_type) != shape[0]) and all(n == 1 for n in shape[2:])

    @property
    def traffic(self) -> "Traffic | None":
        """What went over the network so far; None of a device of this machine."""
        if self.device.kind != "rpc":
            return None
        from .rpc import traffic

        return traffic(self.device.name)

    def supports(self, node: Tensor) -> bool:
        """Whether the device can run this (possibly not yet allocated) operation."""
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


def cpu_wait_s() -> float | None:
    """Seconds that this thread was ready to run, but other work had its core; None where the kernel does not say (it is Linux that does)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def release_threads() -> None:
    """Ends the threads that this thread computes with on the CPU; its next step makes new ones, which takes some 30 us each.

    To be called by a thread whose work is over, or waits for others: while a process has more of them than cores, each step of any thread sleeps in
    the kernel 73 times (csrc/compute_threads.c).
    """
    lib.pgs_release_threads()
