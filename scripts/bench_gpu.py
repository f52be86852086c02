#!/usr/bin/env python3
"""What a GPU does with more than a few rows, against llama.cpp's tools on the same files, in turn: prompts, many sequences, long contexts, experts, start.

    bench_gpu.py --tools DIR [--patched DIR] --models DIR [--only prompts-4B,slots,...] [--rounds 2] [--budget SECONDS] --out FILE.json

Models are random ones of real shapes in Q4_K (make_random_gguf.py); those that are missing in --models are written. --patched: tools of a llama.cpp with
patches/. llama-bench counts with its best ubatch; pyspec's chunk is 2,048. Writes every figure, and prints the table, after each line of work.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from bench_vs_llamacpp import PROMPT, llama_bench
from llama_server import environment, free_port
from make_random_gguf import write_pair

import pyggml_spec as ps
from pyggml_spec.ggml.library import versions
from pyggml_spec.tools.bench import BenchOptions, bench, leg_name
from pyggml_spec.tools.bench_slots import bench_slots, tokens_needed

CHUNK = 2048
SCRIPTS = Path(__file__).parent
Rows = Iterator[dict]


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def line(work: str, unit: str, *, peer=(), patched=(), ours=(), plain=(), note: str = "") -> dict:
    return {
        "work": work,
        "unit": unit,
        "llama.cpp": list(peer),
        "patched": list(patched),
        "pyspec": list(ours),
        "own": list(plain),
        "note": note,
    }


class Work:
    """The lines of work; each method is a generator of table lines, named as `--only` does."""

    def __init__(self, args) -> None:
        self.args = args

    def pair(self, model: str) -> tuple[str, str]:
        target, drafter = write_pair(model, "Q4_K", self.args.models)
        return str(target), str(drafter)

    def script(self, name: str, *options: object) -> dict:
        """What another script of this folder measures, from its --out file."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            command = [sys.executable, str(SCRIPTS / name), *map(str, options), "--device", self.args.device, "--out", str(out)]
            subprocess.run(command, check=True, stdout=sys.stderr)
            return json.loads(out.read_text())

    def peers(self, model: str, prompts: list[int], tokens: int, *more: object) -> dict[str, dict[str, float]]:
        found = {}
        for who, tools in (("peer", self.args.tools), ("patched", self.args.patched)):
            if tools is not None:
                told = argparse.Namespace(tools=tools, model=model, ngl=99, threads=None, n_cpu_moe=0)
                found[who] = llama_bench(told, prompts, tokens, more)
        return found

    def against(self, model: str, prompts: list[int], tokens: int, depth: int, ubatches: str, rounds: int, reps: int = 2) -> Rows:
        """Prompts, or plain decoding, of each side in turn."""
        target, _ = self.pair(model)
        more = ["-ub", ubatches, "-b", max(2048, *map(int, ubatches.split(","))), "-d", depth, "-r", reps]
        names = [leg_name(f"pp{n}", depth) for n in prompts] + ([leg_name(f"tg{tokens}", depth)] if tokens else [])
        legs: dict[str, dict[str, list[float]]] = {name: {"peer": [], "patched": [], "ours": []} for name in names}
        with ps.load(
            target, device=self.args.device, n_ctx=depth + max([*prompts, tokens + 8]) + 64, chunk=CHUNK, prefix_memory=0
        ) as session:
            for _ in range(rounds):
                for who, best in self.peers(target, prompts, tokens, *more).items():
                    for name in names:
                        legs[name][who].append(best[name])
                for row in bench(session, BenchOptions(tuple(prompts), tokens, (depth,), reps)):
                    legs[row.test]["ours"] += row.runs
        for name, leg in legs.items():
            yield line(f"{model} {name}", "tok/s", **leg, note=f"llama-bench -ub {ubatches}")

    # -- the lines of work

    def prompts_4B(self) -> Rows:
        yield from self.against("4B", [512, 4096], 0, 0, "512,2048", self.args.rounds)

    def prompts_27B(self) -> Rows:
        yield from self.against("27B", [512, 4096], 0, 0, "512,2048", self.args.rounds)

    def prompts_35B(self) -> Rows:
        yield from self.against("35B-A3B", [512, 4096], 0, 0, "512,2048,4096", self.args.rounds)

    def rows_128(self) -> Rows:
        for row in self.against("llama-8B", [128], 0, 0, "512", self.args.rounds, 5):
            times = {who: [round(128000 / speed, 3) for speed in row[who]] for who in ("llama.cpp", "patched", "pyspec")}
            yield row | times | {"work": "llama-8B, 128 rows", "unit": "ms"}

    def deep_4B(self) -> Rows:
        yield from self.against("4B", [2048], 0, 32768, "512,2048", 1)

    def deep_27B(self) -> Rows:
        yield from self.against("27B", [2048], 0, 32768, "512,2048", 1)

    def long_4B(self) -> Rows:
        yield from self.against("4B", [], 64, 131072, "2048", 1, 1)

    def long_8B(self) -> Rows:
        yield from self.against("llama-8B", [], 64, 131072, "2048", 1, 1)

    def slots(self) -> Rows:
        options = BenchOptions((), 128, (0,), self.args.rounds, 6.0)
        with ps.load(*self.pair("llama-8B"), device=self.args.device, n_ctx=max(1024, tokens_needed(options))) as session:
            for count in (32, 64):
                plain, drafts = bench_slots(session, (count,), options)
                note = f"widths {drafts.widths}, {drafts.tokens_per_step:.2f} tokens per step"
                yield line(
                    f"llama-8B, {count} sequences, DFlash at 6 over own plain", "tok/s", ours=drafts.runs, plain=plain.runs, note=note
                )

    def kv(self) -> Rows:
        pair = self.pair("4B")
        cases = self.script(
            "bench_attention.py", "steps", "-m", pair[0], "-md", pair[1], "--depths", 131072, "--rows", "1,16", "--types", "f16,q8_0"
        )["cases"]
        f16, q8_0 = ({**case["ms"], "MiB": sum(n for name, n in case["MiB"].items() if "weights" not in name)} for case in cases)
        for key, unit in (("1", "ms"), ("16", "ms"), ("MiB", "MiB")):
            what = {"1": "plain step", "16": "step of 16 rows", "MiB": "memory beside the weights"}[key]
            yield line(f"4B@d131072, q8_0 K/V over own f16: {what}", unit, ours=[q8_0[key]], plain=[f16[key]])

    def experts(self) -> Rows:
        target, drafter = self.pair("35B-A3B")
        peers: dict[str, list[float]] = {"peer": [], "patched": []}
        for _ in range(self.args.rounds):
            for who, best in self.peers(target, [0], 128).items():
                peers[who].append(best["tg128"])
        ms = self.script("bench_steps.py", "-m", target, "-md", drafter, "--widths", "1,8", "--rounds", self.args.rounds, "--with", "")[
            "ms"
        ][""]
        steps = {width: [statistics.median(one) for one in rounds] for width, rounds in ms.items()}
        yield line("35B-A3B plain", "tok/s", **peers, ours=[1000 / one for one in steps["1"]])
        yield line("35B-A3B, step of 8 rows", "ms", ours=steps["8"])

    def start(self) -> Rows:
        target, drafter = self.pair("27B")
        ours, again, theirs = [], [], []
        server = [
            str(self.args.tools / "llama-server"),
            "-m",
            target,
            "-md",
            drafter,
            "--spec-type",
            "draft-dflash",
            "--spec-draft-n-max",
            "15",
        ]
        server += ["-ngl", "99", "-ngld", "99", "-fa", "on", "-np", "1", "-c", "4096", "--backend-sampling", "--no-webui"]
        own = [
            sys.executable,
            "-P",
            "-m",
            "pyggml_spec",
            "serve",
            "-m",
            target,
            "-md",
            drafter,
            "--device",
            self.args.device,
            "-c",
            "4096",
            "-np",
            "1",
        ]
        for _ in range(self.args.rounds):
            with tempfile.TemporaryDirectory() as cache:
                ours.append(first_token(own, {"PYSPEC_CACHE": cache}))
                theirs.append(first_token(server, environment(self.args.tools)))
                again.append(first_token(own, {"PYSPEC_CACHE": cache}))
        yield line("27B pair, first token from exec, empty cache", "s", peer=theirs, ours=ours)
        yield line("27B pair, first token from exec, again", "s", peer=theirs, ours=again)


