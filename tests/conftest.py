"""Models that many tests share."""

import asyncio
import gc
import inspect
import os

# Two workers of two threads on two cores: threads that spin at a barrier keep away the one that they wait for. Read when ggml is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.pop("PYSPEC_CACHE", None)  # each test sets its own
os.environ.pop("PYSPEC_NO_PROBE", None)
os.environ.pop("PYSPEC_CPU_FEATURES", None)
os.environ.pop("PYSPEC_PEER_COPIES", None)
os.environ["PYSPEC_KEEP_DRAFTS"] = "0"  # acceptance of one test does not reach another
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's spin too
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of tests start `pyspec`: without its byte code each would compile it, 0.4 s

import pytest
from pairs import with_control_tokens
from random_gguf.model import Shape, write_dflash, write_qwen35

gc.disable()  # until the tests are collected: none of what they are made of is garbage, and looking for it is a third of what collecting takes


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:  # of the process that hands tests to others too, which collects none itself
    gc.freeze()  # nor do tests look through it again
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    """An async test runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 240))
    return True


def pytest_terminal_summary(terminalreporter) -> None:
    """Names what was skipped for want of a model file, a GPU or a browser."""
    for mark in ("real", "gpu", "browser"):
        skipped = [
            report for report in terminalreporter.stats.get("skipped", []) if mark in getattr(report, "keywords", ())
        ]  # not of modules
        for reason in sorted({report.longrepr[2] for report in skipped}):
            terminalreporter.write_line(f"not tested ({mark}): {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True, scope="session")
def no_other_load():
    """Other work on the machine changes nothing in the tests, except where a test sets it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pyggml_spec.ggml.cores.read", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A tiny random F32 target and its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    return write_qwen35(folder / "target.gguf", Shape(), "F32"), write_dflash(folder / "drafter.gguf", Shape(), "F32")


@pytest.fixture(scope="session")
def talkers(pair, tmp_path_factory):
    """The random pair with a chat template: what it says is noise, but it says it in turns."""
    folder = tmp_path_factory.mktemp("talkers")
    return [with_control_tokens(path, folder / name, end=301) for path, name in zip(pair, ("target.gguf", "drafter.gguf"))]


@pytest.fixture(scope="session")
def templates(tmp_path_factory):
    """The chat templates of the pinned llama.cpp, from the sdist that pip downloads once into the user's cache; without that and a network this
    fails, with pip's reason."""
    from pyggml_spec import patching
    from pyggml_spec.folders import build_folder

    folder, sdist = "models/templates/", patching.fetch_sdist(build_folder())
    return patching.unpack(sdist, tmp_path_factory.mktemp("templates"), only=lambda name: name.startswith(folder)) / folder


@pytest.fixture(scope="module")
def tokenizer():
    """Of the embedded target."""
    from pyggml_spec.gguf_io import GGUFFile
    from pyggml_spec.loading import DEMO_TARGET
    from pyggml_spec.text.tokenizer import Tokenizer

    with GGUFFile(DEMO_TARGET) as file:
        made = Tokenizer(file)
        yield made
        made.close()
