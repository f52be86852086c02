"""Copies alongside what a device computes: in whatever order its queues get on, it computes with the layer that it waited for, and the host waits for
nothing. What models make of it: tests/multi_device/test_offload.py."""

import subprocess
from pathlib import Path

import pytest
from ggml.test_levels import headers

ROOT = Path(__file__).parents[2]
STREAM = ROOT / "csrc" / "weight_stream.c"
LEFT_OUT = (
    "ggml_backend_event_wait(s->device, s->arrived[layer % 2]);",
    "ggml_backend_event_wait(s->queue, s->used[place]);",
    "ggml_backend_event_record(s->used[place], s->device);",
    "want(s, 1);",
    "want(s, layer + 2);",
)


def built(folder: Path, source: str) -> Path:
    (folder / "weight_stream.c").write_text(source)
    program = folder / "order"
    parts = [Path(__file__).with_name("stream_order.c"), folder / "weight_stream.c"]
    subprocess.run(list(map(str, ["cc", "-std=gnu11", "-O1", "-I", ROOT / "csrc", "-I", headers(), *parts, "-o", program])), check=True)
    return program


def test_every_order_of_the_queues(tmp_path):
    done = subprocess.run([built(tmp_path, STREAM.read_text()), "3000"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_missing_step_is_noticed(tmp_path, left_out):
    source = STREAM.read_text()
    assert source.count(left_out) == 1
    done = subprocess.run([built(tmp_path, source.replace(left_out, ";")), "1000"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is computed" in done.stdout, done.stdout
