"""What a worker does with programs that send nonsense, stop, or ask for too much: it closes their connection, and serves the next one."""

import os
import random
import socket
import struct
import subprocess
import time
from types import SimpleNamespace

import hostile
import pytest
from hostile import ADD, CHECK_GRAPH, COMPUTE, SET, Peer, answers, graph, resident, tensor
from workers import Worker, bare_server, need_library

MANY = 250  # connections of the short run; scripts/fuzz_worker.py makes long ones


@pytest.fixture(scope="module")
def worker():
    need_library()
    patch = pytest.MonkeyPatch()
    patch.setenv("GGML_RPC_TIMEOUT", "1")
    with Worker() as running:
        patch.undo()
        yield running


@pytest.fixture
def kept(worker):
    """The worker, whose server is the same process afterwards and computes."""
    server = worker.server()
    yield worker
    assert worker.server() == server and answers(worker) < 10


def shapes(peer: Peer) -> dict[str, bytes]:
    return {
        "outside of its buffer": tensor(1, peer.buffer, peer.base + 256),
        "before its buffer": tensor(1, peer.buffer, peer.base - 4),
        "beyond its end": tensor(1, peer.buffer, peer.base + 240),
        "longer than numbers go": peer.tensor(ne=(8, 1 << 31, 1 << 31, 1 << 31), nb=(4, 1 << 31, 1 << 31, 1 << 31)),
        "with a size whose sum is small": peer.tensor(
            ne=(1, 0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF), nb=(4, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        ),
        "of no type": peer.tensor(kind=250),
        "of no operation": peer.tensor(op=4000),
        "of blocks that do not fill it": peer.tensor(ne=(33, 1, 1, 1), kind=8),
        "in no buffer": tensor(1, 4096, 4096),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, behind", [(SET, b"\0" + bytes(12)), (hostile.GET, struct.pack("<QQ", 0, 4)), (hostile.MEMSET, struct.pack("<QQB", 0, 4, 0))]
)
def test_a_tensor_that_is_none_is_refused(kept, command, behind):
    """An assertion of ggml ended the server, or bytes of another tensor were read."""
    for what in shapes(peer := Peer(kept)):
        peer.send(command, shapes(peer)[what] + behind)
        assert peer.closed(), what
        peer.socket.close()
        peer = Peer(kept)
    peer.socket.close()


@pytest.mark.parametrize("command, behind", [
    (hostile.GET, struct.pack("<QQ", 16, 32)), (hostile.GET, struct.pack("<QQ", (1 << 64) - 8, 8)), (SET, b"\0" + struct.pack("<Q", 16) + bytes(32)),
    (SET, b"\0" + struct.pack("<Q", (1 << 64) - 8) + bytes(8)), (hostile.MEMSET, struct.pack("<QQB", 16, 32, 1)),
])  # fmt: skip
def test_bytes_outside_of_a_tensor_are_refused_although_they_are_in_its_buffer(kept, command, behind):
    peer = Peer(kept)
    with peer.socket:
        peer.send(command, peer.tensor() + behind)
        assert peer.closed()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, (1 << 24) + 1])
@pytest.mark.parametrize("command", [SET, CHECK_GRAPH, COMPUTE, hostile.COMPUTE_SLOT])
def test_a_message_is_no_longer_than_what_it_is_for(kept, command, length):
    """2^63 was an uncaught exception, 2^40 as much memory as there is."""
    before, peer = resident(kept.server()), Peer(kept)
    with peer.socket:
        peer.socket.sendall(struct.pack("<BQ", command, length) + bytes(50))
        assert peer.closed()
    assert resident(kept.server()) - before < 8 << 20


def nodes(peer: Peer) -> dict[str, bytes]:
    a, b = peer.tensor(1), peer.tensor(2, 32)
    return {
        "without nodes": graph([a, b], []),
        "with more nodes than tensors": graph([a], [1, 1, 1]),
        "with a node that did not come": graph([a, b], [9]),
        "with a node twice": graph([a, b, peer.tensor(3, 64, op=ADD, sources=(1, 2))], [3, 3, 1]),
        "without a source": graph([a, peer.tensor(3, 64, op=ADD, sources=(1,))], [3]),
        "whose source did not come": graph([a, peer.tensor(3, 64, op=ADD, sources=(1, 7))], [3]),
        "of no device": graph([a], [1], device=9),
        "that is cut": graph([a, b], [1])[:-100],
        "that is empty": b"",
    }


