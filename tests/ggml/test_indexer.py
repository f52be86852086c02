"""What an indexer chooses: the visible positions of the largest scores, whatever lies in hidden rows."""

import numpy as np
import pytest
from ggml.kernel_graphs import bench

from pyggml_spec.ggml.library import check, ffi, lib, new_err

KV_BUCKET, SIZE = 256, 64
HIDDEN = -np.inf


def read(graph, node, kind):
    """The values of a node, in ggml's order of dimensions turned around."""
    graph.keep_output(node)
    graph.plan()
    err = new_err()
    check(lib.pgs_graph_compute(graph.handle, err), err)
    out = np.empty(tuple(reversed(list(node.ne))), kind)
    lib.ggml_backend_tensor_get(node, ffi.from_buffer(out), 0, out.nbytes)
    return out


def chosen(mask, scores, k):
    """mask and scores [slots, rows, KV_BUCKET]: the mask of the best, F16."""
    slots, rows, span = mask.shape
    with bench() as (graph, memory):
        tensors = (
            memory.tensor(mask.astype(np.float16), lib.GGML_TYPE_F16, (span, rows, 1, slots)),
            memory.tensor(scores, shape=(span, rows, 1, slots)),
        )
        return read(graph, graph.top_k_mask(*tensors, k), np.float16).reshape(mask.shape)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("alike", [False, True], ids=["all different", "half of them 0"])
def test_only_what_is_visible_is_chosen(slots, alike):
    """Rows that see 1 to 199 positions, 32 chosen: all of them where there are fewer, and never one after."""
    rng, rows, k = np.random.default_rng(slots), 12, 32
    seen = rng.integers(1, 200, (slots, rows))
    seen[:, :3] = 1, k, k + 1
    mask = np.where(np.arange(KV_BUCKET) < seen[..., None], 0.0, HIDDEN)
    scores = rng.standard_normal((slots, rows, KV_BUCKET)).astype(np.float32)
    if alike:
        scores = np.maximum(scores, 0)
    scores = (scores + mask).astype(np.float32)
    out = chosen(mask, scores, k)
    assert set(np.unique(out)) == {0.0, HIDDEN}
    for of_slot, of_scores, of_seen in zip(out, scores, seen, strict=True):
        for row, values, n in zip(of_slot, of_scores, of_seen, strict=True):
            picked = np.flatnonzero(row == 0)
            assert len(picked) == min(n, k) and picked.max() < n
            np.testing.assert_array_equal(np.sort(values[picked]), np.sort(values)[KV_BUCKET - len(picked) :])


def test_the_choice_does_not_depend_on_the_span():
    """A row in a block that crosses a span boundary sees what it sees alone: also among equal scores."""
    rng = np.random.default_rng(3)
    scores = np.maximum(rng.standard_normal((1, 6, 2 * KV_BUCKET)), 0).astype(np.float32)
    mask = np.where(np.arange(2 * KV_BUCKET) < 200, np.zeros((1, 6, 1)), HIDDEN)
    scores[..., 200:] = HIDDEN
    whole = chosen(mask, scores, 20)
    np.testing.assert_array_equal(whole[..., :KV_BUCKET], chosen(mask[..., :KV_BUCKET].copy(), scores[..., :KV_BUCKET].copy(), 20))
    np.testing.assert_array_equal(whole[:, 2:3], chosen(mask[:, 2:3].copy(), scores[:, 2:3].copy(), 20))


@pytest.mark.parametrize("slots", [1, 2])
def test_scores(slots):
    """Weighted sums over heads of what is positive, each slot over its own rows; garbage after the span does not matter."""
    rng, heads, rows = np.random.default_rng(4), 3, 4
    q = rng.standard_normal((slots * rows, heads, SIZE)).astype(np.float32)
    keys = rng.standard_normal((slots, KV_BUCKET + 8, SIZE)).astype(np.float16)
    keys[:, KV_BUCKET:] = np.nan
    weights = rng.standard_normal((slots * rows, heads)).astype(np.float32)
    mask = np.where(rng.random((slots, rows, KV_BUCKET)) < 0.5, 0.0, HIDDEN)
    with bench() as (graph, memory):
        cache = memory.tensor(keys, lib.GGML_TYPE_F16)
        hidden = memory.tensor(mask.astype(np.float16), lib.GGML_TYPE_F16, (KV_BUCKET, rows, 1, slots))
        got = read(graph, graph.index_scores(memory.tensor(q), cache, memory.tensor(weights), hidden, KV_BUCKET), np.float32).reshape(
            mask.shape
        )
    each = np.einsum("srhd,spd->srhp", q.reshape(slots, rows, heads, SIZE).astype(np.float64), keys[:, :KV_BUCKET].astype(np.float64))
    want = np.einsum("srhp,srh->srp", np.maximum(each, 0), weights.reshape(slots, rows, heads).astype(np.float64)) + mask
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
