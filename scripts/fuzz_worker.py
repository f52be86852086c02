#!/usr/bin/env python3
"""A long run against `pyspec worker`: programs that send random bytes, half messages, lengths and numbers that make no sense.

    python scripts/fuzz_worker.py [--connections 20000] [--seed 1] [--computes]

The worker serves the CPU with one thread. Without --computes graphs are looked at and refused or accepted, never computed: nothing may end the
server then. With it they are computed: ggml takes the shapes of a node on trust, so servers may end, which the worker has to say, and start
another one. Every 500 connections a program that means well has to get its sum. Says how many connections of each kind there were, how servers
ended, the slowest answer, and the server's memory before and after. Exit code 1 if anything was wrong.
"""

import argparse
import collections
import random
import re
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from hostile import answers, attack, resident  # noqa: E402
from workers import Worker, need_library  # noqa: E402

EVERY = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--computes", action="store_true")
    args = parser.parse_args()
    need_library()
    rng, kinds, ends = random.Random(args.seed), collections.Counter(), collections.Counter()
    with Worker() as worker:

        def listen() -> None:
            for line in worker.process.stderr:
                if found := re.match(r"the server (was ended by signal \d+|ended with -?\d+)(?:: .*?(GGML_\w+)?.*)?; another one", line):
                    ends[" ".join(filter(None, found.groups()))] += 1

        reader = threading.Thread(target=listen, daemon=True)
        reader.start()
        answers(worker)
        first, before, slowest = worker.server(), resident(worker.server()), 0.0
        for i in range(args.connections):
            try:
                kinds[attack(worker, rng, args.computes)] += 1
            except OSError:  # its server ended by what came before
                kinds["turned away"] += 1
            if i % EVERY == EVERY - 1:
                slowest = max(slowest, answers(worker))
        after, same = resident(worker.server()), worker.server() == first
    reader.join(5)
    print(f"{sum(kinds.values())} connections: {dict(kinds.most_common())}")
    print(f"servers that ended: {dict(ends) or 'none'}; the slowest sum {slowest:.2f} s; memory {before >> 20} -> {after >> 20} MiB")
    sys.exit(int(not (args.computes or same) or slowest > 10 or after - before > 64 << 20))


if __name__ == "__main__":
    main()
