#!/usr/bin/env python3
"""pyspec against llama.cpp's tools on the same files and device, interleaved.

    bench_vs_llamacpp.py --tools DIR -m target.gguf -md drafter.gguf --device CUDA0 [--synthetic-acceptance 6] --out FILE.json
    bench_vs_llamacpp.py --tools DIR -m target-with-mtp.gguf --rates 0.85,0.7,0.55,0.45 --device CUDA0 --out FILE.json

Legs: llama-bench (prompt and plain decoding), llama-server with draft-dflash (block 16, --spec-draft-n-max 15, greedy, --backend-sampling), pyspec.
Without -md the target's MTP layer drafts; it and a whole small model (-md) with one llama-server per number of drafts of --n-max, of which the fastest
one counts. --n-cpu-moe and --host-layers keep weights in host memory in every leg; --offload-prompts enables weight streaming. --rates: acceptance of each draft position,
for both. Prints medians and writes every figure; a leg that llama-server cannot run is omitted with the reason.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llama_server import LlamaServer, ServerEnded, environment

import pyggml_spec as ps
from pyggml_spec.engine.engine import generate
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.engine.stats import Stats
from pyggml_spec.ggml.library import versions
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.placement import ExpertOptions
from pyggml_spec.models.registry import open_target
from pyggml_spec.tools.bench import BenchOptions, bench, leg_name

PROMPT = [100 + 7 * i % 200 for i in range(64)]
DRAFTER_ROWS = {"draft_cache_type_k": "f16", "draft_cache_type_v": "f16"}  # as llama-server has them by default


def llama_bench(args, prompts: list[int], tokens: int, more: Sequence[object] = ()) -> dict[str, float]:
    """One llama-bench run: tokens per second by test name, the best where options in ``more`` have several values."""
    command = [str(args.tools / "llama-bench"), "-m", args.model, "-fa", "1", "-ngl", str(args.ngl), "-r", "2", "-o", "json"]
    command += ["-p", ",".join(map(str, prompts)), "-n", str(tokens), *map(str, more)]
    if args.threads:
        command += ["-t", str(args.threads)]
    if args.n_cpu_moe:
        command += ["-ncmoe", str(args.n_cpu_moe)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(args.tools))
    if done.returncode:
        sys.exit(f"llama-bench failed: {done.stderr[-2000:]}")
    best: dict[str, float] = {}
    for row in json.loads(done.stdout):
        name = leg_name(f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}", row.get("n_depth", 0))
        best[name] = max(row["avg_ts"], best.get(name, 0.0))
    return best


def server_options(args, drafts: int) -> list[object]:
    options = [
        "-m",
        args.model,
        "-fa",
        "on",
        "-ngl",
        args.ngl,
        "-np",
        1,
        "-c",
        args.ctx,
        "--backend-sampling",
        "--spec-draft-n-max",
        drafts,
    ]
    options += ["--spec-type", args.method]
    if args.model_draft:
        options += ["-md", args.model_draft, "-ngld", args.ngl]
    if args.threads:
        options += ["-t", args.threads]
    if args.n_cpu_moe:
        options += ["--n-cpu-moe", args.n_cpu_moe]
    if args.rates:
        options += ["--spec-synth-rates", ",".join(map(str, (args.rates + [0.0] * drafts)[:drafts]))]
    elif args.synthetic_acceptance:
        options += ["--spec-synth-len", args.synthetic_acceptance]
    return options


def serving(args, stack: contextlib.ExitStack, notes: list[str]) -> dict[str, LlamaServer]:
    """A llama-server that drafts, by the name of its leg; MTP has one for each number of drafts."""
    out = {}
    blocks = args.method == "draft-dflash"
    for drafts in [15] if blocks else args.n_max:
        name = "spec" if blocks else f"spec n={drafts}"
        try:
            server = stack.enter_context(
                LlamaServer(args.tools, args.out.with_suffix(f".server{drafts}.log"), *server_options(args, drafts))
            )
            server.wait()
            complete(server, 8)  # some pairs end it only when they draft
            out[name] = server
        except ServerEnded as why:
            notes.append(f"{name}: {why}")
    return out


def complete(server: LlamaServer, tokens: int) -> dict:
    return server.post("/completion", prompt=PROMPT, n_predict=tokens, temperature=0, ignore_eos=True, cache_prompt=False)["timings"]


def again(args, device: str, more: dict) -> str:
    """A repeated text, plain and with n-gram drafts (`--spec-type suffix`), alternating: tokens per second."""
    speeds: dict[str, list[float]] = {PLAIN: [], SPECULATIVE: []}
    texts, drafted = [], []
    with ps.load(args.model, device=device, threads=args.threads, n_ctx=args.ctx, spec=["suffix"], **more) as session:
        for at in range(args.rounds + 1):  # the first one writes it
            for mode, runs in speeds.items():
                text, stats = session.generate(PROMPT, args.tokens, mode=mode, ignore_end=True)
                if at:
                    runs.append(stats.tokens_per_second)
                    texts.append(text)
                    drafted += [stats.tokens_per_step] if mode == SPECULATIVE else []
    plain, suffix = (statistics.median(runs) for runs in speeds.values())
    return (
        f"written again: plain {plain:.1f}, suffix {suffix:.1f}, {suffix / plain:.2f}, {statistics.median(drafted):.1f} tokens per step, "
        f"{'one text' if len(set(texts)) == 1 else f'{len(set(texts))} texts of {len(texts)}'}"
    )


def device_memory_used(device: str) -> int:
    d = next(d for d in ps.devices() if d.name == device)
    return d.memory_total - d.memory_free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-c", "--ctx", type=int, default=4608)
    parser.add_argument("-n", "--tokens", type=int, default=256)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("-p", "--prompts", default="512,4096")
    parser.add_argument("--synthetic-acceptance", type=float)
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=[])
    parser.add_argument("--n-max", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4])
    parser.add_argument("--draft-width", type=int)
    parser.add_argument("--n-cpu-moe", type=int, default=0, help="layers whose experts are in host memory, in every leg")
    parser.add_argument("--host-layers", type=int, default=0, help="first layers, on the CPU, in every leg")
    parser.add_argument("--offload-prompts", type=lambda text: text if text == "auto" else int(text), help="as of pyspec: ROWS or auto")
    parser.add_argument("--again", action="store_true", help="also a text that was written before, plainly and with `--spec-type suffix`")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with GGUFFile(args.model) as file:
        n_layer = open_target(file).n_layer
    args.ngl = 0 if args.device == "CPU" else n_layer + 1 - args.host_layers if args.host_layers else 99  # the head counts as a layer
    prompts = [int(p) for p in args.prompts.split(",")]
    args.out.parent.mkdir(parents=True, exist_ok=True)

    figures: dict[str, dict[str, list[float]]] = {"llama.cpp": {}, "pyspec": {}}

    def add(who: str, test: str, value: float) -> None:
        figures[who].setdefault(test, []).append(value)

    used = [device_memory_used(args.device)]
    more = {"experts": ExpertOptions(args.n_cpu_moe)} if args.n_cpu_moe else {}
    more["offload_prompts"] = args.offload_prompts
    device = args.device
    if args.host_layers:
        device, more["tensor_split"] = f"CPU,{args.device}", [args.host_layers, n_layer - args.host_layers]
    sizes = {"n_ctx": args.ctx, "draft_width": args.draft_width}
    session = ps.load(args.model, args.model_draft, device=device, threads=args.threads, **sizes, **DRAFTER_ROWS, **more)
    args.method = session.drafter.methods[0].method if session.drafter is not None else "draft-mtp"
    used.append(device_memory_used(args.device))
    notes, rows = list(session.notes), []
    with session, contextlib.ExitStack() as stack:
        servers = serving(args, stack, notes)
        used.append(device_memory_used(args.device))
        for _ in range(args.rounds):
            for test, value in llama_bench(args, prompts, 128).items():
                add("llama.cpp", test, value)
            for name, server in servers.items():
                for _ in range(3):
                    timings = complete(server, args.tokens)
                add("llama.cpp", name, timings["predicted_per_second"])
            options = BenchOptions(tuple(prompts), args.tokens, (0,), 2, args.synthetic_acceptance, args.draft_width, tuple(args.rates))
            rows = bench(session, options)
            for row in rows:
                name = row.test if row.test.startswith("pp") else "tg128" if row.test.startswith("tg") else "spec"
                add("pyspec", name, statistics.median(row.runs))
        memory, costs = session.runner.memory(), session.costs and {str(kind): ms for kind, ms in session.costs.items()}
        stats = Stats()
        for _ in generate(session.runner, PROMPT, GenerationOptions(8, PLAIN), stats):
            pass

    drafting = {name: runs for name, runs in figures["llama.cpp"].items() if name.startswith("spec n=")}
    if drafting:
        best = max(drafting, key=lambda name: statistics.median(drafting[name]))
        figures["llama.cpp"]["spec"] = drafting[best]
        notes.append(
            ", ".join(f"{name} {statistics.median(runs):.1f}" for name, runs in drafting.items()) + f": the best of llama.cpp's is {best}"
        )
    print(f"| test | llama.cpp | pyspec | ratio |\n|---|---|---|---|  {args.device}, {Path(args.model).name}")
    for test in figures["pyspec"]:
        theirs, ours = figures["llama.cpp"].get(test), statistics.median(figures["pyspec"][test])
        print(
            f"| {test} | {statistics.median(theirs):.1f} | {ours:.1f} | {ours / statistics.median(theirs):.3f} |"
            if theirs
            else f"| {test} | - | {ours:.1f} | - |"
        )
    if args.again:
        notes.append(again(args, device, more))
    for note in notes:
        print(note)
    for row in rows:
        print(
            row.test,
            {k: round(v) for k, v in row.phases_us.items()},
            f"{row.ms_per_step:.3f} ms/step",
            f"{row.tokens_per_step:.2f} tok/step",
            row.widths,
        )
    print("costs ms", costs, "memory", memory, "device memory: before, + pyspec, + server", used)
    args.out.write_text(json.dumps({"figures": figures, "rows": [r.as_dict() for r in rows], "costs_ms": costs, "memory": memory, "notes": notes,
                                    "device_memory_used": used, "command": sys.argv, "versions": versions()}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
