#!/usr/bin/env python3
"""Two drafters alternating on one device: equal texts, replayed graphs, no late builds; NaN drafters; cost of clamping logits.

    check_drafters.py --device CUDA0                                          # the embedded target with both of its drafters
    check_drafters.py --device CUDA0 -m target.gguf [-md drafter.gguf] --spec draft-mtp --clamp 8

Texts: reference, plain, each drafter alone, both by policy, and alternating kinds of steps, with one and four slots. Exit code 1 if texts with rows of
the reference shape differ, if a graph is built after warm-up, or if NaN goes unnoticed.
"""

import argparse
import itertools
import statistics
import sys
import time

import pyggml_spec as ps
from pyggml_spec.drafters import base as drafters
from pyggml_spec.ggml.library import lib
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_MTP, DEMO_TARGET
from pyggml_spec.speculation.policy import PLAIN_STEP, SpeculationPolicy, StepPlan

BLOCKS, CHAIN = "draft-dflash", "draft-mtp"
PROMPT = "import os\n\n\ndef read_lines(path):\n"
SLOTS = 4


class InTurn(SpeculationPolicy):
    """Takes the kinds one after the other, whatever they give."""

    def __init__(self, kinds: list[StepPlan]):
        super().__init__(kinds, dict.fromkeys((PLAIN_STEP, *kinds), 1.0))
        self.plans, self._turn = list(kinds), itertools.cycle(kinds)

    def choose(self, covered, sequences):
        return next(self._turn) if any(sequences) else PLAIN_STEP

    def observe(self, *args, **more):
        pass


def in_turn(session) -> InTurn:
    """Blocks and chains of several lengths, with one to three plain steps between."""
    kinds = []
    for at, method in enumerate(session.methods * 3):
        kinds += [StepPlan.of(method, 1 << (1 + at % 3)), *[PLAIN_STEP] * (at % 4)]
    return InTurn(kinds)


def told(name: str, stats, text: str, like: str) -> None:
    same = next((i for i, (a, b) in enumerate(zip(text, like)) if a != b), min(len(text), len(like)))
    replayed = "" if stats.replay_rate is None else f", {100 * stats.replay_rate:.1f} % replayed"
    print(
        f"{name}: {stats.tokens_per_second:.1f} tok/s, {stats.tokens_per_step:.2f} per step, built after warm-up {stats.graphs_built_after_warmup}, "
        f"buffers grown {stats.buffer_growths_after_warmup}{replayed}, {'the same text' if text == like else f'the same up to character {same}'}"
        f" {dict(stats.drafters)}",
        flush=True,
    )


def texts(args) -> int:
    """One text in every way; how many were wrong."""
    load, wrong = {"device": args.device, "threads": args.threads, "n_ctx": args.tokens + 256}, 0
    with ps.load(*args.files, spec=args.spec, **load) as session:

        def run(mode: str):
            session.generate(PROMPT, 32, mode=mode, ignore_end=True)
            return session.generate(PROMPT, args.tokens, mode=mode, ignore_end=True)

        plain = run("plain")
        told("plain", plain[1], plain[0], plain[0])
        both = run("speculative")
        told(" and ".join(session.methods), both[1], both[0], plain[0])
        wrong += both[1].graphs_built_after_warmup > 0
        control, session.engine.policy = session.engine.policy, in_turn(session)
        turns = run("speculative")
        told("in turn", turns[1], turns[0], plain[0])
        wrong += turns[1].graphs_built_after_warmup > 0
        session.engine.policy = control
        with session.concurrent(slots=SLOTS) as server:
            for name, widths in (("slots", None), ("slots, in turn", in_turn(session))):
                if widths is not None:
                    server.engine.policy = widths
                for tokens in (32, min(args.tokens, 400)):
                    handles = [server.submit(PROMPT, tokens, ignore_end=True) for _ in range(SLOTS)]
                    done = [handle.result() for handle in handles]
                for text, stats in done[-1:]:
                    told(f"{name}, {SLOTS} of them, {len({t for t, _ in done})} texts", stats, text, plain[0][: len(text)])
                    wrong += stats.graphs_built_after_warmup > 0
        print("memory MiB", {name: round(size / 2**20, 1) for name, size in session.runner.memory().items()}, flush=True)
    with ps.load(*args.files, spec=args.spec, draft_width=args.width, **load) as session:
        reference = session.generate(PROMPT, args.tokens, mode="reference", ignore_end=True)
        told(f"reference, {args.width} rows", reference[1], reference[0], plain[0])
        for method in session.methods:
            session.engine.policy = InTurn([StepPlan.of(method, args.width)] * 2)
            one = session.generate(PROMPT, args.tokens, mode="speculative", ignore_end=True)
            told(f"{method}, {args.width} rows, against the reference", one[1], one[0], reference[0])
            wrong += (one[0] != reference[0]) + (one[1].graphs_built_after_warmup > 0)
    return wrong


