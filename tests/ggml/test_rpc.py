"""Models on workers: the same tokens as on this machine, few bytes per step, and a lost worker is a sentence."""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from statistics import median

import pytest
from pairs import write_pair
from random_gguf.model import Shape, write_qwen35
from sessions import fails_with, together
from workers import CHECK_GRAPH, GRAPH_COMPUTE, HELLO, Worker, bare_server, between, exactly, fake_server, gone, need_library

import pyggml_spec as ps
from pyggml_spec.doctor.report import OK, WARN
from pyggml_spec.doctor.split import examine
from pyggml_spec.errors import DeviceError, PyspecError
from pyggml_spec.ggml import rpc
from pyggml_spec.ggml.device import Backend, pick_device, present
from pyggml_spec.pin import installed_libraries
from pyggml_spec.tools.compare import compare_logits

pytestmark = pytest.mark.slow
PROMPT = "def fibonacci(n):\n    "
OPTIONS = {"n_ctx": 512, "draft_width": 4, "threads": 1}


@pytest.fixture(scope="module")
def worker():
    need_library()
    with Worker() as running:
        yield running


def texts(device: str, kernels: str | None = None, **more) -> list[str]:
    """With the embedded pair: speculative, plain, sampled, after a prompt that begins alike, and two sequences at once."""
    with ps.load(device=device, kernels=kernels, **{**OPTIONS, **more}) as session:
        found = [session.generate(PROMPT, 40, ignore_end=True)[0], session.generate(PROMPT, 24, mode="plain", ignore_end=True)[0]]
        sampled = ps.Sampling(temperature=0.9, top_k=20, seed=7)
        found += [session.generate(PROMPT, 16, sampling=sampled, ignore_end=True)[0]]
        found += [session.generate(PROMPT * 30 + end, 16, ignore_end=True)[0] for end in "xy"]
        return found + [text for text, _ in session.generate_all([PROMPT, "import os\n"], 16, slots=2)]


@pytest.fixture(scope="module")
def second():
    need_library()
    with Worker() as running:
        yield running


