"""Memory that a process can still use: what Linux reports as available, limited by its control groups (containers)."""

import os
from functools import cache, partial
from pathlib import Path, PurePosixPath

FILE_NAMES = {  # by version of control groups: limit, usage, and the reclaimable page cache within it
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
_LIMITS = {
    "memory": {version: names[0] for version, names in FILE_NAMES.items()},
    "cpu": {2: "cpu.max", 1: "cpu.cfs_quota_us"},
}  # by controller
_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 reports a number near 2^63 without a limit


def free(total: int) -> int:
    """Free bytes of ``total``; all of them where the system does not report it."""
    return min(total, meminfo("MemAvailable", total), _of_groups())


def with_swap(total: int) -> int:
    """``free`` plus swap. The control groups' limit stays: a group may have no swap."""
    return min(min(total, meminfo("MemAvailable", total)) + meminfo("SwapFree", 0), _of_groups())


def _of_groups() -> int:
    return min((_room(*group) for group in own_groups(_GROUPS, _OWN)), default=_NO_LIMIT)


def meminfo(name: str, unknown: int) -> int:
    """Bytes that Linux reports; ``unknown`` elsewhere."""
    try:
        return _number(_text(Path("/proc/meminfo")), f"{name}:") * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return unknown


@cache  # only the list: limits are read at every allocation, because a container may get one later
def own_groups(groups: Path, own: Path, controller: str = "memory") -> list[tuple[Path, int]]:
    """(path, version) of the control groups of this process that limit the ``controller``; ``own`` is /proc/self/cgroup."""
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
        # a container may see its own group as the root, whatever the path is
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            found |= {top / str(group).lstrip("/"): version for top in tops}
    return [(group, version) for group, version in found.items() if (group / _LIMITS[controller][version]).exists()]


def _room(group: Path, version: int) -> int:
    limit_name, used, files = FILE_NAMES[version]
    limit = _NO_LIMIT
    try:
        limit = min(limit, int(_text(group / limit_name)))  # "max" raises ValueError
        if limit == _NO_LIMIT:
            return limit
        taken, stat = int(_text(group / used)), _text(group / "memory.stat")
        return max(0, limit - taken + sum(_number(stat, name) for name in files))
    except (OSError, ValueError, IndexError, StopIteration):
        return limit


def _text(path: Path) -> str:
    """Of a file that is read before every allocation: a third of what opening it as text takes."""
    file = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(partial(os.read, file, 1 << 16), b"")).decode()
    finally:
        os.close(file)


def _number(table: str, name: str) -> int:
    """The value of ``name`` in lines of names and numbers."""
    return next(int(line.split()[1]) for line in table.splitlines() if line.startswith(f"{name} "))
