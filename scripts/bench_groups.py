#!/usr/bin/env python3
"""Sequences of a model that is split over devices: tokens per second of all of them, in steps of all and in two groups beside each other, in turn.

    bench_groups.py --device CUDA0,CUDA1 [-m TARGET] [-md DRAFTER] [--slots 8] [--widths 1 8 16] [--tokens 96] [--rounds 3] [--synthetic 6]
    bench_groups.py --workers 20                two workers on this machine, behind links with so many milliseconds each way; as root

Without -m the embedded pair. Printed for each width (1: plain decoding): the best of the rounds of either kind, their ratio, whether the texts are
equal, what the automatic choice took, how long each device was busy in the grouped rounds (together more than the whole time: they computed beside each
other), and this machine's processor time per token. Then where a round of groups goes: what each device computes of it and copies behind that, how long
parts were queued, and what a group waits for between two of its steps: the host's time from the end of the one to the launch of the other, by the
median. Ends with the number of widths whose texts differ.
"""

import argparse
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager

import pyggml_spec as ps
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.speculation.synthetic import SyntheticAcceptance

PROMPTS = ["def fibonacci(n):\n    ", "The first time that", "import numpy as np\n", "class Stack:\n    def push", "# Read a file\nwith open(",
           "SELECT name FROM", "Once upon a time", "int main(void) {"]  # fmt: skip


@contextmanager
def host_gaps(devices):
    """Microseconds of the host between a group's step that was waited for and its next one, which is filled in in here: those from the end of the one
    until its results are read, until the other is asked for, and until it is launched."""
    gaps: dict[str, list[float]] = {"read": [], "chosen": [], "launched": []}
    read: dict[int, int] = {}
    launch, land = devices.launch, devices.land

    def timed_land(group):
        step = devices.lanes[group].flight[0]
        wait, ended = step.fields.wait, [0]

        def waits():
            times = wait()
            ended[0] = time.perf_counter_ns()
            return times

        step.fields.wait = waits
        try:
            return land(group)
        finally:
            del step.fields.wait
            read[group] = time.perf_counter_ns()
            gaps["read"].append(1e-3 * (read[group] - ended[0]))

    def timed_launch(group, work):
        asked = time.perf_counter_ns()
        launch(group, work)
        if group in read:
            gaps["chosen"].append(1e-3 * (asked - read[group]))
            gaps["launched"].append(1e-3 * (time.perf_counter_ns() - asked))

    devices.launch, devices.land = timed_launch, timed_land
    try:
        yield gaps
    finally:
        del devices.launch, devices.land


def measured(session: ps.Session, args: argparse.Namespace, width: int, groups: int | str) -> dict:
    with session.batch(args.slots, groups=groups) as scheduler:
        scheduler.pin_width(width)
        prompts = [session.prompt_ids(PROMPTS[i % len(PROMPTS)] + "x" * (i // len(PROMPTS))) for i in range(args.slots)]
        streams = []
        for i, prompt in enumerate(prompts):
            drawn = SyntheticAcceptance(args.synthetic, width - 1, i) if args.synthetic and width > 1 else None
            mode = PLAIN if width == 1 else SPECULATIVE
            streams.append(scheduler.submit(prompt, GenerationOptions(args.tokens, mode, ignore_end=True, synthetic=drawn)))
        while not all(stream.tokens for stream in streams):
            scheduler.step()
        for _ in range(6):  # graphs are built, and captured
            scheduler.step()
        scheduler.runner.devices.queues.spent()
        before, began, cpu = scheduler.stats.emitted, time.perf_counter(), time.process_time()
        steps = scheduler.stats.steps
        with host_gaps(scheduler.runner.devices) as gaps:
            while not any(stream.ended for stream in streams):
                scheduler.step()
        seconds, emitted, steps = time.perf_counter() - began, scheduler.stats.emitted - before, scheduler.stats.steps - steps
        spent, cpu = scheduler.runner.devices.queues.spent(), time.process_time() - cpu
        scheduler.run()
        busy = [f"{100 * (s.computed_us + s.copied_us) / 1e6 / seconds:.0f} %" for s in spent]
        return {
            "speed": emitted / seconds,
            "cpu": 1e3 * cpu / max(1, emitted),
            "texts": [s.tokens for s in streams],
            "busy": busy,
            "grouped": scheduler.stats.pipelined,
            "round": 1e3 * seconds / max(1, steps // (2 if groups == 2 else 1)),
            "spent": [{of: 2e-3 * getattr(s, f"{of}_us") / max(1, steps) for of in ("computed", "copied", "queued")} for s in spent],
            "gaps": {what: statistics.median(of) for what, of in gaps.items() if of},
        }


def run(device: str, args: argparse.Namespace) -> int:
    differ = 0
    with ps.load(
        args.target, args.draft, device=device, threads=args.threads, n_ctx=args.n_ctx, draft_width=max(2, *args.widths), prefix_memory=0,
        tensor_split=args.tensor_split,
    ) as session:  # fmt: skip
        for segment in session.target.weights.segments:
            print(segment)
        for width in args.widths:
            runs: dict = {1: [], 2: [], "auto": []}
            for _ in range(args.rounds):
                for groups, of in runs.items():
                    of.append(measured(session, args, width, groups))
            best = {groups: max(of, key=lambda one: one["speed"]) for groups, of in runs.items()}
            equal = all(one["texts"] == best[1]["texts"] for of in runs.values() for one in of)
            differ += not equal
            print(
                f"{args.slots} sequences, {'plain' if width == 1 else f'width {width}'}: {best[1]['speed']:.1f} tok/s in steps of all, "
                f"{best[2]['speed']:.1f} in groups ({best[2]['speed'] / best[1]['speed']:.2f}), {best['auto']['speed']:.1f} as chosen "
                f"({best['auto']['speed'] / best[1]['speed']:.2f}, {best['auto']['grouped']} grouped steps); texts {'equal' if equal else 'DIFFER'}; "
                f"devices busy in groups {', '.join(best[2]['busy'])}; processor {best[1]['cpu']:.2f} and {best[2]['cpu']:.2f} ms per token",
                flush=True,
            )
            devices = "; ".join(
                f"{s['computed']:.2f} computed, {s['copied']:.2f} copied, {s['queued']:.2f} queued" for s in best[2]["spent"]
            )
            print(
                f"    a step of all {best[1]['round']:.2f} ms, a round of groups {best[2]['round']:.2f}; by device {devices}; "
                f"the host between two steps of a group, us: {', '.join(f'{what} {us:.0f}' for what, us in best[2]['gaps'].items())}",
                flush=True,
            )
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU,CPU")
    parser.add_argument("-m", dest="target")
    parser.add_argument("-md", dest="draft")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-c", dest="n_ctx", type=int, default=1024)
    parser.add_argument("-ts", "--tensor-split", type=float, nargs="+")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--synthetic", type=float, help="tokens that a block is to give on average, drawn; the texts are not valid then")
    parser.add_argument("--workers", type=float, metavar="MS", help="two workers behind links with this delay each way")
    args = parser.parse_args()
    if args.workers is None:
        sys.exit(run(args.device, args))
    from check_workers import Host

    with ExitStack() as stack:
        hosts = [Host(index) for index in (11, 12)]
        for host in hosts:
            stack.callback(host.close)
            stack.enter_context(host.set(args.workers))
        sys.exit(run(",".join(host.device for host in hosts), args))


if __name__ == "__main__":
    main()
