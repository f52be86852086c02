"""The files of the pristine tree that the patches touch, from the sdist that pip downloads once into the user's cache."""

import os
import shutil
from pathlib import Path

import pytest

from pyggml_spec.tools import patches


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """Part of the tree that the patches were made for. Without a network and without a cached sdist this fails, with pip's reason."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyggml_spec"
    needed = {"ggml/CMakeLists.txt", "src/llama-context.cpp"}.union(*(patch.files for patch in patches.series()))
    return patches.unpack(patches.fetch_sdist(cache), tmp_path_factory.mktemp("pristine"), only=needed)


@pytest.fixture
def tree(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(pristine, tmp_path / "llama.cpp")
