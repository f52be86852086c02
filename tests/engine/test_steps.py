"""No work that repeats: what is built once stays built; and memory of roles."""

import itertools
import math
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from architectures import FAST, TARGETS
from engine.helpers import run
from random_gguf.archs import write_qwen35moe
from random_gguf.model import Shape, write_dflash
from sessions import fails_with, loaded

import pyggml_spec as ps
from pyggml_spec.cache.kv import KVCache
from pyggml_spec.cache.slots import SlotRange
from pyggml_spec.engine.batch import Batch, Draft, GraphKey, Verify
from pyggml_spec.engine.drafting import BlockDrafting
from pyggml_spec.engine.graph_cache import BY_CALLS, EXACT, GraphCache, Step
from pyggml_spec.engine.options import EngineOptions, candidate_widths, check_masks, fine_width, prefill_widths
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import ContextError, DeviceError, EngineError
from pyggml_spec.ggml.device import NARROW_MASK, Backend, Device, device_feature, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.kernels import levels
from pyggml_spec.ggml.library import ffi, lib, text
from pyggml_spec.ggml.step_io import ReplayCounters, StepFields
from pyggml_spec.models.base import KVShape
from pyggml_spec.models.placement import ExpertOptions

session = loaded(pair=True, n_ctx=4096)


@pytest.mark.slow
@pytest.mark.skipif(not levels(), reason="native kernels do not run on this processor")
@pytest.mark.parametrize("kind, width, rounded, most", [("plain", 1, 0, 80), ("fused", 4, 4, 125)])
def test_a_step_of_our_own_kernels_has_few_nodes(kind, width, rounded, most):
    """All threads wait behind each, and read what others wrote: a plain step of the embedded pair had 148, 33 of them roundings, 16 sums and 8 norms that
    nobody read, and one product each for beta and alpha."""
    with ps.load(device="CPU", threads=1, kernels="native") as session:
        counts = session.runner.step_graph(kind, width).op_counts()
    computed = {op: n for op, n in counts.items() if op not in ("VIEW", "PERMUTE", "RESHAPE")}
    assert computed.get("native rounding", 0) == rounded and "ADD" not in computed and computed["native gated product"] >= 8
    assert sum(computed.values()) <= most


def buffers_of(graphs):
    """1 for each role that has a buffer, 0 for those that use another's."""
    return {name: int(role.buffer_bytes > 0) for name, role in graphs.roles.items()}


def _total(engine, name):
    return sum(getattr(c, name) for c in engine.graphs.counters().values())


@pytest.mark.slow
def test_1000_steps_inside_a_span_build_and_allocate_nothing(session):
    engine, steps = session.runner, 0
    engine.reset()
    engine.prefill([1, 2, 3])
    for _ in range(3):
        engine.accept(1, int(engine.fused_step().ids[0]))
    hashes = {key: lib.pgs_graph_hash(step.graph.handle) for key, step in engine.graphs.steps().items()}
    built, growths = _total(engine, "graphs_built"), _total(engine, "buffer_growths")
    while steps < 1000:
        if engine.cursor.committed > 200:
            engine.reset()
            engine.prefill([1, 2, 3])
        engine.accept(1, int(engine.fused_step().ids[0]))
        steps += 1
    assert _total(engine, "graphs_built") - built == 0 and _total(engine, "buffer_growths") - growths == 0
    assert {key: lib.pgs_graph_hash(step.graph.handle) for key, step in engine.graphs.steps().items()} == hashes


def test_a_row_without_a_largest_logit_is_not_finite():
    """A GPU chooses greedily by itself and says by -1 that NaN stood among a row's logits: the token -1 would have been looked up in the next step."""
    ids = np.array([5, -1, 0], np.int32)
    step = Step(None, SimpleNamespace(host={"ids": ids}, at={}), {})
    assert step.ids().tolist() == [5, -1, 0]
    assert not step.finite() and [step.finite_rows(row, 1) for row in range(3)] == [True, False, True] and not step.finite_rows(0, 2)
    ids[1] = 7
    step.ids()
    assert step.finite() and step.finite_rows(0, 3)


