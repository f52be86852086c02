"""llama.cpp's own endpoints, /metrics, keys of other pages, and what is said about errors below the application."""

import ctypes
import json
import re
import struct
from types import SimpleNamespace

import llama_cpp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.running import Running, events

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.sampling.sampler import Sampling
from pyggml_spec.server import sampling
from pyggml_spec.server.bodies import Generation, Infill
from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.infill import BATCH, SNIPPET, filled_ids, lay_out
from pyggml_spec.server.output import Output
from pyggml_spec.server.served import NAMED, Rendering, Served, ServeOptions
from pyggml_spec.server.tasks import TaskRequest
from pyggml_spec.text import template
from pyggml_spec.text.stream import LENGTH, STOP, LineLimits, TextStream
from pyggml_spec.text.template import ChatTemplate
from pyggml_spec.text.tokenizer import Fim, Tokenizer

PROMPT = "def quicksort(items):\n"


def test_answers_as_streams_and_pages(server):
    asked = {"prompt": PROMPT, "n_predict": 40, "temperature": 0}
    whole = server.ok("/completion", **asked, return_tokens=True)
    told = [json.loads(e) for e in events(server.post("/completion", **asked, stream=True))]
    assert "".join(e["content"] for e in told) == whole["content"] and [t for e in told for t in e["tokens"]] == whole["tokens"]
    assert [e["stop"] for e in told] == [False] * (len(told) - 1) + [True]
    last = told[-1]
    assert (last["stop_type"], last["tokens_predicted"], last["tokens_evaluated"]) == ("limit", 40, whole["tokens_evaluated"])
    assert last["timings"]["predicted_n"] == 40 and last["timings"]["predicted_per_second"] > 0
    origins = {"http://localhost:3000": True, "http://[::1]:1": True, "http://localhost.evil.com": False, "null": False}
    for origin, allowed in origins.items():
        for method in ("OPTIONS", "GET"):
            headers = server.http.request(method, "/health", headers={"origin": origin}).headers
            assert headers.get("access-control-allow-origin") == (origin if allowed else None)
    headers = server.http.get("/health", headers={"x-request-id": "mine", "x-session-id": "s1"}).headers
    assert headers["x-request-id"] == "mine" and headers["x-session-id"] == "s1"
    assert server.http.get("/health").headers["x-request-id"].startswith("req_")


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
    asked = {"prompt": "x", "max_tokens": 2, "logprobs": 2, "temperature": 0, "post_sampling_probs": True}
    old = server.ok("/v1/completions", **asked)["choices"][0]["logprobs"]
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


def test_seeds_and_fields_of_responses(server):
    first = server.ok("/completion", prompt=PROMPT, n_predict=16, temperature=1.2)
    seed = first["generation_settings"]["seed"]
    assert seed < (1 << 32) - 1
    assert server.ok("/completion", prompt=PROMPT, n_predict=16, temperature=1.2, seed=seed)["content"] == first["content"]
    texts = {server.ok("/completion", prompt=PROMPT, n_predict=16, temperature=1.2, seed=s)["content"] for s in range(4)}
    assert len(texts) > 1
    told = [json.loads(e) for e in events(server.post("/completion", prompt=PROMPT, n_predict=10, temperature=0, n_probs=3, stream=True))]
    assert [len(e["completion_probabilities"]) for e in told[:-1]] == [1] * 10
    assert all(len(e["completion_probabilities"][0]["top_logprobs"]) == 3 for e in told[:-1])
    got = server.ok("/completion", prompt=PROMPT, n_predict=2, response_fields=["content", "generation_settings/n_predict", "no/such"])
    assert set(got) == {"content", "n_predict"} and got["n_predict"] == 2
    ended = server.ok("/completion", prompt=PROMPT, n_predict=30, temperature=0, stop=["the"])
    assert ended["stop_type"] == "word" and ended["stopping_word"] == "the"
    biased = server.ok("/completion", prompt=PROMPT, n_predict=2, ignore_eos=True)
    assert biased["generation_settings"]["logit_bias"] and all(b["bias"] is None for b in biased["generation_settings"]["logit_bias"])


