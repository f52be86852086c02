"""Workers on this machine for tests, and what can stand between them and a program."""

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from pyggml_spec import building, rpc_library
from pyggml_spec.errors import BuildError

HELLO, COUNT, MEMORY, CHECK_GRAPH, GRAPH_COMPUTE = 14, 15, 11, 64, 10
ANSWERED = {
    0: 16, 1: 8, 2: 8, 3: 8, 7: 1, 8: None, 9: 1, 11: 16, 13: 8, 14: 28, 15: 4, 64: 4,
}  # bytes of the answers; None: as many as asked for  # fmt: skip


def need_library() -> None:
    """Builds ggml's RPC backend, which takes seconds and is kept in the user's cache."""
    try:
        building.find_compilers()
    except BuildError as error:
        if rpc_library.kept() is None:
            pytest.skip(f"workers cannot be tested here: {error}")
    rpc_library.build()


def free_port() -> int:
    """Below those that systems give out by themselves, and not among those of another process of tests: none takes it while its worker restarts."""
    first = 20000 + 1500 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
    while True:
        port = random.SystemRandom().randrange(first, first + 1500)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class Worker:
    """`pyspec worker` as a process that serves the CPU with one thread."""

    def __init__(self, *options: str, port: int | None = None):
        self.port = port or free_port()
        command = [sys.executable, "-m", "pyggml_spec", "worker", "--port", str(self.port), "--device", "CPU", "-t", "1", *options]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        deadline = time.monotonic() + 60
        while not listens(self.port):
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline, "a worker did not listen within a minute"
            time.sleep(0.05)

    @property
    def device(self) -> str:
        return f"RPC:127.0.0.1:{self.port}"

    def server(self) -> int:
        """The process that ggml's server is."""
        return self.servers()[0]

    def servers(self) -> list[int]:
        """All of them, with `--programs`."""
        found = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):  # each thread's own
            found += [int(pid) for pid in children.read_text().split()]
        return sorted(found)

    def signal(self, number: int) -> None:
        os.kill(self.server(), number)

    def kill(self) -> None:
        """The whole machine, as far as programs can tell."""
        with suppress(OSError, IndexError):
            self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait(60)
        self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


@contextmanager
def bare_server(*devices: str) -> Iterator[int]:
    """ggml's server with these devices, also one of them twice, which `pyspec worker` refuses; gives its port."""
    port = free_port()
    command = [sys.executable, "-m", "pyggml_spec.ggml.rpc_server", f"127.0.0.1:{port}", "1", "", *devices]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not listens(port):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        try:
            yield port
        finally:
            process.kill()


def listens(port: int) -> bool:
    """Looks at the kernel's list: a connection would be taken for a program."""
    with open("/proc/net/tcp") as file:
        return any(f":{port:04X} 00000000:0000 0A" in line for line in file)


def gone(port: int) -> None:
    """Waits until nothing listens there: a server that was killed is ended by the system, but not at once."""
    deadline = time.monotonic() + 60
    while listens(port):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def fake_server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server of one thread that does ``serve`` with each connection; gives its port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)

        def run() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, suppress(OSError, struct.error):
                        serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            raise OSError("closed")
        data += part
    return bytes(data)


def request(connection: socket.socket) -> tuple[int, bytes]:
    """A command and its body."""
    command, size = struct.unpack("<BQ", exactly(connection, 9))
    return command, exactly(connection, size)


def say(connection: socket.socket, body: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(body)) + body)


def between(worker: Worker, change: Callable[[int, bytes, bytes], bytes | None]) -> Callable[[socket.socket], None]:
    """What a server does that hands everything on to ``worker``; ``change`` (command, request, answer) may give another answer."""

    def serve(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", worker.port)) as behind:
            while True:
                command, body = request(connection)
                behind.sendall(struct.pack("<BQ", command, len(body)) + body)
                answer = b""
                if command in ANSWERED:
                    (size,) = struct.unpack("<Q", exactly(behind, 8))
                    answer = exactly(behind, size)
                changed = change(command, body, answer)
                if command in ANSWERED:
                    say(connection, answer if changed is None else changed)

    return serve
