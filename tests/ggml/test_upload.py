"""Weights that threads read onto a device: the bytes of the file, all of them before a step, and a sentence where that cannot be."""

import os
import shutil
import threading

import pytest
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import EngineError, GGUFError
from pyggml_spec.ggml.device import Backend, devices, pick_device
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.ggml.upload import Uploads
from pyggml_spec.gguf_io import GGUFFile

OPTIONS = {"device": "CPU", "threads": 1, "n_ctx": 256, "kernels": "ggml", "prefix_memory": 0}


@pytest.fixture
def threads_read(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(Uploads, "worth", staticmethod(lambda backend, nbytes: True))


def _contents(model) -> list[bytes]:
    weights, out = model.weights, []
    tensors = [tensor for spec in model.specs() if (tensor := weights.get(spec.name)) is not None]
    tensors += [run.matrix.weight for name in model.groups() for run in weights.group(name).runs]
    for tensor in tensors:
        into = ffi.new("char[]", lib.ggml_nbytes(tensor))
        lib.ggml_backend_tensor_get(tensor, into, 0, lib.ggml_nbytes(tensor))
        out.append(bytes(ffi.buffer(into)))
    return out


@pytest.mark.parametrize("device", ["CPU", pytest.param("CUDA", marks=pytest.mark.gpu)])
def test_tensors_have_the_bytes_of_the_files(pair, monkeypatch, device):
    found, name = [], next((one.name for one in devices() if one.name.startswith(device)), None)
    if name is None:
        pytest.skip("there is no CUDA device")
    for threads in (False, True):
        monkeypatch.setattr(Uploads, "worth", staticmethod(lambda backend, nbytes, threads=threads: threads))
        queued, add = [], Uploads.add
        with monkeypatch.context() as once:
            once.setattr(Uploads, "add", lambda self, *of, add=add, queued=queued: queued.append(of) or add(self, *of))
            with ps.load(*pair, **OPTIONS | {"device": name}) as session:
                found.append([_contents(model) for model in (session.target, *session.drafter.methods)])
        assert bool(queued) == threads
    assert found[0] == found[1] and all(found[0])


def test_graphs_are_planned_meanwhile_and_nothing_is_computed(pair, monkeypatch, threads_read):
    """Planning takes as long as reading: one after the other was most of what the first token waited for."""
    done, make, wait = [], ModelRunner.__init__, Uploads.wait
    monkeypatch.setattr(ModelRunner, "__init__", lambda self, *of: (make(self, *of), done.append(self))[0])

    def waits(self, *of):
        assert [sum(c.computes for c in runner.graphs.counters().values()) for runner in done] == [0] and self.running
        wait(self, *of)
        done.append(self)

    monkeypatch.setattr(Uploads, "wait", waits)
    with ps.load(*pair, **OPTIONS) as session:
        assert done[0] is session.runner and done[1].done == done[1].total > 0


def test_a_file_that_is_cut_while_it_is_read(pair, monkeypatch, threads_read, tmp_path):
    """A map of it would have ended the process."""
    shutil.copy(pair[0], tmp_path / "cut.gguf")
    os.truncate(tmp_path / "cut.gguf", os.stat(pair[0]).st_size // 2)
    opened = GGUFFile.reopened
    monkeypatch.setattr(
        GGUFFile, "reopened", lambda self: os.open(tmp_path / "cut.gguf", os.O_RDONLY) if str(self.path) == str(pair[0]) else opened(self)
    )
    before = threading.active_count(), set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    fails_with(
        GGUFError, "was cut while it was read, at the tensor '.*' of .* bytes from byte .* on; fetch it again", ps.load, *pair, **OPTIONS
    )
    assert before == (threading.active_count(), set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set())


def test_a_file_of_the_same_name_is_not_read(pair, monkeypatch, threads_read, tmp_path):
    """What was checked is in the map: another file, put in the place of this one, is not."""
    target = shutil.copy(pair[0], tmp_path / "t.gguf")
    with GGUFFile(target) as file:
        fd = file.reopened()
        assert fd is not None
        os.close(fd)
        shutil.copy(pair[0], tmp_path / "other.gguf")
        os.replace(tmp_path / "other.gguf", target)
        assert file.reopened() is None


def test_reading_ends_before_the_memory_is_freed(pair, monkeypatch, threads_read):
    """Of a load that fails while graphs are planned."""
    made, init = [], Uploads.__init__
    monkeypatch.setattr(Uploads, "__init__", lambda self, *of: (init(self, *of), made.append(self))[0])

    def fails(self, *of):
        raise EngineError("no memory for a graph")

    monkeypatch.setattr(ModelRunner, "__init__", fails)
    fails_with(EngineError, "no memory for a graph", ps.load, *pair, **OPTIONS)
    assert len(made) == 1 and not made[0].running and made[0].total > 0


def test_parts_that_do_not_fit_their_tensor_are_refused(pair):
    backend = Backend(pick_device("CPU"), 1)
    with GGUFFile(pair[0]) as file:
        info = next(info for info in file.tensors.values() if info.nbytes > 64)
        uploads = Uploads(backend, 2)
        try:
            tensor = ffi.new("struct ggml_tensor *", {"type": lib.GGML_TYPE_F32, "ne": [4, 1, 1, 1], "nb": [4, 16, 16, 16]})
            assert not uploads.add(file, info, tensor, 0) and not uploads.total
            uploads.wait()
        finally:
            uploads.close()
            backend.close()
