#!/usr/bin/env python3
"""Random-weight models of real shapes: written, measured against llama.cpp's tools, deleted.

    bench_architectures.py --tools DIR --device CUDA0 [--models 35B-A3B gemma4-31B ...] [--budget 240] --out docs/benchmarks

Each model gets ``--budget`` seconds. Every finished model writes ``<label>-<model>-<quant>.json`` (as ``bench_vs_llamacpp.py``) and updates
``<label>-architectures.md``.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from make_random_gguf import DRAFTERS, MODELS, write_pair

DEFAULT = ("35B-A3B", "gemma4-26B-A4B", "laguna-XS.2", "gemma4-31B", "qwen3-8B", "llama-8B")
TESTS = {"pp512": "prompt, 512 tokens", "pp4096": "prompt, 4096 tokens", "tg128": "plain decoding", "spec": "DFlash"}


def run_within(command: list[str], seconds: float, log: Path) -> str:
    """Runs ``command`` with everything that it starts, for so long at most. Returns why it did not succeed, or nothing."""
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            return f"not finished within its budget; see {log.name}"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    return f"ended with {code}: {lines[-1]}" if code else ""


def measure(name: str, args, out: Path) -> str:
    """Writes the pair, measures it, deletes it. Returns why there are no figures, or nothing."""
    started = time.monotonic()
    pair = write_pair(name, args.quant, args.models_dir, args.layers, args.drafter)
    print(f"{name}: written in {time.monotonic() - started:.0f} s, {sum(p.stat().st_size for p in pair) / 1e9:.1f} GB", flush=True)
    script = Path(__file__).with_name("bench_vs_llamacpp.py")
    command = [sys.executable, str(script), "--tools", str(args.tools), "-m", str(pair[0]), "-md", str(pair[1]), "--device", args.device]
    command += ["--synthetic-acceptance", str(args.synthetic_acceptance), "-r", str(args.rounds), "-n", str(args.tokens), "--out", str(out)]
    command += ["-p", args.prompts, "--n-cpu-moe", str(args.n_cpu_moe)] + (["-t", str(args.threads)] if args.threads else [])
    command += ["--again"] if args.again else []
    command += ["--host-layers", str(args.host_layers)] + (["--offload-prompts", args.offload_prompts] if args.offload_prompts else [])
    try:
        return run_within(command, args.budget - (time.monotonic() - started), args.models_dir / f"{name}.log")
    finally:
        log = out.with_suffix(".server.log")
        if log.exists():
            log.replace(args.models_dir / log.name)
        if not args.keep:
            for path in pair:
                path.unlink()


def table(files: dict[str, Path], failed: dict[str, str], args) -> str:
    """The markdown page of what has been measured so far."""
    lines = [f"# Architectures on {args.device}, {args.quant}, synthetic acceptance {args.synthetic_acceptance:g}", ""]
    lines += ["Random weights of real shapes; medians of interleaved rounds, tokens per second. The command is in each JSON file.", ""]
    lines += ["| model | test | llama.cpp | pyspec | ratio | pyspec ms/step | tokens/step | replayed |", "|" + "---|" * 8]
    notes = [f"* {name}: {why}" for name, why in failed.items()]
    costs = []
    for name, path in files.items():
        data = json.loads(path.read_text())
        rows = {("spec" if r["test"].startswith("spec") else "tg128" if r["test"].startswith("tg") else r["test"]): r for r in data["rows"]}
        for test, runs in data["figures"]["pyspec"].items():
            ours, theirs, row = statistics.median(runs), data["figures"]["llama.cpp"].get(test), rows[test]
            theirs = statistics.median(theirs) if theirs else None
            cells = [
                name,
                TESTS.get(test, test),
                f"{theirs:.1f}" if theirs else "-",
                f"{ours:.1f}",
                f"{ours / theirs:.2f}" if theirs else "-",
            ]
            cells += [f"{row['ms_per_step']:.2f}", f"{row['tokens_per_step']:.2f}"] if row["ms_per_step"] else ["", ""]
            cells.append(f"{100 * row['replay_rate']:.0f} %" if row["replay_rate"] is not None else "")
            lines.append(f"| {' | '.join(cells)} |")
        costs.append(f"| {name} | " + ", ".join(f"{width}: {ms:.2f}" for width, ms in (data["costs_ms"] or {}).items()) + " |")
        notes += [f"* {name}: {note}" for note in data["notes"]]
    lines += ["", "Milliseconds per step by width (1 is plain decoding):", "", "| model | width: ms |", "|---|---|", *costs]
    return "\n".join(lines + ([""] if notes else []) + notes) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True, help="folder with llama-bench and llama-server")
    parser.add_argument("--models", nargs="+", default=DEFAULT, choices=MODELS, metavar="MODEL")
    parser.add_argument("--quant", default="Q4_K")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--budget", type=float, default=240, help="seconds per model")
    parser.add_argument("--synthetic-acceptance", type=float, default=6)
    parser.add_argument("-r", "--rounds", type=int, default=2)
    parser.add_argument("-n", "--tokens", type=int, default=512)
    parser.add_argument("-p", "--prompts", default="512,4096")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--n-cpu-moe", type=int, default=0, help="layers whose experts are in host memory, in every leg")
    parser.add_argument("--host-layers", type=int, default=0, help="layers on the CPU, in every leg")
    parser.add_argument("--offload-prompts", metavar="ROWS", help="of pyspec; auto or a number")
    parser.add_argument("--layers", type=int, help="layers of each target (default: as published)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="dflash")
    parser.add_argument("--again", action="store_true", help="also a text that was written before, with `--spec-type suffix`")
    parser.add_argument("--models-dir", type=Path, default=Path("models"))
    parser.add_argument("--keep", action="store_true", help="leave the model files there")
    parser.add_argument("--label", default="h200")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files, failed = {}, {}
    for name in args.models:
        out = args.out / f"{args.label}-{name}-{args.quant}.json"
        why = measure(name, args, out)
        if why:
            failed[name] = why
        else:
            files[name] = out
        page = table(files, failed, args)
        (args.out / f"{args.label}-architectures.md").write_text(page)
        print(page if name == args.models[-1] else failed.get(name, f"{name}: measured"), flush=True)


if __name__ == "__main__":
    main()
