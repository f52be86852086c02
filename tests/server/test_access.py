"""Who is let in: keys, the names of the server, pages of other sites, and what a body may be."""

import contextlib
import gzip
import json
import socket
import time

import pytest
from cli.process import one_sentence, pyspec
from server.running import Running, events, wait_for
from sessions import fails_with

from pyggml_spec.errors import PyspecError
from pyggml_spec.server.access import Hosts, Keys, Origins
from pyggml_spec.server.errors import ApiError


@pytest.mark.parametrize("given", ["", " ", ",", " , ", "\ufeff", "\n"])
def test_an_empty_key_is_refused(given):
    """`--api-key "$UNSET"` served everybody."""
    fails_with(PyspecError, "`api_key` is empty", Keys, [given])
    fails_with(PyspecError, "`api_key` is empty", Keys, ["good", given])


@pytest.mark.parametrize("data", [b"", b"\n \n", b"# none\n", "\ufeff".encode(), "\ufeff# none\r\n".encode()])
def test_a_file_without_keys_is_refused(tmp_path, data):
    (tmp_path / "keys").write_bytes(data)
    fails_with(PyspecError, "has none", lambda: Keys([], str(tmp_path / "keys")))


def test_origins_and_forgotten_options():
    one_sentence(pyspec("serve", "--api-key", ""), "--api-key is empty", "leave the option out")
    one_sentence(pyspec("serve", "--api-key-file", ""), "--api-key-file is empty")

    def check(text, origin, method="POST", host="box:8080"):
        headers = [(b"host", host.encode()), (b"origin", origin.encode())]
        Origins(text).check({"method": method, "headers": headers})

    check("*", "null")
    check("https://a.com/, null", "https://a.com")
    check("https://a.com,null", "null")
    check("localhost", "http://evil.com", "GET")  # which it cannot read
    check("localhost", "http://BOX:8080")  # the page of this server
    for text, origin in (("https://a.com", "http://localhost"), ("localhost", "http://box:8081"), ("https://a.com", "http://a.com")):
        fails_with(ApiError, f"pages of {origin} may not", check, text, origin)
    with pytest.raises(ApiError):
        Origins().check({"method": "POST", "headers": [(b"origin", b"http://localhost"), (b"origin", b"http://evil.com")]})


KEY = "schlüssel-à"  # its last byte is a space of Latin-1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_keys_outside_ascii_and_after_a_byte_order_mark(tmp_path, encoding):
    text = f"{KEY}\r\nother\r\n"
    data = (b"\xff\xfe" if encoding == "utf-16-le" else b"") + text.encode(encoding)
    (tmp_path / "keys").write_bytes(data)
    from_file, given = Keys([], str(tmp_path / "keys")), Keys([f"\ufeff{KEY}", "other"])
    for keys in (from_file, given):
        name = keys.check({"x-api-key": KEY.encode().decode("latin-1")})  # as curl sends it, in UTF-8
        assert name == keys.check({"authorization": f"Bearer {KEY}"})  # and as Python's clients do, in Latin-1
        assert name == from_file.check({"x-api-key": KEY}) != keys.check({"x-api-key": "other"})
        for wrong in ("", "schl", "schlüssel", "\ufeff"):
            fails_with(ApiError, "Invalid API Key", keys.check, {"x-api-key": wrong})


def _host(hosts, *given, **scope):
    headers = [(b"host", text.encode("latin-1")) for text in given]
    hosts.check({"server": ("127.0.0.1", 8080), "headers": headers, "http_version": "1.1", **scope})


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost.", "localhost.:8080", "127.0.0.1:8080", "127.9.9.9", "[::1]", "[::1]:80", "[0:0::1]:80", "[::ffff:127.0.0.1]:80",
             "box:8080", "Box.", "api.example.com", "a.b.example.com:443", "xn--bcher-kva.example"],
)  # fmt: skip
def test_names_of_this_server(host):
    _host(Hosts("box,*.example.com,bücher.example", ["127.0.0.1"]), host)
    _host(Hosts("*"), host)


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:8080", "localhost.evil.com", "127.0.0.1.evil.com", "127.0.0.1.nip.io:8080", "example.com", "notexample.com", "10.0.0.1", "0.0.0.0",
             "[fe80::1]", "localhostt", "boxy"],
)  # fmt: skip
def test_names_of_others(host):
    with pytest.raises(ApiError) as error:
        _host(Hosts("box,*.example.com", ["127.0.0.1"]), host)
    assert error.value.status == 403 and "--allowed-hosts" in error.value.message


