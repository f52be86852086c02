"""Which GPU a command line starts before its command is known to need it: one too few costs time, one too many half a gigabyte there."""

from types import SimpleNamespace

import pytest

from pyggml_spec.ggml import gpu_start
from pyggml_spec.ggml.gpu_start import begin, wanted


@pytest.mark.parametrize(
    "args, index",
    [
        ("-m a.gguf", 0),
        ("-m a.gguf --device CUDA0", 0),
        ("--device cuda3 -m a.gguf", 3),
        ("-dev CUDA1 -dev CUDA2", 2),
        ("--device=CUDA1", 1),
        ("--device CPU", None),
        ("-ngl 99", 0),
        ("-ngl 0", None),
        ("--n-gpu-layers=0", None),
        ("--device CUDA0,CUDA1", None),
        ("--device RPC:host:50052", None),
        ("--device", 0),
        ("--help", None),
        ("--models-dir models", None),
        ("--print-config continue", None),
    ],
)
def test_the_gpu_of_a_command_line(args, index):
    assert wanted(args.split()) == index


def test_nothing_is_started_for_libraries_of_a_cpu(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(gpu_start, "_start", started.append)
    begin([], None)
    begin([], tmp_path)
    assert started == []
    (tmp_path / "libggml-cuda.so").touch()
    monkeypatch.setattr(gpu_start, "Background", lambda call: SimpleNamespace(start=call))
    begin(["--device", "CPU"], tmp_path)
    begin(["--device", "CUDA1"], tmp_path)
    assert started == [1]
    monkeypatch.setenv("GGML_CUDA_DEVICES", "2")  # numbers are not the driver's
    begin([], tmp_path)
    assert started == [1]
