#!/usr/bin/env python3
"""Effect of a hostile client on others: each attack during four streams of ordinary clients and one that polls /health.

    python scripts/bench_abuse.py [--seconds 4] [--only "NAME;..."] [--after 3] [--clients 4]

Prints one row per attack: the longest wait of a stream (for its first event, or between two), and of /health; the most memory that the server had, and
what it has --after seconds later; and how the attack was answered. The server is started here, at 127.0.0.1, with four slots; it has no keys, so that all come
as one. At last it is told to end with `--drain 1` while the attacks go on. Exit code 1 if a wait was above --wait seconds, or the memory above --memory MiB.
"""

import argparse
import collections
import http.client
import json
import multiprocessing
import multiprocessing.connection
import signal
import socket
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from server.running import Running  # noqa: E402

MIB = 1 << 20
CHAT = [{"role": "user", "content": "import os"}]
AMBIGUOUS = "root ::= s\ns ::= s s s | s s | [a-z]"


def said(**body: object) -> bytes:
    return json.dumps(body).encode()


def attacks() -> dict[str, tuple[str, bytes, int, float | None]]:
    """By name: path, body, how many connections send it again and again, and the seconds after which each leaves (None: it waits)."""
    text, words = "some words of a text. " * 50_000, "some words " * 50
    return {
        "prompts x n": ("/completion", said(prompt=["a"] * 2500, n=64, n_predict=1), 2, 0.2),
        "prompts x n, as many as may": ("/completion", said(prompt=["a"] * 22, n=1, n_predict=1, temperature=0.8), 4, None),
        "tokenize 24 MB": ("/tokenize", said(content=text[: 24 * MIB] * 24), 2, None),
        "tokenize 1 MB": ("/tokenize", said(content=text[: MIB - 100], with_pieces=True), 4, None),
        "template arguments of 3 MB": ("/v1/chat/completions", said(messages=CHAT, max_tokens=1, chat_template_kwargs={str(i): "x" * 20 for i in range(100_000)}), 2, None),
        "template arguments of 120 kB": ("/v1/chat/completions", said(messages=CHAT, max_tokens=1, chat_template_kwargs={str(i): "x" for i in range(9_000)}), 4, None),
        "2,000 messages": ("/v1/chat/completions", said(messages=CHAT * 2000, max_tokens=1), 4, None),
        "messages of 7 MB": ("/v1/messages", said(messages=[{"role": "user", "content": "x" * 7 * MIB}], max_tokens=1), 4, None),
        "4,096 texts in logit_bias": ("/completion", said(prompt="x", n_predict=1, logit_bias=[[words, 1]] * 4096), 2, None),
        "logit_bias of 120 kB": ("/completion", said(prompt="x", n_predict=1, logit_bias=[[words, 1]] * 200), 4, None),
        "n_probs 1,024, whole": ("/completion", said(prompt="x", n_predict=1000, ignore_eos=True, n_probs=1024), 1, None),
        "n_probs 1,024, n 8": ("/completion", said(prompt="x", n_predict=2000, ignore_eos=True, n_probs=1024, n=8), 1, None),
        "n_probs 1,024, no reader": ("/completion", said(prompt="x", n_predict=2000, ignore_eos=True, n_probs=1024, stream=True), 4, 60.0),
        "24 bodies of 30 MiB": ("/completion", b" " * (30 * MIB), 24, None),
        "24 bodies of 30 MiB, no such path": ("/nowhere", b" " * (30 * MIB), 24, None),
        "detokenize 5 million": ("/detokenize", said(tokens=[5] * 5_000_000), 2, None),
        "detokenize 260,000": ("/detokenize", said(tokens=[5] * 260_000), 4, None),
        "8 MB of nested arrays": ("/completion", b'{"prompt":[' + b",".join([b"[]"] * 2_700_000) + b"]}", 2, None),
        "32,000 nested arrays": ("/completion", b'{"prompt":[' + b",".join([b"[]"] * 32_000) + b"]}", 4, None),
        "a million escapes": ("/completion", b'{"prompt":"' + b"\\u0041" * 1_000_000 + b'"}', 4, None),
        "7 MB of one number": ("/completion", b'{"seed":' + b"1" * (7 * MIB) + b"}", 4, None),
        "ambiguous grammar": ("/completion", said(prompt="x", n_predict=64, grammar=AMBIGUOUS, temperature=0), 2, None),
        "infill of 7 MB": ("/infill", said(input_prefix="x = 1\n" * 600_000, input_suffix="y = 1\n" * 600_000, n_predict=1), 4, None),
    }  # fmt: skip


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 60)


