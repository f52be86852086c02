"""Prompts that begin alike in several slots: computed once, and every sequence still gets the tokens that it gets alone."""

import os

import numpy as np
import pytest
from architectures import others, params
from engine.batch_helpers import Pair
from random_gguf.model import Shape
from sessions import fails_with

from pyggml_spec.cache.prefix import layout_of
from pyggml_spec.cache.prefix_files import PrefixFiles, PrefixWriter
from pyggml_spec.engine.batch import Draft, Prefill
from pyggml_spec.engine.engine import Engine
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.scheduler import STATE_BEFORE_END
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.errors import EngineError
from pyggml_spec.ggml.library import versions

pytestmark = pytest.mark.slow
CHUNK, N_CTX, MANY = 64, 768, 1 << 30
OPTIONS = GenerationOptions(12, SPECULATIVE)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


KINDS = ["qwen35", "granitehybrid", "lfm2", "qwen3", "gemma4"]  # states, rows alone, rings
OTHERS = others(KINDS)


@pytest.fixture(scope="module", params=params(KINDS, ("qwen35", "gemma4")))
def pair(request, tmp_path_factory):
    """gemma4's rings of 128 rows are shorter than the prompts."""
    made = Pair(tmp_path_factory.mktemp(request.param), request.param, N_CTX, Shape(window=12))
    yield made
    made.close()


@pytest.fixture
def scheduler(pair):
    with make(pair) as made:
        yield made


def make(pair, slots=3, memory=MANY, width=8) -> Engine:
    s = pair.session
    return Engine(ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=N_CTX, slots=slots, chunk=CHUNK, width=8)), width, memory)


def check(pair, streams) -> None:
    assert all(pair.agrees(s.prompt, s.tokens) and len(s.tokens) == 12 for s in streams) and pair.ties <= 1


@pytest.mark.parametrize("pair", [*KINDS, *OTHERS], indirect=True)
def test_one_after_the_other(pair, scheduler):
    """The third goes on exactly where the first two parted; drafting is not blind after a hit."""
    shared = tokens(1, 300)
    prompts, streams = [shared + tokens(seed, 100) for seed in (2, 3, 4)] + [shared + tokens(2, 100)], []
    for prompt in prompts:
        streams.append(scheduler.submit(prompt, OPTIONS))
        scheduler.run()
    check(pair, streams)
    # it was not known yet that a state would be wanted where they part; rows are reused to the token
    want = [0, 0, 256, 400 - STATE_BEFORE_END] if scheduler.runner.sequence.stateful else [0, 300, 300, 399]
    assert [s.stats.reused_tokens for s in streams] == want
    assert streams[3].stats.reused_from["memory"] == 7 and all(s.stats.drafted > 0 for s in streams)


@pytest.mark.parametrize("count", [3, 5])
def test_all_at_once(pair, count):
    """The shared beginning is computed once, by the first sequence; the others wait for it, also for a free slot."""
    shared = tokens(5, 320)
    with make(pair) as scheduler:
        streams = [scheduler.submit(shared + tokens(10 + i, 30), OPTIONS) for i in range(count)]
        scheduler.run()
        check(pair, streams)
        assert [s.stats.reused_tokens for s in streams] == [0] + [320] * (count - 1)
        assert (scheduler.stats.prompt_tokens, scheduler.stats.reused_tokens) == (350 + 30 * (count - 1), 320 * (count - 1))


@pytest.mark.parametrize("length", [36, 64, 100, 128])
def test_a_short_prompt_again(pair, scheduler, length):
    prompt = tokens(31, length)
    first, again, other = [], [], [*prompt[:20], *tokens(32, 30)]
    for streams, ids in ((first, prompt), (again, prompt), (again, other)):
        streams.append(scheduler.submit(ids, OPTIONS))
        scheduler.run()
    check(pair, [*first, *again])
    stateful = scheduler.runner.sequence.stateful
    assert [s.stats.reused_tokens for s in again] == [length - (STATE_BEFORE_END if stateful else 1), 0 if stateful else 20]


def test_another_owner_finds_nothing(pair, scheduler):
    """Not to the token either: how much of a prompt is reused would tell what another user asked."""
    prompt = tokens(33, 100)
    for owner, reused in (("a", 0), ("b", 0), ("a", 100 - (STATE_BEFORE_END if scheduler.runner.sequence.stateful else 1))):
        stream = scheduler.submit(prompt, GenerationOptions(12, SPECULATIVE, owner=owner))
        scheduler.run()
        assert stream.stats.reused_tokens == reused, owner