@pytest.mark.parametrize("host", [
    "", " ", ":80", "a b", "localhost:x", "localhost:8080:1", "me@localhost", "http://localhost", "localhost/x", "[::1", "::1", "[::1]x",
])  # fmt: skip
def test_what_names_no_host(host):
    with pytest.raises(ApiError) as error:
        _host(Hosts(), host)
    assert error.value.status in (400, 403)


def test_hosts_of_all_addresses_none_and_several():
    for bound in ("0.0.0.0", "::"):
        hosts = Hosts("", [bound])
        for host in ("192.168.1.2:8080", "[fe80::1]:1", "0.0.0.0:8080", "localhost", socket.gethostname()):
            _host(hosts, host)
        with pytest.raises(ApiError):
            _host(hosts, "evil.com")
    for given in ((), ("localhost", "evil.com"), ("localhost", "localhost")):
        with pytest.raises(ApiError) as error:
            _host(Hosts(), *given)
        assert error.value.status == 400
    _host(Hosts(), http_version="1.0")
    _host(Hosts(), "anything", server=("/tmp/x.sock", None))
    with pytest.raises(ApiError) as error:
        _host(Hosts(), "localhost", authority="evil.com:80")
    assert error.value.status == 403


@pytest.mark.parametrize("text", ["http://box", "box/x", "*box", "a b", "*.*"])
def test_allowed_hosts_that_are_none(text):
    fails_with(PyspecError, "`allowed_hosts` has", Hosts, text)


def _raw(server, data):
    """The status of the answer to these bytes."""
    with server.connect() as sock:
        sock.sendall(data)
        got = b""
        while not got.count(b"\r\n") and (part := sock.recv(65536)):
            got += part
    return int(got.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/", "/page/chat.js", "/health", "/props", "/metrics", "/slots", "/v1/models", "/nothing", "/pyspec/live"]
)
def test_no_path_answers_to_another_name(server, path):
    for head, status in (
        (b"GET %b HTTP/1.1\r\nHost: evil.com:1\r\n\r\n", 403),
        (b"HEAD %b HTTP/1.1\r\nHost: evil.com\r\n\r\n", 403),
        (b"OPTIONS %b HTTP/1.1\r\nHost: evil.com\r\n\r\n", 403),
        (b"GET %b HTTP/1.1\r\n\r\n", 400),
        (b"GET %b HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n", 400),
        (b"GET http://evil.com%b HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
        (b"GET HTTP://localhost:1@evil.com%b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    ):
        assert _raw(server, head % path.encode()) == status, head
    allowed = 404 if path == "/nothing" else 200
    for head in (
        b"GET http://LOCALHOST:80%b HTTP/1.1\r\nHost: localhost.\r\n\r\n", b"GET %b HTTP/1.1\r\nhost: [::1]:9\r\n\r\n", b"GET %b HTTP/1.0\r\n\r\n",
    ):  # fmt: skip
        assert _raw(server, head % path.encode()) == allowed, head


ASK = {"prompt": "a", "n_predict": 1}


@pytest.mark.slow
@pytest.mark.parametrize("headers, status", [
    ({"origin": "http://evil.com"}, 403), ({"origin": "http://localhost.evil.com"}, 403), ({"origin": "null"}, 403),
    ({"origin": "http://["}, 403), ({"origin": ""}, 403), ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403), ({"origin": "http://evil.com", "sec-fetch-site": "cross-site"}, 403), ({}, 200),
    ({"sec-fetch-site": "none"}, 200), ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 200),
    ({"origin": "http://127.0.0.1"}, 200), ({"origin": "http://[::1]:1"}, 200),
    ({"origin": "https://behind.a.proxy", "sec-fetch-site": "same-origin"}, 200),
])  # fmt: skip
def test_pages_of_other_sites_compute_nothing(server, headers, status):
    """A page needs no permission to send a POST: it was computed, though its answer could not be read."""
    for path, body in (("/completion", ASK), ("/tokenize", {"content": "a"}), ("/v1/streams/lookup", {"conversation_ids": []})):
        response = server.http.post(path, json=body, headers=headers)
        assert response.status_code == status, (path, response.text)
        assert status == 200 or ("--cors-origins" in response.text and "access-control-allow-origin" not in response.headers)
    assert server.http.delete("/v1/stream?conv_id=x", headers=headers).status_code == (204 if status == 200 else 403)


@pytest.mark.parametrize("kind, status", [
    ("text/plain", 415), ("TEXT/plain; charset=utf-8", 415), ("application/x-www-form-urlencoded", 415),
    ("multipart/form-data; boundary=x", 415), ("application/jsonp", 415), ("image/png", 415), ("text/json+json", 415),
    ("application/json; charset=utf-16", 415), ("application/json", 200), ('Application/JSON; charset="UTF-8"', 200),
    ("application/vnd.api+json", 200), (None, 200), ("", 200),
])  # fmt: skip
def test_bodies_are_json(server, kind, status):
    """Types that a page of any site may send without being asked (text/plain, forms) were computed."""
    headers = {} if kind is None else {"content-type": kind}
    for path in ("/completion", "/v1/chat/completions", "/tokenize"):
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **ASK}
        response = server.http.post(path, content=json.dumps(body), headers=headers)
        assert response.status_code == status, response.text
        assert status == 200 or "JSON" in response.json()["error"]["message"]


