#!/usr/bin/env python3
"""Cost of a constraint and gain of jump-forward: decoding with a JSON schema against decoding without, alternating.

    bench_constraints.py [-m target.gguf [-md drafter.gguf]] [--device CPU] [-t 1] [--tokens 200] [--rounds 5] [--slots 8]
                         [--synthetic-acceptance 6] [--schema keys|strings] [--draft-width W] [--forced] [--processor-time]

Tokens per second (best round) and ratios: without a constraint, with the schema, with the schema and forced tokens; with a drafter, speculative decoding
without and with the schema, at a synthetic acceptance if given. --slots: sequences of different schemas against as many without.
Schemas: "keys" is mostly forced, "strings" mostly free text. --processor-time measures CPU time, for busy machines.
"""

import argparse
import json
import time

import pyggml_spec as ps
from pyggml_spec.engine.engine import Engine, generate
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.engine.stats import Stats
from pyggml_spec.speculation.synthetic import SyntheticAcceptance

PROMPT = "def quicksort(items):\n    "
KEYS = ["the_name_of_the_function", "number_of_positional_arguments", "is_it_a_method_of_a_class", "the_type_that_it_returns"]


def schema(n: int, kind: str) -> str:
    """An array without an end, of objects; another one for each ``n``."""
    value: dict = (
        {"type": "integer", "minimum": 0, "maximum": 9} if kind == "keys" else {"type": "string", "minLength": 40, "maxLength": 400}
    )
    one = {f"{key}_{n}" if n else key: value for key in (KEYS if kind == "keys" else KEYS[:1])}
    item = {"type": "object", "properties": one, "required": list(one), "additionalProperties": False}
    return json.dumps({"type": "array", "minItems": 10000, "items": item})


class Bench:
    """One loaded pair."""

    def __init__(self, session: ps.Session, args: argparse.Namespace) -> None:
        self.session, self.args = session, args
        self.clock = time.process_time if args.processor_time else time.perf_counter
        self.width = session.runner.options.width
        self.prompt = session.tokenizer.encode(PROMPT)

    def alone(self, mode: str, constrained: bool, forced: bool) -> tuple[float, Stats]:
        """Tokens per second after the first token, and the statistics."""
        args, session, stats = self.args, self.session, Stats()
        sampling = ps.Sampling(temperature=0, json_schema=schema(0, args.schema)) if constrained else None
        sampler = session._sampler(sampling, False) if sampling is not None else None
        synthetic = (
            SyntheticAcceptance(args.synthetic_acceptance, self.width - 1) if args.synthetic_acceptance and mode == SPECULATIVE else None
        )
        options = GenerationOptions(
            args.tokens, mode, self.width, ignore_end=not constrained, synthetic=synthetic, sampler=sampler, jump_forward=forced
        )
        session.runner.reset(drafting=mode == SPECULATIVE)
        blocks = generate(session.runner, self.prompt, options, stats)
        next(blocks)
        began = self.clock()
        tokens = sum(len(block) for block in blocks)
        spent = self.clock() - began
        if sampler is not None:
            sampler.close()
        return tokens / spent, stats

    def slots(self, scheduler: Engine, constrained: bool, repetition: int) -> float:
        """Tokens per second of as many sequences as slots, each with a schema of its own, once all of them decode."""
        args, session, streams, samplers = self.args, self.session, [], []
        mode = SPECULATIVE if session.drafter is not None else PLAIN
        for i in range(args.slots):
            sampling = ps.Sampling(temperature=0, json_schema=schema(i + 1, args.schema)) if constrained else None
            samplers.append(session._sampler(sampling, False))
            synthetic = (
                SyntheticAcceptance(args.synthetic_acceptance, self.width - 1, repetition * args.slots + i)
                if args.synthetic_acceptance
                else None
            )
            options = GenerationOptions(
                1000, mode, ignore_end=not constrained, synthetic=synthetic, sampler=samplers[-1], jump_forward=args.forced
            )
            streams.append(scheduler.submit(self.prompt, options))
        while not all(stream.tokens for stream in streams):
            scheduler.step()
        if not repetition:
            scheduler.learn_widths()
        before, began = scheduler.stats.emitted, self.clock()
        while scheduler.stats.emitted - before < args.slots * args.tokens and not any(stream.ended for stream in streams):
            scheduler.step()
        speed = (scheduler.stats.emitted - before) / (self.clock() - began)
        scheduler.cancel_all()
        for sampler in samplers:
            if sampler is not None:
                sampler.close()
        return speed


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
    parser.add_argument("--schema", choices=("keys", "strings"), default="keys")
    parser.add_argument("--draft-width", type=int)
    parser.add_argument("--forced", action="store_true", help="with slots, use forced tokens")
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    options = {"n_ctx": 2048} | ({"draft_width": args.draft_width} if args.draft_width else {})
    with ps.load(args.model, draft=args.model_draft, device=args.device, threads=args.threads, **options) as session:
        bench = Bench(session, args)
        runs = {"plain": (PLAIN, False, False), "plain, schema": (PLAIN, True, False), "plain, schema, forced tokens": (PLAIN, True, True)}
        if session.drafter is not None:
            runs |= {
                "speculative": (SPECULATIVE, False, False),
                "speculative, schema": (SPECULATIVE, True, False),
                "speculative, schema, forced tokens": (SPECULATIVE, True, True),
            }
        best, last = dict.fromkeys(runs, 0.0), {}
        for _ in range(args.rounds):
            for name, what in runs.items():
                speed, stats = bench.alone(*what)
                best[name], last[name] = max(best[name], speed), stats
        for name, speed in best.items():
            s, without = last[name], "speculative" if name.startswith("spec") else "plain"
            print(f"{name:36s} {speed:8.1f} tok/s, {speed / best[without]:.2f} of {without}, {s.tokens_per_step:.2f} per step, "
                  f"forced {s.forced_matched} of {s.forced}, reads {s.read_bytes / max(1, s.steps) / 1024:.0f} KiB a step")  # fmt: skip
        if args.slots:
            with session.batch(args.slots) as scheduler:
                if args.draft_width:
                    scheduler.pin_width(args.draft_width)
                pairs = [(bench.slots(scheduler, False, i), bench.slots(scheduler, True, i)) for i in range(args.rounds + 1)][1:]
            none, schemas = (max(speeds) for speeds in zip(*pairs))
            print(f"{args.slots} slots: with schemas {schemas:.1f} tok/s, without {none:.1f}: {schemas / none:.2f}")


if __name__ == "__main__":
    main()
