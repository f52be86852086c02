"""The loop: whatever the drafter says, the tokens are the target's, and the counts add up."""

import json
from dataclasses import replace

import numpy as np
import pytest
from engine.helpers import oracle, reference, run
from sessions import fails_with, loaded
from step_files import entries

import pyggml_spec as ps
from pyggml_spec.engine.engine import Engine, generate
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions, Limits
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import ContextError, EngineError, PairError
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.sampling.sampler import Sampler, Sampling

PROMPT = [65, 66, 67, 10, 32]
N = 80
session = loaded(pair=True, n_ctx=512)


@pytest.fixture(scope="module")
def text(session):
    return reference(session.runner, PROMPT, N + 20)


def _adds_up(stats):
    assert stats.emitted == 1 + stats.steps + stats.matched and stats.target_forwards == 1 + stats.steps
    assert sum(stats.matched_at) == stats.matched and sum(n * k for n, k in stats.block_sizes.items()) == stats.emitted - 1
    assert all(a >= b for a, b in zip(stats.matched_at, stats.matched_at[1:]))


@pytest.mark.parametrize(
    "wrong_at",
    [lambda s: None, lambda s: 0, lambda s: s % 16, lambda s: 14, lambda s: (7 * s) % 15],
    ids=["all right", "all wrong", "every position", "last wrong", "mixed"],
)
def test_scripted_drafters_change_the_speed_and_never_the_tokens(session, text, wrong_at):
    tokens, stats = run(session.runner, PROMPT, N, drafts=oracle(PROMPT, text, wrong_at))
    assert tokens == text[:N]
    _adds_up(stats)


def test_counts_and_interrupted_generations(session, text):
    _, full = run(session.runner, PROMPT, 65, drafts=oracle(PROMPT, text))
    assert (full.steps, full.matched, full.tokens_per_step) == (4, 60, 16.0)
    _, zero = run(session.runner, PROMPT, 11, drafts=oracle(PROMPT, text, lambda s: 0))
    assert (zero.steps, zero.matched, zero.drafted, zero.tokens_per_step) == (10, 0, 150, 1.0)
    seen = []
    tokens, stats = run(session.runner, PROMPT, N, drafts=oracle(PROMPT, text), interrupted=lambda: len(seen) > 3 or seen.append(1))
    assert stats.stop_reason == "interrupt" and tokens == text[: len(tokens)] and 1 <= len(tokens) < N
    engine, more = session.runner, []
    assert engine.cursor.last_token == tokens[-1]
    for _ in range(8):
        result = engine.verify_step([0] * 15)
        engine.accept(1, int(result.ids[0]))
        more.append(int(result.ids[0]))
    assert more == text[len(tokens) : len(tokens) + 8]
    for event in session.steps(PROMPT, 60):
        if event.stats.emitted > 5:
            break
    assert run(session.runner, PROMPT, 30, drafts=oracle(PROMPT, text))[0] == text[:30]


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_every_width(session, width):
    want = reference(session.runner, PROMPT, 40, width)
    tokens, stats = run(session.runner, PROMPT, 40, drafts=oracle(PROMPT, want, lambda s: s % width), width=width)
    assert tokens == want and stats.matched > 0


@pytest.mark.parametrize("end_index", [0, 1, 5, 16, 17, 30])
def test_an_end_token_anywhere_in_a_block_ends_the_text_there(session, text, end_index):
    end = text[end_index]
    cut = text.index(end) + 1
    tokens, stats = run(session.runner, PROMPT, N, drafts=oracle(PROMPT, text), is_end=lambda t: t == end)
    assert tokens == text[:cut] and stats.stop_reason == "end"
    _adds_up(stats)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 18, 33])
def test_the_token_limit_inside_a_block(session, text, n):
    tokens, stats = run(session.runner, PROMPT, n, drafts=oracle(PROMPT, text))
    assert tokens == text[:n] and stats.stop_reason == "length"
    _adds_up(stats)


def test_no_tokens_asked_for(session):
    tokens, stats = run(session.runner, PROMPT, 0)
    assert tokens == [] and stats.stop_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["speculative", "plain", "reference"])
