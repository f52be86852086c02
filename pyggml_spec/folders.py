"""Folders in the user's cache."""

import os
import stat
import tempfile
from pathlib import Path

from .errors import BuildError


def _user_cache() -> Path | None:
    """The user's cache folder; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None


def _temporary(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"


def cache_folder() -> Path:
    """`PYSPEC_CACHE`, or pyspec's folder in the user's cache folder; a user without a home has it beside the temporary files."""
    if named := os.environ.get("PYSPEC_CACHE"):
        return Path(named)
    cache = _user_cache()
    return cache / "pyspec" if cache is not None else _temporary("pyspec")


def build_folder() -> Path:
    """Where wheels of llama-cpp-python, its source and patched builds are kept; a user without a home has it beside the temporary files.

    Raises:
        BuildError: there, somebody else could put libraries into it, which would then be loaded.
    """
    cache = _user_cache()
    if cache is not None:
        return cache / "pyggml_spec"
    folder = _temporary("pyggml_spec")
    if folder.is_symlink():
        raise BuildError(
            f"{folder}, where builds would be kept, is a link, which is not followed; name a folder of yours in XDG_CACHE_HOME"
        )
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        raise BuildError(f"{folder} cannot be used for builds ({error.strerror}); name a folder of yours in XDG_CACHE_HOME") from None
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise BuildError(f"others can write to {folder}, where builds would be kept; name a folder of yours in XDG_CACHE_HOME")
    return folder
