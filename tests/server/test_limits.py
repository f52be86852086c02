"""One request that harms all others: what it may have is limited before it costs anything, and whoever is not let in costs nothing."""

import contextlib
import json
import time

import pytest
from server.running import Running, events, wait_for


@pytest.fixture(scope="module")
def server():
    with Running("--slots", 2, "--api-key", "one,two", "--max-body", 8) as running:
        running.http.headers["x-api-key"] = "one"
        yield running


def head(server, path, key="one", length=8 << 20, method="POST"):
    """A connection that has sent a head, and none of its body."""
    sock = server.connect()
    told = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    sock.sendall(told.encode())
    return sock


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, key, method, status",
    [
        ("/completion", "none", "POST", 401), ("/nowhere", "one", "POST", 404), ("/nowhere", "none", "POST", 401), ("/health", "one", "POST", 405),
        ("/v1/embeddings", "one", "POST", 501),
    ],
)  # fmt: skip
@pytest.mark.parametrize("length", [1000, 8 << 20])
def test_an_unauthorised_request_is_refused_before_its_body(server, path, key, method, status, length):
    """Bodies were read first: 24 connections of strangers took 720 MiB."""
    with head(server, path, key, length, method) as sock:
        sock.settimeout(10)
        got = b""
        while not got.endswith(b"}}"):
            got += sock.recv(4096)
        assert got.startswith(b"HTTP/1.1 %d " % status), got
        sock.sendall(b"x" * 1000)  # what it sends is thrown away


def test_bodies_of_unauthorised_requests_are_not_kept(server):
    before = server.resident_mib
    socks = [head(server, "/completion", "none") for _ in range(8)]
    for sock in socks:
        sock.settimeout(0.5)
        try:
            for _ in range(64):
                sock.sendall(b"x" * (1 << 16))
        except OSError:
            pass
    assert server.resident_mib - before < 8
    for sock in socks:
        sock.close()


def test_watchers_of_the_slots_have_a_limit(server):
    """Each costs the event loop five turns a second; one that leaves makes room."""
    assert server.http.head("/pyspec/live").status_code == 200  # no state, and no end to wait for
    for _ in range(2):
        with contextlib.ExitStack() as watching:
            for _ in range(16):
                sock = watching.enter_context(server.connect())
                sock.sendall(b"GET /pyspec/live HTTP/1.1\r\nhost: localhost\r\nx-api-key: one\r\n\r\n")
                assert sock.recv(20).startswith(b"HTTP/1.1 200")
            assert server.http.get("/pyspec/live").status_code == 429
        server.ok("/tokenize", content="what they leave is seen meanwhile")
        time.sleep(0.5)


