"""Connections that never become a request: each is told so and closed, and none of them grows in memory."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import stat

import httpx
import pytest
import uvicorn
from cli.process import one_sentence, pyspec
from server.running import Running, events, serving

from pyggml_spec.errors import PyspecError
from pyggml_spec.server import http, protocol
from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.http import BodyLimits, Refusal, Request, Response, json_response, read_body
from pyggml_spec.server.start import listen

HEAD = b"POST /x HTTP/1.1\r\nhost: localhost\r\n"
LONG = b"a" * 50_000


async def app(scope, receive, send):
    request = Request(scope)
    try:
        response = json_response({"got": len(await read_body(request, receive, BodyLimits(1 << 20)))})
    except ApiError as error:
        response = Refusal(scope, error)
    except ConnectionResetError:
        return
    await response(scope, receive, send)


def connections(app):
    """Makes the protocol of each connection."""
    config = protocol.guard(uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, timeout_keep_alive=1))
    state = uvicorn.Server(config).server_state
    return lambda: config.http_protocol_class(config=config, server_state=state, app_state={})


@contextlib.asynccontextmanager
async def connected(app):
    """A connection to ``app``: its two ends."""
    server = await asyncio.get_running_loop().create_server(connections(app), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    yield reader, writer
    writer.close()
    server.close()


async def say(parts):
    """What comes back for ``parts``, between which the server has time to answer, until it closes the connection."""
    async with connected(app) as (reader, writer):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.02)
        return await asyncio.wait_for(reader.read(), 60)


@pytest.mark.parametrize("parts, status, words", [
    ([b""], None, ""),
    ([HEAD], 408, "head of this request did not come"),
    ([b"\r\n", b"\r\n"], 408, "head of this request did not come"),
    ([HEAD + b"content-length: 2\r\n\r\n{}", b"\r\n"], 408, "head of this request did not come"),
    ([HEAD + b"content-length: 9\r\n\r\n{", b"}"], 408, "the body did not come within"),
    ([HEAD + b"a: ", LONG, LONG], 431, "head of this request is longer than"),
    ([b"GET /", LONG, LONG], 431, "head of this request is longer than"),
    ([HEAD + b"transfer-encoding: chunked\r\n\r\n1;", LONG, LONG], 431, "longer than"),
    ([HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\na: ", LONG, LONG], 431, "longer than"),
    ([b"no HTTP at all\r\n\r\n"], 400, "no HTTP request"),
])  # fmt: skip
async def test_what_is_no_request_yet_has_limits(monkeypatch, parts, status, words):
    if status in (None, 408):  # the others come at once
        monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.15)
        monkeypatch.setattr(http, "BODY_SECONDS", 0.15)
        monkeypatch.setattr(http, "LINGER_SECONDS", 0.1)
    got = await say(parts)
    if status is None:
        assert got == b""
        return
    head, _, body = got[got.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.split()[1] == b"%d" % status, got
    error = json.loads(body)["error"]
    assert error["code"] == status and words in error["message"]


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch, caplog):
    """It kept its connection, and what waited for it, for ever. One that reads slowly gets all."""
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.2)
    size, sent = 8 << 20, []

    async def large(scope, receive, send):
        try:
            await Response(b"x" * size)(scope, receive, send)
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            sent.append(True)

    async def read(pauses):
        loop, make = asyncio.get_running_loop(), connections(large)
        server = await loop.create_server(make, "127.0.0.1", 0)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            sock.setblocking(False)
            await loop.sock_connect(sock, server.sockets[0].getsockname())
            await loop.sock_sendall(sock, b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            got = 0
            try:
                while part := await loop.sock_recv(sock, 1 << 17):
                    got += len(part)
                    await asyncio.sleep(next(pauses, 0))
            except ConnectionResetError:
                pass
        server.close()
        return got

    assert await read(itertools.repeat(0.01)) > size and not caplog.text
    assert await read(iter([0.6])) < size and "read nothing of a response" in caplog.text and len(sent) == 2


async def test_a_body_that_drips_ends(monkeypatch):
    """A byte now and then kept its connection for ever: the limit was one between two pieces."""
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(http, "LINGER_SECONDS", 1.0)  # longer than the client goes on, on a busy machine
    got = await say([HEAD + b"content-length: 900\r\n\r\n", *[b"x"] * 12])
    assert got.startswith(b"HTTP/1.1 408") and b"did not come within 0.2" in got, got


async def test_bodies_have_bytes_together():
    """What is beyond is refused, and a body that was read, or left, makes room."""
    bodies, left = BodyLimits(300_000, 400_000), []

    async def body(size, ends=True):
        parts = (b"x" * size, True), (b"", False)
        pieces = [{"type": "http.request", "body": data, "more_body": more} for data, more in parts]

        async def receive():
            return pieces.pop(0) if pieces and (ends or len(pieces) > 1) else await asyncio.sleep(3600)

        request = Request({"type": "http", "method": "POST", "path": "/", "headers": []})
        left.append(request)
        return await read_body(request, receive, bodies)

    slow = asyncio.ensure_future(body(250_000, False))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="400000 bytes together") as refused:
        await body(250_000)
    assert refused.value.status == 503 and refused.value.headers["retry-after"]
    left.pop().forget()
    assert len(await body(100)) == 100 and len(await body(140_000)) == 140_000
    slow.cancel()
    for request in left:
        request.forget()
    assert bodies.held == 0


@pytest.mark.parametrize("data, words", [
    (b"[" + b"1," * 300_000 + b"1]", "more than 262144 values"),
    (b'{"a":[' + b"[]," * 40_000 + b"[]]}", "more than 32768 lists and objects"),
    (b'{"a":"' + b"\\u0041" * 1_100_000 + b'"}', "more than 1048576 escaped characters"),
    (b"[" * 200_000, "more than 32768 lists and objects"),
    (b"{" + b'"a":1,' * 300_000 + b'"a":1}', "more than 262144 values"),
])  # fmt: skip
async def test_json_that_takes_long_is_refused_before_it_is_whole(data, words):
    async def read(data):
        starts = itertools.count(0, 60_001)

        async def receive():
            at = next(starts)
            return {"type": "http.request", "body": data[at : at + 60_001], "more_body": at + 60_001 < len(data)}

        return await read_body(Request({"type": "http", "method": "POST", "path": "/", "headers": []}), receive, BodyLimits(8 << 20))

    with pytest.raises(ApiError, match=words) as refused:
        await read(data)
    assert refused.value.status == 400
    text = json.dumps({"prompt": '[{,:"\\' * 200_000}).encode()
    assert await read(text) == text


@pytest.mark.slow
async def test_what_is_slow_and_long_but_comes_is_answered(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 5)
    one = [HEAD + b"a: ", LONG, b"\r\ncontent-length: 150000\r\n\r\n", LONG, LONG, LONG]
    chunks = [HEAD + b"transfer-encoding: chunked\r\n\r\n", *[b"c350\r\n" + LONG + b"\r\n"] * 3, b"0\r\n\r\n"]
    got = await say([*one, *one, *chunks])
    assert got.count(b'{"got":150000}') == 3 and got.count(b"HTTP/1.1 200") == 3


class Wrote:
    """A transport that keeps what each call wrote."""

    def __init__(self):
        self.pieces, self.closed = [], False

    def write(self, data):
        if self.closed:
            raise RuntimeError("unable to perform operation on a closed transport")  # as uvloop's does
        self.pieces.append(data)

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


async def test_a_head_leaves_with_the_first_piece_of_its_body():
    """In a packet of its own it was a wake of the client, and a turn of the thread of the steps, before the first token."""
    transport = Wrote()
    head = protocol.ResponseWriter(transport, asyncio.get_running_loop())
    head.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    head.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert transport.pieces == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    head.write(b"first")
    head.write(b"second")
    await asyncio.sleep(0)
    assert transport.pieces[1:] == [b"HTTP/1.1 200 OK\r\n\r\nfirst", b"second"]
    for ends in (False, True):  # nothing comes behind it: it leaves with the loop's next turn, or with the end
        transport = Wrote()
        head = protocol.ResponseWriter(transport, asyncio.get_running_loop())
        head.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        if ends:
            head.close()
        else:
            await asyncio.sleep(0)
        assert transport.pieces == [b"HTTP/1.1 204 No Content\r\n\r\n"] and transport.closed == ends
    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
    for then in ("the loop's next turn", "a body", "the end"):  # the client goes away between the head and its body
        transport = Wrote()
        head = protocol.ResponseWriter(transport, asyncio.get_running_loop())
        head.write(b"HTTP/1.1 200 OK\r\n\r\n")
        transport.close()
        if then == "a body":
            head.write(b"first")
        elif then == "the end":
            head.close()
        await asyncio.sleep(0)
        assert not transport.pieces and not raised, then


async def test_work_ends_with_its_client_and_no_other_way():
    gone, ended = asyncio.Event(), []

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(seconds)

    assert await http.unless_disconnected(receive, work(0)) is True
    asyncio.get_running_loop().call_soon(gone.set)
    assert await http.unless_disconnected(receive, work(3600)) is False and ended == [0, 3600]
    assert asyncio.current_task().cancelling() == 0  # whoever goes on in this task is not cancelled
    gone.clear()
    outer = asyncio.ensure_future(http.unless_disconnected(receive, work(3601)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    outer.cancel()  # the server ends: that is no client that went away
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert ended == [0, 3600, 3601]


def both_loops(make):
    """``make()`` in asyncio's loop, and in uvloop's where it is installed."""
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        return asyncio.run(make()), runner.run(make())


@pytest.mark.parametrize("version, requests", [(b"1.1", 1), (b"1.1", 3), (b"1.0", 1)])
def test_a_client_that_has_closed_its_half_gets_its_answer(version, requests):
    """The end of what it writes was taken for its going away (`printf .. | nc -N`)."""

    async def late(scope, receive, send):
        await read_body(Request(scope), receive, BodyLimits(9))
        await asyncio.sleep(0.2)
        await json_response({"gone": scope.get("gone")})(scope, receive, send)

    async def main():
        async with connected(late) as (reader, writer):
            writer.write((HEAD.replace(b"1.1", version) + b"content-length: 2\r\n\r\n{}") * requests)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), 60)

    for got in both_loops(main):
        assert got.startswith(b"HTTP/1.1 200 OK\r\n") and got.count(b"connection: close") == 1, got
        assert got.count(b"HTTP/1.1 200 OK\r\n") == got.count(b'{"gone":null}') == requests, got


@pytest.mark.parametrize("sent", [HEAD + b"content-length: 2\r\n\r\n{}", HEAD + b"content-length: 2\r\n\r\n{"])
def test_a_client_that_is_gone_is_found_out(sent):
    async def main():
        left = asyncio.get_running_loop().create_future()

        async def app(scope, receive, send):
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set_result(True)

        async with connected(app) as (_, writer):
            writer.write(sent)
            await asyncio.sleep(0.05)
            writer.close()
            return await asyncio.wait_for(left, 60)

    assert both_loops(main) == (True, True)


PATHS = [
    "/v1/chat/completions", "/v1/completions", "/completion", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize", "/detokenize",
    "/apply-template", "/v1/responses/input_tokens",
]  # fmt: skip
VALUES = [
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 1 << 40, -(1 << 70), "", "x", "\u0000", "\ud7ff", "é" * 50, [], [None], [[]], [1, "a"], {}, {"a": 1}, {"": None},
    [{"role": "user", "content": "x"}], [{"role": "user"}], [{}], {"type": "function", "function": {"name": "f"}}, [{"type": "function", "function": {"name": "f"}}],
    {"type": "json_object"}, {"type": "json_schema"}, "auto", "required", "none", [["x", 1]], {"5": -1}, ["top_k"], [{"role": "tool", "content": [{"type": "text"}]}],
]  # fmt: skip
NAMES = [
    "prompt", "messages", "input", "content", "tokens", "max_tokens", "n_predict", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stream", "n",
    "logprobs", "top_logprobs", "n_probs", "logit_bias", "response_format", "json_schema", "grammar", "tools", "tool_choice", "stream_options", "system",
    "stop_sequences", "thinking", "chat_template_kwargs", "reasoning_effort", "continue_final_message", "add_generation_prompt", "speculative", "speculation",
    "priority", "cache_prompt", "id_slot", "samplers", "response_fields", "timings_per_token", "return_progress", "ignore_eos", "model", "instructions", "text",
    "reasoning", "regex", "lark", "repeat_last_n", "mirostat", "with_pieces", "add_special", "max_output_tokens", "tool_calls", "reasoning_format",
]  # fmt: skip
server = serving("--slots", 4, "--queue", 64, "--prefix-memory", 8)


def body(rng):
    limits = {"max_tokens": 2, "max_output_tokens": 2}
    made = {"prompt": "a", "messages": [{"role": "user", "content": "x"}], "input": "a", "content": "a", "tokens": [5], **limits}
    for _ in range(rng.randrange(1, 5)):
        made[rng.choice(NAMES)] = rng.choice(VALUES)
    if made.get("max_tokens") in (None, -1) or not isinstance(made["max_tokens"], int):  # or else it would write till the context's end
        made["n_predict"] = 2
    return made


def check(response, said):
    assert response.status_code in (200, 400, 404, 413, 415, 501), (response.status_code, said, response.text)
    if response.headers["content-type"].startswith("text/event-stream"):
        told = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
        assert told and not any("error" in e and e["error"] for e in told), said
    else:
        value = response.json()
        assert response.status_code == 200 or value["error"]["message"], said


@pytest.mark.slow
def test_requests_at_random(server):
    # The second time the same requests take no more memory: graphs that went back to malloc, and copies of prompts, took 1 MiB in 30 requests.
    taken = []
    for _ in range(2):
        rng = random.Random(11)
        for _ in range(200):
            path, said = rng.choice(PATHS), body(rng)
            check(server.http.post(path, json=said), (path, said))
        assert server.slots_are_free()
        taken.append(server.resident_mib)
    assert taken[1] - taken[0] < 3, taken
    # Bodies that are cut, and ones with a byte changed.
    rng = random.Random(12)
    for _ in range(120):
        data = bytearray(json.dumps(body(rng)).encode())
        for _ in range(rng.randrange(3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path = rng.choice(PATHS)
        check(server.http.post(path, content=bytes(data[: rng.randrange(len(data)) + 1])), (path, bytes(data)))
    assert server.slots_are_free()


ASK = {"prompt": "a", "n_predict": 2}


@pytest.mark.slow
def test_a_server_at_a_unix_socket(tmp_path):
    path = tmp_path / "x.sock"
    with Running("--slots", 1, "--host", f"{path},127.0.0.1") as running:
        assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0 and stat.S_ISSOCK(path.stat().st_mode)
        whole = running.ok("/completion", **ask(temperature=0))
        with running.http.stream("POST", "/completion", json=ask(temperature=0, stream=True)) as response:
            assert len(events(response)) >= 2 and whole["content"]
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as through_file:
            for host in ("whatever", "evil.com"):  # no browser comes this way
                assert through_file.get("/props", headers={"host": host}).status_code == 200
        one_sentence(pyspec("serve", "--host", path), f"{path} cannot be listened at: another server listens there", "--host")
        assert running.http.get("/health").status_code == 200 and path.exists()
        assert running.http.post("/completion", json=ASK, headers={"origin": "http://evil.com"}).status_code == 403
        by_address = next(line for line in running.lines if "http://127.0.0.1" in line).split(" at ")[1].split("/ with")[0]
        assert httpx.get(f"{by_address}/health").status_code == 200 and running.http.get("/props").status_code == 200
    assert not path.exists() and not any("Traceback" in line for line in running.lines)


def ask(**more):
    return {**ASK, **more}


@pytest.mark.slow
def test_files_of_killed_servers_and_paths_that_cannot_be(tmp_path):
    path = tmp_path / "x.sock"
    for number in (signal.SIGKILL, signal.SIGINT):
        running = Running("--slots", 1, "--host", path)
        assert running.http.get("/health").status_code == 200
        running.end(number)
        assert path.exists() == (number == signal.SIGKILL)
    (tmp_path / "file.sock").write_text("mine")
    (tmp_path / "link.sock").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.sock").mkdir()
    for name, words in (
        ("file.sock", "no socket"), ("link.sock", "no socket"), ("folder.sock", "no socket"), ("none/x.sock", "No such file"), ("x" * 120 + ".sock", "too long"),
    ):  # fmt: skip
        with pytest.raises(PyspecError, match=f"cannot be listened at: .*{words}.*; choose another `host`"):
            listen([str(tmp_path / name)], 0)
    assert (tmp_path / "file.sock").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("umask, mode", [(0o000, 0o660), (0o022, 0o640), (0o077, 0o600)])
def test_others_cannot_connect(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        (sock,) = listen([str(tmp_path / "x.sock")], 0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "x.sock").st_mode) == mode
    os.unlink(tmp_path / "x.sock")
    with socket.socket(socket.AF_UNIX) as other:  # which is not ours to remove
        other.bind(str(tmp_path / "x.sock"))
        sock.close()
        assert (tmp_path / "x.sock").exists()
