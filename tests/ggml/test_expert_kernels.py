"""Our own products with routed experts: each row is that of the dense product with its expert's matrix, bit for bit, however experts are stored."""

import numpy as np
import pytest
from architectures import params
from ggml.kernel_graphs import LEVELS, bench, compute, matrix, product

from pyggml_spec.ggml.kernels import packed_shape
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.tools.quants import type_id

KINDS = [
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4", "q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k", "f16", "bf16", "f32",
]  # fmt: skip
BLOCK = {name: max(32, lib.ggml_blck_size(type_id(name))) for name in KINDS}

on_every_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
of_every_type = pytest.mark.parametrize("name", params(KINDS, ("q8_0", "q4_k")))


def experts_of(name, n_in, n_out, n_expert, seed=0):
    """U8 [n_expert, n_out, row bytes]."""
    return matrix(type_id(name), n_in, n_out * n_expert, seed).reshape(n_expert, n_out, -1)


def routed(level, name, weights, x, chosen, threads=1, packed=True):
    """x F32 [T, 1 or n_used, n_in] by the chosen experts I32 [T, n_used] -> F32 [T, n_used, n_out]; by ggml with ``level`` None."""
    kind, (n_expert, n_out, _), n_in = type_id(name), weights.shape, x.shape[2]
    with bench(level, threads) as (graph, memory):
        if level is None or not packed:
            experts = memory.tensor(weights, kind, (n_in, n_out, n_expert))
        else:
            experts = memory.packed_experts(level, weights, kind, (n_in, n_out, n_expert), threads)
        order = memory.tensor(chosen.astype(np.int32), lib.GGML_TYPE_I32)
        out = compute(graph, graph.matmul_experts(experts, memory.tensor(x), order))
    return out.reshape(*chosen.shape, n_out)


def choices(rows, n_used, n_expert, seed=3):
    """Different experts for each row, the first ones far more often."""
    rng = np.random.default_rng(seed)
    p = 1.0 / (1 + np.arange(n_expert)) ** 1.5
    return np.stack([rng.choice(n_expert, n_used, replace=False, p=p / p.sum()) for _ in range(rows)])


def activations(*shape, seed=1):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1)))).astype(np.float32)


def one_by_one(level, name, weights, x, chosen):
    """The same by dense products, an expert at a time."""
    out = np.full((*chosen.shape, weights.shape[1]), np.nan, np.float32)
    rows = np.broadcast_to(x, (*chosen.shape, x.shape[2]))
    for expert in np.unique(chosen):
        out[chosen == expert] = product(level, type_id(name), weights[expert], rows[chosen == expert])
    return out


@pytest.mark.slow
@on_every_level
@of_every_type
@pytest.mark.parametrize("n_out", [1, 16, 49])
def test_rows_are_those_of_dense_products(level, name, n_out):
    """Packed and as a file has them; one row and many, with experts of one row, of a whole tile, of several tiles, and experts that are not chosen; a
    row that its choices share and a row for each; one thread and three."""
    n_in, n_expert = 3 * BLOCK[name], 7
    weights = experts_of(name, n_in, n_out, n_expert)
    for rows, own in ((1, 1), (1, 3), (2, 1), (9, 3), (70, 1), (70, 3)):
        x, chosen = activations(rows, own, n_in), choices(rows, 3, n_expert)
        want = one_by_one(level, name, weights, x, chosen)
        for packed in (True, False):
            for threads in (1, 3):
                assert np.array_equal(routed(level, name, weights, x, chosen, threads, packed), want), (rows, own, packed, threads)


@pytest.mark.slow
@on_every_level
@of_every_type
def test_products_are_those_of_ggml_but_for_rounding(level, name):
    n_in = 2 * BLOCK[name]
    weights, x, chosen = experts_of(name, n_in, 40, 6), activations(33, 1, n_in), choices(33, 2, 6)
    got, theirs = routed(level, name, weights, x, chosen), routed(None, name, weights, x, chosen)
    # ggml rounds activations to the type of floating-point weights, and for Q4_1 and Q5_1 their sums to F16
    assert ((got - theirs) ** 2).sum() / (theirs**2).sum() < (1e-10 if name[0] in "qm" and not name.endswith("_1") else 1e-3)


