"""Patterns as triggers: they find what a backtracking engine finds, in time that no expression escapes, and hold the text after to the constraint."""

import random
import re

import numpy as np
import pytest
from sessions import fails_with

from pyggml_spec.constraints.grammar import Vocabulary
from pyggml_spec.constraints.lazy import MOST_PATTERNS, MOST_WORK, LazyGrammar, Search
from pyggml_spec.constraints.pattern import MOST_PARTS, Budget, Pattern, Program
from pyggml_spec.errors import EngineError, SamplingError


def found(program, data, budget=None):
    """Where the first match of ``data`` as a whole begins to matter; None without one."""
    threads, matched, budget = list(program.begin), None, budget or Budget()
    for at, byte in enumerate(data):
        threads, matched = program.step(threads, byte, at + 1, matched, budget)
    last = program.at_end(threads, len(data), budget)
    matched = last if last is not None else matched
    return None if matched is None else program.start(matched)


def wanted(text, data):
    """The same by Python's engine: $ is the very end there too, groups count by their number."""
    match = re.compile(text.replace("$", r"\Z").encode(), re.ASCII).search(data)
    if match is None:
        return None
    return next((match.start(i) for i in range(1, (match.re.groups or 0) + 1) if match.start(i) < match.end(i)), match.start())


def expression(rng, depth=0):
    made = rng.choice(["a", "b", "[ab]", "[^b]", ".", r"\w", r"\s", "c"]) if depth > 2 or rng.random() < 0.4 else None
    if made is None:
        kind = rng.choice(["row", "either", "group", "some", "count", "lazy"])
        parts = [expression(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        made = {
            "row": "".join(parts), "either": f"(?:{'|'.join(parts)})", "group": f"({parts[0]})", "some": f"(?:{parts[0]})*{parts[-1]}",
            "count": f"(?:{parts[0]}){{1,{rng.randint(1, 3)}}}", "lazy": f"(?:{parts[0]})+?",
        }[kind]  # fmt: skip
    return f"^{made}" if depth == 0 and rng.random() < 0.2 else f"{made}$" if depth == 0 and rng.random() < 0.2 else made


@pytest.mark.slow
def test_random_expressions_find_what_backtracking_finds():
    rng, seen = random.Random(7), 0
    for _ in range(1500):
        text = expression(rng)
        if re.search(r"\([^?].*\)(?:[*+]|\{)", text):
            continue
        try:
            program = Program(Pattern(text))
        except SamplingError as error:
            assert "empty text" in str(error) or "repeat" in str(error), text
            continue
        for _ in range(4):
            data = "".join(rng.choices("abc \n", k=rng.randint(1, 12))).encode()
            want = wanted(text.replace(".", r"[^\n\r]"), data)
            assert found(program, data) == want, (text, data)
            seen += want is not None
    assert seen > 500
    patterns = {"a*(a)": 2, "a*?(a)": 0, "a{1,2}(a)": 2, "a{1,2}?(a)": 1, "a+?b(x)?": 0}
    assert {text: found(Program(Pattern(text)), b"aaab") for text in patterns} == patterns


def test_llama_cpps_own_patterns(tokenizer):
    for pattern, text, start in (
        (Pattern(r"(\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:\s*\"f\")[\s\S]*", True), '{ "name": "f"', 0),
        (Pattern(r"^(?:<think>[\s\S]*?</think>)?\s*(<call>)[\s\S]*"), "<think>a <call> b</think> <call>", 26),
        (Pattern(r"[\s\S]*?(<\|python_tag\|>|ipython)"), "so: ipython", 4),
        (Pattern("schön(e)?"), "wie schön", 4),
    ):
        search = Search([pattern], Vocabulary.of(tokenizer))
        place, begins = search.begin, None
        for token in tokenizer.encode(text, special=False, bos=False):
            assert begins is None, text
            place, begins = search.advance(place, token, Budget())
        assert begins == len(text[:start].encode()), text


@pytest.mark.parametrize("text, words", [
    ("(?=a)b", "look-ahead"), (r"(a)\1", "back-references"), (r"\bword", "word boundaries"), ("a**", "cannot be repeated"), ("(a", "add a )"),
    ("a)", "has no ("), ("[a", "add a ]"), ("[é]", "beyond ASCII"), ("a{2,1}", "go up from"), ("a{999}", "go up from"), ("a{0000000256}", "go up from"), ("a{1,99999999999}", "go up from"), ("x{", "begins a count"),
    ("a*", "the empty text"), ("", "the empty text"), ("*a", "nothing that"), ("(" * 40 + "a" + ")" * 40, "deep"), ("\\", "at the end"), (r"\x1", "hexadecimal"),
    ("((a{200}){200}){200}", f"more than {MOST_PARTS} parts"), ("(((()?){255}){255}){255}a", "parts"), ("a" * 2000, "characters"), ("[[:alpha:]]", "named classes"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(text, words):
    fails_with(SamplingError, re.escape(words), lambda: Program(Pattern(text)))


def test_counts_may_begin_with_zeros():
    """The first nine digits of a count were read, so that five times was none."""
    for text in ("xa{0000000005}", "xa{5,0000000005}", "xa{05}"):
        assert found(Program(Pattern(text)), b"xaaaa") is None and found(Program(Pattern(text)), b"xaaaaa") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["(a+)+$x", "(a|aa)+$x", r"(\w+\s?)*$x", "((a?){100}a{100})x", "(.*)(.*)(.*)(.*)(.*)x", "(a.{60}|b.{80})+x", "[^x]{250}y"]
)
def test_expressions_that_would_stall_others_do_not(tokenizer, text):
    """What takes a backtracking engine longer than anybody lives: parts that are looked at grow with the text, and past a limit it is an error."""
    program, budget = Program(Pattern(text)), Budget()
    found(program, b"a" * 300, budget)
    assert budget.spent < 300 * 4 * MOST_PARTS
    try:
        lazy = LazyGrammar("grammar", 'root ::= "x" [a-z]+', [Pattern(text)], tokenizer)
        for token in tokenizer.encode("aa ab aaa b" * 6, bos=False):
            lazy.bits()
            lazy.accept(token)
    except (SamplingError, EngineError) as error:
        assert "make them simpler" in str(error)


def generate(lazy, ids):
    for token in ids:
        lazy.bits()
        lazy.accept(token)


def test_what_ends_a_pattern(tokenizer, monkeypatch):
    monkeypatch.setattr("pyggml_spec.constraints.lazy.MOST_MASKS", 20)
    lazy = LazyGrammar("grammar", 'root ::= "y"+', [Pattern("[^x]{250}y")], tokenizer)
    fails_with(EngineError, "more than 20 different places", lambda: generate(lazy, tokenizer.encode("abc " * 40, bos=False)))
    monkeypatch.setattr("pyggml_spec.constraints.lazy.MOST_WORK", 50)
    with pytest.raises(SamplingError, match="more than 50 steps"):
        LazyGrammar("grammar", 'root ::= "x"+', [Pattern("(a.{60}|b.{80})+x")], tokenizer)


@pytest.mark.parametrize("triggers", [
    [Pattern("return( )")], [Pattern(r"^[\s\S]*?(return )")], [Pattern("return ", full=False)], ["return ", Pattern("never")], [Pattern(r"[\s\S]*(return )", True)],
])  # fmt: skip
def test_what_may_come_is_what_fits(tokenizer, triggers):
    beginning = "" if triggers == [Pattern("return( )")] else "return"
    lazy = LazyGrammar("grammar", f'root ::= "{beginning} " [0-9]+ "\\n"', triggers, tokenizer)
    for token in tokenizer.encode("if x: retur return 12\n", bos=False):
        mask = lazy.mask()
        some = [*range(0, tokenizer.n_vocab, 16), *tokenizer.encode("return n retur urn  1", bos=False)]
        assert np.array_equal(mask[some], [lazy.allows(i) for i in some]) and mask[token]
        lazy.accept(token)
    assert lazy.complete


def test_patterns_that_do_not_come_and_times(tokenizer):
    lazy = LazyGrammar("grammar", 'root ::= "<b>" [a-z]', [Pattern("<[ab]>")], tokenizer)
    for token in tokenizer.encode("x <", bos=False):
        lazy.accept(token)
    ids = tokenizer.encode("a>", bos=False)
    assert lazy.fits(ids) < len(ids) and lazy.fits(tokenizer.encode("b>", bos=False)) > 0
    words = [f"word {i}" for i in range(MOST_PATTERNS)]
    with pytest.raises(SamplingError, match="there are 9 patterns and words as triggers, but at most 8"):
        LazyGrammar("grammar", 'root ::= "word " [0-9]', [*words, Pattern("x")], tokenizer)
    LazyGrammar("grammar", 'root ::= "word " [0-9]', [*words[1:], Pattern("x")], tokenizer)
    search = Search([Pattern("(a+)+$x"), Pattern(r"[\s\S]*?(\{)")], Vocabulary.of(tokenizer))
    place, spent, text = search.begin, [], "a" * 1000 + "b" * 3000
    for token in tokenizer.encode(text, bos=False):
        budget, before = Budget(), place.length
        place, start = search.advance(place, token, budget)
        spent.append(budget.spent / (place.length - before))
        assert start is None
    assert place.length == len(text) and place.text == b"" and max(spent) < 100


def test_a_mask_is_made_once_per_place(tokenizer, monkeypatch):
    lazy = LazyGrammar("grammar", 'root ::= "{" [a-z]+ "}"', [Pattern(r"[\s\S]*?(\{)[\s\S]*")], tokenizer)
    asked, over = [], LazyGrammar.end_search
    monkeypatch.setattr(LazyGrammar, "end_search", lambda self, budget: asked.append(1) or over(self, budget))
    for token in tokenizer.encode("def f(x): a long text without it\n" * 5, bos=False):
        lazy.bits()
        lazy.accept(token)
    assert len(asked) <= 2


def read(search, ids, budget):
    place = search.begin
    for token in ids:
        place, _ = search.advance(place, token, budget)


HEAVY = f"(?:{'|'.join(['(.)'] * 110)})*X{{9}}Z"


def test_one_call_has_one_allowance(tokenizer, monkeypatch):
    """Each pattern had its own, for masks alone: four of these took 0.6 s, and 0.25 s for each step's drafts, on everybody's thread."""
    made, init = [], Budget.__init__
    monkeypatch.setattr(Budget, "__init__", lambda self, most=None: (made.append(self), init(self, most))[1])
    with pytest.raises(SamplingError, match="make them simpler"):
        LazyGrammar("grammar", 'root ::= "x" [a-z]+', [Pattern(HEAVY)] * 4, tokenizer)
    assert max(budget.spent for budget in made) < MOST_WORK + MOST_PARTS * 30
    search = Search([Pattern(HEAVY)] * 4, Vocabulary.of(tokenizer))
    budget = search.budget()
    with pytest.raises(EngineError, match=f"more than {MOST_WORK} steps"):
        read(search, tokenizer.encode("def f(x):\n    return x\n" * 3, bos=False), budget)
    assert MOST_WORK < budget.spent < MOST_WORK + MOST_PARTS * 30


@pytest.mark.parametrize(
    "call", [lambda lazy, ids: lazy.fits(ids), lambda lazy, ids: lazy.accept(ids[0]), lambda lazy, ids: lazy.ahead(ids)]
)
def test_what_one_request_looks_at_is_not_another_ones(tokenizer, monkeypatch, call):
    """They share tables. Budget was counted there, so that what one thread looked at refused the request of another."""
    one, other = (LazyGrammar("grammar", 'root ::= "x" [a-z]+', [Pattern("(a.{60}|b.{80})+x")], tokenizer) for _ in range(2))
    ids = tokenizer.encode("aa ab aaa b", bos=False)
    with monkeypatch.context() as small:
        small.setattr("pyggml_spec.constraints.lazy.MOST_WORK", 3)
        fails_with(EngineError, "more than 3 steps", call, one, ids)
    for _ in range(3):
        call(other, ids)
    call(one, ids)
