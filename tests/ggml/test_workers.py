"""What is wrong at a worker's address is one sentence, said within seconds, before ggml connects to it."""

import os
import struct
import subprocess
import sys
import time

import pytest
from sessions import fails_with
from workers import COUNT, HELLO, MEMORY, fake_server, free_port, request, say

from pyggml_spec.cli.report import footer
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import DeviceError
from pyggml_spec.ggml.step_io import ReplayCounters
from pyggml_spec.ggml.workers import PROTOCOL, Address, WorkerInfo, is_worker, parse, probe


def at(port: int, device: int = 0) -> Address:
    return Address("127.0.0.1", port, device, "127.0.0.1")


def hello(version=PROTOCOL, flags: int = 0) -> bytes:
    return bytes([*version, flags]) + bytes(24)


def answers(version=PROTOCOL, flags=0, devices=1):
    def serve(connection):
        while True:
            command, body = request(connection)
            if command == HELLO:
                assert len(body) == 24
                say(connection, hello(version, flags))
            elif command == COUNT:
                say(connection, struct.pack("<I", devices))
            elif command == MEMORY:
                say(connection, struct.pack("<QQ", 5 + struct.unpack("<I", body)[0], 9))

    return serve


def test_addresses_and_versions_of_workers():
    assert parse("RPC:127.0.0.1:123") == Address("127.0.0.1", 123, 0, "127.0.0.1")
    assert parse("rpc:localhost") == Address("localhost", 50052, 0, "127.0.0.1")
    assert parse("RPC:localhost:7/2") == Address("localhost", 7, 2, "127.0.0.1")
    assert (parse("rpc:localhost:7/2").name, parse("rpc:localhost:7/2").endpoint) == ("RPC:localhost:7/2", "127.0.0.1:7")
    assert is_worker("rpc:x") and not is_worker("CPU") and not is_worker(None) and not is_worker("RPC0")
    fails_with(DeviceError, r"host 'nowhere\.invalid' is not known", parse, "RPC:nowhere.invalid:50052")
    with fake_server(answers(devices=2)) as port:
        assert probe(at(port, 1)) == WorkerInfo(PROTOCOL, ((5, 9), (6, 9)), False)
    with fake_server(answers(flags=1)) as port:
        assert probe(at(port)).extended
    port = free_port()
    with pytest.raises(DeviceError, match=rf"nothing listens at 127\.0\.0\.1:{port}; start `pyspec worker --port {port}` there"):
        probe(at(port))
    with fake_server(answers((7, 0, 9))) as port:
        assert probe(at(port)).version == (7, 0, 9)
    with fake_server(answers(devices=2)) as port, pytest.raises(DeviceError, match=r"has 2 devices, and /2 is none of them"):
        probe(at(port, 2))


@pytest.mark.parametrize(
    "name", ["RPC:", "RPC:a:0", "RPC:a:65536", "RPC:a:b", "RPC:::1:5", "RPC:a:5/", "RPC:a:5/x", "RPC:a:5/1/2", "RPC:a b:5"]
)
def test_what_is_no_address_is_named(name):
    fails_with(DeviceError, r"names no worker: write RPC:host:port", parse, name)


@pytest.mark.parametrize("version", [(6, 9, 9), (8, 0, 0), (7, 1, 0)])
def test_another_version_is_named(version):
    with (
        fake_server(answers(version)) as port,
        pytest.raises(DeviceError, match=rf"speaks version {'.'.join(map(str, version))} of ggml's RPC protocol, and this ggml 7\.0\.0"),
    ):
        probe(at(port))


def web_server(connection):
    connection.recv(9)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def closes(connection):
    connection.recv(1)


def half(connection):
    request(connection)
    connection.sendall(struct.pack("<Q", 28) + hello()[:10])


@pytest.mark.parametrize("serve", [web_server, closes, half])
def test_what_is_no_worker_is_said_to_be_none(serve):
    with fake_server(serve) as port, pytest.raises(DeviceError, match=r"does not respond as a worker"):
        probe(at(port))


def hangs(connection):
    connection.settimeout(60)
    while connection.recv(1 << 16):
        pass


def counts_slowly(connection):
    request(connection)
    say(connection, hello())
    hangs(connection)


@pytest.mark.parametrize("serve", [hangs, counts_slowly])
def test_a_server_that_hangs_is_given_up(serve):
    with fake_server(serve) as port:
        began = time.monotonic()
        fails_with(DeviceError, r"sent nothing within 0\.3 s: the worker is in use", lambda: probe(at(port), 0.3))
        assert time.monotonic() - began < 50


NODES = 1800  # a 4B step


def test_replay_rates_and_launch_times():
    on, off = ReplayCounters(), ReplayCounters()
    for call, us in enumerate([4400, 6700, 160, 80, 80, 80], 1):
        on.count(call, us, NODES)
        off.count(call, 3200, NODES)
    assert (on.warmup, on.replayed, on.eager) == (2, 4, 0) and (off.warmup, off.replayed, off.eager) == (2, 0, 4)
    counters = ReplayCounters()
    assert not counters.count(3, 1, 10) and counters == ReplayCounters()
    assert "warning" not in _footer(995, 5) and "995 steps replayed" in _footer(995, 5)
    assert "only 50 % of the steps were replayed" in _footer(100, 100) and "CUDA graphs" not in footer(Stats(), None)


def _footer(replayed: int, eager: int) -> str:
    return footer(Stats(cuda_graphs={"warmup": 2, "captured": 1, "replayed": replayed, "eager": eager}), None)


@pytest.mark.slow
def test_replay_cannot_be_switched_off_once_ggml_may_have_read_the_setting():
    code = """
import pyggml_spec as ps
from pyggml_spec.ggml.device import graph_replay_enabled
from pyggml_spec.errors import DeviceError
with ps.load(device="CPU", threads=1, n_ctx=64, draft_width=4):
    assert graph_replay_enabled()
try:
    ps.load(device="CPU", threads=1, n_ctx=64, graphs=False)
except DeviceError as error:
    print(error)
"""
    env = {k: v for k, v in os.environ.items() if k != "GGML_CUDA_DISABLE_GRAPHS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "start a new process" in done.stdout, done.stderr