def test_a_graph_is_known_by_a_number_that_stands_for_its_nodes(pair):
    """ggml-cuda compares no nodes of two runs with the same number: another graph with it would be computed as the first one was."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=1024) as session:
        seen: dict[int, int] = {}
        for _ in range(2):
            for mode in ("speculative", "plain", "reference"):
                run(session.runner, [5] * 40, 20, mode=mode)
            for step in session.runner.graphs.steps().values():
                uid, nodes = lib.pgs_graph_uid(step.graph.handle), lib.pgs_graph_hash(step.graph.handle)
                assert uid and seen.setdefault(uid, nodes) == nodes
        assert len(seen) == len(session.runner.graphs.steps()) > 5
        again = session.runner.graphs._make(session.runner.graphs.key("plain", 1, 256))
        assert lib.pgs_graph_uid(again.graph.handle) == 0  # before it is planned its nodes may still change
        again.graph.plan()
        assert lib.pgs_graph_uid(again.graph.handle) not in seen
        again.graph.close()


@pytest.mark.slow
def test_graphs_of_all_kinds_together_are_bounded(pair, monkeypatch):
    """Families of 32 and 13 graphs each had no bound together: a server made more of them for hours. What was used last stays."""
    monkeypatch.setattr("pyggml_spec.engine.graph_cache.KEEP_ALL", 6)
    with ps.load(
        *pair, device="CPU", threads=1, n_ctx=1024, draft_width=4
    ) as session:  # not pinned, it may rest and have no graphs that draft
        graphs = session.runner.graphs
        want, _ = session.generate([5] * 300, 40)
        before = graphs.changes
        for role, span in itertools.product(("plain", "verify", "fused"), (256, 512, 768, 1024)):
            key = graphs.key(role, 1 if role == "plain" else 4, span)
            made = graphs.get(key)
            assert graphs.get(key) is made
        sizes = [step.graph.host_bytes for step in graphs.steps().values()]
        assert len(sizes) <= 6 and graphs.host_bytes == sum(sizes) and 0.1 < min(sizes) / (1 << 20) < 2 and graphs.changes > before
        assert session.generate([5] * 300, 40)[0] == want


@pytest.mark.slow
def test_with_a_context_of_4096_every_role_allocates_once(session):
    """Crossing span boundaries re-plans inside the same buffer and never frees device memory."""
    engine = session.runner
    run(engine, [5] * 3000, 300)
    run(engine, [5] * 700, 300, mode="plain")
    run(engine, [5] * 1200, 20, mode="reference")
    assert {name: c.buffer_growths for name, c in engine.graphs.counters().items()} == buffers_of(engine.graphs)


def test_a_span_boundary_adds_exactly_one_graph(session):
    engine = session.runner
    engine.reset()
    engine.prefill([7] * 230)
    engine.accept(1, int(engine.fused_step().ids[0]))
    built = _total(engine, "graphs_built")
    for _ in range(40):
        engine.accept(1, int(engine.fused_step().ids[0]))
    assert _total(engine, "graphs_built") - built <= 1 and engine.graphs.key("fused", 16, 512) in engine.graphs.steps()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen35", "llama", "glm-dsa", "gemma4", "gpt-oss"])
def test_what_graphs_between_two_buckets_need_is_told_by_these(tmp_path, monkeypatch, arch):
    """Building all of them was a second of what the first token of 64 layers waited for. Some ask nothing: others need more."""
    target, draft = TARGETS[arch](tmp_path / "t.gguf", Shape(n_ff=128)), write_dflash(tmp_path / "d.gguf", Shape(draft_ff=128))
    told, built, measure = [], [], GraphCache.measure

    def measures(self, shapes, kept, sizes):
        measure(self, shapes, kept, sizes)
        for shape in shapes:
            step = self._make(shape)
            need = [part.measure() for part in step.graph.parts]
            assert sizes.get(shape, need) == need and need <= max(sizes.values()), shape
            step.graph.close()
            (built if shape in kept else told).append(shape)

    monkeypatch.setattr(GraphCache, "measure", measures)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=4096, spec=["draft-dflash"]):
        assert len(told) > len(built) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["ggml", "native"])
@pytest.mark.parametrize("arch", [*FAST, "glm-dsa", "granitehybrid"])
def test_no_graph_needs_more_than_the_widest_ones_did_at_load(tmp_path, arch, kernels):
    """No narrower one than half of them is measured: they were most of what loading took."""
    target, draft = TARGETS[arch](tmp_path / "t.gguf", Shape(n_ff=128)), write_dflash(tmp_path / "d.gguf", Shape(draft_ff=128))
    with ps.load(target, draft, device="CPU", threads=1, kernels=kernels, n_ctx=2048) as session:
        graphs, widths = session.runner.graphs, candidate_widths(16)
        for kind, some in {"prefill": prefill_widths(512), "plain": (1,), "verify": widths, "fused": widths, "draft": widths}.items():
            kept, sizes = {}, {}
            for width in some:
                graphs.measure([graphs.key(kind, width, bucket) for bucket in (256, graphs.buckets[-1])], kept, sizes)
            for step in kept.values():
                step.graph.close()
            assert max(sizes.values()) == max(need for key, need in sizes.items() if 2 * key.verify_len > max(some))
            for width, bucket in itertools.product(some, graphs.buckets):
                graphs.get(graphs.key(kind, width, bucket))
        counters = graphs.counters()
        assert len(counters) >= 5 and {name: c.buffer_growths for name, c in counters.items()} == buffers_of(graphs)


@pytest.mark.slow
def test_generation_prepares_the_spans_ahead(session):
    _, stats = run(session.runner, [9] * 100, 700)
    assert (stats.graphs_built_after_warmup, stats.buffer_growths_after_warmup) == (0, 0)


def test_kinds_of_steps_share_a_buffer(session):
    """Every kind had its own, of 68 MB beside the 430 of prompts at 131,072 tokens. Those whose logits are read row by row keep theirs."""
    engine, ranges = session.runner, {}
    engine.logits([1, 2, 3])
    for key, step in engine.graphs.steps().items():
        own = ffi.new("uintptr_t[2]")  # first and past-the-end address of its nodes
        lib.pgs_graph_memory(step.graph.handle, own, own + 1)
        low, high = ranges.get(key.kind, own)
        ranges[key.kind] = (min(low, own[0]), max(high, own[1]))
    exact, largest = {kind: ranges.pop(kind) for kind in EXACT if kind in ranges}, ranges["prefill"]
    assert len(ranges) >= 4 and all(largest[0] <= low < high <= largest[1] for low, high in ranges.values())
    assert "logits" in exact and all(high <= largest[0] or largest[1] <= low for low, high in exact.values())
    owners = {name: role.buffer_bytes for name, role in engine.graphs.roles.items() if role.buffer_bytes}
    assert owners.keys() <= {"prefill", "logits", "capture"} and engine.graphs.compute_bytes == sum(owners.values())


def _mask_columns(graph):
    nodes = [lib.ggml_graph_node(graph.gf, i) for i in range(graph.n_nodes)]
    return {node.src[3].ne[0] for node in nodes if text(lib.ggml_op_desc(node)) == "FLASH_ATTN_EXT"}


@pytest.mark.parametrize("narrow", [True, False])
def test_one_slots_prompts_have_masks_of_the_last_columns_where_the_device_takes_them(narrow, monkeypatch):
    """Slots have tokens of their own, and a shorter one's rows must not see what is behind them."""
    monkeypatch.setattr(Backend, "narrow_masks", property(lambda self: narrow, lambda self, value: None), raising=False)
    with ps.load(device="CPU", threads=1, kernels="ggml", n_ctx=1280, chunk=64) as session, session.batch(2) as scheduler:
        graphs, slots = session.runner.graphs, scheduler.runner.graphs
        assert _mask_columns(graphs.build(graphs.key("prefill", 64, 1024)).graph) == {512 if narrow else 1024}
        for of, key in [
            (graphs, graphs.key("logits", 64, 1024)),
            (graphs, graphs.key("plain", 1, 1024)),
            (slots, slots.key("prefill", 64, 1024, SlotRange(0, 1))),
        ]:
            assert _mask_columns(of.build(key).graph) == {1024}


