"""Folders in the user's cache."""

import os
import stat
import tempfile
from pathlib import Path

from .errors import BuildError, PyspecError
from .files import why_not_private


def _user_cache() -> Path | None:
    """The user's cache folder; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None


def _temporary(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"


def cache_folder() -> Path:
    """`PYSPEC_CACHE`, or pyspec's folder in the user's cache folder; a user without a home has it beside the temporary files.

    Raises:
        PyspecError: somebody else could put costs, hashes of files and findings of the probe into it, which would then be believed.
    """
    named, cache = os.environ.get("PYSPEC_CACHE"), _user_cache()
    if named or cache is not None:
        folder = Path(named) if named else cache / "pyspec" if cache is not None else Path()
        if why := why_not_trusted(folder):
            raise PyspecError(
                f"{folder}, where pyspec keeps what it measured, {why}; name a folder of yours in PYSPEC_CACHE, or run: chmod go-w {folder}"
            )
        return folder
    folder = _temporary("pyspec")
    try:
        why = _why_not_own(folder)
    except OSError:  # nothing can be kept, which every user of the folder says or does without
        return folder
    if why:
        raise PyspecError(f"{folder}, where pyspec would keep what it measured, {why}; name a folder of yours in PYSPEC_CACHE")
    return folder


def why_not_trusted(*paths: Path) -> str:
    """What is wrong with the first of these folders or files that others could have put something into; empty where none is, or is there."""
    for path in paths:
        try:
            why = why_not_private(os.stat(path))
        except OSError:
            continue
        if why:
            return why if path == paths[0] else f"has {path.name}, which {why}"
    return ""


def why_nothing_is_kept() -> str:
    """A sentence where the cache folder cannot be made or written; empty where it can."""
    folder = cache_folder()
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"
    except OSError as error:
        why = error.strerror or type(error).__name__
    return why and f"{folder} cannot keep what was measured ({why}), so every start measures again; name another folder in PYSPEC_CACHE"


def _why_not_own(folder: Path) -> str:
    """Makes a folder beside the temporary files, where anybody may have made it before; what is wrong with it, empty if nothing is.

    Raises:
        OSError: it cannot be made.
    """
    if folder.is_symlink():
        return "is a link, which is not followed"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return "" if mine else "can be written by others"


def build_folder() -> Path:
    """Where wheels of llama-cpp-python, its source and patched builds are kept; a user without a home has it beside the temporary files.

    Raises:
        BuildError: somebody else could put libraries into it, which would then be loaded.
    """
    cache = _user_cache()
    if cache is not None:
        return trusted(cache / "pyggml_spec")
    folder = _temporary("pyggml_spec")
    try:
        why = _why_not_own(folder)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
    if why:
        raise BuildError(f"{folder}, where builds would be kept, {why}; name a folder of yours in XDG_CACHE_HOME")
    return folder


def trusted(folder: Path, *inside: Path) -> Path:
    """The folder itself, in which and in what is ``inside`` nobody else could put libraries. Raises BuildError."""
    if why := why_not_trusted(folder, *inside):
        raise BuildError(
            f"{folder}, where builds are kept, {why}; name a folder of yours in XDG_CACHE_HOME, or run: chmod -R go-w {folder}"
        )
    return folder
