#!/usr/bin/env python3
"""Speculative decoding on this CPU: native kernels against ggml's, and against llama.cpp's tools on the same files.

    bench_cpu.py --tools DIR [--small 0.8B.gguf] [--pair 4B.gguf 4B-drafter.gguf] [-t 1] [-r 7] [--only prompts,server] [--lengths 8,64]
                 [--out FILE.json]

`make_random_gguf.py 0.8B --quant Q4_K` and `make_random_gguf.py 4B --quant Q4_K` write the files. Figures are medians of alternating rounds; the
share of time with other load is printed. PYSPEC_CPU_FEATURES=avx2 measures a lower level.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llama_server import LlamaServer, environment

import pyggml_spec as ps
from pyggml_spec.ggml.cores import default_threads
from pyggml_spec.ggml.device import cpu_wait_s
from pyggml_spec.ggml.library import versions
from pyggml_spec.loading import DEMO, DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.bench import BenchOptions, bench
from pyggml_spec.tools.prompts import read_prompts

PROMPT_TOKENS = 96


def median(values) -> float:
    return statistics.median(list(values))


def llama_bench(args, model: Path, prompts: tuple[int, ...]) -> dict[str, float]:
    """Tokens per second of one llama-bench run, by test."""
    command = [args.tools / "llama-bench", "-m", model, "-fa", 1, "-ngl", 0, "-r", 2, "-o", "json", "-t", args.threads, "-n", args.tokens]
    command += ["-p", ",".join(map(str, prompts)) or 0]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment(args.tools))
    if done.returncode:
        sys.exit(f"llama-bench failed: {done.stderr[-2000:]}")
    return {(f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}"): r["avg_ts"] for r in json.loads(done.stdout)}


def load(args, target=None, draft=None, kernels="native", **options) -> ps.Session:
    return ps.load(target, draft, device="CPU", threads=args.threads, kernels=kernels, **options)


def held_out() -> list[str]:
    return [prompt.text for prompt in read_prompts(DEMO / "prompts.jsonl") if prompt.text is not None]


def plain_speed(session: ps.Session, tokens: int, prompts=()) -> dict[str, float]:
    rows = bench(session, BenchOptions(tuple(prompts), tokens, (0,), 1, width=16))
    return {row.test: row.runs[0] for row in rows if not row.test.startswith("spec")}


def against_llama_bench(args, say, name: str, model: Path, prompts: tuple[int, ...]) -> None:
    """Plain decoding and prompts of one file, own kernels against llama-bench and against ggml's kernels here."""
    own, ggml, theirs = [], [], []
    room = max([args.tokens + 16, *prompts]) + 16
    with load(args, model, n_ctx=room) as mine, load(args, model, kernels="ggml", n_ctx=room) as other:
        for _ in range(args.rounds):
            own.append(plain_speed(mine, args.tokens, prompts))
            ggml.append(plain_speed(other, args.tokens, prompts))
            if args.tools:
                theirs.append(llama_bench(args, model, prompts))
        size, nbytes = model.stat().st_size, mine.configuration().memory["weights"]
    for test in own[0]:
        ours = median(run[test] for run in own)
        say(f"{name}: {test}, tok/s", ours)
        say(f"{name}: {test} over ggml's kernels", ours / median(run[test] for run in ggml))
        if theirs:
            say(f"{name}: {test} over llama-bench", median(a[test] / b[test] for a, b in zip(own, theirs, strict=True)))
    say(f"{name}: weights in memory over the file", nbytes / size)


def held_out_prompts(args, say) -> None:
    """20 prompts of the embedded pair with the policy, each against plain decoding: median of the rounds per prompt."""
    texts, ratios, speeds, plain = held_out(), {}, [], []
    with load(args) as session:
        for round_ in range(args.rounds + 1):  # the first one builds graphs
            for i, text in enumerate(texts):
                pair = [session.generate(text, PROMPT_TOKENS, mode=mode, ignore_end=True)[1] for mode in ("plain", "speculative")]
                if round_:
                    slow, fast = (stats.tokens_per_second for stats in pair)
                    ratios.setdefault(i, []).append(fast / slow)
                    plain.append(slow)
                    speeds.append(fast)
        costs = session.costs
    each = [median(values) for values in ratios.values()]
    say("embedded pair, 20 prompts, width control over plain: mean", statistics.fmean(each))
    say("embedded pair, 20 prompts, width control over plain: lowest", min(each))
    say("embedded pair, 20 prompts: plain, tok/s", median(plain))
    say("embedded pair, 20 prompts: speculative, tok/s", median(speeds))
    print(
        "   per prompt:",
        " ".join(f"{value:.2f}" for value in each),
        "| step costs ms:",
        {w: round(ms, 2) for w, ms in (costs or {}).items()},
    )