LARGE = [
    ("/completion", {"prompt": "x", "n_predict": 1, "response_fields": ["a"] * 20_000}, "at most 256 texts"),
    ("/completion", {"prompt": ["a"] * 2500, "n": 64, "n_predict": 1}, "has 160000 sequences"),
    ("/v1/completions", {"prompt": ["a"] * 2500, "n": 64, "max_tokens": 1}, "has 160000 sequences"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "x" * 3_000_000}}, "chat_template_kwargs has"),
    ("/apply-template", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "x" * 3_000_000}}, "chat_template_kwargs has"),
    ("/completion", {"prompt": "x", "logit_bias": [["some words " * 50, 1]] * 4096}, "logit_bias has"),
    ("/completion", {"prompt": "x", "stop": ["x" * 10_000] * 256}, "stop has"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 5000}, "at least 5000 tokens"),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a b " * 300_000}]}, "tokens"),
    ("/v1/responses/input_tokens", {"input": "a b " * 300_000}, "tokens"),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": "a b " * 300_000}, {"role": "user", "content": "x"}], "max_tokens": 1}, "tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}] * 2000}, "2000 tools"),
    ("/tokenize", {"content": "a b " * 1_000_000}, "encoded at once"),
    ("/detokenize", {"tokens": [5] * 5_000_000}, "longer than"),
    ("/detokenize", {"tokens": [5] * 600_000}, "more than 262144 values"),
    ("/detokenize", {"tokens": ["x" * 1_000_000, *[5] * 100_000]}, "tokens is"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path, body, words", LARGE, ids=range(len(LARGE)))
def test_what_is_too_much_is_refused_before_it_costs(server, path, body, words):
    """They took seconds to a minute of one of two threads, or of the event loop."""
    began = time.monotonic()
    response = server.post(path, **body)
    assert response.status_code in (400, 413) and words in response.text, response.text
    assert time.monotonic() - began < 5
    assert server.resident_mib < 400


@pytest.mark.slow
def test_what_is_large_and_fits_is_answered(server):
    tokens = server.ok("/tokenize", content="a b " * 100_000)["tokens"]
    pieces = server.ok("/tokenize", content="a b " * 100_000, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == tokens and len(tokens) > 100_000
    assert server.ok("/detokenize", tokens=tokens)["content"] == "a b " * 100_000
    assert server.ok("/detokenize", tokens=[])["content"] == ""


@pytest.mark.slow
def test_log_probabilities_of_a_whole_answer_are_those_of_its_stream(server):
    """A thousand of each token are made while they are sent; all at once they took the event loop for seconds."""
    asked = {"prompt": "import os\n", "n_predict": 60, "temperature": 0, "ignore_eos": True, "n_probs": 1000}
    whole = server.ok("/completion", **asked)["completion_probabilities"]
    told = [json.loads(data) for data in events(server.post("/completion", **asked, stream=True))]
    assert len(whole) == 60 and whole == [p for e in told for p in e.get("completion_probabilities", [])]
    assert all(len(p["top_logprobs"]) == 1000 and p["top_logprobs"][0]["id"] == p["id"] for p in whole)
    asked = {"prompt": "import os\n", "max_tokens": 30, "temperature": 0, "logprobs": 1000}
    (choice,) = server.ok("/v1/completions", **asked)["choices"]
    told = choice["logprobs"]
    assert len(told["content"]) == len(told["top_logprobs"]) == len(told["tokens"]) == len(told["text_offset"]) <= 30
    assert "".join(told["tokens"]) == choice["text"] and len(told["top_logprobs"][0]) > 900


def test_more_log_probabilities_than_a_whole_answer_may_have_are_refused(server):
    """2,000 tokens with 1,024 each took 480 MiB."""
    for path, body in (
        ("/completion", {"prompt": "x", "n_predict": 1100, "n_probs": 1024}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 200, "logprobs": 1024, "n": 8}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1100, "logprobs": True, "top_logprobs": 1024},
        ),
    ):
        response = server.post(path, **body)
        assert response.status_code == 400 and "log probabilities, and 1048576 are the most" in response.text, response.text


SLOWLY = """
import sys, time
from pyggml_spec.server import served
encode = served.Served.encoded
def slowly(self, text, *given, **named):
    if text == "slowly":
        time.sleep(0.05)
        print("encoded one", file=sys.stderr, flush=True)
    return encode(self, text, *given, **named)
served.Served.encoded = slowly
"""


@pytest.mark.slow
def test_a_client_that_leaves_stops_what_is_made_of_its_request():
    """Prompts were encoded to the last one, whoever had gone."""
    with Running("--slots", 2, "--queue", 200, before=SLOWLY) as running:
        data = json.dumps({"prompt": ["slowly"] * 200, "n_predict": 1, "padding": "x" * 2000}).encode()
        with head(running, "/completion", length=len(data)) as sock:
            sock.sendall(data)
            wait_for(lambda: "encoded one" in running.lines, 20)
        time.sleep(0.5)
        count = running.lines.count("encoded one")
        time.sleep(0.3)
        assert 0 < running.lines.count("encoded one") == count < 100
        assert running.ok("/completion", prompt="x", n_predict=2)["tokens_predicted"] == 2


def test_memory_comes_back_after_a_peak(server):
    """What malloc had kept of 8 MiB bodies and a million log probabilities stayed with the process."""
    server.ok("/completion", prompt="import os\n", n_predict=50)
    before = server.resident_mib
    for _ in range(3):
        server.ok("/completion", prompt="import os\n", n_predict=600, temperature=0, ignore_eos=True, n_probs=1000)
        server.post("/completion", prompt="x", user="y" * (7 << 20))
    wait_for(lambda: server.resident_mib <= before + 24, 15)
