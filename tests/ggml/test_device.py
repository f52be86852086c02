"""What is known about the processor."""

import dataclasses
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.errors import DeviceError, LibraryError
from pyggml_spec.ggml import device, host_memory, library, peer, probe
from pyggml_spec.ggml.device import Device, cpu_wait_s, execution_order, open_backends, pick_device, pick_devices
from pyggml_spec.pin import installed_libraries
from pyggml_spec.tools.quants import type_id


@pytest.mark.skipif(sys.platform != "linux" or not Path("/proc/thread-self/schedstat").exists(), reason="this system does not say")
def test_waiting_for_a_core_is_seen():
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


@pytest.mark.slow
@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="this system has no large pages on request")
def test_weights_lie_in_large_pages():
    """The kernel was asked for them (VmFlags: hg) for most of the embedded target's 27 MB, and before the weights were written. In a process of
    its own: memory that was asked for and given back is asked for still."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    more, weights = map(int, done.stdout.split())
    assert more > 0.7 * weights


def test_memory_that_is_told(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError))
    assert cpu_wait_s() is None
    # `pyspec devices` said "23.5 GiB free of 23.5 GiB", whatever ran alongside it.
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


def test_versions_name_everything_that_a_benchmark_depends_on(monkeypatch):
    assert set(library.versions()) >= {"pyggml_spec", "llama_cpp_python", "ggml", "ggml_commit", "python"}
    assert all(library.versions().values())
    library.versions().clear()  # its caller's own
    with monkeypatch.context() as patch:  # every request of a server asks for them, and metadata take milliseconds
        patch.setattr(importlib.metadata, "version", None)
        assert library.versions()["pyggml_spec"]


def test_more_memory_than_there_is_is_not_asked_for(pair, monkeypatch):
    """Linux gave it all the same, and ended the process when zeros were written to it: "Killed", and nothing else."""
    memory = {"MemAvailable": 64 << 20, "SwapFree": 0}
    monkeypatch.setattr(host_memory, "meminfo", lambda name, unknown: memory[name])
    needs = r"a context of 1048576 tokens needs \d+ MiB for K/V on CPU, which has 64 MiB free; use a smaller `n_ctx`"
    fails_with(ps.DeviceError, needs, ps.load, *pair, device="CPU", threads=1, n_ctx=1 << 20)
    memory["MemAvailable"] = 1 << 16
    with pytest.raises(ps.DeviceError, match=r"needs \d+ MiB for weights on CPU, which has 0 MiB free"):
        ps.load(*pair, device="CPU", threads=1, n_ctx=256)
    memory["SwapFree"] = 1 << 30  # slow, but no process is killed
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        memory |= {"MemAvailable": 64 << 20, "SwapFree": 0}
        needs = r"8 slots of 1048576 tokens need \d+ MiB for K/V on CPU, which has 64 MiB free; use fewer `slots` or a smaller `n_ctx`"
        fails_with(ps.DeviceError, needs, session.concurrent, 8, 1 << 20)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_group_may_have(pair, monkeypatch, tmp_path, version):
    """The machine's memory was called free: in a container of 4 GiB, "Killed", and nothing else. So was its swap, which is not the container's."""
    monkeypatch.setattr(host_memory, "meminfo", lambda name, unknown: 1 << 40)
    limit, used, files = host_memory.FILE_NAMES[version]
    top, own = tmp_path / ("memory" if version == 1 else ""), tmp_path / "own"
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


def test_what_amx_kernels_are_not_given(monkeypatch):
    """Stacks of matrices, of which they pack the first: deepseek2 was refused on every processor with AMX, by a sentence about its graph."""
    with closing(device.Backend(device.pick_device("CPU"), 1)) as backend:
        kind, right = type_id("q8_0"), backend.supports_matmul
        assert all(right(backend.default_buffer_type, kind, shape) for shape in ((64, 96), (32, 96), (64, 96, 4)))
        monkeypatch.setattr(device, "text", lambda name: "AMX")
        found = [right(backend.default_buffer_type, kind, shape) for shape in ((64, 96), (64, 96, 1), (32, 96), (64, 96, 4))]
        assert found == [True, True, False, False]


def test_names_in_their_order():
    assert [device.name for device in pick_devices("CPU, cpu")] == ["CPU", "CPU"]
    found, first = pick_devices(), pick_device()  # free memory changes between the two
    assert [dataclasses.replace(device, memory_free=0) for device in found] == [dataclasses.replace(first, memory_free=0)]


def test_a_gpu_is_named_once(monkeypatch):
    gpu = dataclasses.replace(pick_device("CPU"), name="CUDA0", kind="gpu")
    monkeypatch.setattr("pyggml_spec.ggml.device.pick_device", lambda name=None: gpu)
    fails_with(DeviceError, "CUDA0 is named twice", pick_devices, "CUDA0,CUDA0")


@pytest.mark.parametrize(
    "kinds, order", [(["gpu", "cpu", "gpu"], [1, 0, 2]), (["igpu", "rpc", "cpu"], [2, 0, 1]), (["rpc", "cpu", "rpc"], [0, 1, 2])]
)
def test_a_cpu_beside_gpus_has_the_first_layers(kinds, order):
    assert execution_order([dataclasses.replace(pick_device("CPU"), kind=kind) for kind in kinds]) == order


def test_every_mention_of_the_cpu_is_a_backend_of_its_own():
    first, second = open_backends(pick_devices("CPU,CPU"), 1, "ggml")
    assert first.handle != second.handle and first.threads == second.threads == 1
    for backend in (first, second):
        backend.close()


@pytest.mark.parametrize(
    "names, words",
    [("CPU,", "empty name"), ("CPU,NPU9", "no device is called 'NPU9'"), (",".join(["CPU"] * 17), "17 devices"), ("", "empty name")],
)
def test_what_is_wrong_with_a_list(names, words):
    fails_with(DeviceError, words, pick_devices, names)


REBUILD = "pip install --force-reinstall --no-cache-dir"
linux = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")


@pytest.fixture(scope="module")
def fake(tmp_path_factory) -> Path:
    """A library that puts a buffer type called FAKE where ggml-cpu has its repacked one; its products end the process."""
    out = tmp_path_factory.mktemp("fake") / "fake.so"
    include, source = library_headers(), Path(__file__).with_name("fake_buffer_type.cpp")
    libraries = installed_libraries()
    link = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lggml", "-lggml-base"]
    subprocess.run(["c++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{include}", str(source), *link, "-o", str(out)], check=True)
    return out


def library_headers() -> Path:
    folders = (installed_libraries().parents[i] / "include" for i in (1, 4))
    return next(path for path in folders if (path / "ggml.h").is_file())


def pyspec(fake: Path, cache: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *(() if arguments[0] == "-c" else ("-m", "pyggml_spec")), *arguments]
    env = {**os.environ, "LD_PRELOAD": str(fake), "PYSPEC_CACHE": str(cache), **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)


RUN = ("run", "-p", "def quicksort(", "-n", "8", "--mode", "plain", "-t", "1", "--kernels", "ggml")


@pytest.mark.slow
@linux
def test_a_buffer_type_whose_products_end_the_process_is_not_used(fake, tmp_path):
    """ "Illegal instruction" was all that the user of a processor with AMX and GCC 12 ever saw."""
    bad = {"FAKE_SIGNAL": str(int(signal.SIGILL))}
    done = pyspec(fake, tmp_path, *RUN, **bad)
    assert done.returncode == 0 and done.stdout.strip()
    assert "buffer type FAKE is not used" in done.stderr and "SIGILL" in done.stderr and REBUILD in done.stderr
    devices = pyspec(fake, tmp_path, "devices", **bad)
    assert devices.returncode == 0 and "FAKE is not used" in devices.stderr and REBUILD in devices.stderr
    doctor = pyspec(fake, tmp_path, "-c", "from pyggml_spec.doctor.files import build; from pyggml_spec.ggml.device import devices; "
                    "print(build(devices()[0]))", **bad)  # fmt: skip
    assert "verdict='warn'" in doctor.stdout and "FAKE" in doctor.stdout and REBUILD in doctor.stdout
    quiet = pyspec(fake, tmp_path, *RUN, "-q", **bad)
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "") and len(list(tmp_path.glob("probe-*.json"))) == 1


@pytest.mark.slow
@linux
def test_fakes_and_quiet_children(fake, tmp_path):
    """And shows that the others were saved by the probe, not by a harmless fake."""
    done = pyspec(fake, tmp_path, *RUN, FAKE_SIGNAL=str(int(signal.SIGILL)), PYSPEC_NO_PROBE="1")
    assert done.returncode == -signal.SIGILL and not list(tmp_path.glob("probe-*"))
    # A child killed for memory is not used now, and is tried again at the next start.
    done = pyspec(fake, tmp_path, "devices", FAKE_SIGNAL=str(int(signal.SIGKILL)))
    assert "FAKE is not used" in done.stderr and "SIGKILL" in done.stderr and not list(tmp_path.glob("probe-*"))
    # ggml writes that to stderr itself, past its log. What is not that line is passed on.
    done = pyspec(fake, tmp_path, *RUN, "-q", FAKE_WORDS="1")
    assert done.returncode == 0 and done.stdout.strip() and done.stderr == "something else\n"


@pytest.fixture
def children(monkeypatch, tmp_path):
    """What children of a probe answer, in turn; the list of what each was told to leave out."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(probe.SKIP, raising=False)
    answers, asked = [], []

    def child(folder, refused):
        asked.append(list(refused))
        code, out = answers.pop(0)
        return subprocess.CompletedProcess([], code, out, "why\n")

    monkeypatch.setattr(probe, "run_child", child)
    return answers, asked


