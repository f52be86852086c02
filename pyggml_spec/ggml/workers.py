"""Checks a worker's address before ggml connects: ggml waits forever, or ends the process, on a bad peer.

The protocol is ggml RPC: a request is a command byte, a U64 length and the body; a response is a length and a body. Little-endian.
"""

import re
import socket
import struct
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from ..errors import DeviceError

PORT = 50052
PROTOCOL = (7, 0, 0)  # RPC_PROTO_*_VERSION of the pinned ggml: same major, no newer minor
SECONDS = 5.0  # timeout per response
_MEMORY, _HELLO, _COUNT = 11, 14, 15  # RPC_CMD_GET_DEVICE_MEMORY, RPC_CMD_HELLO, RPC_CMD_DEVICE_COUNT
_CAPS = 24
_EXTENDED = 1  # flag after the version: the worker checks operations and keeps several graphs (patches/0030)


@dataclass(frozen=True)
class Address:
    """``host`` as named, ``ip`` numeric, and the index of the worker's device."""

    host: str
    port: int
    device: int = 0
    ip: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}{f'/{self.device}' if self.device else ''}"

    @property
    def name(self) -> str:
        """As `--device` takes it."""
        return f"RPC:{self}"

    @property
    def endpoint(self) -> str:
        """As ggml takes it."""
        return f"{self.ip}:{self.port}"


class WorkerInfo(NamedTuple):
    """``memory``: (free, total) bytes per device; ``extended``: whether the worker checks operations."""

    version: tuple[int, int, int]
    memory: tuple[tuple[int, int], ...]
    extended: bool


def is_worker(name: str | None) -> bool:
    """Whether ``name`` is a worker's device name."""
    return str(name or "").lower().startswith("rpc:")


def parse(name: str) -> Address:
    """The address in ``RPC:host:port`` or ``RPC:host:port/device``, resolved.

    Raises:
        DeviceError: a malformed name or an unknown host.
    """
    found = re.fullmatch(r"(?i:rpc):([^:/\s]+)(?::(\d{1,5}))?(?:/(\d{1,2}))?", name)
    port = int(found[2] or PORT) if found else 0
    if not found or not 1 <= port <= 65535:
        raise DeviceError(
            f"{name!r} names no worker: write RPC:host:port, like RPC:192.168.1.7:{PORT}, with /1 appended for its second device"
        )
    try:
        ip = socket.getaddrinfo(found[1], port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DeviceError(f"the worker's host {found[1]!r} is not known ({why}); name another one, or its IPv4 address") from None
    return Address(found[1], port, int(found[3] or 0), str(ip))


class _BadResponse(Exception):
    """A malformed response."""


def probe(address: Address, seconds: float = SECONDS) -> WorkerInfo:
    """Requests version, devices and memory of a worker.

    Raises:
        DeviceError: it does not listen, does not respond in time, is no RPC server, has another version, or lacks the device.
    """
    try:
        connection = socket.create_connection((address.ip, address.port), seconds)
    except ConnectionRefusedError:
        command = f"pyspec worker --port {address.port}"
        raise DeviceError(
            f"nothing listens at {address.host}:{address.port}; start `{command}` there, and have it listen on that address"
        ) from None
    except OSError as error:  # a TimeoutError, too
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
        raise DeviceError(
            f"the worker {address.host}:{address.port} cannot be reached within {seconds:g} s ({why}); is the address right?"
        ) from None
    with connection, connection.makefile("rb") as file:
        return _handshake(connection, file, address, seconds)


def check_count(address: Address, count: int) -> None:
    """Raises DeviceError if a worker of ``count`` devices lacks the named one."""
    if address.device >= count:
        raise DeviceError(
            f"the worker {address.host}:{address.port} has {count} device{'s' * (count != 1)}, and /{address.device} is none of them"
        )


def _handshake(connection: socket.socket, file: BinaryIO, address: Address, seconds: float) -> WorkerInfo:
    server = f"the server at {address.host}:{address.port}"

    def request(command: int, body: bytes, expected: int) -> bytes:
        connection.sendall(struct.pack("<BQ", command, len(body)) + body)
        if file.read(8) != struct.pack("<Q", expected) or len(response := file.read(expected)) < expected:
            raise _BadResponse
        return response

    try:
        major, minor, patch, flags = struct.unpack("<BBBB", request(_HELLO, bytes(_CAPS), 4 + _CAPS)[:4])
        if major != PROTOCOL[0] or minor > PROTOCOL[1]:
            raise DeviceError(
                f"the worker {address.host}:{address.port} speaks version {major}.{minor}.{patch} of ggml's RPC protocol, and this ggml "
                f"{'.'.join(map(str, PROTOCOL))}; run the same pyggml_spec on both machines"
            )
        (count,) = struct.unpack("<I", request(_COUNT, b"", 4))
        check_count(address, count)
        memory = tuple(struct.unpack("<QQ", request(_MEMORY, struct.pack("<I", i), 16)) for i in range(min(count, 64)))
    except TimeoutError:
        raise DeviceError(
            f"{server} sent nothing within {seconds:g} s: the worker is in use (one client at a time), it hangs, or it is no worker"
        ) from None
    except (_BadResponse, OSError):
        raise DeviceError(f"{server} does not respond as a worker: it is another program, or ggml's RPC of another version") from None
    return WorkerInfo((major, minor, patch), memory, flags == _EXTENDED)
