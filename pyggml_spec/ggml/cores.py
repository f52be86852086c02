"""The number of cores a process may use, and the number of CPU threads that compute: as many as other work leaves cores for.

All threads of a step wait for each other after each node, so a thread that shares its core delays all of them. The available cores are the idle
time plus this process's own time, as the kernel counts them; that reacts to other load at once.

``cuts_by_threads`` in csrc/compute_threads.c names the one kind of graph whose bits depend on the number of threads; it keeps all of them.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from .host_memory import own_groups

MAX_DEFAULT_THREADS = 16  # more threads do not help: memory bandwidth is the limit
POLL_S, POLL_SOON_S = 0.1, 0.04  # seconds between polls; after a thread was added
MAX_POLL_SHARE = 0.01  # of the time, spent polling
TOLERATED = 0.35  # cores that other work may take from the computing threads
SPARE = 0.25  # of a core that may be missing when a thread is added
SOON_S, RETRY_S, GUESS_S = (
    0.5,
    0.7,
    5.0,
)  # a thread removed within SOON_S is added again after RETRY_S (GUESS_S: where niced work had the core)
_STAT, _GROUPS, _OWN = Path("/proc/stat"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allowed() -> frozenset[int] | None:
    """Cores that this process may run on; None where the system does not report them."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def quota(groups: Path = _GROUPS, own: Path = _OWN) -> float:
    """CPU quota of this process's control groups (containers), in cores: the smallest one; inf without a limit."""
    return min((_quota(*group) for group in own_groups(groups, own, "cpu")), default=math.inf)


def _quota(group: Path, version: int) -> float:
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        most, period = " ".join((group / name).read_text() for name in names).split()
        cores = int(most) / int(period)  # "max" raises ValueError
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
    return cores if cores > 0 else math.inf  # -1: no limit


def default_threads() -> int:
    """Default CPU threads: allowed cores, limited by the control group's quota (rounded up) and MAX_DEFAULT_THREADS."""
    own = allowed()
    cores = len(own) if own is not None else os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_THREADS, cores, math.ceil(min(quota(), cores))))


class CpuUsage(NamedTuple):
    """Accumulated seconds: wall clock, idle cores, niced work on them, this process; with the number of cores and the process id."""

    at: float
    idle: float
    nice_s: float
    own: float
    cores: int
    process: int = 0


def read(own: Collection[int] | None = None, stat: Path = _STAT) -> CpuUsage | None:
    """Usage of the cores ``own`` (None: all); None where the system does not report it."""
    try:
        with open(stat, "rb", 0) as file:
            lines = [line.split() for line in file.read().split(b"intr", 1)[0].splitlines() if line.startswith(b"cpu")]
    except OSError:
        return None
    each = [fields[1:] for fields in lines[1:] if own is None or int(fields[0][3:]) in own]
    ticks = lines[0][1:] if len(each) == len(lines) - 1 else None  # the total is rounded once
    counts = [int(n) for n in ticks[:5]] if ticks else [sum(map(int, column)) for column in zip(*(fields[:5] for fields in each))]
    if len(counts) < 5 or not any(counts) or not each:
        return None
    second, nice = os.sysconf("SC_CLK_TCK"), os.getpriority(os.PRIO_PROCESS, 0)
    nice_s = counts[1] / second if nice <= 0 else 0.0
    return CpuUsage(time.monotonic(), (counts[3] + counts[4]) / second, nice_s, time.process_time(), len(each), os.getpid())


class ThreadRule:
    """How many of ``most`` threads compute, updated from successive readings; all of them if not ``adapts``.

    Attributes:
        threads: computing threads.
        busy: whether other work took more than the tolerated share, by the last reading.
    """

    def __init__(self, most: int, adapts: bool = True) -> None:
        self.most = self.threads = most
        self.adapts = adapts
        self.busy = False
        self._added = self._again = self._guess_again = -math.inf  # times: thread added, next one allowed
        self._room = 0.0  # available cores at the last poll

    def update(self, before: CpuUsage, now: CpuUsage) -> int:
        """Returns the number of threads after the interval between two readings."""
        span = now.at - before.at
        left = min((now.idle - before.idle + now.own - before.own) / span, now.cores)
        nice_s = (now.nice_s - before.nice_s) / span if now.at >= self._guess_again else 0.0
        room = min(left + nice_s, now.cores)
        self._room, steady = room, min(room, self._room)  # a short pause of other work makes no room
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
    """Watches the load of other processes for all backends of the process, while any rule is registered.

    Attributes:
        due: time of the next poll, by ``time.monotonic``; a step polls from then on.
        polls: polls so far.
    """

    def __init__(self, reader: Callable[[], CpuUsage | None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._clock = reader or (lambda: read(allowed())), clock
        self._followed: dict[ThreadRule, Callable[[int], object]] = {}
        self._lock = threading.Lock()
        self._before: CpuUsage | None = None
        self.due = math.inf
        self.polls = 0

    def add(self, rule: ThreadRule, compute_with: Callable[[int], object]) -> None:
        """Registers a rule; ``compute_with`` is called with each new number of threads."""
        with self._lock:
            if not self._followed:
                self._before = self._reader()  # an older reading is stale
            self._followed[rule] = compute_with
            self.due = self._before.at + POLL_S if self._before is not None else math.inf
        self.poll()

    def remove(self, rule: ThreadRule) -> None:
        with self._lock:
            self._followed.pop(rule, None)
            self.due = self.due if self._followed else math.inf

    def poll(self) -> None:
        """Where a poll is due, updates all rules."""
        if self._clock() < self.due or not self._lock.acquire(blocking=False):
            return
        try:
            before, now = self._before, self._reader()
            self._before, self.due = now, math.inf
            if now is None:
                return
            self.due, cost = now.at + POLL_S, self._clock() - now.at
            if before is None or before.process != now.process or now.at <= before.at:
                return
            for rule, compute_with in self._followed.items():
                threads = rule.threads
                if rule.update(before, now) != threads:
                    compute_with(rule.threads)
                if rule.threads > threads:
                    self.due = now.at + POLL_SOON_S
            self.polls += 1
            self.due = max(self.due, now.at + cost / MAX_POLL_SHARE)
        finally:
            self._lock.release()


CORE_MONITOR = CoreMonitor()


class ThreadCounts:
    """Thread counts of the CPU backends of an engine, as of the poll before its last step, or of ``refresh``.

    Attributes:
        most: threads without other load, of the largest CPU backend; 0 without one.
        follow: whether other load reduces them.
        now: threads that compute, of the largest CPU backend.
        condition: (threads, busy) of each CPU backend; ``quiet`` is its value without other load.
        calm: whether no other work takes cores of any backend.
        polls: of the monitor, at the last refresh.
    """

    def __init__(self, rules: Sequence[ThreadRule]) -> None:
        self._rules = rules
        self.most = max([rule.most for rule in rules], default=0)
        self.follow = any(rule.adapts for rule in rules)
        self.quiet = tuple((rule.most, False) for rule in rules)
        self.refresh()

    def refresh(self) -> None:
        """Reads the rules, after a poll where one is due."""
        CORE_MONITOR.poll()
        self.polls = CORE_MONITOR.polls
        self.condition = tuple((rule.threads, rule.busy) for rule in self._rules)
        self.now, self.calm = max([threads for threads, _ in self.condition], default=0), self.condition == self.quiet
