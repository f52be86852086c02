"""Our own norms, convolutions and delta rule: right, and the same bits in every cut of the rows, with any number of threads, at every level."""

import ctypes
import itertools
import mmap
from contextlib import ExitStack, closing

import numpy as np
import pytest
from ggml.kernel_graphs import LEVELS, Memory, bench, compute

from pyggml_spec.ggml.device import Backend, devices, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.kernels import Packed, levels, packed_shape
from pyggml_spec.ggml.library import check, ffi, lib, new_err, text
from pyggml_spec.sampling.sampler import DRAW_OPTIONS, Sampler, Sampling

on_every_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
RNG = np.random.default_rng


def silu(x):
    return x / (1 + np.exp(-x))


def norm(level, x, weight=None, gate=None, threads=1, eps=1e-6):
    with bench(level, threads) as (graph, memory):
        tensor = memory.tensor(x)
        if gate is not None:
            heads = graph.heads(tensor, len(weight), x.shape[1] // len(weight))
            return compute(graph, graph.gated_norm(heads, memory.tensor(weight), eps, memory.tensor(gate)))
        return compute(graph, graph.rms_norm(tensor, None if weight is None else memory.tensor(weight), eps))


@on_every_level
@pytest.mark.parametrize("n", [1, 3, 16, 17, 63, 64, 65, 112, 512, 5125])
def test_norms(level, n):
    x, weight = 3 * RNG(n).standard_normal((5, n), np.float32), RNG(1).standard_normal(n, np.float32)
    want = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6)
    got = norm(level, x, weight)
    np.testing.assert_allclose(got, want * weight, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(norm(level, x), want, rtol=2e-6, atol=1e-7)
    assert np.array_equal(got, np.concatenate([norm(level, row[None], weight) for row in x]))
    assert np.array_equal(got, norm(level, x, weight, threads=3)) and np.array_equal(got, norm(LEVELS[-1], x, weight))


@on_every_level
def test_gated_norms(level):
    """Each head is normed alone; gates may be of any size."""
    x, weight = RNG(2).standard_normal((4, 3 * 48), np.float32), RNG(3).standard_normal(48, np.float32)
    gate = np.float32(30) * RNG(4).standard_normal((4, 3 * 48), np.float32)
    heads = x.reshape(4, 3, 48).astype(np.float64)
    want, got = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-6) * weight, norm(level, x, weight, gate)
    np.testing.assert_allclose(got, want.reshape(4, -1) * silu(gate.astype(np.float64)), rtol=3e-6, atol=1e-7)
    assert np.array_equal(got, norm(LEVELS[-1], x, weight, gate, threads=2))


@on_every_level
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_of_what_is_not_finite(level, bad):
    x = np.ones((3, 100), np.float32)
    x[1, 97] = bad
    got = norm(level, x, np.ones(100, np.float32))
    assert np.isnan(got[1, 97]) and np.allclose(got[[0, 2]], 1)


TAPS = 4


