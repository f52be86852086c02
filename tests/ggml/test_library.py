"""The wrong ggml is refused with the command that fixes it: structures of another version corrupt memory far from the cause."""

import importlib.metadata
import re
import signal
import subprocess
import sys

import pytest

from pyggml_spec.errors import LibraryError
from pyggml_spec.ggml import library

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


def test_a_missing_llama_cpp_python_is_refused_with_the_command_that_fixes_it():
    message = refused(library.check_distribution, None)
    assert "not installed" in message and "pip install" in message


def test_another_ggml_than_compiled_is_refused():
    message = refused(library.check_version, "0.9.1", "0.9.4")
    assert "0.9.1" in message and "0.9.4" in message and "pip install" in message


def test_two_copies_of_ggml_in_one_process_are_refused_with_both_paths():
    two = library.mapped_ggml(MAPS.format(a="/opt/one", b="/opt/two with spaces"))
    assert two == {"/opt/one/libggml-base.so.0", "/opt/two with spaces/libggml-base.so.0"}
    message = refused(library.check_single, two)
    assert "/opt/one" in message and "/opt/two with spaces" in message
    library.check_single(library.mapped_ggml(MAPS.format(a="/opt/one", b="/opt/one")))
    library.check_single(set())


def test_this_process_has_exactly_one_copy():
    with open("/proc/self/maps") as maps:
        assert len(library.mapped_ggml(maps.read())) == 1


def test_the_pin_in_the_code_is_the_pin_of_the_package():
    """Two places name the version; pip follows one, the check at import the other."""
    from importlib.metadata import requires

    pins = [re.match(r"llama[-_]cpp[-_]python==([\w.]+)", line) for line in requires("pyggml_spec")]
    assert [pin[1] for pin in pins if pin] == [library.LLAMA_CPP_PYTHON]


def test_the_import_itself_checks(tmp_path):
    """The functions above are worth nothing without a caller."""
    script = """if True:
        import importlib.metadata as m
        version = m.version
        m.version = lambda name: "0.3.1" if name == "llama_cpp_python" else version(name)
        import pyggml_spec.ggml.library
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "LibraryError: llama-cpp-python 0.3.1 is installed" in done.stderr


def test_versions_name_everything_that_a_benchmark_depends_on(monkeypatch):
    assert set(library.versions()) >= {"pyggml_spec", "llama_cpp_python", "ggml", "ggml_commit", "python"}
    assert all(library.versions().values())
    library.versions().clear()  # its caller's own
    with monkeypatch.context() as patch:  # every request of a server asks for them, and metadata take milliseconds
        patch.setattr(importlib.metadata, "version", None)
        assert library.versions()["pyggml_spec"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["session", "sampling.sampler", "tools.compare", "tools.reference", "tools.bench", "models.weights", "engine.runner", "gguf_io"],
)
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
