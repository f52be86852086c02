"""Prompts that begin alike in several slots: computed once, and every sequence still gets the tokens that it gets alone."""

import numpy as np
import pytest
from architectures import others, params
from engine.batch_helpers import Pair
from random_gguf.model import Shape

from pyggml_spec.engine.batch import Draft, Prefill
from pyggml_spec.engine.engine import Engine
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.scheduler import STATE_BEFORE_END
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.errors import EngineError

CHUNK, N_CTX, MANY = 64, 768, 1 << 30
OPTIONS = GenerationOptions(12, SPECULATIVE)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


KINDS = ["qwen35", "qwen3", "gemma4"]  # states, rows alone, rings
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
    assert all(pair.agrees(s.prompt, s.tokens) and len(s.tokens) == 12 for s in streams)
    assert pair.ties <= 1


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*KINDS, *OTHERS], indirect=True)
def test_one_after_the_other(pair, scheduler):
    """The third goes on exactly where the first two parted; drafting is not blind after a hit."""
    shared = tokens(1, 300)
    prompts = [shared + tokens(seed, 100) for seed in (2, 3, 4)] + [shared + tokens(2, 100)]
    streams = []
    for prompt in prompts:
        streams.append(scheduler.submit(prompt, OPTIONS))
        scheduler.run()
    check(pair, streams)
    # it was not known yet that a state would be wanted where they part; rows are reused to the token
    want = [0, 0, 256, 400 - STATE_BEFORE_END] if scheduler.runner.sequence.stateful else [0, 300, 300, 399]
    assert [s.stats.reused_tokens for s in streams] == want
    assert streams[3].stats.reused_from["memory"] == 7 and all(s.stats.drafted > 0 for s in streams)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("length", [36, 64, 100, 128])
def test_a_short_prompt_again(pair, scheduler, length):
    """All but its last token is there, or few where a state has to be, whole chunks or not; and a prompt that parts from it within a chunk."""
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


@pytest.mark.slow
def test_identical_prompts(pair, scheduler):
    streams = [scheduler.submit(tokens(6, 330), OPTIONS) for _ in range(4)]
    scheduler.run()
    check(pair, streams)
    assert [s.stats.reused_tokens for s in streams] == [0, 329, 329, 329]  # all but the last token, also within a chunk
    assert scheduler.stats.prompt_tokens == 333


@pytest.mark.slow
def test_the_sequence_that_computes_a_prefix_may_be_cancelled(pair, scheduler):
    prompt = tokens(7, 400)
    first, second, third = (scheduler.submit(prompt, OPTIONS) for _ in range(3))
    scheduler.step(), scheduler.step()
    first.cancel()
    scheduler.run()
    check(pair, [second, third])
    assert first.stats.stop_reason == "cancelled" and third.stats.reused_tokens == 399
    assert first.shares == second.shares == third.shares == []  # no chain of old requests stays in memory


@pytest.mark.slow
def test_reuse_while_another_sequence_decodes(pair, scheduler):
    shared = tokens(8, 260)
    a = scheduler.submit(tokens(9, 20), GenerationOptions(60, SPECULATIVE))
    scheduler.step()
    b, c = (scheduler.submit(shared + tokens(20 + i, 5), OPTIONS) for i in range(2))
    scheduler.run()
    check(pair, [b, c])
    assert a.tokens == pair.solo(a.prompt, 60) and c.stats.reused_tokens == 256


@pytest.mark.slow
def test_plain_and_speculative_prompts_are_kept_apart(pair, scheduler):
    """A plain sequence leaves no drafter rows: drafting after them would be blind."""
    prompt = tokens(11, 200)
    streams = [scheduler.submit(prompt, GenerationOptions(12, PLAIN)), scheduler.submit(prompt, OPTIONS)]
    scheduler.run()
    check(pair, streams)
    assert [s.stats.reused_tokens for s in streams] == [0, 0]


@pytest.mark.slow
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


@pytest.mark.slow
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
    snapshot = batch.snapshot(0)
    n = len(prompt) + 3

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
        with pytest.raises(EngineError, match="cannot be rolled back"):
            batch.rollback(n - 1, slot)
        assert go_on(slot) == want
    snapshot.close()
    with pytest.raises(EngineError, match="no open snapshot"):
        batch.restore(snapshot, 0)
    with pytest.raises(EngineError, match="length of the sequence is 1,"):
        batch.resume(1, slot=0)
    batch.step({0: Draft(8)})
    with pytest.raises(EngineError, match="neither accepted nor given up"):
        batch.snapshot(0)
