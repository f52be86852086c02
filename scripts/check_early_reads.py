#!/usr/bin/env python3
"""Does any kernel of a CUDA library read what a kernel in front of it may still be writing?

    check_early_reads.py LIBRARY_OR_OBJECT...      cuobjdump is on PATH (CUDA toolkit, or pip install nvidia-cuda-cuobjdump)

Kernels that overlap (GGML_CUDA_PDL) wait with `griddepcontrol.wait`. What the compiler takes for constant, because a pointer is __restrict__, it may read
before that: upstream's attention kernels read queries so. Prints each kernel with such a read (LDG with .CONSTANT before the first ACQBULK); exit code 1 if
there is one. Products of few rows read the tables of IQ types so, which nothing writes.
"""

import re
import subprocess
import sys

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


def main() -> int:
    failed = 0
    for path in sys.argv[1:] or sys.exit(__doc__):
        sass = subprocess.run(["cuobjdump", "-sass", path], check=True, capture_output=True, text=True).stdout
        if "Function : " not in sass:
            sys.exit(f"{path} has no kernels")
        found = early_reads(sass)
        failed += len(found)
        print(f"{path}: {sass.count('Function : ')} kernels, {len(found)} of them read early", *found, sep="\n  ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
