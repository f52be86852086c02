#!/usr/bin/env python3
"""A long run against `pyspec serve`: clients that disconnect at random, malformed requests, more clients than the queue takes.

    python scripts/fuzz_server.py [--disconnects 1000] [--malformed 10000] [--schemas 1000] [--crowd 200] [--kills 5] [--seed 1] [--growth 8]

Every phase comes twice, with the same requests, half of the count each: what the second round adds to the server's memory is growth, and more than
``--growth`` MiB of it is wrong. Some clients read slowly then, and the server is told to end while it streams. At last one with ``--prefix-cache`` is
killed while it decodes and writes, and started again on the same folder, ``--kills`` times. Says how many of each there were, how they were answered,
whether another stream's text stayed what it was, whether every slot is free afterwards, and the memory after each phase, with the parts of it that
have budgets: copies of prompts, and graphs. Exit code 1 if anything was wrong.
"""

import argparse
import asyncio
import collections
import json
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from server.running import Running, posted  # noqa: E402
from server.test_protocol import PATHS, body, check  # noqa: E402
from server.test_queue import ask, leave, sent, started  # noqa: E402

CLIENTS = 8  # that stream when the server is told to end


def memory(server: Running) -> str:
    said = server.http.get("/props").json()["pyspec"]
    mib = {name: said[name] / (1 << 20) for name in ("prefix_bytes", "graph_bytes")}
    return f"{server.resident_mib:.1f} MiB, of them {mib['prefix_bytes']:.1f} of prompts and {mib['graph_bytes']:.1f} of graphs"


def schemas(server: Running, rng: random.Random, count: int) -> collections.Counter:
    """Constraints that no request had before: each is compiled, and begins an answer."""
    seen: collections.Counter = collections.Counter()
    for _ in range(count):
        name = "".join(rng.choices("abcdefgh", k=8))
        said = rng.choice([
            {"json_schema": {"type": "object", "properties": {name: {"type": rng.choice(["string", "integer"])}}, "required": [name]}},
            {"regex": f"({name[:3]}|{name[3:6]})*{name[6]}[a-z]{{{rng.randint(2, 12)}}}"},
            {"grammar": f'root ::= "{name}" [0-9]{{1,{rng.randint(2, 9)}}} | "{name[:4]}" root'},
            {"grammar": f'root ::= "{name}" [a-z ]+', "grammar_lazy": True, "grammar_triggers": [{"type": "word", "value": name}]},
            {"grammar": f'root ::= "{name}" [a-z ]+', "grammar_lazy": True, "grammar_triggers": [{"type": "pattern", "value": f"({name[:4]}.*|(a+)+){name[4]}"}]},
        ])  # fmt: skip
        response = server.post("/completion", prompt="x", n_predict=6, temperature=0, **said)
        check(response, said)
        seen[response.status_code] += 1
    return seen


def malformed(server: Running, rng: random.Random, count: int) -> collections.Counter:
    seen: collections.Counter = collections.Counter()
    for _ in range(count):
        path, said = rng.choice(PATHS), body(rng)
        response = server.http.post(path, json=said)
        check(response, (path, said))
        seen[response.status_code] += 1
    return seen


def disconnects(server: Running, rng: random.Random, count: int) -> list[str]:
    """The texts of a client that stayed, meanwhile."""
    got: list[str] = []
    over = threading.Event()

    def stay() -> None:
        while not over.is_set():
            got.append(server.post("/completion", **ask(200)).json()["content"])

    staying = threading.Thread(target=stay)
    staying.start()
    for _ in range(count // 5):
        said = ask(400, stream=rng.random() < 0.5, max_tokens=400, messages=[{"role": "user", "content": "import os"}])
        path = rng.choice(["/completion", "/v1/chat/completions", "/v1/messages", "/v1/completions"])
        group = [threading.Thread(target=leave, args=(server, said, rng.random() ** 2 * 0.3, path)) for _ in range(5)]
        for thread in group:
            thread.start()
        for thread in group:
            thread.join()
    over.set()
    staying.join()
    return got


def crowd(server: Running, count: int) -> collections.Counter:
    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(client.post("/completion", json=ask(40)) for _ in range(count)))

    return collections.Counter(answer.status_code for answer in asyncio.run(main()))


def read_slowly(server: Running, seconds: float) -> int:
    """A stream of which 200 bytes are taken every 50 ms, through a small window, for so long; then the rest. Bytes that came."""
    got, until = 0, time.monotonic() + seconds
    with server.connect(4096) as sock:
        sock.settimeout(300)
        sock.sendall(posted(ask(1500, stream=True)))
        while part := sock.recv(200 if time.monotonic() < until else 65536):
            got += len(part)
            if time.monotonic() < until:
                time.sleep(0.05)
    return got


