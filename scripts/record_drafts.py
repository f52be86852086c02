#!/usr/bin/env python3
"""Writes which drafts of the embedded pair are right: what tests/decode/test_width.py replays.

    record_drafts.py [-n 256] [--out tests/decode/recorded_drafts.json]

For every prompt that the pair comes with, its greedy text is decoded token by token; behind each token a block of every width is drafted and
verified, of which nothing is kept. The file has the step of each width in plain steps as it was on one machine ("costs", see the test) and,
per prompt and width, one hexadecimal digit per token: how many of the drafts behind it were right.
"""

import argparse
import json
from pathlib import Path

import pyggml_spec as ps
from pyggml_spec.session import DEMO
from pyggml_spec.tools.prompts import read_prompts

WIDTHS = (2, 4, 8, 16)
OUT = Path(__file__).parents[1] / "tests" / "decode" / "recorded_drafts.json"


def recorded(session, text: str, tokens: int) -> dict[str, str]:
    """Digits by width."""
    engine, ids = session.engine, session.tokenizer.encode(text)
    engine.reset()
    engine.prefill(ids)
    digits: dict[int, list[str]] = {width: [] for width in WIDTHS}
    for _ in range(tokens):
        if session.tokenizer.is_end(engine.cursor.pending):
            break
        for width in WIDTHS:
            result = engine.fused_step(width)
            agree = (result.ids[:-1] == result.tokens[1:]).tolist()
            digits[width].append(f"{agree.index(False) if False in agree else width - 1:x}")
            if width < WIDTHS[-1]:
                engine.rollback(engine.rollback_range()[0])
        engine.accept(1, int(result.ids[0]))
    return {str(width): "".join(found) for width, found in digits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    prompts = read_prompts(DEMO / "prompts.jsonl")
    with ps.load(device="CPU", threads=1, n_ctx=2048, draft_width=16) as session:
        rows = [recorded(session, prompt.text, args.tokens) for prompt in prompts]
    args.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