def attack(url: str, path: str, body: bytes, leave: float | None, until: float, seen: collections.Counter) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    while time.monotonic() < until:
        try:
            with connect(url) as sock:
                try:
                    sock.sendall(head.encode() + body)
                except OSError:  # it is refused, and the answer is there
                    pass
                if leave is not None:
                    time.sleep(min(leave, max(0.0, until - time.monotonic())))
                    seen["left"] += 1
                    continue
                sock.settimeout(max(0.1, until + 20 - time.monotonic()))
                got = sock.recv(4096)
                seen[got[9:12].decode() or "closed"] += 1
                while sock.recv(1 << 20):
                    pass
        except OSError as error:
            seen[type(error).__name__] += 1
        time.sleep(0.01)


def watch(url: str, clients: int, pipe: multiprocessing.connection.Connection) -> None:
    """Ordinary clients, in a process of their own. Each word from the pipe ends a round; the longest waits in it are sent back."""
    longest = {"stream": 0.0, "health": 0.0}
    host, port = url.removeprefix("http://").split(":")

    def took(name: str, began: float) -> float:
        now = time.monotonic()
        longest[name] = max(longest[name], now - began)
        return now

    def stream() -> None:
        connection = http.client.HTTPConnection(host, int(port), timeout=120)
        body = said(messages=CHAT, max_tokens=60, temperature=0.8, stream=True, ignore_eos=True)
        while True:
            began = time.monotonic()
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            while response.readline():
                began = took("stream", began)
            if response.status != 200:
                longest["stream"] = 99.0
                connection.close()
            time.sleep(0.02)

    def health() -> None:
        connection = http.client.HTTPConnection(host, int(port), timeout=120)
        while True:
            began = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            took("health", began)
            time.sleep(0.02)

    for function in [stream] * clients + [health]:
        threading.Thread(target=function, daemon=True).start()
    while pipe.recv():
        pipe.send(dict(longest))
        longest.update(stream=0.0, health=0.0)


def peak(server: Running, reset: bool = False) -> float:
    """MiB that it has had at most since it was reset."""
    if reset:
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def begin(url: str, asked: tuple[str, bytes, int, float | None], until: float) -> tuple[list[threading.Thread], collections.Counter]:
    path, body, connections, leave = asked
    seen: collections.Counter = collections.Counter()
    threads = [threading.Thread(target=attack, args=(url, path, body, leave, until, seen), daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    return threads, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--after", type=float, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--wait", type=float, default=0.3)
    parser.add_argument("--memory", type=float, default=400)
    options = parser.parse_args()
    every = attacks()
    chosen = {name: every[name] for name in options.only.split(";")} if options.only else every
    server = Running("--slots", 8, "--queue", 32, "--drain", 1, "--prefix-memory", 32)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=watch, args=(server.url, options.clients, theirs), daemon=True)
    process.start()
    wrong = False
    print(
        f"| attack | longest wait of a stream, s | of /health, s | most memory, MiB | {options.after:g} s later | answers |\n|---|---|---|---|---|---|"
    )
    time.sleep(2)
    for name, asked in [("none", None), *chosen.items()]:
        ours.send(True)
        ours.recv()
        peak(server, reset=True)
        threads, seen = begin(server.url, asked, time.monotonic() + options.seconds) if asked is not None else ([], collections.Counter())
        time.sleep(options.seconds)
        for thread in threads:
            thread.join(30)
        ours.send(True)
        waits, most = ours.recv(), peak(server)
        time.sleep(options.after if asked is not None else 0)
        wrong |= max(waits.values()) > options.wait or most > options.memory
        print(
            f"| {name} | {waits['stream']:.3f} | {waits['health']:.3f} | {most:.0f} | {server.resident_mib:.0f} | {dict(seen)} |",
            flush=True,
        )
    process.kill()
    for name in ("prompts x n", "tokenize 1 MB", "template arguments of 120 kB", "logit_bias of 120 kB", "messages of 7 MB"):
        begin(server.url, every[name], time.monotonic() + 5)
    time.sleep(1)
    began = time.monotonic()
    try:
        status = server.end(signal.SIGTERM, 60)
    except Exception as error:
        status = type(error).__name__
    took = time.monotonic() - began
    print(f"SIGTERM with --drain 1 during five of them: status {status} after {took:.1f} s")
    print("\n".join(line for line in server.lines if "Traceback" in line or "ended" in line or "cut off" in line))
    sys.exit(1 if wrong or status or took > 5 or any("Traceback" in line for line in server.lines) else 0)


if __name__ == "__main__":
    main()
