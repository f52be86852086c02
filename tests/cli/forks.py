"""Processes of `pyspec` whose modules are imported already: each is a fork of a process that imported them and did nothing else.

Importing is most of what a command of half a second takes, and hundreds of tests run one. What is read while a process starts (variables of the
interpreter, of OpenMP, of ggml), signals and terminals are tested with processes that start as users' do. So is the end of the interpreter, in which
libraries take themselves apart: a fork ends before that.
"""

import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import IO, Any

AT_START = ("PYTHON", "LC_", "LANG", "LD_", "OMP_", "GOMP_", "GGML_", "LLAMA_")
"""Beginnings of variables that are read before a command is."""

MODULES = [f"cli.{name}" for name in ("run", "chat", "serve", "bench", "doctor", "plan", "inspect", "compare", "convert", "experts", "devices")] + [
    "cli.options", "cli.worker", "models.registry", "server.router", "server.start", "tools.compare", "tools.compare_weights", "tools.experts",
    "tools.worker",
]  # fmt: skip


class Fork:
    """A process that runs beside others, with what `Popen` has of it."""

    def __init__(self, pid: int, ended: socket.socket, stderr: int) -> None:
        self.pid, self.stderr, self.returncode = pid, open(stderr), None
        self._ended = ended

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("pyspec", timeout)
            self.returncode = _received(self._ended)
            self._ended.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that is forked, started when it is needed first, and anew where it has ended. It ends with this one, whose end of the socket
    closes then.

    ``env``: its variables. ``timeout``: seconds that a command may take, with all that it started and that holds its stdout or stderr."""

    def __init__(self, env: dict[str, str], timeout: float = 120) -> None:
        self._lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self._env, self._timeout = {**env, "OPENBLAS_NUM_THREADS": "1"}, timeout  # numpy's threads would not come along
        self._driver: bool | None = None

    def run(self, args: list[str], stdin: bytes | None, env: dict[str, str], **more: str | bool) -> tuple[int, bytes, bytes] | None:
        """Status, stdout and stderr of `pyspec` with these arguments, or of Python with `-c` and code. None where a process of its own would
        start otherwise than the one that is forked has. ``more``: ``cwd``, and whether ``one_core`` is all that it sees.

        Raises:
            TimeoutExpired: it took longer than a command may. It has been killed, and what it started too.
        """
        return self._asking(env, lambda: self._run(stdin, {"args": args, "env": env, **more}))

    def start(self, args: list[str], env: dict[str, str], cwd: str) -> Fork | None:
        """`pyspec` with these arguments, which goes on beside others, with nothing to read or to write but stderr. None: as of `run`."""
        return self._asking(env, lambda: self._beside({"args": args, "env": env, "cwd": cwd, "one_core": False}))

    def _asking(self, env: dict[str, str], ask: Callable[[], Any]) -> Any:
        if any(env.get(name) != self._env.get(name) for name in {*env, *self._env} - {"LLAMA_CACHE"} if name.startswith(AT_START)):
            return None
        with self._lock:
            if self._has_driver():
                return None
            try:
                if self.process is None or self.process.poll() is not None:
                    self.close()
                    self._start()
                return ask()
            except BaseException:  # what has not been read of it would be taken for the next one's
                self.close()
                raise

    def close(self) -> None:
        """Ends the process, and the command that runs."""
        process, self.process = self.process, None
        if process is None:
            return
        self._asked.close()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)  # it has to end the command first
        process.kill()
        process.communicate()

    def _has_driver(self) -> bool:
        """A GPU's driver does not outlive a fork, and importing opens it."""
        if self._driver is None:
            from pyggml_spec.ggml.device import devices

            self._driver = any(device.kind != "cpu" for device in devices())
        return self._driver

    def _start(self) -> None:
        self._asked, theirs = socket.socketpair()
        pipe = subprocess.PIPE
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())], start_new_session=True,
                env=self._env, pass_fds=[theirs.fileno()], stdin=pipe, stdout=pipe, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def _run(self, stdin: bytes | None, asked: dict) -> tuple[int, bytes, bytes]:
        texts, status, given = {"out": b"", "err": b""}, 0, memoryview(stdin or b"")
        with ExitStack() as kept, selectors.DefaultSelector() as waiting:

            def pipe() -> list:
                return [kept.enter_context(open(end, mode, buffering=0)) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]

            (read, write), (out, out_end), (err, err_end) = pipe(), pipe(), pipe()
            with read, out_end, err_end:
                self._send(asked, read, out_end, err_end)
            deadline = time.monotonic() + self._timeout
            waiting.register(self._asked, selectors.EVENT_READ, "status")
            waiting.register(out, selectors.EVENT_READ, "out")
            waiting.register(err, selectors.EVENT_READ, "err")
            if given:
                os.set_blocking(write.fileno(), False)
                waiting.register(write, selectors.EVENT_WRITE, "in")
            else:
                write.close()
            while waiting.get_map():
                for key, _ in waiting.select(max(0, deadline - time.monotonic())):
                    ended = True
                    if key.data == "status":
                        status = _received(self._asked)
                    elif key.data == "in":
                        with suppress(BrokenPipeError):  # a command need not read what it is given
                            given = given[write.write(given[: select.PIPE_BUF]) or 0 :]
                            ended = not given
                    else:
                        text = key.fileobj.read(1 << 16)
                        texts[key.data] += text
                        ended = not text
                    if ended:
                        waiting.unregister(key.fileobj)
                        if key.data != "status":
                            key.fileobj.close()
                if waiting.get_map() and time.monotonic() >= deadline:
                    raise subprocess.TimeoutExpired(asked["args"], self._timeout, texts["out"], texts["err"])
        return status, texts["out"], texts["err"]

    def _send(self, asked: dict, *ends: IO | socket.socket) -> None:
        request = json.dumps(asked).encode()
        socket.send_fds(self._asked, [struct.pack("q", len(request))], [end.fileno() for end in ends])
        self._asked.sendall(request)

    def _beside(self, asked: dict) -> Fork:
        err, err_end = os.pipe()
        ended, theirs = socket.socketpair()
        with open(err_end, "wb") as writes, open(os.devnull, "r+b", buffering=0) as nothing, theirs:
            self._send(asked, nothing, nothing, writes, theirs)
        return Fork(_received(ended), ended, err)


