"""llama.cpp's own endpoints, /metrics, keys of other pages, and what is said about errors below the application."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.running import events

PROMPT = "def quicksort(items):\n"


def test_a_stream_is_the_answer(server):
    asked = {"prompt": PROMPT, "n_predict": 40, "temperature": 0}
    whole = server.ok("/completion", **asked, return_tokens=True)
    told = [json.loads(e) for e in events(server.post("/completion", **asked, stream=True))]
    assert "".join(e["content"] for e in told) == whole["content"] and [t for e in told for t in e["tokens"]] == whole["tokens"]
    assert [e["stop"] for e in told] == [False] * (len(told) - 1) + [True]
    last = told[-1]
    assert (last["stop_type"], last["tokens_predicted"], last["tokens_evaluated"]) == ("limit", 40, whole["tokens_evaluated"])
    assert last["timings"]["predicted_n"] == 40 and last["timings"]["predicted_per_second"] > 0


def test_probabilities_after_the_samplers(server):
    """By llama.cpp's names; what the samplers left, which is all there is."""
    asked = {"prompt": PROMPT, "n_predict": 6, "temperature": 1.0, "top_k": 4, "n_probs": 10, "seed": 7, "post_sampling_probs": True}
    whole = server.ok("/completion", **asked)
    told = whole["completion_probabilities"]
    assert len(told) == 6 and whole["generation_settings"]["post_sampling_probs"] is True
    for token in told:
        assert set(token) == {"id", "token", "bytes", "prob", "top_probs"} and 1 <= len(token["top_probs"]) <= 4
        assert sum(p["prob"] for p in token["top_probs"]) == pytest.approx(1, abs=1e-4)
        assert {p["id"]: p["prob"] for p in token["top_probs"]}[token["id"]] == token["prob"]
    chat = server.ok("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=2,
                     temperature=0, post_sampling_probs=True)  # fmt: skip
    assert [[p["prob"] for p in token["top_probs"]] for token in chat["choices"][0]["logprobs"]["content"]] == [[1.0]] * 3
    old = server.ok("/v1/completions", prompt="x", max_tokens=2, logprobs=2, temperature=0, post_sampling_probs=True)["choices"][0][
        "logprobs"
    ]
    assert old["token_logprobs"] == [0.0, 0.0] and [list(top.values()) for top in old["top_logprobs"]] == [[0.0], [0.0]]
    refused = server.post("/completion", prompt="x", post_sampling_probs=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "post_sampling_probs"


@pytest.mark.parametrize("prompt", [PROMPT, "ids", "mixed", {"prompt_string": PROMPT}], ids=str)
def test_prompts_of_every_kind_are_the_same_prompt(server, prompt):
    ids = server.ok("/tokenize", content=PROMPT, add_special=True)["tokens"]
    given = {"ids": ids, "mixed": [*ids[:2], server.ok("/detokenize", tokens=ids[2:])["content"]]}.get(
        prompt if isinstance(prompt, str) else "", prompt
    )
    asked = {"n_predict": 12, "temperature": 0}
    got = server.ok("/completion", prompt=given, **asked)
    assert got["content"] == server.ok("/completion", prompt=PROMPT, **asked)["content"] and got["prompt"] == PROMPT
    both = server.ok("/completion", prompt=[given, PROMPT], **asked)
    assert [(b["index"], b["content"]) for b in both] == [(0, got["content"]), (1, got["content"])]


def test_the_same_seed_gives_the_same_text_and_is_told(server):
    first = server.ok("/completion", prompt=PROMPT, n_predict=16, temperature=1.2)
    seed = first["generation_settings"]["seed"]
    assert seed < (1 << 32) - 1
    assert server.ok("/completion", prompt=PROMPT, n_predict=16, temperature=1.2, seed=seed)["content"] == first["content"]
    texts = {server.ok("/completion", prompt=PROMPT, n_predict=16, temperature=1.2, seed=s)["content"] for s in range(4)}
    assert len(texts) > 1


def test_every_token_of_a_stream_has_its_probability(server):
    told = [json.loads(e) for e in events(server.post("/completion", prompt=PROMPT, n_predict=10, temperature=0, n_probs=3, stream=True))]
    assert [len(e["completion_probabilities"]) for e in told[:-1]] == [1] * 10
    assert all(len(e["completion_probabilities"][0]["top_logprobs"]) == 3 for e in told[:-1])


def test_fields_of_the_response(server):
    got = server.ok("/completion", prompt=PROMPT, n_predict=2, response_fields=["content", "generation_settings/n_predict", "no/such"])
    assert set(got) == {"content", "n_predict"} and got["n_predict"] == 2
    ended = server.ok("/completion", prompt=PROMPT, n_predict=30, temperature=0, stop=["the"])
    assert ended["stop_type"] == "word" and ended["stopping_word"] == "the"
    biased = server.ok("/completion", prompt=PROMPT, n_predict=2, ignore_eos=True)
    assert biased["generation_settings"]["logit_bias"] and all(b["bias"] is None for b in biased["generation_settings"]["logit_bias"])


def test_progress_and_reuse(server):
    prompt = "x = 1\n" * 200
    told = [
        json.loads(e)
        for e in events(server.post("/completion", prompt=prompt, n_predict=2, stream=True, return_progress=True, timings_per_token=True))
    ]
    steps = [e["prompt_progress"] for e in told if "prompt_progress" in e]
    assert steps[0]["processed"] == steps[0]["cache"] == 0 and steps[-1]["processed"] == steps[-1]["total"]
    assert [s["processed"] for s in steps] == sorted({s["processed"] for s in steps}) and told[0]["timings"]["prompt_ms"] == 0
    server.ok("/completion", prompt=prompt, n_predict=0)
    again = server.ok("/completion", prompt=prompt + "y", n_predict=2)
    assert again["timings"]["cache_n"] >= 128 and again["timings"]["cache_n"] + again["timings"]["prompt_n"] == again["tokens_evaluated"]
    assert server.ok("/completion", prompt=prompt + "y", n_predict=2, cache_prompt=False)["timings"]["cache_n"] == 0


def test_drafting_does_not_depend_on_reuse(server):
    """Behind a prompt that was reused the text is the same, and drafts are accepted."""
    prompt = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(40))
    asked = {"prompt": prompt, "n_predict": 60, "temperature": 0, "stream": True, "speculation": True}
    for _ in range(3):  # the second one keeps a state where they part
        server.ok("/completion", prompt=prompt, n_predict=0)

    def steps(**more):
        told = [json.loads(e) for e in events(server.post("/completion", **asked, **more))]
        return (
            told[-1],
            "".join(e["content"] for e in told),
            [(e["speculation"]["tokens"], e["speculation"]["drafts"]) for e in told if "speculation" in e and not e["stop"]],
        )

    fresh, text, _ = steps(cache_prompt=False)
    reused, again, _ = steps()
    assert reused["timings"]["cache_n"] >= 128 > fresh["timings"]["cache_n"] == 0 and text == again
    assert reused["timings"]["draft_n_accepted"] > 0


