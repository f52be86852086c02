#!/usr/bin/env python3
"""Counts what llama.cpp's `--draft-p-min` would change for a chain of drafts: which drafts it would leave out, and how many tokens a step would give.

Only counts, so that a busy machine does not matter. With the milliseconds of a pass and of verifications of 1, 2, ... rows it says those per token, too:

    scripts/count_p_min.py -m target.gguf -md small.gguf --prompts docs/benchmarks/draft-simple-prompts.jsonl --pass-ms 9 --verify-ms 29.5,31.1,38.3,35.3,59.1,54.2,62,70.1,80
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import pyggml_spec as ps
from pyggml_spec.chat import chat_template

TOP = 10  # logits that llama.cpp's drafting sampler takes the softmax of
P_MIN = 0.0, 0.3, 0.5, 0.75, 0.9
Steps = list[tuple[int, list[float]]]


def count(session: Any, prompts: list[list[int]], tokens: int) -> Steps:
    """Of each step: how many drafts are right, and the probability of each."""
    engine, drafter, kept, steps, ran = session.runner, session.drafter, [], Steps(), []
    original, run = drafter.logits, engine.run

    def running(step: Any, *args: Any, **more: Any) -> Any:
        """Other graphs are built meanwhile."""
        ran.append(step.graph)
        return run(step, *args, **more)

    def logits(g: Any, hidden: Any, target: Any) -> Any:
        node = original(g, hidden, target)
        g.keep_output(node)
        kept.append((g, node))
        return node

    engine.graphs.drop("fused")
    drafter.logits, engine.run = logits, running
    for prompt in prompts:
        engine.reset()
        engine.prefill(prompt)
        done = 0
        while done < tokens:
            result = engine.fused_step()
            drafts, ids, graph = result.tokens[1:].tolist(), result.ids.tolist(), ran[-1]
            rows = [graph.host_view(node)[0].astype(np.float64) for g, node in kept if g is graph][-len(drafts) :]
            tops = [np.sort(row)[-TOP:] for row in rows]
            right = next((i for i, (a, b) in enumerate(zip(drafts, ids)) if a != b), len(drafts))
            steps.append((right, [float(1 / np.exp(top - top[-1]).sum()) for top in tops]))
            engine.accept(right + 1, ids[right])
            done += right + 1
            if session.tokenizer.is_end(ids[right]):
                break
    return steps


def table(steps: Steps, pass_ms: float, verify_ms: list[float]) -> None:
    """A row for each number of drafts and each p-min."""
    print("| drafts at most | p-min | tokens per step | drafts verified | right | ms per token, stops | two graphs |\n|" + "---|" * 7)
    for most in (n for n in (2, 3, 4, 5, 8) if n <= len(steps[0][1])):
        for least in P_MIN:
            sure = [next((i for i, p in enumerate(ps[:most]) if p < least), most) for _, ps in steps]
            tokens, drafted = sum(min(right, n) + 1 for (right, _), n in zip(steps, sure)), sum(sure)
            cells = [
                most,
                least,
                f"{tokens / len(steps):.2f}",
                f"{drafted / len(steps):.2f}",
                f"{(tokens - len(steps)) / max(drafted, 1):.2f}",
            ]
            if verify_ms:
                verify, passes = sum(verify_ms[n] for n in sure), sum(min(n + 1, most) if least else most for n in sure)
                cells += [f"{(verify + pass_ms * n) / tokens:.1f}" for n in (passes, most * len(steps))]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", required=True, type=Path)
    parser.add_argument("-md", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path, help="as of scripts/bench_drafter.py")
    parser.add_argument("-n", type=int, default=60, help="tokens of each prompt")
    parser.add_argument("-t", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--pass-ms", type=float, default=0.0)
    parser.add_argument("--verify-ms", default="", help="of 1, 2, ... rows, up to one more than the drafts")
    args = parser.parse_args()
    os.environ["PYSPEC_KEEP_DRAFTS"] = "0"
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()]
    verify_ms = [float(ms) for ms in args.verify_ms.split(",") if ms]
    if verify_ms and len(verify_ms) <= args.drafts:
        parser.error(f"--verify-ms has {len(verify_ms)} numbers; {args.drafts} drafts take {args.drafts + 1}")
    with ps.load(args.m, args.md, device="CPU", threads=args.t, n_ctx=2048, draft_width=args.drafts + 1) as session:
        template = chat_template(session)[0]
        texts = [line["prompt"] if "prompt" in line else template.encode(session.tokenizer, line["messages"]) for line in lines]
        steps = count(session, [session.prompt_ids(text) for text in texts], args.n)
    print(f"{len(steps)} steps of {args.drafts} drafts\n")
    table(steps, args.pass_ms, verify_ms)


if __name__ == "__main__":
    main()