def test_progress_and_reuse(server):
    prompt = "x = 1\n" * 200
    asked = {"prompt": prompt, "n_predict": 2, "stream": True, "return_progress": True, "timings_per_token": True}
    told = [json.loads(e) for e in events(server.post("/completion", **asked))]
    steps = [e["prompt_progress"] for e in told if "prompt_progress" in e]
    assert steps[0]["processed"] == steps[0]["cache"] == 0 and steps[-1]["processed"] == steps[-1]["total"]
    assert [s["processed"] for s in steps] == sorted({s["processed"] for s in steps}) and told[0]["timings"]["prompt_ms"] == 0
    server.ok("/completion", prompt=prompt, n_predict=0)
    again = server.ok("/completion", prompt=prompt + "y", n_predict=2)
    assert again["timings"]["cache_n"] >= 128 and again["timings"]["cache_n"] + again["timings"]["prompt_n"] == again["tokens_evaluated"]
    assert server.ok("/completion", prompt=prompt + "y", n_predict=2, cache_prompt=False)["timings"]["cache_n"] == 0


@pytest.mark.slow
def test_drafting_does_not_depend_on_reuse(server):
    """Behind a prompt that was reused the text is the same, and drafts are accepted."""
    prompt = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(40))
    asked = {"prompt": prompt, "n_predict": 60, "temperature": 0, "stream": True, "speculation": True}
    for _ in range(3):  # the second one keeps a state where they part
        server.ok("/completion", prompt=prompt, n_predict=0)

    def steps(**more):
        told = [json.loads(e) for e in events(server.post("/completion", **asked, **more))]
        drafted = [e["speculation"] for e in told if "speculation" in e and not e["stop"]]
        return told[-1], "".join(e["content"] for e in told), [(s["tokens"], s["drafts"]) for s in drafted]

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


@pytest.mark.parametrize("method, path, status", [
    ("GET", "/nowhere", 404), ("POST", "/nowhere", 404), ("GET", "/completion", 405), ("POST", "/props", 405), ("DELETE", "/v1/models", 405),
    ("POST", "/v1/embeddings", 501), ("POST", "/rerank", 501), ("POST", "/lora-adapters", 400),
])  # fmt: skip
def test_paths_that_are_not_there(server, method, path, status):
    response = server.http.request(method, path, json={})
    assert response.status_code == response.json()["error"]["code"] == status


def test_bodies_that_are_none_or_too_large(server):
    for body, status in ((b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400), (b'"x"', 400), (b"", 400)):
        response = server.http.post("/v1/completions", content=body)
        assert response.status_code == status and response.json()["error"]["message"], body[:20]
    assert server.http.post("/completion", content=b"a=b", headers={"content-type": "image/png"}).status_code == 415
    too_long = server.http.post("/completion", content=b" " * ((32 << 20) + 1))
    assert too_long.status_code == 413 and too_long.json()["error"]["type"] == "invalid_request_error"
    # 18 MB took a thread of two 100 s. No token is longer than the longest one of the vocabulary.
    long = "x = 1\n" * 300_000
    for path, body in (("/completion", {"prompt": long}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]})):
        error = server.post(path, **body).json()["error"]
        assert error["type"] == "exceed_context_size_error" and "at least" in error["message"] and error["n_prompt_tokens"] > 2048
        assert int(re.search(r"pyspec serve -c (\d+)", error["message"])[1]) > error["n_prompt_tokens"]


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


FIM = {"pre": 4001, "suf": 4002, "mid": 4003, "rep": 4004, "sep": 4005}
AROUND = {"input_prefix": "def total(items):\n    ", "input_suffix": "\n    return result\n"}
EXTRA = [{"filename": "a.py", "text": "x = 1\n"}, {"filename": None, "text": "y = 2\n"}]
N_CTX = 512


def with_keys(source, out, keys):
    """A model file with further metadata: its data stays where it is modulo 32."""
    data = source.read_bytes()
    added = b"".join(struct.pack("<Q", len(key)) + key.encode() + struct.pack("<II", 4, value) for key, value in keys.items())
    name = b"test.padding"
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", 8)
    text = b" " * (-(len(added) + len(head) + 8) % 32)
    added += head + struct.pack("<Q", len(text)) + text
    (count,) = struct.unpack_from("<Q", data, 16)
    out.write_bytes(data[:16] + struct.pack("<Q", count + len(keys) + 1) + added + data[24:])
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    keys = {f"tokenizer.ggml.fim_{n}_token_id": i for n, i in FIM.items()}
    return with_keys(DEMO_TARGET, tmp_path_factory.mktemp("fim") / "fim.gguf", keys)