def test_identical_prompts_and_cancelled_ones(pair, scheduler):
    streams = [scheduler.submit(tokens(6, 330), OPTIONS) for _ in range(4)]
    scheduler.run()
    check(pair, streams)
    assert [s.stats.reused_tokens for s in streams] == [0, 329, 329, 329]  # all but the last token, also within a chunk
    assert scheduler.stats.prompt_tokens == 333
    prompt = tokens(7, 400)
    first, second, third = (scheduler.submit(prompt, OPTIONS) for _ in range(3))
    scheduler.step(), scheduler.step()
    first.cancel()
    scheduler.run()
    check(pair, [second, third])
    assert first.stats.stop_reason == "cancelled" and third.stats.reused_tokens == 399
    assert first.shares == second.shares == third.shares == []  # no chain of old requests stays in memory


def test_reuse_beside_others_and_by_kind(pair, scheduler):
    shared, a = tokens(8, 260), scheduler.submit(tokens(9, 20), GenerationOptions(60, SPECULATIVE))
    scheduler.step()
    b, c = (scheduler.submit(shared + tokens(20 + i, 5), OPTIONS) for i in range(2))
    scheduler.run()
    check(pair, [b, c])
    assert a.tokens == pair.solo(a.prompt, 60) and c.stats.reused_tokens == 256
    # A plain sequence leaves no drafter rows: drafting after them would be blind.
    prompt = tokens(11, 200)
    streams = [scheduler.submit(prompt, GenerationOptions(12, PLAIN)), scheduler.submit(prompt, OPTIONS)]
    scheduler.run()
    check(pair, streams)
    assert [s.stats.reused_tokens for s in streams] == [0, 0]


@pytest.mark.parametrize("memory", [1, 400_000])
def test_the_budget_holds(pair, memory):
    with make(pair, memory=memory) as scheduler:
        streams = []
        for seed in (12, 13, 12, 14, 13):
            streams.append(scheduler.submit(tokens(seed, 150), OPTIONS))
            scheduler.run()
            assert 0 <= scheduler.prefixes.used_bytes <= memory
        check(pair, streams)
        scheduler.close()
        assert scheduler.prefixes.used_bytes == 0


def test_a_slot_that_was_poisoned(pair, scheduler):
    """What the sequence before left, NaN included, is gone before copies are put into the slot."""
    prompt = tokens(15, 200)
    scheduler.submit(prompt, OPTIONS)
    scheduler.run()
    for cache in (scheduler.runner.kv, scheduler.runner.draft_kv):
        cache.fill_slot(0, 0xFF)
    again = scheduler.submit(prompt, OPTIONS)
    scheduler.run()
    check(pair, [again])
    assert again.slot == 0 and again.stats.reused_tokens == 200 - (STATE_BEFORE_END if scheduler.runner.sequence.stateful else 1)


def test_a_snapshot_goes_into_any_slot(pair):
    """Taken with an uncommitted block; rollback is possible before it, and not across it."""
    batch, prompt = pair.batch(3), tokens(16, 90)
    for _ in range(3):
        batch.admit()
    batch.step({0: Prefill(prompt), 1: Prefill([5, 6, 7])})
    batch.step({0: Draft(8), 1: Draft(4)})
    batch.accept(8, 3, 0), batch.accept(1, 4, 1)
    batch.step({1: Draft(8)})  # slot 1 is in the middle of a block: that is its own business
    batch.rollback(len(prompt) + 3, 0)
    snapshot, n = batch.snapshot(0), len(prompt) + 3

    def go_on(slot):
        out = []
        for _ in range(3):
            r = batch.step({slot: Draft(8)})[slot]
            batch.accept(2, int(r.ids[1]), slot)
            out.append((r.tokens.tolist(), r.ids.tolist()))
        return out

    assert snapshot.committed == n and batch.rollback_range(0) == (n, n)
    batch.accept(1, 9, 1)
    want = go_on(0)
    for slot in (2, 0, 2):
        batch.restore(snapshot, slot)
        assert batch.rollback_range(slot) == (n, n)
        fails_with(EngineError, "cannot be rolled back", batch.rollback, n - 1, slot)
        assert go_on(slot) == want
    snapshot.close()
    fails_with(EngineError, "no open snapshot", batch.restore, snapshot, 0)
    fails_with(EngineError, "length of the sequence is 1,", batch.resume, 1, slot=0)
    batch.step({0: Draft(8)})
    fails_with(EngineError, "neither accepted nor given up", batch.snapshot, 0)


