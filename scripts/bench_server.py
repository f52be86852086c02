#!/usr/bin/env python3
"""Cost of HTTP: processor time per token of `pyspec serve` and of the Python API, the same prompts in as many streams.

    python scripts/bench_server.py [-m TARGET -md DRAFTER] [--streams 8] [--tokens 400] [--device CPU] [--rounds 3]

Processor time, of all threads, is what a busy machine does not change much; on an idle one the tokens per second say the same. Widths are
pinned, greedy, and rounds of all of them take turns. With one stream a session alone takes part, and speeds are given as shares of its speed.

    python scripts/bench_server.py --clients 1,4,8,16,32 --tools DIR [-m TARGET -md DRAFTER] [--device CUDA0] [--synthetic-acceptance 6] [--out FILE.json]

Latencies of clients, with llama-server of the folder DIR with the same files, once with the drafter and once plainly: tokens per second, and the
50th and 99th percentile of the time to the first token and between tokens (bench_clients.py says what they ask). Rounds of the servers take
turns; a server that ends is named with its reason, and the others go on. --synthetic-acceptance for files of random weights, in both.
--slots loads each server once, with so many slots for all numbers of clients; --budget begins no round that cannot end within so many seconds, and ends one that does not.

    python scripts/bench_server.py --first [-m TARGET -md DRAFTER] [--device CPU] [--rounds 200]

The time to the first token, through the API and over HTTP (a stream of /completion and one of /v1/chat/completions), one after the other: by a client that
writes a request at once and looks for the first text in what comes (what the server and the way there take), and by Python's http.client (whose
parsing of a head and second packet count as well). --against PYTHON serves by another checkout's environment too, in turn.

    python scripts/bench_server.py --beside 32768 [-m TARGET -md DRAFTER] [--device CPU] [--streams 3]

Waits of decoding streams while a prompt of so many tokens is computed: the time between two of their events, and between two events of the
prompt's progress, which is one prefill pass and one step of theirs.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import gettempdir
from typing import Any

import bench_clients
from llama_server import LlamaServer, ServerEnded

WIDTH = 8


def processor_seconds(pid: int) -> float:
    """User and system time of a process (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompts(streams: int) -> list[str]:
    return [f"def function_{i}(items):\n" for i in range(streams)]


def through_api(args: argparse.Namespace) -> Callable[[], tuple[int, float, float]]:
    import pyggml_spec as ps

    session = ps.load(args.m, args.md, device=args.device, threads=args.threads, draft_width=WIDTH, n_ctx=2048)
    server = session.concurrent(args.streams)

    def round_() -> tuple[int, float, float]:
        before, began = processor_seconds(os.getpid()), time.perf_counter()
        handles = [server.submit(prompt, args.tokens, ignore_end=True) for prompt in prompts(args.streams)]
        tokens = sum(sum(len(event.tokens) for event in handle) for handle in handles)
        return tokens, processor_seconds(os.getpid()) - before, time.perf_counter() - began

    return round_


def alone(args: argparse.Namespace) -> Callable[[], tuple[int, float, float]]:
    """One generation at a time, driven by who reads it."""
    import pyggml_spec as ps

    session = ps.load(args.m, args.md, device=args.device, threads=args.threads, draft_width=WIDTH, n_ctx=2048)

    def round_() -> tuple[int, float, float]:
        before, began = processor_seconds(os.getpid()), time.perf_counter()
        tokens = sum(len(event.tokens) for prompt in prompts(1) for event in session.steps(prompt, args.tokens, ignore_end=True))
        return tokens, processor_seconds(os.getpid()) - before, time.perf_counter() - began

    return round_


def first_tokens(args: argparse.Namespace) -> None:
    """Milliseconds to the first token of short prompts that nothing is reused of, by the way that they take; ways take turns."""
    import pyggml_spec as ps
    from pyggml_spec.chat import chat_template
    from pyggml_spec.server.served import CHATML
    from pyggml_spec.text.template import KEY

    servers = {"HTTP": Served(args, 1, "--draft-width", WIDTH)}
    if args.against:
        servers["other"] = Served(args, 1, "--draft-width", WIDTH, python=args.against)
    with (
        ps.load(args.m, args.md, device=args.device, threads=args.threads, draft_width=WIDTH, n_ctx=2048) as session,
        session.concurrent(1) as server,
    ):
        template = chat_template(session, None if KEY in session.target.file.metadata else CHATML)[0]

        def api(text: str, chat: bool) -> float:
            sent = time.perf_counter()
            if chat:
                prompt: Any = template.encode(session.tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True)
            else:
                prompt = text
            handle = server.submit(prompt, 2, ignore_end=True, reuse=False)
            next(handle)
            took = time.perf_counter() - sent
            handle.result()
            return took

        ways: dict[str, tuple[Callable[[str, bool], float], bool]] = {"API": (api, False), "API, chat": (api, True)}
        for name, served in servers.items():
            bare, library = BareClient(served.address), HTTPConnection(*served.address, timeout=600)
            ways |= {f"{name}, /completion": (bare.first, False), f"{name}, chat": (bare.first, True)}
            by_library = partial(first_by_library, library)
            ways |= {f"{name}, /completion, http.client": (by_library, False), f"{name}, chat, http.client": (by_library, True)}
        took: dict[str, list[float]] = {name: [] for name in ways}
        until = time.monotonic() + args.budget
        for i in range(args.rounds + 10):
            if time.monotonic() > until and i > 10:
                break
            for name, (ask, chat) in ways.items():
                seconds = ask(f"def function_{i}(items):\n", chat)
                if i >= 10:
                    took[name].append(1000 * seconds)
        for name, values in took.items():
            other = took["API, chat" if "chat" in name else "API"]
            print(
                f"{name:30} first token after {statistics.median(values):7.3f} ms (lowest tenth {sorted(values)[len(values) // 10]:.3f}), above the API"
                f" {statistics.median(a - b for a, b in zip(values, other)):+.3f} ms, {len(values)} requests",
                flush=True,
            )
    for served in servers.values():
        served.close()


def first_request(text: str, chat: bool) -> tuple[str, str]:
    """Path and body."""
    asks: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {**asks, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": False}
    return "/v1/chat/completions" if chat else "/completion", json.dumps(body)


def first_by_library(connection: HTTPConnection, text: str, chat: bool) -> float:
    sent = time.perf_counter()
    path, body = first_request(text, chat)
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    while not (line := response.readline()).startswith(b"data: ") or b'"content":null' in line:
        pass
    took = time.perf_counter() - sent
    response.read()
    return took


def during_a_prompt(args: argparse.Namespace) -> None:
    """Prints the waits of streams while a prompt of ``--beside`` tokens is computed."""
    served = Served(args, args.streams + 1, context=args.beside + 64)
    over = threading.Event()
    came: list[list[float]] = [[] for _ in range(args.streams)]

    def events(body: dict[str, Any]) -> Iterator[tuple[float, bytes]]:
        connection = HTTPConnection(*served.address, timeout=600)
        connection.request("POST", "/completion", json.dumps({"temperature": 0, "ignore_eos": True, "stream": True, **body}))
        response = connection.getresponse()
        while line := response.readline():
            if line.startswith(b"data: "):
                yield time.perf_counter(), line[6:]
        connection.close()

    def decode(times: list[float], prompt: str) -> None:
        for at, _ in events({"prompt": prompt, "n_predict": -1}):
            times.append(at)
            if over.is_set():
                return

    threads = [threading.Thread(target=decode, args=pair, daemon=True) for pair in zip(came, prompts(args.streams))]
    for thread in threads:
        thread.start()
    while not all(len(times) > 20 for times in came):
        time.sleep(0.05)
    random = Random(1)
    long = [random.randrange(256, 4000) for _ in range(args.beside)]
    told = [(at, json.loads(line)) for at, line in events({"prompt": long, "n_predict": 1, "return_progress": True, "cache_prompt": False})]
    over.set()
    passes = [at for at, event in told if "prompt_progress" in event]
    waits = [b - a for times in came for a, b in pairwise(times) if passes[0] <= a and b <= passes[-1]]
    turns = [b - a for a, b in pairwise(passes)]
    print(
        f"{args.streams} streams during a prompt of {args.beside} tokens in {len(turns)} passes: a pass and a step took {1000 * statistics.median(turns):.1f} ms"
        f" (longest {1000 * max(turns):.1f}), streams waited {1000 * statistics.median(waits):.1f} ms (longest {1000 * max(waits):.1f}) between two events,"
        f" {len(waits) / args.streams / len(turns):.2f} events of each stream to a pass"
    )
    os._exit(served.process.kill() or 0)


class BareClient:
    """A request in one packet, and nothing of the answer taken apart but where its first text is."""

    def __init__(self, address: tuple[str, str]) -> None:
        self.socket = socket.create_connection(address, timeout=600)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def first(self, text: str, chat: bool) -> float:
        sent = time.perf_counter()
        path, body = first_request(text, chat)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.socket.sendall((head + body).encode())
        got = b""
        while b'"content":"' not in got:
            got += self._more()
        took = time.perf_counter() - sent
        while not got.endswith(b"0\r\n\r\n"):
            got += self._more()
        return took

    def _more(self) -> bytes:
        if not (more := self.socket.recv(1 << 16)):
            raise SystemExit("the server closed the connection")
        return more


class Served:
    """`pyspec serve` in a process of its own."""

    def __init__(self, args: argparse.Namespace, slots: int, *more: object, python: str = sys.executable, context: int = 2048) -> None:
        models = ["-m", args.m, *(["-md", args.md] if args.md else [])] if args.m else []
        options = ["--device", args.device, "-t", args.threads, "--slots", slots, "-c", context, "--port", 0, *more]
        command = [python, "-m", "pyggml_spec", "serve", *models, *options]
        self.process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
        self.args = args
        said = []
        for line in self.process.stderr:  # type: ignore[union-attr]
            said.append(line)
            if found := re.match(r"serving .* at http://([\d.]+):(\d+)/", line):
                self.address = found[1], int(found[2])
                threading.Thread(target=self.process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
                return
        raise SystemExit(f"the server did not start: {''.join(said)}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def round_(self, stream: bool) -> tuple[int, float, float, list[float]]:
        """Tokens, the server's processor seconds, seconds, and seconds to each first event."""
        counts: list[int] = []
        firsts: list[float] = []

        def one(prompt: str) -> None:
            body: dict[str, Any] = {
                "prompt": prompt,
                "max_tokens": self.args.tokens,
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
        threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts(self.args.streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - began
        return sum(counts), processor_seconds(self.process.pid) - before, spent, firsts


NAMES = (
    "tokens_per_second", "first_p50_ms", "first_p99_ms", "between_p50_ms", "between_p99_ms", "longest_p50_ms", "longest_ms", "reused", "acceptance",
)  # fmt: skip


def against_llama_server(args: argparse.Namespace) -> None:
    """A table of what clients waited for, by their number and by server."""
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + args.budget
    counts = [int(n) for n in args.clients.split(",")]
    requests = [int(n) for n in args.requests.split(",")]
    requests *= len(counts) if len(requests) == 1 else 1
    print(f"{'clients':>7} {'server':20}" + "".join(f"{name.removesuffix('_ms'):>{max(11, len(name) - 1)}}" for name in NAMES), flush=True)
    servers: dict[str, Any] = {}
    ended: dict[str, str] = {}
    try:
        for clients, each in zip(counts, requests, strict=True):
            if not args.slots:
                _close(servers)
            if not servers:
                servers, ended = _servers(args, args.slots or clients)
            _clients(args, servers, ended, clients, each, until, rows)
            for name, why in ended.items():
                rows.append({"clients": clients, "server": name, "ended": why})
                print(f"{clients:7} {name:20} ended: {why[:300]}", flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(rows, indent=1))
    finally:
        _close(servers)


def _close(servers: dict[str, Any]) -> None:
    while servers:
        servers.popitem()[1].close()


def _clients(
    args: argparse.Namespace, servers: dict[str, Any], ended: dict[str, str], clients: int, requests: int, until: float, rows: list[dict[str, Any]]
) -> None:  # fmt: skip
    """Rounds of so many clients with every server in turn; a server's row comes after its last one, and what a round took says whether another fits."""
    rounds: dict[str, list[tuple[bench_clients.Waited, float]]] = {name: [] for name in servers}
    lasted: dict[str, float] = {}
    for round_ in range(args.rounds + 1):  # the first one builds graphs and fills the caches of prefixes
        warm_up, last = not round_, round_ == args.rounds
        for name, server in servers.items():
            if name in ended:
                continue
            began = time.monotonic()
            if began + lasted.get(name, 0.0) > until:
                print(f"{clients:7} {name:20} no round more: it would not end within {args.budget:g} s", flush=True)
            else:
                share = args.warm_up if warm_up else 1.0
                try:
                    took = bench_clients.run(server.address, clients, requests, round_, bool(args.synthetic_acceptance), 2000, share, until)
                except (RuntimeError, OSError) as error:
                    ended[name] = str(error)
                    continue
                lasted[name] = (time.monotonic() - began) * (1 if share == 1.0 else 2)  # prompts are whole in the first round too
                if not warm_up:
                    rounds[name].append(took)
            if last and rounds[name]:
                rows.append({"clients": clients, "server": name, **bench_clients.row(rounds[name])})
                print(
                    f"{clients:7} {name:20}"
                    + "".join(f"{rows[-1][n]:{max(11, len(n) - 1)}.{2 if n in ('reused', 'acceptance') else 1}f}" for n in NAMES)
                    + f"   {rows[-1]['requests']} requests",
                    flush=True,
                )


class _Peer(LlamaServer):
    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


def _servers(args: argparse.Namespace, slots: int) -> tuple[dict[str, Any], dict[str, str]]:
    """By name, all of them loaded, at the same time; and why others are not."""
    from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET

    synthetic = ["--spec-synth-len", args.synthetic_acceptance] if args.synthetic_acceptance else []
    target, drafter = (args.m, args.md) if args.m else (DEMO_TARGET, DEMO_DRAFTER)
    layers = 0 if args.device == "CPU" else 999
    legs = {"llama-server": ["-m", target, "-np", slots, "-c", 2048 * slots, "-t", args.threads, "-fa", "on", "-ngl", layers]}
    if drafter:
        drafts = ["-md", drafter, "-ngld", layers, "--spec-type", "draft-dflash", "--spec-draft-n-max", 15, *synthetic]
        legs["llama-server, dflash"] = [*legs["llama-server"], *drafts]
    peers = {
        name: _Peer(Path(args.tools), Path(gettempdir()) / f"bench-{name.replace(', ', '-')}-{slots}.log", *options)
        for name, options in legs.items()
    }
    servers: dict[str, Any] = {}
    ended: dict[str, str] = {}
    try:
        servers["pyspec serve"] = Served(args, slots, *synthetic)
    finally:
        for name, server in peers.items():
            try:
                server.wait(300)
                servers[name] = server
            except ServerEnded as error:
                ended[name] = str(error)
    return servers, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", default=None)
    parser.add_argument("-md", default=None)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients")
    parser.add_argument("--tools")
    parser.add_argument("--requests", default="3", help="of each client in a round, or one number for each of --clients")
    parser.add_argument("--slots", type=int, default=0, help="of each server, whatever the clients (as many as clients)")
    parser.add_argument("--warm-up", type=float, default=1.0, help="share of an answer's tokens in the round that is not counted")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds: no round is begun after them, and with --clients none lasts longer"
    )
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--beside", type=int, metavar="TOKENS")
    parser.add_argument("--against", metavar="PYTHON", help="of another checkout's environment, whose server takes turns with this one")
    parser.add_argument("--synthetic-acceptance", type=float)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.clients:
        if not args.tools:
            parser.error("--clients needs --tools, the folder of llama-server")
        against_llama_server(args)
        return
    if args.first:
        first_tokens(args)
        return
    if args.beside:
        during_a_prompt(args)
    api, served = through_api(args), Served(args, args.streams, "--draft-width", WIDTH)
    other = Served(args, args.streams, "--draft-width", WIDTH, python=args.against) if args.against else None
    ways: dict[str, Callable[[], tuple]] = {"session": alone(args)} if args.streams == 1 else {}
    ways |= {"API": api, "HTTP, whole": lambda: served.round_(False), "HTTP, streams": lambda: served.round_(True)}
    if other is not None:
        ways |= {"other, whole": lambda: other.round_(False), "other, streams": lambda: other.round_(True)}
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    try:
        until = time.monotonic() + args.budget
        for i in range(args.rounds + 1):  # the first one builds graphs
            if time.monotonic() > until and i > 1:
                break
            for name, run in ways.items():
                tokens, cpu, seconds, *_ = run()
                if i:
                    rows[name].append((1000 * cpu / tokens, tokens / seconds))
        base = statistics.median(cpu for cpu, _ in rows["API"])
        first = [speed for _, speed in next(iter(rows.values()))]
        for name, values in rows.items():
            cpu, speed = (statistics.median(column) for column in zip(*values))
            print(
                f"{name:14} {cpu:8.4f} ms of processor time per token ({100 * (cpu / base - 1):+.1f} %), {speed:8.1f} tokens/s"
                f" ({statistics.median(own / other for (_, own), other in zip(values, first)):.2f}), {args.streams} streams"
            )
    finally:
        for server in (served, other):
            if server is not None:
                server.close()
    os._exit(0)


if __name__ == "__main__":
    main()