def against_llama_server(args, say) -> None:
    """The embedded pair's speculative decoding against llama-server's, prompt by prompt in turn."""
    options = ["-m", DEMO_TARGET, "-md", DEMO_DRAFTER, "-fa", "on", "-ngl", 0, "-ngld", 0, "-np", 1, "-c", 1024, "-t", args.threads]
    options += ["--spec-type", "draft-dflash", "--spec-draft-n-max", 15]
    ratios = []
    with (
        tempfile.TemporaryDirectory() as folder,
        load(args, n_ctx=1024) as session,
        LlamaServer(args.tools, Path(folder) / "log", *options) as server,
    ):
        server.wait()
        for text in held_out():
            for _ in range(2):
                stats = session.generate(text, PROMPT_TOKENS, ignore_end=True)[1]
                timings = server.post(
                    "/completion", prompt=text, n_predict=PROMPT_TOKENS, temperature=0, ignore_eos=True, cache_prompt=False
                )["timings"]
            ratios.append(stats.tokens_per_second / timings["predicted_per_second"])
    say("embedded pair, speculative over llama-server draft-dflash: median of 20 prompts", median(ratios))


def step_costs(args, say, name: str, target, draft=None, widths=(1, 2, 4, 8, 16)) -> None:
    """Steps of each width in turn, own kernels and ggml's: verification alone where there is no drafter."""
    best: dict[tuple[str, int], float] = {}
    for kernels in ("native", "ggml"):
        with load(args, target, draft, kernels, n_ctx=1024) as session:
            engine = session.runner
            for round_ in range(args.rounds + 2):
                for width in widths:
                    engine.reset(drafting=draft is not None)
                    engine.prefill(list(range(64)))
                    for _ in range(3):
                        started = time.thread_time() if args.threads == 1 else time.perf_counter()
                        if width == 1:
                            result = engine.plain_step()
                        else:
                            result = engine.fused_step(width) if draft is not None else engine.verify_step(list(range(7, 6 + width)))
                        spent = (time.thread_time() if args.threads == 1 else time.perf_counter()) - started
                        engine.accept(1, int(result.ids[0]))
                        if round_:
                            best[kernels, width] = min(best.get((kernels, width), spent), spent)
    for width in widths:
        say(f"{name}: step of {width} rows, ms", 1000 * best["native", width])
        say(f"{name}: step of {width} rows, ggml's over own", best["ggml", width] / best["native", width])
        if width > 1:
            say(f"{name}: step of {width} rows over one row", best["native", width] / best["native", 1])


def synthetic_pair(args, say) -> None:
    """A random pair with a synthetic acceptance of six tokens per step, against plain decoding."""
    ratios = []
    with load(args, *args.pair, n_ctx=512) as session:
        for _ in range(max(1, args.rounds // 2)):
            rows = {row.test[:2]: row.runs[0] for row in bench(session, BenchOptions((), 64, (0,), 1, synthetic=6.0))}
            ratios.append(rows["sp"] / rows["tg"])
    say(f"{args.pair[0].name}: speculative at acceptance 6 over plain", median(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, help="folder of llama-bench and llama-server; without it, their rows are left out")
    parser.add_argument("--small", type=Path, help="target of the 0.8B shape in Q4_K")
    parser.add_argument("--pair", type=Path, nargs=2, help="target and drafter of the 4B shape in Q4_K")
    parser.add_argument("-t", "--threads", type=int, default=default_threads())
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument(
        "--only", default="bench,prompts,server,steps", help="which of these of the embedded pair; none of them: the other files alone"
    )
    parser.add_argument("--lengths", default="512,4096", help="tokens of the prompts of --small")
    parser.add_argument("-n", "--tokens", type=int, default=128, help="tokens of plain decoding")
    parser.add_argument("--no-steps", action="store_true", help="no costs of wider steps of --small")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, float] = {}

    def say(what: str, value: float) -> None:
        figures[what] = value
        print(f"| {what} | {value:.3g} |", flush=True)

    started, waited = time.perf_counter(), cpu_wait_s() or 0.0
    with load(args, n_ctx=256) as session:
        about = {
            "kernels": session.configuration().kernels,
            "cpu": session.backend.device.description,
            "threads": args.threads,
            "versions": versions(),
        }
    print(f"{about['cpu']}, {args.threads} threads, kernels: {about['kernels']}\n\n| work | figure |\n|---|---|")
    only = args.only.split(",")
    if "bench" in only:
        against_llama_bench(args, say, "embedded pair", DEMO_TARGET, (512,))
    if "prompts" in only:
        held_out_prompts(args, say)
    if args.tools and "server" in only:
        against_llama_server(args, say)
    if "steps" in only:
        step_costs(args, say, "embedded pair", DEMO_TARGET, DEMO_DRAFTER)
    if args.small:
        against_llama_bench(args, say, args.small.name, args.small, tuple(map(int, args.lengths.split(","))))
        if not args.no_steps:
            step_costs(args, say, args.small.name, args.small)
    if args.pair:
        synthetic_pair(args, say)
    busy = ((cpu_wait_s() or 0.0) - waited) / (time.perf_counter() - started)
    print(f"\nother work had this thread's core for {100 * busy:.0f} % of the time; load now {os.getloadavg()[0]:.1f}")
    if args.out:
        args.out.write_text(json.dumps({**about, "figures": figures, "waited_share": busy, "command": sys.argv}, indent=1))


if __name__ == "__main__":
    main()
