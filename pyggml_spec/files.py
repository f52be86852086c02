"""Atomic writes under unguessable names, without following links; and private folders."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PART = r"\.pyspec-[0-9a-f]{32}\.part"  # regular expression of the names of new_file


def new_file(folder: Path, mode: int = 0o600) -> tuple[Path, int]:
    """Creates an empty file with these permissions (less the umask); returns its path and a writable descriptor.

    Raises:
        OSError: it cannot be created.
    """
    path = folder / f".pyspec-{secrets.token_hex(16)}.part"
    return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def replacing(path: Path, mode: int = 0o600, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` atomically when the block ends, and is removed after an error.

    A link at ``path`` is replaced, not followed. ``sync``: flushed to disk before the rename.

    Raises:
        OSError: the folder cannot be written.
    """
    part, handle = new_file(path.parent, mode)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(handle)
        os.replace(part, path)
        if sync:
            _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Creates a folder that only its user can read; an existing one is unchanged. Raises OSError."""
    folder.mkdir(0o700, parents=True, exist_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def why_not_private(what: os.stat_result) -> str:
    """Why other users could have written to this folder or file; empty if only its user can.

    root trusts any owner: containers mount folders of other users.
    """
    if what.st_uid != os.geteuid() != 0:
        return f"belongs to the user {what.st_uid}"
    return "can be written by others" if stat.S_IMODE(what.st_mode) & 0o022 else ""
