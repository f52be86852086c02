#!/usr/bin/env python3
"""Tokens per step of pyspec and of llama-server's draft-dflash on the same prompts, greedy, block 16. Counts only; no timing.

    acceptance_vs_llama_server.py --tools DIR [-m target.gguf -md drafter.gguf] [-n 128]
"""

import argparse
import json
import urllib.request
from pathlib import Path

import pyggml_spec as ps
from bench_vs_llamacpp import PORT, Server
from pyggml_spec.session import DEMO, DEMO_DRAFTER, DEMO_TARGET


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("-m", "--model", default=str(DEMO_TARGET))
    parser.add_argument("-md", "--model-draft", default=str(DEMO_DRAFTER))
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.jsonl")
    args = parser.parse_args()
    args.ngl, args.threads, args.ctx, args.synthetic_acceptance, args.out = 0, 1, 2048, None, Path("/tmp/acceptance.json")
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]

    server = Server(args, speculative=True)
    theirs = []
    for prompt in prompts:
        body = {"prompt": prompt, "n_predict": args.tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            reply = json.load(answer)
        timings = reply["timings"]
        steps = timings["predicted_n"] - timings["draft_n_accepted"] - 1
        theirs.append((steps, timings["draft_n_accepted"], reply["content"]))
    server.close()

    ours = []
    with ps.load(args.model, args.model_draft, device="CPU", threads=1, n_ctx=2048, draft_width=16) as session:
        for prompt in prompts:
            text, stats = session.generate(prompt, args.tokens, ignore_end=True)
            ours.append((stats.steps, stats.matched, text))
    same = sum(a[2] == b[2] for a, b in zip(ours, theirs))
    for name, rows in (("pyspec", ours), ("llama-server", theirs)):
        steps, matched = sum(r[0] for r in rows), sum(r[1] for r in rows)
        print(f"{name:<13} {steps} steps, {matched} drafts accepted, {(steps + matched) / steps:.4f} tokens per step")
    print(f"identical text on {same} of {len(prompts)} prompts; identical (steps, accepted) on {sum(a[:2] == b[:2] for a, b in zip(ours, theirs))}")


if __name__ == "__main__":
    main()
