#!/usr/bin/env python3
"""Fuzzes `pyspec worker`: random bytes, partial messages, invalid lengths and numbers.

    python scripts/fuzz_worker.py [--connections 20000] [--seed 1] [--computes]

One CPU thread. Without --computes graphs are checked but not computed, and no server process may end. With it ggml trusts the shapes of nodes, so server
processes may end; the worker has to report and restart them. Every 500 connections a valid client has to get its result. Prints connections by
kind, exits, the slowest response and memory. Exit code 1 on failure.
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
