#!/usr/bin/env python3
"""The Python files that one decode step of one sequence crosses, in call order: the embedded pair, with drafts.

    step_files.py [--calls] [--policy]

An entry is a call from another file of the package; constructors that ``dataclass`` writes and properties count, returns do not. ``--calls`` names the
functions that are entered; ``--policy`` lets the policy choose the verify length, and runs a step that verifies drafts.
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
WARMUP, TRACED = 12, 8  # steps: graphs are built in the first; of the others the shortest walk counts, without polls of the machine's load


def entries(width: int | None = 8) -> list[tuple[str, str, str]]:
    """(file, function, calling file) per entry of a step that drafts and verifies ``width`` rows, None for those that the policy chooses."""
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=width) as session:
        engine = session.engine
        stream: Iterator[list[int]] = engine.submit(session.prompt_ids(PROMPT), GenerationOptions(96, ignore_end=True), slot=0)
        for _ in range(WARMUP):
            next(stream)
        walks = [_trace(engine.step) for _ in range(TRACED)]
        list(stream)
    return min((walk for walk in walks if any(function == "InputBuilder.block" for _, function, _ in walk)), key=len)


def _trace(step: Any) -> list[tuple[str, str, str]]:
    seen: list[tuple[str, str, str]] = []

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or (file := _file(frame)) is None:
            return
        caller, back = "", frame.f_back
        while back is not None and not (caller := _file(back) or ""):
            back = back.f_back
        if caller != file:
            seen.append((file, frame.f_code.co_qualname, caller))

    sys.setprofile(trace)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def _file(frame: FrameType) -> str | None:
    """Within the package; that of the class for code that ``dataclass`` has written."""
    path = Path(frame.f_code.co_filename if frame.f_code.co_filename != "<string>" else frame.f_globals.get("__file__") or "")
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--policy", action="store_true")
    args = parser.parse_args()
    seen = entries(None if args.policy else 8)
    for file, function, caller in seen if args.calls else ():
        print(f"{file}: {function} (from {caller})")
    order = list(dict.fromkeys(file for file, *_ in seen))
    for i, file in enumerate(order, 1):
        print(f"{i:3} {file} ({sum(file == other for other, *_ in seen)} entries)")
    print(f"{len(order)} files, {len(seen)} entries")


if __name__ == "__main__":
    main()
