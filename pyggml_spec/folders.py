"""Folders in the user's cache."""

import os
import stat
import tempfile
from pathlib import Path

from .errors import BuildError, PyspecError
from .files import why_not_private


def cache_folder() -> Path:
    """`PYSPEC_CACHE`, or pyspec's folder in the user's cache folder; without a home, in the temporary folder. Raises PyspecError: other
    users can write to it."""
    cache, variable = _user_cache("pyspec"), "PYSPEC_CACHE"
    if named := os.environ.get(variable):
        cache = Path(named)
    if cache is not None:
        if cache.is_dir() and (why := why_not_trusted(cache)):  # /dev/null keeps nothing, and is to keep its mode
            remedy = f"name a folder of yours in {variable}, or run: chmod go-w {cache}"
            raise PyspecError(f"{cache}, where pyspec keeps what it measured, {why}; {remedy}")
        return cache
    folder = _temporary("pyspec")
    try:
        why = _why_not_own(folder)
    except OSError:  # it stays unusable, which its users handle
        return folder
    if why:
        raise PyspecError(f"{folder}, where pyspec would keep what it measured, {why}; name a folder of yours in {variable}")
    return folder


def build_folder() -> Path:
    """Folder of wheels, sources and patched builds of llama-cpp-python; without a home, in the temporary folder. Raises BuildError: other
    users can write to it, so its libraries cannot be trusted."""
    if (cache := _user_cache("pyggml_spec")) is not None:
        return trusted(cache)
    folder = _temporary("pyggml_spec")
    try:
        why = _why_not_own(folder)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
    if why:
        raise BuildError(f"{folder}, where builds would be kept, {why}; name a folder of yours in XDG_CACHE_HOME")
    return folder


def _user_cache(name: str) -> Path | None:
    """A folder in the user's cache folder; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name
    except RuntimeError:
        return None


def _temporary(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"


def why_not_trusted(*paths: Path) -> str:
    """What is wrong with the first of these paths that other users can write to; empty if none, or if they do not exist."""
    for path in paths:
        try:
            why = why_not_private(os.stat(path))
        except OSError:
            continue
        if why:
            return why if path == paths[0] else f"has {path.name}, which {why}"
    return ""


def why_nothing_is_kept() -> str:
    """A sentence if the cache folder cannot be created or written; else empty."""
    folder = cache_folder()
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"
    except OSError as error:
        why = error.strerror or type(error).__name__
    return why and f"{folder} cannot keep what was measured ({why}), so every start measures again; name another folder in PYSPEC_CACHE"


def _why_not_own(folder: Path) -> str:
    """Creates a folder in the temporary folder, or checks an existing one; returns what is wrong with it. Raises OSError."""
    if folder.is_symlink():
        return "is a link, which is not followed"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    private = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return "" if private else "can be written by others"


def trusted(folder: Path, *inside: Path) -> Path:
    """``folder``; raises BuildError if other users can write to it or to a path ``inside``."""
    if why := why_not_trusted(folder, *inside):
        remedy = f"name a folder of yours in XDG_CACHE_HOME, or run: chmod -R go-w {folder}"
        raise BuildError(f"{folder}, where builds are kept, {why}; {remedy}")
    return folder
