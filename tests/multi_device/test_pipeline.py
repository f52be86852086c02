"""Two groups of sequences that decode alongside each other, where layers are split over devices: here the CPU twice."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from engine.batch_helpers import Pair, accept, prompts, random_work, run, serve
from engine.helpers import interrupt_ends_all
from sessions import fails_with

from pyggml_spec.cache.slots import covering
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.graph_prebuilder import GraphPrebuilder
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import PLAIN, REFERENCE, SPECULATIVE, GenerationOptions
from pyggml_spec.errors import EngineError
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.library import lib
from pyggml_spec.multi_device.devices import halves
from pyggml_spec.multi_device.pipeline import RETRY_EVERY, TRIES, PipelinedEngine, PipelinePolicy, policy_of
from pyggml_spec.sampling.sampler import Sampler, Sampling
from pyggml_spec.speculation.policy import PLAIN_STEP, StepPlan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("pair"), "qwen35", n_ctx=512, device="CPU,CPU")
    yield made
    made.close()


def engine_of(pair, slots):
    s = pair.session
    return ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=pair.n_ctx, slots=slots, groups=True))


def scheduler_of(pair, slots, width=None, groups=2):
    return PipelinedEngine(engine_of(pair, slots), width, groups=groups)


@pytest.mark.parametrize("width", [1, 4, None])
def test_each_sequence_gets_the_tokens_it_gets_alone(pair, width):
    texts = prompts(9)
    with scheduler_of(pair, 5, width) as scheduler:
        modes = [SPECULATIVE if i % 3 else PLAIN for i in range(len(texts))]
        asked = enumerate(zip(texts, modes, strict=True))
        streams = [scheduler.submit(text, GenerationOptions(12 + 5 * i, mode)) for i, (text, mode) in asked]
        scheduler.run()
        assert scheduler.stats.pipelined > 20
        assert sum(scheduler.stats.decoding[n] * n for n in scheduler.stats.decoding) <= scheduler.stats.emitted
        assert scheduler.runner.totals.forwards == scheduler.stats.steps
    assert [s.tokens for s in streams] == [pair.solo(text, 12 + 5 * i) for i, text in enumerate(texts)]
    assert all(s.stats.stop_reason == "length" for s in streams)


@pytest.mark.parametrize("seed", range(3))
def test_requests_at_random(pair, seed):
    """Some that come, some that are cancelled while a step of theirs is under way, prompts that begin alike. scripts/fuzz_slots.py --groups has more seeds."""
    assert serve(pair, seed, groups=2) == []


def test_requests_from_threads_and_samplers(pair):
    """Events are handed over while a group's step is under way."""
    texts = prompts(6)
    with pair.session.concurrent(4, groups=2, prefix_memory=0) as server:
        handles = [server.submit(text, 40, ignore_end=True) for text in texts]
        stats = [handle.result(120)[1] for handle in handles]
        assert server.stats.pipelined > 0 and [s.emitted for s in stats] == [40] * 6
        assert [handle.sequence.tokens for handle in handles] == [pair.solo(text, 40) for text in texts]
    tokenizer = pair.session.tokenizer

    def sampled(groups):
        with scheduler_of(pair, 4, 4, groups) as scheduler:
            samplers = [Sampler(Sampling(temperature=1.0, seed=i), tokenizer, tokenizer.n_vocab) for i in range(4)]
            options = [GenerationOptions(24, SPECULATIVE, sampler=sampler) for sampler in samplers]
            streams = [scheduler.submit(*of) for of in zip(prompts(4), options, strict=True)]
            scheduler.run()
            assert (scheduler.stats.pipelined > 0) == (groups == 2)
            return [s.tokens for s in streams]

    assert sampled(1) == sampled(2)


def test_a_sequence_that_fails_while_another_group_is_under_way_fails_alone(pair):
    texts, calls = prompts(4), iter(range(100))

    def raises(token):
        if next(calls) == 7:
            raise IndexError
        return False

    with scheduler_of(pair, 4, 4) as scheduler:
        ends = [lambda token: False, raises, lambda token: False, lambda token: False]
        streams = [scheduler.submit(text, GenerationOptions(30, SPECULATIVE, is_end=end)) for text, end in zip(texts, ends, strict=True)]
        scheduler.run()
        assert [s.tokens for i, s in enumerate(streams) if i != 1] == [pair.solo(t, 30) for i, t in enumerate(texts) if i != 1]
        with pytest.raises(IndexError):
            streams[1].result()
        assert scheduler.submit(texts[1], GenerationOptions(9, SPECULATIVE)).result() == pair.solo(texts[1], 9)


