"""Anthropic's own client: messages, streams, tools, counts and errors in its shape."""

import json

import pytest

ASK = {"model": "x", "max_tokens": 20, "extra_body": {"temperature": 0}, "messages": [{"role": "user", "content": "import os"}]}
TOOL = {
    "name": "look_up",
    "description": "A word.",
    "input_schema": {"type": "object", "properties": {"word": {"enum": ["spam"]}}, "required": ["word"], "additionalProperties": False},
}


@pytest.fixture(scope="module")
def client(server, anthropic):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def test_a_stream_is_the_message(client, server):
    whole = client.messages.create(**ASK)
    chat = server.ok("/v1/chat/completions", messages=ASK["messages"], max_tokens=20, temperature=0)
    assert whole.content[0].text == chat["choices"][0]["message"]["content"] and whole.stop_reason == "max_tokens"
    assert (
        whole.usage.output_tokens == 20 and whole.usage.input_tokens + whole.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    )
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text and final.usage.output_tokens == 20


def test_counted_tokens_are_those_of_the_prompt(client):
    asked = {"model": "x", "messages": ASK["messages"], "system": "You write Python."}
    counted = client.messages.count_tokens(**asked).input_tokens
    used = client.messages.create(**asked, max_tokens=1).usage
    assert (
        counted
        == used.input_tokens + used.cache_read_input_tokens
        > client.messages.count_tokens(model="x", messages=ASK["messages"]).input_tokens
    )


def test_stop_sequences(client):
    free = client.messages.create(**ASK).content[0].text
    stop = free.split()[1]
    got = client.messages.create(**ASK, stop_sequences=[stop])
    assert got.stop_reason == "stop_sequence" and got.stop_sequence == stop and got.content[0].text == free[: free.index(stop)]


def test_an_answer_in_the_format_that_was_asked_for(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "enum": [42]}}, "required": ["n"], "additionalProperties": False}
    got = client.messages.create(**ASK, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert json.loads(got.content[0].text) == {"n": 42}


def test_tools(client):
    got = client.messages.create(**{**ASK, "max_tokens": 90}, tools=[TOOL], tool_choice={"type": "tool", "name": "look_up"})
    (block,) = got.content
    assert block.type == "tool_use" and block.name == "look_up" and block.input == {"word": "spam"} and got.stop_reason == "tool_use"
    with client.messages.stream(**{**ASK, "max_tokens": 90}, tools=[TOOL], tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert [b.input for b in final.content] == [{"word": "spam"}]
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "tool_use", "id": "t", "name": "look_up", "input": {"word": "spam"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "eggs"}]}, {"type": "text", "text": "go on"}]},
    ]  # fmt: skip
    assert client.messages.create(**{**ASK, "messages": turns}, tools=[TOOL], tool_choice={"type": "none"}).content


def test_the_line_that_changes_with_every_request_is_left_out(server):
    """Behind it nothing of the system prompt could be reused."""
    asked = {"max_tokens": 1, "messages": ASK["messages"]}
    line = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};You are a tool."
    counts = [
        server.ok("/v1/messages/count_tokens", **asked, system=text)["input_tokens"]
        for text in (line.format("a5145"), line.format("0"), "You are a tool.")
    ]
    assert counts[0] == counts[1] == counts[2]
    assert server.ok("/v1/messages/count_tokens", **asked, system="x-other: cch=1;You")["input_tokens"] > 0


@pytest.mark.parametrize(
    "body",
    [{"messages": "x"}, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, {"messages": [], "tools": 3}],
)
def test_errors_have_its_shape(server, body):
    response = server.post("/v1/messages", max_tokens=2, **body)
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error" and len(response.json()["error"]["message"]) > 15


def test_the_clients_errors(client, anthropic):
    with pytest.raises(anthropic.BadRequestError, match="exceeds the available context"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": json.dumps(list(range(3000)))}]})
