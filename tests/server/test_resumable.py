"""Streams that go on without their reader, and are read again."""

import asyncio
import gc
import json
import types
import weakref

import httpx
import pytest
from server.running import Running, request_of

from pyggml_spec.server import http, native, resumable
from pyggml_spec.server.bodies import Completion
from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.reading import Reader
from pyggml_spec.server.resumable import ResumableStream, Streams

ASKED = {"prompt": "def quicksort(items):\n", "n_predict": 60, "temperature": 0, "stream": True}


def text(data):
    return "".join(json.loads(line[6:])["content"] for line in data.splitlines() if line.startswith("data: "))


def test_a_stream_is_read_again_from_any_byte(server):
    where = {"conv_id": "a/b::x y"}
    whole = server.http.post("/completion", json=ASKED, headers={resumable.HEADER: where["conv_id"]}).text
    assert server.http.get("/v1/stream", params=where).text == server.http.get("/v1/stream", params=where | {"from": 0}).text == whole
    assert server.http.get("/v1/stream", params=where | {"from": 100}).text == whole[100:]
    (told,) = server.post("/v1/streams/lookup", conversation_ids=["a/b", "other"]).json()
    assert (told["conversation_id"], told["is_done"], told["total_bytes"]) == (where["conv_id"], True, len(whole.encode()))
    for wrong in ("x", "-1", str(len(whole) + 1)):
        assert server.http.get("/v1/stream", params=where | {"from": wrong}).json()["error"]["param"] == "from"
    gone = server.http.request("DELETE", "/v1/stream", params=where)
    assert gone.status_code == 204 and gone.content == b"" and "content-length" not in gone.headers
    assert server.http.get("/v1/stream", params=where).status_code == 404
    assert server.http.get("/v1/stream").status_code == 400 and server.http.put("/v1/stream").headers["allow"] == "GET, DELETE"


def test_readers_come_and_go(server):
    want = server.ok("/completion", **ASKED | {"stream": False})["content"]
    with httpx.Client(base_url=server.url, timeout=120) as client:
        with client.stream("POST", "/completion", json=ASKED, headers={resumable.HEADER: "left"}) as response:
            next(response.iter_bytes())
    assert text(server.http.get("/v1/stream", params={"conv_id": "left"}).text) == want
    assert server.slots_are_free()
    with (
        httpx.Client(base_url=server.url, timeout=120) as client,
        client.stream(
            "POST", "/completion", json=ASKED | {"n_predict": -1, "ignore_eos": True}, headers={resumable.HEADER: "ends"}
        ) as response,
    ):
        parts = response.iter_bytes()
        next(parts)
        assert server.http.request("DELETE", "/v1/stream", params={"conv_id": "ends"}).status_code == 204
        assert b'"stop":true' not in b"".join(parts)
    assert server.slots_are_free()


async def read(stream, at=0):
    return b"".join([part async for part in stream.follow(at)])


def source(gate, *parts):
    async def chunks():
        for part in parts:
            yield part
        await gate.wait()
        yield b"end"

    return chunks()


async def test_all_readers_get_the_same():
    gate = asyncio.Event()
    ended = []
    stream = ResumableStream(source(gate, b"ab", b"cd"), [lambda: ended.append(1)])
    readers = [asyncio.ensure_future(read(stream, at)) for at in (0, 1, 4)]
    await asyncio.sleep(0)
    assert not ended and not stream.over
    gate.set()
    assert await asyncio.gather(*readers) == [b"abcdend", b"bcdend", b"end"] and ended == [1] and stream.over
    assert await read(stream) == b"abcdend"


async def test_a_stream_keeps_its_latest_bytes(monkeypatch):
    monkeypatch.setattr(resumable, "MAX_BYTES", 6)
    gate = asyncio.Event()
    gate.set()
    stream = ResumableStream(source(gate, b"abcd", b"efgh"), [])
    await stream.task
    assert (stream.first, stream.size) == (5, 11) and await read(stream, 5) == b"fghend"
    assert b"its first 5 bytes are gone" in await read(stream, 4)


async def test_what_has_ended_is_kept_for_a_while(monkeypatch):
    gate = asyncio.Event()
    gate.set()
    streams = Streams()
    for name in "abc":
        stream = streams.begin(("", name), source(gate, b"x" * 100), [])
        await read(stream)
        stream.over = {"a": 1, "b": 2, "c": 3}[name] + 1e10
    assert all(streams.get(("", name)) for name in "abc") and streams.get(("key-0", "a")) is None
    monkeypatch.setattr(resumable, "MAX_ENDED_BYTES", 2 * stream.held)
    assert [bool(streams.get(("", name))) for name in "abc"] == [False, True, True]
    streams.get(("", "b")).over = 1.0  # long ago
    assert [bool(streams.get(("", name))) for name in "bc"] == [False, True]
    held = streams.begin(("", "c"), source(asyncio.Event(), b"y"), [gate.clear])  # the latest one of an id is what it means
    assert streams.get(("", "c")) is held is not stream
    await asyncio.sleep(0)
    streams.end(("", "c"))
    assert await read(held) == b"y" and not gate.is_set() and streams.get(("", "c")) is None


async def test_a_stream_that_ends_before_it_began_lets_its_request_go():
    """Its task never ran, and neither did the end that it was to call: the slot stayed busy, readers waited for ever."""
    gate = asyncio.Event()
    streams, ended = Streams(), []
    stream = streams.begin(("", "a"), source(gate, b"ab"), [lambda: ended.append(1)])
    streams.end(("", "a"))
    assert await read(stream) == b"" and ended == [1] and stream.over


