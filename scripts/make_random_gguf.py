#!/usr/bin/env python3
"""Writes a random-weight target and its dflash drafter with the shapes of a real model, in seconds. llama.cpp loads both.

    make_random_gguf.py 4B --quant Q4_K --out models/
"""

import argparse
import time
from pathlib import Path

from pyggml_spec.tools.random_model import Shape, write_dflash, write_qwen35

QWEN35 = dict(head_size=256, n_rot=64, delta_head=128, n_vocab=248320, n_ctx=262144, draft_head_size=128, rope_base=1e7)
SHAPES = {
    "tiny": Shape(),
    "0.8B": Shape(n_layer=24, n_embd=1024, n_ff=3584, n_head=8, n_head_kv=2, delta_k=16, delta_v=16,
                  draft_layers=5, draft_heads=16, draft_heads_kv=8, draft_ff=3072, target_layers=(2, 7, 12, 17, 22), **QWEN35),
    "4B": Shape(n_layer=32, n_embd=2560, n_ff=9216, n_head=16, n_head_kv=4, delta_k=16, delta_v=32,
                draft_layers=5, draft_heads=32, draft_heads_kv=8, draft_ff=9728, target_layers=(2, 9, 16, 23, 30), **QWEN35),
    "9B": Shape(n_layer=32, n_embd=4096, n_ff=12288, n_head=16, n_head_kv=4, delta_k=16, delta_v=32,
                draft_layers=5, draft_heads=32, draft_heads_kv=8, draft_ff=12288, target_layers=(2, 9, 16, 23, 30), **QWEN35),
    "27B": Shape(n_layer=64, n_embd=5120, n_ff=17408, n_head=24, n_head_kv=4, delta_k=16, delta_v=48,
                 draft_layers=5, draft_heads=32, draft_heads_kv=8, draft_ff=17408, target_layers=(2, 17, 32, 47, 62), **QWEN35),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--quant", default="Q4_K")
    parser.add_argument("--out", type=Path, default=Path("models"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for kind, write in (("target", write_qwen35), ("drafter", write_dflash)):
        started = time.perf_counter()
        path = write(args.out / f"{args.shape}-{args.quant}-{kind}.gguf", SHAPES[args.shape], args.quant)
        print(f"{path}  {path.stat().st_size / 1e9:.2f} GB  {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
