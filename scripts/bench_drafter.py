#!/usr/bin/env python3
"""Real prompts plainly, with fixed numbers of drafts, and with the policy's choice, in turn in one process; texts are compared with plain ones.

    bench_drafter.py -m target.gguf -md small.gguf --prompts prompts.jsonl [-t 1] [--drafts 2,4,8] [-n 128] [--device CPU]

Each line of the file is {"category": ..., "prompt": TEXT} (continued as it is) or {"category": ..., "messages": [...]} (the model's chat template).
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

import pyggml_spec as ps
from pyggml_spec.chat import chat_template

PLAIN, POLICY = "plain", "policy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", required=True)
    parser.add_argument("-md", required=True)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--drafts", default="2,4,8")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-t", type=int, default=1)
    parser.add_argument("--device", default="CPU")
    args = parser.parse_args()
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()]
    fixed, rows = [int(n) for n in args.drafts.split(",")], defaultdict(list)
    with ps.load(args.m, args.md, device=args.device, threads=args.t, n_ctx=2048) as session:
        template = chat_template(session)[0]
        print("costs in ms:", {k: round(v, 1) for k, v in (session.costs or {}).items()})
        for item in prompts:
            text = item["prompt"] if "prompt" in item else template.encode(session.tokenizer, item["messages"])
            texts = {}
            for way in (PLAIN, *fixed, POLICY, PLAIN):
                policy = session.engine.policy
                if isinstance(way, int):
                    session.engine.pin_width(way + 1)
                *parts, stats = session.generate(text, args.n, mode="plain" if way == PLAIN else "speculative")
                session.engine.policy = policy
                texts.setdefault(way, "".join(parts))
                rows[item["category"], way].append((stats.emitted - 1, stats.steps, stats.seconds["decode"]))
            different = [way for way in texts if texts[way] != texts[PLAIN]]
            print(
                item["category"],
                len(texts[PLAIN]),
                "characters;",
                f"texts of {different} differ" if different else "texts equal",
                flush=True,
            )
    print("| prompts | drafts | tokens per step | tokens per second | over plain | worst prompt |\n|---|---|---|---|---|---|")
    for category in dict.fromkeys(category for category, _ in rows):
        halves = rows[category, PLAIN]
        plain = [(a[0] + b[0]) / (a[2] + b[2]) for a, b in zip(halves[::2], halves[1::2])]
        for way in (PLAIN, *fixed, POLICY):
            found = rows[category, way]
            speeds = plain if way == PLAIN else [n / s for n, _, s in found]
            ratios = [speed / base for speed, base in zip(speeds, plain)]
            steps = sum(n for n, _, _ in found) / sum(k for _, k, _ in found)
            print(
                f"| {category} | {way} | {steps:.2f} | {statistics.mean(speeds):.1f} | {statistics.geometric_mean(ratios):.2f} | {min(ratios):.2f} |"
            )


if __name__ == "__main__":
    main()
