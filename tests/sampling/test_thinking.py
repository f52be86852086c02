"""The budget of thinking: reasoning ends at the limit, with and without drafts; tokens are counted."""

import pytest
from sessions import fails_with, loaded

from pyggml_spec.errors import SamplingError
from pyggml_spec.sampling.sampler import Sampler, Sampling
from pyggml_spec.sampling.thinking import Thinking, ThinkingBudget

END = "\n</think>\n\n"
demo = loaded(n_ctx=512, draft_width=4)


def budget(tokens: int | None, inside: bool = True, forced: str = END) -> ThinkingBudget:
    return ThinkingBudget("<think>", "</think>", tokens, forced, inside)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def piece(self, token, special=False):
        return bytes([token])

    def encode(self, text, special=False, bos=True):
        return [*text.encode()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"seed": 3},
        {"seed": 3, "mirostat": 2},
        {"temperature": 0, "logprobs": 1},
        {"seed": 1, "regex": r"(?s)[a-z().: \n/<>]*"},
    ],
)
def test_reasoning_ends_at_its_limit_with_and_without_drafts(demo, sampling):
    forced, limit = END if "regex" in sampling else "\nTime is up." + END, 7
    chosen, prompt = Sampling(**sampling, thinking=budget(limit, forced=forced)), demo.tokenizer.encode("import os\n\n\ndef walk(path):\n")
    text, plain = (
        [t for event in demo.steps(prompt, 40, mode=mode, sampling=chosen) for t in event.tokens] for mode in ("speculative", "reference")
    )
    ids = demo.tokenizer.encode(forced, special=True, bos=False)
    assert text == plain and text[limit : limit + len(ids)] == ids and len(text) == 40
    free = [t for event in demo.steps(prompt, limit, sampling=Sampling(**sampling)) for t in event.tokens]
    assert text[:limit] == free, "nothing is changed before the limit"
    count = Thinking(budget(None), demo.tokenizer)
    for token in text:
        count.push(token)
    assert limit <= count.count < limit + len(ids)
    if "logprobs" in sampling:
        told = [p for event in demo.steps(prompt, 20, sampling=chosen) for p in event.logprobs]
        assert [p.token for p in told] == text[:20] and told[limit].logprob == 0 and told[limit - 1].logprob < 0


def test_what_a_constraint_forbids_is_not_forced(demo):
    text, stats = demo.generate("x = ", 40, sampling=Sampling(seed=1, regex="[0-9]{12}", thinking=budget(2)))
    assert text.isdecimal() and len(text) == 12 and stats.stop_reason == "end"


def test_markers_within_tokens_and_characters_that_are_cut():
    thinking = Thinking(budget(3, inside=False, forced="!</think>"), Bytes())
    said = b"a<think>bcd"
    for byte in said:
        assert thinking.forced is None
        thinking.push(byte)
    forced = []
    while thinking.forced is not None:
        forced.append(thinking.forced)
        thinking.push(forced[-1])
    assert bytes(forced) == b"!</think>" and thinking.count == 3 + 1 + len("</think")
    for byte in b"e<think>bb" + "é".encode()[:1]:  # a budget of its own; the limit falls within a character
        thinking.push(byte)
    assert thinking.forced is None
    thinking.push("é".encode()[1])
    assert thinking.forced == ord("!")
    early = Thinking(budget(9), Bytes())
    for byte in b"ab</think>cdefghijkl":
        early.push(byte)
    assert early.forced is None and early.count == 2 + len("</think")
    assert Thinking(budget(0), Bytes()).forced == ord("\n")
    fails_with(SamplingError, "needs a tokenizer", Sampler, Sampling(thinking=budget(1)), None, 9)
