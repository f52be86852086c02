"""One model in a process of its own: `pyspec serve` at a unix socket, started and ended by a router. It is started before its model is known: see cli/spare.py."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .errors import ApiError

END_SECONDS = 10.0  # after SIGTERM, when nothing runs any more
RETRY = {"retry-after": "1"}


@dataclass(frozen=True)
class ModelSpec:
    """What a router knows of a model.

    Attributes:
        arguments: of `pyspec serve`, without an address.
        path: its GGUF, and ``drafter`` that of its drafter where it is named; None for a model of the hub that is fetched when it is loaded.
        pinned: it is loaded at the start, and never unloaded.
        idle_seconds: after which it is unloaded; None: only when memory is needed.
    """

    name: str
    arguments: tuple[str, ...]
    path: Path | None = None
    aliases: tuple[str, ...] = ()
    drafter: str | None = None
    pinned: bool = False
    idle_seconds: float | None = None


class ModelProcess:
    """``running``: requests that it answers; ``leaving``: it gets no more; ``about``: what it said of itself when it was loaded."""

    def __init__(self, socket: Path, drain: float, gone: Callable[["ModelProcess", int], None]) -> None:
        """``drain``: seconds for what runs when it is ended; ``gone``: called with its exit status."""
        self.name, self.running, self.leaving = "", 0, False
        self.need = 0  # bytes, as planned
        self.about: dict[str, Any] = {}
        self.progress: tuple[str, float] = ("start", 0.0)  # what it does, and how much of that is done, from 0 to 1
        self.idle = asyncio.Event()
        self.idle.set()
        self.ended = asyncio.Event()
        self._socket, self._drain, self._gone = socket, drain, gone
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        transport = httpx.AsyncHTTPTransport(verify=False, uds=str(socket), limits=limits)  # reading certificates takes 30 ms
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None, trust_env=False)
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pyggml_spec.cli.spare", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._watching = asyncio.create_task(self._watch())

    def take(self, spec: ModelSpec) -> None:
        """The model that it is for, from here on."""
        self.name = spec.name
        self._write([*spec.arguments, "--host", str(self._socket), "--drain", str(self._drain), "--alias", spec.name])

    def _write(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def plan(self, free: int | None) -> dict[str, Any]:
        """What it takes, where ``free`` bytes are free, or what its devices report. If that fits, it loads. Raises ApiError: it cannot be loaded."""
        self._write({"free": free})
        made: dict[str, Any] = await self._message("plan")
        self.need = made["total"]
        return made

    async def load(self) -> None:
        """Waits until it takes requests. Raises ApiError."""
        self.about = await self._message("ready")

    async def _message(self, wanted: str) -> Any:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            if wanted in message:
                return message[wanted]
            if "progress" in message:
                what, done, total = message["progress"]
                self.progress = what, done / total if total else 0.0
            if "error" in message:
                raise ApiError(500, f"{self.name} cannot be loaded: {message['error']}")
        await self.ended.wait()
        status = self._process.returncode or 0
        sentence = f"{self.name} cannot be loaded: its process {how(status)}; the server's log has what it said"
        raise ApiError(503 if status < 0 else 500, sentence, headers=RETRY if status < 0 else {})

    async def _watch(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        self.leaving = True
        self.ended.set()
        self._gone(self, status)
        await self.http.aclose()

    def enter(self) -> None:
        self.running += 1
        self.idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def gone(self) -> bool:
        """Whether it has ended, after a connection to it broke or was refused."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), END_SECONDS)
        return self.ended.is_set()

    async def end(self) -> None:
        """Takes no more requests; ends when the running ones have."""
        self.leaving = True
        waits = [asyncio.ensure_future(event.wait()) for event in (self.idle, self.ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.ended.wait(), END_SECONDS)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.ended.wait()


def how(status: int) -> str:
    """How a process ended, from its exit status."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
