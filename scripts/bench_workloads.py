#!/usr/bin/env python3
"""Three recorded texts, a file copied with small edits, a JSON list continued, and prose: plainly, with each way of drafting alone, and with both.

    bench_workloads.py                                                        # the embedded pair: its DFlash drafter, suffix drafts, both
    bench_workloads.py --device CUDA0 -m target.gguf [-md drafter.gguf]

The text is the recorded one, in tokens of the target's own vocabulary, whatever the target would choose, so that every way of decoding is given the same work: all steps are
computed as ever, and drafts are right where the recorded text goes on with them. Ways run by turns. What is printed of each: tokens per second, and
over all rounds the time that its steps are worth at what each kind of step takes in its faster runs, of whichever way. The latter depends on choices alone, not on how
busy the machine was. Last on each line, the best of plain, drafter and suffix over both: 1 or more is no loss.
"""

import argparse
import statistics
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

import pyggml_spec as ps
from pyggml_spec.decode import request
from pyggml_spec.decode.lookup import LookupControl
from pyggml_spec.decode.request import LoopOptions
from pyggml_spec.decode.stats import Stats
from pyggml_spec.engine.slot import Draft, Prompt
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.session import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parent.parent / "tests" / "decode" / "workloads"
NAMES = "copy", "json", "prose"


class Recorded:
    """What comes out, whatever the target would choose."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.done = tokens, 0

    def first(self, choices, prompt, limits, sampler) -> int:
        return self._next(limits)

    def block(self, choices, drafts, limits, sampler=None, imposed=False) -> list[int]:
        out: list[int] = []
        for draft in [*drafts, None]:
            out.append(self._next(limits))
            if limits.reason or out[-1] != draft:
                break
        return out

    def _next(self, limits) -> int:
        token = self.tokens[self.done]
        self.done += 1
        limits.passes(token)
        return token


class Watched:
    """Keeps what every decoding step of an engine took, by kind."""

    def __init__(self, engine):
        self.step, self.taken, self.took = engine.step, Counter(), defaultdict(list)
        engine.step = self

    def __call__(self, work, meanwhile=None):
        began = time.perf_counter()
        out = self.step(work, meanwhile)
        item = work[0]
        if not isinstance(item, Prompt):
            kind = (item.drafter or "first", item.width, item.verified) if isinstance(item, Draft) else ("", item.rows, 0)
            self.taken[kind] += 1
            self.took[kind].append(1000 * (time.perf_counter() - began))
        return out


def run(session, watched, prompt: list[int], answer: list[int], mode: str) -> tuple[float, Counter, Stats]:
    """Seconds of decoding, steps by kind, and statistics."""
    text, stats, watched.taken = Recorded(answer), Stats(), Counter()
    request.choose_block, request.first_token = text.block, text.first
    session.engine.reset()
    stream = session.scheduler.submit(prompt, LoopOptions(len(answer), mode, ignore_end=True), stats, slot=0)
    blocks = iter(stream)
    next(blocks)
    began = time.perf_counter()
    for _ in blocks:
        pass
    assert text.done == len(answer), (text.done, len(answer))
    return time.perf_counter() - began, watched.taken, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-m", "--model", default=str(DEMO_TARGET))
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("-n", "--tokens", type=int, default=2000)
    parser.add_argument("--texts", type=Path, default=TEXTS, help="folder of the recorded texts")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    args = parser.parse_args()
    draft = args.model_draft or (str(DEMO_DRAFTER) if args.model == str(DEMO_TARGET) else None)
    texts = {}
    with GGUFFile(Path(args.model)) as file:
        tokenizer = Tokenizer(file)
        for name in args.only:
            parts = (args.texts / f"{name}.txt").read_text().split("\n=====\n")
            prompt, answer = (tokenizer.encode(part) for part in parts)
            texts[name] = list(prompt), list(answer)[: args.tokens]
        tokenizer.close()
    n_ctx = max(len(prompt) + len(answer) for prompt, answer in texts.values()) + 64
    specs = {"plain": ["suffix"], "suffix": ["suffix"]}
    if draft:
        specs |= {"drafter": ["draft-dflash"], "both": ["draft-dflash", "suffix"]}
    for name, (prompt, answer) in texts.items():
        with ExitStack() as stack:  # another session for each text: what one taught is not what the next one begins with
            ways = {}
            for way, spec in specs.items():
                files = (args.model, draft if "draft-dflash" in spec else None)
                session = stack.enter_context(ps.load(*files, spec=spec, device=args.device, threads=args.threads, n_ctx=n_ctx))
                ways[way] = session, Watched(session.engine)
            seconds, steps, drafted = defaultdict(list), defaultdict(Counter), {}
            for _ in range(args.rounds):
                for way, (session, watched) in ways.items():
                    if session.lookup is not None:  # every round is the first one: nothing that has ended is there to be copied
                        session.scheduler.lookup = LookupControl(session.lookup.method, session.lookup._alone)
                    session.scheduler.widths = session.width_control()
                    took, kinds, stats = run(session, watched, prompt, answer, "plain" if way == "plain" else "speculative")
                    seconds[way].append(took)
                    steps[way] += kinds
                    drafted[way] = {who: tuple(counts) for who, counts in stats.drafters.items()}
            every = defaultdict(list)
            for _, watched in ways.values():
                for kind, took in watched.took.items():
                    every[kind] += took
            costs = {kind: sorted(took)[len(took) // 4] for kind, took in every.items()}
            worth = {way: sum(count * costs[kind] for kind, count in kinds.items()) / args.rounds for way, kinds in steps.items()}
            print(f"{name}: {len(prompt)} tokens of prompt, {len(answer)} of text")
            for way in ways:
                kinds = ", ".join(f"{who or 'given'} {rows}{f' in {more}' if more else ''}: {n // args.rounds}" for (who, rows, more), n in sorted(steps[way].items()))  # fmt: skip
                print(
                    f"  {way}: {len(answer) / statistics.median(seconds[way]):.1f} tok/s, worth {worth[way]:.1f} ms; steps {kinds}; {drafted[way]}"
                )
            if "both" in ways:
                alone = [way for way in ways if way != "both"]
                by_clock = min(statistics.median(seconds[way]) for way in alone) / statistics.median(seconds["both"])
                print(
                    f"  both over the best alone: by the clock {by_clock:.3f}, by what its steps are worth {min(worth[way] for way in alone) / worth['both']:.3f}"
                )
            print(
                f"  suffix over plain: by the clock {statistics.median(seconds['plain']) / statistics.median(seconds['suffix']):.2f}, by worth {worth['plain'] / worth['suffix']:.2f}"
            )
            print(f"  ms of steps { ({' '.join(map(str, kind)): round(ms, 3) for kind, ms in sorted(costs.items())}) }", flush=True)


if __name__ == "__main__":
    main()
