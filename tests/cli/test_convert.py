"""pyspec convert from outside: one line, exit codes, and Ctrl-C."""

import signal
import subprocess
import sys
import time

import pytest
from cli.process import pyspec
from tools.checkpoint import export

from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return export(DEMO_DRAFTER, tmp_path_factory.mktemp("checkpoint") / "demo")


def _run(*args):
    return pyspec("convert", *args)


def test_one_line_and_a_file(demo, tmp_path):
    out = tmp_path / "o.gguf"
    done = _run(demo, "-m", DEMO_TARGET, "-o", out, "-t", 1)
    assert done.returncode == 0 and done.stderr == "" and out.exists()
    assert b"block 16, mask token 4095, inputs of target layers [1, 4, 6, 7]" in done.stdout and done.stdout.count(b"\n") == 1
    again = _run(demo, "-m", DEMO_TARGET, "-o", out)
    assert again.returncode == 1 and again.stderr.count("\n") == 1 and "--force" in again.stderr
    assert _run(demo, "-m", DEMO_TARGET, "-o", out, "--force", "-t", 1).returncode == 0
    assert list(tmp_path.iterdir()) == [out]


def test_usage_and_errors(demo, tmp_path):
    assert _run(demo, "-o", tmp_path / "o.gguf").returncode == 2
    bad = _run(demo, "-m", DEMO_DRAFTER, "-o", tmp_path / "o.gguf", "--type", "int3")
    assert bad.returncode == 1 and bad.stderr.startswith("pyspec: 'int3' is not a type")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_leaves_nothing(demo, tmp_path):
    """Slow on purpose: each tensor of the patched converter waits."""
    slow = (
        "import time, pyggml_spec.tools.convert as c, sys; old = c._chunk\n"
        "def chunk(*a):\n    time.sleep(0.3)\n    return old(*a)\n"
        "c._chunk = chunk\nfrom pyggml_spec.cli import main\nmain(sys.argv[1:])"
    )
    args = [sys.executable, "-c", slow, "convert", str(demo), "-m", str(DEMO_TARGET), "-o", str(tmp_path / "o.gguf"), "-t", "1"]

    # a shell starts background jobs with SIGINT ignored, and children inherit that
    def listen():
        return signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=listen)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []
