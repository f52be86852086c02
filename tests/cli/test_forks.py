"""Processes that are forked from one that has imported: they are told apart, end as others do, and nothing is left of one that is given up."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cli.forks import Forks
from cli.process import environment, pyspec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def forks():
    made = Forks(environment())
    yield made
    made.close()


def run(forks, code: str, stdin: bytes | None = None):
    done = forks.run(["-c", code], stdin, environment(), cwd=os.getcwd(), one_core=False)
    if done is None:
        pytest.skip("a GPU's driver does not outlive a fork: every command is a process of its own")
    return done


@pytest.mark.parametrize("code", [
    "import sys; sys.exit('some words')", "import sys; sys.exit()", "import sys; sys.exit(7)",
    "import sys; print('a'); sys.stdout.close(); sys.exit(3)", "import sys; sys.stderr.close()",
    "import sys; print(sys.argv, sys.stdin.read())", "import os; print('a', flush=True); os.kill(os.getpid(), 9)",
    "import atexit; atexit.register(print, 'last'); print('first')",
])  # fmt: skip
def test_a_fork_ends_as_a_process_does(forks, code):
    own = pyspec("-c", code, stdin=b"given", stdout=subprocess.PIPE)
    assert run(forks, code, b"given") == (own.returncode, own.stdout, own.stderr.encode())


def test_full_outputs_and_long_texts(forks):
    code = (
        "import os, sys; sys.stdout.reconfigure(write_through=False); sys.stdout.write('a'); os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    )
    status, _, err = run(forks, code)
    own = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert status == own.returncode == 120 and b"Exception ignored" in err and b"Exception ignored" in own.stderr
    text = bytes(range(256)) * 2000
    assert run(forks, "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", text) == (0, text, b"")
    assert run(forks, "pass", text) == (0, b"", b"")  # nor need it be read


HOLDS = """
import os, sys, time
end = os.open(sys.argv[1], os.O_WRONLY)
if os.fork() == 0 or {waits}:
    os.write(end, b"holds ")
    time.sleep(60)
    os.write(end, b"left")
"""


def hold(forks, path, waits: bool) -> None:
    """A command that starts another process, which keeps its stdout; both write into ``path``, and so at its end both have ended."""
    forks.run(["-c", HOLDS.format(waits=waits), str(path)], None, environment(), cwd=os.getcwd(), one_core=False)


def test_what_holds_the_output_of_a_command_that_has_ended_is_ended_in_time(forks, tmp_path, monkeypatch):
    run(forks, "pass")
    os.mkfifo(tmp_path / "held")
    with open(os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK), "rb") as held:
        monkeypatch.setattr(forks, "_timeout", 1)
        with pytest.raises(subprocess.TimeoutExpired):
            hold(forks, tmp_path / "held", waits=False)
        os.set_blocking(held.fileno(), True)
        assert b"left" not in held.read()


def test_an_interrupted_command_is_ended_and_the_next_gets_its_own_status(forks, tmp_path):
    """Its status was read as the next one's."""
    run(forks, "pass")
    os.mkfifo(tmp_path / "held")
    told = []

    def interrupt(*_):
        raise RuntimeError("in the middle")

    def when_both_run() -> None:
        with open(tmp_path / "held", "rb", buffering=0) as held:
            told.append(held.read(6) + held.read(6))
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            told.append(held.read())

    before, waiter = signal.signal(signal.SIGUSR1, interrupt), threading.Thread(target=when_both_run)
    try:
        waiter.start()
        with pytest.raises(RuntimeError, match="in the middle"):
            hold(forks, tmp_path / "held", waits=True)
        waiter.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [b"holds holds ", b""] and run(forks, "import sys; sys.exit(5)") == (5, b"", b"")


def test_dead_parents_and_variables(forks):
    run(forks, "pass")
    forks.process.kill()
    os.waitid(os.P_PID, forks.process.pid, os.WEXITED | os.WNOWAIT)
    assert run(forks, "import sys; sys.exit(6)") == (6, b"", b"")
    code = "from cli import process; print([name for name in process._forks._env if name.startswith('PYSPEC_')])"
    env = {**os.environ, "PYSPEC_THREADS": "7", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_servers_run_beside_others_and_obey_signals(forks):
    def start(code: str):
        started = forks.start(["-c", code], environment(), os.getcwd())
        return started or pytest.skip("nothing is forked here")

    left, right = (start("import sys, time; print('here', file=sys.stderr, flush=True); time.sleep(60)") for _ in range(2))
    assert left.stderr.readline() == right.stderr.readline() == "here\n" and run(forks, "print(1)") == (0, b"1\n", b"")
    with pytest.raises(subprocess.TimeoutExpired):
        left.wait(0.01)
    left.send_signal(signal.SIGTERM)
    assert left.wait(60) == left.poll() == -signal.SIGTERM and right.poll() is None
    right.kill()
    assert right.wait(60) == -signal.SIGKILL and start("import sys; sys.exit(7)").wait(60) == 7


def test_where_there_is_a_gpu_nothing_is_forked(monkeypatch):
    from pyggml_spec.ggml import device

    gpu, listed = device.Device("CUDA0", "a GPU", "gpu", 1, 1, 1), device.devices()
    monkeypatch.setattr(device, "devices", lambda: [*listed, gpu])
    forks = Forks(environment())
    assert forks.run(["--version"], None, environment(), cwd=os.getcwd(), one_core=False) is None and forks.process is None
