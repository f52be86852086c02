"""Streams that share an engine: each gets its own tokens, whoever comes, goes or is cancelled meanwhile."""

import itertools
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engine.batch_helpers import Pair, prompts, serve
from engine.helpers import interrupt_ends_all
from random_gguf.model import Shape
from sessions import fails_with, together

import pyggml_spec as ps
from pyggml_spec.engine.batch import Prefill
from pyggml_spec.engine.engine import Engine, generate
from pyggml_spec.engine.graph_cache import HostLogits
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.scheduler import MAX_ON_GPU, MAX_PREFILL_TOKENS_WITH_DECODE
from pyggml_spec.engine.sequence import PLAIN, REFERENCE, SPECULATIVE, GenerationOptions
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import ContextError, EngineError
from pyggml_spec.sampling.sampler import Sampler, Sampling
from pyggml_spec.speculation.policy import SpeculationPolicy, StepPlan
from pyggml_spec.speculation.synthetic import SyntheticAcceptance

DRAFT = GenerationOptions(20, SPECULATIVE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("pair"), "qwen35", n_ctx=768)
    yield made
    made.close()


@pytest.fixture
def scheduler(pair):
    with _scheduler(pair, 3) as made:
        yield made


def _scheduler(pair, slots, width=None, **options) -> Engine:
    s = pair.session
    return Engine(ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=pair.n_ctx, slots=slots, **options)), width)


@pytest.mark.slow
def test_more_sequences_than_slots_all_get_their_own_tokens(pair, scheduler):
    texts = prompts(7)
    streams = [scheduler.submit(text, DRAFT) for text in texts]
    scheduler.run()
    assert [s.tokens for s in streams] == [pair.solo(text, 20) for text in texts]
    assert all(s.stats.stop_reason == "length" and s.stats.emitted == 20 for s in streams)
    assert scheduler.stats.emitted == 140 and scheduler.stats.finished == {"length": 7}
    assert scheduler.idle and not scheduler.step()


def test_catch_up_is_not_counted_as_step_time(pair, monkeypatch):
    """A prompt, and a copy of what a request has computed, catch up as well: the next step seemed to take less than nothing."""
    seen, observe = [], SpeculationPolicy.observe
    monkeypatch.setattr(SpeculationPolicy, "observe", lambda self, *args: seen.append((args[2], args[6])) or observe(self, *args))
    with _scheduler(pair, 2) as scheduler:
        for _ in range(2):  # the first time graphs are built, which is no cost of a step
            scheduler.policy = SpeculationPolicy([StepPlan.of("draft-dflash", 4)])
            scheduler.submit(prompts(1)[0], GenerationOptions(12, SPECULATIVE))
            while scheduler.step():
                scheduler.runner.state.catch_up_us += 10**9
    assert len(seen) > 4 and all(0 <= late <= milliseconds for milliseconds, late in seen)


def test_iterating_one_stream_serves_the_others_too(pair, scheduler):
    texts = prompts(2)
    a, b = (scheduler.submit(text, DRAFT) for text in texts)
    blocks = list(a)
    assert list(itertools.chain.from_iterable(blocks)) == a.tokens == pair.solo(texts[0], 20) and len(blocks[0]) == 1
    assert len(b.tokens) > 1 and b.result() == pair.solo(texts[1], 20)


