"""What answers at a worker's address, asked before ggml connects: ggml waits without an end, or ends the process, where something is wrong.

The protocol is that of ggml's RPC backend: a request is a byte that names the command, the length of what follows as U64 and that many bytes;
an answer is its length and its bytes. Numbers are little-endian.
"""

import re
import socket
import struct
from dataclasses import dataclass

from ..errors import DeviceError

PORT = 50052
PROTOCOL = (7, 0, 0)  # RPC_PROTO_*_VERSION of the pinned ggml: the major one has to be the same, and no minor one above
SECONDS = 5.0  # that a worker has for each answer
_MEMORY, _HELLO, _COUNT = 11, 14, 15  # RPC_CMD_GET_DEVICE_MEMORY, RPC_CMD_HELLO, RPC_CMD_DEVICE_COUNT
_CAPS = 24
OURS = 1  # the byte behind the version: a worker that says what it cannot compute and keeps several graphs (patches/0030)


@dataclass(frozen=True)
class Address:
    """``host`` as it was named, ``ip`` as a number, and which of the worker's devices."""

    host: str
    port: int
    device: int = 0
    ip: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}{f'/{self.device}' if self.device else ''}"

    @property
    def name(self) -> str:
        """What ``--device`` takes."""
        return f"RPC:{self}"

    @property
    def endpoint(self) -> str:
        """What ggml takes."""
        return f"{self.ip}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """What a worker said. ``memory``: (free, total) bytes of each of its devices; ``ours``: whether it checks operations."""

    version: tuple[int, int, int]
    memory: tuple[tuple[int, int], ...]
    ours: bool


def is_worker(name: str | None) -> bool:
    """Whether this is how a worker is named as a device."""
    return str(name or "").lower().startswith("rpc:")


def parse(name: str) -> Address:
    """The address in ``RPC:host:port`` or ``RPC:host:port/device``, with its number looked up.

    Raises:
        DeviceError: it is written in another way, or the name of the host is not known.
    """
    found = re.fullmatch(r"(?i:rpc):([^:/\s]+)(?::(\d{1,5}))?(?:/(\d{1,2}))?", name)
    port = int(found[2] or PORT) if found else 0
    if not found or not 1 <= port <= 65535:
        raise DeviceError(
            f"{name!r} names no worker: write RPC:host:port, like RPC:192.168.1.7:{PORT}, and /1 behind it for its second device"
        )
    try:
        ip = socket.getaddrinfo(found[1], port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DeviceError(f"the worker's host {found[1]!r} is not known ({why}); name another one, or its IPv4 address") from None
    return Address(found[1], port, int(found[3] or 0), str(ip))


class _Refused(Exception):
    """What is wrong with an answer."""


class _Client:
    def __init__(self, address: Address, seconds: float) -> None:
        self.socket = socket.create_connection((address.ip, address.port), seconds)

    def ask(self, command: int, body: bytes, expected: int) -> bytes:
        self.socket.sendall(struct.pack("<BQ", command, len(body)) + body)
        (size,) = struct.unpack("<Q", self._read(8))
        if size != expected:
            raise _Refused
        return self._read(size)

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise _Refused
            data += part
        return data


def probe(address: Address, seconds: float = SECONDS) -> Answer:
    """Asks the worker for its version, its devices and their memory.

    Raises:
        DeviceError: it does not listen, does not answer in time, is no RPC server, speaks another version, or has no such device.
    """
    try:
        client = _Client(address, seconds)
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
    with client.socket:
        return _greet(client, address, seconds)


def check_count(address: Address, count: int) -> None:
    """Raises DeviceError where a worker of ``count`` devices does not have the one that is named."""
    if address.device >= count:
        raise DeviceError(
            f"the worker {address.host}:{address.port} has {count} device{'s' * (count != 1)}, and /{address.device} is none of them"
        )


def _greet(client: _Client, address: Address, seconds: float) -> Answer:
    who = f"what listens at {address.host}:{address.port}"
    try:
        major, minor, patch, flags = struct.unpack("<BBBB", client.ask(_HELLO, bytes(_CAPS), 4 + _CAPS)[:4])
        if major != PROTOCOL[0] or minor > PROTOCOL[1]:
            raise DeviceError(
                f"the worker {address.host}:{address.port} speaks version {major}.{minor}.{patch} of ggml's RPC protocol, and this ggml "
                f"{'.'.join(map(str, PROTOCOL))}; run the same pyggml_spec on both machines"
            )
        (count,) = struct.unpack("<I", client.ask(_COUNT, b"", 4))
        check_count(address, count)
        memory = tuple(struct.unpack("<QQ", client.ask(_MEMORY, struct.pack("<I", i), 16)) for i in range(min(count, 64)))
    except TimeoutError:
        raise DeviceError(
            f"{who} said nothing within {seconds:g} s: a worker that another program uses (one at a time), one that hangs, or no worker at all"
        ) from None
    except (_Refused, OSError):
        raise DeviceError(f"{who} does not answer as a worker does: another program, or ggml's RPC of another version") from None
    return Answer((major, minor, patch), memory, flags == OURS)
