"""Decoding beside busy processes: tokens per second with fixed numbers of threads, with OpenMP's passive waiting, and with the default, which follows.

    python scripts/bench_busy.py [--model FILE.gguf] [--busy 0,1,2,4,8] [--seconds 2] [--rounds 1] [--kind spin|memory] [--recovery]

Needs nothing but the installed package. Each column is a process that has loaded its model and waits; cells are measured in turn, so all columns see the
same minutes. Pin it (taskset -c 0,1) to measure a smaller machine. The default before was as many threads as cores, always. ``--recovery`` prints what
the default decodes in each tenth of a second before and after the busy processes end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

from pyggml_spec.ggml.cores import allowed, default_threads, read

BUSY = {
    "spin": "while True: pass",
    "memory": "import numpy as np\na, b = np.ones(1 << 24), np.ones(1 << 24)\nwhile True: np.copyto(a, b); np.copyto(b, a)",
}
PROMPT = {"": "def fibonacci(n):\n", "model": "Once upon a time, there was a"}
SETTLES_S = 0.3
QUIET, TRIES = (
    0.1,
    4,
)  # cores that work of nobody here may take of a cell without busy processes; or else it is measured again, so often at most


def work(model: str, threads: str, mode: str) -> None:
    """The process of a column: for each line with a number it decodes for as many seconds, and says how many tokens per second came when."""
    from pyggml_spec import load

    with load(model or None, threads=int(threads) if threads else None) as session:
        session.generate(PROMPT["model" if model else ""], 200, mode=mode, ignore_end=True)  # builds what cells need
        print("ready", flush=True)
        for line in sys.stdin:
            seconds, tokens, spent, moments, began, used = float(line), 0, 0.0, [], time.perf_counter(), time.process_time()
            while time.perf_counter() - began < seconds:
                last = None
                for event in session.steps(PROMPT["model" if model else ""], 200, mode=mode, ignore_end=True):
                    now = time.perf_counter()
                    if event.tokens and last is not None:
                        tokens, spent = tokens + len(event.tokens), spent + now - last
                        moments.append((now - began, len(event.tokens)))
                    last = now
                    if now - began > seconds:
                        break
            print(
                json.dumps({"speed": tokens / spent if spent else 0.0, "moments": moments, "used": time.process_time() - used}), flush=True
            )


class Column:
    def __init__(self, model: str, threads: int | None, mode: str, passive: bool = False) -> None:
        env = {**os.environ, "OMP_WAIT_POLICY": "passive"} if passive else {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
        command = [sys.executable, __file__, "--worker", model, "" if threads is None else str(threads), mode]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)

    def wait(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit("a column ended early")

    def ask(self, seconds: float) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(seconds, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate("")


def cell(column: Column, count: int, options: argparse.Namespace) -> float:
    """Tokens per second beside ``count`` busy processes."""
    found: list[tuple[float, float]] = []
    while not found or (not count and found[-1][0] > QUIET and len(found) < TRIES):
        with busy(count, options.kind):
            before = read(allowed())
            answer = column.ask(options.seconds)
            now = read(allowed())
        others = 0.0
        if before is not None and now is not None:
            others = now.cores - (now.idle - before.idle + answer["used"]) / (now.at - before.at)
        found.append((others, answer["speed"]))
    return min(found)[1] if not count else found[0][1]


@contextmanager
def busy(count: int, kind: str):
    """So many busy processes."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY[kind]]) for _ in range(count)]
    time.sleep(SETTLES_S)
    try:
        yield others
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


def columns_of(model: str, mode: str) -> dict[str, Column]:
    cores = default_threads()
    few = sorted({1, 2, cores // 2, cores} - {0})
    made = {f"-t {n}{' (default before)' * (n == cores)}": Column(model, n, mode) for n in few if n <= cores}
    made["passive"] = Column(model, None, mode, passive=True)
    made["default after"] = Column(model, None, mode)
    return made


def table(title: str, columns: dict[str, Column], options: argparse.Namespace) -> None:
    print(f"\n{title}, tokens per second, busy processes: {options.kind}")
    print("| busy | " + " | ".join(columns) + " | after over the best fixed |\n|" + "---|" * (len(columns) + 2), flush=True)
    for count in options.busy:
        speeds: dict[str, list[float]] = {name: [] for name in columns}
        for turn in range(options.rounds):
            order = list(columns)[:: 1 if turn % 2 == 0 else -1]
            for name in order:
                speeds[name].append(cell(columns[name], count, options))
        middle = {name: statistics.median(of) for name, of in speeds.items()}
        best = max(speed for name, speed in middle.items() if name.startswith("-t"))
        figures = " | ".join(f"{speed:.1f}" for speed in middle.values())
        print(f"| {count} | {figures} | {middle['default after'] / (best or 1):.2f} |", flush=True)


def recovery(title: str, column: Column, options: argparse.Namespace) -> None:
    """Tokens in each tenth of a second, others ending in the middle."""
    seconds = 3.0
    for count in [n for n in options.busy if n]:
        assert column.process.stdin is not None and column.process.stdout is not None
        with busy(count, options.kind) as others:
            began = time.perf_counter()
            print(seconds, file=column.process.stdin, flush=True)
            time.sleep(seconds / 2)
            for other in others:
                other.kill()
            end = time.perf_counter() - began
            moments = json.loads(column.process.stdout.readline())["moments"]
        tenths = [0] * 16
        for at, tokens in moments:
            if -1 <= (at - end) * 10 < 15:
                tenths[int((at - end) * 10 + 1)] += tokens
        print(f"{title}, {count} busy ended at 0: tokens per tenth of a second from -0.1 s on: {tenths}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a further model, decoded plainly")
    parser.add_argument("--busy", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kind", choices=BUSY, default="spin")
    parser.add_argument("--only", choices=("model", "plain", "speculative"), action="append")
    parser.add_argument("--recovery", action="store_true")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    wanted = [("model", options.model, "plain")] if options.model else []
    wanted += [("plain", "", "plain"), ("speculative", "", "speculative")]
    for name, model, mode in wanted:
        if options.only and name not in options.only:
            continue
        title = f"{os.path.basename(model) or 'the embedded pair'}, {mode}"
        columns = {"default after": Column(model, None, mode)} if options.recovery else columns_of(model, mode)
        try:
            for column in columns.values():
                column.wait()
            recovery(title, columns["default after"], options) if options.recovery else table(title, columns, options)
        finally:
            for column in columns.values():
                column.end()


if __name__ == "__main__":
    main()