def test_the_server_about_itself(server):
    props = server.http.get("/props").json()
    assert props["total_slots"] == 4 and props["model_path"].endswith(".gguf") and props["default_generation_settings"]["n_ctx"] == 2048
    assert props["pyspec"]["drafter"] == "drafter.gguf" and "im_start" in props["chat_template"]
    assert [slot["id"] for slot in server.http.get("/slots").json()] == [0, 1, 2, 3]
    assert server.http.get("/lora-adapters").json() == []
    rendered = server.ok("/apply-template", messages=[{"role": "user", "content": "hello"}])["prompt"]
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    asked, tools = {"messages": [{"role": "user", "content": "x"}]}, [{"type": "function", "function": {"name": name}} for name in "ab"]
    allowed = {"type": "allowed_tools", "tools": tools[1:]}
    shown = [
        server.ok("/apply-template", **asked, tools=tools[i:], tool_choice=c)["prompt"]
        for i, c in ((0, allowed), (1, "auto"), (0, "auto"), (0, "none"), (2, "auto"))
    ]
    assert shown[0] == shown[1] != shown[2] != shown[3] == shown[4]  # as chats mean it
    counted = server.ok("/v1/chat/completions/input_tokens", messages=[{"role": "user", "content": "hello"}])["input_tokens"]
    assert counted == len(server.ok("/tokenize", content=rendered, add_special=True)["tokens"])
    pieces = server.ok("/tokenize", content="a 媽 🤗", with_pieces=True)["tokens"]
    assert all(p["piece"] for p in pieces) and any(isinstance(p["piece"], list) for p in pieces)


def test_metrics_are_what_requests_came_to(server):
    def values():
        text = server.http.get("/metrics").text
        return {(s.name, *sorted(s.labels.items())): s.value for family in text_string_to_metric_families(text) for s in family.samples}

    before = values()
    got = [server.ok("/completion", prompt=PROMPT, n_predict=n, temperature=0)["timings"] for n in (1, 7, 30)]
    after = values()

    def rose(name, *labels):
        return after.get((name, *labels), 0) - before.get((name, *labels), 0)

    assert rose("llamacpp:tokens_predicted_total") == sum(t["predicted_n"] for t in got) == 38
    assert rose("llamacpp:prompt_tokens_total") == sum(t["prompt_n"] for t in got)
    assert rose("llamacpp:spec_decode_num_draft_tokens_total") == sum(t["draft_n"] for t in got)
    assert rose("llamacpp:spec_decode_num_accepted_tokens_total") == sum(t["draft_n_accepted"] for t in got)
    assert rose("pyspec:time_to_first_token_seconds_count") == 3 and rose("pyspec:sequences_total", ("finish_reason", "length")) == 3
    positions = [v for (name, *labels), v in after.items() if name == "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"]
    assert positions and sum(positions) == after["llamacpp:spec_decode_num_accepted_tokens_total",]
    assert after["llamacpp:requests_processing",] == after["llamacpp:requests_deferred",] == 0


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/nowhere", 404), ("POST", "/nowhere", 404), ("GET", "/completion", 405), ("POST", "/props", 405), ("DELETE", "/v1/models", 405),
        ("POST", "/v1/embeddings", 501), ("POST", "/rerank", 501), ("POST", "/lora-adapters", 501),
    ],
)  # fmt: skip
def test_paths_that_are_not_there(server, method, path, status):
    response = server.http.request(method, path, json={})
    assert response.status_code == response.json()["error"]["code"] == status


