"""One request that harms all others: what it may have is limited before it costs anything, and whoever is not let in costs nothing."""

import socket

import pytest
from serve.running import Running


@pytest.fixture(scope="module")
def server():
    running = Running("--slots", 2, "--api-key", "one,two", "--max-body", 8)
    running.http.headers["x-api-key"] = "one"
    yield running
    assert running.end() == 0, running.lines
    assert not any("Traceback" in line for line in running.lines), running.lines


def head(server, path, key="one", length=8 << 20, method="POST"):
    """A connection that has sent a head, and none of its body."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), 20)
    told = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    sock.sendall(told.encode())
    return sock


@pytest.mark.parametrize(
    "path, key, method, status",
    [
        ("/completion", "none", "POST", 401), ("/nowhere", "one", "POST", 404), ("/nowhere", "none", "POST", 401), ("/health", "one", "POST", 405),
        ("/v1/embeddings", "one", "POST", 501),
    ],
)  # fmt: skip
@pytest.mark.parametrize("length", [1000, 8 << 20])
def test_who_is_not_let_in_is_told_so_before_the_body_is_read(server, path, key, method, status, length):
    """Bodies were read first: 24 connections of strangers took 720 MiB."""
    with head(server, path, key, length, method) as sock:
        sock.settimeout(10)
        got = b""
        while not got.endswith(b"}}"):
            got += sock.recv(4096)
        assert got.startswith(b"HTTP/1.1 %d " % status), got
        sock.sendall(b"x" * 1000)  # what it sends is thrown away


def test_bodies_of_strangers_are_not_kept(server):
    before = server.resident_mib
    socks = [head(server, "/completion", "none") for _ in range(8)]
    for sock in socks:
        sock.settimeout(0.5)
        try:
            for _ in range(64):
                sock.sendall(b"x" * (1 << 16))
        except OSError:
            pass
    assert server.resident_mib - before < 8
    for sock in socks:
        sock.close()