@pytest.fixture(autouse=True, scope="module")
def nothing_repacked():
    """A worker has the weights as they are in the file. Repacked, Q4_0 everywhere and most types under AMX are rounded otherwise on this CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "extra_buffer_types", lambda self: [])
        yield


@pytest.fixture(scope="module")
def expected():
    return texts("CPU", "ggml")


def test_logits_and_round_trips(worker, tmp_path):
    """`pyspec compare` failed a worker on a processor with AMX: an NMSE of 1e-4 between kernels that were both right."""
    result = compare_logits(write_qwen35(tmp_path / "t.gguf", Shape(), "Q4_0"), 37, device=worker.device, threads=1)
    assert (result.nmse, result.max_abs) == (0.0, 0.0)
    # Drafted ids to the first worker, rows of three layers from it, together, and the outcome. One by one they were five, the host waiting.
    with Worker() as second, ps.load(device=f"{worker.device},{second.device}", **OPTIONS) as session:
        engine = session.runner
        engine.prefill(session.prompt_ids(PROMPT))
        for _ in range(2):
            engine.accept(1, int(engine.fused_step(4).ids[0]))
        before = [backend.traffic.answers for backend in session.backends]
        engine.accept(1, int(engine.fused_step(4).ids[0]))
        first, last = (backend.traffic.answers - n for backend, n in zip(session.backends, before, strict=True))
        assert first <= 2 and last == 2  # two, where the sending thread is faster than this one


def test_text_over_workers(worker, expected, second):
    assert texts(worker.device) == expected
    seen = set()

    def watched(command, body, answer):
        seen.add(command)
        return llama_cpps(command, body, answer)

    with fake_server(between(worker, watched)) as port:
        assert texts(f"RPC:127.0.0.1:{port}") == expected
    assert GRAPH_COMPUTE in seen and not any(command >= CHECK_GRAPH for command in seen)
    assert texts(f"{worker.device},{second.device}") == expected and texts(f"CPU,{worker.device}", "ggml") == expected


def test_the_doctor_takes_a_split_over_two_workers_apart(worker, second, tmp_path):
    target, drafter = write_pair(tmp_path, "qwen35")
    with ps.load(target, drafter, device=f"{worker.device},{second.device}", tensor_split=[3, 1], **OPTIONS) as session:
        checks = {check.name: check for check in examine(session.runner)}
    assert list(checks) == ["cut cost", "waiting devices", "prompts on devices", "device copies"]
    assert all(check.verdict in (OK, WARN) and check.data for check in checks.values())
    cut = checks["cut cost"]
    assert 0 < cut.data["copy_ms"] < cut.data["parts_ms"] and (cut.verdict == OK or "waits for the network" in cut.remedy)
    waits, prompts = checks["waiting devices"], checks["prompts on devices"]
    assert all(ms > 0 for ms in (*waits.data["layer_ms"], *prompts.data["compute_ms"])) and sum(waits.data["waits"]) == pytest.approx(1)
    assert f"{worker.device} (layers 0 to 2) computes" in waits.found
    assert "over the network, through this machine" in checks["device copies"].found


@pytest.mark.parametrize("name", ["gemma4", "gpt-oss", "qwen3moe", "qwen3next", "mtp"])
def test_architectures_on_a_worker(worker, name, tmp_path):
    """Rings, sinks, routed experts, also half of them in this machine's memory, recurrent states, chains of drafts; and constraints."""
    target, drafter = write_pair(tmp_path, name)
    ids = [i % 300 for i in range(7, 90)]

    def found(device: str, kernels: str | None) -> list[str]:
        experts = ps.ExpertOptions(host_layers=2) if name == "qwen3moe" else None
        options = {**OPTIONS, "n_ctx": 256, "chunk": 32, "experts": experts}
        with ps.load(target, None if drafter == target else drafter, device=device, kernels=kernels, **options) as session:
            out = [session.generate(part, 12, ignore_end=True)[0] for part in (ids, ids[:60])]
            if experts is not None and device != "CPU":  # the parts between which the host computes are kept, too
                assert session.backend.traffic.graphs_again > session.backend.traffic.graphs
            return [*out, session.generate(ids[:9], 12, sampling=ps.Sampling(regex="[a-z ]{3,12}", seed=3))[0]]

    assert found(worker.device, None) == found("CPU", "ggml")


def test_a_drafter_here_costs_one_round_trip_of_the_last_worker(worker, expected):
    """The CPU that is named last keeps drafter and head. Rows of captured layers come together; one by one, each was a round trip.

    Where this thread is interrupted between two requests they are sent apart: round trips are those of the median step, bytes received of every one.
    """
    with Worker() as second, ps.load(device=f"{worker.device},{second.device},CPU", kernels="ggml", **OPTIONS) as session:
        assert [backend.device.kind for backend in session.backends] == ["rpc", "rpc", "cpu"]
        marks = []
        for event in session.steps(PROMPT, 40, ignore_end=True):
            traffic = [backend.traffic for backend in session.backends[:2]]
            marks.append((event.stats.steps, *(t.answers for t in traffic), *(t.received for t in traffic)))
        each = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(marks[1:-1])]  # the first step sends its graph
        steps, first, last, *received = zip(*each, strict=True)
        assert len(each) > 8 and set(steps) == {1} and all(len(set(by_step)) == 1 for by_step in received)
        assert median(last) == 1 and median(first) <= 2 and session.generate(PROMPT, 40, ignore_end=True)[0] == expected[0]
        with session.concurrent(2, groups=2) as server:
            handles = [server.submit(prompt, 16) for prompt in (PROMPT, "import os\n")]
            assert [handle.result()[0] for handle in handles] == expected[-2:] and server.stats.pipelined > 0