def test_a_late_sequence_and_one_that_is_cancelled_do_not_disturb_the_others(pair, scheduler):
    texts = prompts(4, seed=2)
    a, b = scheduler.submit(texts[0], DRAFT), scheduler.submit(texts[1], GenerationOptions(300, SPECULATIVE))
    for _ in range(6):
        scheduler.step()
    c = scheduler.submit(texts[2], DRAFT)
    for _ in range(3):
        scheduler.step()
    b.cancel()
    d = scheduler.submit(texts[3], DRAFT)
    scheduler.run()
    assert [s.tokens for s in (a, c, d)] == [pair.solo(texts[i], 20) for i in (0, 2, 3)]
    assert b.stats.stop_reason == "cancelled" and b.tokens == pair.solo(texts[1], len(b.tokens))
    assert d.slot == b.slot  # the lowest free one


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(4))
def test_cancelling_at_any_moment_frees_the_slot(pair, scheduler, steps):
    long = [5] * 700  # two chunks
    stream = scheduler.submit(long, GenerationOptions(20, SPECULATIVE))
    for _ in range(steps):
        scheduler.step()
    stream.cancel()
    scheduler.step()
    assert stream.ended and stream.stats.stop_reason == "cancelled" and scheduler.idle
    assert not any(slot.used for slot in scheduler.runner.slots)
    text = prompts(2)[1]
    assert scheduler.submit(text, DRAFT).result() == pair.solo(text, 20)


def test_limits_ends_and_modes_are_per_sequence(pair, scheduler):
    texts = prompts(3, seed=5)
    want = [pair.solo(text, 20) for text in texts]
    end = want[1][9]
    first = want[1].index(end)
    streams = [
        scheduler.submit(texts[0], GenerationOptions(7, PLAIN)),
        scheduler.submit(texts[1], GenerationOptions(20, SPECULATIVE, is_end=lambda token: token == end)),
        scheduler.submit(texts[2], GenerationOptions(20, SPECULATIVE, is_end=lambda token: True, ignore_end=True)),
        scheduler.submit(texts[2], GenerationOptions(0, PLAIN)),
    ]
    scheduler.run()
    assert [s.tokens for s in streams] == [want[0][:7], want[1][: first + 1], want[2], []]
    assert [s.stats.stop_reason for s in streams] == ["length", "end", "length", "length"]
    assert streams[0].stats.drafted == 0 and streams[1].stats.drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [PLAIN, SPECULATIVE])
def test_a_full_context_ends_a_sequence_with_its_last_token(pair, mode):
    with _scheduler(pair, 2) as scheduler:
        text = [7] * 760
        stream = scheduler.submit(text, GenerationOptions(None, mode))
        assert stream.result() == pair.solo(text, 9) and stream.stats.stop_reason == "context" and stream.stats.emitted == 9


def test_decoding_sequences_wait_for_a_bounded_chunk_of_a_long_prompt(pair, scheduler):
    a = scheduler.submit(prompts(1)[0], GenerationOptions(60, PLAIN))
    scheduler.step()
    long, emitted = scheduler.submit([3] * 700, GenerationOptions(1, PLAIN)), [len(a.tokens)]
    while long.remaining:
        filled = long.computed
        scheduler.step()
        assert long.computed - filled <= MAX_PREFILL_TOKENS_WITH_DECODE
        emitted.append(len(a.tokens))
    gaps = [j - i for i, j in itertools.pairwise(emitted)]
    assert sum(gaps) >= len(gaps) // 2 and not any(x == y == 0 for x, y in itertools.pairwise(gaps))
    assert scheduler.stats.longest_wait > 0


def test_short_prompts_share_a_step(scheduler):
    for text in prompts(3):
        scheduler.submit(text, GenerationOptions(1, PLAIN))
    scheduler.run()
    assert scheduler.stats.steps == scheduler.stats.prompt_steps == 1


@pytest.mark.slow
def test_long_prompts_take_turns(scheduler):
    streams = [scheduler.submit([i] * 700, GenerationOptions(1, PLAIN)) for i in range(3)]
    for _ in range(3):
        scheduler.step()
    assert [s.computed for s in streams] == [512] * 3


def test_chunks_may_be_narrower_than_blocks(pair):
    """The end of a prompt that is longer than a chunk does not ride along."""
    with _scheduler(pair, 2, width=16, chunk=4) as scheduler:
        texts = prompts(2)
        a = scheduler.submit(texts[0], GenerationOptions(40, SPECULATIVE))
        scheduler.step()
        b = scheduler.submit(texts[1], GenerationOptions(8, SPECULATIVE))
        scheduler.run()
        assert [a.tokens, b.tokens] == [pair.solo(texts[0], 40), pair.solo(texts[1], 8)]


