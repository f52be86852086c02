"""`pyspec worker`: what it says, how it ends, what it keeps, and that a program that breaks its server does not end it."""

import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from cli.process import one_sentence, pyspec
from hostile import Peer, answers
from random_gguf.archs import write_qwen3
from random_gguf.model import Shape
from workers import Worker, fake_server, free_port, listens, need_library

import pyggml_spec as ps
from pyggml_spec.errors import DeviceError
from pyggml_spec.ggml.workers import PROTOCOL
from pyggml_spec.tools import worker as tools

pytestmark = pytest.mark.slow
ARGUMENTS = ("-p", "x", "-n", 4, "--draft-width", 4)


@pytest.fixture(scope="module", autouse=True)
def _library():
    need_library()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_its_server(number):
    worker = Worker()
    server = worker.server()
    worker.process.send_signal(number)
    err = worker.process.communicate(timeout=60)[1]
    assert worker.process.returncode == 0 and "Traceback" not in err
    first, second = err.splitlines()[:2]
    assert re.match(rf"CPU \(.*MiB free\) is the device RPC:127\.0\.0\.1:{worker.port}$", first)
    assert f"protocol {'.'.join(map(str, PROTOCOL))}; no encryption and no authentication" in second
    assert not listens(worker.port) and not os.path.exists(f"/proc/{server}")


def test_servers_that_end_and_break():
    worker = Worker()
    worker.process.kill()
    worker.process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while listens(worker.port):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # Who waits meanwhile is served by the next one.
    with Worker() as worker:
        peer = Peer(worker)
        with peer.socket:
            peer.break_server()
        assert answers(worker) < 20
        said = [worker.process.stderr.readline() for _ in range(4)]  # two of greeting, one of the connection
        assert "GGML_ASSERT" in said[3] and "another one was started" in said[3], said


def test_servers_that_cannot_begin(monkeypatch):
    """Two seconds decided: a crash within them ended the worker, and a start that took longer was tried again for ever."""
    with pytest.raises(DeviceError, match=r"RPC server at 127\.0\.0\.1:\d+ ended with 7, before it listened"):
        scripted(monkeypatch, "import time, sys; time.sleep(2.1); sys.exit(7)")
    crashes = "print('Listening\\nAccepted client connection', flush=True); raise SystemExit('error: one')"
    assert scripted(monkeypatch, crashes, most=4).count("the server ended with 1: error: one; another one was started") >= 3
    with pytest.raises(DeviceError, match="ended with 1: error: two$"):
        scripted(monkeypatch, "print('Listening', flush=True); raise SystemExit('error: two')")
    # Its thread had ended, and the worker stayed and served nothing.
    worker = tools.Worker("127.0.0.1", free_port(), "CPU", 1, False)
    monkeypatch.setattr(worker, "command", lambda: ["/nowhere/python"])
    with ended_within(60, worker), pytest.raises(DeviceError, match="cannot be run: FileNotFoundError"):
        worker.serve()


def scripted(monkeypatch, code: str, most: int = 99) -> list[str]:
    """What a worker says whose servers do this; it is ended after ``most`` of them."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if sum("another one" in line for line in said) >= most:
            with worker._over._cond:  # a signal that comes while the waiting thread has it: it waited for itself for ever
                signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)

    worker = tools.Worker("127.0.0.1", free_port(), "CPU", 1, False, say=say)
    monkeypatch.setattr(worker, "command", lambda: [sys.executable, "-S", "-c", code])
    worker.serve()
    return said


@contextmanager
def ended_within(seconds: float, worker: tools.Worker):
    """A worker that does not end by itself fails the test."""
    timer = threading.Timer(seconds, worker.fail, ["did not end by itself"])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_a_worker_survives_a_closed_stderr(monkeypatch):
    """`pyspec worker 2>&1 | head -1`: the thread that said the next line ended, and with it the worker's service."""
    said = []

    def say(line: str) -> None:
        said.append(line)
        if sum("another one" in line for line in said) == 2:
            worker.end()
        raise BrokenPipeError

    worker = tools.Worker("127.0.0.1", free_port(), "CPU", 1, False, say=say)
    monkeypatch.setattr(
        worker, "command", lambda: [sys.executable, "-S", "-c", "print('Listening\\nAccepted client connection', flush=True)"]
    )
    with ended_within(60, worker):
        worker.serve()
    assert sum("another one" in line for line in said) == 2


