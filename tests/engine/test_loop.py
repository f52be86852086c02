"""The loop: whatever the drafter says, the tokens are the target's, and the counts add up."""

import numpy as np
import pytest
from engine.helpers import oracle, reference, run

import pyggml_spec as ps
from pyggml_spec.errors import ContextError, EngineError, PairError
from pyggml_spec.loading import DEMO_TARGET

PROMPT = [65, 66, 67, 10, 32]
N = 80


@pytest.fixture(scope="module")
def session(pair):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=512) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text(session):
    return reference(session.engine, PROMPT, N + 20)


def _adds_up(stats):
    assert stats.emitted == 1 + stats.steps + stats.matched
    assert stats.target_forwards == 1 + stats.steps
    assert sum(stats.matched_at) == stats.matched
    assert sum(n * k for n, k in stats.block_sizes.items()) == stats.emitted - 1
    assert all(a >= b for a, b in zip(stats.matched_at, stats.matched_at[1:]))


@pytest.mark.parametrize(
    "wrong_at",
    [lambda s: None, lambda s: 0, lambda s: s % 16, lambda s: 14, lambda s: (7 * s) % 15],
    ids=["all right", "all wrong", "every position", "last wrong", "mixed"],
)
def test_scripted_drafters_change_the_speed_and_never_the_tokens(session, text, wrong_at):
    tokens, stats = run(session.engine, PROMPT, N, drafts=oracle(PROMPT, text, wrong_at))
    assert tokens == text[:N]
    _adds_up(stats)


def test_full_and_zero_acceptance_counts(session, text):
    _, full = run(session.engine, PROMPT, 65, drafts=oracle(PROMPT, text))
    assert (full.steps, full.matched, full.tokens_per_step) == (4, 60, 16.0)
    _, zero = run(session.engine, PROMPT, 11, drafts=oracle(PROMPT, text, lambda s: 0))
    assert (zero.steps, zero.matched, zero.drafted, zero.tokens_per_step) == (10, 0, 150, 1.0)


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_every_width(session, width):
    want = reference(session.engine, PROMPT, 40, width)
    tokens, stats = run(session.engine, PROMPT, 40, drafts=oracle(PROMPT, want, lambda s: s % width), width=width)
    assert tokens == want and stats.matched > 0


@pytest.mark.parametrize("end_index", [0, 1, 5, 16, 17, 30])
def test_an_end_token_anywhere_in_a_block_ends_the_text_there(session, text, end_index):
    end = text[end_index]
    cut = text.index(end) + 1
    tokens, stats = run(session.engine, PROMPT, N, drafts=oracle(PROMPT, text), is_end=lambda t: t == end)
    assert tokens == text[:cut] and stats.stop_reason == "end"
    _adds_up(stats)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 18, 33])
def test_the_token_limit_inside_a_block(session, text, n):
    tokens, stats = run(session.engine, PROMPT, n, drafts=oracle(PROMPT, text))
    assert tokens == text[:n] and stats.stop_reason == "length"
    _adds_up(stats)


def test_no_tokens_asked_for(session):
    tokens, stats = run(session.engine, PROMPT, 0)
    assert tokens == [] and stats.stop_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["speculative", "plain", "reference"])
def test_the_end_of_the_context_inside_a_block(pair, mode):
    """Rows past the end go to trash rows; every position of the context is used and none more."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=60) as small:
        tokens, stats = run(small.engine, PROMPT, None, mode=mode)
        assert len(tokens) == 60 - len(PROMPT) + 1 and stats.stop_reason == "context"
        if mode != "plain":
            assert tokens == reference(small.engine, PROMPT, None)
        _adds_up(stats)
        with pytest.raises(ContextError):
            small.engine.plain_step()


def test_an_interrupt_between_steps_leaves_a_sequence_that_can_go_on(session, text):
    seen = []
    tokens, stats = run(session.engine, PROMPT, N, drafts=oracle(PROMPT, text), interrupted=lambda: len(seen) > 3 or seen.append(1))
    assert stats.stop_reason == "interrupt" and tokens == text[: len(tokens)] and 1 <= len(tokens) < N
    engine, more = session.engine, []
    assert engine.cursor.last_token == tokens[-1]
    for _ in range(8):
        result = engine.verify_step([0] * 15)
        engine.accept(1, int(result.ids[0]))
        more.append(int(result.ids[0]))
    assert more == text[len(tokens) : len(tokens) + 8]


def test_an_abandoned_generator_leaves_a_usable_engine(session, text):
    for event in session.steps(PROMPT, 60):
        if event.stats.emitted > 5:
            break
    assert run(session.engine, PROMPT, 30, drafts=oracle(PROMPT, text))[0] == text[:30]


def test_a_drafter_of_nan_switches_speculation_off_and_keeps_the_text(pair):
    """All-NaN argmax is token 0 forever: it has to be noticed, counted, and the text has to stay the target's."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=512) as poisoned:
        want = reference(poisoned.engine, PROMPT, 20)
        poisoned.engine.draft_kv.fill(0xFF)
        poisoned.engine.reset()
        weight = poisoned.drafter.weights["output_norm.weight"]
        from pyggml_spec.ggml.library import ffi, lib

        nan = ffi.new("float[]", [float("nan")])
        lib.ggml_backend_tensor_set(weight, nan, 0, 4)
        tokens, stats = run(poisoned.engine, PROMPT, 20)
        assert stats.nan_drafts == 1 and stats.widths[1] == stats.steps - 1
        assert tokens[:2] == want[:2] and len(tokens) == 20


