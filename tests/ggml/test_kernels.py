"""Our own products: what they compute, and that a row has the same bits wherever it stands."""

import numpy as np
import pytest
from architectures import params
from ggml.kernel_graphs import LEVELS, QUANTISED, bench, compute, matrix, product, scaled
from sessions import fails_with

from pyggml_spec.errors import DeviceError, EngineError
from pyggml_spec.ggml.kernels import ALL_LEVELS, FEATURES, Level, packed_shape, pick_level
from pyggml_spec.ggml.library import check, ffi, lib, new_err
from pyggml_spec.tools.quants import dequantise, quantise, type_id

KINDS = [
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4", "nvfp4", "q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k",
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "f16", "bf16", "f32",
]  # fmt: skip
BLOCK = {name: max(32, lib.ggml_blck_size(type_id(name))) for name in KINDS}
on_every_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
of_every_type = pytest.mark.parametrize("name", params(KINDS, ("q8_0", "q4_k")))


def activations(*shape, seed=1):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1)))).astype(np.float32)


def exact(name, rows, x):
    """The product of the weights as the type has them, in double precision."""
    kind = type_id(name)
    weights = np.stack([dequantise(row.tobytes(), kind, x.shape[1]) for row in rows]).astype(np.float64)
    return x.astype(np.float64) @ weights.T


def nmse(got, want):
    return float(((got - want) ** 2).sum() / (want**2).sum())


def test_levels_and_what_cannot_be_packed():
    """On x86 with AVX2 there is one; elsewhere nothing below would be tested, and this says so."""
    if not LEVELS:
        pytest.skip("this processor has none of the levels that our kernels exist for: ggml's are used")
    assert [level.name for level in LEVELS] == [name for name in ALL_LEVELS if name in {level.name for level in LEVELS}]
    assert packed_shape(type_id("tq2_0"), (256, 64)) is None and packed_shape(type_id("q4_k"), (128, 64)) is None
    assert packed_shape(type_id("q8_0"), (64, 64, 2, 2)) is None


@of_every_type
def test_packed_weights_are_no_larger_than_the_file(name):
    kind = type_id(name)
    packed, file = np.prod(packed_shape(kind, (BLOCK[name], 16))), 16 * lib.ggml_row_size(kind, BLOCK[name])
    assert file <= packed <= 1.05 * file


@pytest.mark.slow
@on_every_level
@of_every_type
@pytest.mark.parametrize("n_out", [1, 3, 16, 49, 1031])
def test_products_are_right(level, name, n_out):
    """Against double precision, and no further from it than ggml's own product of the same type, whose activations are rounded alike."""
    n_in = 3 * BLOCK[name]
    rows, x = matrix(type_id(name), n_in, n_out), activations(21, n_in)
    got, want = product(level, type_id(name), rows, x), exact(name, rows, x)
    theirs = product(None, type_id(name), rows, x)
    assert got.shape == want.shape and nmse(got, want) <= 1.05 * nmse(theirs, want) + 1e-12
    # ggml rounds activations to the type of floating-point weights, and for Q4_1 and Q5_1 their sums to F16
    assert nmse(got, theirs) < (1e-10 if name[0] == "q" and not name.endswith("_1") else 1e-3)


@pytest.mark.slow
@on_every_level
@of_every_type
@pytest.mark.parametrize("blocks, edges", [(1, [*range(2, 34)]), (11, [2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33])])
def test_a_rows_bits_do_not_depend_on_its_neighbours_or_on_threads(level, name, blocks, edges):
    n_in = blocks * BLOCK[name]
    rows, x = matrix(type_id(name), n_in, 37), activations(300, n_in)
    alone = {i: product(level, type_id(name), rows, x[i : i + 1])[0] for i in (0, *(width - 1 for width in edges), 127, 128, 299)}
    for width in [*edges, 128, 129, 300]:
        block = product(level, type_id(name), rows, x[:width], threads=1 + 2 * (width % 2))
        assert all(np.array_equal(block[i], row) for i, row in alone.items() if i < width), width


