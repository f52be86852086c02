#!/usr/bin/env python3
"""Everything that has to hold on NVIDIA GPUs before a patch lands, as one command.

    check_cuda.py --tools build/patched/build/bin --sanitized build/patched-sanitized/build/bin [--devices 0,1,2,3] [--jobs 16] [--limit 300]
                  [--budget 3600] [--only replay memcheck ...]

--tools: llama.cpp with patches/, built by build_patched_llamacpp.py with --cuda and the target test-backend-ops; its libraries are used by all checks but
memcheck and racecheck, which take those of --sanitized, built with --sanitizers too. cuobjdump and compute-sanitizer of the CUDA toolkit are on PATH. Each
check sees one of the cards, which take turns. A check fails too if it compares nothing or is not through within --limit seconds; behind --budget seconds none
is started any more, and those are named. Exit code: 0 only if all were run and passed.
"""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from check_invariance import UNCOVERED
from check_replay import DRAFTERS, LARGE, TARGETS

SCRIPTS, TESTS = Path(__file__).parent, Path(__file__).parents[1] / "tests"
FEW = r"n=(1|2|7|8|9|16|17|64),k="  # rows for which these products have kernels of their own; racecheck takes minutes for more
EXPERTS = ["n_expert=16,", "n_expert=(?!16,).*close=0", "n_expert=(?!16,).*close=1"]
SANITIZED = {  # operations with kernels of patches/, and which of their cases, in parts
    **{op: [""] for op in ("ARGMAX", "DELTA_FRONT", "DELTA_STEP", "GATED_DELTA_NET", "GATE_MUL_MAT", "KV_MASK", "NORM_MUL_MAT", "QKV_ROWS", "RMS_NORM", "RMS_NORM_MUL_ROPE", "ROPE_SET_ROWS", "SHARED_EXPERT")},
    "FLASH_ATTN_EXT": [
        *(rf"hsk={size}.*nh=(2|3|4),nr23=\[{heads},.*kv=(256|1024|4352|512|1280|16640|8448),.*{kind}" for size in (128, 256) for heads in (4, 6, 8) for kind in ("q8_0", "q4_0")),
        r"window=\d+,first=1500|shared_mask|hsk=256.*kv=(512|1792),.*type_K=f16.*columns=",
    ],
    "MOE_LAYER": EXPERTS,
    "MUL_MAT": [rf"type_a=(mxfp4|q4_K|q6_K|q8_0),type_b=f32.*{FEW}"],
    "MUL_MAT_EPILOGUE": [""],
    "MUL_MAT_ID": [rf"type_a=(mxfp4|q4_K),type_b=f32.*{FEW}"],
    "MUL_MAT_VEC_FUSION": ["type=mxfp4"],
    "ROPE": [r"ne_a=\[\d+,\d+,(65|67|100|131),"],
    "SET_ROWS": ["type_dst=(q8_0|q4_0|f16)"],
}  # fmt: skip
# racecheck warns of ggml's vector kernel of attention there, whose warps write where their lanes have read or written, without a barrier between
WARNED = {("QKV_ROWS", ""), ("FLASH_ATTN_EXT", SANITIZED["FLASH_ATTN_EXT"][-1])}
VECTOR = ["--kernel-name-exclude", "kernel_substring=flash_attn_ext_vec"]
SIZES = "72|80|128|192|256"
LONG = {  # operations that take long, in parts that together are all of their cases
    "MOE_LAYER": EXPERTS,
    "FLASH_ATTN_EXT": [
        "hsk=64,.*,nb=[13],",
        "hsk=64,.*,nb=(?![13],)",
        *(f"hsk={size}," for size in SIZES.split("|")),
        f"hsk=(?!(64|{SIZES}),)",
    ],
    "MUL_MAT": ["type_a=[qm]", "type_a=[^qm]"],
    "MUL_MAT_ID": ["type_a=[qm]", "type_a=[^qm]"],
    "CPY": [""],
}
HOST = ("qwen4exp",)  # architectures that CPUs alone compute: it hashes n-grams


