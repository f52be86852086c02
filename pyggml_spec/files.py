"""Atomic writes under unguessable names, without following links; and private folders."""

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

PART = r"\.pyspec-[0-9a-f]{32}\.part"  # regular expression of the names of new_file


@contextmanager
def new_file(folder: Path, mode: int = 0o600) -> Iterator[tuple[Path, BinaryIO]]:
    """An open empty file with these permissions (less the umask), removed when the block ends unless it was renamed. Raises OSError: it
    cannot be created."""
    path = folder / f".pyspec-{secrets.token_hex(16)}.part"
    try:  # a Ctrl-C arrives as soon as the file exists
        with open(path, "xb", opener=partial(os.open, mode=mode)) as file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, mode: int = 0o600, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` atomically when the block ends, and is removed after an error.

    A link at ``path`` is replaced, not followed. ``sync``: flushed to disk before the rename. Raises OSError: the folder cannot be
    written."""
    with new_file(path.parent, mode) as (part, file):
        yield file
        file.flush()
        if sync:
            os.fsync(file.fileno())
        os.replace(part, path)
        if sync:
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def make_private(folder: Path) -> None:
    """Creates a folder that only its user can read; an existing one is unchanged. Raises OSError."""
    folder.mkdir(0o700, parents=True, exist_ok=True)


def kept_json(path: Path) -> Any:
    """What ``keep_json`` wrote; None without a readable file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def keep_json(path: Path, value: Any) -> None:
    """Writes a file that only its user can read, and its folder; nothing where the folder cannot be written."""
    with suppress(OSError):
        make_private(path.parent)
        with replacing(path) as file:
            file.write(json.dumps(value).encode())


def why_not_private(what: os.stat_result) -> str:
    """Why other users could have written to this folder or file; empty if only its user can.

    root trusts any owner: containers mount folders of other users.
    """
    if what.st_uid != os.geteuid() != 0:
        return f"belongs to the user {what.st_uid}"
    return "can be written by others" if stat.S_IMODE(what.st_mode) & 0o022 else ""