@pytest.fixture(scope="module", params=["qwen35", "granitehybrid", "lfm2", "qwen3", "gemma4"])
def any_pair(request, tmp_path_factory):
    """A hybrid, one whose rows are all there is, and one with rings."""
    made = Pair(tmp_path_factory.mktemp(request.param), request.param, N_CTX, Shape(window=12))
    yield made
    made.close()


def run(scheduler, prompt, count=12, mode=SPECULATIVE, **options):
    stream = scheduler.submit(prompt, GenerationOptions(count, mode, ignore_end=True, **options))
    stream.steps = [(tuple(block), tuple(stream.drafts)) for block in stream]
    return stream


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("mode", [SPECULATIVE, PLAIN])
def test_the_next_turn_reuses_the_answer(any_pair, slots, mode):
    """Twice, with ends in the middle of a chunk; all but the token that was never computed is there. The last turn's prompt is long: after the
    answer it comes back to whole chunks."""
    with make(any_pair, slots) as scheduler:
        prompt, before = tokens(1, 70), 0
        for turn, more in enumerate((45, 200, 90)):
            stream = run(scheduler, prompt, 21, mode)
            assert stream.stats.reused_tokens == before and any_pair.agrees(prompt, stream.tokens)
            before, prompt = len(prompt) + len(stream.tokens) - 1, prompt + stream.tokens + tokens(2 + turn, more)
        assert before % CHUNK
        if scheduler.runner.sequence.stateful:
            again = run(scheduler, prompt[: before - 100] + tokens(9, 30), 5, mode)
            assert again.stats.reused_tokens >= before - 100 - 2 * CHUNK - 45  # a state was kept within the long prompt too


def test_ends_within_blocks_and_without_reuse(any_pair):
    """A token limit and a stop in the middle of an accepted block: only what counts is kept."""
    with make(any_pair) as scheduler:
        prompt = tokens(21, 100)
        whole = run(scheduler, prompt, 30)
        for count in range(2, 12):
            cut = run(scheduler, prompt, count, reuse=False)
            assert cut.tokens == whole.tokens[:count] and cut.stats.reused_tokens == 0
            fresh = tokens(30 + count, 100)
            ended = run(scheduler, fresh, count)
            following = run(scheduler, [*fresh, *ended.tokens, 7], 8)
            assert following.stats.reused_tokens == 99 + count and any_pair.agrees([*fresh, *ended.tokens, 7], following.tokens)
    with make(any_pair) as scheduler:
        prompt = tokens(22, 200)
        first = run(scheduler, prompt, reuse=False)
        assert scheduler.prefixes.used_bytes == 0
        second = run(scheduler, prompt + first.tokens + [3])
        third = run(scheduler, prompt + first.tokens + [3], reuse=False)
        assert [s.stats.reused_tokens for s in (first, second, third)] == [0, 0, 0] and second.tokens == third.tokens


def test_another_prefix_does_not_reuse_an_end(any_pair):
    """Ends are found by all of the tokens before them, and the last token is never taken from one."""
    with make(any_pair) as scheduler:
        prompt = tokens(23, 90)
        answer = run(scheduler, prompt, 10).tokens
        whole = prompt + answer
        for at in (3, 70, 95):
            other = [*whole[:at], (whole[at] + 1) % 256, *whole[at + 1 :], 5]
            stream = run(scheduler, other, 6)
            assert stream.stats.reused_tokens <= max(CHUNK, at) and any_pair.agrees(other, stream.tokens)
        exact = run(scheduler, whole[:-1], 6)
        assert exact.stats.reused_tokens == (90 - STATE_BEFORE_END if scheduler.runner.sequence.stateful else 98)
        assert exact.tokens[0] == answer[-1]


def test_a_cancelled_answer_can_be_gone_on_with(any_pair):
    with make(any_pair) as scheduler:
        prompt = tokens(24, 80)
        stream = scheduler.submit(prompt, GenerationOptions(200, SPECULATIVE, ignore_end=True))
        for _ in range(4):
            next(stream)
        stream.cancel()
        scheduler.run()
        got = list(stream.tokens)
        following = run(scheduler, [*prompt, *got, 9], 8)
        assert following.stats.reused_tokens == 79 + len(got) and any_pair.agrees([*prompt, *got, 9], following.tokens)