def test_bodies_that_are_none(server):
    for body, status in ((b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400), (b'"x"', 400), (b"", 400)):
        response = server.http.post("/v1/completions", content=body)
        assert response.status_code == status and response.json()["error"]["message"], body[:20]
    assert server.http.post("/completion", content=b"a=b", headers={"content-type": "image/png"}).status_code == 415
    too_long = server.http.post("/completion", content=b" " * ((32 << 20) + 1))
    assert too_long.status_code == 413 and too_long.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_of_megabytes_is_refused_before_it_is_encoded(server):
    """18 MB took a thread of two 100 s. No token is longer than the longest one of the vocabulary."""
    for path, body in (
        ("/completion", {"prompt": "x = 1\n" * 300_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x = 1\n" * 300_000}]}),
    ):
        error = server.post(path, **body).json()["error"]
        assert error["type"] == "exceed_context_size_error" and "at least" in error["message"] and error["n_prompt_tokens"] > 2048
        assert int(re.search(r"pyspec serve -c (\d+)", error["message"])[1]) > error["n_prompt_tokens"]


def test_invalid_http_is_answered_in_json(server):
    with server.connect() as sock:
        sock.sendall(b"what is this\r\n\r\n")
        answer = b""
        while part := sock.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == 400


def test_other_pages_may_ask_only_if_they_are_of_this_machine(server):
    for origin, allowed in (
        ("http://localhost:3000", True),
        ("http://[::1]:1", True),
        ("http://localhost.evil.com", False),
        ("null", False),
        ("http://[", False),
    ):
        for method in ("OPTIONS", "GET"):
            headers = server.http.request(method, "/health", headers={"origin": origin}).headers
            assert headers.get("access-control-allow-origin") == (origin if allowed else None)


def test_identifiers_of_the_caller_come_back(server):
    headers = server.http.get("/health", headers={"x-request-id": "mine", "x-session-id": "s1"}).headers
    assert headers["x-request-id"] == "mine" and headers["x-session-id"] == "s1"
    assert server.http.get("/health").headers["x-request-id"].startswith("req_")


def test_a_grammar_that_begins_at_a_word(server):
    """llama.cpp's `grammar_lazy`: free before the word or pattern, matched behind it; what means nothing is refused with the field's name."""
    body = {
        "prompt": "def square(x):\n    ", "n_predict": 60, "temperature": 0, "grammar": 'root ::= "return" " " [0-9]{3,8} "\\n"', "grammar_lazy": True,
    }  # fmt: skip
    patterns = [{"type": "pattern", "value": r"(retur[a-z])\s*"}], [{"type": 3, "value": r"[\s\S]*?(return)[\s\S]*"}]
    for triggers in (["return"], [{"type": "word", "value": "return"}], [{"type": 1, "value": "return"}], *patterns):
        done = server.ok("/completion", **body, grammar_triggers=triggers)
        _, word, behind = done["content"].partition("return")
        assert word and behind.strip().isdigit() and done["generation_settings"]["grammar_lazy"]
    for wrong, status, param in (
        ({"grammar_triggers": []}, 400, "grammar_triggers"),
        ({"grammar_triggers": [{"type": "pattern", "value": "(?=a)b"}]}, 400, None),
        ({"grammar_triggers": [{"type": "pattern", "value": 5}]}, 400, "grammar_triggers"),
        ({"grammar_triggers": [{"type": "pattern", "value": "retur[n]"}] * 9}, 400, None),
        ({"grammar_triggers": [{"type": "token", "token": 10**9}]}, 400, "grammar_triggers.token"),
        ({"grammar_triggers": ["x"], "grammar": ""}, 400, "grammar_lazy"),
        ({"grammar_triggers": ["other"]}, 400, None),
    ):
        response = server.post("/completion", **{**body, **wrong})
        assert response.status_code == status, response.text
        assert param is None or response.json()["error"]["param"] == param
