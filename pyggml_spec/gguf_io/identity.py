"""Identity of a file: a hash of its contents, computed once and cached."""

import hashlib
import os
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

from blake3 import blake3

from ..errors import GGUFError
from ..files import keep_json, kept_json, why_not_private
from ..folders import cache_folder

PIECE = 64 << 20  # bytes hashed between progress reports
DIGITS = 64
SETTLED_NS = 3_000_000_000  # a file changed more recently may change again within one timestamp tick (4 ms to 2 s)

Progress = Callable[[int, int], None]


def content_hash(path: Path, data: mmap, opened: os.stat_result, progress: Progress = lambda done, total: None) -> str:
    """BLAKE3 of ``data``, the map of the file ``path``, in hex.

    Cached by path, size, device, inode, mtime and ctime, unless the file has just changed. ``opened``: fstat when the map was made. Raises
    GGUFError: the file was modified or replaced since."""
    facts = [os.path.realpath(path), opened.st_size, opened.st_dev, opened.st_ino, opened.st_mtime_ns, opened.st_ctime_ns]
    entry = cache_folder() / f"content-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"
    known = _remembered(entry, facts)
    found = known or hashed(data, progress)
    _check_unchanged(path, opened)
    if known is None and abs(time.time_ns() - opened.st_ctime_ns) > SETTLED_NS:
        keep_json(entry, {"file": facts, "blake3": found})  # with a read-only home or a full disk it is hashed again next time
    return found


def hashed(data: mmap, progress: Progress) -> str:
    digest = blake3(max_threads=blake3.AUTO)
    with memoryview(data) as view:
        for start in range(0, len(view), PIECE):
            digest.update(view[start : start + PIECE])
            progress(min(start + PIECE, len(view)), len(view))
    return digest.hexdigest()


def _check_unchanged(path: Path, opened: os.stat_result) -> None:
    try:
        now = os.stat(path)
        same = all(getattr(now, name) == getattr(opened, name) for name in ("st_size", "st_dev", "st_ino", "st_mtime_ns"))
    except OSError:
        same = False
    if not same:
        raise GGUFError(f"{path} was changed or replaced while it was in use; load it again")


def _remembered(entry: Path, facts: list) -> str | None:
    """The entry's hash, if it matches these facts and only this user can have written it."""
    try:
        if why_not_private(os.stat(entry.parent)) or why_not_private(os.lstat(entry)):
            return None
        stored = kept_json(entry)
        found = stored["blake3"]
        whole = isinstance(found, str) and len(found) == DIGITS and set(found) <= set("0123456789abcdef")
        return found if whole and stored["file"] == facts else None
    except (OSError, TypeError, KeyError):
        return None
