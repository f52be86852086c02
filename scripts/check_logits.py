#!/usr/bin/env python3
"""Does a device compute what ggml's CPU kernels compute? Tiny random models of every architecture: a prompt, plain steps, a block.

    check_logits.py --device CUDA0 [--only qwen3]

Prints median and largest NMSE of the rows of each. Exit code 1 if a row of one is further off than rounding takes it, or a model is refused.
Rounding changes which experts a router chooses where scores lie close to each other, and so all rows behind: of such models half of the rows count,
and they have bounds of their own.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from check_invariance import PROMPT, ROWS, alone, block
from check_replay import pairs
from gguf import GGUFReader

import pyggml_spec as ps

# NMSE by whether experts are chosen: with F32 weights, and with other types, which round activations
FAR = {False: (1e-4, 1e-2), True: (1e-2, 0.2)}


def routed(target: Path) -> bool:
    return any("exps" in tensor.name for tensor in GGUFReader(target).tensors)


def logits(target: Path, drafter: Path, device: str, kernels: str | None = None) -> dict[str, np.ndarray]:
    """F32 [rows, n_vocab] of each."""
    with ps.load(target, drafter, device=device, kernels=kernels, threads=2, n_ctx=512, draft_width=ROWS) as session:
        engine = session.runner
        tokens = np.random.default_rng(3).integers(0, min(256, session.target.n_vocab), PROMPT + ROWS).tolist()
        out = {"prompt": engine.logits(tokens)}
        return out | {"plain": np.stack(alone(engine, tokens)), "block": np.stack(block(engine, tokens, ROWS))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--only", default="", metavar="WORD", help="models whose names contain it")
    parser.set_defaults(model=None)
    args = parser.parse_args()
    right, found = True, False
    with tempfile.TemporaryDirectory() as folder:
        for name, target, drafter, spec in pairs(args, Path(folder)):
            if spec is not None or "drafter" in name:
                continue
            found, cells, experts = True, [], routed(target)
            far = FAR[experts][not name.endswith(", F32")]
            try:
                want, got = logits(target, drafter, "CPU", "ggml"), logits(target, drafter, args.device)
            except ps.PyspecError as why:
                print(f"{name}: {why}", flush=True)
                right = False
                continue
            for part, rows in want.items():
                error = ((got[part] - rows).astype(float) ** 2).sum(1) / (rows.astype(float) ** 2).sum(1)
                right &= bool((np.median(error) if experts else error.max()) <= far)  # not of NaN either
                cells.append(f"{part} {len(error)} rows {np.median(error):.1e} {error.max():.1e}")
            print(f"{name}: {', '.join(cells)}", flush=True)
    if not found:
        sys.exit(f"nothing was compared: no model's name contains '{args.only}'")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
