"""The outcome of loading many pairs, an abort included."""

import json
import subprocess
import sys
from pathlib import Path

DIED = "the process died"


def load_all(pairs: list[tuple], tokens: int = 3) -> list:
    """For each (target, draft or None): None if it loaded and generated, else [name of what was raised, message]."""
    left, out = [[str(t), str(d) if d is not None else None, tokens] for t, d in pairs], []
    while len(out) < len(left):
        run = subprocess.run(
            [sys.executable, Path(__file__).with_name("load_many.py")],
            input=json.dumps(left[len(out) :]),
            capture_output=True,
            text=True,
            timeout=240,
        )
        out += [json.loads(line) for line in run.stdout.splitlines() if line.endswith(("]", "null"))]
        if run.returncode != 0:
            out.append([DIED, f"exit status {run.returncode}: {run.stderr[-2000:]}"])
    return out