FEATURES = "at start\nfeatures avx2 avx512\n"
WITH, WITHOUT = {"flags": "avx2 avx512f", "model name": "this processor"}, {"flags": "avx2", "model name": "that processor"}


@pytest.fixture
def folder(tmp_path):
    libraries = tmp_path / "lib"
    libraries.mkdir()
    (libraries / "libggml-cpu.so").write_bytes(b"one build")
    return libraries


def test_later_starts_remember(children, folder):
    answers, asked = children
    answers += [(-4, FEATURES + "at plain\nat AMX\n"), (0, FEATURES + "at plain\nat CPU_REPACK\ndone\n")]
    first = probe.check(folder, WITH)
    assert asked == [[], ["AMX"]] and first.refused == {"AMX": "ended with the signal SIGILL"}
    assert probe.check(folder, WITH) == first and len(asked) == 2


class _Devices:
    """Two GPUs and a CPU in place of ggml's devices, which are their indices; ``asked``: those whose memory was queried."""

    names = "CUDA0", "CUDA1", "CPU"

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return getattr(library.lib, name)

    def ggml_backend_dev_count(self):
        return len(self.names)

    def ggml_backend_dev_get(self, index):
        return index

    def ggml_backend_dev_type(self, dev):
        kind = "GPU" if dev < 2 else "CPU"
        return getattr(library.lib, f"GGML_BACKEND_DEVICE_TYPE_{kind}")

    def ggml_backend_dev_name(self, dev):
        return library.ffi.new("char[]", self.names[dev].encode())

    ggml_backend_dev_description = ggml_backend_dev_name

    def ggml_backend_dev_memory(self, dev, free, total):
        self.asked.append(dev)
        free[0], total[0] = dev, 1 << 40


