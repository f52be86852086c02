"""Devices of workers: ggml's RPC backend as a separate library (`pyspec build --rpc`), loaded with the first worker.

They are not in ggml's device list, so listing devices never waits for another machine.
"""

import ctypes
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .. import rpc_library
from ..errors import DeviceError
from .library import LOST_CHECKS, DeviceHandle, ffi, lib, text
from .workers import Address, check_count, parse, probe

UNENCRYPTED = "traffic to the worker is not encrypted (docs/workers.md shows a tunnel through SSH)"
UNCHECKED = "this worker is llama.cpp's own: it does not report unsupported operations, and exits on one"


class _Library:
    """Functions of the library, called without the GIL."""

    def __init__(self) -> None:
        path = rpc_library.kept()
        if path is None:
            raise DeviceError(f"workers need ggml's RPC backend, which was not built yet; {rpc_library.BUILD_IT}")
        try:
            self._loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise DeviceError(f"ggml's RPC backend cannot be loaded ({error}); run `pyspec build --rpc --fresh`") from None
        self.add_server = self._get("ggml_backend_reg_t (*)(char *)", "add_server")
        self.start_server = self._get("void (*)(char *, char *, size_t, size_t, ggml_backend_dev_t *)", "start_server")
        self.lost = self._get("char * (*)(char *)", "lost")
        self.connected = self._get("bool (*)(char *)", "connected")
        self.traffic = self._get("void (*)(char *, uint64_t *)", "traffic")

    def _get(self, kind: str, name: str) -> Any:
        address = ctypes.cast(getattr(self._loaded, f"ggml_backend_rpc_{name}"), ctypes.c_void_p).value
        return ffi.cast(kind, address)


_library: _Library | None = None
_handles: dict[str, tuple[DeviceHandle, Address, tuple[str, ...]]] = {}  # by name: device, address, notes


def library() -> _Library:
    """The library, loaded on first use.

    Raises:
        DeviceError: it was not built, or does not load.
    """
    global _library  # noqa: PLW0603  (stays loaded as long as the process runs)
    if _library is None:
        _library = _Library()
        LOST_CHECKS.append(worker_lost_reason)
    return _library


def open_worker(name: str) -> tuple[Address, str, int, int]:
    """Connects to the worker ``name``. Returns its address, a description, and (free, total) bytes of its memory.

    Raises:
        DeviceError: as ``library`` and ``workers.probe``.
    """
    rpc, address = library(), parse(name)
    endpoint = address.endpoint.encode()
    if (lost := rpc.lost(endpoint)) != ffi.NULL:  # a lost worker does not come back by itself
        raise DeviceError(
            f"the worker {address.host}:{address.port} is lost: {text(lost)}; a session of this program still uses what it had there: close it first"
        )
    if rpc.connected(endpoint):  # all devices share a connection: a second one could wait for the end of the first
        notes = next(known[2] for known in _handles.values() if known[1].endpoint == address.endpoint)
        handle = _device(address)
        free, total = memory(handle)
    else:
        info = probe(address)
        notes = (UNENCRYPTED, *(() if info.extended else (UNCHECKED,)))
        handle = _device(address)
        free, total = info.memory[address.device]
    _handles[address.name] = handle, address, notes
    return address, f"a device of the worker {address}", free, total


def _device(address: Address) -> DeviceHandle:
    reg = library().add_server(address.endpoint.encode())
    count = lib.ggml_backend_reg_dev_count(reg) if reg != ffi.NULL else 0
    if count == 0:
        raise DeviceError(f"the worker {address} was there, and is gone; start it again")
    check_count(address, count)
    return lib.ggml_backend_reg_dev_get(reg, address.device)


def memory(handle: DeviceHandle) -> tuple[int, int]:
    """(free, total) bytes of the worker's device."""
    free, total = ffi.new("size_t *"), ffi.new("size_t *")
    lib.ggml_backend_dev_memory(handle, free, total)
    return free[0], total[0]


def handle_of(name: str) -> DeviceHandle:
    """The ggml device of a worker opened by ``open_worker``."""
    return _handles[name][0]


def notes_of(name: str) -> list[str]:
    """Notes on a worker in use."""
    return list(_handles[name][2])


def endpoint_of(name: str) -> str:
    """The numeric address of a worker opened by ``open_worker``."""
    return _handles[name][1].endpoint


def worker_lost_reason(workers: Collection[str]) -> str | None:
    """The message about the first of these workers whose connection is lost; None while none is."""
    for _, address, _ in list(_handles.values()):
        why = library().lost(address.endpoint.encode()) if address.endpoint in workers else ffi.NULL
        if why != ffi.NULL:
            return (
                f"the worker {address.host}:{address.port} is lost: {text(why)}; what was computed there is gone, so load the model again "
                "once the worker answers"
            )
    return None


@dataclass(frozen=True)
class Traffic:
    """Since the connection was made: bytes sent and received, answered requests, graphs sent in full, and graphs computed again."""

    sent: int
    received: int
    answers: int
    graphs: int
    graphs_again: int


def traffic(name: str) -> Traffic:
    """Traffic of the connection to a worker."""
    out = ffi.new("uint64_t[5]")
    library().traffic(_handles[name][1].endpoint.encode(), out)
    return Traffic(*out)
