#!/usr/bin/env python3
"""Speculative (width control on) against plain decoding of the same session, prompt by prompt, interleaved; the fastest of the rounds.

The fastest, because everything else on a machine only ever slows a round down: on a shared two-core machine, medians of three rounds of the
very same work differed by factors from 0.64 to 1.53. Use enough rounds. The JSON file holds every round.

    bench_prompts.py [-m target.gguf -md drafter.gguf] [-n 128] [-r 7] [--device CPU] [-t 2] [--out FILE.json]
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import pyggml_spec as ps
from pyggml_spec.ggml.library import versions
from pyggml_spec.session import DEMO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--draft-width", type=int)
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.jsonl")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    rows = [{"name": p["name"], "plain": [], "spec": [], "tokens_per_step": 0.0} for p in prompts]
    with ps.load(args.model, args.model_draft, device=args.device, threads=args.threads, n_ctx=1024, draft_width=args.draft_width) as session:
        for _ in range(args.rounds):
            for prompt, row in zip(prompts, rows):
                for mode, key in (("plain", "plain"), ("speculative", "spec")):
                    _, stats = session.generate(prompt["prompt"], args.tokens, mode=mode, ignore_end=True)
                    row[key].append(stats.tokens_per_second)
                row["tokens_per_step"], row["widths"] = stats.tokens_per_step, {str(k): v for k, v in sorted(stats.widths.items())}
        costs = session.costs
    ratios = []
    print("| prompt | plain tok/s | speculative tok/s | ratio | tokens per step | widths used |\n|---|---|---|---|---|---|")
    for row in rows:
        plain, spec = max(row["plain"]), max(row["spec"])
        ratios.append(spec / plain)
        print(f"| {row['name']} | {plain:.0f} | {spec:.0f} | {spec / plain:.2f} | {row['tokens_per_step']:.2f} | {row['widths']} |")
    print(f"mean ratio {statistics.fmean(ratios):.3f}, lowest {min(ratios):.3f}; costs in ms {costs}")
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "ratios": ratios, "costs_ms": costs, "command": sys.argv, "versions": versions()}, indent=1))


if __name__ == "__main__":
    main()