@pytest.mark.skipif(device_feature(pick_device("CPU"), NARROW_MASK) is None, reason="llama-cpp-python without patches/0052")
def test_masks_of_the_last_columns_have_the_bits_of_whole_ones(monkeypatch):
    seen = []
    for narrow in (True, False):
        monkeypatch.setattr(Backend, "narrow_masks", property(lambda self: narrow, lambda self, value: None), raising=False)
        with ps.load(device="CPU", threads=1, kernels="ggml", n_ctx=2048, chunk=64) as session:
            session.runner.read_candidates(None)
            for n in (300, 700, 900):
                session.runner.prefill([i * 7919 % 1000 for i in range(n)])
                seen.append(session.runner.candidates(0)[1].tobytes())
            columns = [_mask_columns(step.graph) for key, step in session.runner.graphs.steps().items() if key.kind == "prefill"]
            assert max(map(max, columns)) == (512 if narrow else 2048)
    assert seen[:3] == seen[3:]


def test_a_graph_that_does_not_fit_another_kinds_buffer_gets_its_own(session):
    """And no graph has to be built again, because the other one does not grow."""
    for backend in (session.backend, session.backend.counted()):
        first = GraphAllocator(backend, "first")
        second = GraphAllocator(backend, "second", before=first)
        third = GraphAllocator(backend, "third", before=second)
        graphs, sizes = [], []
        for role, n in ((first, 1000), (second, 900), (third, 5000), (second, 4000), (third, 3000), (third, 900)):
            graphs.append(graph := Graph(role))
            node = graph.scale(lib.ggml_new_tensor(graph.ctx, lib.GGML_TYPE_F32, 1, [n]), 2.0)
            graph.expand(node)
            graph.plan()
            sizes.append([role.buffer_bytes // 4000 for role in (first, second, third)])
        assert sizes == [[1, 0, 0], [1, 0, 0], [1, 0, 5], [1, 4, 5], [1, 4, 5], [1, 4, 5]] and not any(graph.stale for graph in graphs)
        for part in (*graphs, third, second, first):
            part.close()


def test_uploads(session):
    engine = session.runner
    engine.reset()
    engine.prefill([1, 2, 3])
    before = (engine.io.uploads, engine.io.reads)
    for _ in range(10):
        engine.accept(1, int(engine.fused_step().ids[0]))
    assert (engine.io.uploads - before[0], engine.io.reads - before[1]) == (11, 10)  # one upload more: the way into the first block


def test_closed_sessions(pair):
    session = ps.load(*pair, device="CPU", n_ctx=300)
    session.close()
    session.close()
    # A generator that outlives its session gets a sentence, not a crash in freed memory.
    session = ps.load(*pair, device="CPU", threads=1, n_ctx=300)
    steps = session.steps([1, 2, 3], 20)
    next(steps)
    session.close()
    with pytest.raises(ps.EngineError, match="closed"):
        for _ in steps:
            pass


@pytest.mark.slow
@pytest.mark.parametrize("slots, verb, call", [(1, "measure", 3), (1, "plan", 1), (1, "plan", 2), (2, "measure", 2), (2, "plan", 1)])
def test_a_reservation_that_fails_changes_nothing(session, monkeypatch, slots, verb, call):
    """Without device memory for a role's largest graph: the graphs wrote drafter rows from then on, whatever the sequence had asked for."""
    parts, made = (session.backend, session.target, session.drafter, EngineOptions(n_ctx=600, slots=slots)), []
    engine = ModelRunner(*parts)
    graphs, make, real, calls = engine.graphs, engine.graphs._make, getattr(Graph, verb), []
    # nothing is planned at load for other candidates
    wanted = graphs.key("verify", 4, 256, drafting=False, candidates=64)

    def fails(graph):
        calls.append(graph)
        if len(calls) == call:
            raise DeviceError("no memory")
        return real(graph)

    with monkeypatch.context() as patched:
        patched.setattr(graphs, "_make", lambda *shape: made.append(make(*shape)) or made[-1])
        patched.setattr(Graph, verb, fails)
        fails_with(DeviceError, "no memory", graphs.get, wanted)
    kept = {id(step) for step in graphs.steps().values()}
    assert made and all(step.graph.handle is None for step in made if id(step) not in kept)
    step = graphs.get(wanted)
    assert step is graphs.get(wanted) and not step.graph.stale
    assert any(
        key.kind == "verify" and key.family != wanted.family and key.candidates == 64 for key in graphs.steps()
    )  # reserved now: the largest
    engine.close()


def test_graphs_of_a_role_whose_buffer_could_not_grow_are_not_computed(session):
    """ggml frees the buffer before it asks for a larger one: when there is none, the role's other graphs would compute in freed memory."""

    def planned(role, n):
        graph = Graph(role)
        shape = lib.ggml_new_tensor(graph.ctx, lib.GGML_TYPE_F32, 1, [n])
        graph.expand(graph.scale(shape, 2.0))
        graph.plan()
        return graph

    role = GraphAllocator(session.backend, "any")
    small = planned(role, 64)
    assert not small.stale
    fails_with(EngineError, "no memory for a compute buffer", planned, role, 1 << 50)
    assert small.stale
    assert not planned(role, 64).stale
    role.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "speculative"])
