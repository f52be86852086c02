#!/usr/bin/env python3
"""Are the bits of a row independent of the batch size? For libggml-cuda with patches/0024 and GGML_CUDA_BATCH_INVARIANT=1.

    GGML_CUDA_BATCH_INVARIANT=1 check_invariance.py --device CUDA0                                # tiny random models
    GGML_CUDA_BATCH_INVARIANT=1 check_invariance.py --device CUDA0 -m target.gguf -md drafter.gguf

Compares logits of plain steps with blocks of every width, and with steps of 2 to 4 sequences of 1 to 16 rows, for up to 64 rows. Prints "same / all
rows" per step, in brackets where equality is not guaranteed. Exit code 1 for a difference where it is guaranteed; with --all, for any.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from check_replay import pairs

import pyggml_spec as ps
from pyggml_spec.engine.batch import Prefill, Verify
from pyggml_spec.engine.options import candidate_widths

PROMPT, ROWS, SEQUENCES = 24, 16, 4
TOGETHER = ((2, 1), (3, 1), (4, 1), (4, 2), (4, 4), (4, 8), (2, 16), (3, 16), (4, 16))  # sequences, rows of each
# attention that the vector kernel does not take (rows of 576 values, keys of 192 with values of 128), or positions that are chosen first
UNCOVERED = ("deepseek2", "deepseek32", "glm-dsa", "glm5-next", "kimi-k3", "kimi-linear", "mimo2", "minimax-m3", "mistral4")


def alone(engine, tokens: list[int]) -> list[np.ndarray]:
    """F32 [n_vocab] after each of ROWS tokens computed one by one."""
    begin(engine, tokens)
    out = []
    for at in range(PROMPT, PROMPT + ROWS):
        engine.cursor.advance(0, tokens[at])
        engine.plain_step()
        out.append(engine.candidates(0)[1].copy())
        engine.accept(1, 0)
    return out


def block(engine, tokens: list[int], width: int) -> list[np.ndarray]:
    begin(engine, tokens)
    engine.cursor.advance(0, tokens[PROMPT])
    engine.verify_step(tokens[PROMPT + 1 : PROMPT + width])
    out = [engine.candidates(row)[1].copy() for row in range(width)]
    engine.accept(1, 0)
    return out


def begin(engine, tokens: list[int]) -> None:
    engine.reset()
    engine.read_candidates(None)
    engine.prefill(tokens[:PROMPT])


def together(session: ps.Session, texts: list[list[int]], width: int, count: int) -> list[list[np.ndarray]]:
    """The same of ``count`` sequences in one step."""
    with session.batch(count) as scheduler:
        engine = scheduler.runner
        slots = [engine.admit(drafting=False, candidates=None) for _ in range(count)]
        for slot, text in zip(slots, texts):
            engine.step({slot: Prefill(text[:PROMPT])})
            engine.choose(text[PROMPT], slot)
        drafts = {slot: np.array(text[PROMPT + 1 : PROMPT + width], np.int32) for slot, text in zip(slots, texts)}
        engine.step({slot: Verify(drafts[slot]) if width > 1 else Verify() for slot in slots})
        return [[engine.candidates(row, slot)[1].copy() for row in range(width)] for slot in slots]


def check(name: str, target: str, drafter: str, device: str, promised: bool) -> bool:
    """Prints a table row; whether all rows are equal where ``promised``."""
    with ps.load(target, drafter, device=device, n_ctx=512, draft_width=16) as session:
        rng, engine = np.random.default_rng(3), session.runner
        texts = [rng.integers(0, min(256, session.target.n_vocab), PROMPT + ROWS).tolist() for _ in range(SEQUENCES)]
        want = [alone(engine, text) for text in texts]
        cells, right = [], True
        for count, width in (*((1, w) for w in candidate_widths(ROWS) if w > 1), *TOGETHER):
            got = [block(engine, texts[0], width)] if count == 1 else together(session, texts, width, count)
            same = sum(np.array_equal(row, want[i][j]) for i, rows in enumerate(got) for j, row in enumerate(rows))
            right &= same == count * width or not promised
            cells.append(f"{count}x{width} {same}/{count * width}" if promised else f"({count}x{width} {same}/{count * width})")
    print(f"{name}: {', '.join(cells)}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("-m", "--model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("--only", default="", metavar="WORD", help="pairs whose names contain it")
    parser.add_argument("--all", action="store_true", help="judge what is not promised too")
    args = parser.parse_args()
    right, found = True, False
    with tempfile.TemporaryDirectory() as folder:
        for name, target, drafter, spec in pairs(args, Path(folder)):
            if args.model or (name.endswith("Q4_K") and spec is None):
                found, promised = True, args.all or bool(args.model) or not name.startswith(UNCOVERED)
                try:
                    right &= check(name, str(target), str(drafter), args.device, promised)
                except ps.PyspecError as why:
                    print(f"{name}: {why}", flush=True)
                    right &= not promised
    if not found:
        sys.exit(f"nothing was compared: no pair's name contains '{args.only}'")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