def test_only_the_picked_device_is_started(monkeypatch):
    """A GPU that is asked for its memory gets a context: 0.3 seconds, and half a gigabyte, for each one of the machine."""
    monkeypatch.setattr(device, "lib", found := _Devices())
    assert [device.pick_device(name).name for name in (None, "cuda1", "CPU")] == ["CUDA0", "CUDA1", "CPU"]
    assert device.present(device.Device("CUDA1", "", "gpu", 0, 0, 1)).memory_free == 1
    assert found.asked == [0, 1, 2, 1]
    fails_with(DeviceError, "offers CUDA0, CUDA1, CPU", device.pick_device, "Metal")
    assert len(device.devices()) == 3 and len(found.asked) == 7


def test_a_test_that_has_begun_is_waited_for(children, folder, monkeypatch):
    """The first start of a command waited for the child before it imported anything."""
    answers, asked = children
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(folder))
    monkeypatch.setattr(probe, "processor", lambda: WITH)
    answers += [(0, FEATURES + "at plain\ndone\n"), (-4, "at start\n")]
    for _ in range(2):
        probe.begin()
    assert probe.settled(folder).features == ("avx2", "avx512") and len(asked) == 1
    (folder / "libggml-cpu.so").write_bytes(b"a build that does not even load")
    probe.begin()
    fails_with(LibraryError, "does not run on this processor", probe.settled, folder)
    assert len(asked) == 2


