"""What is known about the processor."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pyggml_spec as ps
from pyggml_spec.ggml import device
from pyggml_spec.ggml.device import waited_for_core


@pytest.mark.skipif(sys.platform != "linux" or not Path("/proc/thread-self/schedstat").exists(), reason="this system does not say")
def test_waiting_for_a_core_is_seen():
    """Two processes on one core: the one that asks has to wait for the other."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    child = os.fork()
    if not child:
        while True:
            pass
    try:
        before, until = waited_for_core(), time.monotonic() + 20
        while waited_for_core() - before < 0.01 and time.monotonic() < until:
            sum(range(10000))
        assert waited_for_core() - before >= 0.01
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, mine)


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


LARGE = """
from pathlib import Path
import pyggml_spec as ps

def large():
    asked = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        size = int(line.split()[1]) if line.startswith("Size:") else size
        asked += size if line.startswith("VmFlags:") and " hg" in line else 0
    return asked * 1024

before = large()
with ps.load(device="CPU", threads=1, n_ctx=64) as session:
    print(large() - before, session.engaged().memory["weights"])
"""


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="this system has no large pages on request")
def test_weights_lie_in_large_pages():
    """The kernel was asked for them (VmFlags: hg) for most of the embedded target's 27 MB, and before the weights were written. In a process of
    its own: memory that was asked for and given back is asked for still."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    more, weights = map(int, done.stdout.split())
    assert more > 0.7 * weights


def test_a_system_that_does_not_say(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError))
    assert waited_for_core() is None


def test_more_memory_than_there_is_is_not_asked_for(pair, monkeypatch):
    """Linux gave it all the same, and ended the process when zeros were written to it: "Killed", and nothing else."""
    memory = {"MemAvailable": 64 << 20, "SwapFree": 0}
    monkeypatch.setattr(device, "_meminfo", lambda name, unknown: memory[name])
    with pytest.raises(
        ps.DeviceError, match=r"a context of 1048576 tokens needs \d+ MiB for K/V on CPU, which has 64 MiB free; use a smaller `n_ctx`"
    ):
        ps.load(*pair, device="CPU", threads=1, n_ctx=1 << 20)
    memory["MemAvailable"] = 1 << 16
    with pytest.raises(ps.DeviceError, match=r"needs \d+ MiB for weights on CPU, which has 0 MiB free"):
        ps.load(*pair, device="CPU", threads=1, n_ctx=256)
    memory["SwapFree"] = 1 << 30  # slow, but nobody is killed
    ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4).close()


def test_a_backend_is_asked_what_it_is(monkeypatch):
    """Whose kernels run on a GPU: by what the library says, not by how it came here."""
    cpu = next(d for d in device.devices() if d.kind == "cpu")
    assert device.device_feature(cpu, "REPACK") == "1" and device.device_feature(cpu, "no such feature") is None
    gpu = dataclasses.replace(cpu, name="CUDA0", kind="gpu")
    assert "`pyspec build --cuda`" in device.build_notes(gpu)[0]
    monkeypatch.setattr(device, "device_feature", lambda of, name: "tma" if name == "SMALL_BATCH" else None)
    assert device.build_notes(gpu) == ["blocks by the patched kernels (tma)"]
    assert device.build_notes(dataclasses.replace(gpu, name="Vulkan0")) == []
