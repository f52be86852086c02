"""Copies alongside what a device computes: in whatever order its queues get on, it computes with the layer that it waited for, and the host waits for
nothing. What models make of it: tests/multi_device/test_offload.py."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from ggml.test_levels import headers
from hypothesis import given
from hypothesis import strategies as st

from pyggml_spec.ggml.library import ffi, lib

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STREAM = ROOT / "csrc" / "weight_stream.c"


def built(folder: Path, source: str) -> Path:
    (folder / "weight_stream.c").write_text(source)
    program, parts = folder / "order", [Path(__file__).with_name("stream_order.c"), folder / "weight_stream.c"]
    subprocess.run(list(map(str, ["cc", "-std=gnu11", "-O1", "-I", ROOT / "csrc", "-I", headers(), *parts, "-o", program])), check=True)
    return program


def test_orders_and_ways(tmp_path):
    done = subprocess.run([built(tmp_path, STREAM.read_text()), "3000"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "") and run(tmp_path, *LANES) == ""
    assert run(tmp_path, *PREFETCH, apart=False) == "" and slots([4, 2], 6, [0, 2, 1, 4], False) == [2, 1, 2, 0]
    assert slots([4, 2], 6, [0, 2, 1, 4], True) == [2, 1, 3, 0]


@pytest.mark.parametrize("left_out", [
    "ggml_backend_event_wait(s->device, s->arrived[layer % 2]);", "ggml_backend_event_wait(s->queue, s->used[place]);",
    "ggml_backend_event_record(s->used[place], s->device);", "want(s, 1);", "want(s, layer + 2);",
])  # fmt: skip
def test_a_missing_step_is_noticed(tmp_path, left_out):
    source = STREAM.read_text()
    assert source.count(left_out) == 1
    done = subprocess.run([built(tmp_path, source.replace(left_out, ";")), "1000"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is computed" in done.stdout, done.stdout


LANES = "step_lanes.c", "lane_queue.c"
WAIT = "ggml_backend_event_synchronize(computed);"
QUEUED = f"give(turns, device);\n            {WAIT}"
BROKEN_LANES = {
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


@pytest.mark.parametrize("what", BROKEN_LANES)
def test_a_missing_wait_is_noticed(tmp_path, what):
    assert run(tmp_path, *LANES, *BROKEN_LANES[what]) != ""


PREFETCH = "cpu/prefetch_tune.c", "prefetch_clock.c"
BROKEN_PREFETCH = {
    "a slower way": ("[TRIALS / 2] < t->took[t->best]", "[TRIALS / 2] > t->took[t->best]"),
    "the fastest product": ("t->took[way][TRIALS / 2] <", "t->took[way][0] <"),
    "the first products as well": ("#define SKIPPED 63", "#define SKIPPED 0"),
    "one way twice": ("return sum % WAYS", "return seen / 2 % WAYS"),
    "a thread without a share": (" || bytes == 0", ""),
    "rows alike": ("rows <= 8 ? 3", "rows <= 7 ? 3"),
    "types alike": ("trials[type][where]", "trials[type & ~1][where]"),
    "one of all threads": ("static _Thread_local trial", "static trial"),
    "another distance": ("AHEAD[t->best], 0", "AHEAD[0], 0"),
}


@pytest.mark.parametrize("what", BROKEN_PREFETCH)
def test_what_decides_otherwise_is_noticed(tmp_path, what):
    assert run(tmp_path, *PREFETCH, *BROKEN_PREFETCH[what], apart=False) != ""


def slots(hot: list[int], n_expert: int, chosen: list[int], distinct: bool) -> list[int]:
    where, ids, out = np.full(n_expert, -1, np.int32), np.array(chosen, np.int32), np.empty(len(chosen), np.int32)
    where[hot] = np.arange(len(hot))
    pointers = (ffi.cast("int32_t *", ffi.from_buffer(a)) for a in (where, ids))
    lib.pgs_experts_slots(*pointers, len(chosen), len(hot), distinct, ffi.cast("int32_t *", ffi.from_buffer(out)))
    return out.tolist()


@given(st.data())
def test_no_token_uses_a_slot_twice(data):
    n_expert = data.draw(st.integers(2, 40))
    order = data.draw(st.permutations(range(n_expert)))
    hot = list(order[: data.draw(st.integers(1, n_expert - 1))])
    chosen = list(data.draw(st.permutations(range(n_expert))))[: data.draw(st.integers(1, n_expert))]
    got = slots(hot, n_expert, chosen, True)
    assert len(set(got)) == len(got) and min(got) >= 0 and max(got) < len(hot) + lib.pgs_experts_fillers(len(chosen), len(hot))
    assert [hot.index(e) for e in chosen if e in hot] == [s for s, e in zip(got, chosen) if e in hot]


def run(folder: Path, source: str, driver: str, *edits: str, apart: bool = True) -> str:
    """What the driver says of ``source``, a path below csrc: nothing if all is right, and a line for each thing that is not.

    ``edits``: texts that stand there once, each with what replaces it. ``apart``: the source is compiled alongside the driver, which includes it otherwise.
    """
    text, copy, program = (ROOT / "csrc" / source).read_text(), folder / source, folder / "program"
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(text)
    includes = [part for path in (folder, ROOT / "csrc", ROOT / "csrc" / "cpu", headers()) for part in ("-I", path)]
    sources = [Path(__file__).with_name(driver), *([copy] if apart else [])]
    subprocess.run(list(map(str, ["cc", "-std=gnu11", "-O1", *includes, *sources, "-pthread", "-o", program])), check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == bool(done.stdout)
    return done.stdout
