"""A file is named by all of its bytes: a sample of them let one model go on with the rows of another."""

import json
import os
import platform
import signal
import subprocess
import sys

import numpy as np
import pytest
from random_gguf.archs import write_qwen3, write_qwen35moe
from random_gguf.model import Shape
from sessions import fails_with
from tools.checkpoint import safetensors

import pyggml_spec as ps
from pyggml_spec import building
from pyggml_spec.errors import GGUFError
from pyggml_spec.files import keep_json
from pyggml_spec.gguf_io import GGUFFile, identity
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.speculation import calibrate

WINDOW = 4096
PROMPT = list(range(40, 80))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder; files count as settled at once."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "SETTLED_NS", 0)
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path):
    return write_qwen3(tmp_path / "t.gguf")


def named(path, **more) -> str:
    with GGUFFile(path) as file:
        return file.identity(**more)


def hashes_again(monkeypatch, path) -> bool:
    """Whether the file is read once more to name it."""
    seen = []
    with monkeypatch.context() as patch:
        hashed = identity.hashed
        patch.setattr(identity, "hashed", lambda *args: seen.append(1) or hashed(*args))
        named(path)
    return bool(seen)


@pytest.mark.slow
def test_rows_of_a_model_that_is_alike_in_three_windows_of_each_tensor_are_not_reused(tmp_path, cache):
    """Of a copy of the embedded target with everything between those zeroed: 96 tokens were reused, with the other model's text."""
    data = bytearray(DEMO_TARGET.read_bytes())
    with GGUFFile(DEMO_TARGET) as file:
        for t in file.tensors.values():
            middle = t.offset + t.nbytes // 2
            for first, last in ((t.offset + WINDOW, middle), (middle + WINDOW, t.offset + t.nbytes - WINDOW)):
                data[first : max(first, last)] = bytes(max(0, last - first))
    (tmp_path / "other.gguf").write_bytes(data)
    for path, reused in ((DEMO_TARGET, 0), (DEMO_TARGET, 32), (tmp_path / "other.gguf", 0)):
        with ps.load(
            path, DEMO_DRAFTER, device="CPU", threads=1, n_ctx=64, draft_width=4, chunk=16, prefix_cache=tmp_path / "p"
        ) as session:
            assert session.generate(PROMPT, 2)[1].reused_tokens == reused
            assert ("BLAKE3" in "".join(session.notes)) == (path != DEMO_TARGET)


@pytest.mark.slow
def test_rows_that_another_build_computed_are_not_reused(tmp_path, cache, monkeypatch):
    """Builds of one version with and without the kernels of patches/ round in two ways: text and drafts were not those of this run."""
    for patches, reused in (([], 0), ([], 32), (["0020-small-batch"], 0)):
        monkeypatch.setattr(building, "build_note", lambda libraries, patches=patches: {"patches": patches})
        with ps.load(device="CPU", threads=1, n_ctx=64, draft_width=4, chunk=16, prefix_cache=tmp_path / "p") as session:
            assert session.generate(PROMPT, 2)[1].reused_tokens == reused


@pytest.mark.parametrize("at", [-1, 1 << 17, 5000])
def test_every_byte_counts(model, cache, at):
    before, data = named(model), bytearray(model.read_bytes())
    data[at] ^= 1
    other = model.with_name("u.gguf")
    other.write_bytes(data)
    assert named(other) != before and named(other) != named(model) == before and len(before) == 64


def test_it_is_computed_once_and_after_every_write(model, cache, monkeypatch):
    done = []
    before = named(model, progress=lambda *step: done.append(step))
    assert done[-1] == (model.stat().st_size,) * 2 and not hashes_again(monkeypatch, model)
    was = model.stat()
    with open(model, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([model.read_bytes()[-1] ^ 1]))
    os.utime(model, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert model.stat().st_mtime_ns == was.st_mtime_ns and named(model) != before
    os.rename(model, model.with_name("v.gguf"))
    assert hashes_again(monkeypatch, model.with_name("v.gguf"))


def test_a_file_that_was_written_a_moment_ago_is_not_remembered(model, cache, monkeypatch):
    """Where file systems count in ticks, a second write within one leaves size and times as they were, with other contents."""
    monkeypatch.setattr(identity, "SETTLED_NS", 3_600_000_000_000)
    named(model)
    assert hashes_again(monkeypatch, model)
    monkeypatch.setattr(identity, "SETTLED_NS", 0)
    named(model)
    assert not hashes_again(monkeypatch, model)


@pytest.mark.parametrize("first", ["probe", "costs"])
def test_the_hash_is_cached_in_any_cache_folder(model, cache, monkeypatch, first):
    """With a umask of 002, usual where users have groups of their own, the folder that others of us made was open to the group, and never believed."""
    old = os.umask(0o002)
    try:
        keep_json(cache / "probe-x.json", {}) if first == "probe" else calibrate.keep(cache / "costs-x.json", {1: 1.0})
    finally:
        os.umask(old)
    named(model)
    assert not hashes_again(monkeypatch, model)


def test_an_entry_that_others_could_have_written_or_that_is_damaged_is_not_believed(model, cache, monkeypatch):
    right = named(model)
    (entry,) = cache.glob("content-*.json")
    assert entry.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    whole = json.loads(entry.read_text())
    lies = [{**whole, "blake3": lie} for lie in ("", "0" * 63, "g" * 64, None, 5, ["0"] * 64)] + [{**whole, "file": []}, {}, [], None, "x"]
    for text in [json.dumps(lie) for lie in lies] + ["", "{", "[" * 100000]:
        entry.write_text(text)
        assert named(model) == right
    entry.write_text(json.dumps({**whole, "blake3": "0" * 64}))
    entry.chmod(0o666)
    assert hashes_again(monkeypatch, model)
    entry.write_text(json.dumps({**whole, "blake3": "0" * 64}))
    entry.chmod(0o600)
    assert named(model) == "0" * 64  # so the others were about what they seem to be


def test_a_file_that_changes_while_it_is_in_use_says_so(model, cache):
    with GGUFFile(model) as file:
        os.utime(model)
        fails_with(GGUFError, "changed or replaced while it was in use", file.identity)
    with GGUFFile(model) as file:
        model.unlink()
        fails_with(GGUFError, "changed or replaced", file.identity)


def test_a_cache_folder_that_cannot_be_written_costs_the_time_only(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "file" / "below"))
    assert len(named(model)) == 64 and hashes_again(monkeypatch, model)


def test_only_a_prefix_cache_on_disk_hashes(model, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "hashed", lambda *args: (_ for _ in ()).throw(AssertionError("hashed")))
    with ps.load(model, device="CPU", threads=1, n_ctx=64) as session:
        session.generate([1, 2, 3], 4)
    fails_with(AssertionError, "hashed", ps.load, model, device="CPU", threads=1, n_ctx=64, prefix_cache=tmp_path / "p")


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
    remedy = "load it again, and put a new file in the place of another by renaming it"
    assert done.stderr == f"pyspec: {path} was cut while it was in use; {remedy}\n"


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