def _received(sock: socket.socket) -> int:
    said = sock.recv(8, socket.MSG_WAITALL)
    if len(said) < 8:
        raise ConnectionError("the process that is forked has ended")
    return struct.unpack("q", said)[0]


def _begin_beside(asked: socket.socket, ends: list[int]) -> int:
    """0 in a process that goes on beside others; elsewhere the process that waits for it, and tells its number and how it ended."""
    if waits := os.fork():
        return waits
    asked.close()
    if process := os.fork():
        for end in ends[:3]:
            os.close(end)
        os.write(ends[3], struct.pack("q", process))
        os.write(ends[3], struct.pack("q", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))
        os._exit(0)
    os.close(ends.pop())
    return 0


def _begin(request: dict, ends: list[int]) -> list[str]:
    """Makes this process the one that was asked for; its arguments."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for standard, end in enumerate(ends):
        os.dup2(end, standard)
        os.close(end)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["one_core"]:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return request["args"]


def _serve(asked: socket.socket) -> list[str]:
    """Forks for each request; returns its arguments in the fork. Asked to end, or left alone, it ends what the last command started and itself."""
    process, beside = 0, set()

    def stop(*_) -> None:
        if process:  # a zombie at least, so that its number is not reused
            os.killpg(process, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    while True:
        head, ends, *_ = socket.recv_fds(asked, 8, 4)
        if not head:
            stop()
        length = struct.unpack("q", head)[0]
        text = asked.recv(length, socket.MSG_WAITALL)
        if len(text) < length:
            stop()
        request = json.loads(text)
        if len(ends) == 4:
            beside -= {waits for waits in beside if os.waitpid(waits, os.WNOHANG)[0]}
            if not (waits := _begin_beside(asked, ends)):
                return _begin(request, ends)
            beside.add(waits)
            for end in ends:
                os.close(end)
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if process:
            os.waitpid(process, 0)
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            return _begin(request, ends)
        with suppress(PermissionError):  # the first of the two; it has a group and runs another program
            os.setpgid(process, process)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for end in ends:
            os.close(end)
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        asked.sendall(struct.pack("q", ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))


def _end(code: object) -> None:
    """As the interpreter ends, without taking apart what was imported: that writes to all of it, and takes longer than most commands."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    gc.collect()
    if sys.stdout is not None and not sys.stdout.closed:
        try:
            sys.stdout.flush()
        except Exception as error:
            print(f"Exception ignored while flushing sys.stdout:\n{type(error).__name__}: {error}", file=sys.stderr)
            code = 120
    if sys.stderr is not None and not sys.stderr.closed:
        try:
            sys.stderr.flush()
        except Exception:
            code = 120
    os._exit(code or 0)


if __name__ == "__main__":
    import atexit
    import gc
    import runpy
    from importlib import import_module

    for name in MODULES:
        import_module(f"pyggml_spec.{name}")
    assert not os.path.isdir("/proc/self/task") or len(os.listdir("/proc/self/task")) == 1
    gc.freeze()  # a collection writes to what it looks at
    with socket.socket(fileno=int(sys.argv[1])) as given:
        words = _serve(given)
    sys.argv, sys.path = ["", *words], ["", *sys.path]
    try:
        if words[:1] == ["-c"]:
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
            _end(0)
        runpy.run_module("pyggml_spec", run_name="__main__", alter_sys=True)
    except SystemExit as stopped:
        _end(stopped.code)
