"""What is known about the processor."""

import dataclasses
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import pyggml_spec as ps
from pyggml_spec.ggml import device, host_memory
from pyggml_spec.ggml.device import cpu_wait_s
from pyggml_spec.tools.quants import type_id


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
        before, until = cpu_wait_s(), time.monotonic() + 20
        while cpu_wait_s() - before < 0.01 and time.monotonic() < until:
            sum(range(10000))
        assert cpu_wait_s() - before >= 0.01
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
    print(large() - before, session.configuration().memory["weights"])
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
    assert cpu_wait_s() is None


def test_more_memory_than_there_is_is_not_asked_for(pair, monkeypatch):
    """Linux gave it all the same, and ended the process when zeros were written to it: "Killed", and nothing else."""
    memory = {"MemAvailable": 64 << 20, "SwapFree": 0}
    monkeypatch.setattr(host_memory, "meminfo", lambda name, unknown: memory[name])
    with pytest.raises(
        ps.DeviceError, match=r"a context of 1048576 tokens needs \d+ MiB for K/V on CPU, which has 64 MiB free; use a smaller `n_ctx`"
    ):
        ps.load(*pair, device="CPU", threads=1, n_ctx=1 << 20)
    memory["MemAvailable"] = 1 << 16
    with pytest.raises(ps.DeviceError, match=r"needs \d+ MiB for weights on CPU, which has 0 MiB free"):
        ps.load(*pair, device="CPU", threads=1, n_ctx=256)
    memory["SwapFree"] = 1 << 30  # slow, but no process is killed
    ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4).close()


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_group_may_have(pair, monkeypatch, tmp_path, version):
    """The machine's memory was called free: in a container of 4 GiB, "Killed", and nothing else. So was its swap, which is not the container's."""
    monkeypatch.setattr(host_memory, "meminfo", lambda name, unknown: 1 << 40)
    limit, used, files = host_memory.FILE_NAMES[version]
    top = tmp_path / ("memory" if version == 1 else "")
    own = tmp_path / "own"
    own.write_text("7:cpu,cpuacct:/a\n5:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    none = "max" if version == 2 else 1 << 62
    for group, values in (("", (none, 0, 0)), ("a", (96 << 20, 40 << 20, 4 << 20)), ("a/b", (none, 1, 0))):
        (top / group).mkdir(parents=True, exist_ok=True)
        for name, value in zip((limit, used), values, strict=False):
            (top / group / name).write_text(f"{value}\n")
        (top / group / "memory.stat").write_text(f"anon 1\n{files[0]} {values[2]}\n{files[1]} {values[2]}\n")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN", own)
    cpu = device.pick_device("CPU")
    assert cpu.memory_free == device.free_bytes(cpu) == 64 << 20
    with pytest.raises(ps.DeviceError, match="on CPU, which has 64 MiB free; use a smaller `n_ctx`"):
        ps.load(*pair, device="CPU", threads=1, n_ctx=1 << 20)
    (top / "a" / used).write_text("not a number")  # what is not known counts as free
    assert device.free_bytes(cpu) == 96 << 20
    (top / "a/b" / limit).write_text(f"{32 << 20}\n")  # while it runs
    assert device.free_bytes(cpu) == (32 << 20) - 1
    for group in ("a", "a/b"):
        (top / group / limit).write_text(f"{none}\n")
    assert device.free_bytes(cpu) > 1 << 30


def test_memory_that_is_taken_is_not_called_free(monkeypatch):
    """`pyspec devices` said "23.5 GiB free of 23.5 GiB", whatever ran alongside it."""
    monkeypatch.setattr(host_memory, "meminfo", lambda name, unknown: {"MemAvailable": 1 << 20}[name])
    cpu = next(d for d in device.devices() if d.kind == "cpu")
    assert cpu.memory_free == min(1 << 20, device.free_bytes(cpu)) and cpu.memory_total > 1 << 30


def test_a_backend_is_asked_what_it_is(monkeypatch):
    """Whose kernels run on a GPU: by what the library says, not by how it came here."""
    cpu = next(d for d in device.devices() if d.kind == "cpu")
    assert device.device_feature(cpu, "REPACK") == "1" and device.device_feature(cpu, "no such feature") is None
    gpu = dataclasses.replace(cpu, name="CUDA0", kind="gpu")
    assert "`pyspec build --cuda`" in device.build_notes(gpu)[0]
    monkeypatch.setattr(device, "device_feature", lambda of, name: "tma" if name == "SMALL_BATCH" else None)
    assert device.build_notes(gpu) == ["blocks by the patched kernels (tma)"]
    assert device.build_notes(dataclasses.replace(gpu, name="Vulkan0")) == []


def test_what_amx_kernels_are_not_given(monkeypatch):
    """Stacks of matrices, of which they pack the first: deepseek2 was refused on every processor with AMX, by a sentence about its graph."""
    with closing(device.Backend(device.pick_device("CPU"), 1)) as backend:
        kind, right = type_id("q8_0"), backend.supports_matmul
        assert all(right(backend.default_buffer_type, kind, shape) for shape in ((64, 96), (32, 96), (64, 96, 4)))
        monkeypatch.setattr(device, "text", lambda name: "AMX")
        found = [right(backend.default_buffer_type, kind, shape) for shape in ((64, 96), (64, 96, 1), (32, 96), (64, 96, 4))]
        assert found == [True, True, False, False]