class Layer:
    """One delta-net layer of random weights: ``heads_k`` heads of q and k, ``heads`` of v, of ``size`` values."""

    def __init__(self, size, heads_k, heads, rows, repeat=1, seed=0):
        rng = RNG(seed)
        self.size, self.heads_k, self.heads, self.rows, self.repeat = size, heads_k, heads, rows, repeat
        self.channels = size * (2 * heads_k + heads)
        self.sections = size * heads_k, size * heads
        self.x = rng.standard_normal((TAPS - 1 + rows, self.channels), np.float32)
        self.taps = rng.standard_normal((self.channels, TAPS), np.float32)
        self.beta, self.alpha = rng.standard_normal((2, rows, heads), np.float32)
        self.dt, self.a = rng.standard_normal(heads, np.float32), -np.exp(rng.standard_normal(heads, np.float32))
        self.state = rng.standard_normal((heads, size, size), np.float32)

    def exact(self):
        """Outputs [rows, heads, size] and the state after the last row, in F64."""
        x = self.x.astype(np.float64)
        mixed = silu(sum(x[k : k + self.rows] * self.taps[:, k] for k in range(TAPS)))
        q, k = mixed[:, : 2 * self.heads_k * self.size].reshape(self.rows, 2, self.heads_k, self.size).transpose(1, 0, 2, 3)
        q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        v = mixed[:, 2 * self.heads_k * self.size :].reshape(self.rows, self.heads, self.size)
        q, k = (np.repeat(y, self.repeat, axis=1) for y in (q, k))  # the heads that v-heads go with in turn
        n = self.heads_k * self.repeat
        decay = np.exp(np.log1p(np.exp(self.alpha.astype(np.float64) + self.dt)) * self.a)
        beta = 1 / (1 + np.exp(-self.beta.astype(np.float64)))
        state, out = self.state.astype(np.float64), np.empty((self.rows, self.heads, self.size))
        for t, h in itertools.product(range(self.rows), range(self.heads)):
            s, key = state[h], k[t, h % n]
            s *= decay[t, h]
            s += np.outer((v[t, h] - s @ key) * beta[t, h], key)
            out[t, h] = s @ q[t, h % n] / np.sqrt(self.size)
        return out, state

    def run(self, level, first=0, rows=None, state=None, threads=1, pending=None, on=None):
        """Computes some of the rows: outputs, the state after them, and with ``pending`` that which a replay of ``pending`` rows leaves."""
        rows = self.rows if rows is None else rows
        with bench(level, threads) as (graph, memory):
            part = slice(first, first + rows)
            mixed = lib.pgs_convolution(
                graph.ctx, level.handle, memory.tensor(self.x[first : first + rows + TAPS - 1]), memory.tensor(self.taps), *self.sections
            )
            states = memory.tensor((self.state if state is None else state)[None])
            flag = memory.tensor(np.ascontiguousarray(on[part, None])) if on is not None else ffi.NULL
            given = [memory.tensor(x) for x in (self.beta[part], self.alpha[part])]
            given = [ffi.NULL, *given, ffi.NULL, ffi.NULL, memory.tensor(self.dt), memory.tensor(self.a), flag, ffi.NULL, ffi.NULL, 0, 1e-6]
            inputs = ffi.new("pgs_delta_inputs *", given)
            if pending is None:
                node = lib.pgs_delta_rule(graph.ctx, level.handle, mixed, inputs, self.repeat, states, True, ffi.NULL, ffi.NULL, 0, 0)
                out = compute(graph, node)
                return out.reshape(rows, self.heads, self.size), read(states, self.state)
            each, n = self.heads * rows, self.heads_k * self.repeat
            qk = memory.tensor(np.full((rows, 2 * self.heads_k * self.repeat, self.size), np.nan, np.float32))
            gates = memory.tensor(np.full(2 * each, np.nan, np.float32))
            graph.keep_output(mixed)
            out = lib.pgs_delta_rule(graph.ctx, level.handle, mixed, inputs, self.repeat, states, False, qk, gates, each, rows)
            graph.expand(out)
            keep = memory.tensor((np.arange(rows) < pending).astype(np.float32))
            kv = [
                lib.ggml_view_3d(graph.ctx, qk, self.size, n, rows, qk.nb[1], qk.nb[2], n * qk.nb[1]),
                lib.ggml_view_3d(graph.ctx, mixed, self.size, self.heads, rows, 4 * self.size, mixed.nb[1], 8 * self.heads_k * self.size),
            ]
            graph.keep_output(out)
            compute(graph, lib.pgs_delta_replay(graph.ctx, level.handle, *kv, gates, each, states, keep, 1))
            return graph.host_view(out).reshape(rows, self.heads, self.size).copy(), read(states, self.state)


def read(tensor, like):
    out = np.empty_like(like)
    lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(out), 0, out.nbytes)
    return out


SIZES = [(16, 1, 3, 1), (32, 2, 4, 2), (64, 4, 8, 1), (64, 2, 12, 3), (128, 2, 6, 1), (256, 1, 1, 1)]


@pytest.mark.slow
@on_every_level
@pytest.mark.parametrize("size, heads_k, heads, repeat", SIZES)
def test_delta_layers(level, size, heads_k, heads, repeat):
    layer = Layer(size, heads_k, heads, 37, repeat)
    want, state = layer.exact()
    got, left = layer.run(level)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max() and np.abs(left - state).max() < 2e-5 * np.abs(state).max()
    for cuts in ([1] * 37, [5, 16, 16]):
        s, outs, first = layer.state, [], 0
        for n in cuts:
            out, s = layer.run(level, first, n, s)
            outs.append(out)
            first += n
        assert np.array_equal(np.concatenate(outs), got) and np.array_equal(s, left)
    for other, threads in ((level, 2), (level, 7), (LEVELS[-1], 3)):
        out, s = layer.run(other, threads=threads)
        assert np.array_equal(out, got) and np.array_equal(s, left)


