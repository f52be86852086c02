"""Client of the sandboxed process that renders chat templates: started on first use, reused, restarted if it died."""

import atexit
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..cancel import check
from ..errors import TemplateError

START_SECONDS = 60.0
WALL_SECONDS = 60.0  # wall-clock limit; CPU time is limited separately
WATCH_SECONDS = 0.02
CANCEL_SECONDS = 0.1  # interval of cancellation checks
MIB = 1 << 20
MUCH = 1 << 13  # characters of a reply that a ``nonblocking`` caller can encode (1.5 ms)
LARGE = 1 << 14
PLACES = 8  # templates cached in the process
AT_ONCE = 1 << 16  # bytes of a ``nonblocking`` request, which fit the socket buffer
WATCHED = sys.platform != "linux"  # elsewhere RLIMIT_AS is unreliable: the parent polls the child's memory
_SILENT = f"no reply in {WALL_SECONDS:.0f} s"


class Stopped(Exception):
    """A rendering exceeded a limit; the message completes "it was stopped: "."""


class WouldBlock(Exception):
    """A ``nonblocking`` rendering takes too long or is too large; retry without ``nonblocking``."""


class _Died(Exception):
    """The child died without exceeding a limit."""


class _Child:
    """One running sandbox.py."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
        folders = {str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin}
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox.py")), *folders]
        with theirs:
            try:
                self.process = subprocess.Popen(  # own session, so that Ctrl-C reaches the parent only
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        self.socket, self.ready = ours, False
        self.outstanding = False  # a reply is outstanding that no caller waits for
        self.slots: list[str] = []  # templates sent, by slot: 18 KB per request took 0.2 ms
        self._n_sent = 0
        self._line = bytearray()  # partial reply

    def end(self) -> int:
        """Kills the child; returns its exit status."""
        self.socket.close()
        self.process.kill()
        return self.process.wait()

    def request(self, limits: dict, source: str, body: bytes, patience: float | None = None) -> dict:
        watched = limits["memory"] if WATCHED else None
        new = source not in self.slots
        place = self._n_sent % PLACES if new else self.slots.index(source)
        header = json.dumps(
            limits | {"place": place} | ({"source": source} if new else {}) | ({"memory": None} if WATCHED else {})
        ).encode()
        if not self.ready:
            self.ready = self.receive(START_SECONDS, None)["ready"]
        self.socket.settimeout(WALL_SECONDS)
        try:
            self.socket.sendall(b"%b\n%b\n" % (header, body))
        except TimeoutError:
            raise Stopped(_SILENT) from None
        if new:
            self.slots[place : place + 1] = [source]
            self._n_sent += 1
        if patience is None:
            return self.receive(WALL_SECONDS, watched)
        try:
            return self.receive(patience, None)
        except Stopped:
            self.outstanding = True
            raise WouldBlock from None

    def receive(self, seconds: float, watched: int | None) -> dict:
        line, deadline = self._line, time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = max(0.001, deadline - time.monotonic())
            self.socket.settimeout(min(left, CANCEL_SECONDS if watched is None else WATCH_SECONDS))
            try:
                part = self.socket.recv(MIB)
            except TimeoutError:
                check()
                if time.monotonic() >= deadline:
                    raise Stopped(_SILENT) from None
                if watched is not None and resident(self.process.pid) > watched:
                    raise Stopped(_memory(watched)) from None
                continue
            if not part:
                raise ConnectionResetError
            line += part
        self._line = bytearray()
        return json.loads(line)


def resident(pid: int) -> int:
    """Resident bytes of a process, by ps; 0 if it does not exist."""
    try:
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        header = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout.strip()
    except OSError as error:
        raise TemplateError(f"the memory of a chat template cannot be watched without `ps` ({error}); install it") from None
    return int(header) * 1024 if header.isdigit() else 0


def _memory(size: int) -> str:
    return f"it takes more than {size // MIB} MiB of memory"


class Renderer:
    """Serialises requests of all threads. Forked copies of this process start their own child; the child ends with its parent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: _Child | None = None
        self._last_seconds = math.inf  # duration of the last rendering, inf if it was large
        self.patience = threading.local()
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forget)

    @property
    def pid(self) -> int | None:
        return self.child.process.pid if self.child is not None else None

    def start(self) -> None:
        """Starts the process early: importing Jinja takes 0.1 s."""
        with self.lock:
            self._started()

    @contextmanager
    def nonblocking(self, seconds: float) -> Iterator[None]:
        """Context in which this thread starts no process, waits for no lock, and at most ``seconds`` per rendering.
        Raises ``WouldBlock`` if that is not or was not enough, or if a reply has more than ``MUCH`` characters."""
        self.patience.seconds = seconds
        try:
            yield
        finally:
            del self.patience.seconds

    def render(self, request: dict, *, seconds: float, memory: int, characters: int) -> dict:
        """The reply of sandbox.py. ``seconds``: CPU time; ``memory``: bytes beyond the idle process; ``characters``: length of the rendering. Raises
        Stopped: a limit was exceeded; TemplateError: the process cannot start, or died; WouldBlock: only in ``nonblocking``."""
        source = request["source"]
        body = json.dumps({k: v for k, v in request.items() if k != "source"}, ensure_ascii=False).encode("utf-8", "surrogatepass")
        limits = {"seconds": seconds, "memory": memory, "characters": characters}
        if (patience := getattr(self.patience, "seconds", None)) is None:
            while not self.lock.acquire(timeout=CANCEL_SECONDS):
                check()
        elif WATCHED or len(body) > AT_ONCE or self._last_seconds > patience or not self.lock.acquire(blocking=False):
            raise WouldBlock
        try:
            child = self.child
            if patience is not None and (child is None or not child.ready or child.outstanding or source not in child.slots):
                raise WouldBlock
            for attempt in (1, 2):  # the child may have been killed since the last rendering
                try:
                    reply = self._request(limits, source, body, patience)
                    if patience is not None and self._last_seconds > patience:
                        raise WouldBlock
                    return reply
                except _Died as died:
                    if patience is not None:
                        raise WouldBlock from None
                    if attempt == 2:
                        raise Stopped(f"it ends the process that renders it ({died})") from None
            raise AssertionError
        finally:
            self.lock.release()

    def _request(self, limits: dict, source: str, body: bytes, patience: float | None) -> dict:
        child = self._started()
        try:
            if child.outstanding:
                child.receive(WALL_SECONDS, None)
                child.outstanding = False
        except (ConnectionError, Stopped):  # died before it replied
            self.stop()
            child = self._started()
        began, self._last_seconds = time.monotonic(), math.inf
        try:
            reply = child.request(limits, source, body, patience)
            self._last_seconds = time.monotonic() - began if len(reply.get("text", "")) <= MUCH else math.inf
        except WouldBlock:
            raise
        except ConnectionError:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(5)
            status = self.stop()
            if status == -signal.SIGPROF:
                raise Stopped(f"it computes for more than {limits['seconds']:g} s") from None
            if status == os.EX_OSERR:
                raise Stopped(_memory(limits["memory"])) from None
            if not child.ready:
                remedy = f"check that `{sys.executable} -I` runs and that jinja2 is installed"
                raise TemplateError(f"the process that renders chat templates exits at start ({_status(status)}); {remedy}") from None
            raise _Died(_status(status)) from None
        except BaseException:  # including Ctrl-C: a pending reply must not answer the next request
            self.stop()
            raise
        if reply["last"]:
            self.stop()
        return reply

    def _started(self) -> _Child:
        if self.child is None:
            try:
                self.child = _Child()
            except OSError as error:
                why = f"cannot be started from {sys.executable!r} ({error}); free processes or files"
                raise TemplateError(f"the process that renders chat templates {why}") from None
        return self.child

    def stop(self) -> int:
        child, self.child = self.child, None
        return child.end() if child is not None else 0

    def _forget(self) -> None:
        self.lock = threading.Lock()
        if self.child is not None:
            self.child.socket.close()
            self.child.process.returncode = 0
            self.child = None


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


RENDERER = Renderer()
LARGE_RENDERER = Renderer()  # for conversations above LARGE characters, so that short ones do not wait
