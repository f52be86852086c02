"""JSON schemas: a keyword is kept or refused by name, never left out; what comes out is what the schema says, by another library's judgement."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from make_schema_suite import accepted
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.constraints.closed_objects import DEEPEST, closed, closed_text
from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.constraints.json_schema import FORMATS, KEYWORDS, MAX_TEXT, checked
from pyggml_spec.errors import SamplingError

SUITE = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text("utf-8"))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NODE = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"], "additionalProperties": False}  # fmt: skip
SCHEMAS = [
    PERSON, {"$ref": "#/$defs/node", "$defs": {"node": NODE}}, {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3,5}$"},
    {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "minItems": 2, "maxItems": 4}, {"enum": ["a b", 1, None, True, {"k": [2]}]},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "number", "minimum": -2.5, "maximum": 2.5},
    {"type": "object", "properties": {"kind": {"const": "x"}}, "required": ["kind"], "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^n_[a-z]{1,4}$": {"type": "number"}}, "additionalProperties": False},
    {"anyOf": [PERSON, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}]}, {"type": ["string", "null"], "maxLength": 4},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}, {"multipleOf": 3}]}, {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"}, {"type": "string", "format": "ipv4"}, {"type": "string", "format": "uuid"},
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "integer"}], "items": False, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "minProperties": 1, "additionalProperties": False},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}]}, {"type": "object", "maxProperties": 2},
]  # fmt: skip


def texts(schema, tokenizer, seeds, most=160):
    """Texts of random allowed tokens, whole ones only; the end comes as soon as it may, once in four times."""
    all_ends = [token for token in range(tokenizer.n_vocab) if tokenizer.is_end(token)]
    for seed in seeds:
        rng, grammar, out = random.Random(seed), Grammar("json_schema", json.dumps(schema), tokenizer), b""
        for _ in range(most):
            mask = grammar.mask()
            allowed, ends = mask.nonzero()[0], [token for token in all_ends if mask[token]]
            token = int(rng.choice(ends if ends and (len(ends) == len(allowed) or rng.random() < 0.25) else allowed))
            grammar.accept(token)
            out += tokenizer.piece(token)
            if grammar.ended:
                yield out.decode("utf-8")
                break


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_every_text_of_a_schema_is_valid(tokenizer, schema):
    """By the ``jsonschema`` library; of the converter that was here before, one in four was not."""
    validator, whole = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()), 0
    for text in texts(schema, tokenizer, range(12)):
        validator.validate(json.loads(text, parse_constant=pytest.fail))
        whole += 1
    assert whole


@pytest.mark.slow
@pytest.mark.parametrize("group", SUITE["groups"], ids=lambda group: group["description"])
def test_the_test_suite_of_json_schema(tokenizer, group):
    """Each schema is refused, or forbids every document that the suite says is invalid; for those that are kept the list says so."""
    try:
        grammar = Grammar("json_schema", json.dumps(group["schema"]), tokenizer)
    except SamplingError:
        assert not group["kept"]
        return
    assert group["kept"]
    del grammar
    for test in group["tests"]:
        text = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False), bos=False)
        grammar = Grammar("json_schema", json.dumps(group["schema"]), tokenizer)
        fits = grammar.fits(text) == len(text)
        for token in text if fits else ():
            grammar.accept(token)
        assert (fits and grammar.complete) is test["accepted"], test["description"]
        assert test["valid"] or not test["accepted"]


def test_a_keyword_is_known_or_refused_by_name():
    keywords = (
        "not",
        "if",
        "contains",
        "propertyNames",
        "uniqueItems",
        "dependentRequired",
        "unevaluatedProperties",
        "nullable",
        "minWidth",
    )
    for keyword in keywords:
        assert keyword not in KEYWORDS
        for schema in ({keyword: True}, {"$defs": {"x": {keyword: 1}}}, {"anyOf": [{"items": {keyword: {}}}]}):
            for more in ({}, {"$schema": "http://json-schema.org/draft-04/schema#"}):
                fails_with(SamplingError, f"'{keyword}'", lambda: checked(json.dumps({**schema, **more})))


def test_what_forbids_nothing_and_what_cannot_be_read():
    checked(
        json.dumps({"uniqueItems": False, "deprecated": True, "title": "x", "default": {"not": 1}, "enum": [{"not": 1}], "$comment": "y"})
    )
    for text in ("", "{", "[" * 100000, "[]", "true", '{"properties": 3}', '{"allOf": 3, "properties": {"a": {"$ref": 5}}}'):
        closed_text(text)
    deep = A
    for _ in range(3 * DEEPEST):
        deep = {"type": "array", "items": deep}
    closed(deep)
    loop = {"$ref": "#/$defs/n", "properties": {}, "$defs": {"n": {"$ref": "#/$defs/n", "properties": {}}}}
    assert closed(loop)


@pytest.mark.parametrize("schema, words", [
    ("", "no JSON"), ("[]", "object"), ('{"$ref": "https://example.com/a.json"}', "https://example.com"), ('{"$ref": "#/nothing"}', "no schema"),
    ('{"$ref": "#/default", "default": {"minWidth": 1}}', "no schema"), ('{"type": "unheard of"}', "Invalid type"), ("[" * 100000, "no JSON"),
    ('{"items": {"$ref": 5}}', "must be a string"), ('{"minimum": NaN}', "no JSON"), ('{"const": 9007199254740993}', "double"),
    ('{"type": "string", "format": "iri"}', "iri"), ('{"format": "unknown"}', "unknown"), ('{"oneOf": [{"minimum": 1}, {"maximum": 5}]}', "oneOf"),
    ('{"minProperties": 2}', "minProperties"), ('{"properties": {"a": {"$id": "b"}}}', "#/properties/a"), ('{"type": "string", "pattern": "a(?=b)"}', "look-ahead"),
    ('{"prefixItems": [{"type": "integer"}], "additionalItems": false}', "additionalItems"), ('{"additionalItems": false}', "additionalItems"),
    ('{"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}', "8633"), ('{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
    ('{"enum": ["' + "x" * MAX_TEXT + '"]}', "characters"), ("false", "false"), ('{"required": ["a"], "additionalProperties": false, "type": "object"}', "'a'"),
    ('{"anyOf": ' + '[{"anyOf": ' * 5000 + "[]" + "}]" * 5000 + "}", "JSON"),
])  # fmt: skip
def test_wrong_schemas_are_one_sentence(tokenizer, schema, words):
    with pytest.raises(SamplingError, match=words) as caught:
        Grammar("json_schema", schema, tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lark", ['start: %json {"minWidth": 3}', 'start: "x" %json{"properties": {"a": {"not": {}}}}',
                                  'start: %json {"type": "string", "x-guidance": {"lenient": true}, "format": "iri"}'])  # fmt: skip
def test_schemas_in_lark_grammars_are_held_to_the_same(tokenizer, lark):
    fails_with(SamplingError, "minWidth|'not'|x-guidance", Grammar, "lark", lark, tokenizer)


def test_formats_mean_what_they_say(tokenizer):
    for name, good, bad in [("date", "2024-02-29", "2021-02-29"), ("time", "12:30:59Z", "12:30:60Z"), ("hostname", "a-b.c", "xn--x"),
                            ("date-time", "2000-02-29T00:00:00+01:00", "1900-02-29T00:00:00Z")]:  # fmt: skip
        assert name in FORMATS
        for text, accepted in ((good, True), (bad, False)):
            ids = tokenizer.encode(json.dumps(text), bos=False)
            assert (Grammar("json_schema", json.dumps({"type": "string", "format": name}), tokenizer).fits(ids) == len(ids)) is accepted


INT = {"type": "integer"}
A, B = {"type": "object", "properties": {"a": INT}}, {"type": "object", "properties": {"b": INT}, "required": ["b"]}
SHORT_NODE = {"type": "object", "properties": {"v": INT, "n": {"$ref": "#/$defs/n"}}, "required": ["v"]}
TABLE = [  # a schema; texts that may come; texts that may not, all of which JSON Schema itself allows
    (A, ["{}", '{"a":1}'], ['{"a":1,"x":2}', '{"x":2}']),
    ({"type": "object"}, ['{"x":1}', "{}"], []),
    ({}, ['{"x":1}', "3"], []),
    ({"type": "object", "properties": {}}, ["{}"], ['{"x":1}']),
    ({**A, "additionalProperties": True}, ['{"a":1,"x":"y"}'], []),
    ({**A, "additionalProperties": INT}, ['{"a":1,"x":2}'], []),
    ({**A, "patternProperties": {"^n_": INT}}, ['{"a":1,"n_x":2}'], ['{"x":2}']),
    ({"type": "object", "patternProperties": {"^n_": INT}}, ['{"n_x":2}', '{"x":"y"}'], []),
    ({"type": "object", "properties": {"o": A}}, ['{"o":{"a":1}}'], ['{"o":{"x":1}}']),
    ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"x":1}]']),
    ({"type": "array", "prefixItems": [A, B], "items": False}, ['[{"a":1},{"b":1}]'], ['[{"a":1,"x":2},{"b":1}]']),
    ({**A, "additionalProperties": B}, ['{"x":{"b":1}}'], ['{"x":{"b":1,"y":2}}']),
    ({"allOf": [A, B]}, ['{"a":1,"b":2}', '{"b":2}'], ['{"a":1,"b":2,"x":3}']),
    ({"allOf": [A, {**B, "additionalProperties": True}]}, ['{"a":1,"b":2,"x":3}'], []),
    ({"anyOf": [A, B]}, ['{"a":1}', '{"b":2}'], ['{"a":1,"b":2}', '{"x":1}']),
    ({"type": "object", "properties": {"c": INT}, "anyOf": [A, B]}, ['{"c":1,"a":1}', '{"c":1,"b":2}'], ['{"c":1,"x":1}']),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"a":1,"b":2}'], ['{"a":1,"x":2}']),
    ({"$ref": "#/$defs/a", "$defs": {"a": A}}, ['{"a":1}'], ['{"x":1}']),
    ({"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}, B]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"x":3}']),
    ({"$defs": {"a": A}, "$ref": "#/$defs/a", "properties": {"c": INT}}, ['{"c":2,"a":1}', '{"c":1}'], ['{"a":1,"x":3}']),
    ({"type": "object", "properties": {"a": INT}, "required": ["a", "z"]}, ['{"a":1,"z":"any"}'], ['{"a":1,"z":2,"y":3}']),
    ({"type": "object", "properties": {"a": INT}, "required": ["a"], "minProperties": 2}, ['{"a":1,"x":2}'], []),
    ({"$ref": "#/$defs/n", "$defs": {"n": SHORT_NODE}}, ['{"v":1,"n":{"v":2}}'], ['{"v":1,"n":{"v":2,"x":1}}']),
    ({"$defs": {"n": {"allOf": [{"$ref": "#/$defs/m"}, A]}, "m": {"type": "object", "properties": {"k": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
     ['{"k":{"a":1},"a":2}'], ['{"k":{"x":1}}']),
]  # fmt: skip


@pytest.mark.parametrize("schema, good, others", TABLE, ids=[json.dumps(schema) for schema, *_ in TABLE])
def test_keys_that_are_not_described_do_not_come_unless_asked_for(tokenizer, schema, good, others):
    text = json.dumps(schema)
    default, standard = ps.Sampling(json_schema=text), ps.Sampling(json_schema=text, additional_properties=True)
    for document in (*good, *others):
        jsonschema.Draft202012Validator(schema).validate(json.loads(document))
        assert accepted(tokenizer, default.constraint[1], document) is (document in good)
    assert standard.constraint == ("json_schema", text)
