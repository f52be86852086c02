"""What a process can still have of the machine's memory: what Linux calls available, and no more than its control group (a container) may have."""

from functools import cache
from pathlib import Path, PurePosixPath

_NAMES = {  # by version of control groups: limit, what is used, and of that what the kernel takes back: pages of files, a model's among them
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
_LIMITS = {
    "memory": {version: names[0] for version, names in _NAMES.items()},
    "cpu": {2: "cpu.max", 1: "cpu.cfs_quota_us"},
}  # by controller
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 has a number of pages near 2^63 bytes


def free(total: int) -> int:
    """Bytes, of ``total``; elsewhere than on Linux all of them, because nobody says."""
    return min(total, meminfo("MemAvailable", total), _of_groups())


def with_swap(total: int) -> int:
    """The same and what can be swapped out for it: slow, but nobody is killed. The limit of a group stays what it is: it may have no swap."""
    return min(min(total, meminfo("MemAvailable", total)) + meminfo("SwapFree", 0), _of_groups())


def _of_groups() -> int:
    return min((_room(*group) for group in own_groups(_GROUPS, _OWN)), default=_NO_LIMIT)


def meminfo(name: str, unknown: int) -> int:
    """Bytes that Linux reports; ``unknown`` elsewhere."""
    try:
        return _number(Path("/proc/meminfo"), f"{name}:") * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return unknown


@cache  # which they are stays; their limits are read at every allocation, 0.03 ms each: a container may get one later
def own_groups(groups: Path, own: Path, controller: str = "memory") -> list[tuple[Path, int]]:
    """The control groups with a say in memory, or in what else the ``controller`` is for, that this process is in, and their version; ``own``: where
    Linux says which."""
    found: dict[Path, int] = {}
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            version, tops = 2, [groups, groups / "unified"]
        elif controller in controllers.split(","):
            version, tops = 1, [groups / controllers, groups / controller]
        else:
            continue
        # a container may see its own group as the top one, whatever the path says
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            found |= {top / str(group).lstrip("/"): version for top in tops}
    return [(group, version) for group, version in found.items() if (group / _LIMITS[controller][version]).exists()]


def _limit(group: Path, version: int) -> int | None:
    try:
        limit = int((group / _NAMES[version][0]).read_text())  # "max" is no number
    except (OSError, ValueError):
        return None
    return limit if limit < _NO_LIMIT else None


def _room(group: Path, version: int) -> int:
    limit, (_, used, files) = _limit(group, version), _NAMES[version]
    if limit is None:
        return _NO_LIMIT
    try:
        return max(0, limit - int((group / used).read_text()) + sum(_number(group / "memory.stat", name) for name in files))
    except (OSError, ValueError, IndexError, StopIteration):
        return limit


def _number(path: Path, name: str) -> int:
    """What stands behind ``name`` in a file of names and numbers."""
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name} "))