def test_interrupts_and_failures_leave_the_engine_usable(pair, monkeypatch):
    with scheduler_of(pair, 4, 4) as scheduler:
        streams = [scheduler.submit(text, GenerationOptions(40, SPECULATIVE)) for text in prompts(4)]
        while not scheduler.stats.pipelined:
            scheduler.step()
        interrupt_ends_all(pair, scheduler, streams, monkeypatch, scheduler.scheduler, "finish")
    # A GPU builds graphs while it computes; Ctrl-C there left slots that could not be released.
    with scheduler_of(pair, 4, 4) as scheduler:
        streams = [scheduler.submit(text, GenerationOptions(40, SPECULATIVE)) for text in prompts(4)]
        while not scheduler.stats.pipelined:
            scheduler.step()
        for lane in scheduler.runner.devices.lanes:
            lane.prebuilder.overlaps = True
        interrupt_ends_all(pair, scheduler, streams, monkeypatch, GraphPrebuilder, "while_computing")
        assert not scheduler.runner.devices.flying


def test_a_group_is_launched_again_before_its_callers_have_its_tokens(pair):
    """What callers do with them took place while a device waited for the group. A caller finds both landed, and nothing launched in between."""
    with scheduler_of(pair, 8, 4) as scheduler:
        streams = [scheduler.submit(text, GenerationOptions(40, SPECULATIVE)) for text in prompts(7)]
        while not scheduler.stats.pipelined:
            scheduler.step()
        assert [group for group, _ in scheduler.flying] == [1, 0]
        streams.append(scheduler.submit(prompts(8)[7], GenerationOptions(12, SPECULATIVE)))
        under_way = []
        while streams[7].slot < 0:
            under_way.append([group for group, _ in scheduler.flying])
            scheduler.step()
        assert under_way == [[1, 0], [0], []]
        scheduler.run()
    assert [s.tokens for s in streams[1:]] == [pair.solo(s.prompt, len(s.tokens)) for s in streams[1:]]


def test_closing_and_sharing(pair):
    scheduler = scheduler_of(pair, 4, 4)
    streams = [scheduler.submit(text, GenerationOptions(40, SPECULATIVE)) for text in prompts(4)]
    while scheduler.stats.pipelined < 3:
        scheduler.step()
    assert scheduler.runner.devices.flying
    streams[3].close()
    assert streams[3].stats.stop_reason == "cancelled" and not scheduler.runner.devices.flying
    assert streams[3].tokens == pair.solo(streams[3].prompt, len(streams[3].tokens))
    scheduler.step()
    scheduler.close()
    assert [s.stats.stop_reason for s in streams] == ["cancelled"] * 4
    # Reference blocks have widths of their own, and a caller that is asked before each step is asked before each step.
    for options, asked in ((GenerationOptions(6, REFERENCE), None), (GenerationOptions(6, PLAIN), lambda: False)):
        with scheduler_of(pair, 3) as scheduler:
            streams = [scheduler.submit(text, options, interrupted=asked) for text in prompts(3)]
            scheduler.run()
            assert scheduler.stats.pipelined == 0 and [s.tokens for s in streams] == [pair.solo(s.prompt, 6) for s in streams]


def test_what_is_asked_of_a_slot_under_way_is_refused(pair):
    engine = engine_of(pair, 4)
    try:
        for slot in range(4):
            engine.admit()
            engine.step({slot: Prefill([1 + slot, 2])})
        fails_with(EngineError, "no group's work", lambda: engine.devices.launch(0, {0: Prefill([5])}))
        fails_with(EngineError, "group 2 cannot begin", lambda: engine.devices.launch(2, {0: Verify()}))
        engine.devices.launch(0, {0: Verify(), 1: Draft(4)})
        fails_with(EngineError, "group 0 cannot begin", lambda: engine.devices.launch(0, {2: Verify()}))
        for ask in (engine.settle, lambda: engine.snapshot(1), lambda: engine.devices.launch(1, {1: Verify()})):
            fails_with(EngineError, "still under way: land", ask)
        with pytest.raises(EngineError, match="step of slot 0 is still under way"):
            engine.devices.launch(1, {2: Draft(8)})  # blocks of another width: the states of all slots are laid out for one
        fails_with(EngineError, "land it first", lambda: engine.step({2: Verify()}))
        results = engine.devices.land(0)
        assert sorted(results) == [0, 1] and results[1].tokens.size == 4
        fails_with(EngineError, "group 0 has no step under way", engine.devices.land, 0)
    finally:
        engine.close()


