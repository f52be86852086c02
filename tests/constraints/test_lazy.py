"""Constraints that begin at a trigger: before it nothing is held back, after it everything matches, however tokens are cut."""

import random
import time

import numpy as np
import pytest

import pyggml_spec as ps
from pyggml_spec.constraints import lazy as lazy_module
from pyggml_spec.constraints.grammar import Grammar, Vocabulary
from pyggml_spec.constraints.lazy import KEPT, LazyGrammar
from pyggml_spec.constraints.pattern import Pattern
from pyggml_spec.errors import ConstraintError, EngineError, SamplingError
from pyggml_spec.sampling.sampler import Sampling

CALL = 'root ::= "<tool_call>" [ \\n]? "{" [a-z]+ "}" "</tool_call>"'
WORD = "<tool_call>"


def cut(tokenizer, text, rng):
    """The text in tokens, cut at random places first: words are in one token or in many."""
    out, at = [], 0
    while at < len(text):
        end = min(len(text), at + rng.randint(1, 6))
        out += tokenizer.encode(text[at:end], bos=False)
        at = end
    return out


def end(tokenizer):
    return next(i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i))


def test_every_cut_of_a_text_is_held_to_the_same(tokenizer):
    """Free before the word, matched after it: the same verdict whether tokens come one by one, in blocks, or as a mask."""
    rng = random.Random(1)
    for _ in range(40):
        right = rng.random() < 0.5
        lead = rng.choice(["", "so: ", "<tool", "<<tool_cal ", "a < b\n"])
        text = f"{lead}{WORD}{{{'abc' if right else '12'}}}</tool_call>"
        tokens = cut(tokenizer, text, rng)
        one, block = LazyGrammar("grammar", CALL, [WORD], tokenizer), LazyGrammar("grammar", CALL, [WORD], tokenizer)
        taken = 0
        for token in tokens:
            assert one.allows(token) == bool(one.mask()[token])
            if not one.allows(token):
                break
            one.accept(token)
            taken += 1
        assert block.fits(tokens) == taken and (taken == len(tokens)) == right
        assert len(block.ahead(tokens)) == taken + 1
        assert np.array_equal(block.ahead(tokens)[-1], one.bits())
        if right:
            assert one.complete and one.allows(end(tokenizer)) and not one.allows(tokens[0])
        else:
            assert not one.complete and not one.allows(end(tokenizer))
            with pytest.raises(EngineError):
                one.accept(tokens[taken])


def test_before_the_trigger_everything_may_come(tokenizer):
    lazy = LazyGrammar("grammar", CALL, [WORD], tokenizer)
    assert lazy.complete and lazy.forced(8) == [] and not lazy.ended
    for token in tokenizer.encode("def f(x):\n    return <tool", bos=False):
        assert lazy.mask().sum() > 0.99 * tokenizer.n_vocab
        lazy.accept(token)
    path, bits = lazy.some(5)
    assert len(path) == 5 and len(bits) == 6
    lazy.accept(end(tokenizer))
    assert lazy.ended and lazy.complete


def test_a_token_as_trigger(tokenizer):
    brace = tokenizer.encode("{", bos=False)[-1]
    lazy = LazyGrammar("grammar", 'root ::= "{" [0-9]+ "}"', [brace], tokenizer)
    lazy.accept(tokenizer.encode("a", bos=False)[-1])
    lazy.accept(brace)
    assert not lazy.complete and not lazy.allows(tokenizer.encode("a", bos=False)[-1])
    assert lazy.fits(tokenizer.encode("12}", bos=False)) >= 1


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"triggers": (WORD,)}, "no constraint"),
        ({"triggers": ("",), "grammar": CALL}, "words of 1 to"),
        ({"triggers": (-1,), "grammar": CALL}, "words of 1 to"),
        ({"triggers": (True,), "grammar": CALL}, "words of 1 to"),
    ],
)
def test_triggers_that_mean_nothing_are_refused(fields, why):
    with pytest.raises(SamplingError, match=why):
        Sampling(**fields)