class Check(NamedTuple):
    command: list[str]
    counted: str  # what tells in its output how much it compared
    tools: Path  # whose libraries it runs on
    env: dict[str, str] = {}  # noqa: RUF012 - read only


def others(names: Iterable[str]) -> str:
    """A regular expression for all operations but ``names``; test-backend-ops takes none with brackets."""
    starts = {name[:end] for name in names for end in range(len(name) + 1)}
    following = {start: "".join(sorted(longer[-1] for longer in starts if longer and longer[:-1] == start)) for start in sorted(starts)}
    parts = [f"^{start}[^{after}]" if after else f"^{start}." for start, after in following.items()]
    return "|".join(parts + [f"^{start}$" for start in following if start not in (*names, "")])


def checks(tools: Path, sanitized: Path) -> dict[str, Check]:
    """By name, in the order in which they are started."""
    found: dict[str, Check] = {}
    ops, passed = [str(tools / "test-backend-ops"), "test", "-b", "CUDA0"], r"\d+/(\d+) tests passed"

    def operations(names: str, cases: str, name: str = "") -> None:
        quiet = {"OMP_WAIT_POLICY": "passive"}  # many threads of many processes
        command = [*ops, "-o", names, "-p", cases, "-j", "8"]
        found[f"operations {name or names} {cases}".strip(" ,")] = Check(command, passed, tools, quiet)

    def scripts(kind: str, names: Iterable[str], counted: str, env: dict[str, str] = {}, *more: str) -> None:  # noqa: B006 - read only
        for name in names:
            command = [sys.executable, str(SCRIPTS / f"check_{kind}.py"), "--device", "CUDA0", "--only", name, *more]
            found[f"{kind} {name.strip(', ')}"] = Check(command, counted, tools, env)

    targets = [f"{name}, " for name in TARGETS if name not in (*HOST, *LARGE)]
    drafters = [f"{name} drafter" for name in DRAFTERS]
    promised = [name for name in (*targets, *drafters) if not name.startswith(UNCOVERED)]
    reads = [sys.executable, str(SCRIPTS / "check_early_reads.py"), str(tools / "libggml-cuda.so")]
    found["early reads"] = Check(reads, r"(\d+) kernels", tools)
    for op, parts in LONG.items():
        for part in parts:
            operations(op, part)
    scripts("logits", targets, r"(\d+) rows")
    scripts("replay", [*targets, "mtp", *drafters], r"of (\d+) the same bit", {}, "--all")
    for name in LARGE:
        for kind in ("q8_0", "q4_0"):
            options = ["--only", name, "--cache-type", kind, "--prompt", "1900", "--all"]
            command = [sys.executable, str(SCRIPTS / "check_replay.py"), "--device", "CUDA0", *options]
            found[f"replay {name}, {kind}"] = Check(command, r"of (\d+) the same bit", tools)
    scripts("invariance", promised, r"[:,] \d+x\d+ \d+/(\d+)", {"GGML_CUDA_BATCH_INVARIANT": "1"})
    for op in SANITIZED:
        if op not in LONG:
            operations(op, "")
    operations(others(LONG | SANITIZED), "", "others")
    marked = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    found["tests"] = Check([sys.executable, "-m", "pytest", "-q", "-m", "gpu", *marked], r"^(\d+) passed(?!.*skipped)", tools)
    # ggml builds a graph anew where updating it is refused, which memcheck would call an error
    for tool, *more in (("memcheck", "--report-api-errors", "no"), ("racecheck",)):
        sanitizer, operation = ["compute-sanitizer", "--tool", tool, *more], [str(sanitized / "test-backend-ops"), *ops[1:]]
        for op, parts in SANITIZED.items():
            for cases in parts:
                apart = VECTOR if tool == "racecheck" and (op, cases) in WARNED else []
                command = [*sanitizer, *apart, "--error-exitcode", "1", *operation, "-o", op, "-p", cases]
                found[f"{tool} {op} {cases}".strip(" ,")] = Check(command, passed, sanitized)
    return found


