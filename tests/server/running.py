"""`pyspec serve` as a process on the embedded pair."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

import httpx
import pytest
from cli.process import beside, environment

from pyggml_spec.server.http import Request

START_SECONDS = 120


class Running:
    """One server. ``lines``: what it has said on stderr so far; ``before``: Python that its process runs first; ``alone``: that process starts as
    users' do, and is no fork."""

    def __init__(self, *options: object, before: str = "", alone: bool = False) -> None:
        code = ["-c", f"{before}\nfrom pyggml_spec.__main__ import main\nmain()"] if before else []
        command = ["serve", "--device", "CPU", "-t", "1", "--port", "0", *map(str, options)]
        self.process = (None if alone else beside(*code, *command)) or subprocess.Popen(
            [sys.executable, *(code or ["-m", "pyggml_spec"]), *command],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        self.lines: list[str] = []
        self._address = ""
        self._found = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._found.wait(START_SECONDS) or not self._address:
            self.process.kill()
            raise AssertionError(f"the server did not start: {self.lines}")
        self.url = self._address
        path = self.url if self.url.startswith("/") else None
        transport = httpx.HTTPTransport(uds=path, verify=False)  # reading certificates takes longer than a request
        self.http = httpx.Client(base_url="http://localhost" if path else self.url, transport=transport, timeout=120)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.match(r"serving .* at (?:(https?://\S+)/|unix:(\S+)) with", line):
                self._address = found[1] or found[2]
                self._found.set()
        self._found.set()

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def ok(self, path: str, **body: object) -> dict:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, *names: str) -> float:
        """The sum of samples whose lines on /metrics begin so."""
        return sum(float(line.split()[-1]) for line in self.http.get("/metrics").text.splitlines() if line.startswith(names))

    @property
    def resident_mib(self) -> float:
        """MiB of memory that the process has."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

    @property
    def cpu_seconds(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def slots_are_free(self, seconds: float = 60) -> bool:
        """Whether every slot is idle, and nothing waits, before that time is over."""

        def free() -> bool:
            waiting = self.metric("llamacpp:requests_deferred")
            return waiting == 0 and not any(slot["is_processing"] for slot in self.http.get("/slots").json())

        return wait_for(free, seconds)

    def connect(self, buffer: int | None = None) -> socket.socket:
        """A connection; ``buffer``: bytes that it takes unread."""
        url, sock = httpx.URL(self.url), socket.socket()
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.settimeout(60)
        sock.connect((url.host, url.port))
        return sock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """It ends without an error; a test that failed is not hidden by that."""
        status = self.end()
        assert kind is not None or (status == 0 and not any("Traceback" in line for line in self.lines)), self.lines

    def end(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            self.http.close()
            if self.process.poll() is None:
                self.process.kill()


def serving(*options: object):
    """A module's fixture: one server."""

    @pytest.fixture(scope="module")
    def server():
        with Running(*options) as running:
            yield running

    return server


def wait_for(condition: Callable[[], object], seconds: float = 60) -> object:
    """What ``condition`` returns once that is true."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "it did not come so far"
        time.sleep(0.02)
    return value


def posted(body: object, path: str = "/completion", *more: str) -> bytes:
    """A request as it is sent, by which its connection is closed; ``more``: lines of its head."""
    data, kind = json.dumps(body).encode(), "content-type: application/json"
    head = [f"POST {path} HTTP/1.1", "host: localhost", "connection: close", kind, f"content-length: {len(data)}"]
    return "\r\n".join([*head, *more, "", ""]).encode() + data


def request_of(data: bytes = b"", *headers: tuple[bytes, bytes], path: str = "/completion") -> Request:
    """A request whose body is read."""
    request = Request({"type": "http", "method": "POST", "path": path, "headers": list(headers)})
    request.data = data
    return request


def events(response: httpx.Response) -> list[bytes]:
    """The data of a stream's events."""
    return [line[6:] for line in response.read().split(b"\n") if line.startswith(b"data: ")]
