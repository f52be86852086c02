"""Clients that wait for their answers, and what they waited for: `pyspec serve` and llama-server in turns. For bench_server.py.

A client sends one request after the other and reads its stream. Requests are mixed: one of four beginnings of some 400 tokens that they share, 10 to
400 tokens of their own, 32 to 256 tokens of answer, so that prompts of some are read while others decode. Every server gets the same ones.
"""

import json
import math
import multiprocessing
import queue
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

WORDS = [
    "def",
    "return",
    "for",
    "in",
    "range",
    "if",
    "not",
    "else",
    "value",
    "items",
    "list",
    "sort",
    "key",
    "lambda",
    "self",
    "class",
    "import",
    "open",
    "read",
    "write",
    "index",
    "None",
    "True",
]
BEGINNINGS, BEGINNING, OWN, ANSWER = 4, 400, (10, 400), (32, 64, 128, 256)
PER_PROCESS = 4  # clients: a stream of a token per event costs its reader some processor time too


def request(clients: int, round_: int, client: int, number: int, ids: bool, limit: int, share: float = 1.0) -> dict[str, Any]:
    """The ``number``-th of a client's in a round; ``ids``: token ids in the place of text; ``limit``: tokens that prompt and answer have at most;
    ``share``: of the answer's tokens."""
    rng = random.Random(f"{clients} {round_} {client} {number}")
    own, answer = rng.randint(*OWN), rng.choice(ANSWER)
    shared = random.Random(rng.randrange(BEGINNINGS))
    scale = min(1.0, limit / (BEGINNING + OWN[1] + ANSWER[-1] + 16))
    lengths = int(scale * BEGINNING), max(1, int(scale * own)), max(8, int(share * scale * answer))
    if ids:
        prompt: Any = [*(shared.randrange(100, 4000) for _ in range(lengths[0])), *(rng.randrange(100, 4000) for _ in range(lengths[1]))]
    else:
        prompt = " ".join([*shared.choices(WORDS, k=lengths[0]), "\n", *rng.choices(WORDS, k=lengths[1])])
    return {
        "prompt": prompt, "n_predict": lengths[2], "temperature": 0, "ignore_eos": True, "stream": True, "return_tokens": True, "cache_prompt": True,
    }  # fmt: skip


@dataclass
class Waited:
    """Seconds. ``first``: to the first token; ``between``: to each other one, those of one event alike; ``longest``: between two events."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    reused: int = 0
    prompt: int = 0

    def add(self, other: "Waited") -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def ask(address: tuple[str, int], body: dict[str, Any]) -> Waited:
    out, wait = Waited(), 0.0
    connection = HTTPConnection(*address, timeout=600)
    sent = latest = time.perf_counter()
    connection.request("POST", "/completion", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
    for event in _events(response):
        now, count = time.perf_counter(), len(event.get("tokens", ()))
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        if event.get("stop"):
            timings = event["timings"]
            out.tokens = timings["predicted_n"]
            out.drafts, out.accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
            out.reused, out.prompt = timings.get("cache_n", 0), timings["prompt_n"]
        if not count:
            continue
        if not out.first:
            out.first.append(now - sent)
            count -= 1
        else:
            wait = max(wait, now - latest)
        out.between += [(now - latest) / count] * count if latest > sent else []
        latest = now
    out.longest.append(wait)
    connection.close()
    return out


def _events(response: Any) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _clients(address: tuple[str, int], work: list[list[dict[str, Any]]], results: Any, ready: Any) -> None:
    """Some clients in a process of their own."""
    import threading

    waited: list[Waited] = []

    def one(bodies: list[dict[str, Any]]) -> None:
        try:
            for body in bodies:
                waited.append(ask(address, body))
        except Exception as error:
            results.put(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(bodies,)) for bodies in work]
    ready.wait(120)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(waited)


def run(
    address: tuple[str, int], clients: int, requests: int, round_: int, ids: bool, limit: int, share: float = 1.0,
    until: float = math.inf,
) -> tuple[Waited, float]:  # fmt: skip
    """All clients at once: what they waited for, and the seconds of it all.

    Raises:
        RuntimeError: a request failed, or they were not done at ``until`` (of ``time.monotonic``).
    """
    context = multiprocessing.get_context("spawn")
    results, bodies = (
        context.Queue(),
        [[request(clients, round_, c, i, ids, limit, share) for i in range(requests)] for c in range(clients)],
    )
    groups = [bodies[i : i + PER_PROCESS] for i in range(0, clients, PER_PROCESS)]
    ready = context.Barrier(len(groups) + 1)
    processes = [context.Process(target=_clients, args=(address, group, results, ready), daemon=True) for group in groups]
    for process in processes:
        process.start()
    ready.wait(120)
    began = time.perf_counter()
    total, failed = Waited(), ""
    for _ in processes:
        try:
            while isinstance(item := results.get(timeout=min(600, max(0.1, until - time.monotonic()))), str):
                failed = item
        except queue.Empty:
            for process in processes:
                process.kill()
            raise RuntimeError(f"the round was not over after {time.perf_counter() - began:.0f} s") from None
        for waited in item:
            total.add(waited)
    for process in processes:
        process.join()
    if failed:
        raise RuntimeError(failed)
    return total, time.perf_counter() - began


def percentile(values: list[float], share: float) -> float:
    """Milliseconds; 0 of nothing."""
    return 1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def row(rounds: list[tuple[Waited, float]]) -> dict[str, float]:
    """Figures of several rounds together: tokens per second are the median, waits those of all requests."""
    total = Waited()
    for waited, _ in rounds:
        total.add(waited)
    return {
        "tokens_per_second": statistics.median(waited.tokens / seconds for waited, seconds in rounds),
        "first_p50_ms": percentile(total.first, 0.5), "first_p99_ms": percentile(total.first, 0.99),
        "between_p50_ms": percentile(total.between, 0.5), "between_p99_ms": percentile(total.between, 0.99),
        "longest_p50_ms": percentile(total.longest, 0.5), "longest_ms": percentile(total.longest, 1.0),
        "requests": len(total.first), "tokens": total.tokens, "reused": total.reused / max(1, total.reused + total.prompt),
        "acceptance": total.accepted / max(1, total.drafts),
    }  # fmt: skip