def of_nan(args) -> int:
    """Drafters with NaN rows: one note, and the plain text. Returns the number of failures."""
    wrong = 0
    for method in args.spec:
        with ps.load(*args.files, spec=args.spec, device=args.device, threads=args.threads, n_ctx=512, draft_width=4) as session:
            want = session.generate(PROMPT, 64, mode="plain", ignore_end=True)[0]
            member = next(m for m in session.drafter.methods if m.method == method)
            names = [n for n in (f"{getattr(member, 'prefix', '')}nextn.hnorm.weight", "output_norm.weight") if n in member.file.tensors]
            lib.ggml_backend_tensor_memset(member.weights[names[0]], 0xFF, 0, 4)
            session.engine.policy = InTurn(
                [StepPlan.of(method, 4), StepPlan.of(method, 3, 4)], {m.method: (2, 4) for m in session.drafter.methods}
            )
            text, stats = session.generate(PROMPT, 64, ignore_end=True)
            good = stats.nan_drafts == 1 and text == want
            wrong += not good
            print(
                f"{method} with NaN in {names[0]}: {stats.nan_drafts} block noticed, {'' if text == want else 'not '}the plain text",
                flush=True,
            )
    return wrong


def clamp(args) -> None:
    """Medians of fused steps with the clamp before every argmax of the drafters and without it, twice in turn."""
    kept = drafters.NAN_IS_A_TOKEN
    for _ in range(2):
        for name, kinds in (("clamped", ()), ("not clamped", ("cpu", "gpu"))):
            drafters.NAN_IS_A_TOKEN, times = kinds, []
            with ps.load(
                *args.files, spec=args.spec, device=args.device, threads=args.threads, n_ctx=512, draft_width=args.clamp
            ) as session:
                engine = session.runner
                engine.reset()
                engine.prefill(list(range(64)))
                for _ in range(160):
                    began = time.perf_counter()
                    result = engine.fused_step(args.clamp)
                    engine.accept(1, int(result.ids[0]))
                    times.append(1000 * (time.perf_counter() - began))
            print(f"{name}: {statistics.median(times[20:]):.4f} ms per step of {args.clamp} rows, {args.spec[0]}", flush=True)
    drafters.NAN_IS_A_TOKEN = kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("-m", "--model", default=str(DEMO_TARGET))
    parser.add_argument("-md", "--model-draft", action="append")
    parser.add_argument("--spec", type=lambda text: text.split(","), default=[BLOCKS, CHAIN])
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-n", "--tokens", type=int, default=2000)
    parser.add_argument("--width", type=int, default=8, help="rows of the blocks of each drafter alone")
    parser.add_argument("--clamp", type=int, metavar="ROWS", help="only what the clamp costs in blocks of so many rows")
    args = parser.parse_args()
    drafts = args.model_draft or ([str(DEMO_DRAFTER), str(DEMO_MTP)] if args.model == str(DEMO_TARGET) else None)
    args.files = (args.model, drafts)
    if args.clamp:
        clamp(args)
        return 0
    wrong = texts(args) + of_nan(args)
    print("all as promised" if not wrong else f"{wrong} not as promised")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
