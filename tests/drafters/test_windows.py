"""Sliding layers of drafters keep a ring of rows: drafts are those of a cache that keeps every position."""

from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
from drafters.parity import write_simple
from random_gguf.archs import WRITERS
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.model import Shape, write_dflash
from random_gguf.mtp import write_mtp_target

import pyggml_spec as ps
from pyggml_spec.cache.kv import padded
from pyggml_spec.cache.prefix import PrefixCache
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.resources import Resources
from pyggml_spec.engine.runner import ModelRunner

pytestmark = pytest.mark.slow
WINDOW, CHUNK, WIDTH, RING = 12, 64, 8, 256
LENGTHS = (0, 3, 7, 1, 0, 5, 2)  # accepted drafts of blocks, in turn


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


PAIRS = {
    "dflash": ("qwen35", write_dflash), "dflash of a target with windows": ("laguna", write_dflash), "dflash2": ("qwen35", write_dflash2),
    "dspark": ("qwen35", write_dspark), "a small model": ("qwen35", partial(write_simple, small="gemma3")), "three MTP layers": ("mimo2", None),
    "dflash and an MTP layer": (write_mtp_target, write_dflash),
}  # fmt: skip


@pytest.fixture(scope="module", params=PAIRS)
def session(request, tmp_path_factory):
    folder, (target, draft), shape = tmp_path_factory.mktemp("pair"), PAIRS[request.param], Shape(window=WINDOW)
    own = partial(write_mtp_target, arch=target) if draft is None else target
    path = (WRITERS[own] if isinstance(own, str) else own)(folder / "t.gguf", shape)
    drafts = [draft(folder / "d.gguf", shape)] if draft is not None else []
    with ps.load(path, [*drafts, *([path] if callable(own) else [])], device="CPU", threads=1, n_ctx=256) as session:
        yield session


@contextmanager
def engine_of(session, n_ctx=1024, chunk=CHUNK, **options):
    width = min(WIDTH, session.drafter.block_size)
    with_close = ModelRunner(
        session.backend, session.target, session.drafter, EngineOptions(n_ctx=n_ctx, chunk=chunk, width=width, **options)
    )
    try:
        yield with_close
    finally:
        with_close.close()


@pytest.fixture
def all_rows(monkeypatch):
    """Drafters' caches keep every position from now on; targets' are as they were."""
    cache = Resources.cache

    def without_ring(self, shapes, types, window=0, widest=0, draft=False, homes=()):
        return cache(self, shapes, types, 0 if draft else window, widest, draft, homes)

    return lambda: monkeypatch.setattr(Resources, "cache", without_ring)


