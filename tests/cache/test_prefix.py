"""Prompts that begin alike: what is reused, and that nothing else changes. Every comparison is exact."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from ggml.kernel_graphs import LEVELS
from pairs import write_pair
from random_gguf.archs import write_qwen3
from random_gguf.model import Shape, write_dflash

import pyggml_spec as ps
from pyggml_spec.cache.prefix import ROWS, STATE, ChunkStore, PrefixCache, chunk_keys, end_keys
from pyggml_spec.engine.engine import generate
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.engine.stats import Stats

pytestmark = pytest.mark.slow
CHUNK, N_CTX, WIDTH = 32, 1024, 8
MANY = 1 << 30


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


KINDS = ["qwen35", "mtp", "eagle3", "assistant", "gemma4", "qwen3"]  # states, what chains of drafts leave, rings, rows alone
OTHERS = ["dflash2", "dspark"]  # other kinds of layers: test_prefix_slots.py


@pytest.fixture(scope="module", params=KINDS)
def session(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target, draft = write_pair(folder, request.param, Shape(window=12))
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=N_CTX, draft_width=WIDTH, chunk=CHUNK) as loaded:
        yield loaded


@pytest.fixture
def engine(session):
    return session.runner


@dataclass
class Run:
    text: list[int]
    stats: Stats
    left: np.ndarray  # all that the prompt left: rows, states, windows
    reused: int = 0
    where: dict | None = None


def answer(engine, prompt, cache=None, mode=SPECULATIVE, n=12) -> Run:
    """One request, through ``cache`` or from nothing."""
    reuse = None
    if cache is None:
        engine.reset(mode == SPECULATIVE)
    else:
        reuse = cache.begin(prompt, mode == SPECULATIVE)
    stats, left = Stats(), None
    options = GenerationOptions(n, mode, WIDTH)
    computed = (lambda done, total: cache.computed()) if cache is not None else None
    text = []
    for block in generate(engine, prompt, options, stats, prefill_progress=computed, cached=reuse.tokens if reuse else 0):
        if left is None:
            with engine.sequence.whole(len(prompt), mode == SPECULATIVE) as pieces:
                left = pieces.read()
        text += block
    if cache is not None:
        cache.save()
    return Run(text, stats, left, reuse.tokens if reuse else 0, reuse.chunks if reuse else None)


def assert_same(got: Run, want: Run) -> None:
    assert got.text == want.text and np.array_equal(got.left, want.left)
    for name in ("drafted", "matched", "matched_at", "steps", "emitted"):
        assert getattr(got.stats, name) == getattr(want.stats, name)
    assert got.stats.drafted > 0 or want.stats.mode == PLAIN


@pytest.fixture
def cache(engine):
    with_close = PrefixCache(engine, MANY)
    yield with_close
    with_close.close()


def test_reuse_by_one_sequence(engine, cache):
    prompt = tokens(1, 330)
    want = answer(engine, prompt)
    first, *others = [answer(engine, prompt, cache) for _ in range(3)]
    assert first.reused == 0
    for got in (first, *others):
        assert_same(got, want)
    assert all(got.reused == 320 and got.where == {"in place": 10, "memory": 0, "disk": 0} for got in others)
    shared, stateful = tokens(2, 300), engine.sequence.stateful
    prompts = [shared + tokens(seed, 150) for seed in (3, 4, 5)]
    runs = [answer(engine, prompt, cache) for prompt in prompts]
    assert [run.reused for run in runs] == [0, 256 if stateful else 288, 288]
    for run, prompt in zip(runs, prompts):
        assert_same(run, answer(engine, prompt))
    # Every turn is the prompt before, the answer to it, and more: what was generated is computed again, as without a cache.
    prompt, prompts, runs = tokens(6, 70), [], []
    for turn in range(4):
        runs.append(answer(engine, prompt, cache))
        prompts.append(prompt)
        prompt = prompt + runs[-1].text + tokens(20 + turn, 40)
    assert [run.reused for run in runs] == [0, *(len(before) // CHUNK * CHUNK for before in prompts[:-1])]
    for run, prompt in zip(runs, prompts):
        assert_same(run, answer(engine, prompt))


def test_rows_that_were_overwritten(engine, cache):
    one, two = tokens(7, 200), tokens(8, 260)
    want = answer(engine, one), answer(engine, two)
    answer(engine, one, cache), answer(engine, two, cache)
    for prompt, fresh in ((one, want[0]), (two, want[1])) * 2:
        run = answer(engine, prompt, cache)
        assert_same(run, fresh)
        assert run.where == {"in place": 0, "memory": (len(prompt) - 1) // CHUNK, "disk": 0}
    # Measuring step costs, for instance, overwrites what was in place.
    prompt = tokens(9, 100)
    want = answer(engine, prompt)
    answer(engine, prompt, cache)
    engine.reset()
    engine.prefill([1] * 300)
    run = answer(engine, prompt, cache)
    assert run.reused == 0
    assert_same(run, want)


@pytest.mark.parametrize("length", [1, 32, 33, 64])
def test_a_prompt_always_leaves_a_token_to_compute(engine, cache, length):
    prompt = tokens(10, length)
    want = answer(engine, prompt)
    for _ in range(2):
        run = answer(engine, prompt, cache)
        assert_same(run, want)
    assert run.reused == (length - 1) // CHUNK * CHUNK


def test_prompts_of_each_kind_and_interrupted_ones(engine, cache):
    """A plain sequence has no drafter rows: drafting after it would be blind."""
    prompt = tokens(11, 100)
    want = answer(engine, prompt), answer(engine, prompt, mode=PLAIN)
    plain, speculative = answer(engine, prompt, cache, PLAIN), answer(engine, prompt, cache)
    assert plain.reused == speculative.reused == 0
    assert_same(speculative, want[0])
    assert_same(answer(engine, prompt, cache, PLAIN), want[1])
    prompt = tokens(12, 330)
    want = answer(engine, prompt)
    cache.begin(prompt)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 8

    assert engine.prefill(prompt, lambda done, total: cache.computed(), stop) is None
    run = answer(engine, prompt, cache)
    assert run.reused == 256  # eight chunks; a state is kept at the eighth
    assert_same(run, want)


def test_the_budget_holds_and_the_longest_unused_go_first(engine):
    prompts = [tokens(30 + i, 5 * CHUNK + 1) for i in range(4)]
    want = [answer(engine, prompt) for prompt in prompts]
    with engine.sequence.rows(0, 5 * CHUNK, True) as rows, engine.sequence.state(5 * CHUNK, True) as state:
        budget = 2 * (rows.nbytes + 2 * state.nbytes) + rows.nbytes // 5
    cache = PrefixCache(engine, budget)
    for i in (0, 1, 2, 0, 3):
        assert_same(answer(engine, prompts[i], cache), want[i])
        assert 0 <= cache.used_bytes <= budget
    kept = [answer(engine, prompts[i], cache).reused for i in (3, 0, 1)]
    assert kept[0] == 5 * CHUNK and kept[1] >= 4 * CHUNK > kept[2]
    cache.close()
    assert cache.used_bytes == 0


@pytest.mark.parametrize("budget", [0, 1000])
def test_no_memory_is_no_error(engine, budget):
    """What is in place is still reused where rows are enough; otherwise the reason is said."""
    cache, prompt = PrefixCache(engine, budget), tokens(13, 200)
    want = answer(engine, prompt)
    for _ in range(2):
        run = answer(engine, prompt, cache)
        assert_same(run, want)
    assert run.reused == (0 if engine.sequence.stateful else 192)
    assert len(cache.notes) == (engine.sequence.stateful and budget > 0) and answer(engine, tokens(14, 200), cache).reused == 0
    cache.close()


def test_a_prompt_longer_than_the_context_touches_nothing(engine, cache):
    answer(engine, tokens(15, 100), cache)
    assert cache.begin(tokens(15, N_CTX + 1)).tokens == 0


@pytest.mark.parametrize("session", [*KINDS, *OTHERS], indirect=True)
def test_many_requests_in_random_order(engine):
    texts, rng = (tokens(40, 400), tokens(41, 400)), np.random.default_rng(42)
    with engine.sequence.rows(0, 300, True) as rows, engine.sequence.state(300, True) as state:
        cache = PrefixCache(engine, rows.nbytes + 3 * state.nbytes)
    reused = 0
    for _ in range(9):
        own, cut = texts[rng.integers(2)], int(rng.integers(1, 400))
        prompt = own[:cut] + (tokens(int(rng.integers(1000)), 30) if rng.random() < 0.5 else [])
        run = answer(engine, prompt, cache, n=6)
        reused += run.reused
        assert_same(run, answer(engine, prompt, n=6)) if rng.random() < 0.5 else None
    assert reused > 0
    cache.close()


@pytest.mark.parametrize("mode", [SPECULATIVE, PLAIN])
def test_a_session_reuses_what_requests_share_and_says_so(mode):
    """The embedded pair, real text and a real drafter: text, drafts and acceptance as of a session that reuses nothing."""
    code = Path(__file__).read_text()
    shared = code[:1400]
    prompts = [shared + "\n\n\ndef ", shared + "\n\n\nclass Queue", shared + "\n\n\ndef ", code[:1250], shared + code[5000:5400]]
    seen = {}
    for memory in (0, None):
        with ps.load(device="CPU", threads=1, draft_width=8, chunk=128, prefix_memory=memory) as session:
            seen[memory] = [session.generate(prompt, 12, mode=mode) for prompt in prompts]
    for (text, fresh), (same_text, stats) in zip(seen[0], seen[None]):
        assert same_text == text and fresh.reused_tokens == 0
        for name in ("drafted", "matched", "matched_at", "steps", "emitted", "prompt_tokens"):
            assert getattr(stats, name) == getattr(fresh, name)
        assert mode == PLAIN or stats.matched > 0
    reused, shared_chunks = [stats.reused_tokens for _, stats in seen[None]], seen[None][0][1].prompt_tokens // 128
    assert reused[0] == 0 and reused[1] == reused[2] == 128 * shared_chunks and reused[3] > 0 and reused[4] >= 128 * (shared_chunks - 1)


def test_an_abandoned_generation_is_no_obstacle(tmp_path):
    prompt = Path(__file__).read_text()[:1500]
    with ps.load(device="CPU", threads=1, draft_width=8, chunk=128, prefix_cache=tmp_path) as session:
        events = session.steps(prompt, 50)
        next(events), next(events)
        events.close()
        _, stats = session.generate(prompt, 5)
        assert stats.reused_tokens > 0 and stats.drafted > 0 and not stats.notes
    assert any(tmp_path.iterdir())
    session.close()


@pytest.mark.parametrize("kernels, drafter", [("native", False), ("native", True), ("ggml", False)])
def test_a_session_goes_on_to_the_token_where_rows_keep_their_bits(tmp_path, kernels, drafter):
    if kernels == "native" and not LEVELS:
        pytest.skip("native kernels do not run on this processor")
    target = write_qwen3(tmp_path / "t.gguf", Shape(), "Q8_0")
    draft = write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0") if drafter else None
    options = {"device": "CPU", "threads": 1, "n_ctx": 512, "kernels": kernels, **({"draft_width": 4} if drafter else {})}
    first = tokens(1, 100)
    with ps.load(target, draft, **options) as session:

        def run(prompt):
            events = list(session.steps(prompt, 20, ignore_end=True))
            return [t for event in events for t in event.tokens], events[-1].stats

        answer, _ = run(first)
        prompts = [first, first[:50] + tokens(2, 30), first, [*first, *answer, *tokens(3, 10)]]
        seen = [run(prompts[0]), run(prompts[1]), run(prompts[2])]
        seen.append(run([*first, *seen[-1][0], *tokens(3, 10)]))
    assert [stats.reused_tokens for _, stats in seen] == ([99, 50, 50, 119] if kernels == "native" else [0] * 4)
    for prompt, (text, stats) in zip(prompts, seen, strict=True):
        with ps.load(target, draft, **options) as session:
            events = list(session.steps(prompt, 20, ignore_end=True))
            assert [t for event in events for t in event.tokens] == text
            assert not drafter or (events[-1].stats.drafted, events[-1].stats.matched) == (stats.drafted, stats.matched)


@dataclass
class Copied:
    nbytes: int
    closed: bool = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Part:
    """What can be copied: ``nbytes`` of it; ``memory`` False where the device has none for the copy."""

    def __init__(self, nbytes: int, memory: bool = True):
        self.nbytes, self.memory, self.made = nbytes, memory, []

    def copy(self, wait):
        if not self.memory:
            return None
        self.made.append(Copied(self.nbytes))
        return self.made[-1]


def kept(copies: ChunkStore, number: int, nbytes: int, kind: str = ROWS, **more) -> bool:
    return copies.keep(copies.chunk(bytes([number]), number, 1), kind, Part(nbytes), **more)


def held(copies: ChunkStore) -> set[int]:
    return {key[0] for key, chunk in copies.chunks.items() if chunk.data}


def test_keys_and_budgets_of_chunks():
    # Equal chunks after different ones have other K/V rows. Without this every test of reuse passed: few prompts have a chunk in common only.
    a, b = np.arange(12), np.r_[np.arange(3), 99, np.arange(4, 12)]
    one, other = chunk_keys(a, 4, b"seed"), chunk_keys(b, 4, b"seed")
    assert len(set(one + other)) == 6 and chunk_keys(a[:8], 4, b"seed") == one[:2] != chunk_keys(a[:8], 4, b"other")
    assert len({*end_keys(a[:3], one[0]), *end_keys(a[:3], other[0])}) == 6
    # With the budget ignored the whole suite passed.
    copies = ChunkStore(100)
    assert kept(copies, 0, 60) and kept(copies, 1, 40) and copies.used_bytes == 100
    assert kept(copies, 2, 30) and copies.used_bytes <= 100 and 2 in held(copies)
    assert not kept(copies, 3, 101) and 2 in held(copies)  # what never fits drives nothing out
    copies = ChunkStore(100)
    for number in range(4):
        assert kept(copies, number, 25)
    copies.chunks[b"\0"].used[ROWS] = copies.chunks[b"\3"].used[ROWS] = 5
    assert kept(copies, 4, 25) and held(copies) == {0, 1, 3, 4} and kept(copies, 5, 25) and held(copies) == {0, 1, 3, 5}
    copies = ChunkStore(100)
    assert kept(copies, 0, 50) and kept(copies, 1, 50)
    spared = [copies.chunks[b"\0"], copies.chunks[b"\1"]]
    assert not kept(copies, 2, 10, spare=spared) and held(copies) == {0, 1} and copies.used_bytes == 100
    copies = ChunkStore(100)
    assert not copies.keep(copies.chunk(b"a", 0, 1), ROWS, Part(10, memory=False)) and copies.used_bytes == 0


def test_what_was_forgotten_is_known_again_with_a_copy(monkeypatch):
    """A copy of a forgotten chunk was in the account for ever: nothing that makes room would find it."""
    monkeypatch.setattr("pyggml_spec.cache.prefix.REMEMBERED", 2)
    copies = ChunkStore(100)
    first = copies.chunk(b"a", 0, 1)
    for number in range(3):
        copies.chunk(bytes([number]), number, 1)
    copies.forget()
    assert b"a" not in copies.chunks and copies.keep(first, ROWS, Part(60)) and copies.chunks[b"a"] is first
    assert kept(copies, 9, 80) and held(copies) == {9} and copies.used_bytes == 80
    for number in (20, 21):
        copies.chunk(bytes([number]), number, 1)
    copies.forget()
    copies.chunk(b"a", 0, 1)  # another prompt, which begins alike
    assert not copies.keep(first, ROWS, Part(10)) and copies.used_bytes == 80


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_keeping_and_using(seed):
    """The account is what is held, it never passes the budget, and everything that was dropped was freed once."""
    rng, parts = random.Random(seed), []
    copies = ChunkStore(budget := rng.choice([0, 50, 300, 1000]))
    for clock in range(200):
        copies.clock = clock
        chunk, kind = copies.chunk(bytes([number := rng.randrange(12)]), number, 1), rng.choice([ROWS, STATE])
        if kind in chunk.data:
            chunk.used[kind] = clock
            continue
        parts.append(part := Part(rng.choice([0, 1, 30, 60, 200])))
        spare = rng.sample(list(copies.chunks.values()), rng.randrange(min(3, len(copies.chunks) + 1)))
        before = {id(c): dict(c.data) for c in spare}
        assert copies.keep(chunk, kind, part, spare) == bool(part.made)
        assert copies.used_bytes == sum(c.nbytes for one in copies.chunks.values() for c in one.data.values()) <= budget
        assert all(before[id(c)].items() <= c.data.items() for c in spare)
    copies.clear()
    assert copies.used_bytes == 0 and all(copy.closed for part in parts for copy in part.made)
