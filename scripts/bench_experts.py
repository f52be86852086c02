#!/usr/bin/env python3
"""Cost of expert placement on one device: tokens per second and hit rate by residency.

    bench_experts.py -m target.gguf -md drafter.gguf --device CUDA0 [--residency 0 0.25 0.5 0.75 1] [--text FILE] [--varied] --out FILE.json

Hot experts are chosen on the first part of ``--text`` (default: random tokens); residency 0 is full host placement. ``--varied`` compares milliseconds
per step by width for blocks after a repeated token and blocks of varied tokens.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import pyggml_spec as ps
from pyggml_spec.engine.options import candidate_widths
from pyggml_spec.ggml.library import versions
from pyggml_spec.models.placement import ExpertOptions
from pyggml_spec.tools.bench import BenchOptions, bench
from pyggml_spec.tools.experts import expert_bytes, profile


def load(args, experts: ExpertOptions | None, draft: bool = True):
    drafter = args.model_draft if draft else None
    return ps.load(
        args.model,
        drafter,
        device=args.device,
        threads=args.threads,
        n_ctx=args.ctx,
        draft_width=args.draft_width if draft else None,
        experts=experts,
    )


def make_profile(args, folder: Path) -> Path:
    with load(args, ExpertOptions(-1), draft=False) as session:
        if args.text:
            tokens = session.tokenizer.encode(args.text.read_text(errors="replace"), False)
        else:
            tokens = np.random.default_rng(0).integers(0, session.target.n_vocab, args.profile_tokens).tolist()
        routing = profile(session, tokens[: args.profile_tokens]).routing
    path = folder / "experts.json"
    path.write_text(routing.to_json())
    return path


def residencies(args) -> list[dict]:
    out = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_profile(args, Path(folder))
        for fraction in args.residency:
            with load(args, ExpertOptions(0, fraction, path)) as session:
                prompts = (args.prompt,) if args.prompt else ()
                options = BenchOptions(prompts, args.tokens, (0,), args.rounds, args.synthetic_acceptance, args.draft_width)
                rows = {row.test[: 2 if row.test[0] != "s" else 4]: row for row in bench(session, options)}
                found = {"residency": fraction, "expert_bytes": expert_bytes(session, fraction), "costs_ms": session.costs}
                found |= {name: statistics.median(row.runs) for name, row in rows.items()}
                found |= {
                    "hit_rate": rows["tg"].expert_hit_rate,
                    "spec_hit_rate": rows["spec"].expert_hit_rate,
                    "memory": session.runner.memory(),
                }
                out.append(found)
    base = next((row for row in out if row["residency"] == 0), None)
    print("| residency | hit rate | experts on the device | prompt tok/s | plain tok/s | speculative tok/s | against full host placement |")
    print("|---|---|---|---|---|---|---|")
    for row in out:
        hit = "-" if row["hit_rate"] is None else f"{100 * row['hit_rate']:.1f} %"
        gain = f"{row['tg'] / base['tg']:.2f}, {row['spec'] / base['spec']:.2f}" if base else "-"
        print(
            f"| {row['residency']} | {hit} | {row['expert_bytes'] / 2**30:.2f} GiB | {row.get('pp', 0):.0f} | {row['tg']:.1f} | {row['spec']:.1f} | {gain} |"
        )
    return out


def varying(args) -> list[dict]:
    """Interleaved steps of both kinds at every width: median milliseconds, and different tokens per block."""
    out, random = [], np.random.default_rng(0)
    print("| width | repeated token, ms | different tokens | varied tokens, ms | different tokens | ratio |\n|---|---|---|---|---|---|")
    with ps.load(args.model, args.model_draft, device=args.device, threads=args.threads, n_ctx=args.ctx, draft_width=16) as session:
        engine = session.runner
        for width in candidate_widths(session.runner.options.width):
            times, kinds = {False: [], True: []}, {False: [], True: []}
            engine.reset()
            engine.prefill([0] * 8)
            for i in range(24):
                varied = i % 2 == 1
                masks = random.integers(0, session.target.n_vocab, width - 1) if varied else None
                started = time.perf_counter()
                result = engine.fused_step(width, masks)
                times[varied].append(1000 * (time.perf_counter() - started))
                kinds[varied].append(len(set(result.tokens.tolist())))
                engine.accept(1, 0)
            same, varied = (statistics.median(times[kind][4:]) for kind in (False, True))
            counts = [statistics.median(kinds[kind]) for kind in (False, True)]
            print(f"| {width} | {same:.3f} | {counts[0]:g} | {varied:.3f} | {counts[1]:g} | {varied / same:.2f} |", flush=True)
            out.append({"width": width, "repeated_ms": same, "varied_ms": varied, "different_tokens": counts})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--model-draft", required=True)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-c", "--ctx", type=int, default=2048)
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-r", "--rounds", type=int, default=2)
    parser.add_argument("--residency", type=float, nargs="*", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--profile-tokens", type=int, default=4096)
    parser.add_argument("--synthetic-acceptance", type=float)
    parser.add_argument("--draft-width", type=int)
    parser.add_argument("--varied", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {"command": sys.argv, "versions": versions()}
    if args.varied:
        found["varied"] = varying(args)
    if args.residency:
        found["residency"] = residencies(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
