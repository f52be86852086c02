"""Programs that a worker does not want: what they send, and what becomes of the server after it."""

import random
import socket
import struct
import time

from workers import Worker, exactly

(
    ALLOC, ALIGNMENT, MAX_SIZE, BASE, FREE, CLEAR, SET, SET_HASH, GET, COPY, COMPUTE, MEMORY, INIT, ALLOC_SIZE, HELLO, COUNT, RECOMPUTE,
    MEMSET,
) = range(18)  # fmt: skip
CHECK_GRAPH, COMPUTE_SLOT, RECOMPUTE_SLOT = 64, 65, 66
F32, ADD, COMPUTED = 0, 2, 16  # the last one: GGML_TENSOR_FLAG_COMPUTE
NUMBERS = (
    0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 65, 255, 256, 4096, 1 << 20, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63,
    (1 << 64) - 1,
)  # fmt: skip
TENSOR = "<QIQ4I4II64si10QQQQ64sI"  # rpc_tensor, packed


def tensor(number: int, buffer: int, data: int, ne=(8, 1, 1, 1), kind: int = F32, op: int = 0, sources=(), **more) -> bytes:
    """A contiguous tensor of 4 bytes per element as it is sent."""
    strides = more.get("nb") or (4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2])
    src = [*sources, *[0] * (10 - len(sources))]
    shape, flags = (*ne, *(s & 0xFFFFFFFF for s in strides)), COMPUTED if op else 0
    return struct.pack(TENSOR, number, kind, buffer, *shape, op, bytes(64), flags, *src, 0, 0, data, b"", 0)


def graph(tensors: list[bytes], nodes: list[int], device: int = 0) -> bytes:
    return struct.pack(f"<II{len(nodes)}QI", device, len(nodes), *nodes, len(tensors)) + b"".join(tensors)