@pytest.mark.slow
@on_every_level
@pytest.mark.parametrize(
    "name, n_in, n_out", [("q8_0", 4096, 33), ("f32", 4096, 17), ("q6_k", 2048, 16), ("mxfp4", 2880, 32), ("f16", 33, 5), ("f32", 7, 20)]
)
def test_weights_and_tiles_that_do_not_fit_a_cache(level, name, n_in, n_out):
    """Several pieces of a row, more tiles than are multiplied at once, and rows of floats that are no whole blocks."""
    weights, x, chosen = experts_of(name, n_in, n_out, 3), activations(290, 1, n_in), choices(290, 2, 3)
    want = one_by_one(level, name, weights, x, chosen)
    for packed in (True, False):
        assert np.array_equal(routed(level, name, weights, x, chosen, 2, packed), want)


@on_every_level
def test_weights_that_are_asked_for_ahead(level):
    """More than a second-level cache holds, a few rows: multiplied in small pieces. Each expert alone is smaller, and is not."""
    weights, x, chosen = experts_of("q8_0", 4096, 161, 3), activations(3, 1, 4096), choices(3, 2, 3)
    assert weights.nbytes > 1 << 20 > weights[0].nbytes
    assert np.array_equal(routed(level, "q8_0", weights, x, chosen, 2), one_by_one(level, "q8_0", weights, x, chosen))


@on_every_level
@of_every_type
def test_packing_experts_is_packing_matrices(level, name):
    """Whatever bytes a file holds; the last group of outputs is not whole."""
    kind, n_in, n_out, n_expert = type_id(name), 2 * BLOCK[name], 35, 3
    size = lib.ggml_row_size(kind, n_in)
    rows = np.random.default_rng(5).integers(0, 256, (n_expert, n_out, size), np.uint8)
    ne = packed_shape(kind, (n_in, n_out, n_expert))
    with bench(level) as (_, memory):
        got = memory.packed_experts(level, rows, kind, (n_in, n_out, n_expert), 2)
        got = bytes(ffi.buffer(got.tensor.data, int(np.prod(ne))))
        for expert, piece in enumerate(np.split(np.frombuffer(got, np.uint8), n_expert)):
            one = memory.packed(rows[expert], kind, (n_in, n_out))
            assert bytes(ffi.buffer(one.tensor.data, piece.size)) == piece.tobytes(), expert


@pytest.mark.slow
@on_every_level
@of_every_type
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(level, name, bad):
    n_in = 2 * BLOCK[name]
    weights, x, chosen = experts_of(name, n_in, 19, 4), activations(12, 1, n_in), choices(12, 2, 4)
    clean = routed(level, name, weights, x, chosen)
    x[5, 0, n_in // 2 + 3] = bad
    for packed in (True, False):
        got = routed(level, name, weights, x, chosen, packed=packed)
        assert not np.isfinite(got[5]).any()
        assert np.array_equal(np.delete(got, 5, 0), np.delete(clean, 5, 0))


@on_every_level
def test_experts_that_do_not_exist(level):
    """A damaged choice reads no memory that is not the weights', and the engine notices NaN."""
    weights, x, chosen = experts_of("q8_0", 64, 20, 4), activations(9, 1, 64), choices(9, 2, 4)
    clean = routed(level, "q8_0", weights, x, chosen)
    chosen[2, 1], chosen[7, 0] = 4, -1
    for packed in (True, False):
        got = routed(level, "q8_0", weights, x, chosen, 2, packed)
        wrong = np.zeros(chosen.shape, bool)
        wrong[2, 1] = wrong[7, 0] = True
        assert np.isnan(got[wrong]).all()
        assert np.array_equal(got[~wrong], clean[~wrong])


@on_every_level
def test_a_token_may_use_an_expert_twice(level):
    weights, x = experts_of("q4_0", 64, 20, 4), activations(6, 1, 64)
    got = routed(level, "q4_0", weights, x, np.full((6, 3), 2))
    assert np.array_equal(got[:, 0], got[:, 1]) and np.array_equal(got[:, 0], got[:, 2])


@pytest.mark.skipif(len(LEVELS) < 2, reason="this processor has only one level")
@of_every_type
def test_all_levels_have_the_same_bits(name):
    n_in = 5 * BLOCK[name]
    weights, x, chosen = experts_of(name, n_in, 50, 5), activations(20, 1, n_in), choices(20, 2, 5)
    for packed in (True, False):
        first, *others = [routed(level, name, weights, x, chosen, packed=packed) for level in LEVELS]
        assert all(np.array_equal(first, other) for other in others)
