#!/usr/bin/env python3
"""Milliseconds per step on a GPU by library switches: one process per set of switches, in alternating rounds.

    bench_steps.py -m target.gguf -md drafter.gguf [--device CUDA0] [--widths 1,2,4,8,16] [--rounds 5] [--steps 40] \\
        --with "" --with "GGML_CUDA_PREFETCH=0" [--out FILE.json]

Width 1 is plain decoding; others draft, verify and commit. Per width: the median step, and the extremes of the rounds' medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pyggml_spec as ps


def serve(args) -> None:
    """Answers rounds: a width comes in as a line, milliseconds of its steps go out."""
    widths = [int(width) for width in args.widths.split(",")]
    with ps.load(
        args.model, args.model_draft, device=args.device, n_ctx=1024, draft_width=max(widths) if args.model_draft else None
    ) as session:
        engine = session.runner
        for line in sys.stdin:
            width, out = int(line), []
            engine.reset(drafting=width > 1)
            engine.prefill(list(range(1, 33)))
            for _ in range(args.steps + 4):
                started = time.perf_counter()
                result = engine.plain_step() if width == 1 else engine.fused_step(width)
                engine.accept(1, int(result.ids[0]))
                out.append(1000 * (time.perf_counter() - started))
            print(json.dumps(out[4:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--widths", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--with", dest="sets", action="append", metavar="NAME=VALUE ...", help="switches of one leg; empty: none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    sets = args.sets or [""]
    legs = []
    for switches in sets:
        env = os.environ | dict(part.split("=", 1) for part in switches.split())
        command = [sys.executable, __file__, *sys.argv[1:], "--serve"]
        legs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))
    figures: dict[str, dict[str, list[list[float]]]] = {switches: {} for switches in sets}
    for _ in range(args.rounds):
        for width in args.widths.split(","):
            for switches, leg in zip(sets, legs, strict=True):
                assert leg.stdin is not None and leg.stdout is not None
                leg.stdin.write(width + "\n")
                leg.stdin.flush()
                answer = leg.stdout.readline()
                if not answer:
                    sys.exit(f"the leg with {switches or 'no switches'} ended with {leg.wait()}")
                figures[switches].setdefault(width, []).append(json.loads(answer))
    for leg in legs:
        assert leg.stdin is not None
        leg.stdin.close()
        leg.wait()
    print("ms per step, rows " + "".join(f"{width:>22}" for width in args.widths.split(",")))
    for switches, widths in figures.items():
        cells = []
        for rounds in widths.values():
            medians = [statistics.median(one) for one in rounds]
            cells.append(f"{statistics.median(chain.from_iterable(rounds)):.3f} ({min(medians):.3f} {max(medians):.3f})")
        print(f"{switches or 'no switches':18}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"model": Path(args.model).name, "steps": args.steps, "ms": figures}) + "\n")


if __name__ == "__main__":
    main()
