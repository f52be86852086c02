"""Fuzzes concurrent sequences; each is compared with a sequence alone.

    python scripts/fuzz_slots.py [--seeds 200] [--first 0] [--archs qwen35,qwen3,gemma4] [--tokens 24] [--requests] [--device CUDA0 --tie 0.02]

Without --requests the engine: 3 to 7 slots, ragged widths, random acceptance. With it the scheduler: random arrival and cancellation, shared prefixes,
prefix caches of every size. A sequence may diverge where the two largest logits are closer than --tie; ties are counted. Exit code 1 for any
other difference.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from engine.batch_helpers import TIE, Pair, prompts, random_work, run, serve


def steps(pair: Pair, seed: int, tokens: int) -> tuple[list[int], int]:
    """Streams that differ, and how many there were."""
    rng = np.random.default_rng(seed)
    texts = prompts(int(rng.integers(3, 8)), seed)
    want = {i: pair.solo(text, tokens) for i, text in enumerate(texts)}
    got = run(pair.batch(len(texts)), texts, tokens, random_work(rng, want))
    return [i for i, (text, tokens) in enumerate(zip(texts, got)) if not pair.agrees(text, tokens)], len(texts)


def main() -> int:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--seeds", type=int, default=200)
    args.add_argument("--first", type=int, default=0)
    args.add_argument("--archs", default="qwen35,qwen3,gemma4")
    args.add_argument("--tokens", type=int, default=24)
    args.add_argument("--requests", action="store_true")
    args.add_argument("--device", default="CPU")
    args.add_argument("--groups", action="store_true", help="requests in two pipelined groups, with --device A,B")
    args.add_argument(
        "--tie", type=float, default=TIE, help="a wrong state is off by 0.1 and more; kernels of a GPU round more than the CPU's"
    )
    opt = args.parse_args()
    failures = 0
    for arch in opt.archs.split(","):
        began, streams, wrong = time.time(), 0, []
        with tempfile.TemporaryDirectory() as folder:
            pair = Pair(Path(folder), arch, device=opt.device, tie=opt.tie)
            for seed in range(opt.first, opt.first + opt.seeds):
                different, count = (
                    (serve(pair, seed, groups=2 if opt.groups else None), 10)
                    if opt.requests or opt.groups
                    else steps(pair, seed, opt.tokens)
                )
                wrong += [(seed, i) for i in different]
                streams += count
            ties = pair.ties
            pair.close()
        failures += len(wrong)
        print(
            f"{arch}: {opt.seeds} seeds, {streams} streams, {len(wrong)} wrong {wrong[:5]}, {ties} left at a tie, {time.time() - began:.0f} s",
            flush=True,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
