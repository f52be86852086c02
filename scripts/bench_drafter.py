#!/usr/bin/env python3
"""Real prompts plainly, with fixed numbers of drafts, and with the policy's choice, in turn in one process; texts are compared with plain ones.

    bench_drafter.py -m target.gguf [-md small.gguf] --prompts prompts.jsonl [-t 1] [--drafts 2,4,8] [-n 128] [--device CPU]
                     [--out results.jsonl --seconds 150]
                     [--tools DIR --server "" --server "-md small.gguf --spec-type draft-simple --spec-draft-n-max 3"]

Without -md the policy drafts by n-grams. Each --server is a llama-server of the folder DIR with these options besides, in the same turns.

Each line of the file is {"category": ..., "prompt": TEXT} (continued as it is), or {"category": ..., "messages": [...]} or {"category": ..., "turns": [QUESTION, ...]}
(the model's chat template; the first turn). With --out the results of each prompt are appended to a file, and prompts whose results are there are not run again; with
--seconds no prompt begins after so many: the same command goes on later. The table is that of all results.
"""

import argparse
import json
import shlex
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic

from llama_server import LlamaServer

import pyggml_spec as ps
from pyggml_spec.chat import chat_template

PLAIN, POLICY = "plain", "policy"


def start_servers(stack: ExitStack, args: argparse.Namespace) -> dict[str, LlamaServer]:
    """A llama-server for each text of options."""
    servers = {}
    for options in args.server:
        shared = ["-m", args.m, "-c", 2048, "-t", args.t, "-tb", args.t, "-np", 1, "-fa", "on"]
        log = Path(mkdtemp()) / "server.log"
        servers[f"llama-server {options}".strip()] = stack.enter_context(LlamaServer(args.tools, log, *shared, *shlex.split(options)))
    for server in servers.values():
        server.wait()
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", required=True)
    parser.add_argument("-md")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--drafts", default="2,4,8")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-t", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--tools", type=Path, help="folder of llama-server")
    parser.add_argument("--server", action="append", default=[])
    args = parser.parse_args()
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()]
    fixed, began = [int(n) for n in args.drafts.split(",") if n], monotonic()
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out is not None and args.out.exists() else []
    with ExitStack() as stack:
        servers = start_servers(stack, args)
        session = stack.enter_context(ps.load(args.m, args.md, device=args.device, threads=args.t, n_ctx=2048))
        template = chat_template(session)[0]
        print("costs in ms:", {k: round(v, 1) for k, v in (session.costs or {}).items()})
        for number, item in enumerate(prompts):
            if any(of["number"] == number for of in done) or monotonic() - began > args.seconds:
                continue
            if "prompt" in item:
                text = item["prompt"]
            else:
                messages = item.get("messages") or [{"role": "user", "content": item["turns"][0]}]
                text = template.encode(session.tokenizer, messages)
            texts, found = {}, defaultdict(list)
            for way in (PLAIN, *fixed, POLICY, PLAIN):
                policy = session.engine.policy
                if isinstance(way, int):
                    session.engine.pin_width(way + 1)
                *parts, stats = session.generate(text, args.n, mode="plain" if way == PLAIN else "speculative")
                session.engine.policy = policy
                texts.setdefault(way, "".join(parts))
                found[str(way)].append((stats.emitted - 1, stats.steps, stats.seconds["decode"]))
            for way, server in servers.items():
                ids = session.prompt_ids(text, special=True)
                timings = server.post("/completion", prompt=ids, n_predict=args.n, temperature=0, cache_prompt=False)["timings"]
                emitted, accepted = timings["predicted_n"] - 1, timings.get("draft_n_accepted", 0)
                found[way].append((emitted, emitted - accepted, timings["predicted_ms"] / 1000))
            different = [str(way) for way in texts if texts[way] != texts[PLAIN]]
            done.append({"number": number, "category": item["category"], "found": found, "different": different})
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
            print(
                item["category"],
                len(texts[PLAIN]),
                "characters;",
                f"texts of {different} differ" if different else "texts equal",
                flush=True,
            )
    print(f"{len(done)} of {len(prompts)} prompts; texts unlike the plain ones in {sum(bool(of['different']) for of in done)}")
    rows = defaultdict(list)
    for of in done:
        for way, results in of["found"].items():
            rows[of["category"], way] += results
    print("| prompts | drafts | tokens per step | tokens per second | over plain | worst prompt |\n|---|---|---|---|---|---|")
    for category in dict.fromkeys(category for category, _ in rows):
        halves = rows[category, PLAIN]
        plain = [(a[0] + b[0]) / (a[2] + b[2]) for a, b in zip(halves[::2], halves[1::2])]
        for way in (PLAIN, *map(str, fixed), POLICY, *servers):
            found = rows[category, way]
            speeds = plain if way == PLAIN else [n / s for n, _, s in found]
            ratios = [speed / base for speed, base in zip(speeds, plain)]
            steps = sum(n for n, _, _ in found) / sum(k for _, k, _ in found)
            print(
                f"| {category} | {way} | {steps:.2f} | {statistics.mean(speeds):.1f} | {statistics.geometric_mean(ratios):.2f} | {min(ratios):.2f} |"
            )


if __name__ == "__main__":
    main()
