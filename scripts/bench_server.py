#!/usr/bin/env python3
"""What HTTP costs: processor time per token of `pyspec serve` beside that of the Python API, the same prompts in as many streams.

    python scripts/bench_server.py [-m TARGET -md DRAFTER] [--streams 8] [--tokens 400] [--device CPU] [--rounds 3]

Processor time, of all threads, is what a busy machine does not change much; on an idle one the tokens per second say the same. Widths are
pinned, greedy, and rounds of the two take turns.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

WIDTH = 8


def processor_seconds(pid: int) -> float:
    """User and system time of a process (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompts(streams: int) -> list[str]:
    return [f"def function_{i}(items):\n" for i in range(streams)]


def through_api(asked: argparse.Namespace) -> Callable[[], tuple[int, float, float]]:
    import pyggml_spec as ps

    session = ps.load(asked.m, asked.md, device=asked.device, threads=asked.threads, draft_width=WIDTH, n_ctx=2048)
    server = session.concurrent(asked.streams)

    def round_() -> tuple[int, float, float]:
        before, began = processor_seconds(os.getpid()), time.perf_counter()
        handles = [server.submit(prompt, asked.tokens, ignore_end=True) for prompt in prompts(asked.streams)]
        tokens = sum(sum(len(event.tokens) for event in handle) for handle in handles)
        return tokens, processor_seconds(os.getpid()) - before, time.perf_counter() - began

    return round_


class Served:
    """`pyspec serve` in a process of its own."""

    def __init__(self, asked: argparse.Namespace) -> None:
        models = ["-m", asked.m, "-md", asked.md] if asked.m else []
        options = ["--device", asked.device, "-t", asked.threads, "--draft-width", WIDTH, "--slots", asked.streams, "-c", 2048, "--port", 0]
        command = [sys.executable, "-m", "pyggml_spec", "serve", *models, *options]
        self.process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
        self.asked = asked
        for line in self.process.stderr:  # type: ignore[union-attr]
            if found := re.match(r"serving .* at http://([\d.]+):(\d+)/", line):
                self.address = found[1], int(found[2])
                return
        raise SystemExit("the server did not start")

    def round_(self, stream: bool) -> tuple[int, float, float, list[float]]:
        """Tokens, the server's processor seconds, seconds, and seconds to each first event."""
        counts: list[int] = []
        firsts: list[float] = []

        def one(prompt: str) -> None:
            body: dict[str, Any] = {
                "prompt": prompt,
                "max_tokens": self.asked.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": stream,
            }
            connection = HTTPConnection(*self.address, timeout=600)
            sent = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            first = response.readline()
            firsts.append(time.perf_counter() - sent)
            text = first + response.read()
            last = json.loads(text if not stream else text.rpartition(b"data: {")[2].join([b"{", b""]).partition(b"\n\n")[0])
            counts.append(last["timings"]["predicted_n"])

        before, began = processor_seconds(self.process.pid), time.perf_counter()
        threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts(self.asked.streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - began
        return sum(counts), processor_seconds(self.process.pid) - before, spent, firsts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", default=None)
    parser.add_argument("-md", default=None)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    api, served = through_api(asked), Served(asked)
    rows: dict[str, list[tuple[float, float]]] = {"API": [], "HTTP, whole": [], "HTTP, streams": []}
    try:
        for i in range(asked.rounds + 1):  # the first one builds graphs
            for name, run in (("API", api), ("HTTP, whole", lambda: served.round_(False)), ("HTTP, streams", lambda: served.round_(True))):
                tokens, cpu, seconds, *_ = run()
                if i:
                    rows[name].append((1000 * cpu / tokens, tokens / seconds))
        base = statistics.median(cpu for cpu, _ in rows["API"])
        for name, values in rows.items():
            cpu, speed = (statistics.median(column) for column in zip(*values))
            print(
                f"{name:14} {cpu:8.4f} ms of processor time per token ({100 * (cpu / base - 1):+.1f} %), {speed:8.1f} tokens/s, {asked.streams} streams"
            )
    finally:
        served.process.terminate()
        served.process.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
