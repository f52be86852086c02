#!/usr/bin/env python3
"""Writes which drafts of the embedded pair are right: what tests/speculation/test_policy.py replays.

    record_drafts.py [-n 256] [--out tests/speculation/recorded_drafts.json]
    record_drafts.py --chain                (of the MTP layer: one width is enough, as no draft knows how many follow)

For every prompt that the pair comes with, its greedy text is decoded token by token; behind each token a block of every width is drafted and
verified, of which nothing is kept. The file has the step of each width in plain steps as it was on one machine ("costs", see the test) and,
per prompt and width, one hexadecimal digit per token: how many of the drafts behind it were right.
"""

import argparse
import json
from pathlib import Path

import pyggml_spec as ps
from pyggml_spec.loading import DEMO
from pyggml_spec.tools.prompts import read_prompts

WIDTHS = (2, 4, 8, 16)
OUT = Path(__file__).parents[1] / "tests" / "speculation" / "recorded_drafts.json"
CHAINS = OUT.with_name("recorded_chains.json")


def recorded(session, text: str, tokens: int, widths: tuple[int, ...] = WIDTHS) -> dict[str, str]:
    """Digits by width."""
    engine, ids = session.runner, session.tokenizer.encode(text)
    engine.reset()
    engine.prefill(ids)
    digits: dict[int, list[str]] = {width: [] for width in widths}
    for _ in range(tokens):
        if session.tokenizer.is_end(engine.cursor.last_token):
            break
        for width in widths:
            result = engine.fused_step(width)
            agree = (result.ids[:-1] == result.tokens[1:]).tolist()
            digits[width].append(f"{agree.index(False) if False in agree else width - 1:x}")
            if width < widths[-1]:
                engine.rollback(engine.rollback_range()[0])
        engine.accept(1, int(result.ids[0]))
    return {str(width): "".join(found) for width, found in digits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chain", action="store_true", help="the MTP layer's drafts instead of the block drafter's")
    args = parser.parse_args()
    spec, widths, out = (["draft-mtp"], WIDTHS[-1:], CHAINS) if args.chain else (["draft-dflash"], WIDTHS, OUT)
    prompts = read_prompts(DEMO / "prompts.jsonl")
    with ps.load(spec=spec, device="CPU", threads=1, n_ctx=2048, draft_width=16) as session:
        rows = [recorded(session, prompt.text, args.tokens, widths) for prompt in prompts]
    (args.out or out).write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
