"""A machine's devices for other machines: ggml's RPC server in a process of its own, which is started anew where it ends.

It ends by an assertion of ggml on a graph that makes no sense, and there is no other way to end it: it never comes back to Python.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import DeviceError
from ..files import make_private
from ..folders import cache_folder
from ..ggml.device import Device, default_threads, devices, free_bytes, pick_device
from ..ggml.rpc import library
from ..ggml.workers import PROTOCOL

SOON = 2.0  # seconds within which a server that ends has not really begun
LOCAL = "127."


class Worker:
    """What ``pyspec worker`` serves."""

    def __init__(
        self, host: str, port: int, names: str | None, threads: int | None, cache: bool, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """
        Raises:
            DeviceError: no such device or host, the port is taken, or ggml's RPC backend was not built.
        """
        library()  # before anything is promised
        self.port, self.say = port, say
        self.devices = _served(names)
        self.threads = threads or default_threads()
        self.host = _address(host, port)
        self.cache = cache_folder() / "worker" if cache else None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()

    def serve(self) -> None:
        """Until SIGINT or SIGTERM, from the main thread; or ``end``, from any.

        Raises:
            DeviceError: the server ends by itself as soon as it is started.
        """
        before = {number: signal.signal(number, lambda *_: self.end()) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._greet()
            while not self._ended.is_set():
                began = time.monotonic()
                why = self._run()
                if self._ended.is_set():
                    break
                if time.monotonic() - began < SOON:
                    raise DeviceError(f"ggml's RPC server at {self.host}:{self.port} {why}")
                self.say(f"the server {why}; another one was started")
        finally:
            self.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def end(self) -> None:
        """Ends the server; idempotent."""
        self._ended.set()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # it has nothing to put away: a weight is in the cache whole, or not at all

    def _greet(self) -> None:
        for i, device in enumerate(self.devices):
            name = f"RPC:{self.host}:{self.port}{f'/{i}' if i else ''}"
            self.say(f"{device.name} ({device.description}, {free_bytes(device) >> 20} MiB free) is the device {name}")
        self.say(
            f"protocol {'.'.join(map(str, PROTOCOL))}; nothing is encrypted, and whoever reaches the port may use it"
            + ("" if self.host.startswith(LOCAL) else ": have only machines that you trust on this network (docs/workers.md)")
        )
        if self.cache is not None:
            make_private(self.cache)
            kept = sum(path.stat().st_size for path in self.cache.iterdir())
            self.say(f"weights of 10 MiB and more are kept in {self.cache} ({kept >> 20} MiB now)")

    def _run(self) -> str:
        """One server, until it ends; how it did."""
        arguments = [self.host, str(self.port), str(self.threads), str(self.cache or ""), *(device.name for device in self.devices)]
        command = [sys.executable, "-P", "-m", "pyggml_spec.ggml.rpc_server", *arguments]
        with tempfile.TemporaryFile() as errors:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, env=_environment()
            ) as process:
                self._process = process
                if self._ended.is_set():  # a signal came before it was there
                    process.kill()
                for line in process.stdout or ():
                    self._heard(line)
            errors.seek(0)
            last = [line for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        said = next((line for line in last if "GGML_ASSERT" in line or "error" in line.lower()), last[0] if last else "")
        how = f"was ended by signal {-process.returncode}" if process.returncode < 0 else f"ended with {process.returncode}"
        return f"{how}{f': {said[:300]}' if said else ''}"

    def _heard(self, line: bytes) -> None:
        if line.startswith(b"Accepted"):
            self.say("a program has connected")
        elif line.startswith(b"Client connection closed"):
            self.say("it has left")


def _environment() -> dict[str, str]:
    """ggml's way of printing a stack is to run gdb on itself, which takes seconds."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1"}


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


def _address(host: str, port: int) -> str:
    """The number of ``host``, at which ``port`` is free."""
    try:
        ip = str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise DeviceError(
            f"the address {host!r} is not known ({getattr(error, 'strerror', None) or error}); name one of this machine"
        ) from None
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((ip, port))
        except OSError as error:
            raise DeviceError(f"a worker cannot listen at {host}:{port} ({error.strerror}); pick another `port` or `host`") from None
    return ip
