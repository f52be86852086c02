#!/usr/bin/env python3
"""Two models in memory for one: requests that alternate between them, from several clients, and in the middle `kill -9` of the process that answers.

    python scripts/check_swaps.py -m a.gguf -m b.gguf --requests 200 --clients 20

Every answer is compared with the one that its model gave alone. Then one client alternates, and waits for each answer: that is what a swap costs. Exit code 3: one
was lost, or wrong, or both models were loaded at once.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ["Name a colour.", "Count to five.", "What is the capital of Italy?", "Write a line about rain."]
SWAPS = 6  # of one client


class Counts:
    def __init__(self) -> None:
        self.right = self.wrong = self.lost = self.cut = self.both = 0
        self.seconds: list[float] = []


def body(model: str, prompt: str, stream: bool, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": stream}


async def ask(http: httpx.AsyncClient, model: str, prompt: str, stream: bool, tokens: int) -> tuple[str, str]:
    """The text, and what went wrong: "cut" for a stream that ended with an error event, or for 503, which says that it may be sent again."""
    response = await http.post("/v1/chat/completions", json=body(model, prompt, stream, tokens))
    if response.status_code != 200:
        return response.text, "cut" if response.status_code == 503 else "lost"
    if not stream:
        return response.json()["choices"][0]["message"]["content"], ""
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    if "error" in events[-1]:
        return "", "cut"
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events), "" if response.text.rstrip().endswith(
        "[DONE]"
    ) else "lost"


async def client(url: str, names: list[str], expected: dict[tuple[str, str], str], todo: list[int], counts: Counts, tokens: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        while todo:
            i = todo.pop()
            model, prompt = names[i % 2], PROMPTS[i // 2 % len(PROMPTS)]
            for _ in range(5):
                began = time.perf_counter()
                text, wrong = await ask(http, model, prompt, i % 3 == 0, tokens)
                if wrong != "cut":
                    break
                counts.cut += 1
            counts.seconds.append(time.perf_counter() - began)
            counts.lost += bool(wrong)
            counts.right += not wrong and text == expected[model, prompt]
            counts.wrong += not wrong and text != expected[model, prompt]
            listed = (await http.get("/v1/models")).json()["data"]
            counts.both += sum(entry["status"]["value"] == "loaded" for entry in listed) > 1


def kill(url: str, todo: list[int], at: int) -> None:
    """Kills a model's process when ``at`` requests are left, while it answers one."""
    with httpx.Client(base_url=url) as http:
        while todo:
            time.sleep(0.01)
            entries = http.get("/v1/models").json()["data"] if len(todo) <= at else []
            for entry in entries:
                if entry["status"]["value"] == "loaded" and entry["pyspec"]["running"]:
                    os.kill(entry["pyspec"]["pid"], signal.SIGKILL)
                    return


async def swaps(url: str, names: list[str]) -> list[float]:
    """Seconds until an answer of one token by the model that is not loaded, with nothing else to do."""
    out = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await ask(http, names[1], PROMPTS[0], False, 1)
        for i in range(SWAPS):
            await asyncio.sleep(3)  # the router has a process for it by then
            began = time.perf_counter()
            text, wrong = await ask(http, names[i % 2], PROMPTS[0], False, 1)
            assert not wrong, text
            out.append(time.perf_counter() - began)
    return out


async def run(url: str, names: list[str], args: argparse.Namespace) -> Counts:
    expected = {}
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        for name in names:
            for prompt in PROMPTS:
                expected[name, prompt], wrong = await ask(http, name, prompt, False, args.tokens)
                assert not wrong, expected[name, prompt]
    counts, todo = Counts(), list(range(args.requests))[::-1]
    clients = [client(url, names, expected, todo, counts, args.tokens) for _ in range(args.clients)]
    await asyncio.gather(*clients, asyncio.to_thread(kill, url, todo, args.requests // 2))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", action="append", required=True, help="two of them")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("-n", "--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    names = [Path(model).stem for model in args.model]
    plans = [planned(model) for model in args.model]
    memory = (max(plans) + sum(plans)) // 2 >> 20  # more than each of them takes, and less than both
    with tempfile.TemporaryDirectory() as folder:
        tables = [f'["*"]\nctx-size = 1024\nslots = 4\nthreads = {args.threads}\nprefix-memory = 0\nqueue = 1000\n']
        tables += [f'["{name}"]\nmodel = "{Path(model).resolve()}"\n' for name, model in zip(names, args.model)]
        (Path(folder) / "preset.toml").write_text("".join(tables))
        options = ["--models-preset", f"{folder}/preset.toml", "--models-memory", str(memory), "--port", "0", "--device", "CPU"]
        server = subprocess.Popen([sys.executable, "-m", "pyggml_spec", "serve", *options], stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        lines = iter(server.stderr)
        url = next(found[1] for line in lines if (found := re.match(r"serving .* at (http://\S+)/ ", line)))
        said: list[str] = []
        threading.Thread(target=lambda: said.extend(lines), daemon=True).start()
        began = time.perf_counter()
        counts = asyncio.run(run(url, names, args))
        seconds = time.perf_counter() - began
        of_many = len(said)
        alone = asyncio.run(swaps(url, names))
        server.terminate()
        status = server.wait(60)
    loads = {
        name: [float(found[1]) for line in said if (found := re.match(rf"loaded {re.escape(name)} in ([\d.]+) s", line))] for name in names
    }
    ends = [float(found[1]) for line in said[:of_many] if (found := re.match(r"loaded .* after ([\d.]+) s in which", line))]
    waits = sorted(counts.seconds)
    print(
        f"plans {', '.join(f'{plan >> 20} MiB' for plan in plans)}; memory {memory} MiB; {args.requests} requests of {args.clients} clients in {seconds:.0f} s"
    )
    print(
        f"right {counts.right}, wrong {counts.wrong}, lost {counts.lost}; cut by kill -9 and sent again {counts.cut}; both loaded {counts.both} times; exit status {status}"
    )
    print(
        f"answers: median {statistics.median(waits):.2f} s, longest {waits[-1]:.2f} s; running answers ended in {statistics.median(ends):.2f} s before a load (median)"
    )
    for i, name in enumerate(names):
        print(
            f"{name}: {len(loads[name])} loads, median {statistics.median(loads[name]):.2f} s; a swap to it until its first token, alone: {', '.join(f'{s:.2f}' for s in alone[i::2])} s"
        )
    killed = any("was ended by SIGKILL" in line for line in said)
    sys.exit(0 if counts.right == args.requests and not counts.both and killed and status == 0 else 3)


def planned(model: str) -> int:
    command = [sys.executable, "-m", "pyggml_spec", "plan", "-m", model, "-c", "1024", "--slots", "4", "--device", "CPU", "--json"]
    return int(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["total"])


if __name__ == "__main__":
    main()