@pytest.mark.slow
def test_the_end_of_a_prompt_rides_along_with_a_block(pair):
    """The last 5 rows of a prompt and 16 drafted rows of another slot in one forward pass."""
    with _scheduler(pair, 2, width=16) as scheduler:
        texts, used = [prompts(1)[0], [9] * (MAX_PREFILL_TOKENS_WITH_DECODE + 5)], []
        a = scheduler.submit(texts[0], GenerationOptions(40, SPECULATIVE))
        scheduler.step()
        b = scheduler.submit(texts[1], GenerationOptions(40, SPECULATIVE))
        while not b.tokens:
            before = scheduler.runner.totals.rows_used
            scheduler.step()
            used.append(scheduler.runner.totals.rows_used - before)
        assert used[-1] == 21
        scheduler.run()
        assert [a.tokens, b.tokens] == [pair.solo(text, 40) for text in texts]


def test_threads_iterate_their_own_streams(pair, scheduler):
    texts = prompts(5, seed=3)
    with ThreadPoolExecutor(5) as pool:
        out = list(pool.map(lambda text: list(itertools.chain.from_iterable(scheduler.submit(text, DRAFT))), texts))
    assert out == [pair.solo(text, 20) for text in texts]


@pytest.mark.slow
def test_drafted_and_matched_are_the_same_integers_by_either_engine_and_any_prefill_chunk():
    """The embedded pair, whose drafts are sometimes right; the batch engine with one slot."""
    seen = []
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=8) as session:
        prompt = session.tokenizer.encode("def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot = items[0]\n" * 3)
        for chunk in (16, 64, 512):
            options, stats = EngineOptions(n_ctx=512, width=8, chunk=chunk), Stats()
            parts = session.backend, session.target, session.drafter, options
            engine = ModelRunner(*parts)
            text = [t for block in generate(engine, prompt, GenerationOptions(40, SPECULATIVE, 8), stats) for t in block]
            engine.close()
            seen.append((text, stats.drafted, stats.matched, stats.steps, stats.matched_at))
            with Engine(ModelRunner(*parts), 8) as scheduler:
                stream = scheduler.submit(prompt, GenerationOptions(40, SPECULATIVE))
                text, stats = stream.result(), stream.stats
            seen.append((text, stats.drafted, stats.matched, stats.steps, stats.matched_at))
    assert all(run == seen[0] for run in seen) and seen[0][2] > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_requests_at_random(pair, seed):
    assert serve(pair, seed) == []


def test_widths_are_learnt_and_then_chosen(pair, scheduler):
    """Each width is tried for the slots in use; with hopeless drafts plain decoding is what is left."""
    streams = [scheduler.submit(text, GenerationOptions(120, SPECULATIVE)) for text in prompts(2)]
    scheduler.run()
    assert scheduler.policy.calibrated(2)
    assert {p.tokens for p in scheduler.policy.plans if (2, p) in scheduler.policy.costs} == {1, 2, 4, 8, 16}
    assert all(s.stats.widths[16] >= 1 for s in streams)


@pytest.mark.slow
def test_synthetic_acceptance_is_per_sequence(scheduler):
    scheduler.pin_width(16)
    wanted = [SyntheticAcceptance(length, 15, seed=1) for length in (2, 8)]
    streams = [scheduler.submit([1, 2, 3], GenerationOptions(150, SPECULATIVE, ignore_end=True, synthetic=s)) for s in wanted]
    scheduler.run()
    low, high = (s.stats.tokens_per_step for s in streams)
    assert 1.2 < low < 3.5 and 4 < high < 13


