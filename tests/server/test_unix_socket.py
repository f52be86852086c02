"""`--host FILE.sock`: the same server behind a unix socket."""

import os
import signal
import socket
import stat

import httpx
import pytest
from cli.process import one_sentence, pyspec
from server.running import Running, events

from pyggml_spec.errors import PyspecError
from pyggml_spec.server.sockets import listen

pytestmark = pytest.mark.slow

ASK = {"prompt": "a", "n_predict": 2}


def test_a_server_at_a_unix_socket(tmp_path):
    path = tmp_path / "x.sock"
    with Running("--slots", 1, "--host", f"{path},127.0.0.1") as running:
        assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0 and stat.S_ISSOCK(path.stat().st_mode)
        whole = running.ok("/completion", **ask(temperature=0))
        with running.http.stream("POST", "/completion", json=ask(temperature=0, stream=True)) as response:
            assert len(events(response)) >= 2 and whole["content"]
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as through_file:
            for host in ("whatever", "evil.com"):  # no browser comes this way
                assert through_file.get("/props", headers={"host": host}).status_code == 200
        one_sentence(pyspec("serve", "--host", path), f"{path} cannot be listened at: another server listens there", "--host")
        assert running.http.get("/health").status_code == 200 and path.exists()
        assert running.http.post("/completion", json=ASK, headers={"origin": "http://evil.com"}).status_code == 403
        by_address = next(line for line in running.lines if "http://127.0.0.1" in line).split(" at ")[1].split("/ with")[0]
        assert httpx.get(f"{by_address}/health").status_code == 200
        assert running.http.get("/props").status_code == 200
    assert not path.exists() and not any("Traceback" in line for line in running.lines)


def ask(**more):
    return {**ASK, **more}


def test_the_file_of_a_server_that_was_killed_is_replaced(tmp_path):
    path = tmp_path / "x.sock"
    for number in (signal.SIGKILL, signal.SIGINT):
        running = Running("--slots", 1, "--host", path)
        assert running.http.get("/health").status_code == 200
        running.end(number)
        assert path.exists() == (number == signal.SIGKILL)


def test_paths_that_cannot_be(tmp_path):
    (tmp_path / "file.sock").write_text("mine")
    (tmp_path / "link.sock").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.sock").mkdir()
    for name, words in (
        ("file.sock", "no socket"), ("link.sock", "no socket"), ("folder.sock", "no socket"), ("none/x.sock", "No such file"), ("x" * 120 + ".sock", "too long"),
    ):  # fmt: skip
        with pytest.raises(PyspecError, match=f"cannot be listened at: .*{words}.*; choose another `host`"):
            listen([str(tmp_path / name)], 0)
    assert (tmp_path / "file.sock").read_text() == "mine"


@pytest.mark.parametrize("umask, mode", [(0o000, 0o660), (0o022, 0o640), (0o077, 0o600)])
def test_others_cannot_connect(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        (sock,) = listen([str(tmp_path / "x.sock")], 0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "x.sock").st_mode) == mode
    os.unlink(tmp_path / "x.sock")
    with socket.socket(socket.AF_UNIX) as other:  # which is not ours to remove
        other.bind(str(tmp_path / "x.sock"))
        sock.close()
        assert (tmp_path / "x.sock").exists()