def test_a_body_after_a_byte_order_mark_and_other_encodings(server):
    text = json.dumps(ASK)
    assert server.http.post("/completion", content=b"\xef\xbb\xbf" + text.encode()).status_code == 200
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, identity", "x"):
        response = server.http.post("/completion", content=gzip.compress(text.encode()), headers={"content-encoding": coding})
        assert response.status_code == 415 and "compressed" in response.text and response.headers["accept-encoding"] == "identity"
    assert server.http.post("/completion", content=text, headers={"content-encoding": "Identity"}).status_code == 200
    wrong = {gzip.compress(text.encode()): "it is compressed", text.encode("utf-16"): "UTF-8", text.encode("utf-16-le"): "UTF-8"}
    for content, words in wrong.items():
        response = server.http.post("/completion", content=content)
        assert response.status_code == 400 and words in response.text, response.text


@pytest.mark.slow
def test_a_server_that_was_told_more_names_and_origins():
    with Running("--slots", 1, "--allowed-hosts", "box, *.example.com", "--cors-origins", "https://a.com", "--api-key", KEY) as running:
        for host, status in (("box:1", 200), ("x.example.com", 200), ("evil.com", 403)):
            assert running.http.get("/health", headers={"host": host}).status_code == status
        ours = {"x-api-key": KEY.encode()}
        for origin, status in (("https://a.com", 200), ("http://localhost", 403), ("null", 403)):
            assert running.http.post("/completion", json=ASK, headers={**ours, "origin": origin}).status_code == status
        assert running.http.post("/completion", json=ASK, headers={"x-api-key": "no"}).status_code == 401


@pytest.fixture(scope="module")
def limited_server():
    with Running("--slots", 2, "--api-key", "one,two", "--max-body", 8, alone=True) as running:  # its memory is its own
        running.http.headers["x-api-key"] = "one"
        yield running


def head(server, path, key="one", length=8 << 20, method="POST"):
    """A connection that has sent a head, and none of its body."""
    sock = server.connect()
    told = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    sock.sendall(told.encode())
    return sock


@pytest.mark.slow
@pytest.mark.parametrize("path, key, method, status", [
    ("/completion", "none", "POST", 401), ("/nowhere", "one", "POST", 404), ("/nowhere", "none", "POST", 401), ("/health", "one", "POST", 405),
    ("/v1/embeddings", "one", "POST", 501),
])  # fmt: skip
@pytest.mark.parametrize("length", [1000, 8 << 20])
def test_an_unauthorised_request_is_refused_before_its_body(limited_server, path, key, method, status, length):
    """Bodies were read first: 24 connections of strangers took 720 MiB."""
    with head(limited_server, path, key, length, method) as sock:
        sock.settimeout(10)
        got = b""
        while not got.endswith(b"}}"):
            got += sock.recv(4096)
        assert got.startswith(b"HTTP/1.1 %d " % status), got
        sock.sendall(b"x" * 1000)  # what it sends is thrown away


