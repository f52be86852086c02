"""Files that are cut while they are in use: somebody fetches a model anew over the one that is loaded."""

import os
import signal
import subprocess
import sys

import pytest
from random_gguf.archs import write_qwen3, write_qwen35moe
from random_gguf.model import Shape

from pyggml_spec.errors import GGUFError
from pyggml_spec.gguf_io import GGUFFile

READS = """
import mmap, sys
from pathlib import Path
from pyggml_spec.gguf_io import GGUFFile
path, whose = Path(sys.argv[1]), sys.argv[2]
with GGUFFile(path) as file:
    if whose == "another's":
        path = path.with_suffix(".other")
        path.write_bytes(bytes(1 << 16))
        with open(path, "rb") as other:
            data = memoryview(mmap.mmap(other.fileno(), 0, access=mmap.ACCESS_READ))
    else:
        data = file.read("output.weight")
    if whose == "sent":
        import os, signal
        os.kill(os.getpid(), signal.SIGBUS)
    with open(path, "r+b") as cut:
        cut.truncate(4096)
    print(bytes(data)[:0])
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


def test_a_page_that_is_gone_ends_the_process_with_a_sentence(path, tmp_path):
    """It was "Bus error": also of weights in host memory, which are the file's own pages, read by ggml's threads."""
    copy, experts = tmp_path / "t.gguf", write_qwen35moe(tmp_path / "experts.gguf", Shape(n_ff_expert=2048), "F16")
    copy.write_bytes(path.read_bytes())
    for code, cut in ((READS, copy), (RUNS, experts)):
        done = run(code, cut, "its own")
        assert done.returncode == 1
        assert (
            done.stderr
            == f"pyspec: {cut} was cut while it was in use; load it again, and put a new file in the place of another by renaming it\n"
        )


@pytest.mark.parametrize("whose", ["another's", "sent"])
def test_the_signal_means_elsewhere_what_it_meant(path, tmp_path, whose):
    copy = tmp_path / "t.gguf"
    copy.write_bytes(path.read_bytes())
    done = run(READS, copy, whose)
    assert (done.returncode, done.stderr) == (-signal.SIGBUS, "")
