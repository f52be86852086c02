"""Two workers behind a router, by scripts/serve_workers.py: prefixes stay where they are, nothing is lost with a worker, and 429 and disconnects pass."""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import serve_workers
from cli.process import environment
from server.test_queue import sent

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
REASONS = [serve_workers.missing(name) for name in ("sglang", "nginx")]
MARKS = [pytest.mark.skipif(command is not None, reason=f"not installed here: {command}") for command in REASONS]


class Workers:
    """The script with two workers on the embedded pair."""

    def __init__(self, router: str) -> None:
        self.port, self.lines, self.router = serve_workers.free_port(), [], router
        command = [sys.executable, ROOT / "scripts/serve_workers.py", "--router", router, "--port", self.port, "--"]
        options = ["--device", "CPU", "-t", 1, "--slots", 1, "--queue", 2, "-c", 2048]
        self.process = subprocess.Popen(
            list(map(str, [*command, *options])), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        self.wait(lambda: self.http.get("/v1/models").status_code == 200 and len(self.found) == 2)
        self.wait(lambda: self.chat("hello", 1).status_code == 200)
        self.workers = [(int(pid), httpx.Client(base_url=url, timeout=60)) for pid, url in self.found]

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def found(self):
        return re.findall(r"worker \d is process (\d+) at (http://\S+)", "".join(self.lines))

    def wait(self, condition, seconds=120):
        until = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < until and self.process.poll() is None, self.lines[-20:]
            time.sleep(0.1)

    def chat(self, text, tokens, session="", **more):
        body = {"model": "target.gguf", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, **more}
        return self.http.post("/v1/chat/completions", json=body, headers={"x-session-id": session} if session else {})

    def computed(self):
        """Prompt tokens that each worker has computed."""
        name, texts = "llamacpp:prompt_tokens_total ", [http.get("/metrics").text for _, http in self.workers]
        return [next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name)) for text in texts]

    def idle(self):
        return not any(slot["is_processing"] for _, http in self.workers for slot in http.get("/slots").json())

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=mark) for name, mark in zip(("sglang", "nginx"), MARKS)])
def workers(request):
    made = Workers(request.param)
    yield made
    made.close()


def test_each_prefix_stays_on_one_worker(workers):
    """By its text behind sglang's router, by x-session-id behind nginx; the id comes back. Both workers are used."""
    before, words = workers.computed(), ("alpha", "import", "return", "lambda", "class", "while", "yield", "global")
    for turn in range(3):  # the second one shows where prompts part: a hybrid's state is kept there then

        def one(i, turn=turn):
            return workers.chat(f"{words[i]} " * 120 + f" turn {turn}", 4, session=f"session {i}")

        with ThreadPoolExecutor(1 if turn else 4) as pool:  # later one by one: a router that finds one worker much fuller goes to the other
            answers = list(pool.map(one, range(len(words))))
        assert [answer.status_code for answer in answers] == [200] * len(words)
        if workers.router == "nginx":
            assert [answer.headers["x-session-id"] for answer in answers] == [f"session {i}" for i in range(len(words))]
    cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert sum(n > 100 for n in cached) >= len(words) - 1, cached
    assert all(after > b for after, b in zip(workers.computed(), before)), "one worker did everything"


LONG = {"model": "target.gguf", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1900, "ignore_eos": True, "stream": True}


def connects(workers):
    return SimpleNamespace(connect=lambda: socket.create_connection(("127.0.0.1", workers.port), 60))


def test_a_client_that_leaves_frees_the_workers_slot(workers):
    with sent(connects(workers), LONG, "/v1/chat/completions") as sock:
        assert sock.recv(100) and not workers.idle()
    began = time.monotonic()
    workers.wait(workers.idle, 60)
    cut = [http.get("/metrics").text for _, http in workers.workers]
    assert time.monotonic() - began < 60 and any('finish_reason="cancelled"} 1' in text or "cancelled" in text for text in cut)


def test_429_reaches_the_client_when_all_are_full(workers):
    """Two workers take five sequences each: of 24 that come at once some are turned away, with the time after which to ask again."""
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(sent(connects(workers), LONG, "/v1/chat/completions")) for _ in range(24)]
        heads: dict[socket.socket, bytes] = {}

        def turned_away():
            for sock in select.select([sock for sock in socks if sock not in heads], [], [], 0.1)[0]:
                heads[sock] = sock.recv(4096)
            return any(head.startswith(b"HTTP/1.1 429") for head in heads.values())

        workers.wait(turned_away)
        sock, said = next((sock, head) for sock, head in heads.items() if head.startswith(b"HTTP/1.1 429"))
        sock.settimeout(60)
        while part := sock.recv(4096):
            said += part
        assert 1 <= int(re.search(rb"retry-after: (\d+)", said.lower())[1]) <= 60 and b"rate_limit_error" in said
    workers.wait(workers.idle, 60)


def test_a_killed_worker_loses_no_response(workers):
    os.kill(workers.workers[0][0], signal.SIGKILL)
    for i in range(6):
        response = workers.chat(f"{i} items in a list", 4, session=f"after {i}")
        assert response.status_code == 200, (i, response.text, workers.lines[-10:])
    with workers.http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 400}) as response:
        lines = response.iter_lines()
        assert next(lines)
        workers.process.terminate()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert workers.process.wait(60) == 0