def test_a_gpu_builds_the_graphs_of_its_next_span_while_it_computes(pair, monkeypatch, mode):
    """The CPU, called a GPU: spans of 1,024 rows, and the text of the CPU's."""
    prompt, texts = [i % 200 for i in range(900)], []
    for kind in ("cpu", "gpu"):
        with monkeypatch.context() as patched:
            real = Backend.__init__

            def called(self, device, threads=None, kernels=None):
                real(self, device, threads, "ggml")
                self.device = replace(device, kind=kind)

            patched.setattr(Backend, "__init__", called)
            with ps.load(*pair, device="CPU", threads=1, n_ctx=2300, draft_width=4) as session:
                text, stats = session.generate(prompt, 160, mode=mode, ignore_end=True)
                texts.append(text)
                spans = {key.kv_bucket for key in session.runner.graphs.steps() if key.kind == ("plain" if mode == "plain" else "fused")}
    assert texts[0] == texts[1] and {1024, 2048} <= spans
    assert stats.graphs_built_ahead == 1 and not stats.graphs_built_after_warmup and not stats.buffer_growths_after_warmup


def test_a_cpu_builds_a_graph_when_its_step_comes_and_says_how_long_that_took(session):
    """All announced ones of the next 2,048 tokens were built before the first token: 57 for a copy whose steps take 30 of them."""
    engine = session.runner
    engine.reset()
    last_token = engine.prefill([5] * 250)
    engine.prepare([engine.verify_key(1), engine.verify_key(4)], 2048)  # plans the largest of each
    engine.graphs.drop("plain")
    before, ahead, waited = engine.graphs.changes, engine.counts()["graphs_built_ahead"], engine.graphs.waited_us
    engine.prepare([engine.verify_key(1), engine.verify_key(4)], 2048)
    assert engine.graphs.changes == before
    for _ in range(300):
        last_token = int(engine.plain_step().ids[0])
        engine.accept(1, last_token)
    built = engine.graphs.changes - before
    assert built >= 2 and engine.counts()["graphs_built_ahead"] - ahead == built and engine.graphs.waited_us > waited
    waited = engine.graphs.waited_us
    engine.accept(1, int(engine.plain_step().ids[0]))
    assert engine.graphs.waited_us == waited and engine.graphs.changes == before + built


