"""How many cores a process has, and with how many threads the CPU computes: as many as other work leaves cores for.

The threads of a step wait for each other behind each of its nodes, so one that has to share its core holds all of them: two threads on two cores with one
busy process beside them decode at a hundredth of their speed, where one thread keeps all of its own. What other work leaves is what was idle and what this
process used, as the kernel counts them. It says so at once when others come, and when they go; the time that steps take says that only once they are slow,
and nothing of what more threads would do.

Bits depend on the number of threads in one kind of graph (``cuts_by_threads`` in csrc/compute_threads.c), which keeps all of them.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .host_memory import own_groups

MOST_DEFAULT = 16  # threads without a wish: memory bandwidth is used up before that
LOOK_S, SOONER_S, LOOK_SHARE = (
    0.1,
    0.04,
    0.01,
)  # seconds between looks at what others do, behind a thread that was added; most of the time that looks may take
TOLERATED = 0.35  # cores that others may take of those that threads compute on
SPARE = 0.25  # of a core that may be missing where a thread is added
SOON_S, RETRY_S, GUESS_S = (
    0.5,
    0.7,
    5.0,
)  # a thread that was added and has to go so soon is not added again before that; where work that gives way had the core
_STAT, _GROUPS, _OWN = Path("/proc/stat"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allowed() -> frozenset[int] | None:
    """Numbers of the cores that this process may run on; None where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def quota(groups: Path = _GROUPS, own: Path = _OWN) -> float:
    """CoreMonitor whose time the control groups of this process (a container's) may use: the least of all that it is in; inf without a limit."""
    return min((_quota(*group) for group in own_groups(groups, own, "cpu")), default=math.inf)


def _quota(group: Path, version: int) -> float:
    try:
        if version == 2:
            most, period = (group / "cpu.max").read_text().split()  # "max" is no number
        else:
            most, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        cores = int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
    return cores if cores > 0 else math.inf  # -1: no limit


def default_threads() -> int:
    """Threads for the CPU: the cores that this process may run on, those of its control group's quota if that is less (a part of one counts as
    one), at most MOST_DEFAULT."""
    mine = allowed()
    cores = len(mine) if mine is not None else os.cpu_count() or 1
    return max(1, min(MOST_DEFAULT, cores, math.ceil(min(quota(), cores))))


@dataclass(frozen=True)
class CpuUsage:
    """Seconds since some time: of the clock, that cores were idle, that work ran on them which gives way (nice), and that this process used; how many
    cores that is about, and the process."""

    at: float
    idle: float
    nice_s: float
    own: float
    cores: int
    process: int = 0


def read(mine: Collection[int] | None = None, stat: Path = _STAT) -> CpuUsage | None:
    """Of the cores ``mine``, None for all; None where the system does not say."""
    try:
        with open(stat, "rb", 0) as file:
            lines = [line.split() for line in file.read().split(b"intr", 1)[0].splitlines() if line.startswith(b"cpu")]
    except OSError:
        return None
    each = [fields[1:] for fields in lines[1:] if mine is None or int(fields[0][3:]) in mine]
    ticks = lines[0][1:] if len(each) == len(lines) - 1 else None  # counted together, they are rounded once
    counts = [int(n) for n in ticks[:5]] if ticks else [sum(map(int, column)) for column in zip(*(fields[:5] for fields in each))]
    if len(counts) < 5 or not any(counts) or not each:
        return None
    second, nice = os.sysconf("SC_CLK_TCK"), os.getpriority(os.PRIO_PROCESS, 0)
    return CpuUsage(
        time.monotonic(),
        (counts[3] + counts[4]) / second,
        counts[1] / second if nice <= 0 else 0.0,
        time.process_time(),
        len(each),
        os.getpid(),
    )