def end_under_load(server: Running, clients: int, drain: float) -> tuple[int, float, collections.Counter]:
    """SIGTERM while all slots stream: the exit status, the seconds that it took, and how the streams ended."""
    ends: collections.Counter = collections.Counter()

    def stream() -> None:
        try:
            with httpx.Client(base_url=server.url, timeout=120) as client:
                response = client.post("/completion", json=ask(100_000, stream=True))
            last = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")][-1:]
            said = json.loads(last[0] if last else response.text or "{}")  # one that waited gets an ordinary error
            ends["whole" if said.get("stop") is True else "an error" if "was cut off" in str(said.get("error")) else "cut short"] += 1
        except httpx.HTTPError as error:
            ends[type(error).__name__] += 1

    threads = [threading.Thread(target=stream) for _ in range(clients)]
    for thread in threads:
        thread.start()
    while server.metric("llamacpp:requests_processing", "llamacpp:requests_deferred") < clients:
        time.sleep(0.02)
    began = time.monotonic()
    status = server.end(seconds=drain + 60)
    took = time.monotonic() - began
    for thread in threads:
        thread.join()
    return status, took, ends


def stay(server: Running, said: dict, over: threading.Event) -> None:
    """A client that is there until then, however long a busy machine takes."""
    with sent(server, said, "/completion"):
        over.wait()


def killed(count: int, rng: random.Random) -> tuple[int, int, int]:
    """A server that is killed at any moment of its work and started again on the files it left: texts that are alike, texts, and tokens of prompts
    that came from those files."""
    alike = texts = reused = 0
    args = ask(60, prompt="def quicksort(items):\n    " + "# sorts a list of items in place\n    " * 24)
    with tempfile.TemporaryDirectory() as folder:
        want = None
        for _ in range(count + 1):
            server, over = Running("--slots", 4, "--prefix-cache", folder), threading.Event()
            try:
                want = want or server.ok("/completion", **args, cache_prompt=False)["content"]
                said = server.ok("/completion", **args)
                alike, texts, reused = alike + (said["content"] == want), texts + 1, reused + said["timings"]["cache_n"]
                asks = [ask(2000, prompt=f"# {rng.random()}\n" * 40) for _ in range(8)]
                load = [threading.Thread(target=stay, args=(server, body, over)) for body in asks]
                for thread in load:
                    thread.start()
                started(server, 2)
                time.sleep(rng.random())
            finally:
                server.end(signal.SIGKILL)
                over.set()
            for thread in load:
                thread.join()
    return alike, texts, reused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("disconnects", 1000),
        ("malformed", 10_000),
        ("schemas", 1000),
        ("crowd", 200),
        ("kills", 5),
        ("seed", 1),
        ("growth", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    server = Running("--slots", 4, "--queue", 32, "--drain", 2, "--prefix-memory", 32)
    server.http.timeout = 900  # of a machine with other work
    want = server.ok("/completion", **ask(200))["content"]
    print(f"memory before: {memory(server)}", flush=True)
    after, right, texts = [], True, []
    for part in (1, 2):
        rng = random.Random(args.seed)
        print(f"part {part}: malformed: {dict(malformed(server, rng, args.malformed // 2))}; {memory(server)}", flush=True)
        print(f"part {part}: schemas: {dict(schemas(server, rng, args.schemas // 2))}; {memory(server)}", flush=True)
        texts = disconnects(server, rng, args.disconnects // 2)
        alike = sum(text == want for text in texts)
        right &= alike == len(texts) > 0
        print(
            f"part {part}: disconnects: {args.disconnects // 2}; {alike} of {len(texts)} texts of the one that stayed are alike; {memory(server)}",
            flush=True,
        )
        print(
            f"part {part}: {args.crowd} clients at once on a queue of 32: {dict(crowd(server, args.crowd))}; {memory(server)}", flush=True
        )
        after.append(server.resident_mib)
    growth = after[1] - after[0]
    print(f"the second part added {growth:.1f} MiB; at most {args.growth} are right", flush=True)
    slow = [threading.Thread(target=read_slowly, args=(server, 10)) for _ in range(3)]
    for thread in slow:
        thread.start()
    alike = [server.ok("/completion", **ask(200))["content"] == want for _ in range(5)]
    for thread in slow:
        thread.join()
    print(f"3 slow readers: {sum(alike)} of 5 texts of other clients are alike", flush=True)
    free = server.slots_are_free()
    print(f"memory after: {memory(server)}; every slot is {'free' if free else 'NOT free'}", flush=True)
    status, took, ends = end_under_load(server, CLIENTS, 2)
    print(f"SIGTERM under load, --drain 2: status {status} after {took:.1f} s; streams: {dict(ends)}", flush=True)
    same, texts_again, reused = killed(args.kills, random.Random(args.seed))
    print(
        f"{args.kills} times kill -9 and started again with --prefix-cache: {same} of {texts_again} texts are alike, {reused} tokens of prompts from files"
    )
    right &= same == texts_again and (reused > 0 or args.kills < 3)
    ended = ends["whole"] + ends["an error"] == sum(ends.values()) == CLIENTS
    wrong = (
        not (free and all(alike) and right and ended and growth <= args.growth)
        or status
        or any("Traceback" in line for line in server.lines)
    )
    print("\n".join(server.lines[2:][-20:]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