@pytest.mark.parametrize("kind, slots, chunk, n_ctx, fits", [
    ("gpu", 1, 4096, 1 << 19, False), ("gpu", 1, 4096, (1 << 19) - 256, True), ("rpc", 1, 512, 1 << 22, False), ("cpu", 1, 4096, 1 << 23, True),
    ("gpu", 64, 512, 1 << 21, False), ("gpu", 32, 512, 1 << 21, True),
])  # fmt: skip
def test_masks_of_more_values_than_a_gpu_counts_are_refused(kind, slots, chunk, n_ctx, fits):
    """ggml-cuda takes the number of values as an int: of 2^31 it would launch nothing, and end the process."""
    device, options = Device("X", "", kind, 0, 0, 0), EngineOptions(n_ctx=n_ctx, chunk=chunk, slots=slots, width=16 if slots == 64 else 31)
    refused = pytest.raises(ContextError, match=r"need masks of more than .*, which X cannot count; use a smaller `chunk`")
    with nullcontext() if fits else refused:
        check_masks(options, [SimpleNamespace(device=device)])


SLOTS = SlotRange(0, 2)


def test_graph_keys():
    key = GraphKey.of("fused", 4, 256, SLOTS, "draft-dflash", drafting=True)
    assert key is GraphKey.of("fused", 4, 256, SLOTS, "draft-dflash", drafting=True)
    made = GraphKey("fused", 4, 256, SLOTS, "draft-dflash", drafting=True)
    assert made == key and hash(made) == hash(key) and len({made, key}) == 1
    assert key.at(512) == GraphKey("fused", 4, 512, SLOTS, "draft-dflash", drafting=True) != key
    key = GraphKey.of("verify", 4, 256, SLOTS)
    others = {
        "kind": "fused", "verify_len": 8, "kv_bucket": 512, "slots": SlotRange(0, 1), "method": "mtp", "n_drafts": 2, "streamed": True,
        "deferred": True, "layers": (1,), "next_len": 2, "replay": True, "drafting": True, "candidates": None, "masked": True,
    }  # fmt: skip
    values = {name: getattr(key, name) for name in others}
    assert len({key, *(GraphKey.of(**(values | {name: other})) for name, other in others.items())}) == 1 + len(others)
    key = GraphKey.of("verify", 4, 256, SLOTS, deferred=True, drafting=True, candidates=64, masked=True)
    assert key.family is GraphKey.of("verify", 4, 1024, SlotRange(0, 1), deferred=True).family
    assert key.family is not GraphKey.of("verify", 4, 256, SLOTS).family
    batch = Batch({0: Draft(4), 1: Verify([5])}, kind="fused", verify_len=4, kv_bucket=256, slots=SLOTS, method="mtp", drafting=True)
    key = batch.make_key()
    assert key is batch.key and key.drafts == 3 and key.total == 8


@pytest.mark.parametrize("chunk", [2048, 4096])
def test_tails_of_wide_chunks_are_padded_by_less_than_their_rows(chunk):
    """A prompt of 600 tokens was computed as 2,048 rows, or 4,096."""
    widths = prefill_widths(chunk)
    assert widths[-1] == chunk
    assert all(next(width for width in widths if rows <= width) < 2 * rows for rows in range(513, chunk + 1))


def test_widths_and_chunks():
    assert prefill_widths(512) == (32, 128, 512)
    widths = {fine_width(n) for n in range(1, 513)}
    assert all(n <= fine_width(n) <= n + max(0, n - 1) // 16 for n in range(1, 513)) and len(widths) <= 96


def test_prompts_have_the_rows_of_llama_cpp_on_its_kernels(tmp_path):
    """63 tokens were computed as 64 rows, which ggml's AMX kernels round differently: a near-tie of a real model gave another text."""
    path, ids = TARGETS["qwen3"](tmp_path / "t.gguf", Shape(), "Q8_0"), list(range(2, 65))
    with ps.load(path, device="CPU", threads=1, n_ctx=1024, kernels="ggml", spec=["none"]) as session:
        for tokens in (len(ids), 600):
            session.generate([7] * tokens, 2)
            assert (
                session.runner.graphs.last_key.kind == "plain" and session.runner.graphs.last_key.kv_bucket == -(-(tokens + 1) // 256) * 256
            )
        assert [session.runner.chunk_width(n) for n in (1, 63, 65, 500)] == [1, 63, 65, 500]
        (token, *_) = [t for event in session.steps(ids, 1) for t in event.tokens]
        after = session.runner.logits([token])
        session.runner.reset()
        session.runner.logits(ids)
        assert (session.runner.logits([token]) == after).all()


@pytest.fixture(scope="module", params=["qwen35", "granitehybrid", "lfm2", "qwen3", "gemma4"])
def long_session(request, tmp_path_factory):
    path = TARGETS[request.param](tmp_path_factory.mktemp(request.param) / "t.gguf", Shape(window=12), "Q8_0")
    with ps.load(path, device="CPU", threads=1, n_ctx=1200) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 10, 33, 36, 60, 120, 129, 400])