class ThreadRule:
    """How many of ``most`` threads compute, by one reading after the other; all of them where they do not ``adapt``.

    Attributes:
        threads: that many.
        busy: whether other work takes more from them than is tolerated, by the last reading.
    """

    def __init__(self, most: int, adapts: bool = True) -> None:
        self.most = self.threads = most
        self.adapts = adapts
        self.busy = False
        self._added = self._again = self._guess_again = -math.inf  # when a thread was added, and when one may be added again
        self._room = 0.0  # cores that there were at the last look

    def update(self, before: CpuUsage, now: CpuUsage) -> int:
        """By what passed between two readings."""
        span = now.at - before.at
        left = min((now.idle - before.idle + now.own - before.own) / span, now.cores)
        nice_s = (now.nice_s - before.nice_s) / span if now.at >= self._guess_again else 0.0
        room = min(left + nice_s, now.cores)
        self._room, steady = room, min(room, self._room)  # others that pause for a moment make no room
        most = min(self.most, now.cores)
        self.busy = left < min(self.threads, now.cores) - TOLERATED
        if not self.adapts:
            return self.threads
        if self.busy:
            if now.at - self._added < SOON_S:
                self._again, self._guess_again = now.at + RETRY_S, now.at + GUESS_S
            self.threads = max(1, min(self.threads, math.floor(left + TOLERATED)))
            self.busy = left < self.threads - TOLERATED
        elif now.at >= self._again and self.threads < most and steady >= self.threads + 1 - SPARE:
            self.threads, self._added = min(most, math.floor(steady + SPARE)), now.at
        return self.threads


class CoreMonitor:
    """What other work leaves of this machine, for all backends of the process; ``add`` begins to look, ``remove`` ends it."""

    def __init__(self, reader: Callable[[], CpuUsage | None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._clock = reader or (lambda: read(allowed())), clock
        self._followed: dict[ThreadRule, Callable[[int], object]] = {}
        self._lock = threading.Lock()
        self._before: CpuUsage | None = None
        self._next = math.inf
        self.polls = 0  # so far

    def add(self, rule: ThreadRule, compute_with: Callable[[int], object]) -> None:
        """From now on ``compute_with`` is told of each change of the rule's threads."""
        with self._lock:
            if not self._followed:
                self._before = self._reader()  # what was before is long ago
            self._followed[rule] = compute_with
            self._next = self._before.at + LOOK_S if self._before is not None else math.inf
        self.poll()

    def remove(self, rule: ThreadRule) -> None:
        with self._lock:
            self._followed.pop(rule, None)
            self._next = self._next if self._followed else math.inf

    def poll(self) -> None:
        """Before a step: if it is time, looks at what others do, and says how many threads compute."""
        if self._clock() < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            before, now = self._before, self._reader()
            self._before, self._next = now, math.inf
            if now is None:
                return
            self._next, cost = now.at + LOOK_S, self._clock() - now.at
            if before is None or before.process != now.process or now.at <= before.at:
                return
            self.polls += 1
            for rule, compute_with in self._followed.items():
                threads = rule.threads
                if rule.update(before, now) != threads:
                    compute_with(rule.threads)
                if rule.threads > threads:
                    self._next = now.at + SOONER_S
            self._next = max(self._next, now.at + cost / LOOK_SHARE)
        finally:
            self._lock.release()


CORE_MONITOR = CoreMonitor()


class ThreadCounts:
    """Of the CPUs that steps compute on, by their rules: what the last look at others brought.

    Attributes:
        most: threads that compute where no other work needs their cores, of the CPU with most of them; 0 where none computes.
        follow: whether there are fewer where it does.
        quiet: the condition of a machine that is this process's.
    """

    def __init__(self, rules: Sequence[ThreadRule]) -> None:
        self._rules, self._polls = rules, -1
        self.most = max([rule.most for rule in rules], default=0)
        self.follow = any(rule.adapts for rule in rules)
        self.quiet = tuple((rule.most, False) for rule in rules)
        self._see()

    def _see(self) -> None:
        if self._polls != CORE_MONITOR.polls:
            self._polls = CORE_MONITOR.polls
            self._condition = tuple((rule.threads, rule.busy) for rule in self._rules)
            self._now, self._calm = max([rule.threads for rule in self._rules], default=0), self._condition == self.quiet

    @property
    def now(self) -> int:
        """Like ``most``, that compute now."""
        self._see()
        return self._now

    @property
    def condition(self) -> tuple[tuple[int, bool], ...]:
        """Threads of each CPU, and whether other work takes their cores nevertheless."""
        self._see()
        return self._condition

    @property
    def calm(self) -> bool:
        """Whether no other work takes cores of any of them, as far as the system says."""
        self._see()
        return self._calm
