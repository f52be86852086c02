"""Devices of workers: ggml's RPC backend as a separate library (`pyspec build --rpc`), loaded with the first worker.

They are not in ggml's device list, so listing devices never waits for another machine.
"""

import ctypes
from collections.abc import Collection
from typing import Any, NamedTuple

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
workers: dict[str, "Worker"] = {}  # in use, by name


class Worker(NamedTuple):
    """``notes``: sentences about its use."""

    handle: DeviceHandle
    address: Address
    notes: tuple[str, ...]


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
        notes = next(known.notes for known in workers.values() if known.address.endpoint == address.endpoint)
        handle, out = _device(address), ffi.new("size_t[2]")
        lib.ggml_backend_dev_memory(handle, out, out + 1)
        free, total = out
    else:
        info = probe(address)
        notes = (UNENCRYPTED, *(() if info.extended else (UNCHECKED,)))
        handle = _device(address)
        free, total = info.memory[address.device]
    workers[address.name] = Worker(handle, address, notes)
    return address, f"a device of the worker {address}", free, total


def _device(address: Address) -> DeviceHandle:
    reg = library().add_server(address.endpoint.encode())
    count = lib.ggml_backend_reg_dev_count(reg) if reg != ffi.NULL else 0
    if count == 0:
        raise DeviceError(f"the worker {address} was there, and is gone; start it again")
    check_count(address, count)
    return lib.ggml_backend_reg_dev_get(reg, address.device)


def worker_lost_reason(endpoints: Collection[str]) -> str | None:
    """The message about the first of the workers at these addresses whose connection is lost; None while none is."""
    for _, address, _ in list(workers.values()):
        why = library().lost(address.endpoint.encode()) if address.endpoint in endpoints else ffi.NULL
        if why != ffi.NULL:
            return (
                f"the worker {address.host}:{address.port} is lost: {text(why)}; what was computed there is gone, so load the model again "
                "once the worker answers"
            )
    return None


class Traffic(NamedTuple):
    """Since the connection was made: bytes sent and received, answered requests, graphs sent in full, and graphs computed again."""

    sent: int
    received: int
    answers: int
    graphs: int
    graphs_again: int


def traffic(name: str) -> Traffic:
    """Traffic of the connection to a worker."""
    out = ffi.new("uint64_t[5]")
    library().traffic(workers[name].address.endpoint.encode(), out)
    return Traffic(*out)