def test_samplers_and_wrong_requests(pair, scheduler):
    """Speculation, neighbours and slots do not change what a seed gives."""
    session, text = pair.session, prompts(2)[1]

    def sampled(seed, mode):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), session.tokenizer, session.tokenizer.n_vocab)
        return scheduler.submit(text, GenerationOptions(24, mode, sampler=sampler))

    streams = [sampled(1, SPECULATIVE), sampled(2, SPECULATIVE), sampled(1, PLAIN)]
    scheduler.run()
    assert streams[0].tokens == streams[2].tokens != streams[1].tokens
    for prompt, words in (([], "empty"), ([1] * 800, "800 tokens does not fit"), ([9999], "9999")):
        fails_with(ContextError, words, scheduler.submit, prompt, DRAFT)
    assert scheduler.idle


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 4])
def test_reference_mode_in_several_slots(pair, width):
    """It was refused: plain decoding on blocks of full width, beside sequences that draft."""
    with _scheduler(pair, 3, width) as scheduler:
        texts = prompts(3, seed=9)
        modes = (REFERENCE, SPECULATIVE, REFERENCE)
        streams = [scheduler.submit(text, GenerationOptions(20, mode)) for text, mode in zip(texts, modes)]
        scheduler.run()
        assert all(pair.agrees(text, stream.tokens) and len(stream.tokens) == 20 for text, stream in zip(texts, streams))
        for stream in (streams[0], streams[2]):
            assert (stream.stats.drafted, stream.stats.steps, stream.stats.widths) == (0, 19, {width or 16: 19})


def test_one_slot_gives_what_a_session_alone_gives(pair):
    """The same graphs and the same steps: ids, counts and graphs are equal in every mode, reference included."""
    text, session = prompts(3, seed=8)[2], pair.session
    parts = session.backend, session.target, session.drafter, EngineOptions(n_ctx=pair.n_ctx, width=8)
    engine = ModelRunner(*parts)
    with Engine(ModelRunner(*parts), 8) as scheduler:
        for mode in (SPECULATIVE, PLAIN, REFERENCE):
            options, stats = GenerationOptions(30, mode, 8), Stats()
            engine.reset(drafting=mode == SPECULATIVE)
            tokens = [t for block in generate(engine, text, options, stats) for t in block]
            stream = scheduler.submit(text, options)
            assert stream.result() == tokens and len(tokens) == 30
            for name in ("emitted", "steps", "drafted", "matched", "matched_at", "widths", "stop_reason", "target_forwards"):
                assert getattr(stream.stats, name) == getattr(stats, name), (mode, name)
        kinds = [{key.at(0) for key in e.graphs.steps() if key.kind in ("plain", "verify", "fused")} for e in (engine, scheduler.runner)]
        assert kinds[0] == kinds[1]
    engine.close()


def test_a_sequence_that_fails_fails_alone(pair, scheduler):
    """NaN in one slot's K/V rows: its stream raises, its slot is cleaned, the others do not notice."""
    texts = prompts(3, seed=8)
    streams = [scheduler.submit(text, GenerationOptions(30, SPECULATIVE)) for text in texts]
    for _ in range(3):
        scheduler.step()
    scheduler.runner.kv.fill_slot(1, 0xFF)
    with pytest.raises(EngineError, match="NaN or Inf"):
        streams[1].result()
    late = scheduler.submit(texts[1], GenerationOptions(30, SPECULATIVE))
    scheduler.run()
    assert [s.tokens for s in (streams[0], late, streams[2])] == [pair.solo(text, 30) for text in texts]
    assert late.slot == 1 and scheduler.stats.finished["error"] == 1


def test_a_closed_scheduler_ends_its_streams(pair):
    scheduler = _scheduler(pair, 2)
    stream = scheduler.submit([1, 2, 3], GenerationOptions(50, PLAIN))
    next(stream)
    scheduler.close()
    scheduler.close()
    assert list(stream) == [] and stream.stats.stop_reason == "cancelled"