def first_token(command: list[str], env: dict[str, str]) -> float:
    """Seconds from the start of a server to its answer of one token."""
    port, began = free_port(), time.perf_counter()
    body = json.dumps({"prompt": PROMPT, "n_predict": 1, "temperature": 0}).encode()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], env={**os.environ, **env}, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                try:
                    with socket.create_connection(("127.0.0.1", port), 1):
                        pass
                    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", body, {"Content-Type": "application/json"})
                    with urllib.request.urlopen(request, timeout=120) as answer:
                        answer.read()
                        return time.perf_counter() - began
                except urllib.error.HTTPError as error:
                    if error.code != 503:  # still loading
                        raise RuntimeError(f"the server answers {error.code}: {error.read()[:300]!r}") from error
                except OSError:
                    pass
                time.sleep(0.02)
            log.seek(0)
            raise RuntimeError(f"the server ended: {log.read()[-500:]!r}")
        finally:
            process.terminate()
            process.wait(60)


NAMES = [
    "prompts-4B",
    "rows-128",
    "slots",
    "prompts-27B",
    "prompts-35B",
    "experts",
    "start",
    "kv",
    "deep-4B",
    "deep-27B",
    "long-4B",
    "long-8B",
]


def ratio(row: dict) -> str:
    """Of pyspec to llama.cpp, or to its own other figure; above 1 is better."""
    ours, other = median(row["pyspec"]), median(row["llama.cpp"]) or median(row["own"])
    if ours is None or other is None:
        return "-"
    return f"{(ours / other if row['unit'] == 'tok/s' else other / ours):.2f}"


def table(rows: list[dict]) -> str:
    out = ["| work | | llama.cpp | patched llama.cpp | own other | pyspec | ratio |", "|" + "---|" * 7]
    for row in rows:
        cells = [
            f"{value:.4g}" if value and value < 100 else f"{value:.0f}" if value else "-"
            for value in map(median, (row["llama.cpp"], row["patched"], row["own"], row["pyspec"]))
        ]
        out.append(f"| {row['work']} | {row['unit']} | {' | '.join(cells)} | {ratio(row)} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--patched", type=Path)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no line of work begins after them")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began, rows, work = time.perf_counter(), [], Work(args)
    card = next(d for d in ps.devices() if d.name == args.device)
    for name in args.only.split(","):
        if name not in NAMES:
            parser.error(f"--only {name}: there are {', '.join(NAMES)}")
        if time.perf_counter() - began > args.budget:
            print(f"not begun, the time is up: {name}", flush=True)
            continue
        leg: Callable[[], Rows] = getattr(work, name.replace("-", "_"))
        at = time.perf_counter()
        try:
            rows += leg()
        except (Exception, SystemExit) as why:  # the others are still worth their time
            print(f"{name}: {type(why).__name__}: {why}", flush=True)
        print(f"{name}: {time.perf_counter() - at:.0f} s\n{table(rows)}", flush=True)
        found = {"card": card.description, "versions": versions(), "command": sys.argv, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
