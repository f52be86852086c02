"""Which devices a list of names means."""

import pytest

from pyggml_spec.errors import DeviceError
from pyggml_spec.ggml.device import open_backends, pick_device, pick_devices


def test_names_in_their_order():
    assert [device.name for device in pick_devices("CPU, cpu")] == ["CPU", "CPU"]
    assert pick_devices() == [pick_device()]


@pytest.mark.parametrize(
    "names, words",
    [("CPU,", "empty name"), ("CPU,NPU9", "no device is called 'NPU9'"), (",".join(["CPU"] * 17), "17 devices"), ("", "empty name")],
)
def test_what_is_wrong_with_a_list(names, words):
    with pytest.raises(DeviceError, match=words):
        pick_devices(names)


def test_a_gpu_is_named_once(monkeypatch):
    from dataclasses import replace

    gpu = replace(pick_device("CPU"), name="CUDA0", kind="gpu")
    monkeypatch.setattr("pyggml_spec.ggml.device.pick_device", lambda name=None: gpu)
    with pytest.raises(DeviceError, match="CUDA0 is named twice"):
        pick_devices("CUDA0,CUDA0")


def test_every_mention_of_the_cpu_is_a_backend_of_its_own():
    first, second = open_backends(pick_devices("CPU,CPU"), 1, "ggml")
    assert first.handle != second.handle and first.threads == second.threads == 1
    for backend in (first, second):
        backend.close()
