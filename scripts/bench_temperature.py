#!/usr/bin/env python3
"""Acceptance and speed of sampled text: drafts that are argmaxes against drafts with the target's noise, on the same prompts and seeds.

    bench_temperature.py -m target.gguf -md drafter.gguf --prompts questions.jsonl [--width 5] [--count 13] [-n 64] [-t 2]
    bench_temperature.py --device CUDA0 --spec draft-mtp                                # the embedded pair and its prompts

A line of the file is {"category": ..., "turns": [TEXT, ...]} (Spec-Bench's layout; ChatML; categories take turns) or {"prompt": TEXT}. "Texts": how many
equal the plain one of the same seed. Speeds are those of decoding.
"""

import argparse
import json
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

import pyggml_spec as ps
from pyggml_spec.loading import DEMO
from pyggml_spec.sampling.sampler import DRAW_OPTIONS, Sampler

CHAINS = {"defaults": {}, "no cuts": {"top_k": 0, "top_p": 1.0, "min_p": 0.0}}


def prompts_of(file: Path, count: int) -> list[str]:
    by_category: dict[str, list[str]] = {}
    for item in map(json.loads, file.read_text().splitlines()):
        text = item["prompt"] if "prompt" in item else f"<|im_start|>user\n{item['turns'][0]}<|im_end|>\n<|im_start|>assistant\n"
        by_category.setdefault(item.get("category", ""), []).append(text)
    mixed = (text for texts in zip_longest(*(by_category[name] for name in sorted(by_category))) for text in texts if text is not None)
    return list(islice(mixed, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m")
    parser.add_argument("-md")
    parser.add_argument("--spec", help="methods, as of --spec-type")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.jsonl")
    for name, default in (("--width", 5), ("--count", 13), ("-n", 64), ("-t", 2)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument(
        "--temperatures", default="0.3,0.6,0.8,1.0", help="rows of the table, so that parts of it can be run at other times"
    )
    args = parser.parse_args()
    shared, prompts = Sampler.draft_options, prompts_of(args.prompts, args.count)
    drafts = {
        "none": shared,
        "argmax": lambda self, count: np.zeros((count, DRAW_OPTIONS.itemsize // 4), np.int32),
        "shared noise": shared,
    }
    print("| T | chain | drafts | accepted | tokens per step | tokens per second | texts |\n|---|---|---|---|---|---|---|")
    options = {"device": args.device, "threads": args.t if args.device == "CPU" else None, "n_ctx": 2048}
    with ps.load(args.m, args.md, **options, draft_width=args.width, spec=args.spec and args.spec.split(",")) as session:
        for temperature in map(float, args.temperatures.split(",")):
            for chain, cuts in CHAINS.items():
                plain = []
                for name, Sampler.draft_options in drafts.items():
                    all_stats, same = [], 0
                    for seed, prompt in enumerate(prompts):
                        sampling, mode = ps.Sampling(temperature=temperature, seed=seed, **cuts), "plain" if name == "none" else None
                        text, stats = session.generate(prompt, args.n, mode=mode, sampling=sampling, ignore_end=True)
                        plain += [text] if name == "none" else []
                        same += text == plain[seed]
                        all_stats.append(stats)
                    drafted, matched, steps, tokens = (
                        sum(getattr(s, of) for s in all_stats) for of in ("drafted", "matched", "steps", "emitted")
                    )
                    share, rate = matched / max(drafted, 1), (tokens - len(prompts)) / sum(s.seconds["decode"] for s in all_stats)
                    print(
                        f"| {temperature} | {chain} | {name} | {share:.3f} | {(tokens - len(prompts)) / steps:.2f} | {rate:.1f} | {same} of {len(prompts)} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
