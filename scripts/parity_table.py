#!/usr/bin/env python3
"""Logits of pyspec against llama.cpp's, for every architecture, weight type, cache type and prompt length: the table of docs/parity.md.

    parity_table.py [--device CPU] [--tokens 1,37,300,1500]

Models are tiny and random (random norms, gates, routers; sliding windows of 24). Each cell is the NMSE of all logits; 0 is bit-equality.
Models with a sliding window get another cell for the longest prompt, with every position kept as llama.cpp keeps them instead of a ring.
Exit code 3 if that cell or one of a prompt that no ring wraps in is above 1e-10, another above 1e-6, or a row's argmax differs: behind the end of a
ring more than one row's.
"""

import argparse
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from random_gguf.archs import WRITERS as ALL
from random_gguf.archs import write_gemma4
from random_gguf.model import Shape

from pyggml_spec.engine.parts import Parts
from pyggml_spec.memory.kv import KVCache
from pyggml_spec.tools.compare import compare_logits

WRITERS = ALL | {"gemma4 routed": lambda *args: write_gemma4(*args, n_per_layer=0, shared=False, routed=True)}
WEIGHTS = ("F32", "Q8_0", "Q4_K")
CACHES = (("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f16", "q8_0"))
WINDOWED = ("gemma4", "gemma4 routed", "gpt-oss", "laguna", "muse-glimmer")
RING = 768  # rows of the windowed layers here: the window and a chunk of 512 tokens, padded
TOLERANCE, RING_TOLERANCE = 1e-10, 1e-6


@contextmanager
def every_position():
    """No rings: windowed layers keep all rows, in the order of llama.cpp's."""
    before = Parts.kv_class
    Parts.kv_class = staticmethod(lambda *args, **types: KVCache(*args[:4], **types))
    try:
        yield
    finally:
        Parts.kv_class = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", default="1,37,300,1500", help="prompt lengths")
    args = parser.parse_args()
    lengths = [int(n) for n in args.tokens.split(",")]
    cases = [(weight, "f16", "f16") for weight in WEIGHTS] + [("F32", *cache) for cache in CACHES]
    failed = 0
    columns = [f"{n} tokens" for n in lengths] + [f"{lengths[-1]}, no ring"]
    print("| architecture | weights | K, V | " + " | ".join(columns) + " |\n|" + "---|" * (3 + len(columns)))
    with tempfile.TemporaryDirectory() as folder:
        for arch, write in WRITERS.items():
            for weight, k, v in cases:
                if arch == "deepseek2" and k != v:  # K and V are one row
                    continue
                path = write(Path(folder) / "model.gguf", Shape(), weight)
                results = [compare_logits(path, n, n, args.device, args.threads, "ggml", k, v) for n in lengths]
                wraps = [arch in WINDOWED and n > RING for n in lengths]
                if arch in WINDOWED:
                    with every_position():
                        results.append(compare_logits(path, lengths[-1], lengths[-1], args.device, args.threads, "ggml", k, v))
                    wraps.append(False)
                cells = [f"{r.nmse:.2g}" for r in results] + ["-"] * (len(columns) - len(results))
                print(f"| {arch} | {weight} | {k}, {v} | " + " | ".join(cells) + " |", flush=True)
                for r, wrapped in zip(results, wraps, strict=True):
                    others = round((1 - r.argmax_agree) * r.tokens)
                    failed += r.nmse > (RING_TOLERANCE if wrapped else TOLERANCE) or others > wrapped
    if failed:
        print(f"{failed} cells are above their limit or differ in an argmax", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
