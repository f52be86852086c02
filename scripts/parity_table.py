#!/usr/bin/env python3
"""Logits of pyspec against llama.cpp's, for every architecture, weight type, cache type and prompt length: the table of docs/parity.md.

    parity_table.py [--device CPU] [--tokens 1,37,300,1500]

Models are tiny and random (random norms, gates, routers; sliding windows of 24). Each cell is the NMSE of all logits; 0 is bit-equality.
Exit code 3 if one is above 1e-10 or a row's argmax differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from pyggml_spec.tools.compare import compare_logits
from pyggml_spec.tools.random_archs import write_gemma4, write_laguna, write_llama, write_qwen3, write_qwen35moe
from pyggml_spec.tools.random_model import Shape, write_qwen35

WRITERS = {
    "qwen35": write_qwen35, "qwen35moe": write_qwen35moe, "qwen3": write_qwen3, "llama": write_llama,
    "gemma4": write_gemma4, "gemma4 routed": lambda *args: write_gemma4(*args, n_per_layer=0, shared=False, routed=True), "laguna": write_laguna,
}  # fmt: skip
WEIGHTS = ("F32", "Q8_0", "Q4_K")
CACHES = (("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f16", "q8_0"))
TOLERANCE = 1e-10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", default="1,37,300,1500", help="prompt lengths")
    args = parser.parse_args()
    lengths = [int(n) for n in args.tokens.split(",")]
    cases = [(weight, "f16", "f16") for weight in WEIGHTS] + [("F32", *cache) for cache in CACHES]
    failed = 0
    print("| architecture | weights | K, V | " + " | ".join(f"{n} tokens" for n in lengths) + " |\n|" + "---|" * (3 + len(lengths)))
    with tempfile.TemporaryDirectory() as folder:
        for arch, write in WRITERS.items():
            for weight, k, v in cases:
                path = write(Path(folder) / "model.gguf", Shape(), weight)
                results = [compare_logits(path, n, n, args.device, args.threads, k, v) for n in lengths]
                print(f"| {arch} | {weight} | {k}, {v} | " + " | ".join(f"{r.nmse:.2g}" for r in results) + " |", flush=True)
                failed += sum(r.nmse > TOLERANCE or r.argmax_agree < 1 for r in results)
    if failed:
        print(f"{failed} cells are above {TOLERANCE:g} or differ in an argmax", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
