"""Serves this machine's devices over ggml's RPC: one server process per client, restarted when it exits.

The listening socket belongs to this process, so clients in the queue survive a server's exit. ggml's server ends only by an assertion or a
signal, on invalid graphs for example.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..checks import whole
from ..errors import DeviceError
from ..files import make_private
from ..folders import cache_folder
from ..ggml.cores import default_threads
from ..ggml.device import Device, devices, free_bytes, pick_device
from ..ggml.rpc import library
from ..ggml.workers import PROTOCOL

MOST_PROGRAMS = 64
IN_VAIN = 3  # exits in a row without a client
LOCAL = "127."


class Worker:
    """The server of ``pyspec worker``."""

    def __init__(
        self,
        host: str,
        port: int,
        names: str | None,
        threads: int | None,
        cache: bool,
        programs: int = 1,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``programs``: clients served at a time, each by its own process; others wait. Raises DeviceError: unknown device or host, the
        port is taken, or ggml's RPC backend is missing."""
        library()  # checked first
        self.port, self._print = port, say
        self.devices = _served(names)
        self.threads = threads or default_threads()
        self.programs = whole(programs, "the number of programs at a time", 1, MOST_PROGRAMS, DeviceError)
        self.cache = cache_folder() / "worker" if cache else None
        self.host, self.socket = _bind(host, port)
        self._servers = [_Server(self, i) for i in range(self.programs)]
        self._greeted, self._greeting = False, threading.Lock()
        self._over = threading.Event()
        self._failure: str | None = None
        self._asked = False

    def _on_signal(self, *_: object) -> None:
        """Runs in a signal handler: must not take the event's lock in the waiting thread."""
        self._asked = True

    def serve(self) -> None:
        """Serves until SIGINT or SIGTERM (main thread), or ``end`` (any thread). Raises DeviceError: a server exits before it listens, or
        repeatedly without a client."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self.cache is not None:
                make_private(self.cache)
            threads = [threading.Thread(target=server.run) for server in self._servers]
            for thread in threads:
                thread.start()
            while not (self._asked or self._over.wait(0.2)):
                pass
            self.end()
            for thread in threads:
                thread.join()
            if self._failure is not None:
                raise DeviceError(self._failure)
        finally:
            self.end()
            self.socket.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def end(self) -> None:
        """Ends the servers; idempotent."""
        self._over.set()
        for server in self._servers:
            server.end()

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def say(self, line: str) -> None:
        """Keeps serving if the output is closed."""
        with suppress(OSError):
            self._print(line)

    def greet(self) -> None:
        """A server listens; the first time, prints the addresses."""
        with self._greeting:
            first, self._greeted = not self._greeted, True
        if not first:
            return
        for i, device in enumerate(self.devices):
            name = f"RPC:{self.host}:{self.port}{f'/{i}' if i else ''}"
            self.say(f"{device.name} ({device.description}, {free_bytes(device) >> 20} MiB free) is the device {name}")
        trust = "" if self.host.startswith(LOCAL) else ": use a trusted network only (docs/workers.md)"
        self.say(f"protocol {'.'.join(map(str, PROTOCOL))}; no encryption and no authentication{trust}")
        if self.cache is not None:
            self.say(f"weights of 10 MiB and more are kept in {self.cache} ({_bytes_in(self.cache) >> 20} MiB now)")

    def fail(self, why: str) -> None:
        """Stops everything with an error."""
        self._failure = self._failure or f"ggml's RPC server at {self.host}:{self.port} {why}"
        self._over.set()

    def command(self) -> list[str]:
        """Command line of a server."""
        arguments = [f"fd:{self.socket.fileno()}", str(self.threads), str(self.cache or ""), *(device.name for device in self.devices)]
        return [sys.executable, "-P", "-m", "pyggml_spec.ggml.rpc_server", *arguments]


class _Server:
    """Runs one server process after the other and forwards its output."""

    def __init__(self, worker: Worker, index: int) -> None:
        self.worker, self.index = worker, index
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # otherwise the failed thread would go unnoticed
            self.worker.fail(f"cannot be run: {type(error).__name__}: {error}")

    def _run(self) -> None:
        in_vain = 0
        while not self.worker.ended:
            self.listened = self.used = False
            why = self._serve()
            if self.worker.ended:
                return
            in_vain = 0 if self.used else in_vain + 1
            if not self.listened or in_vain >= IN_VAIN:
                self.worker.fail(f"{why}{'' if self.listened else ', before it listened'}")
                return
            self._log(f"the server {why}; another one was started")

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # cached weights are written atomically

    def _log(self, line: str) -> None:
        self.worker.say(line if self.worker.programs == 1 else f"[{self.index + 1} of {self.worker.programs}] {line}")

    def _serve(self) -> str:
        """Runs one process to its end; returns how it ended."""
        errors = deque[str](maxlen=50)  # invalid input may cause endless complaints
        with subprocess.Popen(
            self.worker.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # ggml prints stacks by running gdb, which takes seconds
            pass_fds=(self.worker.socket.fileno(),),
        ) as process:
            self._process = process
            if self.worker.ended:  # a signal arrived before the process existed
                process.kill()
            reader = threading.Thread(target=lambda: errors.extend(filter(None, _lines(process.stderr))))
            reader.start()
            try:
                for line in _lines(process.stdout):
                    self._handle_line(line)
            except BaseException:
                process.kill()  # otherwise the stream is waited for
                raise
            reader.join()
        said = next((line for line in errors if "GGML_ASSERT" in line or "error" in line.lower()), errors[-1] if errors else "")
        how = f"was ended by signal {-process.returncode}" if process.returncode < 0 else f"ended with {process.returncode}"
        return f"{how}{f': {said[:300]}' if said else ''}"

    def _handle_line(self, line: str) -> None:
        kind, _, why = line.partition(": ")
        if kind == "Listening":
            self.listened = True
            self.worker.greet()
        elif kind == "Accepted client connection":
            self.used = True
            self._log("a program has connected")
        elif kind == "Client connection closed":
            self._log("it has left")
        elif kind == "Client connection ended":
            self._log(f"its connection was ended: {why}")


def _lines(pipe: IO[bytes] | None) -> Iterator[str]:
    return (line.decode("utf-8", "replace").strip() for line in pipe or ())


def _bytes_in(folder: Path) -> int:
    """Bytes of its files; renamed files are skipped."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _served(names: str | None) -> Sequence[Device]:
    if names is None:
        found = devices()
        return [d for d in found if d.kind in ("gpu", "igpu")] or [d for d in found if d.kind == "cpu"]
    wanted = [name.strip() for name in names.split(",")]
    if "" in wanted or len({name.lower() for name in wanted}) < len(wanted):
        raise DeviceError(f"the devices {names!r} are not a list of different names with commas between them")
    picked = [pick_device(name) for name in wanted]
    for device in picked:
        if device.kind == "rpc":
            raise DeviceError(f"{device.name} is served by another worker already; name a device of this machine")
    return picked


def _bind(host: str, port: int) -> tuple[str, socket.socket]:
    """The IP of ``host``, and a socket bound to ``port``."""
    try:
        ip = str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DeviceError(f"the address {host!r} is not known ({why}); name one of this machine") from None
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((ip, port))
    except OSError as error:
        bound.close()
        raise DeviceError(f"a worker cannot listen at {host}:{port} ({error.strerror}); pick another `port` or `host`") from None
    return ip, bound
