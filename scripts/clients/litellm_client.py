# pip: litellm
"""litellm's providers openai/, anthropic/ and ollama_chat/, whole and as streams."""

import os

import litellm

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]
messages = [{"role": "user", "content": "Name a colour."}]
for provider, base in (("openai", f"{URL}/v1"), ("anthropic", URL), ("ollama", URL), ("ollama_chat", URL)):
    common = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "messages": messages, "max_tokens": 12}
    assert litellm.completion(**common).choices[0].message.content, provider
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**common, stream=True)), provider