@pytest.mark.parametrize("weights, name, row", [("target", "token_embd.weight", 300), ("drafter", "fc.weight", 0)])
def test_rows_of_nan_are_gone_when_the_next_sequence_begins(pair, weights, name, row):
    """Neither masks nor switched-off rows stop NaN on a GPU: every shorter prompt after it would be NaN too, or drafted for no more."""
    from pyggml_spec.ggml.library import lib

    with ps.load(*pair, device="CPU", threads=1, kernels="ggml", n_ctx=512, draft_width=4, chunk=32) as session:
        engine, weight = session.engine, getattr(session, weights).weights[name]
        lib.ggml_backend_tensor_memset(weight, 0xFF, row * weight.nb[1], weight.nb[1])
        prompt = [*range(32), *[300] * 20]
        if weights == "target":
            with pytest.raises(EngineError, match="NaN"):
                session.generate(prompt, 8)
        else:
            assert session.generate(prompt, 8)[1].nan_drafts == 1
        assert session.prefix.begin(prompt).tokens == 0  # and nothing of it is reused
        with engine.sequence.rows(0, 512, True) as pieces:
            assert np.isfinite(pieces.read().view(np.float16)).all()


def test_a_stop_string_across_blocks_ends_the_text_before_it(session):
    whole, _ = session.generate("abc", 60, mode="reference")
    stop = whole[20:24]
    shown, stats = session.generate("abc", 60, stop=[stop])
    assert shown == whole[: whole.index(stop)] and stats.stop_reason == "stop"


def test_blocks_wider_than_planned_and_accepting_nonsense_are_refused(session, pair):
    engine = session.engine
    engine.reset()
    with pytest.raises(EngineError, match="prefill"):
        engine.plain_step()
    engine.prefill(PROMPT)
    with pytest.raises(EngineError, match="2 to 16"):
        engine.verify_step([0] * 16)
    with pytest.raises(EngineError, match="cannot be accepted"):
        engine.accept(1, 0)
    with pytest.raises(PairError, match="trained"):
        ps.load(*pair, device="CPU", draft_width=17)


@pytest.mark.slow
def test_speculative_text_equals_reference_text_on_the_embedded_pair_with_rejections():
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=16) as demo:  # mixed widths could flip a near-tie
        for prompt in ("def ", "import os\n\n\ndef walk(path):\n", "class Queue:\n    "):
            spec, stats = demo.generate(prompt, 100)
            plain, _ = demo.generate(prompt, 100, mode="reference")
            assert spec == plain
            assert 0 < stats.matched < stats.drafted
    assert DEMO_TARGET.exists()


@pytest.mark.parametrize("plain_steps", [1, 5, 63, 64, 65, 150])
def test_drafts_after_plain_steps_equal_drafts_without_them(session, plain_steps):
    """While decoding plainly the drafter's rows are not computed; before the next block they are caught up with, in whole rings too."""
    engine, tokens = session.engine, [65, 66, 67]
    engine.reset()
    engine.prefill(tokens)
    for _ in range(plain_steps):
        tokens.append(engine.cursor.last_token)
        engine.accept(1, int(engine.plain_step().ids[0]))
    last_token = engine.cursor.last_token
    got = engine.fused_step().tokens.tolist()
    engine.reset()
    engine.prefill(tokens)
    engine.cursor.last_token = last_token
    assert engine.fused_step().tokens.tolist() == got
