#!/usr/bin/env python3
"""Does any kernel of a CUDA library read what a kernel in front of it may still be writing?

    check_early_reads.py LIBRARY_OR_OBJECT...      cuobjdump is on PATH (CUDA toolkit, or pip install nvidia-cuda-cuobjdump)

Kernels that overlap (GGML_CUDA_PDL) wait with `griddepcontrol.wait`. What the compiler takes for constant, because a pointer is __restrict__, it may read
before that: upstream's attention kernels read queries so. Prints each kernel with such a read (LDG with .CONSTANT before the first ACQBULK); exit code 1 if
there is one. Products of few rows read the tables of IQ types so, which nothing writes.
"""

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TABLES = "mul_mat_sb"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9_.]+)")


def early_reads(sass: str) -> list[str]:
    """Names of kernels in a disassembly that read constants before they wait."""
    found = []
    for function in sass.split("Function : ")[1:]:
        opcodes = INSTRUCTION.findall(function)
        wait = next((at for at, opcode in enumerate(opcodes) if opcode == "ACQBULK"), 0)
        if TABLES not in function.split(maxsplit=1)[0] and any(
            opcode.startswith("LDG.") and ".CONSTANT" in opcode for opcode in opcodes[:wait]
        ):
            found.append(function.split(maxsplit=1)[0])
    return found


def of_cubin(path: Path) -> tuple[int, list[str]]:
    sass = subprocess.run(["cuobjdump", "-sass", path], check=True, capture_output=True, text=True).stdout
    return sass.count("Function : "), early_reads(sass)


def main() -> int:
    failed = 0
    for path in sys.argv[1:] or sys.exit(__doc__):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            subprocess.run(["cuobjdump", "-xelf", "all", Path(path).resolve()], check=True, cwd=folder, stdout=subprocess.DEVNULL)
            parts = list(pool.map(of_cubin, Path(folder).glob("*.cubin")))  # a library's take minutes one after the other
        kernels, found = sum(n for n, _ in parts), [name for _, names in parts for name in names]
        if not kernels:
            sys.exit(f"{path} has no kernels")
        failed += len(found)
        print(f"{path}: {kernels} kernels, {len(found)} of them read early", *sorted(found), sep="\n  ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
