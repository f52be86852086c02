#!/usr/bin/env python3
"""The files of llama.cpp's test-llama-archs, one per architecture: logits equal llama.cpp's, or the file is refused with the reason.

    compare_archs.py (--tool test-llama-archs | --files FOLDER) [--only TEXT] [--tokens 37]

--tool writes the files anew. Files have scales of every matrix, of which llama.cpp reads and does not apply some; those that pyspec refuses for that are
set to 1 and listed. Exit code 3 if a file differs or ends the process.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


import numpy as np
from gguf_io.build import Model

from pyggml_spec.errors import PyspecError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import open_target
from pyggml_spec.tools.compare import compare_logits

UNAPPLIED = re.compile(r"has the scale '([^']+)', which llama\.cpp reads and does not apply")


def without_scales(path: Path) -> tuple[Path, int]:
    """The file with unapplied scales set to 1, and how many there were."""
    model, count = Model(path), 0
    while True:
        with GGUFFile(path) as file:
            try:
                open_target(file).specs()
                return path, count
            except PyspecError as error:
                found = UNAPPLIED.search(str(error))
        if found is None:
            return path, count
        name = found[1]
        for other in [n for n in model.tensors if n.endswith(f".{name.split('.')[-2]}.scale") or n == name]:
            shape, kind, data = model.tensors[other]
            model.tensors[other] = [shape, kind, np.ones(len(data) // 4, np.float32).tobytes()]
            count += 1
        path = model.write(path.with_suffix(".ones.gguf"))


def one(path: Path, tokens: int) -> dict:
    try:
        path, ones = without_scales(path)
        found = compare_logits(path, tokens, device="CPU", threads=1, kernels="ggml", greedy=4)
    except PyspecError as error:
        return {"refused": str(error).replace(f"{path} ", "").replace(f"{path}: ", "")}
    return {"nmse": found.nmse, "ones": ones}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", type=Path, help="test-llama-archs of the pinned llama.cpp")
    parser.add_argument("--files", type=Path, help="a folder of its files")
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--tokens", type=int, default=37)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args.tokens)))
        return
    if (args.tool is None) == (args.files is None):
        parser.error("give --tool or --files")
    equal = refused = differing = 0
    with tempfile.TemporaryDirectory() as made:
        if args.tool:
            subprocess.run([args.tool, "-o", made], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for path in sorted((args.files or Path(made)).glob("*.gguf")):
            if args.only not in path.stem or path.stem.endswith(".ones"):
                continue
            command = [sys.executable, __file__, "--one", path, "--tokens", str(args.tokens)]
            run = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=300)
            answer = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {"ended": run.stderr[-300:]}
            equal, refused = equal + (answer.get("nmse") == 0), refused + ("refused" in answer)
            differing += answer.get("nmse") != 0 and "refused" not in answer
            shown = (
                answer.get("refused")
                or answer.get("ended")
                or f"NMSE {answer['nmse']:.2g}" + (f", {answer['ones']} scales set to 1" if answer["ones"] else "")
            )
            print(f"{path.stem}: {shown}", flush=True)
    print(f"{equal} equal, {refused} refused, {differing} others")
    sys.exit(3 if differing else 0)


if __name__ == "__main__":
    main()