@pytest.fixture(scope="module")
def filling_server(model):
    with Running("-m", model, "-md", DEMO_DRAFTER, "--slots", 2, "-c", N_CTX, "--draft-width", 4) as running:
        yield running


@pytest.fixture(scope="module")
def encode(model):
    tokenizer = Tokenizer(GGUFFile(model))
    assert tokenizer.fim() == Fim(4001, 4002, 4003, 4004, 4005)
    yield lambda text: tokenizer.encode(text, bos=False)
    tokenizer.close()


def asked(server, want, **body):
    """The answer, to a prompt that is these tokens."""
    said = server.ok("/infill", temperature=0, n_predict=8, **body)
    assert said["prompt"] == server.ok("/detokenize", tokens=want)["content"] and said["tokens_evaluated"] == len(want)
    return said


@pytest.mark.slow
def test_what_stands_around_the_cursor_comes_between_the_models_tokens(filling_server, encode):
    first = [4004, *encode("myproject\n")]
    before, behind = (encode(AROUND[name]) for name in ("input_prefix", "input_suffix"))
    here = [4005, *encode("filename\n"), 4001, *before, *encode("result"), 4002, *behind, 4003]
    said = asked(filling_server, [*first, *here], **AROUND, prompt="result")
    assert said["tokens_predicted"] == 8 and said["speculation"]["mode"] == "speculative"
    files = [4005, *encode("a.py\n"), *encode("x = 1\n"), 4005, *encode("tmp\n"), *encode("y = 2\n")]
    asked(filling_server, [*first, *files, *here], **AROUND, prompt="result", input_extra=EXTRA)
    whole, again = said["content"], {**AROUND, "prompt": "result", "temperature": 0, "n_predict": 8}
    assert b"".join(events(filling_server.post("/infill", **again, stream=True))).count(b'"stop":true') == 1
    assert filling_server.ok("/infill", **again, response_fields=["content"]) == {"content": whole}
    mixed = {"input_prefix": [4006, "    "], "input_suffix": [4007]}
    asked(filling_server, [*first, 4005, *encode("filename\n"), 4001, 4006, *encode("    "), 4002, 4007, 4003], **mixed)


def test_editors_are_answered(filling_server):
    """What llama.vim sends: its order of samplers was refused, and so was every completion."""
    body = {
        **AROUND, "id_slot": 0, "input_extra": [{"text": "a", "time": 123, "filename": "x.py"}], "prompt": "    ", "n_predict": 16, "stop": [], "n_indent": 4,
        "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "truncated"], "stream": False,
    }  # fmt: skip
    answer = filling_server.post("/infill", **body)
    assert answer.status_code == 200 and set(answer.json()) == {"content", "prompt_n", "truncated"}
    assert "x-pyspec-ignored" not in answer.headers
    ahead = {"n_predict": 0, "samplers": [], "response_fields": [""]}  # the prompt alone, ahead of use
    assert filling_server.ok("/infill", **body | ahead) == {}
    refused = filling_server.post("/infill", **body | {"samplers": ["infill"]})
    assert refused.status_code == 400 and "top_k" in refused.json()["error"]["message"]


