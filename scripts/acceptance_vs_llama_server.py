#!/usr/bin/env python3
"""Tokens per step of pyspec and of llama-server's draft-dflash on the same prompts, greedy, block 16. Counts only; no timing.

acceptance_vs_llama_server.py --tools DIR [-m target.gguf -md drafter.gguf] [-n 128]
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench_vs_llamacpp import server_options
from llama_server import LlamaServer, ServerEnded

import pyggml_spec as ps
from pyggml_spec.loading import DEMO, DEMO_DRAFTER, DEMO_TARGET


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("-m", "--model", default=str(DEMO_TARGET))
    parser.add_argument("-md", "--model-draft", default=str(DEMO_DRAFTER))
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.jsonl")
    args = parser.parse_args()
    args.ngl, args.threads, args.ctx, args.n_cpu_moe, args.method = 0, 1, 2048, 0, "draft-dflash"
    args.rates, args.synthetic_acceptance = [], None
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]

    theirs = []
    with TemporaryDirectory() as folder, LlamaServer(args.tools, Path(folder) / "server.log", *server_options(args, 15)) as server:
        server.wait()
        for prompt in prompts:
            reply = server.post("/completion", prompt=prompt, n_predict=args.tokens, temperature=0, ignore_eos=True, cache_prompt=False)
            timings = reply["timings"]
            steps = timings["predicted_n"] - timings["draft_n_accepted"] - 1
            theirs.append((steps, timings["draft_n_accepted"], reply["content"]))

    ours = []
    with ps.load(args.model, args.model_draft, device="CPU", threads=1, n_ctx=2048, draft_width=16) as session:
        for prompt in prompts:
            text, stats = session.generate(prompt, args.tokens, ignore_end=True)
            ours.append((stats.steps, stats.matched, text))
    same = sum(a[2] == b[2] for a, b in zip(ours, theirs))
    for name, rows in (("pyspec", ours), ("llama-server", theirs)):
        steps, matched = sum(r[0] for r in rows), sum(r[1] for r in rows)
        print(f"{name:<13} {steps} steps, {matched} drafts accepted, {(steps + matched) / steps:.4f} tokens per step")
    print(
        f"identical text on {same} of {len(prompts)} prompts; identical (steps, accepted) on {sum(a[:2] == b[:2] for a, b in zip(ours, theirs))}"
    )


if __name__ == "__main__":
    try:
        main()
    except ServerEnded as why:
        sys.exit(str(why))
