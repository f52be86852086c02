#!/usr/bin/env python3
"""Several sequences at once, pyspec against llama-server -np N: DFlash tokens per second of all of them together, and device memory.

    bench_slots_vs_llamacpp.py --tools DIR -m target.gguf -md drafter.gguf --device CUDA0 [--slots 1,2,4,8] --out FILE.json

For each number of slots both have the model loaded and take turns: server, pyspec, pyspec, server, ... The server gets one client per slot, all
at once, greedy, 15 drafts, --backend-sampling; its figure is the sum of its slots' own decoding rates, so that prompts cost neither side anything.
Memory is what the device reports: what llama-server takes from start to the first answers; for pyspec what a number of slots takes on top of the
loaded pair, weights apart.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from bench_patches import server_options, server_round
from bench_vs_llamacpp import DRAFTER_ROWS, device_memory_used
from llama_server import LlamaServer, ServerEnded

import pyggml_spec as ps
from pyggml_spec.ggml.library import versions
from pyggml_spec.tools.bench import BenchOptions
from pyggml_spec.tools.bench_slots import bench_slots, tokens_needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True, help="folder of llama-server")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--drafter", required=True)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--slots", default="1,2,4,8")
    parser.add_argument("--synthetic-acceptance", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ctx", type=int, default=4096, help="per slot")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--no-backend-sampling", action="store_true", help="llama-server samples on the host: with 16 slots and drafts it ends otherwise"
    )
    parser.add_argument("server_args", nargs="*", metavar="-- SERVER ARGUMENTS")
    args = parser.parse_args()
    args.ngl = 0 if args.device == "CPU" else 99
    options = BenchOptions(prompts=(), tokens=args.tokens, repetitions=1, synthetic=args.synthetic_acceptance)
    args.ctx = max(args.ctx, tokens_needed(options))
    results = []
    with ps.load(args.model, args.drafter, device=args.device, n_ctx=args.ctx, threads=args.threads or None, **DRAFTER_ROWS) as session:
        for slots in map(int, args.slots.split(",")):
            before = device_memory_used(args.device)
            told = [o for o in server_options(slots, args) if o != "--backend-sampling" or not args.no_backend_sampling]
            with LlamaServer(args.tools, Path(f"{args.out}.np{slots}.log"), *told) as server:
                server.wait()
                server_round(server, 0, slots, 64)
                results.append(measure(session, server, options, args, slots, device_memory_used(args.device) - before))
            print(row(results[-1]), flush=True)
            args.out.write_text(json.dumps({"versions": versions(), "command": sys.argv, "rows": results}, indent=1) + "\n")


def measure(session: ps.Session, server: LlamaServer, options: BenchOptions, args, slots: int, server_bytes: int) -> dict:
    theirs, ours, plain, last = [], [], [], None

    def turn() -> None:
        nonlocal last
        rows = {r.test[:2]: r for r in bench_slots(session, (slots,), options)}
        last = rows["sp"]
        ours.append(last.mean)
        plain.append(rows["tg"].mean)

    for number in range(1, args.rounds + 1):
        for side in ("server", "ours") if number % 2 else ("ours", "server"):
            if side == "ours":
                turn()
            else:
                theirs.append(server_round(server, number, slots, args.tokens)["decode tok/s"])
    return {
        "slots": slots, "llama-server": theirs, "pyspec": ours, "pyspec plain": plain, "ms_per_step": last.ms_per_step, "widths": last.widths,
        "tokens_per_step": last.tokens_per_step, "rows_used": last.used, "slot_bytes": last.slot_bytes, "compute_bytes": last.compute_bytes,
        "server_bytes": server_bytes,
    }  # fmt: skip


def row(r: dict) -> str:
    theirs, ours = statistics.median(r["llama-server"]), statistics.median(r["pyspec"])
    return (
        f"slots {r['slots']}: llama-server {theirs:.1f} tok/s, {r['server_bytes'] >> 20} MiB | pyspec {ours:.1f} tok/s ({ours / theirs:.2f}x), plain "
        f"{statistics.median(r['pyspec plain']):.1f}, {r['ms_per_step']:.2f} ms per step, {r['tokens_per_step']:.2f} tokens, widths {r['widths']}, "
        f"{r['slot_bytes'] >> 20} MiB per slot, compute {r['compute_bytes'] >> 20} MiB"
    )


if __name__ == "__main__":
    try:
        main()
    except ServerEnded as why:
        sys.exit(str(why))
