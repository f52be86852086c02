"""More clients than slots, clients that leave, clients that read slowly: nobody's text changes, no slot stays busy, nothing waits for ever."""

import asyncio
import contextlib
import json
import random
import signal
import threading
import time

import httpx
import pytest
from server.running import Running, posted, wait_for

pytestmark = pytest.mark.slow

PROMPT = "def quicksort(items):\n"


@pytest.fixture(scope="module")
def server():
    with Running("--slots", 2, "--queue", 3, "--queue-timeout", 60) as running:
        yield running


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
    assert server.metric('pyspec:rejected_total{cause="requests"}') == len(refused)


def cancelled(server):
    return server.metric('pyspec:sequences_total{finish_reason="cancelled"}')


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server, stream):
    """While it decodes, not when its 1,900 tokens would have come."""
    before = cancelled(server)
    with sent(server, ask(1900, stream=stream)):
        started(server, 1)
    assert server.slots_are_free() and cancelled(server) == before + 1


def test_queued_clients_that_leave_touch_no_others_answer(server):
    """That their places are free at once is shown in test_jobs.py, where those that run do not end meanwhile."""
    before = came(server)
    with standing_still(server):
        running = [sent(server, ask(1900)) for _ in range(2)]
    wait_for(lambda: came(server) >= before + 2)
    with contextlib.ExitStack() as queued:
        with standing_still(server):
            for _ in range(3):
                queued.enter_context(sent(server, ask(1900)))
        wait_for(lambda: came(server) >= before + 5)
    texts = [answered(sock)["content"] for sock in running]
    assert len(set(texts)) == 1 and len(texts[0]) > 1900
    assert server.slots_are_free() and came(server) == before + 5


def test_a_prompt_is_left_while_it_is_read(server):
    long = {**ask(10), "prompt": "x = 1\n" * 380, "cache_prompt": False}
    before = came(server)
    with sent(server, long):
        wait_for(lambda: came(server) > before)
    assert server.slots_are_free()


def test_a_slow_reader_does_not_delay_others(server):
    """Its events are kept for it; others decode meanwhile, and it gets the whole text in the end."""
    with server.connect(4096) as sock:
        sock.sendall(posted(ask(1200, stream=True, timings_per_token=True)))
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


def leave(server, body, seconds, path="/completion"):
    with sent(server, body, path):
        time.sleep(seconds)


def test_random_disconnects_do_not_change_other_texts(server):
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
    with Running("--slots", 1, "--queue", 40, "--api-key", "one,two") as running:
        running.http.headers["x-api-key"] = "one"  # for the figures
        socks = {"a0": sent(running, ask(1900), key="one")}  # has the slot until all of them wait
        wait_for(lambda: came(running) >= 1)
        with standing_still(running):
            socks |= {f"a{i}": sent(running, ask(40, priority=5 if i == 7 else 0), key="one") for i in range(1, 8)}
            socks["b"] = sent(running, ask(40), key="two")
        waited = {name: answered(sock)["timings"]["queued_ms"] for name, sock in socks.items()}  # all came together behind a0
        names = sorted(waited, key=waited.get)
        assert max(names.index("b"), names.index("a7")) <= 5, waited  # in the order of their coming, they were the last two