def test_the_end_of_the_context_inside_a_block(pair, mode):
    """Rows past the end go to trash rows; every position of the context is used and none more."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=60) as small:
        tokens, stats = run(small.runner, PROMPT, None, mode=mode)
        assert len(tokens) == 60 - len(PROMPT) + 1 and stats.stop_reason == "context"
        if mode != "plain":
            assert tokens == reference(small.runner, PROMPT, None)
        _adds_up(stats)
        with pytest.raises(ContextError):
            small.runner.plain_step()


def test_a_drafter_of_nan_switches_speculation_off_and_keeps_the_text(pair):
    """All-NaN argmax is token 0 forever: it has to be noticed, counted, and the text has to stay the target's."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=512) as poisoned:
        want = reference(poisoned.runner, PROMPT, 20)
        poisoned.runner.draft_kv.fill(0xFF)
        poisoned.runner.reset()
        weight = poisoned.drafter.weights["output_norm.weight"]
        from pyggml_spec.ggml.library import ffi, lib

        nan = ffi.new("float[]", [float("nan")])
        lib.ggml_backend_tensor_set(weight, nan, 0, 4)
        tokens, stats = run(poisoned.runner, PROMPT, 20)
        assert stats.nan_drafts == 1 and stats.widths[1] == stats.steps - 1 and tokens[:2] == want[:2] and len(tokens) == 20


@pytest.mark.parametrize("weights, name, row", [("target", "token_embd.weight", 300), ("drafter", "fc.weight", 0)])
def test_rows_of_nan_are_gone_when_the_next_sequence_begins(pair, weights, name, row):
    """Neither masks nor switched-off rows stop NaN on a GPU: every shorter prompt after it would be NaN too, or drafted for no more."""
    from pyggml_spec.ggml.library import lib

    with ps.load(*pair, device="CPU", threads=1, kernels="ggml", n_ctx=512, draft_width=4, chunk=32) as session:
        engine, weight = session.runner, getattr(session, weights).weights[name]
        lib.ggml_backend_tensor_memset(weight, 0xFF, row * weight.nb[1], weight.nb[1])
        prompt = [*range(32), *[300] * 20]
        if weights == "target":
            fails_with(EngineError, "NaN", session.generate, prompt, 8)
        else:
            assert session.generate(prompt, 8)[1].nan_drafts == 1
        assert session.prefix.begin(prompt).tokens == 0  # and nothing of it is reused
        with engine.sequence.rows(0, 512, True) as pieces:
            assert np.isfinite(pieces.read().view(np.float16)).all()


def test_stop_strings_and_widths(session, pair):
    whole, _ = session.generate("abc", 60, mode="reference")
    stop = whole[20:24]
    shown, stats = session.generate("abc", 60, stop=[stop])
    assert shown == whole[: whole.index(stop)] and stats.stop_reason == "stop"
    engine = session.runner
    engine.reset()
    fails_with(EngineError, "prefill", engine.plain_step)
    engine.prefill(PROMPT)
    fails_with(EngineError, "2 to 16", engine.verify_step, [0] * 16)
    fails_with(EngineError, "cannot be accepted", engine.accept, 1, 0)
    fails_with(PairError, "trained", ps.load, *pair, device="CPU", draft_width=17)


@pytest.mark.slow
def test_speculative_text_equals_reference_text_on_the_embedded_pair_with_rejections():
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=16) as demo:  # mixed widths could flip a near-tie
        for prompt in ("def ", "import os\n\n\ndef walk(path):\n", "class Queue:\n    "):
            spec, stats = demo.generate(prompt, 100)
            plain, _ = demo.generate(prompt, 100, mode="reference")
            assert spec == plain and 0 < stats.matched < stats.drafted
    assert DEMO_TARGET.exists()


@pytest.mark.parametrize("plain_steps", [1, 5, 63, 64, 65, 150])
def test_drafts_after_plain_steps_equal_drafts_without_them(session, plain_steps):
    """While decoding plainly the drafter's rows are not computed; before the next block they are caught up with, in whole rings too."""
    engine, tokens = session.runner, [65, 66, 67]
    engine.reset()
    engine.prefill(tokens)
    for _ in range(plain_steps):
        tokens.append(engine.cursor.last_token)
        engine.accept(1, int(engine.plain_step().ids[0]))
    last_token, got = engine.cursor.last_token, engine.fused_step().tokens.tolist()
    engine.reset()
    engine.prefill(tokens)
    engine.cursor.last_token = last_token
    assert engine.fused_step().tokens.tolist() == got


WIDTH, LIMIT = 8, 20
SMALL = 60  # tokens of a context that ends soon
SCRIPTS = {"all right": lambda s: None, "all wrong": lambda s: 0, "mixed": lambda s: (5 * s) % WIDTH}
KEPT = ("mode", "emitted", "steps", "drafted", "matched", "matched_at", "block_sizes", "widths", "stop_reason", "target_forwards")


class Alone:
    """Generations of an engine for one sequence."""

    def __init__(self, session, n_ctx):
        self.engine = ModelRunner(session.backend, session.target, session.drafter, EngineOptions(n_ctx=n_ctx, width=WIDTH))

    def __call__(self, options):
        self.engine.reset()
        stats = Stats()
        return [t for block in generate(self.engine, PROMPT, options, stats) for t in block], stats

    def close(self):
        self.engine.close()