def test_an_exception_in_the_child_is_no_verdict(children, folder):
    """It is said by the process itself where it matters; a library must not be refused for a full disk."""
    answers, asked = children
    answers += 2 * [(1, "at start\nfeatures avx2\n")]
    assert probe.check(folder, WITH) == probe.check(folder, WITH) == probe.Fitness(("avx2",)) and len(asked) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, 40])
@pytest.mark.parametrize("said", ["at start\n", FEATURES + "at plain\n"])
def test_a_child_that_was_ended_before_the_first_buffer_type_does_not_condemn_the_build(children, folder, number, said):
    """A machine too busy for the limit of time, or short of memory, was told to build again, and nothing ran."""
    answers, asked = children
    answers += 2 * [(-number, said)]
    assert probe.check(folder, WITH).broken == "" == probe.check(folder, WITH).broken
    assert len(asked) == 2 and not list((folder.parent / "cache").glob("*"))


def test_builds_for_other_processors(children, folder):
    answers, asked = children
    answers += 3 * [(0, "at start\nfeatures avx2\nat plain\ndone\n")]
    probe.check(folder, WITH)
    probe.check(folder, WITHOUT)
    (folder / "libggml-cpu.so").write_bytes(b"another build")
    probe.check(folder, WITH)
    assert len(asked) == 3
    # A venv carried to another machine: SIGILL, or worse, a crash in the middle of a text.
    answers, _ = children
    answers += [(0, FEATURES + "at plain\ndone\n"), (-4, "at start\n")]
    lacks = r"built for a processor with avx512, which this one \(that processor\) does not have.*--no-cache-dir"
    fails_with(LibraryError, lacks, probe.check, folder, WITHOUT)
    (folder / "libggml-cpu.so").write_bytes(b"a build that does not even load")
    with pytest.raises(LibraryError, match=r"does not run on this processor \(this processor\).*SIGILL.*--no-cache-dir"):
        probe.check(folder, WITH)


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"features": 3}', b'{"features": [1], "refused": {}, "broken": ""}', b"\xff"])
def test_a_damaged_memory_is_no_memory(children, folder, tmp_path, damage):
    answers, asked = children
    answers += 2 * [(0, "at start\nfeatures avx2\nat plain\ndone\n")]
    probe.check(folder, WITH)
    next((tmp_path / "cache").glob("probe-*")).write_bytes(damage)
    assert probe.check(folder, WITH).features == ("avx2",) and len(asked) == 2