@pytest.mark.parametrize("last", [False, True])
def test_a_worker_lost_in_the_middle_of_a_split_is_named(worker, last):
    with Worker() as second:
        devices = [worker.device, second.device] if last else [second.device, worker.device]
        with ps.load(device=",".join(devices), **OPTIONS) as session:
            session.generate(PROMPT, 4)
            second.kill()
            with pytest.raises(DeviceError, match=rf"the worker 127\.0\.0\.1:{second.port} is lost"):
                session.generate(PROMPT, 40, ignore_end=True)


def test_a_second_device_of_a_connected_worker_is_used(expected):
    """It was probed by a connection of its own, which waited for the end of the first: the worker was said to be taken."""
    with bare_server("CPU", "CPU") as port:
        name = f"RPC:127.0.0.1:{port}"
        with ps.load(device=f"{name},{name}/1", **OPTIONS) as split, ps.load(device=f"{name}/1", **OPTIONS) as alone:
            for session in (split, alone, split):
                text = session.generate(PROMPT, 12, ignore_end=True)[0]
                assert text and expected[0].startswith(text)
            fails_with(DeviceError, "has 2 devices, and /2 is none of them", pick_device, f"{name}/2")


def test_a_lost_worker_ends_the_sessions_that_use_it_and_no_other(worker, expected):
    """Every step of the process looked for any lost worker: a session on the CPU failed with it."""
    with (
        Worker() as second,
        ps.load(device=second.device, **OPTIONS) as lost,
        ps.load(device=worker.device, **OPTIONS) as other,
        ps.load(device="CPU", kernels="ggml", **OPTIONS) as here,
    ):
        lost.generate(PROMPT, 4)
        second.kill()
        fails_with(DeviceError, "is lost", lost.generate, PROMPT, 40, ignore_end=True)
        for session in (other, here):
            text = session.generate(PROMPT, 12, ignore_end=True)[0]
            assert text and expected[0].startswith(text) and session.runner.logits(session.prompt_ids(PROMPT)).any()
        with Worker(port=second.port), pytest.raises(DeviceError, match=r"is lost: .* still uses what it had there: close it first"):
            ps.load(device=second.device, **OPTIONS)
        fails_with(DeviceError, "is lost", lost.generate, PROMPT, 40, ignore_end=True)


def test_segments_bytes_and_encryption(worker):
    fails_with(DeviceError, r"is named twice", ps.load, device=f"{worker.device},{worker.device}", **OPTIONS)
    with ps.load(device=worker.device, **OPTIONS) as session:
        assert rpc.UNENCRYPTED in session.configuration().notes and rpc.UNCHECKED not in session.configuration().notes
        assert session.configuration().device == worker.device
    with ps.load(device=worker.device, **OPTIONS) as session:
        engine = session.runner
        engine.prefill(session.prompt_ids(PROMPT))
        for width in (4, 2, 4, 2):  # both graphs, and those between them
            engine.accept(1, int(engine.fused_step(width).ids[0]))
        before = session.backend.traffic
        for width in (4, 2, 4, 4, 2, 2, 4, 2):
            engine.accept(1, int(engine.fused_step(width).ids[0]))
        after = session.backend.traffic
        assert after.graphs == before.graphs and after.graphs_again >= before.graphs_again + 8
        assert (after.sent - before.sent) / 8 < 12_000 and after.answers - before.answers == 8  # one round trip per step


def llama_cpps(command: int, body: bytes, answer: bytes) -> bytes | None:
    """Makes a worker one of llama.cpp: it keeps one graph, and drops it when any memory is freed; it checks none."""
    return answer[:3] + b"\0" + answer[4:] if command == HELLO else None


@pytest.mark.parametrize("change, sent_again", [(lambda *_: None, 0), (llama_cpps, 1)])
def test_a_graph_is_sent_again_only_if_the_worker_dropped_it(worker, change, sent_again):
    """Asked to compute what it does not have, the server closes the connection."""
    with fake_server(between(worker, change)) as port, ps.load(device=f"RPC:127.0.0.1:{port}", **OPTIONS) as session:
        engine = session.runner
        engine.prefill(session.prompt_ids(PROMPT))
        snapshot = engine.snapshot()
        for _ in range(3):
            engine.accept(1, int(engine.plain_step().ids[0]))
        before = session.backend.traffic.graphs
        snapshot.close()  # memory is freed that no graph reads
        for _ in range(2):
            engine.accept(1, int(engine.plain_step().ids[0]))
        assert session.backend.traffic.graphs == before + sent_again