class InASlot:
    """The same as the second of two sequences, behind one that has ended."""

    def __init__(self, session, n_ctx):
        engine = ModelRunner(session.backend, session.target, session.drafter, EngineOptions(n_ctx=n_ctx, width=WIDTH, slots=2))
        self.scheduler = Engine(engine, WIDTH)

    def __call__(self, options):
        stream = self.scheduler.submit(PROMPT, options)
        return stream.result(), stream.stats

    def close(self):
        self.scheduler.close()


limited = loaded(pair=True, n_ctx=256, draft_width=WIDTH)


@pytest.fixture(scope="module")
def limited_text(limited):
    return run(limited.runner, PROMPT, LIMIT + WIDTH, mode=PLAIN)[0]


@pytest.fixture(scope="module", params=[Alone, InASlot])
def decode(limited, request):
    made = request.param(limited, 256)
    yield made
    made.close()


@pytest.fixture(scope="module", params=[Alone, InASlot])
def decode_small(limited, request):
    made = request.param(limited, SMALL)
    yield made
    made.close()


def _after(n):
    """A stop text that is complete with the n-th token."""
    seen = []
    return lambda token: seen.append(token) or "stop" * (len(seen) == n)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_cut_of_the_same_tokens(decode, limited_text, script):
    """At whatever token a sequence ends and for whatever reason: nothing behind it comes out or is counted."""
    for n in range(1, LIMIT, 1 if script == "all right" else 3):
        cut = limited_text.index(limited_text[n - 1]) + 1
        for reason, at, options in (
            ("length", n, GenerationOptions(n)),
            ("end", cut, GenerationOptions(LIMIT, is_end=lambda token, end=limited_text[n - 1]: token == end)),
            ("stop", n, GenerationOptions(LIMIT, completes=_after(n))),
            ("stop", n, GenerationOptions(n, completes=_after(n), is_end=lambda token: False)),
        ):
            tokens, stats = decode(replace(options, mode=SPECULATIVE, width=WIDTH, drafts=oracle(PROMPT, limited_text, SCRIPTS[script])))
            assert (tokens, stats.stop_reason, stats.emitted) == (limited_text[:at], reason, at)
            assert stats.emitted == 1 + stats.steps + stats.matched and stats.target_forwards == 1 + stats.steps
            if script == "all right" and at > 1:
                assert stats.steps == -(-(at - 1) // WIDTH)


@pytest.mark.parametrize("limit", [2, 5, 14])
def test_log_probabilities_end_with_the_text(limited, decode, limited_text, limit):
    sampler = Sampler(Sampling(temperature=0, logprobs=0), limited.tokenizer.vocab, limited.tokenizer.n_vocab)
    drafts = oracle(PROMPT, limited_text)
    tokens, _ = decode(GenerationOptions(LIMIT, width=WIDTH, sampler=sampler, completes=_after(limit), drafts=drafts))
    assert [p.token for p in sampler.take_logprobs()] == tokens == limited_text[:limit]
    sampler.close()


@pytest.mark.parametrize("mode", [SPECULATIVE, PLAIN])
def test_a_drafter_that_is_always_right_ends_with_the_context(limited, decode_small, mode):
    """Every position is used and none more, although a block reaches beyond the last one."""
    want = run(limited.runner, PROMPT, SMALL, mode=PLAIN)[0]
    options = GenerationOptions(None, mode, WIDTH, drafts=oracle(PROMPT, want) if mode == SPECULATIVE else None)
    tokens, stats = decode_small(options)
    assert tokens == want[: SMALL - len(PROMPT) + 1] and stats.stop_reason == "context"
    assert stats.tokens_per_step > 6 or mode == PLAIN


def test_the_same_counts_alone_and_in_a_slot(limited, limited_text):
    made = [kind(limited, 256) for kind in (Alone, InASlot)]
    for script in SCRIPTS:
        seen = [decode(GenerationOptions(LIMIT, width=WIDTH, drafts=oracle(PROMPT, limited_text, SCRIPTS[script])))[1] for decode in made]
        assert [getattr(seen[0], name) for name in KEPT] == [getattr(seen[1], name) for name in KEPT]
    for decode in made:
        decode.close()


@pytest.mark.parametrize("kind", [Alone, InASlot])
def test_speculation_without_a_drafter_is_refused(pair, kind):
    """It decoded plainly and reported "speculative, width 16"."""
    with ps.load(pair[0], device="CPU", threads=1, n_ctx=256, spec=[]) as session:
        made = kind(session, 256)
        fails_with(EngineError, "there is no drafter", lambda: made(GenerationOptions(5, SPECULATIVE)))
        assert len(made(GenerationOptions(5, PLAIN))[0]) == 5
        made.close()
        fails_with(EngineError, "there is no drafter", session.generate, PROMPT, 5, mode="speculative")
        assert session.generate(PROMPT, 5)[1].mode == "plain"


@pytest.mark.slow
def test_a_stop_text_is_not_visible_in_events_of_speculation():
    """Tokens of the block behind it were in events, log-probabilities and counts: 9 where plain decoding has 7."""
    options = {"stop": ["of"], "sampling": Sampling(temperature=0, logprobs=0)}
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=8) as demo:
        found = 0
        for prompt in ("def quicksort(items):", "import os\n"):
            whole = demo.generate(prompt, 40, mode="reference")[0]
            for stop in [whole[i : i + 2] for i in range(0, min(len(whole), 60) - 2, 9)]:
                seen = []
                for mode in ("reference", "speculative"):
                    events = list(demo.steps(prompt, 40, mode=mode, **{**options, "stop": [stop]}))
                    tokens = [t for event in events for t in event.tokens]
                    assert [p.token for event in events for p in event.logprobs] == tokens
                    seen.append(("".join(event.text for event in events), tokens, events[-1].stats.emitted, events[-1].stats.stop_reason))
                assert seen[0] == seen[1]
                found += seen[0][3] == "stop"
        assert found > 6


