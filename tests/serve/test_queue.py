"""More clients than slots, clients that leave, clients that read slowly: nobody's text changes, no slot stays busy, nothing waits for ever."""

import asyncio
import contextlib
import json
import random
import re
import socket
import threading
import time

import httpx
import pytest
from serve.running import Running

PROMPT = "def quicksort(items):\n"


@pytest.fixture(scope="module")
def server():
    running = Running("--slots", 2, "--queue", 3, "--queue-timeout", 60)
    yield running
    assert running.end() == 0, running.lines


def ask(tokens, **more):
    return {"prompt": PROMPT, "n_predict": tokens, "ignore_eos": True, "temperature": 0, **more}


def wait_for(state):
    until = time.monotonic() + 60
    while not state():
        assert time.monotonic() < until
        time.sleep(0.02)


def started(server, count):
    wait_for(lambda: sum(slot["is_processing"] for slot in server.http.get("/slots").json()) >= count)


def deferred(server):
    return int(re.search(r"requests_deferred (\d+)", server.http.get("/metrics").text)[1])


def processing(server):
    return int(re.search(r"requests_processing (\d+)", server.http.get("/metrics").text)[1])


def sent(server, body, path="/completion"):
    """The connection of a request that was sent: its client goes away when that is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    sock = socket.create_connection((host, int(port)), 20)
    sock.sendall(
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data)
    )
    return sock


def test_what_does_not_fit_the_queue_is_turned_away(server):
    """2 run, 2 more are at the engine's door, 3 wait: of 12, 5 get 429 with the time after which to ask again; the others their text."""

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(client.post("/completion", json=ask(120)) for _ in range(12)))

    answers = asyncio.run(main())
    done, refused = [a for a in answers if a.status_code == 200], [a for a in answers if a.status_code == 429]
    assert len(done) + len(refused) == 12 and len(done) >= 7 and refused
    assert len({a.json()["content"] for a in done}) == 1
    for answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 60 and answer.json()["error"]["type"] == "rate_limit_error"
    assert server.slots_are_free()
    text = server.http.get("/metrics").text
    assert f'pyspec:rejected_total{{cause="requests"}} {len(refused)}' in text


def cancelled(server):
    found = re.search(r'finish_reason="cancelled"} (\d+)', server.http.get("/metrics").text)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server, stream):
    """While it decodes, not when its 1,900 tokens would have come."""
    before = cancelled(server)
    with sent(server, ask(1900, stream=stream)):
        started(server, 1)
    assert server.slots_are_free() and cancelled(server) == before + 1


def test_a_queued_client_that_leaves_is_out_at_once(server):
    """Its place is free while those that run still do, and no other's answer is touched."""
    texts = []
    running = [threading.Thread(target=lambda: texts.append(server.post("/completion", **ask(1900)).json()["content"])) for _ in range(2)]
    for thread in running:
        thread.start()
    started(server, 2)
    with contextlib.ExitStack() as queued:
        for _ in range(3):
            queued.enter_context(sent(server, ask(400)))
        wait_for(lambda: deferred(server) >= 1)
    wait_for(lambda: deferred(server) == 0)
    assert not texts
    for thread in running:
        thread.join()
    assert len(set(texts)) == 1 and len(texts[0]) > 1900
    assert server.slots_are_free()


def test_a_prompt_is_left_while_it_is_read(server):
    long = {**ask(10), "prompt": "x = 1\n" * 480, "cache_prompt": False}
    before = server.http.get("/metrics").text
    with sent(server, long):
        time.sleep(0.3)
    assert server.slots_are_free()
    assert "llamacpp:requests_processing 0\n" in server.http.get("/metrics").text != before


def test_a_slow_reader_holds_up_nobody(server):
    """Its events are kept for it; others decode meanwhile, and it gets the whole text in the end."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(ask(1200, stream=True, timings_per_token=True)).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect((host, int(port)))
        sock.sendall(
            b"POST /completion HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(data), data)
        )
        time.sleep(0.5)
        began = time.monotonic()
        assert server.ok("/completion", **ask(30))["tokens_predicted"] == 30
        assert time.monotonic() - began < 60
        time.sleep(2)
        read = b""
        while part := sock.recv(65536):
            read += part
    lines = [json.loads(line[6:]) for line in read.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1]["stop"] and lines[-1]["tokens_predicted"] == 1200
    assert "".join(e["content"] for e in lines) == server.ok("/completion", **ask(1200))["content"]


def leave(server, body, seconds, path):
    with sent(server, body, path):
        time.sleep(seconds)


def test_random_disconnects_change_nobodys_text(server):
    """60 clients that leave at any moment, beside one that stays."""
    want = server.ok("/completion", **ask(300))["content"]
    rng, got = random.Random(5), []
    stays = threading.Thread(target=lambda: got.extend(server.post("/completion", **ask(300)).json()["content"] for _ in range(3)))
    stays.start()
    paths = ["/completion", "/v1/chat/completions", "/v1/messages", "/v1/completions"]
    for _ in range(15):
        body = ask(400, stream=rng.random() < 0.5, max_tokens=400, messages=[{"role": "user", "content": "import os"}])
        group = [threading.Thread(target=leave, args=(server, body, rng.random() * 0.3, rng.choice(paths))) for _ in range(4)]
        for thread in group:
            thread.start()
        for thread in group:
            thread.join()
    stays.join()
    assert got == [want] * 3
    assert server.slots_are_free()


def test_keys_take_turns(tmp_path):
    """A key that sends many does not keep another one waiting behind all of them; among a key's own, higher priority goes first."""
    running = Running("--slots", 1, "--queue", 40, "--api-key", "one,two")
    running.http.headers["x-api-key"] = "one"  # for the figures
    try:
        order, threads = [], []

        def send(key, name, tokens, **more):
            got = running.http.post("/completion", json=ask(tokens, **more), headers={"x-api-key": key})
            order.append((name, got.status_code))

        def begin(key, name, tokens=40, **more):
            threads.append(threading.Thread(target=send, args=(key, name, tokens), kwargs=more))
            threads[-1].start()
            wait_for(lambda: processing(running) + deferred(running) == len(threads))  # each comes before the next

        begin("one", "a0", 1900)  # has the slot until all of them wait
        for i in range(1, 8):
            begin("one", f"a{i}", priority=5 if i == 7 else 0)
        begin("two", "b")
        for thread in threads:
            thread.join()
        names = [name for name, _ in order]
        assert {status for _, status in order} == {200}
        assert names.index("b") <= 5 and names.index("a7") <= 5 < names.index("a6"), names
    finally:
        assert running.end() == 0
