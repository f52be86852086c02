"""Processes of `pyspec` whose modules are imported already: each is a fork of a process that imported them and did nothing else.

Importing is most of what a command of half a second takes, and hundreds of tests run one. What is read while a process starts (variables of the
interpreter, of OpenMP, of ggml), signals and terminals are tested with processes that start as users' do.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

AT_START = ("PYTHON", "LC_", "LANG", "LD_", "OMP_", "GOMP_", "GGML_", "LLAMA_")
"""Beginnings of variables that are read before a command is."""

TIMEOUT = 120
MODULES = [f"cli.{name}" for name in ("run", "chat", "serve", "bench", "doctor", "plan", "inspect", "compare", "convert", "experts", "devices")] + [
    "cli.names", "cli.worker", "models.registry", "tools.compare", "tools.compare_weights", "tools.experts", "tools.worker",
]  # fmt: skip


class Forks:
    """The process that is forked, started when it is needed first. It ends with this one, whose end of the socket closes then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: socket.socket | None = None
        self._env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads would not come along

    def run(self, args: list[str], stdin: bytes | None, env: dict[str, str], **more: str | bool) -> tuple[int, bytes, bytes] | None:
        """Status, stdout and stderr of `pyspec` with these arguments, or of Python with `-c` and code. None where a process of its own would
        start otherwise than the one that is forked has. ``more``: ``cwd``, and whether ``one_core`` is all that it sees."""
        if any(env.get(name) != self._env.get(name) for name in {*env, *self._env} if name.startswith(AT_START)):
            return None
        with self._lock:
            if self._asked is None:
                self._start()
            return self._run(stdin, {"args": args, "env": env, **more})

    def _start(self) -> None:
        self._asked, theirs = socket.socketpair()
        pipe = subprocess.PIPE
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=self._env, pass_fds=[theirs.fileno()], stdin=pipe, stdout=pipe, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def _run(self, stdin: bytes | None, asked: dict) -> tuple[int, bytes, bytes]:
        read, write = os.pipe() if stdin is not None else (os.open(os.devnull, os.O_RDONLY), -1)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        request = json.dumps(asked).encode()
        try:
            socket.send_fds(self._asked, [struct.pack("q", len(request))], [read, out_end, err_end])
            self._asked.sendall(request)
        finally:
            for end in (read, out_end, err_end):
                os.close(end)
        process = self._number()
        late = threading.Timer(TIMEOUT, os.kill, (process, signal.SIGKILL))
        late.start()
        with ThreadPoolExecutor(3) as pool:
            texts = [pool.submit(_read, end) for end in (out, err)]
            if stdin is not None:
                pool.submit(_write, write, stdin)
            status = self._number()
            late.cancel()
            return status, texts[0].result(), texts[1].result()

    def _number(self) -> int:
        return struct.unpack("q", self._asked.recv(8, socket.MSG_WAITALL))[0]


def _read(end: int) -> bytes:
    with open(end, "rb") as file:
        return file.read()


def _write(end: int, text: bytes) -> None:
    try:
        with open(end, "wb") as file:
            file.write(text)
    except BrokenPipeError:
        pass  # a command need not read what it is given


def _serve(asked: socket.socket) -> list[str] | None:
    """Forks for each request. Returns its arguments in the fork, None at the end."""
    while True:
        head, ends, *_ = socket.recv_fds(asked, 8, 3)
        if not head:
            return None
        request = json.loads(asked.recv(struct.unpack("q", head)[0], socket.MSG_WAITALL))
        process = os.fork()
        if process == 0:
            for standard, end in enumerate(ends):
                os.dup2(end, standard)
                os.close(end)
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            if request["one_core"]:
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            return request["args"]
        for end in ends:
            os.close(end)
        asked.sendall(struct.pack("q", process))
        asked.sendall(struct.pack("q", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))


def _end(code: int) -> None:
    """As the interpreter ends, without taking apart what was imported: that writes to all of it, and takes longer than most commands."""
    threading._shutdown()
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
    if words is not None:
        sys.argv, sys.path = ["", *words], ["", *sys.path]
        try:
            if words[:1] == ["-c"]:
                exec(words[1], {"__name__": "__main__"})
                _end(0)
            runpy.run_module("pyggml_spec", run_name="__main__", alter_sys=True)
        except SystemExit as stopped:
            _end(stopped.code or 0)