@on_every_level
@pytest.mark.parametrize("accepted, repeat", [(0, 1), (1, 1), (6, 2), (20, 1), (20, 2)])
def test_a_pending_block_and_its_replay(level, accepted, repeat):
    layer = Layer(64, 2, 4, 20, repeat)
    want, state = layer.run(level)[0], layer.run(level, rows=accepted)[1] if accepted else layer.state
    for threads in (1, 3):
        out, left = layer.run(level, pending=accepted, threads=threads)
        assert np.array_equal(out, want) and np.array_equal(left, state)


@on_every_level
def test_rows_that_are_switched_off_leave_the_state_alone(level):
    layer, on = Layer(32, 2, 4, 9), (np.arange(9) < 5).astype(np.float32)
    assert np.array_equal(layer.run(level, on=on)[1], layer.run(level, rows=5)[1])


@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor")
def test_shapes_and_joined_rows():
    level = LEVELS[0].handle
    assert lib.pgs_delta_native(level, 64, 64, 4) and not lib.pgs_delta_native(ffi.NULL, 64, 16, 4)
    assert not any(lib.pgs_delta_native(level, *shape) for shape in ((48, 16, 4), (64, 65, 4), (64, 16, 17)))
    parts = [RNG(i).standard_normal((4, n), np.float32) for i, n in enumerate((3, 64, 1))]
    with bench(LEVELS[0], 3) as (graph, memory):
        assert np.array_equal(compute(graph, graph.concat([memory.tensor(x) for x in parts])), np.concatenate(parts, axis=1))
        assert graph.op_counts()["native join"] == 1


@pytest.mark.slow
@on_every_level
@pytest.mark.parametrize("size, heads", [(64, 4), (16, 1), (24, 3)])
def test_gates(level, size, heads):
    x = RNG(1).standard_normal((5, size * heads), np.float32)
    both = 40 * RNG(2).standard_normal((5, heads, 2 * size), np.float32)
    gate, seen = both[:, :, size:].reshape(5, -1).astype(np.float64), []
    for at, threads in ((level, 1), (level, 2), (level, 40), (LEVELS[-1], 3)):
        with bench(at, threads) as (graph, memory):
            part = graph.heads(memory.tensor(both.reshape(5, -1)), size, heads, 2 * size, size)
            seen.append(compute(graph, graph.sigmoid_gated(memory.tensor(x), part)))
    np.testing.assert_allclose(seen[0], x / (1 + np.exp(-gate)), rtol=2e-6, atol=1e-30)
    assert all(np.array_equal(seen[0], other) for other in seen)
    for threads in (1, 3):
        with bench(level, threads) as (graph, memory):
            halves = memory.tensor(np.concatenate([gate.astype(np.float32), x], axis=1))
            got = compute(graph, graph.gated_halves("swiglu", halves))
            np.testing.assert_allclose(got, silu(gate) * x, rtol=2e-6, atol=1e-30)
            assert graph.op_counts()["native gate"] == 1


