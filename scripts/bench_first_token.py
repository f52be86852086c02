#!/usr/bin/env python3
"""Time to the first token over HTTP, of `pyspec serve` and llama-server with the same file and as many threads.

    python scripts/bench_first_token.py -m TARGET [-md DRAFTER] [--mmproj ENCODER --image 640x480] [--tools DIR] [--against PYTHON] [--threads 2] [--device CPU] [--rounds 7]

Chats of about 10, 36, 60, 120 and 400 tokens (--sizes), one alone and four at once: new text, the same again, and the next turn of the chat. Servers take
turns request by request. Medians in milliseconds, of four chats over all of them. --processor: milliseconds of processor time of the server's threads
for a request of one token instead, which a busy machine changes less; one chat at a time, and one thread (Linux). --tools: folder of llama-server; --against: the environment of another checkout.
--image: each chat begins with a picture of so many pixels, which no chat before had.
"""

import argparse
import base64
import io
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from tempfile import gettempdir
from typing import Any

from llama_server import LlamaServer, free_port

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part place
case week company system program question work government number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line end
member law car city community name president team minute idea body back face
"""
WORDS = _TEXT.split()
KINDS = "new", "again", "next turn"
Messages = list[dict[str, Any]]


class PyspecServer:
    """`pyspec serve` of the environment that ``python`` belongs to."""

    def __init__(self, python: str, *options: object) -> None:
        self.port, self.log = free_port(), (Path(gettempdir()) / f"first-token-{free_port()}.log").open("w")
        command = [python, "-P", "-m", "pyggml_spec", "serve", "--host", "127.0.0.1", "--port", str(self.port), *map(str, options)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def wait(self) -> None:
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(f"pyspec serve ended: {Path(self.log.name).read_text()[-500:]}")
            try:
                connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise SystemExit("pyspec serve did not become ready")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def processor_ms(pid: int) -> float:
    """Of all threads of a process, ended ones not counted."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e6


def ask(port: int, messages: Messages, tokens: int) -> tuple[float, str, int]:
    """Milliseconds to the first text, the whole answer, and the prompt's tokens."""
    body = {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    connection, text, first, prompt = HTTPConnection("127.0.0.1", port, timeout=300), "", 0.0, 0
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(response.read().decode())
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        prompt = (event.get("usage") or {}).get("prompt_tokens", prompt)
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            piece = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
            first = first or (1000 * (time.perf_counter() - began) if piece else 0.0)
            text += piece
    connection.close()
    return first, text, prompt


def picture(random: Random, size: str) -> str:
    """The data URL of a PNG of coarse noise."""
    from PIL import Image

    width, height = map(int, size.split("x"))
    out = io.BytesIO()
    Image.frombytes("RGB", (width // 16, height // 16), random.randbytes(width // 16 * (height // 16) * 3)).resize((width, height)).save(
        out, "PNG"
    )
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def chat(random: Random, size: int, image: str = "") -> Messages:
    """Words that no chat before began with; a template of this kind adds some ten tokens for each message."""

    def words(n: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(max(1, n)))

    if image:
        return [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": picture(random, image)}}, {"type": "text", "text": words(size)}],
            }
        ]
    if size < 20:
        return [{"role": "system", "content": words(size - 8)}]
    return [{"role": "system", "content": words(6)}, {"role": "user", "content": words(size - 21)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", required=True)
    parser.add_argument("-md")
    parser.add_argument("--mmproj")
    parser.add_argument("--image", default="", metavar="WxH")
    parser.add_argument("--tools", type=Path)
    parser.add_argument("--against", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="CPU", help="of pyspec; llama-server has all layers on a GPU where this is one")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each chat")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="10,36,60,120,400")
    parser.add_argument("--at-once", default="1,4")
    parser.add_argument("--tokens", type=int, default=6, help="of each answer")
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no round begins after them")
    args = parser.parse_args()
    if args.processor:
        args.threads, args.at_once, args.tokens = 1, "1", 1
    sizes, counts = ([int(n) for n in text.split(",")] for text in (args.sizes, args.at_once))
    options = [
        "-m",
        args.m,
        *(["-md", args.md] if args.md else []),
        *(["--mmproj", args.mmproj] if args.mmproj else []),
        "--threads",
        args.threads,
        "-np",
        max(counts),
        "--device",
        args.device,
        "-c",
        args.context,
    ]
    servers: dict[str, Any] = {"pyspec": PyspecServer(sys.executable, *options)}
    if args.against:
        servers["other"] = PyspecServer(args.against, *options)
    if args.tools:
        log = Path(gettempdir()) / "first-token-llama-server.log"
        servers["llama-server"] = LlamaServer(
            args.tools,
            log,
            "-m",
            args.m,
            "-t",
            args.threads,
            "-np",
            max(counts),
            "-c",
            args.context * max(counts),
            "-ngl",
            0 if args.device == "CPU" else 999,
            "--jinja",
            *(["--mmproj", args.mmproj] if args.mmproj else []),
        )
    try:
        for server in servers.values():
            server.wait()
        ports = {name: getattr(server, "port", 0) or int(server.url.rpartition(":")[2]) for name, server in servers.items()}
        took: dict[tuple[int, int, str, str], list[float]] = defaultdict(list)
        tokens: dict[int, set[int]] = defaultdict(set)
        until = time.monotonic() + args.budget
        for turn in range(args.rounds + 1):  # the first one is not counted
            if time.monotonic() > until:
                break
            for size in sizes:
                for count in counts:
                    for name, port in ports.items():
                        random = Random(f"{turn} {size} {count}")
                        chats = [chat(random, size, args.image) for _ in range(count)]
                        for kind in KINDS:
                            before = processor_ms(servers[name].process.pid)
                            with ThreadPoolExecutor(count) as pool:
                                done = list(pool.map(lambda messages, port=port: ask(port, messages, args.tokens), chats))
                            if args.processor:
                                done = [(processor_ms(servers[name].process.pid) - before, *done[0][1:])]
                            if turn:
                                took[size, count, kind, name] += [first for first, _, _ in done]
                            tokens[size] |= {prompt for _, _, prompt in done} if kind == KINDS[0] else set()
                            if kind == KINDS[1]:
                                chats = [
                                    [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
                                    for messages, (_, text, _) in zip(chats, done)
                                ]
        print(f"{'tokens':>9} {'chats':>5} {'':10}", *(f"{name:>13}" for name in ports), f"   rounds: {turn or 0}")
        for size in sizes:
            for count in counts:
                for kind in KINDS:
                    if not all(took[size, count, kind, name] for name in ports):
                        continue
                    row = [statistics.median(took[size, count, kind, name]) for name in ports]
                    said = f"{min(tokens[size])}-{max(tokens[size])}"
                    print(f"{said:>9} {count:5} {kind:10}", *(f"{ms:13.1f}" for ms in row))
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    main()
