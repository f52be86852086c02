"""The files of the pristine tree that the patches touch, from the sdist that pip downloads once into the user's cache."""

import re
import shutil
from pathlib import Path

import pytest

from pyggml_spec import patching as patches
from pyggml_spec.folders import build_folder


def sdist() -> Path:
    return patches.fetch_sdist(build_folder())


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """Part of the tree that the patches were made for. Without a network and without a cached sdist this fails, with pip's reason."""
    needed = {"ggml/CMakeLists.txt", "src/llama-context.cpp"}.union(*(patch.files for patch in patches.series()))
    return patches.unpack(sdist(), tmp_path_factory.mktemp("pristine"), only=needed.__contains__)


@pytest.fixture(scope="session")
def with_headers(tmp_path_factory) -> Path:
    """What a compiler needs of the patched tree."""
    touched = {"ggml/CMakeLists.txt"}.union(*(patch.files for patch in patches.series()))
    headers = re.compile(
        r"(ggml/(include|src(/ggml-cpu(/amx)?)?)|include|src(/models)?|common(/\w+)?|tools/(mtmd|server)|vendor/.*)/[^/]+\.(h|hpp)"
    ).fullmatch
    tree = patches.unpack(sdist(), tmp_path_factory.mktemp("with_headers"), only=lambda name: name in touched or bool(headers(name)))
    patches.apply(tree)
    return tree


@pytest.fixture
def tree(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(pristine, tmp_path / "llama.cpp")