@on_every_level
def test_argmax_and_sums(level):
    """The first of equals wins, NaN never; a sum is not finite where a value is not."""
    x = RNG(1).standard_normal((9, 1037), np.float32)
    x[0, [5, 900]] = x[1, [1036, 3]] = x[2, [64, 63]] = 9.0
    x[3, :] = -np.inf
    x[4, 7], x[4, 8] = np.nan, 50.0
    x[5, 1036], x[6, 17], x[7, 1030] = 60.0, np.inf, np.nan
    with bench(level, 2) as (graph, memory):
        tensor = memory.tensor(x)
        ids = graph.argmax(tensor)
        graph.keep_output(ids)
        sums = compute(graph, graph.sum_rows(tensor))
        assert np.frombuffer(ffi.buffer(ids.data, 36), np.int32)[:7].tolist() == [5, 3, 63, 0, 8, 1036, 17]
    assert np.isfinite(sums[:, 0]).tolist() == [True, True, True, False, False, True, False, False, True]
    np.testing.assert_allclose(sums[[0, 1, 2, 5, 8], 0], x[[0, 1, 2, 5, 8]].sum(axis=1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("level", [None, *LEVELS[:1]])
@pytest.mark.parametrize("mapped", [False, True])
def test_drafts_are_drawn_as_the_samplers_tokens(level, mapped):
    """Of the same logits, from the second row of options on; rows without a temperature take the first largest one."""
    settings = [
        {"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 5, "top_p": 1.0, "min_p": 0.0}, {"temperature": 1.5, "top_p": 0.6},
        {"temperature": 1.4, "top_p": 0.85, "samplers": ("top_k", "temperature", "top_p")}, {"temperature": 1.0, "min_p": 0.2, "top_k": 0},
    ]  # fmt: skip
    n, rows = 400, 8 * len(settings)
    x = RNG(1).normal(0, 3, (rows, n)).astype(np.float32)
    x[0, [7, 300]] = 30.0
    tokens = (RNG(2).permutation(n) if mapped else np.arange(n)).astype(np.int64)
    options, want = [np.zeros((1, 8), np.int32)], []
    for row in range(rows):
        sampler = Sampler(Sampling(seed=row, **settings[row % len(settings)]), None, n)
        sampler.count = 3 * row
        options.append(sampler.draft_options(1))
        of_target = np.empty(n, np.float32)
        of_target[tokens] = x[row]
        want.append(sampler.choose(None, of_target))
        sampler.close()
    with bench(level, 2) as (graph, memory):
        given = memory.tensor(np.concatenate(options), lib.GGML_TYPE_I32)
        ids = graph.draw(memory.tensor(x), given, 1, memory.tensor(tokens, lib.GGML_TYPE_I64) if mapped else None)
        graph.keep_output(ids)
        compute(graph, graph.sum_rows(memory.tensor(x)))
        got = tokens[np.frombuffer(ffi.buffer(ids.data, 4 * rows), np.int32)]
    assert got[0] == (min(tokens[[7, 300]]) if not mapped else tokens[7])
    assert got[1:].tolist() == want[1:]


@pytest.mark.gpu
@pytest.mark.parametrize("n, mapped", [(10, True), (4096, False), (32000, True), (262144, False)])
def test_gpus_draw_as_cpus_do(n, mapped):
    """The CPU's node against ggml-cuda's; of every third row many logits are equal."""
    gpu = next((device for device in devices() if device.name.startswith("CUDA")), None)
    if gpu is None:
        pytest.skip("there is no CUDA device")
    rng, rows, ids = RNG(n), 120, []
    x = rng.normal(0, 3, (rows, n)).astype(np.float32)
    x[::3] = x[::3].round()
    options = np.zeros(rows, DRAW_OPTIONS)
    options["temperature"], options["top_k"] = rng.choice([0, 0.3, 0.8, 1, 2], rows), rng.choice([0, 1, 20, 40, 100], rows)
    options["top_p"], options["min_p"] = rng.choice([0.5, 0.95, 1], rows), rng.choice([0, 0.05, 0.3], rows)
    options["seed"], options["index"], options["temperature_first"] = rng.integers(1 << 32, size=rows), np.arange(rows), np.arange(rows) % 2
    tokens = rng.permutation(n)
    for device in (pick_device("CPU"), gpu):
        with (
            closing(Backend(device, 2, "ggml")) as backend,
            closing(Memory(backend)) as memory,
            closing(GraphAllocator(backend, "t")) as allocator,
        ):
            assert backend.draws, "this build of ggml-cuda lacks the patch"
            with closing(Graph(allocator)) as graph:
                given = memory.tensor(options.view(np.int32).reshape(rows, -1), lib.GGML_TYPE_I32)
                node = graph.draw(memory.tensor(x), given, 0, memory.tensor(tokens, lib.GGML_TYPE_I64) if mapped else None)
                graph.keep_output(node)
                graph.plan()
                check(lib.pgs_graph_compute(graph.handle, err := new_err()), err)
                backend.synchronize()
                ids.append(np.empty(rows, np.int32))
                lib.ggml_backend_tensor_get(node, ffi.from_buffer(ids[-1]), 0, ids[-1].nbytes)
    assert ids[0].tolist() == ids[1].tolist() and len(set(ids[0].tolist())) > 5


@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor")
@pytest.mark.parametrize("slots, rings", [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("window", [False, True])
def test_masks_are_those_of_ggml(slots, rings, window):
    near = (0.5 - RNG(1).integers(0, 300, (slots if rings else 1, 320))).astype(np.float32)
    last = RNG(2).integers(0, 300, (6, 1)).astype(np.float32)
    first, seen = last - 40, []
    for level in (LEVELS[0], None):
        with bench(level) as (graph, memory):
            tensor = memory.tensor(near) if rings else memory.tensor(near[0])
            mask = graph.kv_mask(tensor, memory.tensor(last), memory.tensor(first) if window else None, 256, slots)
            graph.keep_output(mask)
            graph.plan()
            err = new_err()
            check(lib.pgs_graph_compute(graph.handle, err), err)
            assert list(mask.ne) == [256, 6 // slots, 1, slots]
            seen.append(bytes(ffi.buffer(mask.data, 2 * 256 * 6)))
    assert seen[0] == seen[1] and len(set(seen[0])) > 1


@pytest.mark.parametrize("rows, kv_bucket, slots, window", [(512, 8448, 1, False), (497, 20480, 1, True), (512, 33024, 4, False)])
def test_long_masks_are_computed_piece_by_piece(rows, kv_bucket, slots, window):
    """Whole, their F32 values took twice the memory of the mask: 258 MiB for 512 rows over 132,096."""
    near = (0.5 - np.arange(kv_bucket + 16)).astype(np.float32)
    last = RNG(3).integers(0, kv_bucket, (rows, 1)).astype(np.float32)
    first = last - 1024
    with bench() as (graph, memory):
        mask = graph.kv_mask(memory.tensor(near), memory.tensor(last), memory.tensor(first) if window else None, kv_bucket, slots)
        graph.expand(graph.cast(mask, lib.GGML_TYPE_F32))
        need = graph.measure() - 4 * rows * kv_bucket  # without the reader's
        got = read_node(graph, mask, np.float16).reshape(rows, kv_bucket)
    at = np.arange(kv_bucket)
    want = np.where((at <= last) & ((at >= first) | (not window)), 0, -np.inf).astype(np.float16)
    assert np.array_equal(got, want) and need <= 2 * rows * kv_bucket + 3 * (16 << 20) + 4096


@pytest.mark.parametrize("taken", [True, False])
def test_masks_of_the_last_columns(taken, monkeypatch):
    """Attention that does not take one has the whole mask: kernels that know none read past its rows."""
    kv_bucket, columns, rows = 1024, 512, 6
    near = (0.5 - np.arange(kv_bucket + 16)).astype(np.float32)
    last = RNG(4).integers(kv_bucket - columns, kv_bucket, (rows, 1)).astype(np.float32)
    with bench() as (graph, memory):
        graph.backend.narrow_masks = True
        monkeypatch.setattr(graph.backend, "supports", lambda node: taken)
        mask = graph.kv_mask(memory.tensor(near), memory.tensor(last), None, kv_bucket, columns=columns)
        q, kv = memory.tensor(RNG(5).normal(size=(rows, 2, 64)).astype(np.float32)), memory.tensor(np.zeros((kv_bucket, 64), np.float16))
        read = [graph.view_source(graph.flash_attention(q, kv, kv, mask, 1, kv_bucket, 0.1)).src[3] for _ in range(2)]
        assert list(mask.ne) == [columns, rows, 1, 1] and read[0] == read[1] and (read[0] == mask) == taken
        graph.expand(read[0])
        got = read_node(graph, read[0], np.float16).reshape(rows, -1)
    seen = np.where(np.arange(kv_bucket) <= last, 0, -np.inf).astype(np.float16)
    assert np.array_equal(got, seen[:, -got.shape[1] :]) and got.shape[1] == (columns if taken else kv_bucket)


KV_BUCKET, SIZE = 256, 64
HIDDEN = -np.inf


def read_node(graph, node, kind):
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
        return read_node(graph, graph.top_k_mask(*tensors, k), np.float16).reshape(mask.shape)


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
        got = read_node(graph, graph.index_scores(memory.tensor(q), cache, memory.tensor(weights), hidden, KV_BUCKET), np.float32).reshape(
            mask.shape
        )
    each = np.einsum("srhd,spd->srhp", q.reshape(slots, rows, heads, SIZE).astype(np.float64), keys[:, :KV_BUCKET].astype(np.float64))
    want = np.einsum("srhp,srh->srp", np.maximum(each, 0), weights.reshape(slots, rows, heads).astype(np.float64)) + mask
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


PAGE = mmap.PAGESIZE
F32, F16, I32, I8 = lib.GGML_TYPE_F32, lib.GGML_TYPE_F16, lib.GGML_TYPE_I32, lib.GGML_TYPE_I8
TYPES = {text(lib.ggml_type_name(i)): i for i in range(lib.GGML_TYPE_COUNT) if lib.ggml_blck_size(i)}
C = ctypes.CDLL(None, use_errno=True)
C.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """A graph whose operands, and what it leaves, lie at the ends of pages with forbidden ones on either side."""

    def __init__(self, backend: Backend, allocator: GraphAllocator, stack: ExitStack):
        self.level, self.stack = backend.level_handle, stack
        self.g = stack.enter_context(closing(Graph(allocator)))

    def tensor(self, kind: int, *ne: int, values: np.ndarray | None = None):
        context = lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": 2 * lib.ggml_tensor_overhead(), "no_alloc": True})[0])
        self.stack.callback(lib.ggml_free, context)
        tensor = lib.ggml_new_tensor(context, kind, len(ne), ne)
        nbytes = lib.ggml_nbytes(tensor)
        room = -(-nbytes // PAGE) * PAGE
        pages = mmap.mmap(-1, room + 2 * PAGE)
        self.stack.callback(pages.close)
        base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for forbidden in (base, base + PAGE + room):
            assert C.mprotect(forbidden, PAGE, 0) == 0  # PROT_NONE
        buffer = lib.ggml_backend_cpu_buffer_from_ptr(ffi.cast("void *", base + PAGE), room)
        self.stack.callback(lib.ggml_backend_buffer_free, buffer)
        lib.pgs_attach(buffer, room - nbytes, tensor)
        rng = np.random.default_rng(1)
        if values is None:
            values = rng.standard_normal(nbytes // 4).astype(np.float32) if kind == F32 else rng.integers(0, 60, nbytes).astype(np.uint8)
        lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(values), 0, nbytes)
        return tensor

    def packed(self, kind: int, n_in: int, n_out: int, n_expert: int = 0) -> Packed:
        shape = (n_in, n_out, n_expert) if n_expert else (n_in, n_out)
        ne = packed_shape(kind, shape)
        rows, to = self.tensor(kind, *shape), self.tensor(I8, *ne, values=np.zeros(int(np.prod(ne)), np.uint8))
        if n_expert:
            lib.pgs_pack_experts(self.level, kind, rows.data, n_in, n_out, n_expert, to.data)
        else:
            lib.pgs_pack_rows(kind, rows.data, n_in, n_out, 0, n_out, to.data)
        return Packed(kind, (n_in, n_out, n_expert or 1, 1), to)

    def run(self, node) -> None:
        node = self.g.view_source(node)
        self.g.place(self.tensor(I8, lib.ggml_nbytes(node)), 0, node)
        self.g.expand(node)
        assert self.g.op_counts().keys() <= OWN | {"VIEW", "PERMUTE"}
        self.g.plan()
        err = new_err()
        check(lib.pgs_graph_compute(self.g.handle, err), err)


OWN = {
    f"native {name}"
    for name in (
        "product", "gated product", "rounding", "rows", "experts", "order", "norm", "gate", "sum", "argmax", "join", "mask", "attention", "convolution",
    )
}  # fmt: skip


@pytest.fixture(scope="module", params=[1, 3])
def guarded(request):
    backend = Backend(pick_device("CPU"), request.param, "native")
    with closing(backend), closing(GraphAllocator(backend, "test", 2048)) as allocator:

        def made(of) -> None:
            with ExitStack() as stack:
                graph = Guarded(backend, allocator, stack)
                graph.run(of(graph))

        yield made


@pytest.mark.skipif(not levels(), reason="native kernels do not run on this processor")
@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4", "nvfp4", "q2_K", "q3_K", "iq4_xs", "q4_K", "q5_K", "q6_K",
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "f16", "bf16", "f32",
])  # fmt: skip
def test_products(guarded, name):
    kind = TYPES[name]
    block = lib.ggml_blck_size(kind)
    for n_in, n_out, rows in itertools.product((block, 3 * block) if block > 1 else (1, 31, 45), (1, 16, 17), (1, 8, 9)):
        guarded(lambda of: of.g.matmul(of.packed(kind, n_in, n_out), of.tensor(F32, n_in, rows)))
        guarded(lambda of: of.g.add(of.g.matmul(of.packed(kind, n_in, n_out), of.tensor(F32, n_in, rows)), of.tensor(F32, n_out, rows)))
        guarded(lambda of: of.g.add(of.g.matmul(of.packed(kind, n_in, n_out), of.tensor(F32, n_in, rows)), of.tensor(F32, n_out)))
    for n, rows in itertools.product((32 if block == 1 else block, max(96, 3 * block)), (1, 8, 9, 32)):
        guarded(lambda of: of.g.matmul(
            of.packed(kind, n, 17), of.g.gated_halves("swiglu", of.g.matmul(of.packed(TYPES["q8_0"], 32, 2 * n), of.tensor(F32, 32, rows)))
        ))  # fmt: skip
    index = np.array([0, 36, 17, 15, 16], np.int32)
    guarded(lambda of: of.g.rows(of.packed(kind, n_in, 37), of.tensor(I32, 5, values=index)))
    for n_out, used, rows, packed in itertools.product((1, 19), (1, 2), (1, 7), (False, True)):
        chosen = np.stack([np.random.default_rng(i).permutation(3)[:used] for i in range(rows)]).astype(np.int32)
        guarded(lambda of: of.g.matmul_experts(
            of.packed(kind, n_in, n_out, 3) if packed else of.tensor(kind, n_in, n_out, 3), of.tensor(F32, n_in, used, rows), of.tensor(I32, used, rows, values=chosen)
        ))  # fmt: skip


@pytest.mark.skipif(not levels(), reason="native kernels do not run on this processor")
@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 100])
def test_rows_of_values(guarded, n):
    for rows in (1, 3):
        guarded(lambda of: of.g.rms_norm(of.tensor(F32, n, rows), of.tensor(F32, n), 1e-5))
        guarded(lambda of: of.g.gated("swiglu", of.tensor(F32, n, rows), of.tensor(F32, n, rows)))
        guarded(lambda of: of.g.sigmoid_gated(of.tensor(F32, 2 * n, rows), of.tensor(F32, n, 2, rows)))
        guarded(lambda of: of.g.sum_rows(of.tensor(F32, n, rows)))
        guarded(lambda of: of.g.argmax(of.tensor(F32, n, rows)))
        guarded(lambda of: of.g.concat([of.tensor(F32, n, rows), of.tensor(F32, 5, rows), of.tensor(F32, 1, rows)]))
        guarded(lambda of: of.g.kv_mask(of.tensor(F32, n), of.tensor(F32, 1, rows), of.tensor(F32, 1, rows), n))
        guarded(lambda of: lib.pgs_convolution(of.g.ctx, of.level, of.tensor(F32, 16 * n, 3 + rows, 2), of.tensor(F32, 4, 16 * n), 0, 0))


@pytest.mark.skipif(not levels(), reason="native kernels do not run on this processor")
@pytest.mark.parametrize("name", ["f16", "q8_0", "f32", "bf16"])
def test_attention(guarded, name):
    kind = TYPES[name]
    for size, span, rows, heads, slots in itertools.product((32, 96, 576), (1, 32, 33), (1, 9), (1, 2), (1, 2)):

        def attention(of):
            k, v = of.tensor(kind, size * heads, span, slots), of.tensor(kind, 64 * heads, span, slots)
            mask = of.tensor(F16, span, rows, 1, slots, values=np.zeros(2 * span * rows * slots, np.uint8))
            return of.g.flash_attention(of.tensor(F32, size, 4, rows * slots), k, v, mask, heads, span, 0.1)

        guarded(attention)
