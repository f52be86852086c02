"""A constraint that is accepted has a way to end: one that has none is refused by name, and no text is led to where nothing may come."""

import json
import random

import jsonschema
import pytest

import pyggml_spec as ps
from pyggml_spec.constraints import grammar as grammars
from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.constraints.productive import productive
from pyggml_spec.errors import ConstraintError, SamplingError


def keys(**more):
    return {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False, **more}


def around(node, **more):
    return {"$ref": "#/$defs/n", "$defs": {"n": node}, **more}


N = {"$ref": "#/$defs/n"}
HOLDS = {"type": "object", "properties": {"n": N}, "required": ["n"], "additionalProperties": False}
FULL = {"type": "array", "items": N, "minItems": 1}
ENDS = {
    "a pattern for the named key": keys(patternProperties={"^a$": {}}),
    "a pattern for the named key, and more about it": keys(patternProperties={"^a$": {"type": "integer"}}),
    "a pattern that matches nothing": keys(patternProperties={"^x[^\\s\\S]": {"type": "integer"}}),
    "a pattern for the required key": {"type": "object", "required": ["b"], "patternProperties": {"^b$": {"const": 2}}, "additionalProperties": False},
    "in items": {"type": "array", "items": keys(patternProperties={"^a$": {}}), "minItems": 1, "maxItems": 2},
    "an endless member that may be left out": {"type": "object", "properties": {"ok": {"const": 1}, "n": N}, "required": ["ok"], "additionalProperties": False, "$defs": {"n": HOLDS}},
    "an endless alternative": {"anyOf": [{"const": 1}, N], "$defs": {"n": FULL}},
    "endless items": {"type": "array", "items": N, "$defs": {"n": FULL}},
    "an optional list of itself": around({"type": "array", "items": N, "maxItems": 2}),
    "none or itself": around({"anyOf": [{"type": "null"}, HOLDS]}),
}  # fmt: skip
ENDLESS = {
    "itself": around(N), "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}, "required": around(HOLDS), "items": around(FULL),
    "prefix": around({"type": "array", "prefixItems": [N], "minItems": 1}), "more keys": around({"type": "object", "required": ["x"], "additionalProperties": N}),
    "keys by patterns": around({"type": "object", "required": ["x"], "patternProperties": {"^x": N}, "additionalProperties": False}), "alternatives": {"anyOf": [{"$ref": "#"}, FULL], "$defs": {"n": FULL}},
    "a contradiction as the way out": around({"anyOf": [{"type": "string", "const": 1}, FULL]}), "an anchor": {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "array", "items": {"$ref": "#n"}, "minItems": 2}}},
    "all of": around({"allOf": [HOLDS, {"type": "object"}]}),
}  # fmt: skip
CONTRADICTIONS = [
    {"enum": []}, {"anyOf": []}, {"type": []}, {"type": "string", "enum": [1, 2]}, {"type": "string", "const": 1}, {"type": "string", "pattern": "^a{5}$", "maxLength": 3},
    {"type": "string", "pattern": "^a{5}$", "minLength": 7}, {"type": "string", "format": "uuid", "maxLength": 5}, {"type": "string", "format": "date", "pattern": "^x"}, {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, {"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7}, {"allOf": [{"const": 1}, {"const": 2}]}, {"oneOf": [False, False]},
    {"type": "array", "items": False, "minItems": 1}, {"type": "array", "minItems": 3, "maxItems": 2}, {"type": "array", "prefixItems": [False], "minItems": 1}, {"not": {}}, keys(minProperties=2), keys(maxProperties=0),
    keys(required=["b"]), keys(patternProperties={"^a$": {"const": 2}}), keys(patternProperties={"^a$": {}}, minProperties=2), {"type": "object", "minProperties": 1, "additionalProperties": False},
    {"type": "object", "patternProperties": {"[^\\s\\S]": {}}, "additionalProperties": False, "minProperties": 1}, {"type": "object", "properties": {"a": False}, "required": ["a"]},
]  # fmt: skip


def walk(kind, text, tokenizer, seed, most=200):
    """A text of short random tokens that ends as soon as it may; None if it does not within so many."""
    rng, grammar, out = random.Random(seed), Grammar(kind, text, tokenizer), b""
    for _ in range(most):
        if grammar.complete:
            return out.decode()
        allowed = sorted(grammar.mask().nonzero()[0].tolist(), key=lambda token: len(tokenizer.piece(token)))[:40]
        grammar.accept(token := rng.choice(allowed))
        out += tokenizer.piece(token)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_what_can_end_is_led_to_no_dead_end(tokenizer, name):
    texts = [walk("json_schema", json.dumps(ENDS[name]), tokenizer, seed) for seed in range(8)]
    assert None not in texts
    for text in texts:
        jsonschema.Draft202012Validator(ENDS[name]).validate(json.loads(text))


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_a_document_that_ends_is_refused(tokenizer, name):
    with pytest.raises(SamplingError, match="no finite document.*anyOf"):
        Grammar("json_schema", json.dumps(ENDLESS[name]), tokenizer)


@pytest.mark.parametrize("schema", CONTRADICTIONS, ids=json.dumps)
def test_a_contradiction_is_refused_at_the_start(tokenizer, schema):
    with pytest.raises(SamplingError, match="Unsatisfiable|'not'|minProperties"):
        Grammar("json_schema", json.dumps(schema), tokenizer)


@pytest.mark.parametrize("schema", [
    {"allOf": [{"patternProperties": {"^a$": {}}, "additionalProperties": False}]}, {"anyOf": [{"patternProperties": {"^a$": {}}, "additionalProperties": False}]},
    {"$ref": "#/$defs/p", "$defs": {"p": {"patternProperties": {"^a$": {}}, "additionalProperties": False}}},
], ids=json.dumps)  # fmt: skip
def test_keys_that_are_put_together_lead_nowhere_or_are_refused(tokenizer, schema):
    with pytest.raises(SamplingError, match="dead end after.*one object"):
        Grammar("json_schema", json.dumps({**keys(), "additionalProperties": True, **schema}), tokenizer)


@pytest.mark.parametrize("kind, text, words", [
    ("grammar", 'root ::= "a" root', "derives no finite text"), ("grammar", 'root ::= "a" x\nx ::= "b" y\ny ::= "c" x', "derives no finite text"), ("grammar", 'root ::= ("a" root)+', "derives no finite text"),
    ("lark", 'start: "a" start', "'start'"), ("lark", 'start: "a" | "b" loop\nloop: "c" loop', "'loop'"), ("lark", 'start: "z" item{2}\nitem: ("b" item)', "'start'"),
    ("lark", 'start: "x" A | "y"\nA: /a+/ & /b+/', "'A' matches nothing"), ("lark", 'start: "x" A\nA: /a/ & ~/(?s:.*)/', "'A' matches nothing"),
    ("lark", 'start: "x" %json {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}}', "no document matches"),
    ("regex", "a[^\\s\\S]", "no token continues"),
])  # fmt: skip
def test_grammars_without_an_end_are_refused(tokenizer, kind, text, words):
    with pytest.raises(SamplingError, match=words):
        Grammar(kind, text, tokenizer)


@pytest.mark.parametrize("kind, text", [
    ("grammar", 'root ::= "a" | "b" loop\nloop ::= "c" loop'), ("grammar", 'root ::= ("a" loop)? "z"\nloop ::= "c" loop'), ("grammar", 'root ::= (loop | "a")* "z" | x\nx ::= x x | "y"\nloop ::= loop'),
    ("regex", "a|b[^\\s\\S]c"), ("lark", 'start: "x" y?\ny: "a" y | "b"\nunused: unused "a"'), ("lark", 'start: A\nA: /[ab]{1,3}/ & ~/a.*/'),
])  # fmt: skip
def test_what_does_not_end_is_not_begun(tokenizer, kind, text):
    assert None not in [walk(kind, text, tokenizer, seed) for seed in range(8)]


def test_parts_end_where_enough_of_what_they_need_does():
    parts = {
        "leaf": (0, ()),
        "all": (2, ("leaf", "one")),
        "one": (1, ("loop", "leaf")),
        "loop": (1, ("loop",)),
        "both": (2, ("leaf", "loop")),
        "twice": (2, ("leaf", "leaf")),
    }
    assert productive(parts) == {"leaf", "all", "one", "twice"}


def test_a_dead_end_while_generating_is_one_sentence(tokenizer, monkeypatch):
    """One that nobody found before."""
    monkeypatch.setattr(grammars.lark_rules, "check", lambda text: None)
    grammar = Grammar("lark", 'start: "x" A\nA: /a+/ & /b+/', tokenizer)
    grammar.accept(tokenizer.encode("x", bos=False)[0])
    with pytest.raises(ConstraintError, match="cannot continue"):
        grammar.bits()


def test_errors_of_constraints_are_the_callers(tokenizer):
    assert issubclass(ps.ConstraintError, ps.SamplingError)
    assert issubclass(ps.ConstraintError, ps.EngineError)