def test_a_constraint_has_to_begin_with_its_trigger(tokenizer):
    with pytest.raises(SamplingError, match="does not begin with its trigger"):
        LazyGrammar("grammar", 'root ::= "x"', [WORD], tokenizer)


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_speculative_text_is_plain_text_and_matches_after_the_trigger(temperature):
    """The embedded pair writes "return" soon; from there on only digits may come. Greedy and sampled, drafts on both sides of the trigger."""
    grammar = 'root ::= "return" " " [0-9]{3,40} "\\n"'
    sampling = Sampling(temperature=temperature, seed=7, grammar=grammar, triggers=("return",))
    with ps.load(device="CPU", threads=1, draft_width=8, n_ctx=256) as session:
        texts = {}
        for mode in ("speculative", "plain"):
            text, stats = session.generate("def square(x):\n    ", 80, sampling=sampling, mode=mode)
            texts[mode] = text
        assert texts["speculative"] == texts["plain"]
        _, word, behind = texts["plain"].partition("return")
        assert word and behind[1:].strip().isdigit() and stats.stop_reason in ("end", "length")
        with session.concurrent(2) as server:
            assert server.submit("def square(x):\n    ", 80, sampling=sampling).result()[0] == texts["plain"]


def test_what_a_trigger_forbids_is_found_once(tokenizer, monkeypatch):
    """A word of one character ends in thousands of tokens of a large vocabulary: asking about each of them in every step held all streams up."""
    texts = [f'root ::= "{{" [a-z]+ "}}" "{i}"' for i in range(KEPT + 4)]
    first = LazyGrammar("grammar", texts[0], ["{", "{x"], tokenizer)
    asked, fits = [], Grammar.fits
    monkeypatch.setattr(Grammar, "fits", lambda self, tokens: asked.append(tokens) or fits(self, tokens))
    for lazy in (first, LazyGrammar("grammar", texts[0], ["{", "{x"], tokenizer)):
        asked.clear()
        assert len(lazy.ahead(tokenizer.encode("def f(x):\n", bos=False))) > 3 and not asked
    brute = np.array([first.allows(i) for i in range(tokenizer.n_vocab)])
    assert np.array_equal(first.mask(), brute) and not brute.all()
    for text in texts:
        LazyGrammar("grammar", text, ["{"], tokenizer)
    assert len(lazy_module.known_states[Vocabulary.of(tokenizer)]) == KEPT


def test_many_long_triggers_are_no_burden(tokenizer):
    """64 words of 256 characters have 16,000 ends; each token was compared with all of them, minutes for a large vocabulary."""
    words = [f"{i:02}" + "ab" * 127 for i in range(64)]
    grammar = "root ::= (" + " | ".join(f'"{word}"' for word in words) + ") [0-9]+"
    began = time.process_time()
    lazy = LazyGrammar("grammar", grammar, words, tokenizer)
    assert time.process_time() - began < 10
    for token in tokenizer.encode("x" + words[7][:-1], bos=False):
        lazy.accept(token)
    assert lazy.fits(tokenizer.encode("b7", bos=False)) == 2 and lazy.fits(tokenizer.encode("bx", bos=False)) < 2


def test_a_slow_constraint_after_a_long_trigger_is_an_error(tokenizer):
    """All that a pattern has found is given to the constraint at once: of an ambiguous one that would take seconds."""
    words = " | ".join(" ".join("s" * n) for n in range(2, 7))
    lazy = LazyGrammar("grammar", f"root ::= s\ns ::= {words} | [a-z]", [Pattern("(a[a-z]*)!")], tokenizer)
    began = time.thread_time()
    with pytest.raises(ConstraintError, match="trigger.*ambiguous"):
        follow(lazy, tokenizer.encode("abcdefghijklmnopqrstuvwxyz" * 5 + "!", bos=False))
    assert time.thread_time() - began < 2


def follow(grammar, tokens):
    for token in tokens:
        grammar.accept(token)