@pytest.mark.parametrize("alone, words", [
    (True, r"target\.gguf stores matrices as \w+, which RPC:\S+ cannot multiply"),
    (False, r"the backend RPC\S+ cannot run \w+ on .* -> "),
])  # fmt: skip
def test_an_operation_that_the_worker_lacks_is_named(worker, alone, words):
    """Products are asked for before weights are sent, graphs before they are computed; ggml's server would end."""

    def lacking(command, body, answer):
        asked = command == CHECK_GRAPH and (struct.unpack_from("<I", body, 4)[0] == 1) == alone
        return struct.pack("<i", 0 if alone else 7) if asked else None

    with fake_server(between(worker, lacking)) as port, pytest.raises(PyspecError, match=words):
        ps.load(device=f"RPC:127.0.0.1:{port}", **OPTIONS)


class Raw:
    """A program that speaks the protocol as it likes."""

    def __init__(self, worker: Worker):
        self.socket = socket.create_connection(("127.0.0.1", worker.port), 20)
        assert self.ask(HELLO, bytes(24), 28)[:4] == b"\x07\x00\x00\x01"

    def send(self, command: int, body: bytes) -> None:
        self.socket.sendall(struct.pack("<BQ", command, len(body)) + body)

    def ask(self, command: int, body: bytes, size: int) -> bytes:
        self.send(command, body)
        assert struct.unpack("<Q", exactly(self.socket, 8)) == (size,)
        return exactly(self.socket, size)

    def closed(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


def custom_node(op: int) -> bytes:
    """A graph of one node F32 [1] whose parameters are the address of a function."""
    parameters = struct.pack("<QiQ", 0x4141414141414141, 1, 0).ljust(64, b"\0")
    tensor = (
        struct.pack("<QIQ4I4II", 1, 0, 0, 1, 1, 1, 1, 4, 4, 4, 4, op) + parameters + struct.pack("<i", 0) + bytes(80 + 8 + 8 + 8 + 64 + 4)
    )
    assert len(tensor) == 296
    return struct.pack("<IIQI", 0, 1, 1, 1) + tensor


def op_number(name: bytes) -> int:
    base = ctypes.CDLL(str(next(installed_libraries().glob("libggml-base.*"))))
    base.ggml_op_name.restype = ctypes.c_char_p
    return next(op for op in range(128) if base.ggml_op_name(op) == name)


def test_functions_connections_and_memory_of_workers(worker, expected):
    """A custom node carries an address; ggml's server jumped to it."""
    client = Raw(worker)
    with client.socket:
        assert client.ask(CHECK_GRAPH, custom_node(op_number(b"CUSTOM")), 4) == struct.pack("<i", 0)
        client.send(GRAPH_COMPUTE, custom_node(op_number(b"CUSTOM")))
        assert client.closed()
    again = Raw(worker)  # it is there, and was not started anew
    again.socket.close()
    with ps.load(device=worker.device, **OPTIONS) as first, ps.load(device=worker.device, **OPTIONS) as second:
        assert first.generate(PROMPT, 40, ignore_end=True)[0] == second.generate(PROMPT, 40, ignore_end=True)[0] == expected[0]
        assert first.generate(PROMPT, 24, mode="plain", ignore_end=True)[0] == expected[1]
    device = pick_device(worker.device)
    backend = Backend(device)
    try:
        assert device.kind == "rpc" and 0 < device.memory_free <= device.memory_total
        assert present(device).memory_total == device.memory_total
    finally:
        backend.close()
    with pytest.raises(DeviceError, match=r"native kernels run on CPUs, and this device is a worker"):
        Backend(pick_device(worker.device), kernels="native")


def collected(events, seen: list[str]):
    """The events, whose texts are in ``seen`` also if one of them fails."""
    for event in events:
        seen.append(event.text)
        yield event


def test_a_worker_that_dies_is_a_sentence_and_one_that_comes_back_is_used(expected):
    need_library()
    with Worker() as first:
        with ps.load(device=first.device, **OPTIONS) as session:
            events = session.steps(PROMPT, 40, ignore_end=True)
            text, seen = "".join(next(events).text for _ in range(3)), []
            first.kill()
            fails_with(DeviceError, "is lost", lambda: list(collected(events, seen)))
            text += "".join(seen)
            assert text and expected[0].startswith(text)  # what is read of a lost worker is zero, and no token
            began = time.monotonic()
            for _ in range(2):  # and the next one, too
                with pytest.raises(DeviceError, match=rf"the worker 127\.0\.0\.1:{first.port} is lost: .*load the model again"):
                    session.generate(PROMPT, 40, ignore_end=True)
            assert time.monotonic() - began < 50
        gone(first.port)
        fails_with(DeviceError, "nothing listens at", ps.load, device=first.device, **OPTIONS)
        with Worker(port=first.port) as second, ps.load(device=second.device, **OPTIONS) as session:
            assert session.generate(PROMPT, 40, ignore_end=True)[0] == expected[0]


def test_a_worker_that_dies_while_weights_are_sent(monkeypatch):
    """What is asked of it later gives zero: an alignment of 0 ended the process, a buffer of no bytes would have been memory's fault."""
    need_library()
    from pyggml_spec.models import weights

    with Worker() as worker:
        upload, left = weights.Weights._upload, [2]  # noqa: SLF001

        def slow(self, *args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                worker.kill()
            return upload(self, *args, **kwargs)

        monkeypatch.setattr(weights.Weights, "_upload", slow)
        with pytest.raises(DeviceError, match=r"is lost: "), ps.load(device=worker.device, **OPTIONS) as session:
            session.generate(PROMPT, 4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_ends_the_command_with_1(number):
    """Killed, and stopped: the kernel of a machine whose programs hang answers for them."""
    need_library()
    with Worker() as worker:
        options = ["--device", worker.device, "-p", PROMPT, "--ignore-eos", "--draft-width", "4", "-c", "2048", "-n", "1900"]
        command, pipe = [sys.executable, "-m", "pyggml_spec", "run", *options], subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env={**os.environ, "GGML_RPC_TIMEOUT": "2"})
        process.stdout.read(1)
        server = worker.server()
        os.kill(server, number)
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 50 and process.returncode == 1 and b"Traceback" not in err
        assert err.decode().splitlines()[-1].startswith(f"pyspec: the worker 127.0.0.1:{worker.port} is lost: ")
        if number == signal.SIGSTOP:
            os.kill(server, signal.SIGKILL)


def test_a_second_program_is_told_that_the_worker_is_taken(worker):
    script = f"""
import sys
from pyggml_spec.ggml import workers
try:
    workers.probe(workers.parse("{worker.device}"), 0.5)
except workers.DeviceError as error:
    print(error)
"""
    with ps.load(device=worker.device, **OPTIONS):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "sent nothing within 0.5 s: the worker is in use (one client at a time)" in done.stdout, done


def test_threads_of_two_sessions_do_not_mix_their_graphs(worker, expected):
    """Whether the worker keeps a graph is decided and queued in one step; graphs of two backends have numbers of their own."""
    found = {}

    def run(name):
        with ps.load(device=worker.device, **OPTIONS) as session:
            found[name] = session.generate(PROMPT, 40, ignore_end=True)[0], session.generate(PROMPT, 24, mode="plain", ignore_end=True)[0]

    together(partial(run, i) for i in range(2))
    assert found == {0: tuple(expected[:2]), 1: tuple(expected[:2])}