def run(check: Check, log: Path, card: str, limit: float) -> tuple[int, str]:
    """How much was compared, and what is wrong."""
    path = os.pathsep.join([str(check.tools), os.environ.get("LD_LIBRARY_PATH", "")])
    libraries = {"LLAMA_CPP_LIB_PATH": str(check.tools), "LD_LIBRARY_PATH": path}
    env, status = os.environ | libraries | check.env | {"CUDA_VISIBLE_DEVICES": card}, None
    with log.open("w") as output:
        process = subprocess.Popen(check.command, stdout=output, stderr=output, env=env, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # scripts have processes of their own
            process.wait()
    compared = sum(map(int, re.findall(check.counted, log.read_text(errors="replace"), re.MULTILINE)))
    if status is None:
        return compared, f"stopped, it was not through within {limit:.0f} s"
    return compared, f"exit code {status}" if status else "" if compared else "nothing was compared"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--sanitized", type=Path, default=Path("build/patched-sanitized/build/bin"))
    parser.add_argument("--devices", default=os.environ.get("CUDA_VISIBLE_DEVICES") or "0", help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--jobs", type=int, default=0, help="checks at a time; default: six per card")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a check")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no check is started")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="checks whose names contain one of them")
    parser.add_argument("--logs", type=Path, default=Path("build/check-cuda"))
    args = parser.parse_args()
    began, cards = time.monotonic(), args.devices.split(",")
    found = checks(args.tools.resolve(), args.sanitized.resolve())
    chosen = {name: what for name, what in found.items() if any(word in name for word in args.only)}
    if not chosen:
        sys.exit(f"no check's name contains {' or '.join(args.only)}")
    folders = sorted({check.tools for check in chosen.values()})
    needed = {check.command[0] for check in chosen.values()} | {str(tools / "test-backend-ops") for tools in folders}
    missing = [tool for tool in sorted(needed | ({"cuobjdump"} if "early reads" in chosen else set())) if shutil.which(tool) is None]
    missing += [f"{tools}/libggml-cuda.so" for tools in folders if not (tools / "libggml-cuda.so").exists()]
    missing += ["pytest"] if "tests" in chosen and find_spec("pytest") is None else []
    if missing:
        sys.exit(f"{', '.join(missing)}: not found, and needed by the checks; nothing was started")
    args.logs.mkdir(parents=True, exist_ok=True)
    jobs, free, passed, skipped = args.jobs or 6 * len(cards), queue.SimpleQueue[str](), [], []
    for job in range(jobs):
        free.put(cards[job % len(cards)])

    def one(number: int, name: str) -> None:
        if time.monotonic() - began > args.budget:
            skipped.append(name)
            return
        card, start, log = free.get(), time.monotonic(), args.logs / f"{number:03}-{re.sub('[^A-Za-z0-9_]+', '-', name)}.log"
        compared, wrong = run(chosen[name], log, card, args.limit)
        free.put(card)
        passed.extend([] if wrong else [name])
        result = f"FAILED ({wrong}), see {log}" if wrong else "passed"
        took = f"{compared} compared, {time.monotonic() - start:.0f} s, card {card}\n"
        print(f"{result}: {name}, {took}", end="", flush=True)  # in one piece, other threads print too

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, range(len(chosen)), chosen))
    failed = len(chosen) - len(passed) - len(skipped)
    print(f"{len(passed)} of {len(chosen)} passed, {failed} failed, {len(skipped)} not run{':' * bool(skipped)}", *skipped, sep="\n  ")
    return 1 if failed or skipped else 0


if __name__ == "__main__":
    sys.exit(main())