@pytest.mark.skipif(len(LEVELS) < 2, reason="this processor has only one level")
@of_every_type
def test_all_levels_have_the_same_bits(name):
    n_in = 5 * BLOCK[name]
    rows = matrix(type_id(name), n_in, 50)
    for count in (1, 5, 40):
        x = activations(count, n_in, seed=count)
        first, *others = [product(level, type_id(name), rows, x) for level in LEVELS]
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.skipif(len(LEVELS) < 2, reason="this processor has only one level")
@pytest.mark.parametrize("name", ["q4_k", "q5_k"])
def test_all_levels_round_sums_that_floats_do_not_hold_alike(name):
    rng, n_in = np.random.default_rng(3), 2 * BLOCK[name]
    blocks = rng.choice(np.array([0xDD, 0xDE, 0xEF, 0xFE, 0xFF], np.uint8), (48, 2, 144 if name == "q4_k" else 176))
    blocks[:, :, :4], blocks[:, :, 4:16] = np.frombuffer(np.array([1, 0], np.float16).tobytes(), np.uint8), 0xFF
    x = rng.uniform(0.9, 1, (9, n_in)).astype(np.float32)
    first, *others = [product(level, type_id(name), blocks.reshape(48, -1), x) for level in LEVELS]
    assert all(np.array_equal(first, other) for other in others)
    assert np.allclose(first, exact(name, blocks.reshape(48, -1), x), rtol=1e-2)


@pytest.mark.slow
@on_every_level
@pytest.mark.parametrize("name, n_in, n_out", [("q8_0", 32, 4099), ("q4_0", 64, 3), ("f16", 33, 5), ("f32", 7, 4099), ("q8_0", 96, 1)])
def test_odd_shapes(level, name, n_in, n_out):
    """Rows of floats need not be whole blocks."""
    rows, x = matrix(type_id(name), n_in, n_out), activations(3, n_in)
    assert nmse(product(level, type_id(name), rows, x), exact(name, rows, x)) < 1e-3


@on_every_level
@of_every_type
def test_extreme_weights_and_activations(level, name):
    n_in = 2 * BLOCK[name]
    sign = np.where(np.arange(n_in) % 3 == 0, -1, 1).astype(np.float32)
    weights = np.stack([np.ones(n_in, np.float32), -np.ones(n_in, np.float32), sign, -sign])
    kind, x = type_id(name), np.stack([np.ones(n_in), -np.ones(n_in), sign]).astype(np.float32)
    if kind in QUANTISED:
        rows = quantise(weights, kind)
    else:  # the first and the last places of grids, scales, and signs
        bits = np.repeat(np.array([0, 255, 15, 240], np.uint8), lib.ggml_row_size(kind, n_in)).reshape(4, -1)
        rows = scaled(bits, kind, 1)
    got, want = product(level, type_id(name), rows, x), exact(name, rows, x)
    assert np.allclose(got, want, rtol=2e-2, atol=1e-2 * n_in)
    if name == "q8_0":  # -128 is a weight that files may hold, though no quantiser writes it
        rows = rows.copy()
        rows.reshape(4, -1, 34)[:, :, 2:] = 0x80
        assert np.allclose(product(level, type_id(name), rows, x), exact(name, rows, x), rtol=1e-3)


