"""The renderer of chat templates, with what its processes took measured from outside."""

import os
import resource
from pathlib import Path

from pyggml_spec.text.renderer import MIB, Renderer

SLACK_S = 0.25  # the kernel counts ticks, and ends a process after it has given its memory back


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _mapped(pid: int, name: str) -> int:
    return next(int(line.split()[1]) << 10 for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name + ":"))


def _ended() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Measured(Renderer):
    """Fails where a process was above its limits.

    Attributes:
        figures: most processor seconds of one rendering, most MiB mapped for renderings by a process that went on, most MiB resident of one that
            ended (at least what this process had when it was started), renderings, processes that were ended.
    """

    def __init__(self):
        super().__init__()
        self.figures = {"seconds": 0.0, "mapped_mib": 0.0, "resident_mib": 0.0, "renderings": 0, "ended": 0}
        self._first = 0

    def _request(self, limits: dict, source: str, body: bytes, patience: float | None = None) -> dict:
        if self.child is None:
            child = self._started()
            child.ready = child.receive(60, None)["ready"]
            self._first = _mapped(child.process.pid, "VmSize")
        pid = self.child.process.pid
        before, ended = _spent(pid), _ended()
        try:
            return super()._request(limits, source, body, patience)
        finally:
            if self.pid == pid:
                seconds, mapped = _spent(pid) - before, _mapped(pid, "VmPeak") - self._first
                self._most("mapped_mib", mapped / MIB, limits["memory"] / MIB)
            else:
                seconds = _ended() - ended - before
                self.figures["ended"] += 1
                resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
                self._most("resident_mib", resident, max(limits["memory"] / MIB + 100, self.figures["resident_mib"]))
            self.figures["renderings"] += 1
            self._most("seconds", seconds, limits["seconds"] + SLACK_S)

    def _most(self, name: str, value: float, limit: float) -> None:
        assert value <= limit, f"{name}: {value:.2f} of {limit:.2f}"
        self.figures[name] = max(self.figures[name], value)
