#!/usr/bin/env python3
"""What a constraint costs, and what its forced tokens save: decoding with a JSON schema against decoding without, in alternation.

    bench_constraints.py [-m target.gguf [-md drafter.gguf]] [--device CPU] [-t 1] [--tokens 200] [--rounds 5] [--slots 8] [--synthetic-acceptance 6]

Tokens per second, the best of all rounds, and ratios: plain decoding with the schema with and without forced tokens; with a drafter, speculative
decoding with the schema and without (at a synthetic acceptance if asked for, as random weights accept nothing), and with --slots, that many
sequences of different schemas against as many without.
"""

import argparse
import json
import time

import pyggml_spec as ps
from pyggml_spec.decode.synthetic import SyntheticAcceptance

PROMPT = "def quicksort(items):\n    "
KEYS = ["the_name_of_the_function", "number_of_positional_arguments", "is_it_a_method_of_a_class", "the_type_that_it_returns"]


def schema(n: int) -> str:
    """An array without an end, of objects with long keys; another one for each ``n``."""
    one = {f"{key}_{n}" if n else key: {"type": "integer", "minimum": 0, "maximum": 9} for key in KEYS}
    return json.dumps(
        {
            "type": "array",
            "minItems": 10000,
            "items": {"type": "object", "properties": one, "required": list(one), "additionalProperties": False},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--device")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--synthetic-acceptance", type=float)
    args = parser.parse_args()
    with ps.load(args.model, draft=args.model_draft, device=args.device, threads=args.threads, n_ctx=1024) as session:
        constrained, free = ps.Sampling(temperature=0, json_schema=schema(0)), ps.Sampling(temperature=0)
        modes = {"plain": ("plain", free), "plain, schema, nothing forced": ("plain", constrained)}
        if session.drafter is None:
            modes["no drafter, schema, forced tokens"] = (None, constrained)
        else:
            modes |= {"speculative": (None, free), "speculative, schema": (None, constrained)}
        best = dict.fromkeys(modes, 0.0)
        last: dict = {}
        for _ in range(args.rounds):
            for name, (mode, sampling) in modes.items():
                accept = (
                    SyntheticAcceptance(args.synthetic_acceptance, session.engine.options.width - 1)
                    if args.synthetic_acceptance and mode is None and session.drafter
                    else None
                )
                _, stats = session.generate(
                    PROMPT, args.tokens, mode=mode, sampling=sampling, ignore_end=sampling is free, synthetic=accept
                )
                best[name], last[name] = max(best[name], stats.tokens_per_second), stats
        for name, speed in best.items():
            s = last[name]
            print(f"{name:36s} {speed:8.1f} tok/s, {s.tokens_per_step:.2f} per step, forced {s.forced_matched} of {s.forced}")
        names = list(modes)
        print(f"{names[-1]} / {names[-2]}: {best[names[-1]] / best[names[-2]]:.2f}")
        print(f"{names[-1]} / plain: {best[names[-1]] / best['plain']:.2f}")
        if args.slots:
            print(f"{args.slots} slots, schemas / none: {slots(session, args):.2f}")


def slots(session: ps.Session, args: argparse.Namespace) -> float:
    """Tokens per second of as many requests as slots, each with a schema of its own, over those without; the best of all rounds."""
    best = {True: 0.0, False: 0.0}
    with session.concurrent(slots=args.slots) as server:
        for _ in range(args.rounds):
            for constrained in (True, False):
                began = time.perf_counter()
                handles = [
                    server.submit(PROMPT, args.tokens, ignore_end=not constrained,
                                  sampling=ps.Sampling(temperature=0, json_schema=schema(n + 1) if constrained else None))
                    for n in range(args.slots)
                ]  # fmt: skip
                tokens = sum(handle.result()[1].emitted for handle in handles)
                best[constrained] = max(best[constrained], tokens / (time.perf_counter() - began))
    return best[True] / best[False]


if __name__ == "__main__":
    main()
