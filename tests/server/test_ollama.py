"""Ollama's dialect: the same answers as OpenAI's, in its lines; its options, errors and descriptions."""

import json

import httpx
import pytest
import scripted
from server.running import Running

from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.ollama import keep_seconds

CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def lines(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.fixture(scope="module")
def asked(server):
    return {"messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Sort a list"}], "model": "m"}


def test_answers_are_those_of_openais_dialect(server, asked):
    options = {"temperature": 0, "num_predict": 24, "num_ctx": 99, "stop": ["\n\n\n"]}
    theirs = server.ok("/v1/chat/completions", **asked, temperature=0, max_tokens=24, stop=["\n\n\n"])
    whole = server.ok("/api/chat", **asked, options=options, stream=False)
    assert whole["message"] == {"role": "assistant", "content": theirs["choices"][0]["message"]["content"]} and whole["model"] == "m"
    assert (whole["eval_count"], whole["prompt_eval_count"]) == (24, theirs["usage"]["prompt_tokens"])
    long = [{"role": "user", "content": "a word " * 300}]  # prepared in a thread, after which the body is freed
    assert server.ok("/api/chat", messages=long, model="m", options={"num_predict": 1}, stream=False)["model"] == "m"
    assert whole["done"] is True and whole["done_reason"] == "length" and whole["total_duration"] >= whole["eval_duration"] > 0
    parts = lines(server.post("/api/chat", **asked, options=options))  # streams are the default
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"] and len(parts) > 2
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1]["done_reason"] == "length"
    conversation = server.ok("/api/generate", prompt="Sort a list", system="Short.", options=options, stream=False)
    assert conversation["response"] == whole["message"]["content"]
    raw = server.ok("/api/generate", prompt="def sort(", raw=True, options=options, stream=False)["response"]
    assert raw == server.ok("/v1/completions", prompt="def sort(", temperature=0, max_tokens=24, stop=["\n\n\n"])["choices"][0]["text"]
    parts = lines(server.post("/api/generate", prompt="def sort(", raw=True, options=options))
    assert "".join(part["response"] for part in parts) == raw


def test_formats_hold_and_probabilities_come(server, asked):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    held = server.ok("/api/chat", **asked, format=schema, options={"num_predict": 60, "seed": 1}, stream=False)
    assert isinstance(json.loads(held["message"]["content"])["n"], int)
    one = server.ok("/api/chat", **asked, options={"num_predict": 2, "temperature": 0}, logprobs=True, top_logprobs=3, stream=False)
    assert len(one["logprobs"]) == 2 and len(one["logprobs"][0]["top_logprobs"]) == 3 and one["logprobs"][0]["logprob"] <= 0


def test_calls_have_objects_as_arguments_and_may_come_back(tmp_path):
    scripted.write(tmp_path / "calls.gguf", [CALL], None)
    with Running("-m", tmp_path / "calls.gguf", "-c", 2048, "--slots", 1) as running:
        asked = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL], "options": {"temperature": 0}}
        called = running.ok("/api/chat", **asked, stream=False)["message"]
        assert (
            called["tool_calls"] == [{"function": {"name": "weather", "arguments": {"city": "Paris", "days": 3}}}]
            and called["content"] == ""
        )
        parts = lines(running.post("/api/chat", **asked))
        assert [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]] == [called["tool_calls"]]
        more = [*asked["messages"], called, {"role": "tool", "tool_name": "weather", "content": "22 degrees"}]
        assert running.ok("/api/chat", **{**asked, "messages": more}, stream=False)["done"]
        described = running.ok("/api/show", model="calls")
        assert described["details"]["family"] == "llama" and described["model_info"]["llama.context_length"] == 8192


def test_descriptions_name_the_model(server):
    (entry,) = server.http.get("/api/tags").json()["models"]
    assert entry["size"] > 1 << 20 and len(entry["digest"]) == 64 and entry["details"]["format"] == "gguf"
    (loaded,) = server.http.get("/api/ps").json()["models"]
    assert loaded["digest"] == entry["digest"] and loaded["size_vram"] > entry["size"] and loaded["context_length"] > 0
    shown = server.ok("/api/show", name=entry["name"])
    assert shown["capabilities"][0] == "completion" and shown["model_info"]["general.parameter_count"] > 1_000_000
    assert "temperature" in shown["parameters"] and server.http.get("/api/version").json()["version"][0].isdecimal()
    assert server.ok("/api/generate", model="m", keep_alive=0) | {"created_at": ""} == {
        "model": "m", "created_at": "", "response": "", "done": True, "done_reason": "unload",
    }  # fmt: skip


def test_refusals_are_in_its_form_and_name_its_fields(server, asked):
    for more, status, words in (
        ({"options": {"top_p": 9}}, 400, "options.top_p is 9"), ({"options": {"num_predict": "x"}}, 400, "options.num_predict"),
        ({"format": [1]}, 400, "format is [1]"), ({"think": 3}, 400, "think is 3"), ({"messages": "a"}, 400, "messages is missing"),
        ({"messages": [{"role": "user", "content": "a", "images": ["?"]}]}, 400, "images in base64"),
    ):  # fmt: skip
        refused = server.post("/api/chat", **{**asked, **more})
        assert refused.status_code == status and list(refused.json()) == ["error"] and words in refused.json()["error"], refused.text
    assert server.post("/api/generate", prompt="a", template="b").status_code == 501
    pulled = server.post("/api/pull", model="x")
    assert pulled.status_code == 501 and "pyspec pull" in pulled.json()["error"]
    ignored = server.post("/api/chat", **asked, options={"num_predict": 1, "num_ctx": 5, "wrong": 1}, surprise=1)
    assert ignored.status_code == 200 and ignored.headers["x-pyspec-ignored"] == "surprise, options.wrong"


def test_keep_alive_is_read_as_there():
    assert [keep_seconds(value) for value in (0, 90, "5m", "1h30m", "1.5s", "-1", -1, "0")] == [0, 90, 300, 5400, 1.5, None, None, 0]
    for wrong in ("soon", True, [], "5 m", ""):
        with pytest.raises(ApiError, match="keep_alive"):
            keep_seconds(wrong)