@pytest.mark.slow
def test_memory_and_watchers_of_strangers(limited_server):
    before, socks = limited_server.resident_mib, [head(limited_server, "/completion", "none") for _ in range(8)]
    for sock in socks:
        sock.settimeout(0.5)
        try:
            for _ in range(64):
                sock.sendall(b"x" * (1 << 16))
        except OSError:
            pass
    assert limited_server.resident_mib - before < 8
    for sock in socks:
        sock.close()
    assert limited_server.http.head("/pyspec/live").status_code == 200  # no state, and no end to wait for

    def watches() -> bool:
        sock = watching.enter_context(limited_server.connect())
        sock.sendall(b"GET /pyspec/live HTTP/1.1\r\nhost: localhost\r\nx-api-key: one\r\n\r\n")
        return sock.recv(20).startswith(b"HTTP/1.1 200")

    for _ in range(2):
        with contextlib.ExitStack() as watching:
            for _ in range(16):
                wait_for(watches)  # those who left are seen to have gone, though not at once
            assert limited_server.http.get("/pyspec/live").status_code == 429


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
def test_what_is_too_much_is_refused_before_it_costs(limited_server, path, body, words):
    """They took seconds to a minute of one of two threads, or of the event loop."""
    before, response = limited_server.cpu_seconds, limited_server.post(path, **body)
    assert response.status_code in (400, 413) and words in response.text, response.text
    assert limited_server.cpu_seconds - before < 5 and limited_server.resident_mib < 400


@pytest.mark.slow
def test_large_requests_that_fit(limited_server):
    tokens = limited_server.ok("/tokenize", content="a b " * 100_000)["tokens"]
    pieces = limited_server.ok("/tokenize", content="a b " * 100_000, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == tokens and len(tokens) > 100_000
    assert limited_server.ok("/detokenize", tokens=tokens)["content"] == "a b " * 100_000
    assert limited_server.ok("/detokenize", tokens=[])["content"] == ""
    # A thousand of each token are made while they are sent; all at once they took the event loop for seconds.
    asked = {"prompt": "import os\n", "n_predict": 60, "temperature": 0, "ignore_eos": True, "n_probs": 1000}
    whole = limited_server.ok("/completion", **asked)["completion_probabilities"]
    told = [json.loads(data) for data in events(limited_server.post("/completion", **asked, stream=True))]
    assert len(whole) == 60 and whole == [p for e in told for p in e.get("completion_probabilities", [])]
    assert all(len(p["top_logprobs"]) == 1000 and p["top_logprobs"][0]["id"] == p["id"] for p in whole)
    asked = {"prompt": "import os\n", "max_tokens": 30, "temperature": 0, "logprobs": 1000}
    (choice,) = limited_server.ok("/v1/completions", **asked)["choices"]
    told = choice["logprobs"]
    assert len(told["content"]) == len(told["top_logprobs"]) == len(told["tokens"]) == len(told["text_offset"]) <= 30
    assert "".join(told["tokens"]) == choice["text"] and len(told["top_logprobs"][0]) > 900


@pytest.mark.slow
def test_more_log_probabilities_than_a_whole_answer_may_have_are_refused(limited_server):
    """2,000 tokens with 1,024 each took 480 MiB."""
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1100, "logprobs": True, "top_logprobs": 1024}
    for path, body in (
        ("/completion", {"prompt": "x", "n_predict": 1100, "n_probs": 1024}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 200, "logprobs": 1024, "n": 8}),
        ("/v1/chat/completions", chat),
    ):
        response = limited_server.post(path, **body)
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
            wait_for(lambda: "encoded one" in running.lines)
        counts = [-2, -1]
        while counts[-1] != counts[-2]:  # nor, on a busy machine, at once
            time.sleep(0.5)
            counts.append(running.lines.count("encoded one"))
        assert 0 < counts[-1] < 100 and running.ok("/completion", prompt="x", n_predict=2)["tokens_predicted"] == 2


@pytest.mark.slow
def test_memory_comes_back_after_a_peak(limited_server):
    """What malloc had kept of an 8 MiB body and a million log probabilities stayed with the process."""
    limited_server.ok("/completion", prompt="import os\n", n_predict=50)
    before = limited_server.resident_mib
    whole = limited_server.post("/completion", prompt="import os\n", n_predict=1000, temperature=0, ignore_eos=True, n_probs=1000)
    assert len(whole.content) > 70 << 20  # which nobody need parse
    limited_server.post("/completion", prompt="x", user="y" * (7 << 20))
    wait_for(lambda: limited_server.resident_mib <= before + 24)
