"""Streams that go on without their reader, and are read again."""

import asyncio
import json

import httpx
import pytest

from pyggml_spec.serve import native, resumable
from pyggml_spec.serve.errors import ApiError
from pyggml_spec.serve.http import Request, Response
from pyggml_spec.serve.resumable import Stream, Streams

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


def test_a_reader_that_goes_away_ends_nothing(server):
    """The text is whole, and behind it the slot is free."""
    want = server.ok("/completion", **ASKED | {"stream": False})["content"]
    with httpx.Client(base_url=server.url, timeout=120) as client:
        with client.stream("POST", "/completion", json=ASKED, headers={resumable.HEADER: "left"}) as response:
            next(response.iter_bytes())
    assert text(server.http.get("/v1/stream", params={"conv_id": "left"}).text) == want
    assert server.slots_are_free()


def test_who_ends_a_stream_ends_its_request(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        with client.stream(
            "POST", "/completion", json=ASKED | {"n_predict": -1, "ignore_eos": True}, headers={resumable.HEADER: "ends"}
        ) as response:
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


def run(test):
    async def within():
        await asyncio.wait_for(test(asyncio.Event()), 60)

    asyncio.run(within())


def test_all_readers_get_the_same():
    async def test(gate):
        ended = []
        stream = Stream(source(gate, b"ab", b"cd"), [lambda: ended.append(1)])
        readers = [asyncio.ensure_future(read(stream, at)) for at in (0, 1, 4)]
        await asyncio.sleep(0)
        assert not ended and not stream.over
        gate.set()
        assert await asyncio.gather(*readers) == [b"abcdend", b"bcdend", b"end"] and ended == [1] and stream.over
        assert await read(stream) == b"abcdend"

    run(test)


def test_a_stream_keeps_its_latest_bytes(monkeypatch):
    monkeypatch.setattr(resumable, "MOST_BYTES", 6)

    async def test(gate):
        gate.set()
        stream = Stream(source(gate, b"abcd", b"efgh"), [])
        await stream._task
        assert (stream.first, stream.size) == (5, 11) and await read(stream, 5) == b"fghend"
        assert b"its first 5 bytes are gone" in await read(stream, 4)

    run(test)


def test_what_has_ended_is_kept_for_a_while(monkeypatch):
    async def test(gate):
        gate.set()
        streams = Streams()
        for name in "abc":
            stream = streams.begin(("", name), source(gate, b"x" * 100), [])
            await read(stream)
            stream.over = {"a": 1, "b": 2, "c": 3}[name] + 1e10
        assert all(streams.get(("", name)) for name in "abc") and streams.get(("key-0", "a")) is None
        monkeypatch.setattr(resumable, "MOST_ENDED_BYTES", 2 * stream.held)
        assert [bool(streams.get(("", name))) for name in "abc"] == [False, True, True]
        streams.get(("", "b")).over = 1.0  # long ago
        assert [bool(streams.get(("", name))) for name in "bc"] == [False, True]
        held = streams.begin(("", "c"), source(asyncio.Event(), b"y"), [gate.clear])  # the latest one of an id is what it means
        assert streams.get(("", "c")) is held is not stream
        await asyncio.sleep(0)
        streams.end(("", "c"))
        assert await read(held) == b"y" and not gate.is_set() and streams.get(("", "c")) is None

    run(test)


def test_only_streams_with_the_header_are_kept():
    async def test(gate):
        class Context:
            streams = Streams()

        for headers, chunks in (([], source(gate)), ([(b"x-conversation-id", b"a")], None)):
            request = Request({"method": "POST", "path": "/completion", "headers": headers})
            request.ended = [gate.set]
            response = Response(chunks=chunks)
            native.keep_stream(Context, request, response)
            assert response.chunks is chunks and request.ended == [gate.set] and not Context.streams.named("", "a")
        for body in ({"conversation_ids": "a"}, {"conversation_ids": [3]}):
            request._json = body
            with pytest.raises(ApiError, match="conversation_ids"):
                await native.look_up_streams(Context, request)

    run(test)
