"""The process that renders chat templates: started when it is first needed, kept between renderings, replaced when one ended it."""

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
WALL_SECONDS = 60.0  # for a child that waits instead of computing; processor time is what is limited
WATCH_SECONDS = 0.02
CANCEL_SECONDS = 0.1  # between two looks at whether the rendering was cancelled
MIB = 1 << 20
MUCH = 1 << 13  # characters of an answer that whoever hurries has to encode: 1.5 ms; 66,000 took 170 ms, in which no stream went on
LARGE = 1 << 14
PLACES = 8  # templates that the process remembers
AT_ONCE = 1 << 16  # bytes of a question in haste: a socket takes them without waiting for its other end
WATCHED = sys.platform != "linux"  # elsewhere the kernel's limit of address space cannot be relied on: this process looks at the child's


class Stopped(Exception):
    """A limit that a rendering went over; the message completes "it was stopped: "."""


class Late(Exception):
    """A rendering takes longer than whoever asks can wait, or makes more than can be encoded meanwhile; asked again without haste it is answered."""


class _Died(Exception):
    """The child ended at no limit of ours."""


class _Child:
    """One running sandbox.py."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
        folders = {str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin}
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox.py")), *folders]
        with theirs:
            try:
                self.process = subprocess.Popen(  # a session of its own: Ctrl-C is the parent's
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        self.socket, self.ready = ours, False
        self.owes = False  # the answer to a question that nobody waits for any more
        self._places: list[str] = []  # templates that it was given, and where it has them: 18 KB of one with each question took 0.2 ms
        self._given = 0
        self._line = bytearray()  # what has come of an answer

    def end(self) -> int:
        """Its exit status, after it was ended if it was not."""
        self.socket.close()
        self.process.kill()
        return self.process.wait()

    def forget(self) -> None:
        """In a forked copy of this process: the child belongs to the other one."""
        self.socket.close()
        self.process.returncode = 0

    def has(self, source: str) -> bool:
        return source in self._places

    def ask(self, limits: dict, source: str, body: bytes, patience: float | None = None) -> dict:
        watched = limits["memory"] if WATCHED else None
        new = source not in self._places
        place = self._given % PLACES if new else self._places.index(source)
        told = json.dumps(limits | {"place": place} | ({"source": source} if new else {}) | ({"memory": None} if WATCHED else {})).encode()
        if not self.ready:
            self.ready = self._receive(START_SECONDS, None)["ready"]
        self.socket.settimeout(WALL_SECONDS)
        try:
            self.socket.sendall(b"%b\n%b\n" % (told, body))
        except TimeoutError:
            raise Stopped(_SILENT) from None
        if new:
            self._places[place : place + 1] = [source]
            self._given += 1
        if patience is None:
            return self._receive(WALL_SECONDS, watched)
        try:
            return self._receive(patience, None)
        except Stopped:
            self.owes = True
            raise Late from None

    def settle(self) -> None:
        """Waits for the answer that it owes, and forgets it; ConnectionError or Stopped where none comes."""
        if self.owes:
            self._receive(WALL_SECONDS, None)
            self.owes = False

    def _receive(self, seconds: float, watched: int | None) -> dict:
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
    """Bytes of memory that a process has, by ps; 0 if there is no such process."""
    try:
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout.strip()
    except OSError as error:
        raise TemplateError(f"the memory of a chat template cannot be watched without `ps` ({error}); install it") from None
    return int(told) * 1024 if told.isdigit() else 0


_SILENT = f"it gave no answer in {WALL_SECONDS:.0f} s"


def _memory(size: int) -> str:
    return f"it takes more than {size // MIB} MiB of memory"


class Renderer:
    """Threads take turns. Nothing is inherited by forked copies of this process, and the child ends with the process that has it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: _Child | None = None
        self._latest = math.inf  # seconds that the last answer took, more than anybody waits where it was long
        self.haste = threading.local()
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forget)

    @property
    def pid(self) -> int | None:
        return self.child.process.pid if self.child is not None else None

    def start(self) -> None:
        """Starts the process, so that it is there when the first template comes: importing Jinja takes a tenth of a second."""
        with self.lock:
            self._started()

    @contextmanager
    def hurried(self, seconds: float) -> Iterator[None]:
        """In it this thread starts no process, waits for no other thread, and ``seconds`` at most for each rendering, which raises ``Late`` where that is
        not enough, or was not for the one before, and where either makes more than ``MUCH``."""
        self.haste.seconds = seconds
        try:
            yield
        finally:
            del self.haste.seconds

    def ask(self, request: dict, *, seconds: float, memory: int, characters: int) -> dict:
        """What sandbox.py answers to a request.

        Args:
            seconds: of processor time.
            memory: bytes, besides what the process has when it is idle.
            characters: of the rendering.

        Raises:
            Stopped: a limit was reached.
            TemplateError: the process cannot be started, or ends for reasons of its own.
            Late: only where this thread is ``hurried``.
        """
        source = request["source"]
        body = json.dumps({k: v for k, v in request.items() if k != "source"}, ensure_ascii=False).encode("utf-8", "surrogatepass")
        limits = {"seconds": seconds, "memory": memory, "characters": characters}
        if (patience := getattr(self.haste, "seconds", None)) is not None:
            return self._ask_at_once(limits, source, body, patience)
        while not self.lock.acquire(timeout=CANCEL_SECONDS):
            check()
        try:
            for attempt in (1, 2):  # it may have been ended from outside since the last rendering
                try:
                    return self._ask(limits, source, body)
                except _Died as died:
                    if attempt == 2:
                        raise Stopped(f"it ends the process that renders it ({died})") from None
            raise AssertionError
        finally:
            self.lock.release()

    def _ask_at_once(self, limits: dict, source: str, body: bytes, patience: float) -> dict:
        if WATCHED or len(body) > AT_ONCE or self._latest > patience or not self.lock.acquire(blocking=False):
            raise Late
        try:
            if self.child is None or not self.child.ready or self.child.owes or not self.child.has(source):
                raise Late
            reply = self._ask(limits, source, body, patience)
            if self._latest > patience:
                raise Late
            return reply
        except _Died:  # from outside, most likely
            raise Late from None
        finally:
            self.lock.release()

    def _settled(self) -> _Child:
        """The child, which owes nothing."""
        child = self._started()
        try:
            child.settle()
        except (ConnectionError, Stopped):  # what it owed was the end of it
            self.stop()
        return self._started()

    def _ask(self, limits: dict, source: str, body: bytes, patience: float | None = None) -> dict:
        child, began, self._latest = self._settled(), time.monotonic(), math.inf
        try:
            reply = child.ask(limits, source, body, patience)
            self._latest = time.monotonic() - began if len(reply.get("text", "")) <= MUCH else math.inf
        except Late:
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
                raise TemplateError(
                    f"the process that renders chat templates ends before its first ({_status(status)}); "
                    f"check that `{sys.executable} -I` runs and that jinja2 is installed"
                ) from None
            raise _Died(_status(status)) from None
        except BaseException:  # also Ctrl-C: what it would answer now is no answer to the next question
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
                raise TemplateError(
                    f"the process that renders chat templates cannot be started from {sys.executable!r} ({error}); free processes or files"
                ) from None
        return self.child

    def stop(self) -> int:
        child, self.child = self.child, None
        return child.end() if child is not None else 0

    def _forget(self) -> None:
        self.lock = threading.Lock()
        if self.child is not None:
            self.child.forget()
            self.child = None


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


RENDERER = Renderer()
LARGE_RENDERER = Renderer()  # for conversations of more than LARGE characters, so that short ones never wait for them