@pytest.mark.parametrize("memory", [1, 300_000])
def test_ends_keep_to_the_budget(any_pair, memory):
    with make(any_pair, memory=memory) as scheduler:
        prompts = [tokens(40 + i, 120) for i in range(4)]
        for prompt in prompts * 2:
            stream = run(scheduler, prompt)
            assert scheduler.prefixes.used_bytes <= memory and any_pair.agrees(prompt, stream.tokens)


@pytest.mark.parametrize("slots", [1, 4])
def test_drafts_and_acceptance_after_a_hit_are_those_without(tmp_path, slots):
    pair = Pair(tmp_path, "qwen35", N_CTX)

    def all_of(memory):
        with make(pair, slots, memory) as scheduler:
            first = run(scheduler, tokens(51, 200), 30)
            turn = [*first.prompt, *first.tokens, *tokens(52, 40)]
            second = run(scheduler, turn, 40)
            together = [scheduler.submit(tokens(53, 150), GenerationOptions(30, ignore_end=True)) for _ in range(4)]
            many = [[(tuple(block), tuple(s.drafts)) for block in s] for s in together]
            return [first.steps, second.steps, *many], [s.stats.reused_tokens for s in (first, second, *together)]

    try:
        assert pair.session.backend.level is not None, "this test needs a processor with kernels of our own"
        (with_hits, reused), (without, nothing) = all_of(MANY), all_of(0)
        assert with_hits == without and any(drafts for steps in without for _, drafts in steps)
        assert reused == [0, 229, 0, 149, 149, 149] and nothing == [0] * 6
    finally:
        pair.close()


def files_of(engine, folder):
    return PrefixFiles(folder, layout_of(engine, versions(), shared=True), MANY)


def with_files(pair, folder, slots=2):
    s = pair.session
    engine = ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=N_CTX, slots=slots, chunk=CHUNK, width=8))
    return Engine(engine, 8, MANY, files=files_of(engine, folder))


def test_the_next_process_goes_on_where_the_last_one_was(any_pair, tmp_path):
    prompt = tokens(61, 3 * CHUNK + 20)
    with with_files(any_pair, tmp_path) as scheduler:
        first = run(scheduler, prompt)
    kinds = [name.rsplit(".", 1)[1] for name in os.listdir(tmp_path)]
    assert kinds.count("rows") == 4 and bool(kinds.count("state")) == scheduler.runner.sequence.stateful
    following = [*prompt, *first.tokens, *tokens(62, 30)]
    with with_files(any_pair, tmp_path, 3) as scheduler:
        second = run(scheduler, following)
        assert second.stats.reused_tokens == len(prompt) + 11 and any_pair.agrees(following, second.tokens)
        assert second.stats.reused_from == {"in place": 0, "memory": 0, "disk": 4} and not second.stats.notes


def test_damaged_files_and_files_of_one_slot(any_pair, tmp_path):
    prompt = tokens(63, 3 * CHUNK + 20)
    with with_files(any_pair, tmp_path) as scheduler:
        first = run(scheduler, prompt)
    following = [*prompt, *first.tokens, *tokens(64, 30)]
    for path in tmp_path.iterdir():  # cut short: as a crash of the machine may leave them
        path.write_bytes(path.read_bytes()[:-1])
    with with_files(any_pair, tmp_path) as scheduler:
        second = run(scheduler, following)
        assert second.stats.reused_tokens == 0 and any_pair.agrees(following, second.tokens)
        assert any("cut short" in note for note in second.stats.notes)
    with with_files(any_pair, tmp_path) as scheduler:  # written again
        assert run(scheduler, following).stats.reused_tokens >= 3 * CHUNK
    engine = any_pair.batch(1, chunk=CHUNK)
    assert layout_of(engine, versions()) != layout_of(engine, versions(), shared=True)
    assert layout_of(engine, versions(), shared=True) == layout_of(any_pair.batch(2, chunk=CHUNK), versions(), shared=True)


def test_a_full_disk_is_said_and_no_answer_is_affected(any_pair, tmp_path, monkeypatch):
    with with_files(any_pair, tmp_path) as scheduler:
        monkeypatch.setattr("pyggml_spec.cache.prefix_files.replacing", _full)
        first = run(scheduler, tokens(65, 150))
        scheduler.prefixes.writer.close()
        assert any("No space left" in note for note in scheduler.prefixes.take_notes())
        assert any_pair.agrees(tokens(65, 150), first.tokens) and not os.listdir(tmp_path)


