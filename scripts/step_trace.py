#!/usr/bin/env python3
"""The time of every step of one long generation, and stalls at KV-bucket boundaries, where the graph changes.

    step_trace.py [-m target.gguf -md drafter.gguf] [-n 4096] [--device CPU] [-t 2] [--synthetic-acceptance 6] [--mode plain] --out FILE.csv

Prints, per width, the median step, the 99th percentile and the slowest, and the slowest of the eight steps after each KV-bucket boundary.
"""

import argparse
import csv
import itertools
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pyggml_spec as ps
from pyggml_spec.engine.engine import generate
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.engine.stats import Stats
from pyggml_spec.speculation.synthetic import SyntheticAcceptance

NEAR = 8  # steps after a boundary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("-n", "--tokens", type=int, default=4096)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--draft-width", type=int)
    parser.add_argument("--mode", choices=[PLAIN, SPECULATIVE], default=SPECULATIVE)
    parser.add_argument("--synthetic-acceptance", type=float)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with ps.load(
        args.model, args.model_draft, device=args.device, threads=args.threads, n_ctx=args.tokens + 64, draft_width=args.draft_width
    ) as session:
        engine, stats = session.runner, Stats()
        synthetic = SyntheticAcceptance(args.synthetic_acceptance, engine.options.width - 1, seed=1) if args.synthetic_acceptance else None
        widths = session.new_policy() if args.mode == SPECULATIVE else None
        engine.reset(drafting=args.mode == SPECULATIVE)
        options = GenerationOptions(args.tokens, args.mode, engine.options.width, ignore_end=True, synthetic=synthetic)
        rows, last, counted = [], None, defaultdict(int)
        for block in generate(engine, list(range(8)), options, stats, policy=widths):
            now = time.perf_counter()
            if last is not None:
                width = next(w for w, n in stats.widths.items() if n != counted[w])
                rows.append((engine.cursor.committed, width, len(block), 1000 * (now - last)))
                counted = defaultdict(int, stats.widths)
            last = time.perf_counter()
    rows = rows[1:]  # the first one includes building what is needed at once
    with open(args.out, "w", newline="") as file:
        csv.writer(file).writerows([("committed", "width", "tokens", "ms"), *rows])
    by_width = defaultdict(list)
    for _, width, _, ms in rows:
        by_width[width].append(ms)
    print("| width | steps | median ms | p99 ms | slowest ms |\n|---|---|---|---|---|")
    for width, ms in sorted(by_width.items()):
        ms.sort()
        print(f"| {width} | {len(ms)} | {statistics.median(ms):.3f} | {ms[int(0.99 * (len(ms) - 1))]:.3f} | {ms[-1]:.3f} |")
    main_width = max(by_width, key=lambda w: len(by_width[w]))
    usual, worst = statistics.median(by_width[main_width]), []
    spans = [
        engine.kv.bucket(before + width) for (before, *_), (_, width, *_) in itertools.pairwise(rows)
    ]  # of the steps from the second on
    for i in range(2, len(rows)):
        if spans[i - 1] != spans[i - 2]:
            worst.append(max(ms for *_, ms in rows[i : i + NEAR]))
    if worst:
        print(f"{len(worst)} bucket boundaries; slowest of the {NEAR} steps after each: median {statistics.median(worst):.3f} ms, most {max(worst):.3f} ms, "
              f"against {usual:.3f} ms usually")  # fmt: skip
    print(f"graphs built ahead {stats.graphs_built_ahead}, waited for {stats.graphs_built_after_warmup}; CUDA graphs {stats.cuda_graphs}; host us/step",
          {k: round(v / stats.steps) for k, v in stats.host_us.items()})  # fmt: skip


if __name__ == "__main__":
    main()