def test_a_prompt_computes_its_own_rows(long_session, rows):
    engine = long_session.runner
    engine.reset()
    before = engine.totals.rows_computed
    engine.prefill([7] * rows)
    assert rows <= engine.totals.rows_computed - before <= max(rows, rows * 17 / 16 + 1)


@pytest.mark.slow
def test_memory_that_was_planned_does_for_every_length(long_session):
    """No buffer grows, and the graphs of many lengths are not all kept."""
    graphs, engine = long_session.runner.graphs, long_session.runner
    planned = graphs.compute_bytes
    for rows in {graphs.chunk_width(n) for n in range(1, 513)}:
        for span in graphs.buckets[:: max(1, len(graphs.buckets) - 1)]:
            if span >= rows:
                graphs.build(graphs.key("prefill", rows, span))
    assert graphs.compute_bytes == planned and sum(key.kind == "prefill" for key in graphs.steps()) < 40
    engine.reset()
    engine.prefill([7] * 1000)


def test_what_the_host_reads_stays_where_it_is(session, monkeypatch):
    """On a device the host builds other graphs meanwhile: one of the same role may move the buffer of hidden states that are still to be read."""
    engine, planned = session.runner, []
    engine.reset(drafting=False)
    monkeypatch.setattr(engine.prebuilder, "overlaps", True)
    monkeypatch.setattr(engine.graphs, "_make", lambda key, make=engine.graphs._make: planned.append(key) or make(key))
    engine.capture([7] * 200, (0, engine.target.n_layer))
    assert [key.kind for key in planned] == ["capture"]


class Recorder:
    """A device that captures, as far as callers can tell: what was captured, launched and released, in that order."""

    def __init__(self, monkeypatch, can: bool = True) -> None:
        self.events: list[tuple[str, int]] = []
        monkeypatch.delenv("GGML_CUDA_CAPTURE_AHEAD", raising=False)

        def capture(backend, graph, us) -> bool:
            self.events.append(("capture", int(ffi.cast("uintptr_t", graph))))
            us[0], us[1], us[2] = 3, 2, 1
            return can

        def release(backend, graph) -> None:
            self.events.append(("release", int(ffi.cast("uintptr_t", graph))))

        self._callbacks = ffi.callback("bool(void *, void *, int64_t *)", capture), ffi.callback("void(void *, void *)", release)
        lib.pgs_capture_by(*self._callbacks)
        launch = StepFields.launch

        def recorded(fields) -> None:
            self.events.append(("launch", int(ffi.cast("uintptr_t", fields.graph.gf))))
            launch(fields)

        monkeypatch.setattr(StepFields, "launch", recorded)

    def of(self, kind: str) -> Counter:
        return Counter(graph for what, graph in self.events if what == kind)


@pytest.fixture
def recorder(monkeypatch):
    yield Recorder(monkeypatch)
    lib.pgs_capture_by(ffi.NULL, ffi.NULL)


def test_every_graph_of_decoding_is_captured_once_before_its_first_launch_and_released_when_it_is_closed(pair, recorder):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=1024, draft_width=4) as session:
        engine = session.runner
        engine.io.replay = replay = ReplayCounters()  # as on a CUDA device
        for mode in ("speculative", "plain"):
            run(engine, [1, 2, 3], 300, mode=mode, width=4)
        steps = {int(ffi.cast("uintptr_t", step.graph.gf)): (key.kind, step) for key, step in engine.graphs.steps().items()}
        captured, launched = recorder.of("capture"), recorder.of("launch")
        assert set(captured.values()) == {1} and replay.ahead > 0 and replay.ahead_us == 6 * replay.ahead
        ran = {graph: role for graph, (role, _) in steps.items() if graph in launched}
        assert {role for graph, role in ran.items() if graph not in captured} <= set(BY_CALLS) < {*BY_CALLS, *ran.values()}
        assert not any(role in BY_CALLS for graph, (role, _) in steps.items() if graph in captured)
        assert all(recorder.events.index(("capture", graph)) < recorder.events.index(("launch", graph)) for graph in captured & launched)
        assert len(captured) < len(steps), "graphs that were only reserved at load are not captured"
        assert replay.inside == 0
    assert recorder.of("release") == captured