def test_the_last_stream_can_be_cancelled_while_it_is_read(scheduler):
    """Its reader was told that the scheduler had forgotten it."""
    stream = scheduler.submit(prompts(1)[0], DRAFT)
    next(stream)
    stream.cancel()
    assert list(stream) == [] and stream.stats.stop_reason == "cancelled"


def test_a_block_that_comes_with_the_end_is_not_lost(scheduler):
    stream = scheduler.submit(prompts(1)[0], GenerationOptions(0))
    stream.cancel()
    assert list(stream) == []
    stream.ended = False

    class Late(deque):
        def __bool__(self):
            if not stream.ended:  # it was empty when it was looked at, and the last block comes right after
                self.append(([1, 2], [1]))
                stream.ended = True
                return False
            return len(self) > 0

    stream.outputs = Late()
    assert list(stream) == [[1, 2]]


def test_closing_waits_for_the_step_of_another_thread_and_closes_once(pair, monkeypatch):
    """A second one that closed freed the caches a second time."""
    scheduler, closed = _scheduler(pair, 1), []
    real = scheduler.runner.close

    def close():
        closed.append(1)
        time.sleep(0.1)
        real()

    monkeypatch.setattr(scheduler.runner, "close", close)
    together([scheduler.close] * 2)
    assert closed == [1]


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 3, 7])
def test_a_question_of_the_caller_that_raises_ends_its_own_sequence_alone(pair, scheduler, calls):
    """The others' blocks stayed open, and the next step refused them. ``calls``: at the first token, in a block, in a later one."""
    texts, answers = prompts(3, seed=4), [False] * calls
    ends = [lambda token: False, lambda token: answers.pop(), lambda token: False]
    streams = [scheduler.submit(text, GenerationOptions(24, SPECULATIVE, is_end=is_end)) for text, is_end in zip(texts, ends, strict=True)]
    scheduler.run()
    assert [s.tokens for s in (streams[0], streams[2])] == [pair.solo(texts[i], 24) for i in (0, 2)]
    with pytest.raises(IndexError):
        streams[1].result()
    assert scheduler.stats.finished == {"error": 1, "length": 2}
    assert scheduler.submit(texts[1], DRAFT).result() == pair.solo(texts[1], 20)


def test_an_interrupt_between_the_sequences_of_a_step_ends_them_all(pair, scheduler, monkeypatch):
    """Ctrl-C while one was served left the others with open blocks."""
    streams = [scheduler.submit(text, DRAFT) for text in prompts(2)]
    scheduler.step()
    interrupt_ends_all(pair, scheduler, streams, monkeypatch, scheduler.scheduler, "finish")


