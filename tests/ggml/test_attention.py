"""Our own attention: what it computes, and that a row has the same bits wherever it stands."""

import numpy as np
import pytest
from ggml.kernel_graphs import LEVELS, bench, compute

from pyggml_spec.ggml.library import lib
from pyggml_spec.tools.quants import dequantise, quantise, type_id

on_every_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
SHAPES = [(64, 8, 2), (128, 6, 6), (256, 4, 1), (80, 3, 1), (16, 2, 2), (512, 2, 1)]  # size of a head, heads of Q, heads of K and V


def inputs(size, heads, heads_kv, span, rows, kind="f16", seed=0):
    """q F32 [T, H, D], cache rows of ``kind`` and as the type has them, mask F16 [T, span]: row t sees the positions up to span - rows - 3 + t."""
    rng = np.random.default_rng(seed)
    q = (2 * rng.standard_normal((rows, heads, size))).astype(np.float32)
    mask = np.where(np.arange(span) <= (span - rows - 3 + np.arange(rows))[:, None], 0, -np.inf).astype(np.float16)
    caches = []
    for _ in range(2):
        stored = quantise(rng.standard_normal((span, heads_kv * size)).astype(np.float32), type_id(kind))
        caches += [stored, dequantise(stored.tobytes(), type_id(kind), span * heads_kv * size).reshape(span, heads_kv, size)]
    return q, caches, mask


def attention(level, q, stored, mask, heads_kv, span, kind="f16", threads=1, slots=1):
    """F32 [T, H * D]; ``span`` may be less than there are rows."""
    size = q.shape[2]
    with bench(level, threads) as (graph, memory):
        rows = len(stored[0]) // slots
        shape = (size * heads_kv, rows) if slots == 1 else (size * heads_kv, rows, slots)
        k, v = (memory.tensor(rows, type_id(kind), shape) for rows in stored)
        dims = (span, len(q)) if slots == 1 else (span, len(q) // slots, 1, slots)
        masked = memory.tensor(mask[:, :span], lib.GGML_TYPE_F16, dims)
        return compute(graph, graph.flash_attention(memory.tensor(q), k, v, masked, heads_kv, span, 1 / np.sqrt(size)))


def exact(q, k, v, mask):
    """The formula in double precision, F32 [T, H * D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), k) / np.sqrt(q.shape[2]) + mask.astype(np.float64)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


@on_every_level
@pytest.mark.parametrize("size, heads, heads_kv", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_attention_is_right(level, size, heads, heads_kv, rows):
    q, (k, k_values, v, v_values), mask = inputs(size, heads, heads_kv, 256, rows)
    got, want = attention(level, q, (k, v), mask, heads_kv, 256), exact(q, k_values, v_values, mask)
    assert np.abs(got - want).max() < 1e-5


@on_every_level
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1", "iq4_nl"])
@pytest.mark.parametrize("rows", [3, 9])
def test_every_type_of_row(level, kind, rows):
    """Of few query rows and of as many as have the rows of K turned."""
    q, (k, k_values, v, v_values), mask = inputs(64, 4, 2, 100, rows, kind)  # a span that is no multiple of a block
    assert np.abs(attention(level, q, (k, v), mask, 2, 100, kind) - exact(q, k_values, v_values, mask)).max() < 1e-5


@pytest.mark.slow
@on_every_level
@pytest.mark.parametrize("size, heads, heads_kv", SHAPES[:3])
def test_a_rows_bits_do_not_depend_on_its_neighbours_span_or_threads(level, size, heads, heads_kv):
    q, (k, _, v, _), mask = inputs(size, heads, heads_kv, 768, 40)
    whole = attention(level, q, (k, v), mask, heads_kv, 768)
    for rows in (1, 2, 3, 4, 7, 8, 16):
        for first in (0, 11):
            part = slice(first, first + rows)
            for threads in (1, 2, 5):
                assert np.array_equal(attention(level, q[part], (k, v), mask[part], heads_kv, 768, threads=threads), whole[part])
    mask[:, 200:] = -np.inf
    assert np.array_equal(attention(level, q, (k, v), mask, heads_kv, 256), attention(level, q, (k, v), mask, heads_kv, 768))


@pytest.mark.slow
@pytest.mark.skipif(len(LEVELS) < 2, reason="this processor has only one level")
@pytest.mark.parametrize("size, heads, heads_kv", SHAPES)
def test_all_levels_have_the_same_bits(size, heads, heads_kv):
    for rows in (1, 9):
        q, (k, _, v, _), mask = inputs(size, heads, heads_kv, 300, rows)
        first, *others = [attention(level, q, (k, v), mask, heads_kv, 300) for level in LEVELS]
        assert all(np.array_equal(first, other) for other in others)


@on_every_level
def test_slots(level):
    """Two sequences in one node: each has the bits that it has alone."""
    a, b = inputs(64, 4, 2, 256, 3, seed=1), inputs(64, 4, 2, 256, 3, seed=2)
    both = attention(level, np.concatenate([a[0], b[0]]), [np.concatenate([a[1][i], b[1][i]]) for i in (0, 2)],
                     np.concatenate([a[2], b[2]]), 2, 256, slots=2)  # fmt: skip
    for part, (q, caches, mask) in zip((both[:3], both[3:]), (a, b), strict=True):
        assert np.array_equal(part, attention(level, q, (caches[0], caches[2]), mask, 2, 256))


@on_every_level
def test_what_the_mask_hides_may_hold_anything(level):
    """Rows that no query sees: NaN and Inf in them change nothing. A query that sees nothing gives 0."""
    q, (k, _, v, _), mask = inputs(64, 4, 2, 256, 4)
    clean = attention(level, q, (k, v), mask, 2, 256)
    wide = np.concatenate([mask, np.full((4, 32), -np.inf, np.float16)], axis=1)
    dirty = [np.concatenate([rows, np.full((32, rows.shape[1]), 0x7E, np.uint8)]) for rows in (k, v)]
    assert np.array_equal(attention(level, q, dirty, wide, 2, 288), clean)
    mask[2] = -np.inf
    assert not attention(level, q, (k, v), mask, 2, 256)[2].any()


@on_every_level
def test_nan_in_a_query_stays_in_its_row(level):
    q, (k, _, v, _), mask = inputs(64, 4, 2, 256, 4)
    clean = attention(level, q, (k, v), mask, 2, 256)
    q[1, :, 5] = np.nan
    got = attention(level, q, (k, v), mask, 2, 256)
    assert np.isnan(got[1]).all() and np.array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))


@on_every_level
def test_scores_far_apart(level):
    """Weights that underflow are 0, large scores do not overflow."""
    q, (k, k_values, v, v_values), mask = inputs(64, 4, 2, 256, 3)
    q *= 300
    assert np.abs(attention(level, q, (k, v), mask, 2, 256) - exact(q, k_values, v_values, mask)).max() < 1e-3
