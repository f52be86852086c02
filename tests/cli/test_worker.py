"""`pyspec worker`: what it says, how it ends, what it keeps, and that a program that breaks its server does not end it."""

import os
import re
import signal
import socket
import struct
import time

import pytest
from cli.process import one_sentence, pyspec
from random_gguf.archs import write_qwen3
from random_gguf.model import Shape
from workers import HELLO, Worker, exactly, fake_server, free_port, listens, need_library

import pyggml_spec as ps
from pyggml_spec.ggml.workers import PROTOCOL

ARGUMENTS = ("-p", "x", "-n", 4, "--draft-width", 4)


@pytest.fixture(scope="module", autouse=True)
def _library():
    need_library()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_its_server(number):
    worker = Worker()
    server = worker.server()
    worker.process.send_signal(number)
    err = worker.process.communicate(timeout=20)[1]
    assert worker.process.returncode == 0 and "Traceback" not in err
    first, second = err.splitlines()[:2]
    assert re.match(rf"CPU \(.*MiB free\) is the device RPC:127\.0\.0\.1:{worker.port}$", first)
    assert f"protocol {'.'.join(map(str, PROTOCOL))}; nothing is encrypted" in second
    assert not listens(worker.port) and not os.path.exists(f"/proc/{server}")


def test_its_server_ends_with_it_however_it_ended():
    worker = Worker()
    worker.process.kill()
    worker.process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while listens(worker.port):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_is_broken_is_started_anew():
    """Memory that lies outside of its buffer ends ggml's server by an assertion."""
    with Worker() as worker:
        time.sleep(2)  # what ends sooner is taken for one that cannot serve here
        with socket.create_connection(("127.0.0.1", worker.port), 20) as client:

            def ask(command: int, body: bytes) -> bytes:
                client.sendall(struct.pack("<BQ", command, len(body)) + body)
                return exactly(client, struct.unpack("<Q", exactly(client, 8))[0])

            ask(HELLO, bytes(24))
            buffer, _ = struct.unpack("<QQ", ask(0, struct.pack("<IQ", 0, 64)))
            outside = (
                struct.pack("<QIQ4I4I", 1, 0, buffer, 1, 1, 1, 1, 4, 4, 4, 4)
                + bytes(4 + 64 + 4 + 80 + 8 + 8)
                + struct.pack("<Q", 8)
                + bytes(68)
            )
            body = outside + struct.pack("<QQ", 0, 4)
            client.sendall(struct.pack("<BQ", 8, len(body)) + body)  # GET_TENSOR
            assert client.recv(1) == b""
        said = [worker.process.stderr.readline() for _ in range(4)]  # two of greeting, one of the connection
        assert "GGML_ASSERT" in said[3] and "another one was started" in said[3], said
        done = pyspec("run", "--device", worker.device, *ARGUMENTS)
        assert done.returncode == 0 and done.stdout


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
        assert third[0] == text and third[1] - again[1] > 2 * 12_000_000
        assert run(worker)[1] == again[1]


def test_what_cannot_be_served_is_a_sentence():
    port = free_port()
    with fake_server(lambda connection: None) as taken:
        one_sentence(pyspec("worker", "--port", taken), f"cannot listen at 127.0.0.1:{taken}", "pick another --port or --host")
    one_sentence(pyspec("worker", "--port", port, "--device", "CUDA9"), "no device is called 'CUDA9'")
    one_sentence(pyspec("worker", "--port", port, "--device", "CPU,cpu"), "not a list of different names")
    one_sentence(pyspec("worker", "--port", port, "--host", "nowhere.invalid"), "'nowhere.invalid' is not known")
    one_sentence(pyspec("worker", "--port", port, env={"XDG_CACHE_HOME": "/nonexistent"}), "was not built yet; run `pyspec build --rpc`")


def test_what_is_wrong_with_a_worker_is_a_sentence_of_run():
    one_sentence(pyspec("run", "--device", f"RPC:127.0.0.1:{free_port()}", *ARGUMENTS), "nothing listens at")
    one_sentence(pyspec("run", "--device", "RPC:nowhere.invalid:1", *ARGUMENTS), "'nowhere.invalid' is not known")
    with fake_server(lambda connection: connection.sendall(b"220 mail.example ready, and more than eight bytes\r\n")) as port:
        one_sentence(pyspec("run", "--device", f"RPC:127.0.0.1:{port}", *ARGUMENTS), "does not answer as a worker does")


def test_commands_take_a_worker_as_a_device():
    with Worker() as worker:
        done = pyspec("run", "--device", worker.device, *ARGUMENTS)
        assert done.returncode == 0 and f"on {worker.device}" in done.stderr and "is not encrypted" in done.stderr
        done = pyspec("plan", "--device", worker.device)
        assert done.returncode == 0 and f"{worker.device}, context" in done.stdout.decode()
        one_sentence(pyspec("run", "--device", worker.device, "--kernels", "own", *ARGUMENTS), "this device is a worker")