@pytest.mark.slow
@on_every_level
@of_every_type
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(level, name, bad):
    """NaN or Inf in one activation: no output of that row is finite, and the other rows keep their bits."""
    n_in = 2 * BLOCK[name]
    rows, x = matrix(type_id(name), n_in, 19), activations(12, n_in)
    clean, place = product(level, type_id(name), rows, x), 5
    x[place, n_in // 2 + 3] = bad
    got = product(level, type_id(name), rows, x)
    assert not np.isfinite(got[place]).any() and np.array_equal(np.delete(got, place, 0), np.delete(clean, place, 0))


@on_every_level
@of_every_type
def test_zeros(level, name):
    rows = matrix(type_id(name), BLOCK[name], 17)
    assert not product(level, type_id(name), rows, np.zeros((2, BLOCK[name]), np.float32)).any()


@pytest.mark.slow
@on_every_level
@of_every_type
def test_matrices_are_packed_piece_by_piece(level, name):
    """A fused matrix comes from several tensors that end anywhere, and threads share the packing."""
    rows, x = matrix(type_id(name), BLOCK[name], 601), activations(2, BLOCK[name])
    whole = product(level, type_id(name), rows, x)
    assert np.array_equal(whole, product(level, type_id(name), rows, x, threads=2, pieces=7))


@on_every_level
@of_every_type
def test_activations_that_are_views(level, name):
    """A part of each row, from a place that no vector is aligned to, and rows in three dimensions."""
    n_in = BLOCK[name]
    rows, x = matrix(type_id(name), n_in, 20), activations(6, n_in + 5)
    want = product(level, type_id(name), rows, np.ascontiguousarray(x[:, 3 : 3 + n_in]))
    with bench(level) as (graph, memory):
        weight, whole = memory.packed(rows, type_id(name), (n_in, 20)), memory.tensor(x)
        assert np.array_equal(compute(graph, graph.matmul(weight, graph.slice(whole, 0, 3, n_in))), want)
    with bench(level) as (graph, memory):
        weight, whole = memory.packed(rows, type_id(name), (n_in, 20)), memory.tensor(x)
        part = graph.slice(graph.reshape(whole, n_in + 5, 2, 3), 0, 3, n_in)
        assert np.array_equal(compute(graph, graph.matmul(weight, part)), want)


@pytest.mark.slow
@on_every_level
@pytest.mark.parametrize("rows, n_out", [(1, 2064), (1, 40), (4, 2064), (30, 40)])
def test_bits_stay_while_it_is_measured_whether_to_ask_for_weights_ahead(level, rows, n_out):
    """The first 128 products of a kind are computed both ways, each thread for itself, and the rest as was faster: of matrices in memory and in caches."""
    weights, x = matrix(type_id("q4_k"), 1024, n_out), activations(rows, 1024)
    with bench(level, threads=2) as (graph, memory):
        out = graph.matmul(memory.packed(weights, type_id("q4_k"), (1024, n_out)), memory.tensor(x))
        first, err = compute(graph, out), new_err()
        assert np.array_equal(first, product(level, type_id("q4_k"), weights, x))
        for _ in range(150):
            check(lib.pgs_graph_compute(graph.handle, err), err)
            lib.ggml_backend_synchronize(graph.backend.handle)
            assert np.array_equal(graph.host_view(out), first)


@on_every_level
@pytest.mark.parametrize("rows, roundings", [(4, 1), (9, 2), (300, 2)])
def test_products_of_one_input_share_its_activations(level, rows, roundings):
    """But for the first of few rows, which rounds them for itself: a node that all threads wait after takes longer. F32 is rounded in no other way."""
    weights, x = matrix(type_id("q8_0"), 64, 16), activations(rows, 64)
    with bench(level) as (graph, memory):
        a, b, c = (memory.packed(weights, type_id("q8_0"), (64, 16)) for _ in range(3))
        d, x = memory.packed(matrix(type_id("f32"), 64, 16), type_id("f32"), (64, 16)), memory.tensor(x)
        graph.expand(graph.concat([graph.matmul(m, x) for m in (a, b, c, d)]))
        assert graph.op_counts() == {"native product": 4, "native rounding": roundings, "native join": 1}


@pytest.mark.slow
@on_every_level
@of_every_type
@pytest.mark.parametrize("rows, threads", [(1, 1), (1, 3), (7, 2), (8, 3), (9, 2), (40, 2)])
def test_what_rounds_and_adds_for_itself_has_the_bits_of_single_nodes(level, name, rows, threads):
    """Products of few rows round what they read, and those of any add what is added to them, a row for each or one for all; a second sum is a node."""
    n_in, n_out = 2 * BLOCK[name], 49
    weights, x, added = matrix(type_id(name), n_in, n_out), activations(rows, n_in), activations(rows, n_out, seed=2)
    want = product(level, type_id(name), weights, np.concatenate([x, activations(9, n_in, seed=3)]))[:rows]
    for term in (added, added[:1]):
        with bench(level, threads) as (graph, memory):
            out, more = graph.matmul(memory.packed(weights, type_id(name), (n_in, n_out)), memory.tensor(x)), memory.tensor(term)
            got = compute(graph, graph.add(out, more))
            assert np.array_equal(got, want + term) and "ADD" not in graph.op_counts()
    with bench(level, threads) as (graph, memory):
        more = memory.tensor(added)
        out = graph.matmul(memory.packed(weights, type_id(name), (n_in, n_out)), memory.tensor(x))
        both = graph.concat([out, graph.add(graph.add(out, more), more)])  # who else reads the product has it all the same
        assert np.array_equal(compute(graph, both), np.concatenate([want, want + added + added], axis=1))
        assert graph.op_counts()["ADD"] == 1


@pytest.mark.slow
@on_every_level
@pytest.mark.parametrize("name", ["q8_0", "q4_K", "f32"])
@pytest.mark.parametrize("made", ["norm", "rms_norm", "gated_norm", "swiglu", "sigmoid_gated"])
def test_products_make_the_norms_and_gates_that_they_read(level, name, made):
    n_in, kind = 512, type_id(name)
    rows, wide = matrix(kind, n_in, 48), activations(9, 2 * n_in)
    wide[5, 3] = np.nan
    weight = np.linspace(0.5, 2, n_in, dtype=np.float32)

    def node(graph, memory, x):
        x = memory.tensor(x)
        values, gate = graph.slice(x, 0, 0, n_in), graph.slice(x, 0, n_in, n_in)
        if made == "rms_norm":
            return graph.rms_norm(values, memory.tensor(weight), 1e-6)
        if made == "gated_norm":  # of heads
            return graph.gated_norm(graph.heads(graph.cont(values), 64, 8), memory.tensor(weight[:64]), 1e-6, gate)
        if made == "sigmoid_gated":
            return graph.sigmoid_gated(graph.cont(values), graph.heads(x, n_in, 1, 2 * n_in, n_in))
        return graph.rms_norm(values, None, 1e-6) if made == "norm" else graph.gated("swiglu", gate, values)

    with bench(level) as (graph, memory):
        given = compute(graph, node(graph, memory, wide))
    with bench(level) as (graph, memory):
        want = compute(graph, graph.matmul(memory.packed(rows, kind, (n_in, 48)), memory.tensor(given)))
    for count, threads in ((9, 1), (9, 4), (1, 1), (1, 3)):
        with bench(level, threads) as (graph, memory):
            got = compute(graph, graph.matmul(memory.packed(rows, kind, (n_in, 48)), node(graph, memory, wide[:count])))
            assert np.array_equal(got, want[:count], equal_nan=True)
            assert {"native norm", "native gate"}.isdisjoint(graph.op_counts())
    with bench(level, 2) as (graph, memory):
        x = node(graph, memory, wide)
        both = graph.concat([x, graph.matmul(memory.packed(rows, kind, (n_in, 48)), x)])
        assert np.array_equal(compute(graph, both), np.concatenate([given, want], axis=1), equal_nan=True)


@pytest.mark.slow
@on_every_level
@pytest.mark.parametrize(
    "name, down, n", [("q8_0", "q8_0", 320), ("q4_0", "f16", 96), ("f32", "f32", 32), ("q8_0", "q4_K", 768), ("q4_k", "q6_K", 8448)]
)
@pytest.mark.parametrize("last", [False, True])
def test_what_gates_the_other_half_of_a_product_is_rounded_where_it_is_computed(level, name, down, n, last):
    """As one node with the bits of three, for as many rows as drafting ever has; if something is added to the halves first, as ever."""
    n_in, kind, n_out = 2 * BLOCK[name], type_id(name), 33
    both, rows, x = matrix(kind, n_in, 2 * n), matrix(type_id(down), n, n_out, seed=1), activations(33, n_in)
    x[3, 5] = np.nan

    def gated(graph, joined):
        halves = graph.slice(joined, 0, 0, n), graph.slice(joined, 0, n, n)
        return graph.gated("swiglu", *(reversed(halves) if last else halves))

    with bench(level) as (graph, memory):
        made = compute(graph, gated(graph, memory.tensor(product(level, kind, both, x))))
    want = product(level, type_id(down), rows, made)
    for count, threads in ((1, 1), (1, 3), (4, 2), (8, 1), (9, 2), (16, 3), (32, 2), (33, 2)):
        with bench(level, threads) as (graph, memory):
            joined = graph.matmul(memory.packed(both, kind, (n_in, 2 * n)), memory.tensor(x[:count]))
            got = compute(graph, graph.matmul(memory.packed(rows, type_id(down), (n, n_out)), gated(graph, joined)))
            assert np.array_equal(got, want[:count], equal_nan=True)
            assert ("native gated product" in graph.op_counts()) == (count <= 32)
    with bench(level, 2) as (graph, memory):
        more = memory.tensor(np.ones((4, 2 * n), np.float32))
        joined = graph.add(graph.matmul(memory.packed(both, kind, (n_in, 2 * n)), memory.tensor(x[4:8])), more)
        compute(graph, graph.matmul(memory.packed(rows, type_id(down), (n, n_out)), gated(graph, joined)))
        assert "native gated product" not in graph.op_counts()


@pytest.mark.slow
@on_every_level
@of_every_type
@pytest.mark.parametrize("threads", [1, 3])
def test_outputs_that_are_shared_by_sections(level, name, threads):
    """As the heads of q, k and v are, with something after them; sections that pairs of groups do not fill are left alone."""
    n_in, kind = 2 * BLOCK[name], type_id(name)
    rows, x = matrix(kind, n_in, 273), activations(12, n_in)
    want = product(level, kind, rows, x)
    for first, later in ((32, 96), (64, 64), (128, 512), (16, 32), (48, 96)):
        with bench(level, threads) as (graph, memory):
            out = graph.matmul(memory.packed(rows, kind, (n_in, 273)), memory.tensor(x))
            part = graph.slice(out, 0, 0, 100)
            lib.pgs_share_sections(part, first, later)
            assert np.array_equal(compute(graph, out), want)


@of_every_type
def test_rows_of_a_packed_table(name):
    """What ggml looks up in the file's rows, to the rounding of one fused step; rows that do not exist are NaN."""
    n = 2 * BLOCK[name]
    rows, index = matrix(type_id(name), n, 37), np.array([36, 0, 17, 36, 5], np.int32)
    want = np.stack([dequantise(rows[i].tobytes(), type_id(name), n) for i in index])
    with bench() as (graph, memory):
        table = memory.packed(rows, type_id(name), (n, 37))
        got = compute(graph, graph.rows(table, memory.tensor(index, lib.GGML_TYPE_I32)))
    assert np.allclose(got, want, rtol=1e-6, atol=1e-6)
    with bench() as (graph, memory):
        table = memory.packed(rows, type_id(name), (n, 37))
        wrong = memory.tensor(np.array([48, -1], np.int32), lib.GGML_TYPE_I32)
        assert np.isnan(compute(graph, graph.rows(table, wrong))).all()


@on_every_level
def test_operands_that_do_not_fit_are_refused(level):
    with bench(level) as (graph, memory):
        weight = memory.packed(matrix(type_id("q8_0"), 64, 16), type_id("q8_0"), (64, 16))
        fails_with(EngineError, "matmul", lambda: graph.matmul(weight, memory.tensor(np.zeros((2, 32), np.float32))))
        fails_with(EngineError, "rows", lambda: graph.rows(weight, memory.tensor(np.zeros((2, 32), np.float32))))


@pytest.mark.skipif(not LEVELS, reason="there is nothing to choose from")
def test_the_level_is_chosen_by_name(monkeypatch):
    monkeypatch.delenv(FEATURES, raising=False)
    assert pick_level(None, "cpu") == pick_level("native", "cpu") == LEVELS[0]
    assert pick_level("ggml", "cpu") is None and pick_level(None, "gpu") is None
    for level in LEVELS:
        monkeypatch.setenv(FEATURES, level.name)
        assert pick_level(None, "cpu") == level
    monkeypatch.setenv(FEATURES, "none")
    assert pick_level(None, "cpu") is None
    fails_with(DeviceError, "do not run on this processor", pick_level, "native", "cpu")
    monkeypatch.setenv(FEATURES, "sse9")
    fails_with(DeviceError, "'sse9'; it has to be one of", pick_level, None, "cpu")


def test_levels_that_are_refused(monkeypatch):
    arm = Level("neondot", LEVELS[0].handle if LEVELS else None)
    monkeypatch.setattr("pyggml_spec.ggml.kernels.levels", lambda: [arm])
    monkeypatch.delenv(FEATURES, raising=False)
    assert pick_level(None, "cpu") is None and pick_level("native", "cpu") == arm
    monkeypatch.setenv(FEATURES, "neondot")
    assert pick_level(None, "cpu") == arm
    monkeypatch.delenv(FEATURES, raising=False)
    fails_with(DeviceError, "'fast'", pick_level, "fast", "cpu")
    fails_with(DeviceError, "run on CPUs", pick_level, "native", "gpu")
    monkeypatch.setattr("pyggml_spec.ggml.kernels.levels", lambda: LEVELS[-1:])
    monkeypatch.setenv(FEATURES, "avx512vnni" if not LEVELS or LEVELS[-1].name != "avx512vnni" else "avx2")
    fails_with(DeviceError, "does not have", pick_level, None, "cpu")


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
    rng, p = np.random.default_rng(seed), 1.0 / (1 + np.arange(n_expert)) ** 1.5
    return np.stack([rng.choice(n_expert, n_used, replace=False, p=p / p.sum()) for _ in range(rows)])


def one_by_one(level, name, weights, x, chosen):
    """The same by dense products, an expert at a time."""
    out = np.full((*chosen.shape, weights.shape[1]), np.nan, np.float32)
    rows = np.broadcast_to(x, (*chosen.shape, x.shape[2]))
    for expert in np.unique(chosen):
        out[chosen == expert] = product(level, type_id(name), weights[expert], rows[chosen == expert])
    return out


@pytest.mark.slow
@of_every_type
@pytest.mark.parametrize("level, n_out", [(LEVELS[0], 1), *((level, 49) for level in LEVELS)])
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
def test_what_is_not_finite_stays_in_its_row_of_experts(level, name, bad):
    n_in = 2 * BLOCK[name]
    weights, x, chosen = experts_of(name, n_in, 19, 4), activations(12, 1, n_in), choices(12, 2, 4)
    clean = routed(level, name, weights, x, chosen)
    x[5, 0, n_in // 2 + 3] = bad
    for packed in (True, False):
        got = routed(level, name, weights, x, chosen, packed=packed)
        assert not np.isfinite(got[5]).any() and np.array_equal(np.delete(got, 5, 0), np.delete(clean, 5, 0))


@on_every_level
def test_unknown_and_repeated_experts(level):
    """A damaged choice reads no memory that is not the weights', and the engine notices NaN."""
    weights, x, chosen = experts_of("q8_0", 64, 20, 4), activations(9, 1, 64), choices(9, 2, 4)
    clean = routed(level, "q8_0", weights, x, chosen)
    chosen[2, 1], chosen[7, 0] = 4, -1
    for packed in (True, False):
        got, wrong = routed(level, "q8_0", weights, x, chosen, 2, packed), np.zeros(chosen.shape, bool)
        wrong[2, 1] = wrong[7, 0] = True
        assert np.isnan(got[wrong]).all() and np.array_equal(got[~wrong], clean[~wrong])
    weights, x = experts_of("q4_0", 64, 20, 4), activations(6, 1, 64)
    got = routed(level, "q4_0", weights, x, np.full((6, 3), 2))
    assert np.array_equal(got[:, 0], got[:, 1]) and np.array_equal(got[:, 0], got[:, 2])


@pytest.mark.skipif(len(LEVELS) < 2, reason="this processor has only one level")
@of_every_type
def test_experts_have_the_same_bits_at_every_level(name):
    n_in = 5 * BLOCK[name]
    weights, x, chosen = experts_of(name, n_in, 50, 5), activations(20, 1, n_in), choices(20, 2, 5)
    for packed in (True, False):
        first, *others = [routed(level, name, weights, x, chosen, packed=packed) for level in LEVELS]
        assert all(np.array_equal(first, other) for other in others)


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


def exact_attention(q, k, v, mask):
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
    got, want = attention(level, q, (k, v), mask, heads_kv, 256), exact_attention(q, k_values, v_values, mask)
    assert np.abs(got - want).max() < 1e-5


@on_every_level
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1", "iq4_nl"])
@pytest.mark.parametrize("rows", [3, 9])
def test_every_type_of_row(level, kind, rows):
    """Of few query rows and of as many as have the rows of K turned."""
    q, (k, k_values, v, v_values), mask = inputs(64, 4, 2, 100, rows, kind)  # a span that is no multiple of a block
    assert np.abs(attention(level, q, (k, v), mask, 2, 100, kind) - exact_attention(q, k_values, v_values, mask)).max() < 1e-5


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
def test_attention_has_the_same_bits_at_every_level(size, heads, heads_kv):
    for rows in (1, 9):
        q, (k, _, v, _), mask = inputs(size, heads, heads_kv, 300, rows)
        first, *others = [attention(level, q, (k, v), mask, heads_kv, 300) for level in LEVELS]
        assert all(np.array_equal(first, other) for other in others)


@on_every_level
def test_attention_over_slots_and_hidden_rows(level):
    a, b = inputs(64, 4, 2, 256, 3, seed=1), inputs(64, 4, 2, 256, 3, seed=2)
    both = attention(level, np.concatenate([a[0], b[0]]), [np.concatenate([a[1][i], b[1][i]]) for i in (0, 2)],
                     np.concatenate([a[2], b[2]]), 2, 256, slots=2)  # fmt: skip
    for part, (q, caches, mask) in zip((both[:3], both[3:]), (a, b), strict=True):
        assert np.array_equal(part, attention(level, q, (caches[0], caches[2]), mask, 2, 256))
    # Rows that no query sees: NaN and Inf in them change nothing. A query that sees nothing gives 0.
    q, (k, _, v, _), mask = inputs(64, 4, 2, 256, 4)
    clean = attention(level, q, (k, v), mask, 2, 256)
    wide = np.concatenate([mask, np.full((4, 32), -np.inf, np.float16)], axis=1)
    dirty = [np.concatenate([rows, np.full((32, rows.shape[1]), 0x7E, np.uint8)]) for rows in (k, v)]
    assert np.array_equal(attention(level, q, dirty, wide, 2, 288), clean)
    mask[2] = -np.inf
    assert not attention(level, q, (k, v), mask, 2, 256)[2].any()
    q, (k, _, v, _), mask = inputs(64, 4, 2, 256, 4)
    clean = attention(level, q, (k, v), mask, 2, 256)
    q[1, :, 5] = np.nan
    got = attention(level, q, (k, v), mask, 2, 256)
    assert np.isnan(got[1]).all() and np.array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))
    q, (k, k_values, v, v_values), mask = inputs(64, 4, 2, 256, 3)
    q *= 300
    assert np.abs(attention(level, q, (k, v), mask, 2, 256) - exact_attention(q, k_values, v_values, mask)).max() < 1e-3
