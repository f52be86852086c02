"""Where a sequence ends, and what it may do: the same alone and in a slot, whatever the drafter says."""

from dataclasses import replace

import pytest
from engine.helpers import oracle, run

import pyggml_spec as ps
from pyggml_spec.engine.engine import Engine, generate
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions, Limits
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import EngineError
from pyggml_spec.sampling.sampler import Sampler, Sampling

PROMPT = [65, 66, 67, 10, 32]
WIDTH, N = 8, 20
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


@pytest.fixture(scope="module")
def session(pair):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=WIDTH) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text(session):
    return run(session.engine, PROMPT, N + WIDTH, mode=PLAIN)[0]


@pytest.fixture(scope="module", params=[Alone, InASlot])
def decode(session, request):
    made = request.param(session, 256)
    yield made
    made.close()


@pytest.fixture(scope="module", params=[Alone, InASlot])
def decode_small(session, request):
    made = request.param(session, SMALL)
    yield made
    made.close()


def _after(n):
    """A stop text that is complete with the n-th token."""
    seen = []
    return lambda token: seen.append(token) or "stop" * (len(seen) == n)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_cut_of_the_same_tokens(decode, text, script):
    """At whatever token a sequence ends and for whatever reason: nothing behind it comes out or is counted."""
    for n in range(1, N, 1 if script == "all right" else 3):
        cut = text.index(text[n - 1]) + 1
        for reason, at, options in (
            ("length", n, GenerationOptions(n)),
            ("end", cut, GenerationOptions(N, is_end=lambda token, end=text[n - 1]: token == end)),
            ("stop", n, GenerationOptions(N, completes=_after(n))),
            ("stop", n, GenerationOptions(n, completes=_after(n), is_end=lambda token: False)),
        ):
            tokens, stats = decode(replace(options, mode=SPECULATIVE, width=WIDTH, drafts=oracle(PROMPT, text, SCRIPTS[script])))
            assert (tokens, stats.stop_reason, stats.emitted) == (text[:at], reason, at)
            assert stats.emitted == 1 + stats.steps + stats.matched and stats.target_forwards == 1 + stats.steps
            if script == "all right" and at > 1:
                assert stats.steps == -(-(at - 1) // WIDTH)


@pytest.mark.parametrize("limit", [2, 5, 14])
def test_log_probabilities_end_with_the_text(session, decode, text, limit):
    sampler = Sampler(Sampling(temperature=0, logprobs=0), session.tokenizer.vocab, session.tokenizer.n_vocab)
    drafts = oracle(PROMPT, text)
    tokens, _ = decode(GenerationOptions(N, width=WIDTH, sampler=sampler, completes=_after(limit), drafts=drafts))
    assert [p.token for p in sampler.take_logprobs()] == tokens == text[:limit]
    sampler.close()


@pytest.mark.parametrize("mode", [SPECULATIVE, PLAIN])
def test_a_drafter_that_is_always_right_ends_with_the_context(session, decode_small, mode):
    """Every position is used and none more, although a block reaches beyond the last one."""
    want = run(session.engine, PROMPT, SMALL, mode=PLAIN)[0]
    options = GenerationOptions(None, mode, WIDTH, drafts=oracle(PROMPT, want) if mode == SPECULATIVE else None)
    tokens, stats = decode_small(options)
    assert tokens == want[: SMALL - len(PROMPT) + 1] and stats.stop_reason == "context"
    assert stats.tokens_per_step > 6 or mode == PLAIN


def test_the_same_counts_alone_and_in_a_slot(session, text):
    made = [kind(session, 256) for kind in (Alone, InASlot)]
    for script in SCRIPTS:
        seen = [decode(GenerationOptions(N, width=WIDTH, drafts=oracle(PROMPT, text, SCRIPTS[script])))[1] for decode in made]
        assert [getattr(seen[0], name) for name in KEPT] == [getattr(seen[1], name) for name in KEPT]
    for decode in made:
        decode.close()


@pytest.mark.parametrize("kind", [Alone, InASlot])
def test_speculation_without_a_drafter_is_refused(pair, kind):
    """It decoded plainly and reported "speculative, width 16"."""
    with ps.load(pair[0], device="CPU", threads=1, n_ctx=256, spec=[]) as session:
        made = kind(session, 256)
        with pytest.raises(EngineError, match="there is no drafter"):
            made(GenerationOptions(5, SPECULATIVE))
        assert len(made(GenerationOptions(5, PLAIN))[0]) == 5
        made.close()
        with pytest.raises(EngineError, match="there is no drafter"):
            session.generate(PROMPT, 5, mode="speculative")
        assert session.generate(PROMPT, 5)[1].mode == "plain"


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


def test_what_holds_first_is_the_reason():
    limits = Limits(3, is_end=lambda token: token == 9, completes=lambda token: "stop" if token == 8 else "")
    limits.begin(2)
    assert [limits.passes(1), limits.passes(1), limits.left, limits.passes(1), limits.reason] == [True, True, 1, False, "length"]
    for token, reason in ((8, "stop"), (9, "end")):
        limits = Limits(1, is_end=lambda token: token > 7, completes=lambda token: "stop" if token == 8 else "")
        limits.begin(0)
        assert not limits.passes(token) and limits.reason == reason
    assert Limits(0, lambda token: False).reason == "length"
