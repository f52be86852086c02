#!/usr/bin/env python3
"""Everything that has to hold on an NVIDIA GPU before a patch lands, as one command.

    check_cuda.py --tools build/patched/build/bin [--device CUDA0] [--jobs 8] [--only replay] [--logs DIR]

--tools: llama.cpp with patches/, built by build_patched_llamacpp.py with --cuda and the target test-backend-ops; its libraries are used by all checks.
cuobjdump and compute-sanitizer of the CUDA toolkit are on PATH. About an hour of work, JOBS at a time. Exit code: how many checks failed.
Two failures are the sanitizer's own (docs/benchmarks/reports/2026-11-27-sanitizer.md): memcheck of what makes ggml's pool grow by a mapping, unless the
build has GGML_CUDA_NO_VMM, and racecheck of products of few rows, whose logs must name nothing but copies into a stage (UBLKCP).
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from check_replay import DRAFTERS, TARGETS

SCRIPTS, TESTS = Path(__file__).parent, Path(__file__).parents[1] / "tests"
FEW = r"n=(1|2|7|8|9|16|17|64),k="  # rows for which these products have kernels of their own; racecheck takes minutes for more
SANITIZED = {  # operations with kernels of patches/, and which of their cases
    **dict.fromkeys(("DELTA_FRONT", "DELTA_STEP", "GATED_DELTA_NET", "GATE_MUL_MAT", "KV_MASK", "MOE_LAYER", "NORM_MUL_MAT", "QKV_ROWS", "ROPE_SET_ROWS", "SHARED_EXPERT"), ""),
    "FLASH_ATTN_EXT": r"hsk=(128|256).*nh=(2|3),nr23=\[(4|6|8),(1|3)\],kv=(256|1024|4352|512|1280),.*q(8|4)_0",
    "MUL_MAT": rf"type_a=(mxfp4|q4_K|q6_K|q8_0),type_b=f32.*{FEW}",
    "MUL_MAT_EPILOGUE": "",
    "MUL_MAT_ID": rf"type_a=(mxfp4|q4_K),type_b=f32.*{FEW}",
    "MUL_MAT_VEC_FUSION": "type=mxfp4",
    "SET_ROWS": "type=(q8_0|q4_0|f16)",
}  # fmt: skip


def checks(tools: Path, device: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Commands, and what their environment has besides, by name."""
    ops, python = [str(tools / "test-backend-ops"), "test", "-b", device], [sys.executable]
    found: dict[str, tuple[list[str], dict[str, str]]] = {
        "operations": ([*ops, "-j", "8"], {}),
        "tests": ([*python, "-m", "pytest", "-q", "-m", "gpu", str(TESTS)], {}),
        "early reads": ([*python, str(SCRIPTS / "check_early_reads.py"), str(tools / "libggml-cuda.so")], {}),
    }
    for tool in ("memcheck", "racecheck"):
        for op, cases in SANITIZED.items():
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *ops, "-o", op]
            found[f"{tool} {op}"] = [*command, *(["-p", cases] if cases else [])], {}
    for name in (*TARGETS, "mtp", *(f"{drafter} drafter" for drafter in DRAFTERS)):
        chosen = ["--device", device, "--only", f"{name}, " if name in TARGETS else name]
        found[f"replay {name}"] = [*python, str(SCRIPTS / "check_replay.py"), *chosen], {}
        if name == "mtp":  # check_invariance.py has no pairs of it
            continue
        found[f"invariance {name}"] = [*python, str(SCRIPTS / "check_invariance.py"), *chosen], {"GGML_CUDA_BATCH_INVARIANT": "1"}
    return found


def check(logs: Path, tools: Path, name: str, command: list[str], env: dict[str, str]) -> bool:
    began, log = time.monotonic(), logs / f"{name.replace(' ', '-').replace(',', '')}.log"
    libraries = {"LLAMA_CPP_LIB_PATH": str(tools), "LD_LIBRARY_PATH": os.pathsep.join([str(tools), os.environ.get("LD_LIBRARY_PATH", "")])}
    with log.open("w") as output:
        status = subprocess.run(command, check=False, stdout=output, stderr=output, env=os.environ | libraries | env).returncode
    print(f"{'passed' if status == 0 else f'FAILED, see {log}'}: {name} ({time.monotonic() - began:.0f} s)", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--jobs", type=int, default=4, help="checks at a time")
    parser.add_argument("--only", default="", metavar="WORD", help="checks whose names contain it")
    parser.add_argument("--logs", type=Path, default=Path("build/check-cuda"))
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    chosen = {name: what for name, what in checks(args.tools.resolve(), args.device).items() if args.only in name}
    with ThreadPoolExecutor(args.jobs) as pool:
        one = partial(check, args.logs, args.tools.resolve())
        failed = list(pool.map(lambda name: one(name, *chosen[name]), chosen)).count(False)
    print(f"{len(chosen) - failed} of {len(chosen)} passed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
