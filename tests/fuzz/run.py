"""Fuzzes one target in worker processes; an input that kills or stalls its worker is saved, and the run continues after it.

    python tests/fuzz/run.py gguf --executions 100000 [--seed 1] [--slice 20000] [--save FOLDER]

Exit code 1 if there are findings: a process that died, anything raised that is no PyspecError, more than 1 s of processor time, or memory
beyond the input's size and the target's allowance (64 MiB for files). Inputs depend on target, seed, number and slice only.
"""

import argparse
import base64
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATE_BYTES = 4 << 20
STALLED_S = 60.0  # processor time of a worker that stays at one input: for what never ends; what is slow is a finding of the worker itself


@dataclass
class Result:
    """Attributes:
    executions: inputs that were run.
    outcomes: how often inputs ended in which way; messages without their numbers.
    findings: (number, what happened, input).
    slowest_s: most processor time of one input.
    grown_kib: most resident memory that a worker gained after its warm-up.
    figures: what the target measured besides, the most of any worker.
    """

    executions: int = 0
    outcomes: Counter = field(default_factory=Counter)
    findings: list[tuple[int, str, bytes]] = field(default_factory=list)
    slowest_s: float = 0.0
    grown_kib: int = 0
    figures: dict[str, float] = field(default_factory=dict)


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(target: str, executions: int, seed: str = "1", slice_: int = 20000, done=lambda n: None, stalled_s: float = STALLED_S) -> Result:
    """Runs inputs 0 .. executions - 1 of a target. ``stalled_s``: processor seconds after which a worker that stays at one input is killed."""
    result, at, memory = Result(), 0, "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="pyspec-fuzz-", dir=memory, ignore_cleanup_errors=True) as home,
        open(Path(home) / "state", "w+b") as file,
    ):
        file.truncate(STATE_BYTES)
        state = mmap.mmap(file.fileno(), STATE_BYTES)
        while at < executions:
            count = min(slice_, executions - at)
            at = _slice(result, target, seed, at, count, state, file.name, stalled_s)
            done(at)
        state.close()
    return result


def _slice(result: Result, target: str, seed: str, first: int, count: int, state: mmap.mmap, path: str, stalled_s: float) -> int:
    """Runs one worker; returns the number of the input after the last one that was run."""
    state[:8] = bytes(8)
    command = [sys.executable, str(HERE / "worker.py"), target, seed, str(first), str(count), path]
    environment = {**os.environ, "TMPDIR": os.path.dirname(path)}  # which goes when all is done, also what a worker that died leaves
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    last, since, stalled = 0, 0.0, False
    while True:
        try:
            out, err = worker.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            number, cpu = int.from_bytes(state[:8], "little"), _cpu_seconds(worker.pid)
            if number != last:
                last, since = number, cpu
            elif number and cpu - since > stalled_s:
                stalled = True
                worker.kill()
    number = int.from_bytes(state[:8], "little")
    lines = [json.loads(line) for line in out.splitlines() if line.endswith(("]", "}"))]
    result.findings += [(i, what, base64.b64decode(data)) for i, what, data in (line for line in lines if isinstance(line, list))]
    if worker.returncode == 0:
        report = lines[-1]
        result.executions += count
        result.outcomes.update(report["outcomes"])
        result.slowest_s, result.grown_kib = max(result.slowest_s, report["slowest_s"]), max(result.grown_kib, report["grown_kib"])
        result.figures |= {name: max(value, result.figures.get(name, 0)) for name, value in report["figures"].items()}
        return first + count
    if number == 0:
        raise SystemExit(f"the worker did not get to its first input:\n{err[-3000:]}")
    size = int.from_bytes(state[8:16], "little")
    what = "stalled" if stalled else f"the process died with exit status {worker.returncode}: {err[-300:].strip()}"
    result.findings.append((number - 1, what, bytes(state[16 : 16 + size])))
    result.executions += number - first
    result.outcomes[what.split(":", maxsplit=1)[0]] += 1
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=["gguf", "pair", "layers", "template", "prompt", "grammar", "prefix", "json", "selftest"])
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--slice", type=int, default=20_000, help="inputs per worker")
    parser.add_argument("--save", type=Path, default=Path("fuzz-findings"))
    args, began = parser.parse_args(), time.monotonic()

    def said(n: int) -> None:
        print(f"{n} inputs, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    result = fuzz(args.target, args.executions, args.seed, args.slice, said)
    for outcome, n in result.outcomes.most_common():
        print(f"{n:8} {outcome}")
    print(f"{result.executions} executions, {len(result.outcomes)} ways to end, {len(result.findings)} findings, "
          f"slowest {1000 * result.slowest_s:.0f} ms, at most {result.grown_kib / 1024:.1f} MiB gained")  # fmt: skip
    for name, value in result.figures.items():
        print(f"{name}: at most {value:.2f} in a worker")
    for number, what, data in result.findings:
        args.save.mkdir(parents=True, exist_ok=True)
        (args.save / f"{args.target}-{args.seed}-{number}").write_bytes(data)
        print(f"FINDING {number}: {what}")
    sys.exit(1 if result.findings else 0)


if __name__ == "__main__":
    main()