def test_several_programs_at_a_time():
    with Worker("--programs", "2") as worker:
        deadline = time.monotonic() + 60
        while len(worker.servers()) < 2:
            assert time.monotonic() < deadline
        with ps.load(device=worker.device, n_ctx=256, draft_width=4) as session:
            text = session.generate("import os", 12, ignore_end=True)[0]
            assert answers(worker) < 20
            peer = Peer(worker)
            with peer.socket:  # it has the other server, and ends that
                peer.break_server()
            assert session.generate("import os", 12, ignore_end=True)[0] == text


def test_weights_are_sent_once_with_a_cache(tmp_path, monkeypatch):
    """Matrices of 12 MB. A file that was cut short, by a full disk or a killed worker, was taken for the weights."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    model = write_qwen3(tmp_path / "t.gguf", Shape(n_vocab=12000, n_layer=1), "F32")

    def run(worker: Worker) -> tuple[str, int]:
        with ps.load(model, device=worker.device, n_ctx=64) as session:
            return session.generate([5, 6, 7], 8, ignore_end=True)[0], session.backend.traffic.sent

    with Worker("--cache") as worker:
        text, sent = run(worker)
        kept = sorted((tmp_path / "cache" / "worker").iterdir())
        assert len(kept) == 2 and all(path.stat().st_size == 12000 * 256 * 4 for path in kept)
        again = run(worker)
        assert again[0] == text and sent - again[1] > 2 * 12_000_000
        kept[0].write_bytes(kept[0].read_bytes()[:-4])
        kept[1].write_bytes(bytes(100) + kept[1].read_bytes()[100:])
        third = run(worker)  # both are sent, and kept anew
        assert third[0] == text and third[1] - again[1] > 2 * 12_000_000 and run(worker)[1] == again[1]


def test_what_is_wrong_is_a_sentence():
    port = free_port()
    with fake_server(lambda connection: None) as taken:
        one_sentence(pyspec("worker", "--port", taken), f"cannot listen at 127.0.0.1:{taken}", "pick another --port or --host")
    one_sentence(pyspec("worker", "--port", port, "--device", "CUDA9"), "no device is called 'CUDA9'")
    one_sentence(pyspec("worker", "--port", port, "--device", "CPU,cpu"), "not a list of different names")
    one_sentence(pyspec("worker", "--port", port, "--host", "nowhere.invalid"), "'nowhere.invalid' is not known")
    one_sentence(pyspec("worker", "--port", port, env={"XDG_CACHE_HOME": "/nonexistent"}), "was not built yet; run `pyspec build --rpc`")
    one_sentence(pyspec("run", "--device", f"RPC:127.0.0.1:{free_port()}", *ARGUMENTS), "nothing listens at")
    one_sentence(pyspec("run", "--device", "RPC:nowhere.invalid:1", *ARGUMENTS), "'nowhere.invalid' is not known")
    with fake_server(lambda connection: connection.sendall(b"220 mail.example ready, and more than eight bytes\r\n")) as port:
        one_sentence(pyspec("run", "--device", f"RPC:127.0.0.1:{port}", *ARGUMENTS), "does not respond as a worker")
    with Worker() as worker:
        done = pyspec("run", "--device", worker.device, *ARGUMENTS)
        assert done.returncode == 0 and f"on {worker.device}" in done.stderr and "is not encrypted" in done.stderr
        done = pyspec("plan", "--device", worker.device)
        assert done.returncode == 0 and f"{worker.device}, context" in done.stdout.decode()
        one_sentence(pyspec("run", "--device", worker.device, "--kernels", "native", *ARGUMENTS), "this device is a worker")