@pytest.mark.parametrize("command", [CHECK_GRAPH, COMPUTE])
def test_a_graph_that_is_none_is_refused(kept, command):
    for what in nodes(peer := Peer(kept)):
        peer.send(command, nodes(peer)[what])
        assert peer.closed(), what
        peer.socket.close()
        peer = Peer(kept)
    peer.socket.close()


def test_sizes_and_sources_are_bounded(kept):
    """Tensors are made by a function that calls itself for their sources."""
    peer = Peer(kept)
    with peer.socket:
        peer.send(CHECK_GRAPH, graph([peer.tensor(i, op=ADD, sources=(i + 1, i + 1)) for i in range(1, 11000)] + [peer.tensor(11000)], [1]))
        assert peer.closed()
    peer = Peer(kept)
    with peer.socket:
        peer.send(hostile.ALLOC_SIZE, struct.pack("<I", 0) + peer.tensor(op=ADD) + peer.tensor(2, kind=250) + bytes(296 * 9))
        assert peer.closed()
    peer = Peer(kept)
    with peer.socket:
        for size in (1 << 46, (1 << 64) - 1):
            assert struct.unpack("<QQ", peer.ask(hostile.ALLOC, struct.pack("<IQ", 0, size))) == (0, 0)
    # Bytes after it were written.
    peer = Peer(kept)
    with peer.socket:
        peer.send(hostile.COPY, peer.tensor(1) + peer.tensor(2, 64, ne=(4, 1, 1, 1)))
        assert peer.closed()


@pytest.mark.slow
def test_a_copy_that_the_device_refuses_is_made(tmp_path, monkeypatch):
    """A copy within one device is queued, and the result was not checked: kept states stayed as they were, silently."""
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text("int ggml_backend_buffer_copy_tensor(const void * src, void * dst) { (void) src; (void) dst; return 0; }")
    need_library()
    subprocess.run([*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-o", shim, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    size = (3 << 20) + 4  # more than the server takes at once
    with bare_server("CPU") as port:
        peer = Peer(SimpleNamespace(port=port))
        with peer.socket:
            buffer, _ = struct.unpack("<QQ", peer.ask(hostile.ALLOC, struct.pack("<IQ", 0, 2 * size + 256)))
            (base,) = struct.unpack("<Q", peer.ask(hostile.BASE, struct.pack("<Q", buffer)))
            source, copy = (tensor(1 + i, buffer, base + i * size, ne=(size // 4, 1, 1, 1)) for i in range(2))
            data = random.randbytes(size)
            peer.send(SET, source + b"\0" + struct.pack("<Q", 0) + data)
            assert peer.ask(hostile.COPY, source + copy) == b"\1"
            assert peer.ask(hostile.GET, copy + struct.pack("<QQ", 0, size)) == data


def test_who_leaves_or_stops_gives_back(kept):
    answers(kept)
    before, peer = resident(kept.server()), Peer(kept)
    with peer.socket:
        size = 200 << 20
        buffer, _ = struct.unpack("<QQ", peer.ask(hostile.ALLOC, struct.pack("<IQ", 0, size)))
        peer.send(hostile.CLEAR, struct.pack("<QB", buffer, 1))
        peer.ask(hostile.BASE, struct.pack("<Q", buffer))
        assert resident(kept.server()) - before > size - (1 << 20)
    answers(kept)
    assert resident(kept.server()) - before < 8 << 20
    peer = Peer(kept)
    with peer.socket:
        peer.socket.sendall(struct.pack("<BQ", hostile.GET, 312) + bytes(40))
        assert answers(kept) < 4


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b"\x0e", struct.pack("<BQ", hostile.HELLO, 24) + bytes(3)])
def test_who_says_nothing_at_first_is_not_waited_for(kept, said):
    """One silent connection kept all others from the worker for ever."""
    with socket.create_connection(("127.0.0.1", kept.port), 20) as silent:
        silent.sendall(said)
        assert answers(kept) < 4 and silent.recv(1) == b""


@pytest.mark.slow
def test_silence_and_nonsense(kept):
    peer = Peer(kept)
    with peer.socket:
        time.sleep(2.5)
        assert peer.ask(hostile.COUNT, b"") == struct.pack("<I", 1)
    # Every kind of message, spoiled; graphs are looked at, not computed (docs/workers.md says why).
    rng = random.Random(5)
    answers(kept)
    before = resident(kept.server())
    for _ in range(MANY):
        hostile.attack(kept, rng, computes=False)
    assert resident(kept.server()) - before < 32 << 20
