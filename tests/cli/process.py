"""`pyspec` as a process."""

import os
import signal
import subprocess
import sys

from cli.forks import Fork, Forks

COMMAND = [sys.executable, "-m", "pyggml_spec"]


def environment(**more) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYSPEC_") and k not in ("NO_COLOR", "FORCE_COLOR")}
    return {**clean, **more}


_forks = Forks(environment())


def default_interrupt() -> None:
    """A process that was started in the background ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*args, **more) -> subprocess.Popen:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()}
    command = [sys.executable] if args[:1] == ("-c",) else COMMAND
    return subprocess.Popen([*command, *map(str, args)], bufsize=0, **{**pipes, **more}, preexec_fn=default_interrupt)


def beside(*args) -> Fork | None:
    """A fork of `pyspec` that goes on, of which stderr is read. None where nothing is forked."""
    return _forks.start([*map(str, args)], environment(), os.getcwd())


def pyspec(
    *args, stdin: bytes | None = None, env: dict | None = None, cwd: str | os.PathLike = ".", one_core: bool = False, **more
) -> subprocess.CompletedProcess:
    """Runs to the end, also Python with `-c` and code. ``stdout`` is bytes, ``stderr`` text, checked to hold no traceback."""
    variables, done = environment(**(env or {})), None
    if not more:
        done = _forks.run([*map(str, args)], stdin, variables, cwd=os.path.abspath(cwd), one_core=one_core)
    if done is None:
        process = start(*args, stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL, env=variables, cwd=cwd, **more)
        out, err = process.communicate(stdin, timeout=120)
        done = process.returncode, out, (err or b"")
    code, out, err = done
    err = err.decode()
    assert "Traceback" not in err and "Exception ignored" not in err, err
    return subprocess.CompletedProcess(args, code, out, err)


def one_sentence(done: subprocess.CompletedProcess, *words: str, code: int = 1) -> str:
    """Checks that ``done`` failed with one line on stderr that holds ``words``, and wrote no text."""
    lines = done.stderr.splitlines()
    assert done.returncode == code and not done.stdout, (done.returncode, done.stdout, done.stderr)
    assert len(lines) == 1 and lines[0].startswith("pyspec: ") and len(lines[0]) < 600, done.stderr
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]
