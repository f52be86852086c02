# pip: ollama
"""Ollama's Python client: chats, texts, calls, formats, embeddings, descriptions."""

import os

import ollama

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]
client = ollama.Client(host=URL)
messages = [{"role": "user", "content": "Name a colour."}]
short = {"num_predict": 12}
assert MODEL in [model.model for model in client.list().models] and client.show(MODEL).details.format == "gguf"
assert client.chat(MODEL, messages, options=short).message.content
assert client.ps().models[0].context_length
assert "".join(part.message.content for part in client.chat(MODEL, messages, stream=True, options=short))
assert "".join(part.response for part in client.generate(MODEL, "The sky is", raw=True, stream=True, options=short))
schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
assert '"n"' in client.chat(MODEL, messages, format=schema, options={"num_predict": 60}).message.content


def weather(city: str) -> str:
    """The weather of a city."""


calls = ollama.Client(host=os.environ["PYSPEC_CALLS"])
called = calls.chat("calls", messages, tools=[weather], options={"temperature": 0})
assert called.message.tool_calls[0].function.arguments == {"city": "Paris"}
assert len(client.embed("embeds", ["a cat", "a dog"]).embeddings[1]) == 64