def test_graphs_of_a_text_are_captured_while_the_device_computes_instead_of_before_its_first_token(pair, recorder):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=1024, draft_width=4) as session:
        engine = session.runner
        engine.prebuilder.overlaps = True  # as on a GPU
        recorder.events.clear()
        run(engine, [1, 2, 3], 40, mode="speculative", width=4)
        kinds = [kind for kind, _ in recorder.events]
        first = [graph for kind, graph in recorder.events if kind == "launch"][1]  # behind the prompt
        before = {graph for kind, graph in recorder.events[: recorder.events.index(("launch", first))] if kind == "capture"}
        assert before <= {first}, "what the first step does not launch"
        assert kinds.count("capture") > len(before), "later ones"
        fused = [(key, step) for key, step in engine.graphs.steps().items() if key.kind == "fused"]
        waiting = [key for key, step in fused if not step.ready and key.kv_bucket == engine.kv.bucket(60)]
        assert not waiting, "what any step of this span may launch"


def test_what_a_device_does_not_capture_counts_as_captured_within_its_second_call(pair, monkeypatch):
    recorder = Recorder(monkeypatch, can=False)
    try:
        with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
            session.runner.io.replay = replay = ReplayCounters()
            monkeypatch.setattr("pyggml_spec.ggml.step_io.REPLAY_US_PER_NODE", 1e9)  # whatever the time, it is a replay
            run(session.runner, [1, 2, 3], 30, width=4)
            assert replay.ahead == 0 and 0 < replay.inside <= replay.captured
        assert not recorder.of("release")
    finally:
        lib.pgs_capture_by(ffi.NULL, ffi.NULL)


def test_capture_is_off_by_default(pair, recorder, monkeypatch):
    monkeypatch.setenv("GGML_CUDA_CAPTURE_AHEAD", "0")
    monkeypatch.setattr("pyggml_spec.ggml.step_io.REPLAY_US_PER_NODE", 1e9)
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        session.runner.io.replay = replay = ReplayCounters()
        run(session.runner, [1, 2, 3], 30, width=4)
        assert not recorder.of("capture") and replay.captured > 0 and replay.ahead == replay.inside == 0