def test_an_admission_that_fails_ends_what_it_admits_and_frees_the_slot(pair, monkeypatch):
    """The sequence was in no list any more: nobody ended it, and its slot was never free again."""
    with _scheduler(pair, 2) as engine_of:
        scheduler = Engine(engine_of.runner, prefix_memory=1 << 24)
        assert scheduler.prefixes is not None
        running = scheduler.submit(prompts(2)[0], GenerationOptions(400, PLAIN))
        scheduler.step()
        with monkeypatch.context() as once:
            once.setattr(scheduler.prefixes, "enter", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
            late = scheduler.submit([1, 2, 3], DRAFT)
            scheduler.step()
        assert isinstance(late.error, OSError) and running.error is None and scheduler.runner.slots[1].used is False
        late = scheduler.submit([1, 2, 3], DRAFT)
        interrupt_ends_all(pair, scheduler, [running, late], monkeypatch, scheduler.prefixes, "enter")
        assert not any(slot.used for slot in scheduler.runner.slots)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_every_cancelled_sequence_ends_although_the_end_of_one_raises(scheduler, monkeypatch, error):
    """Those behind it, which had left the queue, never ended."""
    streams = [scheduler.submit(text, GenerationOptions(400, PLAIN)) for text in prompts(6)]
    scheduler.step()
    for stream in streams:
        stream.cancel()
    end, calls = scheduler.scheduler.end, []

    def fails(*of):
        calls.append(of)
        if len(calls) == 2:
            raise error
        end(*of)

    monkeypatch.setattr(scheduler.scheduler, "end", fails)
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            scheduler.run()
    assert all(stream.ended or isinstance(stream.error, error) for stream in streams)
    assert scheduler.idle and not any(slot.used for slot in scheduler.runner.slots)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, words", [([9999], "9999 is outside"), ([1] * 99, "99 ids where"), ("ab", "gave is 'ab'"), ([0.5], "whole numbers")]
)
def test_wrong_ids_of_a_scripted_drafter_end_its_own_sequence_alone(pair, scheduler, given, words):
    """The engine refused the step that all of them shared, and every sequence ended with that."""
    texts = prompts(2)
    wrong = scheduler.submit(texts[0], GenerationOptions(20, SPECULATIVE, drafts=lambda history, count: given))
    other = scheduler.submit(texts[1], DRAFT)
    scheduler.run()
    assert other.tokens == pair.solo(texts[1], 20)
    fails_with(ContextError, words, wrong.result)


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", [PLAIN, SPECULATIVE])
def test_a_logit_that_is_no_number_wins_no_greedy_choice(pair, scheduler, monkeypatch, value, mode):
    """The largest logit of a row with NaN is NaN: its token came out again and again, and nobody said so."""
    real = HostLogits.largest

    def largest(self):
        self.values[-1, 77] = value
        return real(self)

    stream = scheduler.submit(prompts(1)[0], GenerationOptions(30, mode))
    while len(stream.tokens) < 3:
        scheduler.step()
    monkeypatch.setattr(HostLogits, "largest", largest)
    fails_with(EngineError, "NaN or Inf", stream.result)


LONG = int(os.environ.get("PYSPEC_LONG_PROMPT", "4096"))


@pytest.mark.slow
@pytest.mark.parametrize("kind, most", [("cpu", MAX_PREFILL_TOKENS_WITH_DECODE), ("gpu", MAX_ON_GPU)])
def test_no_sequence_waits_longer_than_one_prefill_step(tmp_path, monkeypatch, kind, most):
    """Between two steps of streams that decode there is one pass at most, of at most 128 tokens, or 512 on a GPU; the prompt is read to its end all the same."""
    pair = Pair(tmp_path, "qwen3", 256, Shape())
    s = pair.session
    engine = ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=LONG + 8, slots=3, width=4, chunk=512))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine.backend, "device", replace(engine.backend.device, kind=kind))
            made = Engine(engine, 4)
        with made as scheduler:
            modes = enumerate((SPECULATIVE, PLAIN))
            streams = [scheduler.submit([65 + i, 66, 67], GenerationOptions(None, mode, ignore_end=True)) for i, mode in modes]
            while not all(stream.tokens for stream in streams):
                scheduler.step()
            prompt = np.random.default_rng(1).integers(0, 256, LONG).tolist()
            long = scheduler.submit(prompt, GenerationOptions(1, SPECULATIVE))
            passes: list[tuple[int, set[int]]] = []  # rows of the prompt in each step, and who decoded in it
            forward = engine.forward

            def counted(batch, meanwhile=None):
                work = batch.items
                rows = sum(item.rows for item in work.values() if isinstance(item, Prefill))
                passes.append((rows, {slot for slot, item in work.items() if not isinstance(item, Prefill)}))
                return forward(batch, meanwhile)

            engine.forward = counted
            while not long.tokens:
                scheduler.step()
            assert sum(rows for rows, _ in passes) == LONG and max(rows for rows, _ in passes) == most
            for stream in streams:
                waits = [i for i, (_, decoding) in enumerate(passes) if stream.slot in decoding]
                assert max(b - a for a, b in pairwise(waits)) == 2, "more than one pass between two of its steps"
                assert len(waits) >= LONG // most - 1
            scheduler.cancel_all()
    finally:
        engine.close()
        pair.close()
