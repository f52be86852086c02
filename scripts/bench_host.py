#!/usr/bin/env python3
"""Host time per step of one sequence: one installation, or two in alternating rounds.

    bench_host.py [--python OLD/.venv/bin/python --python NEW/.venv/bin/python] [-m target.gguf -md drafter.gguf] [--device CPU] [-t 1]
                  [--rounds 9] [--tokens 96] [--widths 1,2,4,8,16] [--slots 1,4,8,16] [--graphs]

Per width (1 is plain decoding): microseconds of a step and of its host part (upload, Python, read), best round; then the ratios. --stub computes
nothing and measures CPU time per step, of the whole loop and of the engine alone. --graphs: number of graphs per kind, and their nodes.
--slots: tokens per second of concurrent requests, plain and with drafts, and device bytes per slot.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from unittest.mock import patch

import pyggml_spec as ps
from pyggml_spec.ggml.step_io import StepFields, StepTimes

try:
    from pyggml_spec.engine.engine import generate
    from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
except ImportError:  # an older version
    import pyggml_spec.decode.request as old  # type: ignore[import-not-found]
    from pyggml_spec.decode.scheduler import generate

    PLAIN, SPECULATIVE, GenerationOptions = old.PLAIN, old.SPECULATIVE, getattr(old, "LoopOptions")  # noqa: B009

PROMPT = "def quicksort(items):\n    "


def serve(args) -> None:
    """Answers rounds: what to measure and how wide comes in as a line, its figures go out."""
    sessions: dict = {}
    servers: dict = {}
    for line in sys.stdin:
        what, number = line.split()
        n = int(number)
        load = max(n, 2) if what == "width" else 16
        if load not in sessions:
            sessions[load] = ps.load(args.model, args.model_draft, device=args.device, threads=args.threads, n_ctx=1024, draft_width=load)
        session = sessions[load]
        runner = session.runner if hasattr(session, "runner") else session.engine  # of an older version
        if what == "graphs":
            nodes = defaultdict(list)
            for step_key, step in runner.graphs.steps().items():
                nodes[step_key.kind if hasattr(step_key, "kind") else step_key[0]].append(step.graph.n_nodes)
            out: dict = nodes
        elif what == "memory":
            if servers:
                servers.pop("server").close()
                servers.clear()
            with session.batch(n) as batch:
                memory = (batch.runner if hasattr(batch, "runner") else batch.engine).memory()
            out = {"bytes": sum(size for name, size in memory.items() if not name.endswith("weights"))}
        elif what == "slots":
            out = {mode: together(session, servers, n, mode, args.tokens) for mode in ("plain", "speculative")}
        elif args.stub:
            out = stubbed(runner, n, args.tokens)
        else:
            stats = session.generate(PROMPT, args.tokens, mode="plain" if n == 1 else "speculative", ignore_end=True)[1]
            host = stats.host_us
            out = {
                "step": 1e6 * stats.seconds["decode"] / stats.steps,
                "host": (host["upload"] + host["host"]) / stats.steps,
                "rate": -stats.tokens_per_second,
            }
        print(json.dumps(out), flush=True)


def together(session, servers: dict, slots: int, mode: str, tokens: int) -> float:
    """Seconds per token of so many requests at once, from the first submission to the last end."""
    if servers.get("slots") != slots:
        if "server" in servers:
            servers["server"].close()
        servers.update(slots=slots, server=session.concurrent(slots))
    began = time.perf_counter()
    handles = [servers["server"].submit(PROMPT + "x" * i, tokens, mode=mode, ignore_end=True) for i in range(slots)]
    for handle in handles:
        handle.result()
    return (time.perf_counter() - began) / (slots * tokens)


def stubbed(engine, width: int, steps: int) -> dict:
    """Processor microseconds of a step that computes nothing: as a reader sees it, and the engine's part."""
    engine.reset(drafting=width > 1)
    options = GenerationOptions(2 * steps, PLAIN if width == 1 else SPECULATIVE, width, ignore_end=True)
    blocks, done = generate(engine, [1, 2, 3], options, interrupted=lambda: False), 0
    for _ in range(4):
        next(blocks)
    with patch.object(StepFields, "launch", lambda self: None), patch.object(StepFields, "wait", lambda self: StepTimes(0, 0, 0)):
        began = time.thread_time()
        for done, _ in enumerate(blocks, 1):
            if done == steps:
                break
        whole = 1e6 * (time.thread_time() - began) / done
    blocks.close()
    engine.reset()
    engine.prefill([1, 2, 3])
    step = engine.plain_step if width == 1 else lambda: engine.fused_step(width)
    for _ in range(3):
        engine.accept(1, int(step().ids[0]))
    with patch.object(StepFields, "launch", lambda self: None), patch.object(StepFields, "wait", lambda self: StepTimes(0, 0, 0)):
        began = time.thread_time()
        for _ in range(steps):
            engine.accept(1, int(step().ids[0]))
        spent = 1e6 * (time.thread_time() - began) / steps
    engine.reset()
    return {"step": whole, "host": spent}


