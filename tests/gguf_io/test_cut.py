"""Files that are cut while they are in use: a model is fetched anew over the one that is loaded."""

import os
import platform
import signal
import subprocess
import sys

import numpy as np
import pytest
from random_gguf.archs import write_qwen3, write_qwen35moe
from random_gguf.model import Shape
from tools.checkpoint import safetensors

from pyggml_spec.errors import GGUFError
from pyggml_spec.gguf_io import GGUFFile

READS = """
import ctypes, mmap, os, platform, signal, struct, sys
from pathlib import Path
from pyggml_spec.gguf_io import GGUFFile
path, whose = Path(sys.argv[1]), sys.argv[2]
if whose == "ignored":
    signal.signal(signal.SIGBUS, signal.SIG_IGN)
if whose == "forgotten":
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    for _ in range(300):
        GGUFFile(other)
size = path.stat().st_size

def mapped(path):
    path.write_bytes(bytes(size))
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

before = mapped(path.with_suffix(".before"))  # at higher addresses
with GGUFFile(path) as file:
    data = file.read("output.weight")
    if whose == "another's behind it":
        path, data = path.with_suffix(".before"), before
    if whose == "another's in its place":
        data.release()
        file.close()
        path = path.with_suffix(".other")
        data = mapped(path)
    if whose == "closed":
        file.close()
    if whose in ("sent", "ignored"):
        os.kill(os.getpid(), signal.SIGBUS)
    if whose == "sent by a number like an address":
        place = int(next(line for line in open("/proc/self/maps") if str(path) in line).split("-")[0], 16)
        queue = {"x86_64": 129, "aarch64": 138}[platform.machine()]
        ctypes.CDLL(None).syscall(queue, os.getpid(), signal.SIGBUS, struct.pack("iiiiQ", signal.SIGBUS, 0, -1, 0, place).ljust(128, bytes(1)))
    with open(path, "r+b") as cut:
        cut.truncate(4096)
    print(bytes(data)[:0])
"""
CONVERTS = """
import os, sys
from pyggml_spec.gguf_io.safetensors import SafetensorsFile
with SafetensorsFile(sys.argv[1]) as file:
    os.truncate(sys.argv[1], 4096)
    file.rows("a", 0, 1)
"""
RUNS = """
import sys
import pyggml_spec as ps
from pyggml_spec.models.placement import ExpertOptions
with ps.load(sys.argv[1], device="CPU", threads=2, n_ctx=64, experts=ExpertOptions(-1), prefix_memory=0) as session:
    session.generate([1, 2, 3], 2, ignore_end=True)
    with open(sys.argv[1], "r+b") as cut:
        cut.truncate(4096)
    session.generate([1, 2, 3], 8, ignore_end=True)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("cut") / "t.gguf", Shape())


def run(code, *args):
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False, timeout=60)


def test_what_is_read_of_a_cut_file_is_an_error(path, tmp_path):
    copy = tmp_path / "t.gguf"
    copy.write_bytes(path.read_bytes())
    with GGUFFile(copy) as file:
        file.read("output.weight").release()
        os.truncate(copy, 4096)
        with pytest.raises(
            GGUFError, match=r"t\.gguf was cut while it was read: it has 4096 bytes, and the tensor 'output.weight' ended at"
        ):
            file.read("output.weight")


def check_said(done, path):
    assert done.returncode == 1
    assert (
        done.stderr
        == f"pyspec: {path} was cut while it was in use; load it again, and put a new file in the place of another by renaming it\n"
    )


@pytest.mark.slow
def test_a_page_that_is_gone_ends_the_process_with_a_sentence(path, tmp_path):
    """It was "Bus error": also of weights in host memory, which are the file's own pages, read by ggml's threads."""
    copy, experts = tmp_path / "t.gguf", write_qwen35moe(tmp_path / "experts.gguf", Shape(n_ff_expert=2048), "F16")
    copy.write_bytes(path.read_bytes())
    for code, cut in ((READS, copy), (RUNS, experts)):
        check_said(run(code, cut, "its own"), cut)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["closed", "forgotten", "ignored"])
def test_a_map_is_watched_while_it_is_read(path, tmp_path, whose):
    """Views outlive `close`; files left open took the places of later ones; and a signal that was ignored once ended all watching."""
    copy = tmp_path / "t.gguf"
    copy.write_bytes(path.read_bytes())
    check_said(run(READS, copy, whose), copy)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["another's behind it", "another's in its place", "sent", "sent by a number like an address"])
def test_the_signal_means_elsewhere_what_it_meant(path, tmp_path, whose):
    if whose.startswith("sent by") and platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("the number of the call is not known here")
    copy = tmp_path / "t.gguf"
    copy.write_bytes(path.read_bytes())
    done = run(READS, copy, whose)
    assert (done.returncode, done.stderr) == (-signal.SIGBUS, "")


def test_a_checkpoint_is_watched_as_well(tmp_path):
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(safetensors({"a": np.zeros(1 << 16, np.float32)}))
    check_said(run(CONVERTS, cut), cut)