async def test_what_has_ended_keeps_bytes_alone():
    """The request's jobs and prompts stayed with it for five minutes, and were in no count."""

    class Held:
        def end(self):
            pass

    gate = asyncio.Event()
    gate.set()
    held = Held()
    kept, streams = weakref.ref(held), Streams()
    stream = streams.begin(("", "a"), source(gate, b"ab"), [held.end])
    del held
    assert await read(stream) == b"abend" and streams.get(("", "a")) is stream
    await asyncio.sleep(0)
    gc.collect()
    assert kept() is None


async def test_ended_streams_expire_without_a_request(monkeypatch):
    gate = asyncio.Event()
    gate.set()
    later, streams, loop = [], Streams(), asyncio.get_running_loop()
    for name in "ab":
        stream = streams.begin(("", name), source(gate), [])
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_later", lambda seconds, call: later.append((seconds, call)) or call, raising=False)
            await stream.task
            await asyncio.sleep(0)
    ((seconds, call),) = later  # one timer, however many streams
    assert 0 < seconds <= resumable.KEPT_SECONDS + 1 and len(streams.streams) == 2
    streams.streams["", "a"].over = 1.0
    call()
    assert list(streams.streams) == [("", "b")] and streams.held == stream.held
    stream.over = 1.0
    streams.expire()
    assert not streams.streams and not streams.held
    streams.timer.cancel()


async def test_a_reader_gets_pieces():
    """A slow one held a copy of all 4 MiB until the network took it."""
    gate = asyncio.Event()
    gate.set()
    data = b"ab" * resumable.PIECE
    parts = [part async for part in ResumableStream(source(gate, data), []).follow(3)]
    assert b"".join(parts) == data[3:] + b"end" and max(map(len, parts)) == resumable.PIECE


async def test_ids_are_looked_up_by_what_stands_before_a_model():
    gate = asyncio.Event()
    streams = Streams()
    for key, name in (("", "a"), ("", "a::m"), ("", "a::m::n"), ("", "a:::m"), ("", "ab"), ("", "b::m"), ("k", "a")):
        streams.begin((key, name), source(gate), [])
    for names, found in (
        ({"a"}, "a a::m a::m::n a:::m"),
        ({"a::m", "a"}, "a a::m a::m::n a:::m"),
        ({"b", "a::m"}, "a::m a::m::n b::m"),
        ({"c"}, ""),
    ):
        assert " ".join(name for name, _ in streams.named("", names)) == found
    gate.set()


async def test_a_stream_makes_room_for_its_successor():
    """It was ended by the first token of its successor, which waited for the slot that it had."""

    class Full:
        streams, queue = Streams(), types.SimpleNamespace()

    entered = []

    def queued(requests):
        entered.append(requests)
        if len(entered) == 1:
            raise ApiError(429, "full")
        return types.SimpleNamespace(tasks=[], cancel=lambda: None)

    def enter(name, stream):
        Reader(Full, request_of(b"", (b"x-conversation-id", name.encode())), Completion(stream=stream), [], None)

    Full.queue.enter = queued
    gate = asyncio.Event()
    ended = []
    stream = Full.streams.begin(("", "a"), source(gate, b"ab"), [lambda: ended.append(1)])
    with pytest.raises(ApiError, match="full"):
        enter("a", True)
    enter("a", False)
    enter("b", True)
    await asyncio.sleep(0)
    assert not ended and Full.streams.get(("", "a")) is stream  # who is refused, or is no stream, ends nothing
    enter("a", True)
    assert await read(stream) == b"ab" and ended == [1]
    with pytest.raises(ApiError, match="has 401 characters; 400 are the most"):  # two long ones that began alike were one
        enter("x" * 401, True)
    assert len(entered) == 4


async def test_only_streams_with_the_header_are_kept():
    gate = asyncio.Event()

    class Context:
        streams = Streams()

    chunks = source(gate)
    for headers, response in (([], http.Stream(chunks)), ([(b"x-conversation-id", b"a")], http.Response())):
        request = request_of(b"", *headers)
        request.on_end = [gate.set]
        native.keep_stream(Context, request, response)
        assert getattr(response, "body_iterator", chunks) is chunks and request.on_end == [gate.set]
        assert not Context.streams.named("", {"a"})
    for body in (b'{"conversation_ids": "a"}', b'{"conversation_ids": [3]}'):
        with pytest.raises(ApiError, match="conversation_ids"):
            await native.look_up_streams(Context, request_of(body))


def test_a_stream_belongs_to_the_key_that_it_came_with():
    with Running("--slots", 2, "--api-key", "one,two") as running:

        def stream(key, prompt):
            body = {"prompt": prompt, "n_predict": 20, "temperature": 0, "ignore_eos": True, "stream": True}
            return running.http.post("/completion", json=body, headers={"x-api-key": key, resumable.HEADER: "same"})

        def seen(key):
            named = running.http.post("/v1/streams/lookup", json={"conversation_ids": ["same"]}, headers={"x-api-key": key})
            return running.http.get("/v1/stream?conv_id=same", headers={"x-api-key": key}), len(named.json())

        first = stream("one", "import os\n")
        assert seen("one")[0].content == first.content and seen("one")[1] == 1
        response, named = seen("two")
        assert response.status_code == 404 and named == 0
        assert running.http.delete("/v1/stream?conv_id=same", headers={"x-api-key": "two"}).status_code == 204
        second = stream("two", "class A:\n")
        assert second.content != first.content and seen("two")[0].content == second.content
        assert seen("one")[0].content == first.content
        assert running.http.delete("/v1/stream?conv_id=same", headers={"x-api-key": "one"}).status_code == 204
        assert seen("one")[0].status_code == 404 and seen("two")[1] == 1
