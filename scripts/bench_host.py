#!/usr/bin/env python3
"""What a step of one sequence costs beside the device's work: one installation, or two against each other, a round of one, a round of the other.

    bench_host.py [--python OLD/.venv/bin/python --python NEW/.venv/bin/python] [-m target.gguf -md drafter.gguf] [--device CPU] [-t 1]
                  [--rounds 9] [--tokens 96] [--widths 1,2,4,8,16] [--graphs]

Each interpreter stays loaded for the whole run, so that rounds can alternate. Per width (1 is plain decoding): microseconds of a whole step and
those that are the host's (upload, Python, read, without launch and wait), the best of all rounds; then the ratios. With --stub nothing is computed:
processor time of the engine's own work per step, which other work on the machine hardly disturbs. Graphs: how many there are per role, and their
nodes.
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

PROMPT = "def quicksort(items):\n    "


def serve(args) -> None:
    """Answers rounds: a width per line comes in, its microseconds go out."""
    sessions = {}
    for line in sys.stdin:
        width = int(line)
        load = max(width, 2)
        if load not in sessions:
            sessions[load] = ps.load(args.model, args.model_draft, device=args.device, threads=args.threads, n_ctx=1024, draft_width=load)
        session = sessions[load]
        if width == 0:
            nodes = defaultdict(list)
            for step_key, step in session.engine.graphs.steps().items():
                nodes[step_key[0]].append(step.graph.n_nodes)
            print(json.dumps(nodes), flush=True)
            continue
        if args.stub:
            print(json.dumps(stubbed(session.engine, width, args.tokens)), flush=True)
            continue
        stats = session.generate(PROMPT, args.tokens, mode="plain" if width == 1 else "speculative", ignore_end=True)[1]
        host = stats.host_us
        out = {
            "step": 1e6 * stats.seconds["decode"] / stats.steps,
            "host": (host["upload"] + host["host"]) / stats.steps,
            "steps": stats.steps,
        }
        print(json.dumps(out), flush=True)


def stubbed(engine, width: int, steps: int) -> dict:
    """Processor microseconds of a step that computes nothing."""
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
    return {"step": spent, "host": spent}


class Child:
    """An interpreter that measures."""

    def __init__(self, python: str, arguments: list[str]):
        self.name = python
        self.process = subprocess.Popen(
            [python, __file__, "--serve", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, width: int) -> dict:
        self.process.stdin.write(f"{width}\n")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


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
        widths = [int(width) for width in args.widths.split(",")]
        for child in children:
            for width in widths:
                child.ask(width)  # loads, and builds graphs
        best: dict = {}
        for _ in range(args.rounds):
            for width in widths:
                for child in children:
                    for what, value in child.ask(width).items():
                        key = child.name, width, what
                        best[key] = min(best.get(key, value), value)
        print("| width | " + " | ".join(f"step us, host us ({child.name})" for child in children) + " | ratios |")
        print("|---|" + "---|" * len(children) + "---|")
        for width in widths:
            figures = [[best[child.name, width, what] for what in ("step", "host")] for child in children]
            ratios = [f"{new / old:.3f}" for old, new in zip(figures[0], figures[-1])] if len(children) > 1 else []
            print(f"| {width} | " + " | ".join(f"{step:.0f}, {host:.0f}" for step, host in figures) + f" | {', '.join(ratios)} |")
        for child in children if args.graphs else ():
            print(child.name, "graphs per role (nodes, least to most):")
            for role, nodes in sorted(child.ask(0).items()):
                print(f"  {role}: {len(nodes)} ({min(nodes)} to {max(nodes)})")
    finally:
        for child in children:
            child.close()


if __name__ == "__main__":
    main()
