"""Ctrl-C: the text so far is on stdout, the footer on stderr, the statistics are written, the exit code is 130, and no traceback."""

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli.conftest import PROMPT
from cli.process import default_interrupt, environment, start

from pyggml_spec.__main__ import main as program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

KILL = "import os, signal\nctrl_c = lambda: os.kill(os.getpid(), signal.SIGINT)\n"


def run_patched(patch: str, *args):
    """`pyspec run` in an interpreter where ``patch`` has put Ctrl-C at an exact place."""
    script = KILL + patch + "\nfrom pyggml_spec.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", script, "run", *map(str, args)],
        capture_output=True, text=True, env=environment(), timeout=120, stdin=subprocess.DEVNULL, preexec_fn=default_interrupt,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    return done


def test_during_decoding(pinned, text, tmp_path):
    process = start("run", *pinned, "-p", PROMPT, "--ignore-eos", "-c", 4096, "--stats", tmp_path / "s.json")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    shown, err = (first + rest).decode(), err.decode()
    assert process.returncode == 130 and "Traceback" not in err
    assert shown.startswith(text) or text.startswith(shown)
    assert "ended by: interrupt" in err
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["stop_reason"] == "interrupt" and stats["emitted"] == 1 + stats["steps"] + stats["matched"] < 4096


@pytest.mark.parametrize("spec", ["draft-mtp", "draft-dflash,draft-mtp"])
def test_during_decoding_by_chains(spec, tmp_path):
    """The embedded target's MTP layer, alone and alongside the block drafter: the text so far is the plain one, and who drafted what is counted."""
    args = ["-p", PROMPT, "--ignore-eos", "-c", 2048, "-t", 1, "--device", "CPU"]
    plain = start("run", *args, "--spec-type", "none", "-n", 64).communicate(timeout=60)[0].decode()
    process = start("run", *args, "--spec-type", spec, "--stats", tmp_path / "s.json")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    shown, err = (first + rest).decode(), err.decode()
    assert process.returncode == 130 and "Traceback" not in err and "ended by: interrupt" in err
    assert shown.rstrip("\n").startswith(plain.rstrip("\n")) or plain.startswith(shown.rstrip("\n"))
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["stop_reason"] == "interrupt" and stats["emitted"] == 1 + stats["steps"] + stats["matched"] < 2048
    assert set(stats["drafters"]) <= set(spec.split(","))


def test_during_prefill(pinned, tmp_path):
    patch = """if True:
        from pyggml_spec.engine.runner import ModelRunner
        step = ModelRunner.forward
        def slow(self, work, meanwhile=None):
            ctrl_c()
            return step(self, work, meanwhile)
        ModelRunner.forward = slow
    """
    done = run_patched(patch, *pinned, "-p", "x" * 1200, "-n", 5, "--stats", tmp_path / "s.json")
    assert (done.returncode, done.stdout) == (130, "") and "ended by: interrupt" in done.stderr
    stats = json.loads((tmp_path / "s.json").read_text())
    assert (stats["stop_reason"], stats["emitted"], stats["computes"]) == ("interrupt", 0, 1)  # one chunk of three


def test_while_the_command_line_is_imported(monkeypatch):
    """The first 0.1 s of every command: a traceback of some module of the standard library."""

    class Interrupted:
        def find_spec(self, name, *_):
            if name == "pyggml_spec.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "pyggml_spec.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        program()
    assert end.value.code == 130


def test_both_names_of_the_program_are_one():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["pyspec"] == "pyggml_spec.__main__:main"


def test_while_weights_are_loaded(pinned):
    patch = """if True:
        from pyggml_spec.models.weights import Weights
        upload = Weights.upload
        def slow(self, *args, **kwargs):
            ctrl_c()
            return upload(self, *args, **kwargs)
        Weights.upload = slow
    """
    done = run_patched(patch, *pinned, "-p", PROMPT)
    assert (done.returncode, done.stdout) == (130, "") and not done.stderr.strip()


def test_while_a_tensor_is_copied(pinned):
    """Its bytes in the file were still held when they were given back: a BufferError in place of the interrupt."""
    patch = """if True:
        from pyggml_spec.models import weights
        class Copying:
            def __getattr__(self, name):
                return getattr(real, name)
            def ggml_backend_tensor_set(self, *args):
                ctrl_c()
        real, weights.lib = weights.lib, Copying()
    """
    done = run_patched(patch, *pinned, "-p", PROMPT)
    assert (done.returncode, done.stdout) == (130, "") and not done.stderr.strip()


def test_while_llama_cpp_reads_the_vocabulary(pinned):
    """Its log went to a Python function: Ctrl-C was raised in there, ctypes dropped it, and the run went on."""
    patch = """if True:
        import threading, time
        from pyggml_spec.text import tokenizer
        class Slow:
            def __getattr__(self, name):
                return getattr(real, name)
            def llama_model_load_from_file(self, *args):
                def later():
                    time.sleep(0.003)
                    ctrl_c()
                threading.Thread(target=later).start()
                for _ in range(20):  # long enough for it
                    model = real.llama_model_load_from_file(*args)
                return model
        real, tokenizer.lib = tokenizer.lib, Slow()
    """
    done = run_patched(patch, *pinned, "-p", PROMPT)
    assert (done.returncode, done.stdout) == (130, "") and not done.stderr.strip()


def test_a_second_one_does_not_wait_for_the_step(pinned, text, tmp_path):
    patch = """if True:
        from pyggml_spec.engine.runner import ModelRunner
        step, count = ModelRunner.forward, 0
        def slow(self, *args):
            global count
            count += 1
            if count == 6:  # one is the prompt's
                ctrl_c()
                ctrl_c()
            return step(self, *args)
        ModelRunner.forward = slow
    """
    done = run_patched(patch, *pinned, "-p", PROMPT, "-n", 40, "-q", "--stats", tmp_path / "s.json")
    assert done.returncode == 130 and done.stdout and text.startswith(done.stdout)
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["steps"] == 4 and stats["computes"] >= 5


def test_one_after_the_text_is_complete_changes_nothing(pinned, text):
    """While the footer's plain speed is measured: the text is whole, so the run succeeded."""
    patch = """if True:
        from pyggml_spec.api import Session
        calibrate = Session.calibrate_plain
        def slow(self, *args):
            ctrl_c()
            return calibrate(self, *args)
        Session.calibrate_plain = slow
    """
    done = run_patched(patch, *pinned, "-p", PROMPT, "-n", 40)
    assert (done.returncode, done.stdout) == (0, text) and "ended by: length" in done.stderr
