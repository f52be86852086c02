"""Runs inputs of one target in a process that may die of them.

    python worker.py TARGET SEED FIRST COUNT STATE

STATE is a file of which the driver reads how far we are, and which input that is. Each finding is a JSON line [number, what, input] on stdout
at once; the last line is an object with the counts.
"""

import base64
import json
import mmap
import random
import resource
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.targets import EXPECTED, make, shape_of

STATE_BYTES = 4 << 20
WARM = 50  # inputs before memory is bounded
MOST_KEPT, MOST_FINDINGS = 4000, 100


def _kib(name: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))


class Worker:
    def __init__(self, name: str, seed: str, state: mmap.mmap):
        self.target, self.seed, self.state = make(name), seed, state
        self.outcomes, self.findings = Counter(), 0
        self.slowest, self.base, self.largest = 0.0, 0, max(map(len, self.target.corpus))

    def run(self, first: int, count: int) -> None:
        for i in range(first, first + count):
            if i - first == min(WARM, count - 1):
                self._bound_memory()
            data = self.target.change(random.Random(f"{self.seed}:{i}"))[: STATE_BYTES - 16]
            self.state[16 : 16 + len(data)] = data
            self.state[8:16] = len(data).to_bytes(8, "little")
            self.state[:8] = (i + 1).to_bytes(8, "little")
            self._one(i, data)

    def _bound_memory(self) -> None:
        """From here on an allocation beyond the allowance fails, whether the memory is touched or not."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        except OSError:
            pass
        self.base = _kib("VmHWM")
        if self.target.memory is not None:
            limit = (_kib("VmSize") << 10) + self.target.memory + 2 * self.largest
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _one(self, i: int, data: bytes) -> None:
        began = time.thread_time()
        try:
            outcome = self.target.run(data)
        except EXPECTED as error:
            outcome = f"{type(error).__name__}: {shape_of(str(error))}"
        except BaseException as error:
            outcome = f"raised {type(error).__name__}"
            self._found(i, f"{type(error).__name__}: {str(error)[:300]}", data)
        spent = time.thread_time() - began
        self.slowest = max(self.slowest, spent)
        if spent > self.target.slow_s:
            self._found(i, f"took {spent:.2f} s", data)
        if outcome not in self.outcomes and len(self.target.corpus) < MOST_KEPT and len(data) <= self.largest:
            self.target.corpus.append(data)  # a new way to end is a place that was not reached before
        self.outcomes[outcome] += 1

    def _found(self, i: int, what: str, data: bytes) -> None:
        self.findings += 1
        if self.findings <= MOST_FINDINGS:
            print(json.dumps([i, what, base64.b64encode(data).decode()]), flush=True)

    def report(self) -> dict:
        grown = max(0, _kib("VmHWM") - self.base) if self.base else 0
        return {"outcomes": dict(self.outcomes), "slowest_s": self.slowest, "grown_kib": grown, "figures": self.target.figures}


if __name__ == "__main__":
    name, seed, first, count, path = sys.argv[1:]
    with open(path, "r+b") as file:
        state = mmap.mmap(file.fileno(), STATE_BYTES)
    worker = Worker(name, seed, state)
    try:
        worker.run(int(first), int(count))
    finally:
        shutil.rmtree(worker.target.folder, ignore_errors=True)
    print(json.dumps(worker.report()))
