"""Where a schema stands in a request: taken, or refused with the right place; never ignored. Keys that it does not describe do not come."""

import json

import pytest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["list", "dict"]}}, "required": ["kind"]}
SAID = [{"role": "user", "content": "make one"}]
CHAT_PLACE, TEXT_PLACE = '"json_schema": {"name": "...", "schema": {...}}', '"format": {"type": "json_schema", "name"'
WRONG = [
    (CHAT, {"response_format": {"type": "json_schema", "schema": SCHEMA}}, '"schema"', CHAT_PLACE),
    (CHAT, {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, '"json_schema"', CHAT_PLACE),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema_": SCHEMA}}}, '"schema_"', CHAT_PLACE),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, '"type"', CHAT_PLACE),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": [SCHEMA]}}, "an object", CHAT_PLACE),
    (CHAT, {"response_format": {"type": "text", "schema": SCHEMA}}, '"schema"', CHAT_PLACE),
    (CHAT, {"response_format": {"schema": SCHEMA}}, '"schema"', CHAT_PLACE),
    (CHAT, {"response_format": SCHEMA}, "object", "json_schema"),
    (CHAT, {"response_format": {"type": "json_object", "strict": True}}, '"strict"', CHAT_PLACE),
    ("/v1/completions", {"response_format": {"type": "json_schema", "schema": SCHEMA}}, '"schema"', CHAT_PLACE),
    ("/completion", {"json_schema": {"name": "x", "schema": SCHEMA}}, "'schema'|'name'", "keyword"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}}, '"json_schema"', TEXT_PLACE),
    (RESPONSES, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, '"schema"', TEXT_PLACE),
    (RESPONSES, {"text": {"type": "json_schema", "schema": SCHEMA}}, '"type"', TEXT_PLACE),
    (RESPONSES, {"text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}}, "text.format", "one of them"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}}, '"json_schema"', '"schema": {...}'),
    (MESSAGES, {"output_config": {"type": "json_schema", "schema": SCHEMA}}, '"type"', '"schema": {...}'),
    (MESSAGES, {"output_format": {"type": "json_object", "schema": SCHEMA}}, "output_format", '"schema": ...'),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_format", "alone"),
]  # fmt: skip
RIGHT = [
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "description": "y", "schema": SCHEMA}}},
    ),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA, "json_schema": None}}),
    (CHAT, {"json_schema": SCHEMA}),
    (CHAT, {"response_format": {"type": "json_object"}, "json_schema": SCHEMA}),
    ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/completion", {"json_schema": SCHEMA}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
]


def asked(path: str, body: dict) -> dict:
    what = {"input": "make one"} if path == RESPONSES else {"messages": SAID} if path in (CHAT, MESSAGES) else {"prompt": "make one"}
    most = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}.get(path, "n_predict")
    return {**what, most: 60, "temperature": 0, **body}


def told(path: str, answer: dict) -> str:
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    if path == MESSAGES:
        return answer["content"][0]["text"]
    if path == RESPONSES:
        return answer["output"][-1]["content"][0]["text"]
    return answer["choices"][0]["text"] if path == "/v1/completions" else answer["content"]


@pytest.mark.slow
@pytest.mark.parametrize("path, body, name, place", WRONG, ids=[f"{path} {json.dumps(body)[:60]}" for path, body, *_ in WRONG])
def test_a_schema_in_the_wrong_place_is_refused_with_the_right_one(server, path, body, name, place):
    response = server.post(path, **asked(path, body))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert any(part in message for part in name.split("|"))
    assert place in message


@pytest.mark.parametrize("path, body", RIGHT, ids=[f"{path} {json.dumps(body)[:60]}" for path, body in RIGHT])
def test_a_schema_in_its_place_is_held_to_and_brings_no_further_keys(server, path, body):
    value = json.loads(told(path, server.ok(path, **asked(path, body))))
    assert list(value) == ["kind"]


def test_further_keys_may_come_where_they_are_asked_for(server):
    """The bias wants a comma behind the first value, which JSON Schema allows and the default does not."""
    comma = {"logit_bias": [[",", 100]], "json_schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}
    assert json.loads(server.ok("/completion", **asked("/completion", comma))["content"]) == {"a": 1}
    further = server.ok("/completion", **asked("/completion", {**comma, "additional_properties": True}))["content"]
    assert further.replace(" ", "").replace("\n", "").startswith('{"a":1,')


def test_arguments_of_a_call_have_no_further_keys_either(server):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
    }
    body = asked(CHAT, {"tools": [tool], "tool_choice": "required", "logit_bias": [[",", 100]]})
    (call,) = server.ok(CHAT, **body)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


def test_a_schema_without_an_end_is_refused_before_anything_is_generated(server):
    ends = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
        "patternProperties": {"^a$": {}},
    }
    form = {"type": "json_schema", "json_schema": {"schema": ends}}
    assert json.loads(told(CHAT, server.ok(CHAT, **asked(CHAT, {"response_format": form})))) == {"a": 1}
    for stream in (False, True):
        loop = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}, "$ref": "#/$defs/n"}
        response = server.post(CHAT, **asked(CHAT, {"json_schema": loop, "stream": stream}))
        assert response.status_code == 400
        assert "no finite document" in response.json()["error"]["message"]