def test_reasons_counts_and_dicts():
    limits = Limits(3, is_end=lambda token: token == 9, completes=lambda token: "stop" if token == 8 else "")
    limits.begin(2)
    assert [limits.take([1, 1]), limits.left, limits.take([1, 1]), limits.reason] == [2, 1, 1, "length"]
    for token, reason in ((8, "stop"), (9, "end")):
        limits = Limits(1, is_end=lambda token: token > 7, completes=lambda token: "stop" if token == 8 else "")
        limits.begin(0)
        assert limits.take([token]) == 1 and limits.reason == reason
    assert Limits(0, lambda token: False).reason == "length"
    stats = counted((4, 3), (4, 0), (1, 0), (8, 5))
    assert stats.emitted == 1 + stats.steps + stats.matched == 1 + 4 + 8
    assert sum(n * count for n, count in stats.block_sizes.items()) == stats.emitted - 1
    stats = counted((4, 0))
    assert (stats.drafted, stats.matched, stats.tokens_per_step) == (3, 0, 1.0)
    stats = counted((1, 0), (1, 0))
    assert (stats.steps, stats.drafted, stats.draft_forwards, stats.tokens_per_step, stats.acceptance) == (2, 0, 0, 1.0, 0.0)
    out = json.loads(json.dumps(counted((4, 3), (1, 0), (4, 1)).as_dict(), allow_nan=False))
    assert out["block_sizes"] == {"1": 1, "2": 1, "4": 1} and list(out["block_sizes"]) == ["1", "2", "4"]
    assert out["tokens_per_step"] == 7 / 3 and out["matched_per_position"] == [1.0, 0.5, 0.5]
    one, other = Stats(), Stats()
    one.seconds["load"] = 1.0
    one.add_step(4, 2, True)
    assert other.seconds["load"] == 0.0 and not other.widths and not other.matched_at


def counted(*blocks: tuple[int, int], prompt_token: bool = True) -> Stats:
    """Statistics after blocks of (width, matched drafts)."""
    stats = Stats(emitted=int(prompt_token))
    for width, matched in blocks:
        stats.add_step(width, matched, width > 1)
    return stats


def test_acceptance_widths_and_speed():
    """With changing widths, a late position is offered less often; dividing by steps would make it look worse than it is."""
    stats = counted((3, 2), (3, 1), (5, 4), (2, 0))
    assert stats.offered_at == [4, 3, 1, 1] and stats.matched_at == [3, 2, 1, 1]
    assert stats.matched_per_position == [3 / 4, 2 / 3, 1.0, 1.0]
    assert sum(stats.matched_at) == stats.matched and sum(stats.offered_at) == stats.drafted
    stats = counted((4, 3), (4, 3), (1, 0))
    assert stats.widths == {4: 2, 1: 1} and stats.block_sizes == {4: 2, 1: 1}
    stats = counted((4, 3))
    stats.seconds["decode"] = 2.0
    assert stats.tokens_per_second == 2.0


@pytest.mark.parametrize("stats", [Stats(), counted(), counted((1, 0))])
def test_no_division_by_zero(stats):
    out = stats.as_dict()
    assert out["tokens_per_second"] == 0.0 and out["acceptance"] == 0.0 and out["matched_per_position"] == []


def test_a_step_crosses_few_files():
    """A steady decode step of one sequence: each phase of the loop is entered once, and beneath it no file twice."""
    seen = entries()
    below = [file for file, _, caller in seen if caller != "engine/engine.py"]
    assert len({file for file, *_ in seen}) <= 14 and len(seen) <= 17
    assert len(below) == len(set(below))
