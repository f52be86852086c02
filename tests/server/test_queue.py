"""More clients than slots, clients that leave, clients that read slowly: nobody's text changes, no slot stays busy, nothing waits for ever."""

import asyncio
import contextlib
import gc
import json
import random
import signal
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cli.process import pyspec
from server.running import Running, posted, request_of, serving, wait_for

from pyggml_spec.cli.terminal import size
from pyggml_spec.server import http, native, reading, resumable
from pyggml_spec.server.bodies import Completion
from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.resumable import ResumableStream, Streams
from pyggml_spec.tools.plan import plan

pytestmark = pytest.mark.slow
PROMPT = "def quicksort(items):\n"
queue_server = serving("--slots", 2, "--queue", 3, "--queue-timeout", 60)


def ask(tokens, **more):
    return {"prompt": PROMPT, "n_predict": tokens, "ignore_eos": True, "temperature": 0, **more}


def started(server, count):
    wait_for(lambda: sum(slot["is_processing"] for slot in server.http.get("/slots").json()) >= count)


def came(server):
    """Sequences that have come: those that run, wait, or have ended."""
    return server.metric("llamacpp:requests_processing", "llamacpp:requests_deferred", "pyspec:sequences_total")


@contextlib.contextmanager
def standing_still(server):
    """What is sent meanwhile comes at once behind it: neither a slow client nor a fast server is ahead of the other."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def sent(server, body, path="/completion", key="none"):
    """The connection of a request that was sent: its client goes away when that is closed."""
    sock = server.connect()
    sock.sendall(posted(body, path, f"x-api-key: {key}"))
    return sock


def answered(sock):
    """The answer to what was sent."""
    sock.settimeout(240)
    with sock, sock.makefile("rb") as got:
        head, _, body = got.read().partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], body
    return json.loads(body)


async def test_what_does_not_fit_the_queue_is_turned_away(queue_server):
    async with httpx.AsyncClient(base_url=queue_server.url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        answers = await asyncio.gather(*(client.post("/completion", json=ask(120)) for _ in range(12)))
    done, refused = [a for a in answers if a.status_code == 200], [a for a in answers if a.status_code == 429]
    assert len(done) + len(refused) == 12 and len(done) >= 7 and refused and len({a.json()["content"] for a in done}) == 1
    for answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 60 and answer.json()["error"]["type"] == "rate_limit_error"
    assert queue_server.slots_are_free() and queue_server.metric('pyspec:rejected_total{cause="requests"}') == len(refused)


def cancelled(server):
    return server.metric('pyspec:sequences_total{finish_reason="cancelled"}')


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(queue_server, stream):
    """While it decodes, not when its 1,900 tokens would have come."""
    before = cancelled(queue_server)
    with sent(queue_server, ask(1900, stream=stream)):
        started(queue_server, 1)
    assert queue_server.slots_are_free() and cancelled(queue_server) == before + 1


def test_queued_clients_that_leave_touch_no_others_answer(queue_server):
    before = came(queue_server)
    with standing_still(queue_server):
        running = [sent(queue_server, ask(700)) for _ in range(2)]
    wait_for(lambda: came(queue_server) >= before + 2)
    with contextlib.ExitStack() as queued:
        with standing_still(queue_server):
            for _ in range(3):
                queued.enter_context(sent(queue_server, ask(1900)))
        wait_for(lambda: came(queue_server) >= before + 5)
    texts = [answered(sock)["content"] for sock in running]
    assert len(set(texts)) == 1 and len(texts[0]) > 700 and queue_server.slots_are_free() and came(queue_server) == before + 5


def test_a_prompt_is_left_while_it_is_read(queue_server):
    long, before = {**ask(10), "prompt": "x = 1\n" * 380, "cache_prompt": False}, came(queue_server)
    with sent(queue_server, long):
        wait_for(lambda: came(queue_server) > before)
    assert queue_server.slots_are_free()


def test_a_slow_reader_does_not_delay_others(queue_server):
    """Its events are kept for it; others decode meanwhile, and it gets the whole text in the end."""
    with queue_server.connect(4096) as sock:
        sock.sendall(posted(ask(1200, stream=True, timings_per_token=True)))
        time.sleep(0.5)
        began = time.monotonic()
        assert queue_server.ok("/completion", **ask(30))["tokens_predicted"] == 30 and time.monotonic() - began < 60
        time.sleep(2)
        read = b""
        while part := sock.recv(65536):
            read += part
    lines = [json.loads(line[6:]) for line in read.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1]["stop"] and lines[-1]["tokens_predicted"] == 1200
    assert "".join(e["content"] for e in lines) == queue_server.ok("/completion", **ask(1200))["content"]


def test_the_configuration_counts_the_rows_of_all_slots(queue_server):
    planned = plan(device="CPU", slots=2, largest=False).slots_memory
    rows = size(planned["kv"] + planned["draft_kv"])
    (line,) = (line for line in queue_server.lines if line.startswith("configuration: "))
    assert "for each of 2 slots" in line and f"K/V {rows} " in line


def leave(server, body, seconds, path="/completion"):
    with sent(server, body, path):
        time.sleep(seconds)


def test_random_disconnects_do_not_change_other_texts(queue_server):
    want = queue_server.ok("/completion", **ask(300))["content"]
    rng, got = random.Random(5), []
    stays = threading.Thread(target=lambda: got.extend(queue_server.post("/completion", **ask(300)).json()["content"] for _ in range(3)))
    stays.start()
    paths = ["/completion", "/v1/chat/completions", "/v1/messages", "/v1/completions"]
    for _ in range(15):
        body = ask(400, stream=rng.random() < 0.5, max_tokens=400, messages=[{"role": "user", "content": "import os"}])
        group = [threading.Thread(target=leave, args=(queue_server, body, rng.random() * 0.3, rng.choice(paths))) for _ in range(4)]
        for thread in group:
            thread.start()
        for thread in group:
            thread.join()
    stays.join()
    assert got == [want] * 3 and queue_server.slots_are_free()


def test_keys_take_turns_and_folders_need_memory(tmp_path):
    with Running("--slots", 1, "--queue", 40, "--api-key", "one,two") as running:
        running.http.headers["x-api-key"] = "one"  # for the figures
        socks = {"a0": sent(running, ask(700), key="one")}  # has the slot until all of them wait
        wait_for(lambda: came(running) >= 1)
        with standing_still(running):
            socks |= {f"a{i}": sent(running, ask(40, priority=5 if i == 7 else 0), key="one") for i in range(1, 8)}
            socks["b"] = sent(running, ask(40), key="two")
        waited = {name: answered(sock)["timings"]["queued_ms"] for name, sock in socks.items()}  # all came together behind a0
        names = sorted(waited, key=waited.get)
        assert max(names.index("b"), names.index("a7")) <= 5, waited  # in the order of their coming, they were the last two
    done = pyspec("serve", "--device", "CPU", "-t", 1, "--port", 0, "--prefix-cache", tmp_path, "--prefix-memory", 0)
    assert done.returncode == 1 and "filled from memory" in done.stderr


KEPT_PROMPT = "def quicksort(items):\n    " + "# sorts a list of items in place\n    " * 12


def ask_of(prompt, tokens=60, **more):
    return {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, **more}


def test_prompts_are_computed_once_per_conversation(server):
    """The embedded target is a hybrid. The text is that without reuse (its drafts: test_prefix_ends.py)."""
    first = server.ok("/completion", **ask_of(KEPT_PROMPT), return_tokens=True)
    ids = server.ok("/tokenize", content=KEPT_PROMPT)["tokens"]
    turn = [*ids, *first["tokens"], *server.ok("/tokenize", content="\n\ndef merge(a, b):\n")["tokens"]]
    second = server.ok("/completion", **ask_of(turn))
    assert second["timings"]["cache_n"] == len(ids) + 59
    whole = server.ok("/completion", **ask_of(turn), cache_prompt=False)
    assert whole["timings"]["cache_n"] == 0 and whole["content"] == second["content"]
    # Through the chat template: what the assistant said comes back as text, and is mostly the same tokens.
    messages = [{"role": "user", "content": KEPT_PROMPT}]
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    first = server.ok("/v1/chat/completions", messages=messages, **body)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and now merge sort"}]
    second = server.ok("/v1/chat/completions", messages=messages, **body)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 10
    # 4 answers to one prompt: one of them reads it, the others its last token; greedy ones are the same, seeds give different ones.
    before = server.metric("llamacpp:prompt_tokens_total")
    body = {"prompt": "# many\n" + KEPT_PROMPT, "max_tokens": 30, "n": 4, "temperature": 0, "ignore_eos": True}
    choices = server.ok("/v1/completions", **body)["choices"]
    assert len({c["text"] for c in choices}) == 1
    n = len(server.ok("/tokenize", content=body["prompt"])["tokens"])
    assert server.metric("llamacpp:prompt_tokens_total") - before == n + 3
    different = server.ok("/v1/completions", **{**body, "temperature": 1.5, "seed": 1, "max_tokens": 20})["choices"]
    assert len({c["text"] for c in different}) > 1


def test_after_kill_9_a_restart_goes_on_with_what_was_written(tmp_path):
    """Killed while it decodes: what is there afterwards is whole, and used; parts of files are not read."""
    options = ("--slots", 2, "--prefix-cache", tmp_path / "kept")
    running = Running(*options)
    try:
        first = running.ok("/completion", **ask_of(KEPT_PROMPT), return_tokens=True)
        ids = running.ok("/tokenize", content=KEPT_PROMPT)["tokens"]
        turn = [*ids, *first["tokens"], *ids[:40]]
        want = running.ok("/completion", **ask_of(turn), cache_prompt=False)["content"]
        wait_for(lambda: any(path.suffix == ".state" for path in (tmp_path / "kept").iterdir()))
        with running.http.stream("POST", "/completion", json=ask_of("import os\n" * 60, 2000, stream=True)) as stream:
            next(stream.iter_lines())
            running.process.send_signal(signal.SIGKILL)
            running.process.wait(60)
    except Exception as error:  # the stream breaks off, which is what is tested
        assert running.process.wait(60) is not None, error
    finally:
        running.end(signal.SIGKILL)
    state = max((tmp_path / "kept").glob("*.state"), key=lambda path: path.stat().st_mtime)
    half = tmp_path / "kept" / f"{state.name}.0123456789abcdef.part"  # as a writer that was killed leaves it
    half.write_bytes(state.read_bytes()[:5000])
    with Running(*options) as again:
        second = again.ok("/completion", **ask_of(turn))
        assert second["timings"]["cache_n"] >= 128 and second["content"] == want
        assert not any("cut short" in line for line in again.lines)


def _reused(running, key, prompt="# first\n" + KEPT_PROMPT * 4):
    response = running.http.post("/completion", json=ask_of(prompt, 4), headers={"x-api-key": key})
    assert response.status_code == 200, response.text
    return response.json()["timings"]["cache_n"]


@pytest.mark.parametrize("shares", [False, True])
def test_a_key_is_not_told_what_another_one_asked(tmp_path, shares):
    """`cache_n`, and the time that a prompt took, said whether some other key had sent the same: from memory, from files, and while both waited."""
    given = ["--slots", 2, "--prefix-cache", tmp_path / "kept", "--api-key", "first,second,third"]
    options = [*given, *(["--share-prefixes"] if shares else [])]
    with Running(*options) as running:
        assert _reused(running, "first") == 0 and _reused(running, "first") > 100 and (_reused(running, "second") > 0) == shares
        assert _reused(running, "second") > 100
        with ThreadPoolExecutor(2) as both:  # the second of two with the same prompt would wait for what the first one computes
            told = list(both.map(lambda key: _reused(running, key, "# together\n" + KEPT_PROMPT * 4), ("first", "second")))
        assert min(told) == 0 and (max(told) > 0) == shares
    with Running(*options) as running:
        assert (_reused(running, "third") > 0) == shares and _reused(running, "first") > 100


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
    with httpx.Client(base_url=server.url, timeout=120, verify=False) as client:
        with client.stream("POST", "/completion", json=ASKED, headers={resumable.HEADER: "left"}) as response:
            next(response.iter_bytes())
    assert text(server.http.get("/v1/stream", params={"conv_id": "left"}).text) == want and server.slots_are_free()
    asked, headers = ASKED | {"n_predict": -1, "ignore_eos": True}, {resumable.HEADER: "ends"}
    client = httpx.Client(base_url=server.url, timeout=120, verify=False)
    with client, client.stream("POST", "/completion", json=asked, headers=headers) as response:
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
    gate, ended = asyncio.Event(), []
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
    gate, streams = asyncio.Event(), Streams()
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
        reading.enter(Full, request_of(b"", (b"x-conversation-id", name.encode())), Completion(stream=stream), [])

    Full.queue.enter = queued
    gate, ended = asyncio.Event(), []
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
