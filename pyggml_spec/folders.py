"""Folders in the user's cache."""

import os
import tempfile
from pathlib import Path


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_folder() -> Path:
    """`PYSPEC_CACHE`, or pyspec's folder in the user's cache folder; a user without a home has it beside the temporary files."""
    if named := os.environ.get("PYSPEC_CACHE"):
        return Path(named)
    try:
        return _user_cache() / "pyspec"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"pyspec-{os.getuid()}"


def build_folder() -> Path:
    """Where wheels of llama-cpp-python, its source and patched builds are kept."""
    return _user_cache() / "pyggml_spec"