def _full(*_, **__):
    raise OSError(28, "No space left on device")


def test_an_unexpected_error_does_not_stop_the_writer(tmp_path, monkeypatch):
    """The thread ended without a word: nothing was written any more, and what waited counted for ever."""
    files, keys = PrefixFiles(tmp_path, "layout", MANY), [bytes([i]) * 32 for i in range(3)]
    store = files.store

    def fails_at_first(key, kind, payload):
        if key != keys[2]:
            raise ValueError("no\nbytes")
        store(key, kind, payload)

    monkeypatch.setattr(files, "store", fails_at_first)
    writer = PrefixWriter(files)
    for key in keys:
        writer.put(key, "rows", np.zeros(10, np.uint8))
    writer.close()
    assert writer.take_notes() == [f"the prefix cache {tmp_path} cannot be written: ValueError: no bytes; the text is not affected"]
    assert files.has(keys[2], "rows") and not files.has(keys[0], "rows") and not writer.under_way and not writer.waiting_bytes


def test_what_waits_for_the_disk_is_bounded(any_pair, tmp_path, monkeypatch):
    monkeypatch.setattr("pyggml_spec.cache.prefix_files.MOST_UNWRITTEN", 1)
    files = PrefixFiles(tmp_path, "layout", MANY)
    writer = PrefixWriter(files)
    writer.write = lambda *job: None  # a disk that takes nothing
    assert writer.wants(bytes(32), "rows", 1000)
    writer.put(bytes(32), "rows", np.zeros(1000, np.uint8))
    assert not writer.wants(bytes(32), "rows", 1000) and not writer.wants(bytes(31) + b"1", "rows", 1)


def test_nothing_is_kept_of_what_is_not_finite(any_pair):
    """Its rows went into the cache: what continued after them had no drafts, without a note."""
    with make(any_pair) as scheduler:
        prompt = tokens(71, 100)
        stream = scheduler.submit(prompt, GenerationOptions(30, SPECULATIVE, ignore_end=True))
        while len(stream.tokens) < 4:
            scheduler.step()
        scheduler.runner.resources.draft_kv.fill_slot(stream.slot, 0xFF)
        scheduler.run()
        assert stream.stats.nan_drafts == 1 and any("is not kept for later prompts" in note for note in stream.stats.notes)
        turn = run(scheduler, prompt + stream.tokens + tokens(72, 20), 12)
        assert turn.stats.nan_drafts == 0 and turn.stats.reused_tokens <= len(prompt) and turn.stats.drafted > 8
        assert any_pair.agrees(turn.prompt, turn.tokens)
    with make(any_pair) as scheduler:
        prompt, used = tokens(73, 4 * CHUNK + 9), 0
        stream = scheduler.submit(prompt, GenerationOptions(4, PLAIN))
        while stream.computed < 3 * CHUNK:
            scheduler.step()
            used = max(used, scheduler.prefixes.used_bytes)
        scheduler.runner.kv.fill_slot(stream.slot, 0xFF)
        scheduler.run()
        assert stream.error is not None and scheduler.prefixes.used_bytes == 0
        assert used or scheduler.runner.sequence.stateful


def test_nor_of_chunks_before_those_that_another_slot_brought(any_pair):
    """What is brought back between two passes says nothing of the chunks before it, which this slot computed: their copies stayed."""
    with make(any_pair) as scheduler:
        engine, cache, prompt = scheduler.runner, scheduler.prefixes, tokens(74, 4 * CHUNK + 9)
        slots = [engine.admit(), engine.admit()]

        def chunks(slot, count):
            engine.step({slot: Prefill(prompt[engine.slots[slot].cursor.committed :][:CHUNK], more=True)})
            cache.computed(slot, wanted=True)
            return chunks(slot, count - 1) if count > 1 else None

        for slot in slots:
            cache.enter(slot, prompt, True)
        chunks(slots[0], 1)
        mine = cache.store.chunks.copy()
        chunks(slots[1], 3)
        assert cache.restore(slots[0]).tokens == 3 * CHUNK
        cache.discard(slots[0])
        assert [bool(chunk.data) for chunk in mine.values()] == [False, True, True, False] and cache.used_bytes > 0
