"""The inputs that C fills in for a step, against what each of them means, row by row."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from pyggml_spec.cache.slots import SlotRange
from pyggml_spec.engine.batch import Draft, GraphKey, Verify
from pyggml_spec.engine.drafting import BlockDrafting
from pyggml_spec.ggml.library import ffi, lib

NOWHERE = -float(1 << 30)
KINDS = {
    "positions": ("int32_t *", np.int32), "kv_rows": ("int64_t *", np.int64), "q_last": ("float *", np.float32), "q_first": ("float *", np.float32),
    "sliding_rows": ("int64_t *", np.int64), "sliding_near": ("float *", np.float32), "on": ("float *", np.float32), "last": ("int32_t *", np.int32),
    "out_row": ("int32_t *", np.int32),
}  # fmt: skip


def _filled(sizes, committed, real, without=()):
    width, count = sizes["width"], sizes["count"]
    lengths = dict.fromkeys(KINDS, width * count)
    lengths |= {"sliding_near": sizes["near"] * count, "last": sizes["history"] * count, "out_row": count}
    out = {name: np.full(lengths[name], -7, kind) for name, (_, kind) in KINDS.items() if name not in without}
    pointers = {name: ffi.cast(KINDS[name][0], array.ctypes.data) for name, array in out.items()}
    lib.pgs_fill_rows(ffi.new("pgs_rows *", sizes | pointers), ffi.new("int64_t[]", committed), ffi.new("int64_t[]", real))
    return out


def _held(row, ring, tokens):
    """The last position below ``tokens`` that lies in this row of a ring."""
    return max((p for p in range(tokens) if p % ring == row), default=None)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_where_it_belongs(seed):
    rng = np.random.default_rng(seed)
    width, count, ring = int(rng.integers(1, 17)), int(rng.integers(1, 5)), int(rng.integers(20, 40))
    live, trash, window, history, near = 64, int(rng.integers(1, 17)), int(rng.integers(1, ring)), 3, int(rng.integers(1, ring + 1))
    sizes = {"width": width, "count": count, "live": live, "ring": ring, "trash": trash, "window": window, "near": near, "history": history}
    committed = [int(rng.integers(0, live)) for _ in range(count)]
    real = [int(rng.integers(0, min(width, live - n) + 1)) for n in committed]
    got = _filled(sizes, committed, real)
    for at in range(count):
        n, part = committed[at] if real[at] else 0, slice(at * width, (at + 1) * width)
        counts = np.arange(width) < real[at]
        positions = n + np.arange(width) if real[at] else np.zeros(width)
        assert np.array_equal(got["positions"][part], positions) and np.array_equal(got["q_last"][part], positions)
        assert np.array_equal(got["q_first"][part], positions - window + 1)
        assert np.array_equal(got["on"][part], counts)
        for name, rows, where in (("kv_rows", live, positions), ("sliding_rows", ring, positions % ring)):
            written = got[name][part] - at * (rows + trash)
            assert np.array_equal(written[counts], where[counts])
            assert ((written[~counts] >= rows) & (written[~counts] < rows + trash)).all()
            assert len(set(written[~counts])) == min(
                trash, int((~counts).sum())
            )  # side by side: rows that share one are written one by one
        held = [_held(row, ring, n + real[at] if real[at] else 1) for row in range(near)]
        wanted = [NOWHERE if p is None else 0.5 - p for p in held]
        assert np.array_equal(got["sliding_near"][at * near : (at + 1) * near], np.array(wanted, np.float32))
        assert np.array_equal(got["last"][at * history : (at + 1) * history], real[at] + np.arange(history))
        assert got["out_row"][at] == at * width + max(0, real[at] - 1)


def test_rows_past_the_last_live_one_are_trash():
    """A block may be wider than the room that is left: its last rows are never accepted."""
    sizes = {"width": 8, "count": 1, "live": 256, "ring": 0, "trash": 16, "window": 0, "near": 0, "history": 3}
    got = _filled(sizes, [253], [8], ("q_first", "sliding_rows", "sliding_near"))
    assert got["kv_rows"].tolist() == [253, 254, 255, 256, 257, 258, 259, 260] and got["positions"].tolist() == list(range(253, 261))
    assert _filled(sizes, [253], [8], ("q_first", "sliding_rows", "sliding_near", "on", "last", "out_row")).keys() == {
        "positions",
        "kv_rows",
        "q_last",
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_found_wherever_they_are(bad):
    values = np.full(17, 3e38, np.float32)  # whose sum is infinite
    assert lib.pgs_finite(ffi.from_buffer("float *", values), 17)
    for i in range(17):
        poisoned = values.copy()
        poisoned[i] = bad
        assert not lib.pgs_finite(ffi.from_buffer("float *", poisoned), 17)
        assert lib.pgs_finite(ffi.from_buffer("float *", poisoned), i)


@pytest.mark.parametrize("window", [0, 12])
def test_every_row_of_a_block_sees_a_position_with_every_drafter(window):
    """Slots in a step of others' drafts had rows that saw nothing where layers have a window: attention to nothing is NaN."""
    width, live, committed = 4, 64, [40, 30, 0]
    hp = SimpleNamespace(mask_token=9, window=(window, 0))
    drafter = SimpleNamespace(hp=hp, block_rows=lambda rows: rows, last_visible=lambda first, rows: np.full(rows, first + rows - 1))
    kv = SimpleNamespace(live=live, trash=16, rows_for=lambda n, count, real, out: out.fill(0))
    slots = [SimpleNamespace(cursor=SimpleNamespace(committed=n, last_token=5)) for n in committed]
    positions = np.concatenate([n + np.arange(width) for n in committed]).astype(np.int32)
    host = {
        "block": np.zeros(12, np.int32),
        "draft_last": np.zeros(12, np.float32),
        "positions": positions,
        "draft_rows": np.zeros(12, np.int64),
    }
    host |= {f"draft_first_{window}": np.zeros(12, np.float32)} if window else {}
    BlockDrafting(drafter, None, kv, False).fill(
        host, GraphKey("fused", width, live, SlotRange(0, 3)), {1: Draft(3), 0: Verify([1, 2, 3])}, slots
    )
    first, last = host.get(f"draft_first_{window}", np.zeros(12)), host["draft_last"]
    assert (last >= np.maximum(first, 0)).all() and last[4:8].tolist() == [32, 32, 32, 32]