def drafted(engine, prompt, blocks, cache=None):
    """Tokens of each block, and the sums of its hidden rows; drafters take turns, and some drafts are accepted, right or not."""
    out, methods, done = [], [member.method for member in engine.resources.members], 0
    if cache is None:
        engine.reset()
    else:
        done = cache.begin(prompt).tokens
    engine.prefill(prompt[done:], lambda *_: cache.computed() if cache is not None else None)
    for i in range(blocks):
        result = engine.fused_step(drafter=methods[i // 3 % len(methods)])
        accepted = min(LENGTHS[i % len(LENGTHS)], engine.options.width - 1)
        out.append((result.tokens.tolist(), engine.graphs.last.host["draft_sum"].tolist()))
        engine.accept(accepted + 1, int(result.ids[accepted]))
    return out


@pytest.mark.parametrize("chunk", [CHUNK, RING])
def test_drafts_are_those_of_all_rows(session, all_rows, chunk):
    """Before the ring wraps bit for bit, past it to rounding: sums begin with other rows. A second sequence sees nothing of the first."""
    with engine_of(session, chunk=chunk) as engine:
        reads = any(member.whole_model for member in engine.resources.members)  # rows of a chunk see those before it
        assert engine.draft_kv.ring == padded(WINDOW + chunk if reads else max(WINDOW + WIDTH, chunk))
        before, far, again = (drafted(engine, tokens(seed, count), 14) for seed, count in ((1, 100), (2, 3 * RING - 20), (1, 100)))
        assert engine.cursor.committed < RING and before == again
    all_rows()
    with engine_of(session, chunk=chunk) as engine:
        assert not engine.draft_kv.ring
        assert drafted(engine, tokens(1, 100), 14) == before
        linear = drafted(engine, tokens(2, 3 * RING - 20), 14)
        assert engine.cursor.committed > 3 * RING
    assert [block for block, _ in linear] == [block for block, _ in far]
    np.testing.assert_allclose(*(np.concatenate([sums for _, sums in blocks]) for blocks in (linear, far)), rtol=1e-2, atol=1e-2)


SCRIPTS = (
    (250, [3, 0, 7, *[None] * 4, 5, 1, 7, 0, 4]),
    (505, [0, 2, 7, *[None] * 4, 1, 0, 5, 6, 1]),
    (3 * RING - 30, [7, 5, 0, *[None] * 4, 7, 0, 7, 1, 3]),
)  # tokens of the prompt; accepted drafts of each block, None for a plain token


def alone(engine, prompt, script):
    engine.reset()
    engine.prefill(prompt)
    out = []
    for accepted in script:
        result = engine.plain_step() if accepted is None else engine.fused_step()
        out.append(result.tokens.tolist())
        rows = min((accepted or 0) + 1, engine.options.width)
        engine.accept(rows, int(result.ids[rows - 1]))
    return out


def test_slots_draft_what_each_would_alone(session):
    """On both sides of a wrap, after plain tokens whose rows catch up, beside slots that do nothing, and where another sequence was."""
    texts = [tokens(seed, count) for seed, (count, _) in enumerate(SCRIPTS)]
    with engine_of(session) as engine:
        expected = [alone(engine, text, script) for text, (_, script) in zip(texts, SCRIPTS)]
    with engine_of(session, slots=3) as batch:
        for turn in range(2):
            of_slot = {batch.admit(): (i + turn) % 3 for i in range(3)}  # the second time each slot has another sequence
            out, left = {slot: [] for slot in of_slot}, {slot: list(SCRIPTS[i][1]) for slot, i in of_slot.items()}
            for slot, i in of_slot.items():
                for first in range(0, len(texts[i]), CHUNK):
                    batch.step({slot: Prefill(texts[i][first : first + CHUNK])})
            step = 0
            while unfinished := [slot for slot in of_slot if left[slot]]:
                step += 1
                items = {
                    slot: Verify() if left[slot][0] is None else Draft(batch.options.width) for slot in unfinished if (slot + step) % 4
                }
                for slot, result in (batch.step(items) if items else {}).items():
                    rows = min((left[slot].pop(0) or 0) + 1, batch.options.width)
                    out[slot].append(result.tokens.tolist())
                    batch.accept(rows, int(result.ids[rows - 1]), slot)
            for slot, i in of_slot.items():
                assert out[slot] == expected[i]
                batch.release(slot)


def test_a_reused_prefix_brings_the_window(session):
    """Of prompts beyond the ring, from what is in place and from kept states: the drafts, with every bit, of computing them."""
    shared = tokens(7, 2 * RING + CHUNK)
    # a few tokens behind what is reused, and between them another prompt in the ring's rows
    prompts = [shared + tokens(8, 68), shared + tokens(9, 4), tokens(10, 400), shared + tokens(8, 68)]
    with engine_of(session) as engine, closing(PrefixCache(engine, 1 << 30)) as cache:
        reused, begin = [], cache.begin
        cache.begin = lambda prompt: reused.append(begin(prompt)) or reused[-1]
        got = [drafted(engine, prompt, 9, cache) for prompt in prompts]
        assert [reuse.tokens for reuse in reused] == [0, 576, 0, 640] and reused[3].chunks["memory"] == 10
        assert got == [drafted(engine, prompt, 9) for prompt in prompts]


def test_a_small_model_catches_up_in_more_rows_than_a_chunk_has(tmp_path, all_rows):
    """After many plain tokens its rows are computed together, and each reads its whole window."""
    shape = Shape(target_window=RING - 32)
    files = WRITERS["qwen35"](tmp_path / "t.gguf", shape), write_simple(tmp_path / "d.gguf", shape, small="gemma3")
    with ps.load(*files, device="CPU", threads=1, n_ctx=256) as session:
        seen = []
        for prepare in (lambda: None, all_rows):
            prepare()
            with engine_of(session, chunk=16) as engine:
                engine.prefill(tokens(1, 400))
                for _ in range(70):
                    result = engine.plain_step()
                    engine.accept(1, int(result.ids[0]))
                engine.fused_step()
                seen.append(float(engine.graphs.last.host["draft_sum"].item()))
        np.testing.assert_allclose(*seen, rtol=1e-4, atol=1e-4)


def test_a_block_far_into_the_context_reads_the_window(tmp_path):
    """Rows that no window reaches could be anything: the drafts of a sequence depend on the last ones alone, and so do the bytes of a cache."""
    shape = Shape(window=WINDOW)
    files = WRITERS["qwen35"](tmp_path / "t.gguf", shape), write_dflash(tmp_path / "d.gguf", shape)
    with ps.load(*files, device="CPU", threads=1, n_ctx=256) as session:
        sizes = []
        for n_ctx in (1024, 2048):
            with engine_of(session, n_ctx) as engine:
                sizes.append(engine.draft_kv.nbytes)
        full, row = 1, 2 * 2 * shape.draft_heads_kv * shape.draft_head_size
        assert sizes[1] - sizes[0] == 1024 * (full * row + 4)  # of the layer without a window, and the position of each row
    with ps.load(WRITERS["qwen3"](tmp_path / "t3.gguf", shape), files[1], device="CPU", threads=1, n_ctx=1024, chunk=CHUNK) as session:
        assert not session.runner.draft_kv.ring and not session.runner.sequence.stateful  # prompts resume at any token