def test_a_graph_that_is_reserved_when_it_is_asked_for_is_captured_before_it_runs(pair, recorder):
    """Requests that want other candidates have graphs of their own, and memory for them is reserved between two steps."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        session.runner.prefill([1, 2, 3])
        recorder.events.clear()
        session.runner.slots[0].candidates = 64
        session.runner.plain_step()
        of_plain = [int(ffi.cast("uintptr_t", step.graph.gf)) for key, step in session.runner.graphs.steps().items() if key.kind == "plain"]
        (launched,) = [graph for graph in of_plain if graph in recorder.of("launch")]
        assert recorder.events.index(("capture", launched)) < recorder.events.index(("launch", launched))


def test_graphs_of_several_devices_are_left_to_their_calls(pair, recorder):
    with ps.load(*pair, device="CPU,CPU", threads=1, n_ctx=256, draft_width=4) as session:
        run(session.runner, [1, 2, 3], 12, width=4)
        assert not recorder.of("capture")


def test_the_first_call_of_a_graph_that_was_captured_ahead_is_a_replay():
    counters = ReplayCounters()
    for call, us in enumerate([90, 80, 80], 1):
        assert counters.count(call, us, 1800, captured=True)
    assert (counters.warmup, counters.replayed, counters.eager) == (0, 3, 0)
    assert not counters.count(1, 90, 1800, captured=False) and not counters.count(2, 90, 1800) and counters.warmup == 2


def test_a_graph_that_the_host_takes_part_in_is_not_captured(tmp_path, recorder):
    """It is computed in parts, which are other graphs to a device."""
    path = write_qwen35moe(tmp_path / "t.gguf", Shape(), "Q4_K")
    with ps.load(path, device="CPU", threads=1, n_ctx=256, prefix_memory=0, experts=ExpertOptions(-1)) as session:
        session.generate([1, 2, 3], 4, ignore_end=True)
        steps = {int(ffi.cast("uintptr_t", step.graph.gf)): step.graph.n_cuts for step in session.runner.graphs.steps().values()}
        assert any(steps[graph] for graph in recorder.of("launch")) and not any(steps[graph] for graph in recorder.of("capture"))


NOWHERE = -float(1 << 30)
KINDS = {
    "positions": ("int32_t *", np.int32), "kv_rows": ("int64_t *", np.int64), "q_last": ("float *", np.float32), "q_first": ("float *", np.float32),
    "sliding_rows": ("int64_t *", np.int64), "sliding_near": ("float *", np.float32), "on": ("float *", np.float32), "last": ("int32_t *", np.int32),
    "out_row": ("int32_t *", np.int32), "context_ring": ("int64_t *", np.int64),
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
    sizes["draft_ring"] = ring + 5
    committed = [int(rng.integers(0, live)) for _ in range(count)]
    real = [int(rng.integers(0, min(width, live - n) + 1)) for n in committed]
    got = _filled(sizes, committed, real)
    for at in range(count):
        n, part = committed[at] if real[at] else 0, slice(at * width, (at + 1) * width)
        counts = np.arange(width) < real[at]
        positions = n + np.arange(width) if real[at] else np.zeros(width)
        assert np.array_equal(got["positions"][part], positions) and np.array_equal(got["q_last"][part], positions)
        assert np.array_equal(got["q_first"][part], positions - window + 1) and np.array_equal(got["on"][part], counts)
        for name, rows, where in (
            ("kv_rows", live, positions),
            ("sliding_rows", ring, positions % ring),
            ("context_ring", ring + 5, positions % (ring + 5)),
        ):
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
    got = _filled(sizes, [253], [8], ("q_first", "sliding_rows", "sliding_near", "context_ring"))
    assert got["kv_rows"].tolist() == [253, 254, 255, 256, 257, 258, 259, 260] and got["positions"].tolist() == list(range(253, 261))
    found = _filled(sizes, [253], [8], ("q_first", "sliding_rows", "sliding_near", "context_ring", "on", "last", "out_row"))
    assert found.keys() == {"positions", "kv_rows", "q_last"}


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
    hp = SimpleNamespace(mask_token=9, window=(window, 0), causal=(False, False))
    drafter = SimpleNamespace(hp=hp, by_position=False, block_rows=lambda rows: rows)
    kv = SimpleNamespace(live=live, trash=16, rows_for=lambda n, count, real, out: out.fill(0))
    slots = [SimpleNamespace(cursor=SimpleNamespace(committed=n, last_token=5)) for n in committed]
    positions = np.concatenate([n + np.arange(width) for n in committed]).astype(np.int32)
    host = {"block": np.zeros(12, np.int32), "draft_last": np.zeros(12, np.float32), "draft_rows": np.zeros(12, np.int64)}
    host["positions"] = positions
    host |= {f"draft_first_{window}": np.zeros(12, np.float32)} if window else {}
    BlockDrafting(drafter, None, kv, False).fill(
        host, GraphKey("fused", width, live, SlotRange(0, 3)), {1: Draft(3), 0: Verify([1, 2, 3])}, slots
    )
    first, last = host.get(f"draft_first_{window}", np.zeros(12)), host["draft_last"]
    assert (last >= np.maximum(first, 0)).all() and last[4:8].tolist() == [32, 32, 32, 32]


def test_every_row_of_a_block_sees_a_row_of_the_ring_with_every_drafter():
    with (
        closing(Backend(pick_device("CPU"), 1)) as backend,
        closing(KVCache(backend, [KVShape(1, 32, sliding=True)], 1024, 16, 12, 16)) as kv,
    ):
        hp, width, committed = SimpleNamespace(mask_token=9, window=(12,), causal=(False,)), 4, [700, 300, 0, 255]
        slots = [SimpleNamespace(cursor=SimpleNamespace(committed=n, last_token=5)) for n in committed]
        host = {
            name: np.zeros(16, kind) for name, kind in (("block", np.int32), ("draft_last", np.float32), ("draft_first_12", np.float32))
        }
        host |= {name: np.zeros(16, np.int64) for name in ("draft_rows", "draft_sliding_rows")}
        host |= {"draft_near": np.zeros(4 * kv.ring, np.float32), "positions": np.concatenate([n + np.arange(4) for n in committed])}
        drafter, key = (
            SimpleNamespace(hp=hp, by_position=False, block_rows=lambda rows: rows),
            GraphKey("fused", width, 1024, SlotRange(0, 4)),
        )
        BlockDrafting(drafter, None, kv, False).fill(host, key, {1: Draft(3), 0: Verify([1, 2, 3]), 3: Draft(4)}, slots)
        held = 0.5 - host["draft_near"].reshape(4, -1)  # the position of each row
        for at, row in np.ndindex(4, width):
            first, last = (host[name].reshape(4, -1)[at, row] for name in ("draft_first_12", "draft_last"))
            seen = np.flatnonzero((held[at] >= first) & (held[at] <= last))
            assert sorted(held[at][seen]) == list(range(int(max(first, 0)), int(last) + 1)) and (seen == held[at][seen] % kv.ring).all()
        written = host["draft_sliding_rows"].reshape(4, -1) - (np.arange(4) * (kv.ring + 16))[:, None]
        assert written[1].tolist() == [44, 45, 46, 256] and written[3].tolist() == [255, 0, 1, 2] and (written[[0, 2]] >= kv.ring).all()