def test_no_buffer_grows_under_a_step(pair):
    """A lane's thread would compute in memory that was given back."""
    engine = engine_of(pair, 4)
    try:
        for slot in range(4):
            engine.admit()
            engine.step({slot: Prefill([1 + slot, 2])})
        seen = set()
        for _ in range(200):  # a step that has ended before it is looked at says nothing
            engine.devices.launch(0, {0: Verify(), 1: Verify()})
            part = engine.devices.flying[0].graph.parts[0]
            seen.add(lib.pgs_graph_held(part.handle))
            for slot, result in engine.devices.land(0).items():
                engine.accept(1, int(result.ids[0]), slot)
            assert lib.pgs_graph_held(part.handle) == 0
            if 1 in seen:
                break
        assert 1 in seen and seen <= {0, 1}
        lib.pgs_graph_hold(part.handle, True)
        refused = pytest.raises(EngineError, match=r"needs a compute buffer of \d+ bytes .* land it first")
        with closing(larger_than(part.allocator)) as graph, refused:
            graph.plan()
        lib.pgs_graph_hold(part.handle, False)
        engine.devices.launch(0, {0: Verify(), 1: Verify()})  # what was refused has moved nothing
        assert sorted(engine.devices.land(0)) == [0, 1]
        with closing(larger_than(part.allocator)) as graph:
            graph.plan()
    finally:
        engine.close()


def larger_than(allocator, nodes=1):
    """A graph that needs a larger buffer than the allocator has."""
    graph, size = Graph(allocator), lib.pgs_allocator_buffer_size(allocator.handle) // 8 + 1024  # of x, and of a sum
    x = lib.ggml_new_tensor(graph.ctx, lib.GGML_TYPE_F32, 1, (size,))
    for _ in range(nodes):
        x = graph.add(x, x)
    graph.expand(x)
    return graph


def test_no_step_begins_in_a_buffer_that_is_being_exchanged():
    """A step that was about to begin saw the buffer of before, after the one who plans had seen that no step was under way."""
    with (
        closing(Backend(pick_device("CPU"), 1)) as backend,
        closing(GraphAllocator(backend, "plain")) as allocator,
        closing(larger_than(allocator)) as one,
    ):
        one.plan()

        refused = []

        def plan():
            for _ in range(300):
                with closing(larger_than(allocator, 1000)) as graph:
                    try:
                        graph.plan()
                    except EngineError as error:  # it would move a held buffer
                        refused.append(str(error))

        with ThreadPoolExecutor(1) as pool:
            planning, moved = pool.submit(plan), 0
            while not planning.done():
                lib.pgs_graph_hold(one.handle, True)
                held = allocator.buffer_bytes
                moved += any(allocator.buffer_bytes != held for _ in range(20))
                lib.pgs_graph_hold(one.handle, False)
            planning.result()
        assert moved == 0 and allocator.buffer_bytes > 4096
        assert 0 < len(refused) < 300 and all("land it first" in error for error in refused)


@pytest.mark.parametrize("n_slots", [2, 3, 5, 8, 13, 64])
def test_the_halves_of_any_slots_share_no_graph(n_slots):
    for low in range(n_slots - 1):
        for high in range(low + 1, n_slots):
            for slots in ({low, high}, set(range(low, high + 1))):
                one, other = halves(slots, n_slots)
                assert {*one, *other} == slots and one and other
                assert not set(covering(one, n_slots).slots) & set(covering(other, n_slots).slots)


def rounds(control, costs, n, kind=PLAIN_STEP):
    out = []
    for _ in range(n):
        out.append(control.choose(8, kind))
        control.observe(8, kind, out[-1], costs[out[-1]])
    return out


