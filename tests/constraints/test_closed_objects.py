"""Objects of a schema have the keys that it describes and no others, as with llama.cpp, or any further ones, as JSON Schema has it."""

import json

import jsonschema
import pytest

import pyggml_spec as ps
from pyggml_spec.constraints.closed_objects import DEEPEST, closed, closed_text
from pyggml_spec.constraints.grammar import Grammar

INT = {"type": "integer"}
A, B = {"type": "object", "properties": {"a": INT}}, {"type": "object", "properties": {"b": INT}, "required": ["b"]}
NODE = {"type": "object", "properties": {"v": INT, "n": {"$ref": "#/$defs/n"}}, "required": ["v"]}
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
    ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, ['{"v":1,"n":{"v":2}}'], ['{"v":1,"n":{"v":2,"x":1}}']),
    ({"$defs": {"n": {"allOf": [{"$ref": "#/$defs/m"}, A]}, "m": {"type": "object", "properties": {"k": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
     ['{"k":{"a":1},"a":2}'], ['{"k":{"x":1}}']),
]  # fmt: skip


def fits(schema: str, text: str, tokenizer) -> bool:
    grammar, ids = Grammar("json_schema", schema, tokenizer), tokenizer.encode(text, bos=False)
    if grammar.fits(ids) < len(ids):
        return False
    for token in ids:
        grammar.accept(token)
    return grammar.complete


@pytest.mark.parametrize("schema, good, others", TABLE, ids=[json.dumps(schema) for schema, *_ in TABLE])
def test_keys_that_are_not_described_do_not_come_unless_asked_for(tokenizer, schema, good, others):
    text = json.dumps(schema)
    default, standard = ps.Sampling(json_schema=text), ps.Sampling(json_schema=text, additional_properties=True)
    for document in (*good, *others):
        jsonschema.Draft202012Validator(schema).validate(json.loads(document))
        assert fits(default.constraint[1], document, tokenizer) is (document in good)
    assert standard.constraint == ("json_schema", text)


def test_what_cannot_be_read_is_left_to_who_says_so():
    for text in ("", "{", "[" * 100000, "[]", "true", '{"properties": 3}', '{"allOf": 3, "properties": {"a": {"$ref": 5}}}'):
        closed_text(text)
    deep = A
    for _ in range(3 * DEEPEST):
        deep = {"type": "array", "items": deep}
    closed(deep)
    loop = {"$ref": "#/$defs/n", "properties": {}, "$defs": {"n": {"$ref": "#/$defs/n", "properties": {}}}}
    assert closed(loop)
