# pip: httpx
"""The requests that Open WebUI sends to an OpenAI and to an Ollama connection: lists, a chat with its metadata, a title."""

import json
import os

import httpx

URL, MODEL = os.environ["PYSPEC_URL"], os.environ["PYSPEC_MODEL"]
http = httpx.Client(
    base_url=URL, timeout=120, headers={"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "a", "X-OpenWebUI-Chat-Id": "b"}
)
assert MODEL in [model["id"] for model in http.get("/v1/models").json()["data"]]
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]
body = {"stream": True, "model": MODEL, "messages": messages, "stream_options": {"include_usage": True}, "max_tokens": 12}
with http.stream("POST", "/v1/chat/completions", json=body) as response:
    lines = [line for line in response.iter_lines() if line.startswith("data: ")]
assert response.status_code == 200 and lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["usage"]["completion_tokens"]
title = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "A title for this chat, as JSON."}],
    "stream": False,
    "max_completion_tokens": 20,
}
assert http.post("/v1/chat/completions", json=title).json()["choices"][0]["message"]["content"]
assert http.get("/api/version").json()["version"] and http.get("/api/tags").json()["models"] and "models" in http.get("/api/ps").json()
assert http.post("/api/show", json={"model": MODEL}).json()["details"]["format"] == "gguf"
with http.stream(
    "POST",
    "/api/chat",
    json={"model": MODEL, "messages": [messages[0], {"role": "user", "content": "Name a colour."}], "options": {"num_predict": 12}},
) as response:
    assert json.loads(list(response.iter_lines())[-1])["done"]
