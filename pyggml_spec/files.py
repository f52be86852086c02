"""Writing files: under names that nobody can guess, never through a link, whole or not at all; and folders that are the user's alone."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PART = r"\.pyspec-[0-9a-f]{32}\.part"  # what new_file calls its files, as a regular expression


def new_file(folder: Path, mode: int = 0o600) -> tuple[Path, int]:
    """Makes an empty file of its own, with these permissions (less the umask); its path and a descriptor that writes to it.

    Raises:
        OSError: it cannot be made.
    """
    path = folder / f".pyspec-{secrets.token_hex(16)}.part"
    return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def replacing(path: Path, mode: int = 0o600, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends, and is gone after an error: a reader sees all of it or none.

    A link at ``path`` is replaced, not followed. ``sync``: it is on the disk before it has the name.

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
    """Makes a folder that only its user can read, whatever the umask; one that is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def why_not_private(what: os.stat_result) -> str:
    """Why others could have put something of theirs into this folder or file; empty where only its user can write it.

    For root, whatever it was told to use is its own: containers mount folders of other users.
    """
    if what.st_uid != os.geteuid() != 0:
        return f"belongs to the user {what.st_uid}"
    return "can be written by others" if stat.S_IMODE(what.st_mode) & 0o022 else ""
