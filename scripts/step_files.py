#!/usr/bin/env python3
"""The Python files that one decode step of one sequence crosses, in call order: the embedded pair, with drafts.

    step_files.py [--calls]

A file is listed each time control enters it from another one by a call; returns are not listed. ``--calls`` names the function that was entered.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pyggml_spec as ps
from pyggml_spec.engine.sequence import GenerationOptions

PACKAGE = Path(ps.__file__).parent
PROMPT = "def quicksort(items):\n    "
WARMUP = 12  # steps, in which graphs are built


def entries(width: int = 8) -> list[tuple[str, str]]:
    """(file, function) per entry of one step that drafts and verifies ``width`` rows."""
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=width) as session:
        engine = session.scheduler
        stream: Iterator[list[int]] = engine.submit(session.prompt_ids(PROMPT), GenerationOptions(64, ignore_end=True), slot=0)
        for _ in range(WARMUP):
            next(stream)
        seen: list[tuple[str, str]] = []

        def trace(frame: FrameType, event: str, arg: Any) -> None:
            path = Path(frame.f_code.co_filename)
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
            if event == "call" and path.is_relative_to(PACKAGE) and caller != frame.f_code.co_filename:
                seen.append((str(path.relative_to(PACKAGE)), frame.f_code.co_qualname))

        sys.setprofile(trace)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        list(stream)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true")
    args = parser.parse_args()
    seen = entries()
    for file, function in seen if args.calls else ():
        print(f"{file}: {function}")
    order = list(dict.fromkeys(file for file, _ in seen))
    for i, file in enumerate(order, 1):
        print(f"{i:3} {file} ({sum(file == other for other, _ in seen)} entries)")


if __name__ == "__main__":
    main()
