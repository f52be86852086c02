# pip: openai
"""Chats, streams, calls, formats, responses, completions, embeddings, the list of models."""

import os

import openai
from pydantic import BaseModel

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
messages = [{"role": "user", "content": "Name a colour."}]


class Person(BaseModel):
    name: str
    age: int


assert MODEL in [model.id for model in client.models.list()]
assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12).choices[0].message.content
stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True})
assert next(chunk.usage for chunk in stream if chunk.usage).completion_tokens
parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
call = (
    client.chat.completions.create(model=MODEL, messages=messages, tools=[tool], tool_choice="required", max_tokens=80).choices[0].message
)
assert call.tool_calls[0].function.name == "weather"
said = "Ann is 20. Give her as JSON."
parsed = client.chat.completions.parse(
    model=MODEL, messages=[{"role": "user", "content": said}], response_format=Person, max_tokens=200, temperature=0
)  # fmt: skip
assert isinstance(parsed.choices[0].message.parsed, Person)
assert client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=12).output_text
kinds = [event.type for event in client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=12, stream=True)]
assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
assert client.completions.create(model=MODEL, prompt="The sky is", max_tokens=5).choices[0].text
assert len(client.embeddings.create(model="embeds", input=["a cat", "a dog"]).data[1].embedding) == 64