def test_of_what_is_too_long_stays_what_is_near_the_cursor(filling_server, encode):
    line = "value = value + 1\n"
    prefix, suffix, extra = (encode(line * n) for n in (100, 101, 102))
    batch = min(BATCH, N_CTX // 2)
    before, behind = prefix[-3 * (batch // 4) :], suffix[: batch // 4 - 2]
    rest = [4001, *before, 4002, *behind, 4003]
    names = [4004, *encode("myproject\n"), 4005, *encode("tmp\n"), *extra, 4005, *encode("filename\n")]
    room = N_CTX - batch - 16
    asked(filling_server, [*names[-room:], *rest], input_prefix=line * 100, input_suffix=line * 101, input_extra=[{"text": line * 102}])


@pytest.mark.parametrize("body", [
    {"input_prefix": "value = 1\n" * 900_000, "input_suffix": "value = 1\n" * 900_000, "input_extra": [{"text": "value = 1\n" * 900_000}]},
    {"input_prefix": ["value = 1\n"] * 9000, "input_suffix": ["value = 1\n"] * 9000, "input_extra": [{"text": "value = 1\n"}] * 9000},
])  # fmt: skip
def test_what_is_cut_off_is_not_encoded(model, encode, body):
    """4 MB of text took a thread of the server three seconds, and one after the other all of them."""
    tokenizer = Tokenizer(GGUFFile(model))
    encoded, served = [], SimpleNamespace(n_ctx=N_CTX, longest_piece=16, options=ServeOptions(), known=lambda ids, name: ids)
    served.tokenizer = SimpleNamespace(bos=None, encode=lambda text, **how: encoded.append(len(text)) or tokenizer.encode(text, **how))
    ids = lay_out(served, tokenizer.fim(), Infill(**body), encode("x"), 8)
    assert sum(encoded) < 60_000
    line, batch = encode("value = 1\n"), N_CTX // 2
    prefix, suffix = (line * batch)[-3 * (batch // 4) :], (line * batch)[: batch // 4 - 2 - 1]
    assert ids[-(len(prefix) + len(suffix) + 4) :] == [4001, *prefix, *encode("x"), 4002, *suffix, 4003]
    tokenizer.close()


@pytest.mark.slow
def test_models_that_fill_in_backwards_and_those_that_do_not(model, encode, tmp_path):
    few = with_keys(DEMO_TARGET, tmp_path / "few.gguf", {f"tokenizer.ggml.fim_{n}_token_id": FIM[n] for n in ("pre", "suf", "mid")})
    backwards = Running("-m", few, "--slots", 1, "-c", 256, "--spm-infill")
    try:
        here = [4002, *encode(AROUND["input_suffix"]), 4001, *encode(AROUND["input_prefix"]), 4003]
        asked(backwards, [*encode(SNIPPET), *encode("x = 1\n"), *here], **AROUND, input_extra=EXTRA[:1])
    finally:
        backwards.end()
    none = SimpleNamespace(name="m.gguf", tokenizer=SimpleNamespace(fim=lambda: Fim(1, None, None, 2, 3)))
    with pytest.raises(ApiError, match="no token for suffix and middle") as refused:
        filled_ids(none, Infill(**AROUND))
    assert refused.value.status == 501


@pytest.mark.parametrize("body, param", [
    ({"input_prefix": "x"}, "input_suffix"), ({"input_suffix": "x"}, "input_prefix"), ({**AROUND, "input_prefix": {}}, "input_prefix"),
    ({**AROUND, "input_prefix": [1.5]}, "input_prefix"), ({**AROUND, "input_prefix": [99999]}, "input_prefix"),
    ({**AROUND, "input_suffix": ["x", 99999]}, "input_suffix"), ({**AROUND, "prompt": ["x"]}, "prompt"),
    ({**AROUND, "prompt": "value = 1\n" * 300}, "prompt"),
    *(({**AROUND, "input_extra": extra}, "input_extra") for extra in ({}, ["x"], [{}], [{"filename": "ok"}], [{"filename": 1, "text": "x"}], [{"text": 1}])),
    ({**AROUND, "n_indent": -1}, "n_indent"), ({**AROUND, "t_max_predict_ms": "soon"}, "t_max_predict_ms"),
])  # fmt: skip
def test_what_is_wrong_is_named(filling_server, body, param):
    answer = filling_server.post("/infill", **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def run(text, lines, size):
    """What comes out of ``text`` in tokens of ``size`` characters, and why it ended."""
    pieces = [text[i : i + size].encode() for i in range(0, len(text), size)]
    block, out = TextStream(lambda i: pieces[i], ["never"], lines), ""
    for i in range(len(pieces)):
        why = block.completes(i)
        out += block.take([i])
        if why:
            return out, why
    return out + block.finish(), ""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_completion_ends_where_its_lines_go_further_out(size):
    text = "a(\n        b)\n\t   c\n    \n    d\n  e\nf"
    for indent, left, why in ((4, text[: text.index("e\nf")], LENGTH), (5, "a(\n        b)\n\t   ", LENGTH), (0, text, "")):  # fmt: skip
        assert run(text, LineLimits(indent), size) == (left, why)
    assert run("a\n\nb", LineLimits(1), size) == ("a\n", LENGTH)  # as llama.cpp means an empty line
    assert run("a never b", LineLimits(4), size)[1] == STOP
    assert run("a\n  ne", LineLimits(4), size)[0] == "a\n  "  # the stop text that seemed to begin is in a line that is too far out


def test_a_completion_that_takes_long_ends_with_its_line(monkeypatch, filling_server):
    now = [10.0]
    monkeypatch.setattr("pyggml_spec.text.stream.time.monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0])
    assert run("a\nb\nc\nd\ne", LineLimits(seconds=4.5), 1) == ("a\nb\nc\n", LENGTH)
    monkeypatch.undo()
    body = {**AROUND, "prompt": "for", "n_predict": 120, "temperature": 0, "ignore_eos": True}
    said = filling_server.ok("/infill", **body, n_indent=60)
    assert said["stop_type"] == "limit" and said["tokens_predicted"] < 120 and not said["content"].rpartition("\n")[2].strip(" \t")
    assert filling_server.ok("/infill", **body, n_indent=60, n_probs=1)["content"] == said["content"]  # made of single tokens
    task = SimpleNamespace(request=TaskRequest([1], sampling=Sampling(logprobs=0), lines=LineLimits(0, 1.0)), stats=None)
    alone = Output(task, SimpleNamespace(piece_with=lambda shown: None))
    assert alone._stream._lines is None  # by its own clock it would end the text elsewhere than the engine
    assert filling_server.ok("/infill", **body, t_max_predict_ms=1)["tokens_predicted"] < 120
    assert filling_server.post("/infill", **body, t_max_prompt_ms=500).headers.get("x-pyspec-ignored") is None


TALK = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", " And now? ")]


def test_no_request_waits_for_what_control_tokens_are_found_by(monkeypatch):
    """The first chat is read in the event loop, and 6,000 control tokens take most of a second the first time."""
    file = GGUFFile(DEMO_TARGET)
    tokenizer = Tokenizer(file)
    session = SimpleNamespace(encoder=None, tokenizer=tokenizer, methods=(), target=SimpleNamespace(file=file))
    served = Served(session, SimpleNamespace(n_ctx=256), None, ServeOptions())
    monkeypatch.setattr(template, "_Names", None)
    assert served.chat_ids(Rendering([{"role": "user", "content": "hello"}])).ids
    tokenizer.close()


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("open_turn", [True, False])
def test_templates_by_name_are_those_of_llama_cpp(name, open_turn):
    said = (llama_cpp.llama_chat_message * len(TALK))(*((role.encode(), text.strip().encode()) for role, text in TALK))
    out = ctypes.create_string_buffer(4096)
    length = llama_cpp.llama_chat_apply_template(name.encode(), said, len(TALK), open_turn, out, len(out))
    messages = [{"role": role, "content": text if name != "chatml" else text.strip()} for role, text in TALK]
    assert ChatTemplate(NAMED[name]).render(messages, add_generation_prompt=open_turn).encode() == out.raw[:length]


def test_requests_that_are_alike_are_not_mixed_up():
    limits, tokenizer = sampling.Limits(Sampling(top_k=7), None, 64), SimpleNamespace(n_vocab=9)

    def asked(**body):
        return sampling.sampling(Generation(**body), limits, tokenizer, None, None)

    assert asked(temperature=0).top_k == 7
    told = [asked(temperature=1).describe(), asked(temperature=1.0).describe()]
    assert told == [Sampling(temperature=t, top_k=7).describe() for t in (1, 1.0)]
    assert asked(seed=3).seed == 3 and asked(seed=4).seed == 4 and asked(seed=-1).seed is None
    assert asked(logit_bias={"3": 1}).logit_bias == {3: 1.0} and not asked().logit_bias
    assert sampling.sampling(Generation(), limits, tokenizer, None, ("regex", "a+")).regex == "a+" and asked().regex is None
