"""GPUs copy to each other directly where a process that tried it says that it works. The driver here is a fake; what it says on GPUs is in docs/devices.md."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyggml_spec.ggml import peer
from pyggml_spec.ggml.device import Device

A, B, C = (Device(f"CUDA{i}", "a GPU", "gpu", 0, 0, i) for i in range(3))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("cuda") / "libcuda.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(Path(__file__).with_name("fake_cuda.c")), "-o", str(out)], check=True)
    return str(out)


@pytest.fixture
def log(library, tmp_path, monkeypatch) -> Path:
    """Where the driver writes what is switched on; nothing is known yet."""
    monkeypatch.setattr(peer, "LIBRARY", library)
    monkeypatch.setattr(peer, "_results", {})
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    for name in (peer.BY_GGML, peer.DISABLE, "FAKE_PEER", "FAKE_GPUS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "log"


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_what_works_is_switched_on_and_remembered(log, monkeypatch):
    assert peer.enable_peer_access([A, B]) == [] and peer.no_peer_reason("CUDA1", "CUDA0") == ""
    assert lines(log) == ["0 to 1", "1 to 0"] * 2  # by the process that tries it, and by this one
    assert peer.enable_peer_access([A, B]) == [] and len(lines(log)) == 4
    monkeypatch.setattr(peer, "_results", {})  # another process, which tries nothing
    monkeypatch.setenv("FAKE_PEER", "wrong")
    assert peer.enable_peer_access([B, A]) == [] and len(lines(log)) == 6


@pytest.mark.parametrize(
    "way, words, kept",
    [
        ("none", "the driver offers no peer access between them", True),
        ("wrong", "copies between them arrive corrupted", True),
        ("waits", "a test process did not end within 60 s; it is tested again after a reboot, or without {}", True),
        ("fails", "the test process failed (OSError: cuMemcpyPeer gave 719)", False),
    ],
)
def test_what_does_not_work_stays_off_and_is_said(log, monkeypatch, tmp_path, way, words, kept):
    monkeypatch.setenv("FAKE_PEER", way)
    if way == "waits":  # whether it came that far or not
        monkeypatch.setattr(peer, "LIMIT_S", 0.1)
    said = peer.enable_peer_access([A, B])
    files = list((tmp_path / "cache").glob("peer-*.json"))
    words = words.format(*files)
    assert said == [f"CUDA0 and CUDA1 copy to each other through the host: {words}"]
    assert peer.no_peer_reason("CUDA0", "CUDA1") == words
    assert way == "waits" or lines(log) == ([] if way == "none" else ["0 to 1", "1 to 0"])  # the child's
    assert len(files) == kept


def test_another_start_of_the_machine_is_another_machine(log, monkeypatch, tmp_path):
    """Its firmware and its IOMMU decide whether peer access works."""
    monkeypatch.setattr(peer, "BOOT", tmp_path / "boot")
    for boot, way, works in (
        ("one\n", "", True),
        ("one\n", "wrong", True),
        ("two\n", "wrong", False),
        (None, "", True),
        (None, "wrong", True),
    ):
        if boot is None:
            (tmp_path / "boot").unlink(missing_ok=True)
        else:
            (tmp_path / "boot").write_text(boot)
        monkeypatch.setenv("FAKE_PEER", way)
        monkeypatch.setattr(peer, "_results", {})
        assert (peer.enable_peer_access([A, B]) == []) is works, (boot, way)


def test_a_process_that_cannot_be_ended_is_not_waited_for(log, monkeypatch, tmp_path):
    """One that is stuck in the driver: loading hung with it."""
    killed = []
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(100)\n")
    monkeypatch.setattr(peer.peer_child, "__file__", str(tmp_path / "stuck.py"))
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: killed.append(child) or None)
    monkeypatch.setattr(peer, "LIMIT_S", 0.01)
    monkeypatch.setattr(peer, "END_S", 0.01)
    (said,) = peer.enable_peer_access([A, B])
    (child,) = killed
    try:
        assert "a test process did not end" in said and child.poll() is None
        assert child.stdout.closed and child.stderr.closed
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def test_the_process_ends_by_itself(log, library, monkeypatch):
    """Where the one that waited for it is gone."""
    monkeypatch.setenv("FAKE_PEER", "waits")
    command = [sys.executable, "-I", peer.peer_child.__file__, library, "0", "1", "0.01"]
    assert subprocess.run(command, check=False, capture_output=True, timeout=100).returncode == -signal.SIGALRM


def test_each_pair_of_three(log, monkeypatch):
    monkeypatch.setenv("FAKE_GPUS", "3")
    assert peer.enable_peer_access([A, B, C]) == [] and {"0 to 2", "2 to 1"} <= set(lines(log)) and len(lines(log)) == 12


def test_peer_access_is_not_probed_in_vain(log, monkeypatch, tmp_path):
    cpu, worker = Device("CPU", "", "cpu", 0, 0, 0), Device("RPC:127.0.0.1:1", "", "rpc", 0, 0, -1)
    assert peer.enable_peer_access([cpu, A]) == peer.enable_peer_access([A, A]) == peer.enable_peer_access([worker, A]) == []
    monkeypatch.setenv("GGML_CUDA_P2P", "1")  # ggml did it
    assert peer.enable_peer_access([A, B]) == []
    monkeypatch.delenv("GGML_CUDA_P2P")
    monkeypatch.setenv("FAKE_GPUS", "1")  # one that ggml shows as several
    assert peer.enable_peer_access([A, B]) == [] and lines(log) == []
    monkeypatch.setattr(peer, "_results", {})
    monkeypatch.setenv("PYSPEC_PEER_COPIES", "0")
    assert peer.enable_peer_access([A, B]) == ["CUDA0 and CUDA1 copy to each other through the host: PYSPEC_PEER_COPIES=0 is set"]
    monkeypatch.setattr(peer, "_results", {})
    monkeypatch.delenv("PYSPEC_PEER_COPIES")
    monkeypatch.setattr(peer, "LIBRARY", str(tmp_path / "none.so"))
    assert "the driver call failed (" in peer.enable_peer_access([A, B])[0] and lines(log) == []