class Child:
    """An interpreter that measures."""

    def __init__(self, python: str, arguments: list[str]):
        self.name = python
        self.process = subprocess.Popen(
            [python, __file__, "--serve", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, what: str, number: int) -> dict:
        self.process.stdin.write(f"{what} {number}\n")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measured(children: list[Child], kinds: list[tuple[str, int]], rounds: int) -> dict[tuple, dict]:
    """Minimum of every figure over the rounds, by interpreter and kind; a kind's rounds are consecutive, so that slots are created once."""
    best: dict = defaultdict(dict)
    for kind in kinds:
        for child in children:
            child.ask(*kind)  # loads, and builds graphs
    for kind in kinds:
        for _ in range(rounds):
            for child in children:
                figures = best[child.name, *kind]
                for name, value in child.ask(*kind).items():
                    figures[name] = min(figures.get(name, value), value)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append")
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--widths", default="1,2,4,8,16")
    parser.add_argument("--slots", default="")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    passed = ["--device", args.device, "-t", str(args.threads), "--tokens", str(args.tokens)]
    passed += ["--stub"] if args.stub else []
    for name, value in (("-m", args.model), ("-md", args.model_draft)):
        passed += [name, value] if value else []
    children = [Child(python, passed) for python in args.python or [sys.executable]]
    try:
        widths = [int(width) for width in args.widths.split(",") if width]
        slots = [int(n) for n in args.slots.split(",") if n]
        best = measured(children, [("width", width) for width in widths], args.rounds)
        if widths:
            columns = "step us, engine us" if args.stub else "step us, host us, tok/s"
            print("| width | " + " | ".join(f"{columns} ({child.name})" for child in children) + " | ratios |")
            print("|---|" + "---|" * len(children) + "---|")
        for width in widths:
            rows = [best[child.name, "width", width] for child in children]
            ratios = [f"{rows[-1][key] / rows[0][key]:.3f}" for key in ("step", "host")] if len(children) > 1 else []
            shown = [f"{r['step']:.0f}, {r['host']:.0f}" + (f", {-r['rate']:.0f}" if "rate" in r else "") for r in rows]
            print(f"| {width} | " + " | ".join(shown) + f" | {', '.join(ratios)} |", flush=True)
        if slots:
            best = measured(children, [("slots", n) for n in slots], args.rounds)
            print(
                "\n| slots | " + " | ".join(f"plain, speculative tok/s, MiB per slot ({child.name})" for child in children) + " | ratios |"
            )
            print("|---|" + "---|" * len(children) + "---|")
        for n in slots:
            rows = [best[child.name, "slots", n] for child in children]
            memory = [child.ask("memory", n)["bytes"] / n / 2**20 for child in children]
            ratios = [f"{rows[0][key] / rows[-1][key]:.3f}" for key in ("plain", "speculative")] if len(children) > 1 else []
            shown = [f"{1 / r['plain']:.0f}, {1 / r['speculative']:.0f}, {m:.2f}" for r, m in zip(rows, memory)]
            print(f"| {n} | " + " | ".join(shown) + f" | {', '.join(ratios)} |", flush=True)
        for child in children if args.graphs else ():
            print(child.name, "graphs per role (nodes, least to most):")
            for role, nodes in sorted(child.ask("graphs", 0).items()):
                print(f"  {role}: {len(nodes)} ({min(nodes)} to {max(nodes)})")
    finally:
        for child in children:
            child.close()


if __name__ == "__main__":
    main()