def test_groups_only_where_they_pay(pair):
    control = PipelinePolicy()
    assert rounds(control, {False: 8.0, True: 5.0}, 2 * TRIES) == [False] * TRIES + [True] * TRIES
    later = rounds(control, {False: 8.0, True: 5.0}, RETRY_EVERY + 10)
    assert later.count(False) == 3 and sum(rounds(control, {False: 2.0, True: 5.0}, 2 * RETRY_EVERY)[-RETRY_EVERY // 2 :]) <= 3
    assert not any(rounds(PipelinePolicy(), {False: 5.0, True: 4.95}, 2 * TRIES + 100)[2 * TRIES :])  # not worth a change
    assert rounds(control, {False: 8.0, True: 5.0}, 1, StepPlan.of("d", 4)) == [False]  # another kind of step has costs of its own
    assert all(rounds(PipelinePolicy(True), {True: 9.0}, 5))
    # They take buffers, and no gain of theirs has been measured on GPUs.
    for groups, there in ((1, 0), (2, 2), ("auto", 2)):
        with pair.session.batch(4, groups=groups) as scheduler:
            assert scheduler.runner.devices.groups == there
    for slots, options in ((4, {}), (1, {"groups": 2})):
        with pair.session.batch(slots, **options) as scheduler:
            assert not scheduler.runner.devices.groups
    for groups in (0, 3, "two"):
        fails_with(EngineError, "`groups`, if it is not 'auto',", pair.session.batch, 4, groups=groups)


def test_they_are_not_measured_where_threads_would_wait_for_each_others_cores(pair, monkeypatch):
    engine = engine_of(pair, 2)
    try:
        monkeypatch.setattr("pyggml_spec.multi_device.pipeline.default_threads", lambda: 1)
        assert policy_of(engine, None) is None and policy_of(engine, 2).pinned is True
        monkeypatch.setattr("pyggml_spec.multi_device.pipeline.default_threads", lambda: 2)
        assert policy_of(engine, None).pinned is None and policy_of(engine, 1) is None
    finally:
        engine.close()


WIDTHS = (8, 2, 1, 4, 8, 1, 3)


@pytest.fixture(scope="module", params=["mtp", "eagle3", "peagle", "assistant", "dflash2", "dspark"])
def drafting(request, tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("pair"), request.param)
    yield made
    made.close()


def drafts_of(engine, slot, step):
    """The drafts of a block whose width and accepted rows follow from ``step``, which counts for the slot alone."""
    width = WIDTHS[step % len(WIDTHS)]
    result = engine.step({slot: Draft(width) if width > 1 else Verify()})[slot]
    take(engine, slot, step, result)
    return result.tokens.tolist()


def take(engine, slot, step, result):
    rows = 1 + step % len(result.ids)
    engine.accept(rows, int(result.ids[rows - 1]), slot)


def alone(pair, text, steps):
    engine = pair.session.runner
    engine.reset()
    engine.prefill(text)
    return [drafts_of(engine, 0, i) for i in range(steps)]


def test_drafts_of_several_slots_are_those_of_each_alone(drafting):
    texts, batch = prompts(4), drafting.batch(4)
    want, slots = [alone(drafting, text, 14) for text in texts], [batch.admit() for _ in texts]
    got, done, rng = [[] for _ in texts], [0] * 4, np.random.default_rng(1)
    for slot, text in zip(slots, texts):
        batch.step({slot: Prefill(text)})
    while min(done) < 14:
        who = [slot for slot in slots if done[slot] < 14 and rng.random() < 0.7]
        if not who:
            continue
        work = {slot: Draft(w) if (w := WIDTHS[done[slot] % len(WIDTHS)]) > 1 else Verify() for slot in who}
        for slot, result in batch.step(work).items():
            take(batch, slot, done[slot], result)
            got[slot].append(result.tokens.tolist())
            done[slot] += 1
    assert got == want


def test_drafts_of_slots_after_rollbacks(drafting):
    texts = prompts(5)
    expected = dict(enumerate(drafting.solo(text, 60) for text in texts))
    out = run(drafting.batch(5), texts, 24, random_work(np.random.default_rng(3), expected, 8))
    assert all(drafting.agrees(text, got) for text, got in zip(texts, out))
    engine, text = drafting.session.runner, prompts(3)[2]
    engine.reset()
    engine.prefill(text)
    for rows in (3, 8, 1):
        first = engine.fused_step(8)
        engine.rollback(engine.rollback_range()[0])
        again = engine.fused_step(8)
        assert again.tokens.tolist() == first.tokens.tolist()
        engine.accept(rows, int(again.ids[rows - 1]))
    engine, text = drafting.session.runner, prompts(4)[3]
    want = alone(drafting, text, 2)
    engine.reset()
    engine.prefill(text)
    engine.fused_step(8)
    assert engine.fused_step(8).tokens.tolist() == want[0]
    text, batch = prompts(3)[2], drafting.batch(1)
    slot, out = batch.admit(), {0: []}
    accept(batch, batch.step({slot: Prefill(text)}), out)
    while len(out[0]) < 20:
        accept(batch, batch.step({slot: Draft(4)}), out)
    assert out[0][:20] == drafting.solo(text, 20)


def test_slots_and_prompts_of_every_length(drafting):
    """Its first row is paired with zeros, not with what the last sequence there left."""
    text, batch = prompts(2)[1][:1], drafting.batch(2)
    want = alone(drafting, text, 3)
    for _ in range(2):
        slot = batch.admit()
        batch.step({slot: Prefill(text)})
        assert [drafts_of(batch, slot, i) for i in range(3)] == want
        batch.release(slot)
    # In one chunk, in several, and with its last token alone: the hidden state of the token before is carried from chunk to chunk.
    engine, rng = drafting.session.runner, np.random.default_rng(4)
    text = rng.integers(0, 256, 120).tolist()
    want = alone(drafting, text, 3)
    for cuts in ((119,), (1, 2), (64, 96), (50,)):
        engine.reset()
        for first, end in zip((0, *cuts), (*cuts, 120)):
            engine.prefill(text[first:end])
        assert [drafts_of(engine, 0, i) for i in range(3)] == want


@pytest.mark.parametrize("slots", [1, 3])
def test_drafts_and_verified_rows_are_chosen_apart(drafting, slots):
    """Three drafts in a graph of eight rows are those of a graph of four, and what is accepted of them leaves the same after."""
    text, batch = prompts(3)[2], drafting.batch(slots)
    seen = []
    for verified in (0, 8, 16):
        slot = batch.admit()
        batch.step({slot: Prefill(text)})
        out = []
        for rows in (2, 4, 1, 3):
            result = batch.step({slot: Draft(4, padded_len=verified)})[slot]
            assert len(result.tokens) == len(result.ids) == 4
            out.append((result.tokens.tolist(), result.ids.tolist()))
            batch.accept(rows, int(result.ids[rows - 1]), slot)
        seen.append(out)
        batch.release(slot)
    assert seen[0] == seen[1] == seen[2]
    slot = batch.admit()
    batch.step({slot: Prefill(text)})
    fails_with(EngineError, "verified rows is 2", lambda: batch.step({slot: Draft(4, padded_len=2)}))
    batch.release(slot)


@pytest.mark.parametrize("slots", [1, 3])
def test_drafts_that_are_looked_at_first_are_the_same(drafting, slots):
    """A constraint has the drafts made by a graph of their own, and may pass fewer of them on."""
    texts, batch = prompts(slots), drafting.batch(slots)
    want = [alone(drafting, text, 5) for text in texts]
    for text in texts:
        slot = batch.admit()
        batch.step({slot: Prefill(text)})
    seen = {}
    for step, width in enumerate(WIDTHS[:5]):

        def check(drafts, slot, step=step):
            return seen.setdefault((slot, step), drafts.tolist()) and len(drafts)

        work = {slot: Draft(width, check=partial(check, slot=slot)) if width > 1 else Verify() for slot in range(slots)}
        for slot, result in batch.step(work).items():
            assert result.tokens.tolist() == want[slot][step]
            assert width == 1 or seen[slot, step] == result.tokens[1:].tolist()
            take(batch, slot, step, result)


SCRIPT = """
import sys
import pyggml_spec as ps

with ps.load(device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
    text, stats = session.generate("def f(", 12, ignore_end=True)
    with session.concurrent(slots=2, prefix_memory=0) as server:
        assert server.submit("def f(", 12, ignore_end=True).result(60)[0] == text
assert stats.emitted == 12
print([name for name in sys.modules if name.startswith("pyggml_spec.multi_device")])
"""


def test_one_device_imports_no_module_of_several():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
