"""Forced tokens are drafts: fewer steps, the same text, with a drafter and without, alone and among others."""

import gc
import json
import weakref

import pytest

import pyggml_spec as ps
from pyggml_spec.constraints.grammar import Grammar, Vocabulary
from pyggml_spec.constraints.jump_forward import JumpForward
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.sampling.sampler import Sampling
from pyggml_spec.text.tokenizer import Tokenizer

KEYS = {
    "the_name_of_the_function": {"enum": ["list", "dict"]},
    "number_of_arguments": {"type": "integer", "maximum": 9, "minimum": 0},
    "is_it_a_method": {"type": "boolean"},
}
SCHEMA = json.dumps({"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False})
CONSTRAINTS = {
    "schema": {"json_schema": SCHEMA}, "regex": {"regex": r"def [a-z]{3,9}\(self, (name|number)\):\n    return None\n"},
    "lark": {"lark": 'start: "import " NAME ("\\nimport " NAME){2}\nNAME: /[a-z]{1,8}/'}, "gbnf": {"grammar": 'root ::= "x = [" d (", " d){0,3} "]" \nd ::= [0-9] | "(" d ")"'},
}  # fmt: skip
VALUES = [{"temperature": 0.0}, {"seed": 7, "temperature": 1.0}]


@pytest.fixture(scope="module", params=[None, DEMO_DRAFTER], ids=["no drafter", "drafter"])
def session(request):
    with ps.load(
        DEMO_TARGET,
        draft=request.param,
        device="CPU",
        threads=1,
        n_ctx=512,
        **({"spec": ["none"]} if request.param is None else {"draft_width": 4}),
    ) as session:
        yield session


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("values", VALUES, ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_drafts_and_without_in_slots_and_alone(session, kind, values):
    sampling = Sampling(**CONSTRAINTS[kind], **values)
    text, stats = session.generate("import os\n\n", 90, sampling=sampling)
    plain, alone = session.generate("import os\n\n", 90, sampling=sampling, mode="plain")
    assert text == plain
    assert alone.drafted == alone.forced == 0
    assert (stats.stop_reason, stats.cut) == ("end", False)
    with session.concurrent(slots=2) as server:
        handles = [server.submit("import os\n\n", 90, sampling=sampling), server.submit("def f(", 20)]
        assert handles[0].result()[0] == text
        handles[1].result()
        assert handles[0].stats.forced == stats.forced or session.drafter is not None


def test_forced_tokens_make_fewer_steps(session):
    _, stats = session.generate("config = ", 90, sampling=Sampling(json_schema=SCHEMA, seed=3))
    _, plain = session.generate("config = ", 90, sampling=Sampling(json_schema=SCHEMA, seed=3), mode="plain")
    assert stats.forced >= 10
    assert stats.forced_matched == stats.forced
    assert stats.steps < 0.6 * plain.steps
    assert stats.emitted == plain.emitted == 1 + stats.steps + stats.matched


def test_logits_are_read_only_where_the_likeliest_token_is_forbidden(session, monkeypatch):
    """On a GPU each read of a row is a megabyte; greedy decoding needs one where the constraint changes something."""
    read, step_of = [], type(session.engine)
    real = step_of.candidates
    monkeypatch.setattr(step_of, "candidates", lambda self, row, slot=0: read.append(row) or real(self, row, slot))
    text, _ = session.generate("x = 1\n", 12, sampling=Sampling(temperature=0))
    assert not read
    free = "".join(f"\\x{{{ord(c):x}}}" for c in text)
    again, stats = session.generate("x = 1\n", 12, sampling=Sampling(temperature=0, regex=f"({free}|zz)(.|\\n)*"))
    assert again == text
    assert stats.emitted == 12
    assert not read, "everything was allowed"
    session.generate("x = 1\n", 12, sampling=Sampling(temperature=0, regex="[A-Z]{30}"))
    assert read


def test_a_text_that_is_cut_is_said_to_be(session):
    for options, cut in [({"max_tokens": 5}, True), ({"max_tokens": 90}, False), ({"max_tokens": 90, "stop": ["arguments"]}, True)]:
        _, stats = session.generate("config = ", sampling=Sampling(json_schema=SCHEMA, temperature=0), **options)
        assert stats.cut is cut
        assert stats.stop_reason == ("stop" if "stop" in options else "length" if cut else "end")
    _, stats = session.generate(
        "config = ", 5, sampling=Sampling(regex="[a-z]*", temperature=0, logit_bias={session.tokenizer.encode("a")[0]: 20.0})
    )
    assert (stats.stop_reason, stats.cut) == ("length", False), "what is there is a whole text"


def test_the_drafter_is_preferred_while_it_gives_more():
    class Three:
        def forced(self, most):
            return [1, 2, 3][:most]

    drafts = JumpForward(Three(), (1, 2, 4, 8))
    assert drafts.next() == [1, 2, 3]
    for _ in range(50):
        drafts.observe_drafter(5)
    assert drafts.next() == []
    for _ in range(50):
        drafts.observe_drafter(1)
    assert drafts.next() == [1, 2, 3]


def test_a_constraint_is_compiled_once_per_text(session, monkeypatch):
    compiled = []
    real = Vocabulary.source_of
    monkeypatch.setattr(Vocabulary, "source_of", lambda self, kind, text: compiled.append(text) or real(self, kind, text))
    schema = '{"enum": ["once"]}'
    first, second = (Grammar("json_schema", schema, session.tokenizer) for _ in range(2))
    assert compiled == [schema]
    first.accept(first.forced(1)[0])
    assert second.forced(1) == Grammar("json_schema", schema, session.tokenizer).forced(1), "one position is not the other's"


def test_a_vocabulary_goes_with_its_tokenizer():
    """For 250,000 tokens it is more than 100 MB; llguidance holds what it was made of, and Python does not see that."""
    tokenizer = Tokenizer(GGUFFile(DEMO_TARGET))
    grammar = Grammar("regex", "abc+", tokenizer)
    vocabulary = weakref.ref(Vocabulary.of(tokenizer))
    del tokenizer, grammar
    gc.collect()
    assert vocabulary() is None
