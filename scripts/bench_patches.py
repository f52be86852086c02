#!/usr/bin/env python3
"""llama-server before and after the patches on the same files and device: tokens per second, and contexts' counters per step.

    bench_patches.py --before DIR/bin --after DIR/bin -m target.gguf -md drafter.gguf [--slots 1,4] [--synthetic-acceptance 6] --out FILE.json

All servers stay up and compute in turn. Greedy, draft-dflash with 15 drafts, --backend-sampling; without -md plain, sampled on the host. Counters come from
/metrics of the patched server.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llama_server import LlamaServer, ServerEnded

PROMPT = 64  # tokens; each slot and each round begins differently


def complete(server: LlamaServer, seed: int, tokens: int, length: int = PROMPT) -> dict:
    prompt = [100 + (7 * i + 31 * seed) % 200 for i in range(length)]
    return server.post("/completion", prompt=prompt, n_predict=tokens, temperature=0, ignore_eos=True, cache_prompt=False)["timings"]


def server_round(server: LlamaServer, number: int, slots: int, tokens: int, length: int = PROMPT) -> dict[str, float]:
    """All slots at once, prompts of ``length`` tokens. ``tok/s``: tokens of all slots by the wall time, prompts included; ``decode tok/s``: the slots' own rates
    summed; ``prompt tok/s``: tokens of all prompts by the time until the last one's first token."""
    before, started = server.counters(), time.perf_counter()
    with ThreadPoolExecutor(slots) as pool:
        timings = list(pool.map(lambda slot: complete(server, number * slots + slot, tokens, length), range(slots)))
    seconds, after = time.perf_counter() - started, server.counters()
    figures = {"tok/s": sum(t["predicted_n"] for t in timings) / seconds, "decode tok/s": sum(t["predicted_per_second"] for t in timings)}
    figures["prompt tok/s"] = sum(t["prompt_n"] for t in timings) * 1000 / max(t["prompt_ms"] for t in timings)
    steps = max(after["steps"] - before["steps"], 1)
    figures["tokens/step"] = sum(t["predicted_n"] for t in timings) / steps
    return {**figures, **{f"{name}/step": (after[name] - before[name]) / steps for name in after if name != "steps"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--drafter")
    parser.add_argument("--slots", default="1,4")
    parser.add_argument("--synthetic-acceptance", type=float, default=6.0, help="mean tokens per step of the target; 0: the drafter's own")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--ctx", type=int, default=2048, help="per slot")
    parser.add_argument("--ngl", type=int, default=99)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", required=True)
    parser.add_argument("server_args", nargs="*", metavar="-- SERVER ARGUMENTS")
    args = parser.parse_args()

    results: dict[str, list[dict[str, float]]] = {}
    for slots in map(int, args.slots.split(",")):
        with contextlib.ExitStack() as stack:
            pair = []
            for name, tools in (("before", args.before), ("after", args.after)):
                log = Path(f"{args.out}.{name}-np{slots}.log")
                pair.append((name, stack.enter_context(LlamaServer(tools, log, *server_options(slots, args)))))
            for _, server in pair:
                server.wait()
                server_round(server, 0, slots, 64, args.prompt)
            for number in range(1, args.rounds + 1):
                for name, server in pair if number % 2 else reversed(pair):
                    results.setdefault(f"np {slots} {name}", []).append(server_round(server, number, slots, args.tokens, args.prompt))
        Path(args.out).write_text(json.dumps({"model": args.model, "drafter": args.drafter, "rounds": results}, indent=1))
        report(slots, results)


def server_options(slots: int, args) -> list[object]:
    options = ["-m", args.model, "-np", slots, "-c", args.ctx * slots, "-ngl", args.ngl, "-fa", "on", "--metrics"]
    if args.drafter:
        options += ["-md", args.drafter, "--spec-type", "draft-dflash", "--spec-draft-n-max", 15, "-ngld", args.ngl, "--backend-sampling"]
    # disables copying of slot states to the host, which is not compared
    options += ["--ctx-checkpoints", 0, "--cache-ram", 0, *args.server_args]
    if args.drafter and args.synthetic_acceptance:
        options += ["--spec-synth-len", args.synthetic_acceptance]
    if args.threads:
        options += ["-t", args.threads, "-td", args.threads]
    return options


def report(slots: int, results: dict[str, list[dict[str, float]]]) -> None:
    before, after = results[f"np {slots} before"], results[f"np {slots} after"]
    print(f"\nnp {slots}, medians of {len(after)} rounds{'':<14} {'before':>12} {'after':>12} {'ratio':>7}")
    for name in after[0]:
        new = statistics.median(r[name] for r in after)
        old = statistics.median(r[name] for r in before) if name in before[0] else None
        if old or new:
            print(f"{name:<44} {'-' if old is None else f'{old:.2f}':>12} {new:>12.2f} {f'{new / old:.2f}' if old else '':>7}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ServerEnded as why:
        sys.exit(str(why))
