"""A build that crashes, or that was made for another processor, is found out by a child process: the user gets a sentence, not a signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyggml_spec.errors import LibraryError
from pyggml_spec.ggml import library, probe
from pyggml_spec.pin import installed_libraries

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
    return next(
        path
        for path in (installed_libraries().parents[1] / "include", installed_libraries().parents[4] / "include")
        if (path / "ggml.h").is_file()
    )


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
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")
    assert len(list(tmp_path.glob("probe-*.json"))) == 1


@linux
def test_the_environment_variable_does_without(fake, tmp_path):
    """And shows that the others were saved by the probe, not by a harmless fake."""
    done = pyspec(fake, tmp_path, *RUN, FAKE_SIGNAL=str(int(signal.SIGILL)), PYSPEC_NO_PROBE="1")
    assert done.returncode == -signal.SIGILL and not list(tmp_path.glob("probe-*"))


@linux
def test_a_child_that_something_outside_ended_proves_nothing(fake, tmp_path):
    """A child killed for memory is not used now, and is tried again at the next start."""
    done = pyspec(fake, tmp_path, "devices", FAKE_SIGNAL=str(int(signal.SIGKILL)))
    assert "FAKE is not used" in done.stderr and "SIGKILL" in done.stderr and not list(tmp_path.glob("probe-*"))


@pytest.mark.slow
@linux
def test_quiet_is_quiet_where_the_kernel_refuses_amx(fake, tmp_path):
    """ggml writes that to stderr itself, past its log. What is not that line is passed on."""
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, 40])
@pytest.mark.parametrize("said", ["at start\n", FEATURES + "at plain\n"])
def test_a_child_that_was_ended_before_the_first_buffer_type_does_not_condemn_the_build(children, folder, number, said):
    """A machine too busy for the limit of time, or short of memory, was told to build again, and nothing ran."""
    answers, asked = children
    answers += 2 * [(-number, said)]
    assert probe.check(folder, WITH).broken == "" == probe.check(folder, WITH).broken
    assert len(asked) == 2 and not list((folder.parent / "cache").glob("*"))


def test_another_build_or_processor_is_examined_again(children, folder):
    answers, asked = children
    answers += 3 * [(0, "at start\nfeatures avx2\nat plain\ndone\n")]
    probe.check(folder, WITH)
    probe.check(folder, WITHOUT)
    (folder / "libggml-cpu.so").write_bytes(b"another build")
    probe.check(folder, WITH)
    assert len(asked) == 3


def test_a_build_for_another_processor_is_one_sentence(children, folder):
    """A venv carried to another machine: SIGILL, or worse, a crash in the middle of a text."""
    answers, _ = children
    answers += [(0, FEATURES + "at plain\ndone\n"), (-4, "at start\n")]
    with pytest.raises(
        LibraryError, match=r"built for a processor with avx512, which this one \(that processor\) does not have.*--no-cache-dir"
    ):
        probe.check(folder, WITHOUT)
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


def test_an_exception_in_the_child_is_no_verdict(children, folder):
    """It is said by the process itself where it matters; a library must not be refused for a full disk."""
    answers, asked = children
    answers += 2 * [(1, "at start\nfeatures avx2\n")]
    assert probe.check(folder, WITH) == probe.check(folder, WITH) == probe.Fitness(("avx2",)) and len(asked) == 2


def test_no_child_no_verdict(folder, monkeypatch, tmp_path):
    """An embedded interpreter has no program to start: ggml is used as it is, and nothing is remembered."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(probe.SKIP, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert probe.check(folder, WITH) == probe.Fitness() and not (tmp_path / "cache").exists()


def test_this_build_runs_here_and_says_what_it_uses():
    done = probe.run_child(installed_libraries(), {})
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "done", done.stderr
    features = next(tuple(line.split()[1:]) for line in lines if line.startswith("features"))
    assert features and probe.missing(features, probe.processor()) == []
    assert not library.FITNESS.refused or library.FITNESS.notes


def test_what_changes_by_the_minute_is_no_other_processor(folder):
    """The frequency, and the core that the file begins with."""
    steady = {"model name": "x", "flags": "avx2"}
    keys = {
        probe.cache_key([folder / "libggml-cpu.so"], {**steady, "cpu MHz": mhz, "processor": core})
        for mhz, core in (("1", "0"), ("2", "1"))
    }
    assert len(keys) == 1
