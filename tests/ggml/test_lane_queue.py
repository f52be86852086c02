"""Lanes on devices with queues of their own, which no CPU is: each step reads what its own parts left, and nothing waits that need not."""

import subprocess
from pathlib import Path

import pytest
from ggml.test_levels import headers

ROOT = Path(__file__).parents[2]
LANES = ROOT / "csrc" / "step_lanes.c"
WAIT = "ggml_backend_event_synchronize(computed);"
QUEUED = f"give(turns, device);\n            {WAIT}"
BROKEN = {
    "nobody waits for a part": (WAIT, ";"),
    "nobody waits for what is before": ("ggml_backend_event_record(computed, backend);", ";"),
    "a device is given late": (QUEUED, f"{WAIT}\n            give(turns, device);"),
    "copies hold a device": (QUEUED, WAIT, "if (computed == NULL) {\n            give", "{\n            give"),
    "a CPU is given before its copies": ("        if (status == 0) {\n            copy_rows", "        if (computed == NULL) give(turns, device);\n        if (status == 0) {\n            copy_rows"),
    "every device is a queue": ('strcmp(kind, "CUDA") == 0', "kind != NULL"),
    "no device is a queue": ('strcmp(kind, "CUDA") == 0', "kind == NULL"),
    "what was lost is copied": ("        if (status == 0) {\n            copy_rows", "        {\n            copy_rows"),
    "inputs are uploaded once": ("bool        uploaded[MOST_DEVICES] =", "static bool uploaded[MOST_DEVICES] ="),
    "turns are not taken": ("turns->taken[device] = true;", ";"),
}  # fmt: skip


def run(folder: Path, *broken: str) -> str:
    source, program = LANES.read_text(), folder / "lanes"
    for old, new in zip(broken[::2], broken[1::2], strict=True):
        assert source.count(old) == 1
        source = source.replace(old, new)
    (folder / "step_lanes.c").write_text(source)
    parts = [Path(__file__).with_name("lane_queue.c"), folder / "step_lanes.c", "-pthread", "-o", program]
    subprocess.run(list(map(str, ["cc", "-std=gnu11", "-O1", "-I", ROOT / "csrc", "-I", headers(), *parts])), check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == bool(done.stdout)
    return done.stdout


def test_steps_of_two_lanes(tmp_path):
    assert run(tmp_path) == ""


@pytest.mark.parametrize("what", BROKEN)
def test_a_missing_wait_is_noticed(tmp_path, what):
    assert run(tmp_path, *BROKEN[what]) != ""
