#!/usr/bin/env python3
"""llama-server under the load of several clients, one build against another: DFlash tokens per second of all slots together.

    bench_server.py --tools pristine=DIR patched=DIR -m target.gguf -md drafter.gguf --slots 1,4 --device CUDA0 --out FILE.json

Every slot gets a client that asks for greedy completions of a fixed length behind a prompt of its own, all at the same time. A figure is what all of
them got, divided by the time until the last one had it; prompts included. The builds take turns, round by round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pyggml_spec as ps

PORT = 8101


class Server:
    """A llama-server child with ``slots`` slots."""

    def __init__(self, args, tools: Path, slots: int):
        command = [str(tools / "llama-server"), "-m", args.model, "-fa", "on", "-ngl", str(args.ngl), "-np", str(slots), "--port", str(PORT)]
        command += ["-c", str(args.ctx * slots), "--temp", "0", "--backend-sampling", "--no-webui", "--no-warmup", "--metrics"]
        command += ["-md", args.model_draft, "-ngld", str(args.ngl), "--spec-type", "draft-dflash", "--spec-draft-n-max", "15"]
        command += ["--spec-synth-len", str(args.synthetic_acceptance)] if args.synthetic_acceptance else []
        command += ["-t", str(args.threads)] if args.threads else []
        env = {**os.environ, "LD_LIBRARY_PATH": f"{tools}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
        self.log = open(args.out.with_suffix(".server.log"), "w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=env)
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"llama-server of {tools} ended with {self.process.returncode}; see {self.log.name}")
            try:
                self._get("/health")
                return
            except OSError:
                time.sleep(0.3)
        sys.exit("llama-server did not become ready")

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=600) as answer:
            return answer.read().decode()

    def complete(self, client: int, tokens: int) -> int:
        prompt = [100 + (7 + client) * i % 4000 for i in range(64)]
        body = json.dumps({"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["timings"]["predicted_n"]

    def load(self, clients: int, tokens: int) -> float:
        """Tokens per second of all clients together."""
        got = [0] * clients

        def ask(i: int) -> None:
            got[i] = self.complete(i, tokens)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(got) / (time.perf_counter() - began)

    def counters(self) -> dict[str, float]:
        rows = (line.split() for line in self._get("/metrics").splitlines() if not line.startswith("#"))
        return {name.removeprefix("llamacpp:"): float(value) for name, value in rows}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", required=True, metavar="NAME=DIR")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--model-draft", required=True)
    parser.add_argument("--slots", default="1,4")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-c", "--ctx", type=int, default=4096, help="tokens of context per slot")
    parser.add_argument("-n", "--tokens", type=int, default=256)
    parser.add_argument("-r", "--rounds", type=int, default=2)
    parser.add_argument("--synthetic-acceptance", type=float)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.ngl = 0 if args.device == "CPU" else 99
    builds = {name: Path(folder) for name, folder in (item.split("=", 1) for item in args.tools)}
    figures: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    counters: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for slots in map(int, args.slots.split(",")):
            for name, tools in builds.items():
                before, key = _memory_used(args.device), f"{name}, -np {slots}"
                server = Server(args, tools, slots)
                try:
                    server.load(slots, 64)  # graphs and allocations
                    figures.setdefault(key, []).append(server.load(slots, args.tokens))
                    memory[key], counters[key] = _memory_used(args.device) - before, server.counters()
                finally:
                    server.close()
    print(f"| llama-server, {Path(args.model).name} | tok/s | device memory MiB |\n|---|---|---|")
    for key, runs in figures.items():
        print(f"| {key} | {statistics.median(runs):.1f} | {memory[key] >> 20} |")
    args.out.write_text(json.dumps({"figures": figures, "memory": memory, "counters": counters, "command": sys.argv}, indent=1))


def _memory_used(device: str) -> int:
    found = next(d for d in ps.devices() if d.name == device)
    return found.memory_total - found.memory_free


if __name__ == "__main__":
    main()