class Peer:
    """A connection that has said HELLO, and owns a buffer of 256 bytes at ``base``."""

    def __init__(self, worker: Worker, seconds: float = 20):
        self.socket = socket.create_connection(("127.0.0.1", worker.port), seconds)
        assert self.ask(HELLO, bytes(24))[:4] == b"\x07\x00\x00\x01"
        self.buffer, size = struct.unpack("<QQ", self.ask(ALLOC, struct.pack("<IQ", 0, 256)))
        assert size >= 256
        (self.base,) = struct.unpack("<Q", self.ask(BASE, struct.pack("<Q", self.buffer)))

    def send(self, command: int, body: bytes) -> None:
        self.socket.sendall(struct.pack("<BQ", command, len(body)) + body)

    def ask(self, command: int, body: bytes) -> bytes:
        self.send(command, body)
        return exactly(self.socket, struct.unpack("<Q", exactly(self.socket, 8))[0])

    def closed(self) -> bool:
        """Whether the server closes the connection, and says nothing before it does."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def tensor(self, number: int = 1, at: int = 0, **more) -> bytes:
        return tensor(number, self.buffer, self.base + at, **more)

    def messages(self) -> dict[int, bytes]:
        """One of each command that makes sense."""
        a, b = self.tensor(1), self.tensor(2, 32)
        total = self.tensor(3, 64, op=ADD, sources=(1, 2))
        adding = graph([a, b, total], [3])
        return {
            ALLOC: struct.pack("<IQ", 0, 64),
            ALIGNMENT: struct.pack("<I", 0),
            MAX_SIZE: struct.pack("<I", 0),
            BASE: struct.pack("<Q", self.buffer),
            CLEAR: struct.pack("<QB", self.buffer, 7),
            SET: a + b"\0" + struct.pack("<Q", 0) + bytes(32),
            SET_HASH: a + struct.pack("<QQ", 0, 5),
            GET: a + struct.pack("<QQ", 0, 32),
            COPY: a + b,
            MEMSET: a + struct.pack("<QQB", 0, 32, 1),
            MEMORY: struct.pack("<I", 0),
            INIT: a,
            ALLOC_SIZE: struct.pack("<I", 0) + total + a + b + bytes(296 * 8),
            COUNT: b"",
            CHECK_GRAPH: adding,
            COMPUTE: adding,
            COMPUTE_SLOT: adding[:4] + struct.pack("<I", 1) + adding[4:],
            RECOMPUTE_SLOT: struct.pack("<II", 0, 0),
            FREE: struct.pack("<Q", self.buffer),
        }

    def break_server(self) -> None:
        """A sum of what cannot be added: ggml takes the shapes of a node on trust, and ends the process by an assertion."""
        unlike = [self.tensor(1), self.tensor(2, ne=(3, 1, 1, 1)), self.tensor(3, 64, op=ADD, sources=(1, 2))]
        self.send(COMPUTE, graph(unlike, [3]))
        assert self.closed()


def spoiled(rng: random.Random, body: bytes) -> bytes:
    """The body with one to three numbers exchanged, bytes changed, cut or with more after it."""
    out = bytearray(body)
    for _ in range(rng.randint(1, 3)):
        how = rng.random()
        if how < 0.6 and len(out) >= 8:
            size = rng.choice((4, 8))
            at = rng.randrange(0, len(out) - size + 1, 4)
            out[at : at + size] = (rng.choice(NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif how < 0.8 and out:
            out[rng.randrange(len(out))] = rng.randrange(256)
        elif how < 0.9:
            del out[rng.randrange(len(out) + 1) :]
        else:
            out += rng.randbytes(rng.randrange(64))
    return bytes(out)


def attack(worker: Worker, rng: random.Random, computes: bool) -> str:
    """One hostile connection; what it was. ``computes``: also graphs that the server computes, which ggml takes on trust."""
    kind = rng.choice(("bytes", "bytes behind HELLO", "half a message", "a length", "messages", "messages", "messages"))
    if kind == "bytes":
        with socket.create_connection(("127.0.0.1", worker.port), 20) as connection:
            connection.sendall(rng.randbytes(rng.choice((1, 9, 33, 1000))))
        return kind
    peer = Peer(worker)
    with peer.socket:
        try:
            if kind == "bytes behind HELLO":
                peer.socket.sendall(rng.randbytes(rng.choice((1, 9, 50, 5000))))
            elif kind == "half a message":
                command, body = rng.choice(list(peer.messages().items()))
                peer.socket.sendall((struct.pack("<BQ", command, len(body)) + body)[: rng.randrange(9 + len(body))])
            elif kind == "a length":
                command = rng.choice((*range(19), CHECK_GRAPH, COMPUTE_SLOT, RECOMPUTE_SLOT))
                peer.socket.sendall(struct.pack("<BQ", command, rng.choice(NUMBERS)) + rng.randbytes(100))
            else:
                for _ in range(rng.randint(1, 6)):
                    messages = peer.messages()
                    command = rng.choice([c for c in messages if computes or c not in (COMPUTE, COMPUTE_SLOT, RECOMPUTE_SLOT)])
                    peer.send(command, spoiled(rng, messages[command]) if rng.random() < 0.7 else messages[command])
            peer.socket.shutdown(socket.SHUT_WR)
            while peer.socket.recv(1 << 16):
                pass
        except OSError:  # closed meanwhile
            pass
    return kind


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    with open(f"/proc/{pid}/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def answers(worker: Worker, seconds: float = 20) -> float:
    """Seconds until the worker computes a sum for a program that means well."""
    began, peer = time.monotonic(), Peer(worker, seconds)
    with peer.socket:
        for at, value in ((0, 1.5), (32, 2.25)):
            peer.send(SET, peer.tensor(1, at) + b"\0" + struct.pack("<Q8f", 0, *[value] * 8))
        peer.send(COMPUTE, peer.messages()[COMPUTE])
        assert struct.unpack("<8f", peer.ask(GET, peer.tensor(3, 64) + struct.pack("<QQ", 0, 32))) == (3.75,) * 8
    return time.monotonic() - began