def test_no_child_no_verdict(folder, monkeypatch, tmp_path):
    """An embedded interpreter has no program to start: ggml is used as it is, and nothing is remembered."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(probe.SKIP, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert probe.check(folder, WITH) == probe.Fitness() and not (tmp_path / "cache").exists()


def test_the_build_in_use(folder):
    done = probe.run_child(installed_libraries(), {})
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "done", done.stderr
    features = next(tuple(line.split()[1:]) for line in lines if line.startswith("features"))
    assert features and probe.missing(features, probe.processor()) == []
    assert not library.FITNESS.refused or library.FITNESS.notes
    steady = {"model name": "x", "flags": "avx2"}
    changing = [{"cpu MHz": "1", "processor": "0"}, {"cpu MHz": "2", "processor": "1"}]
    assert len({probe.cache_key([folder / "libggml-cpu.so"], {**steady, **more}) for more in changing}) == 1


MAPS = """\
5581d0000000-5581d0001000 r--p 00000000 08:01 1234 /usr/bin/python3.11
7f5e78c00000-7f5e78c31000 r--p 00000000 08:01 5678 {a}/libggml-base.so.0
7f5e78c31000-7f5e78c99000 r-xp 00031000 08:01 5678 {a}/libggml-base.so.0
7f5e78d00000-7f5e78d31000 r--p 00000000 08:01 5679 {a}/libggml-cpu.so
7f5e79000000-7f5e79031000 r--p 00000000 08:01 9999 {b}/libggml-base.so.0
7ffce1c00000-7ffce1c21000 rw-p 00000000 00:00 0    [stack]
7f5e79100000-7f5e79101000 rw-p 00000000 00:00 0
"""


def refused(check, *args) -> str:
    with pytest.raises(LibraryError) as caught:
        check(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_pinned_version_passes():
    library.check_distribution(library.LLAMA_CPP_PYTHON)
    library.check_version(library.GGML_VERSION, library.GGML_VERSION)


@pytest.mark.parametrize("installed", ["0.3.35", "0.3.360", "0.3.36.post1", "1.0"])
def test_another_version_is_refused_with_the_command_that_fixes_it(installed):
    message = refused(library.check_distribution, installed)
    assert f"llama-cpp-python {installed} " in message and f"llama-cpp-python=={library.LLAMA_CPP_PYTHON}" in message
    assert "pip install" in message


def test_wrong_libraries_are_refused():
    message = refused(library.check_distribution, None)
    assert "not installed" in message and "pip install" in message
    message = refused(library.check_version, "0.9.1", "0.9.4")
    assert "0.9.1" in message and "0.9.4" in message and "pip install" in message
    two = library.mapped_ggml(MAPS.format(a="/opt/one", b="/opt/two with spaces"))
    assert two == {"/opt/one/libggml-base.so.0", "/opt/two with spaces/libggml-base.so.0"}
    message = refused(library.check_single, two)
    assert "/opt/one" in message and "/opt/two with spaces" in message
    library.check_single(library.mapped_ggml(MAPS.format(a="/opt/one", b="/opt/one")))
    library.check_single(set())
    with open("/proc/self/maps") as maps:
        assert len(library.mapped_ggml(maps.read())) == 1


def test_a_missing_system_library_is_named_with_its_package(tmp_path, monkeypatch):
    for name, words in (
        ("libgomp.so.1", "install libgomp"),
        ("libcublas.so.13", "CUDA's runtime"),
        ("libcuda.so.1", "NVIDIA's driver"),
        ("libx.so", "pip install"),
    ):
        assert words in library.load_remedy(f"{name}: cannot open shared object file: No such file or directory")
    monkeypatch.setattr(library, "LIBRARIES", tmp_path)
    assert library.unloaded_gpu_library() is None
    (tmp_path / "libggml-cuda.so").write_bytes(b"no library")
    assert (library.unloaded_gpu_library() or "").startswith("libggml-cuda.so cannot be loaded: ")


@pytest.mark.skipif(any(d.kind == "gpu" for d in device.devices()), reason="a GPU is used here")
def test_a_gpu_that_is_not_used_is_told(monkeypatch):
    for why, told in (
        ("libggml-cuda.so cannot be loaded: libcudart.so.13", True),
        ("libggml-cuda.so cannot be loaded: libcuda.so.1", False),
    ):
        monkeypatch.setattr("pyggml_spec.loading.unloaded_gpu_library", lambda why=why: why)
        with ps.load(threads=1) as session:
            assert any(note.startswith(f"{why}; until then") for note in session.notes) == told


def test_the_pin_is_checked_at_import(tmp_path):
    assert f'set(PGS_LLAMA_CPP_PYTHON "{library.LLAMA_CPP_PYTHON}")' in (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    script = """if True:
        import importlib.metadata as m
        version = m.version
        m.version = lambda name: "0.3.1" if name == "llama_cpp_python" else version(name)
        import pyggml_spec.ggml.library
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "LibraryError: llama-cpp-python 0.3.1 is installed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", [
    "session", "sampling.sampler", "tools.compare", "tools.reference", "tools.bench", "models.weights", "engine.runner", "gguf_io",
])  # fmt: skip
def test_libllama_is_mapped_before_numpy_and_its_package_is_left_alone(module):
    """A CUDA build with a C++ runtime of its own crashed llama.cpp when numpy had come first. The package llama_cpp, and jinja2 with it, took
    0.2 s of processor time at every start, and asyncio 13 ms."""
    code = (
        "import sys, builtins\nmaps, real = [], builtins.__import__\n"
        "def spy(name, *a, **k):\n"
        "    if name == 'numpy' and not maps:\n        maps.append(open('/proc/self/maps').read())\n"
        "    return real(name, *a, **k)\n"
        f"builtins.__import__ = spy\nimport pyggml_spec.{module}\n"
        "assert 'libllama' in maps[0] and not {'llama_cpp', 'jinja2', 'asyncio'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_reason_is_said_when_ggml_ends_the_process():
    """ggml-cuda logs it and aborts with the words "CUDA error"; its log was kept from the user."""
    script = """if True:
        import ctypes, pathlib
        import pyggml_spec.text.tokenizer
        maps = pathlib.Path("/proc/self/maps").read_text().split()
        base = ctypes.CDLL(next(word for word in maps if "libggml-base" in word))
        for i in range(100):  # more than is kept
            base.ggml_log_internal(4, b"CUDA error: reason %d\\n", i)
        base.ggml_abort(b"ggml-cuda.cu", 110, b"CUDA error")
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == -signal.SIGABRT and lines[-1] == "ggml-cuda.cu:110: CUDA error" and lines[-2] == "CUDA error: reason 99"
    assert len(done.stderr) < 1200


A, B, C = (Device(f"CUDA{i}", "a GPU", "gpu", 0, 0, i) for i in range(3))


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("cuda") / "libcuda.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(Path(__file__).with_name("fake_cuda.c")), "-o", str(out)], check=True)
    return str(out)


@pytest.fixture
def log(fake_driver, tmp_path, monkeypatch) -> Path:
    """Where the driver writes what is switched on; nothing is known yet."""
    monkeypatch.setattr(peer, "LIBRARY", fake_driver)
    monkeypatch.setattr(peer, "_results", {})
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    for name in (peer.BY_GGML, peer.DISABLE, "FAKE_PEER", "FAKE_GPUS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "log"


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.slow
def test_what_works_is_switched_on_and_remembered(log, monkeypatch):
    assert peer.enable_peer_access([A, B]) == [] and peer.no_peer_reason("CUDA1", "CUDA0") == ""
    assert lines(log) == ["0 to 1", "1 to 0"] * 2  # by the process that tries it, and by this one
    assert peer.enable_peer_access([A, B]) == [] and len(lines(log)) == 4
    monkeypatch.setattr(peer, "_results", {})  # another process, which tries nothing
    monkeypatch.setenv("FAKE_PEER", "wrong")
    assert peer.enable_peer_access([B, A]) == [] and len(lines(log)) == 6


@pytest.mark.parametrize("way, words, kept", [
    ("none", "the driver offers no peer access between them", True),
    ("wrong", "copies between them arrive corrupted", True),
    ("waits", "a test process did not end within 60 s; it is tested again after a reboot, or without {}", True),
    ("fails", "the test process failed (OSError: cuMemcpyPeer gave 719)", False),
])  # fmt: skip
def test_what_does_not_work_stays_off_and_is_said(log, monkeypatch, tmp_path, way, words, kept):
    monkeypatch.setenv("FAKE_PEER", way)
    if way == "waits":  # whether it came that far or not
        monkeypatch.setattr(peer, "LIMIT_S", 0.1)
    said, files = peer.enable_peer_access([A, B]), list((tmp_path / "cache").glob("peer-*.json"))
    words = words.format(*files)
    assert said == [f"CUDA0 and CUDA1 copy to each other through the host: {words}"]
    assert peer.no_peer_reason("CUDA0", "CUDA1") == words
    assert way == "waits" or lines(log) == ([] if way == "none" else ["0 to 1", "1 to 0"])  # the child's
    assert len(files) == kept


@pytest.mark.slow
def test_another_start_of_the_machine_is_another_machine(log, monkeypatch, tmp_path):
    monkeypatch.setattr(peer, "BOOT", tmp_path / "boot")
    starts = (("one\n", "", True), ("one\n", "wrong", True), ("two\n", "wrong", False), (None, "", True), (None, "wrong", True))
    for boot, way, works in starts:
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
        assert "a test process did not end" in said and child.poll() is None and child.stdout.closed and child.stderr.closed
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def test_the_process_ends_by_itself(log, fake_driver, monkeypatch):
    """Where the one that waited for it is gone."""
    monkeypatch.setenv("FAKE_PEER", "waits")
    command = [sys.executable, "-I", peer.peer_child.__file__, fake_driver, "0", "1", "0.01"]
    assert subprocess.run(command, check=False, capture_output=True, timeout=100).returncode == -signal.SIGALRM


@pytest.mark.slow
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
