"""Grammars under speculation: the output matches, its state moves by accepted tokens only, and no text ends the process."""

import json
import re
import subprocess
import sys

import pytest
import scripted

import pyggml_spec as ps
from pyggml_spec.constraints import grammar as grammars
from pyggml_spec.constraints.gbnf import MAX_DEPTH, MAX_TEXT
from pyggml_spec.constraints.grammar import Grammar, Vocabulary
from pyggml_spec.errors import SamplingError
from pyggml_spec.sampling.sampler import Sampling

CALL = 'root ::= "def " name "(" (name ("," name)*)? "):" "\\n" "    return " name\nname ::= [a-z] [a-z_]{0,8}'
TALKER = """
import os, threading
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.text.tokenizer import Tokenizer

said, over = 0, threading.Event()

def talk():
    global said
    while not over.is_set():
        os.write(2, f"{said}\\n".encode())
        said += 1

tokenizer = Tokenizer(GGUFFile(DEMO_TARGET))
talker = threading.Thread(target=talk)
talker.start()
for n in range(3):
    Grammar("grammar", "root ::= " + " | ".join(f'"{n} {i}"' for i in range(5000)), tokenizer)
over.set()
talker.join()
print(said)
"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["list", "dict"]}, "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["name", "kind", "sizes"],
}  # fmt: skip


@pytest.fixture(scope="module")
def demo():
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=4) as session:
        yield session


@pytest.mark.parametrize("values", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 1.5, "top_k": 0, "repeat_penalty": 1.2}])
def test_the_output_matches_and_equals_plain_decoding(demo, values):
    sampling = Sampling(grammar=CALL, **values)
    text, stats = demo.generate("import os\n\n", 120, sampling=sampling)
    assert re.fullmatch(r"def [a-z][a-z_]{0,8}\(([a-z][a-z_]{0,8}(,[a-z][a-z_]{0,8})*)?\):\n    return [a-z][a-z_]{0,8}", text), text
    assert stats.stop_reason == "end" and 0 < stats.matched < stats.drafted
    assert text == demo.generate("import os\n\n", 120, sampling=sampling, mode="reference")[0]


def test_json_by_schema(demo):
    text, stats = demo.generate("config = ", 200, sampling=Sampling(json_schema=json.dumps(SCHEMA), temperature=0.6, seed=4))
    value = json.loads(text)
    assert set(value) == {"name", "kind", "sizes"} and value["kind"] in ("list", "dict") and all(type(n) is int for n in value["sizes"])
    assert stats.stop_reason == "end" and stats.drafted > 0


def test_a_grammar_that_no_token_continues_is_said(demo):
    """Nothing is left after the bias; llama.cpp would end the process when it is told to accept a token that does not fit."""
    with pytest.raises(ps.EngineError, match="no token"):
        demo.generate(
            "a", 5, sampling=Sampling(temperature=0, grammar="root ::= [a-z]+", logit_bias={i: float("-inf") for i in range(4090)})
        )
    assert demo.generate("a", 3)[1].emitted == 3


def test_what_a_constraint_has_seen_is_not_kept_for_ever(demo, monkeypatch):
    """64 of them are kept, each with the states of its lexer: 4 MB in 3,000 tokens of one that has many."""
    monkeypatch.setattr("pyggml_spec.constraints.grammar.MASKS", 20)
    kept, one = Vocabulary.of(demo.tokenizer).compiled, ("regex", "[ab]{50}")
    first = Grammar(*one, demo.tokenizer)
    assert all(first.bits().any() for _ in range(10)) and one in kept
    assert len(first.copy().some(12)[1]) == 13 and one not in kept
    assert (first.bits() == Grammar(*one, demo.tokenizer).bits()).all() and one in kept


def test_a_grammar_and_ignored_end_tokens_contradict_each_other(demo):
    with pytest.raises(SamplingError, match="end token"):
        demo.generate("a", 5, sampling=Sampling(grammar=CALL), ignore_end=True)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "empty"),
        ("root ::= [a-z", "end of input"),
        ('root ::= "a" (', "expecting '\\)'"),
        ("start ::= [a-z]", "root"),
        ("root ::= root", "derives no finite text"),
        ("root ::= other", "no rule named 'other'"),
        ("root ::= [a-z]{5,2}", "smaller"),
        ("root ::= [a-z]{0000000000000000000000000005,2}", "smaller"),
        ("root ::= [a-z]{99999999}", "repetitions"),
        ("root ::= [a-z]{99999999999999999999999999}", "repetitions"),
        ("root ::= [a]\0", "NUL"),
        ("root ::= " + "(" * (MAX_DEPTH + 1) + "[a]" + ")" * (MAX_DEPTH + 1), "parentheses"),
        ("root ::= [a]" + " " * MAX_TEXT, "characters"),
    ],
)
def test_wrong_grammars_are_one_sentence(demo, text, words, capfd):
    with pytest.raises(SamplingError, match=words):
        Grammar("grammar", text, demo.tokenizer)
    assert capfd.readouterr().err == ""


def test_what_looks_absurd_inside_a_literal_is_none(demo):
    Grammar("grammar", r'root ::= "{5,2}" [{5,2}(] "\"((((" # {5,2}', demo.tokenizer)
    Grammar("grammar", "root ::= " + "(" * MAX_DEPTH + "[a]" + ")" * MAX_DEPTH, demo.tokenizer)
    Grammar("grammar", "".join(f"r{i} ::= r{i + 1}\n" for i in range(8000)) + "r8000 ::= [a]\nroot ::= r0", demo.tokenizer)


@pytest.mark.slow
def test_a_grammar_that_is_compiled_takes_nothing_that_other_threads_say():
    """libllama says on descriptor 2 what is wrong with a grammar; to read it there, the whole process's was redirected."""
    done = subprocess.run([sys.executable, "-c", TALKER], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-500:]
    said = int(done.stdout)
    assert said > 100 and done.stderr == "".join(f"{i}\n" for i in range(said))


def test_what_may_come_does_not_depend_on_what_masks_take(tmp_path, monkeypatch):
    """Masks by threads name the tokenizer's own tokens where text is forced; other spellings of it may come all the same, as by the quick way."""
    scripted.write(tmp_path / "t.gguf", ['{"name": "get_weather", "city": "Paris"}'], None)
    schema = (
        '{"type": "object", "properties": {"name": {"const": "get_weather"}, "city": {"type": "string"}}, "required": ["name", "city"]}'
    )
    with ps.load(tmp_path / "t.gguf", device="CPU", threads=1) as session:
        tokens = range(session.tokenizer.n_vocab)
        quick = Grammar("json_schema", schema, session.tokenizer)
        monkeypatch.setattr(grammars, "SLOW_S", -1.0)
        monkeypatch.setattr(grammars, "HEAVY_S", -1.0)
        slow = Grammar("json_schema", schema, session.tokenizer)
        slow.slow = True
        unlike = 0
        for _ in range(8):
            bits, allowed = slow.bits(), [token for token in tokens if quick.allows(token)]
            assert allowed == [token for token in tokens if slow.allows(token)]
            unlike += any(not grammars.allows(bits, token) for token in allowed)
            for grammar in (quick, slow):
                grammar.accept(allowed[-1])
        assert unlike  # or else this shows nothing
