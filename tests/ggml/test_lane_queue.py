"""Lanes on devices with queues of their own, which no CPU is: each step reads what its own parts left, and nothing waits that need not."""

import pytest
from ggml.broken_c import run

BUILD = "step_lanes.c", "lane_queue.c"
WAIT = "ggml_backend_event_synchronize(computed);"
QUEUED = f"give(turns, device);\n            {WAIT}"
BROKEN = {
    "no wait for a part": (WAIT, ";"),
    "no wait for what is before": ("ggml_backend_event_record(computed, backend);", ";"),
    "a device is given late": (QUEUED, f"{WAIT}\n            give(turns, device);"),
    "copies hold a device": (QUEUED, WAIT, "if (computed == NULL) {\n            give", "{\n            give"),
    "a CPU is given before its copies": ("        if (status == 0) {\n            copy_rows", "        if (computed == NULL) give(turns, device);\n        if (status == 0) {\n            copy_rows"),
    "every device is a queue": ('strcmp(kind, "CUDA") == 0', "kind != NULL"),
    "no device is a queue": ('strcmp(kind, "CUDA") == 0', "kind == NULL"),
    "what was lost is copied": ("        if (status == 0) {\n            copy_rows", "        {\n            copy_rows"),
    "inputs are uploaded once": ("bool        uploaded[MOST_DEVICES] =", "static bool uploaded[MOST_DEVICES] ="),
    "a lane waits by the wall clock": (
        "clock_gettime(CLOCK_MONOTONIC, &now)", "clock_gettime(CLOCK_REALTIME, &now)", "pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);", ";",
    ),
    "turns are not taken": ("turns->taken[device] = true;", ";"),
}  # fmt: skip


def test_steps_of_two_lanes(tmp_path):
    assert run(tmp_path, *BUILD) == ""


@pytest.mark.parametrize("what", BROKEN)
def test_a_missing_wait_is_noticed(tmp_path, what):
    assert run(tmp_path, *BUILD, *BROKEN[what]) != ""
