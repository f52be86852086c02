#!/usr/bin/env python3
"""Acceptance and speed of sampled text: drafts that are argmaxes against drafts with the target's noise, on the same prompts and seeds.

bench_temperature.py -m target.gguf -md drafter.gguf --prompts questions.jsonl [--width 5] [--count 13] [-n 64] [-t 2]

Each line of the file is {"category": ..., "turns": [TEXT, ...]} (Spec-Bench's layout); categories take turns. Prompts use ChatML.
"""

import argparse
import json
import time
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

import pyggml_spec as ps
from pyggml_spec.sampling.sampler import DRAW_OPTIONS, Sampler

NO_CUTS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def prompts_of(file: Path, count: int) -> list[str]:
    by_category: dict[str, list[str]] = {}
    for line in file.read_text().splitlines():
        question = json.loads(line)
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    mixed = (text for texts in zip_longest(*(by_category[name] for name in sorted(by_category))) for text in texts if text is not None)
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in islice(mixed, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", required=True)
    parser.add_argument("-md", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    for name, default in (("--width", 5), ("--count", 13), ("-n", 64), ("-t", 2)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    shared, prompts = Sampler.draft_options, prompts_of(args.prompts, args.count)
    drafts = {"argmax": lambda self, count: np.zeros((count, DRAW_OPTIONS.itemsize // 4), np.int32), "shared noise": shared}
    print("| T | chain | drafts | accepted | tokens per step | tokens per second |\n|---|---|---|---|---|---|")
    with ps.load(args.m, args.md, device="CPU", threads=args.t, n_ctx=2048, draft_width=args.width) as session:
        for temperature in (0.3, 0.6, 0.8, 1.0):
            for chain, cuts in (("defaults", {}), ("no cuts", NO_CUTS)):
                for name, Sampler.draft_options in drafts.items():
                    matched = drafted = tokens = 0
                    begin = time.perf_counter()
                    for seed, prompt in enumerate(prompts):
                        stats = session.generate(prompt, args.n, sampling=ps.Sampling(temperature=temperature, seed=seed, **cuts))[1]
                        matched, drafted, tokens = matched + stats.matched, drafted + stats.drafted, tokens + stats.emitted
                    share, rate = matched / drafted, tokens / (time.perf_counter() - begin)
                    print(
                        f"| {temperature} | {chain} | {name} | {share:.3f} | {1 + (args.width - 1) * share:.2f} | {rate:.1f} |", flush=True
                    )


if __name__ == "__main__":
    main()
