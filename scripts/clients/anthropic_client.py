# pip: anthropic
"""Messages, streams, calls, counted tokens."""

import os

import anthropic

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]
client = anthropic.Anthropic(base_url=URL, api_key="none")
messages = [{"role": "user", "content": "Name a colour."}]
assert client.messages.create(model=MODEL, messages=messages, max_tokens=12).content[0].text
with client.messages.stream(model=MODEL, messages=messages, max_tokens=12) as stream:
    assert "".join(stream.text_stream)
    assert stream.get_final_message().usage.output_tokens
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
tools = [{"name": "weather", "input_schema": schema}]
called = client.messages.create(model=MODEL, messages=messages, max_tokens=80, tools=tools, tool_choice={"type": "any"})
assert called.content[-1].type == "tool_use" and called.stop_reason == "tool_use"
assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 5
