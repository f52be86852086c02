"""The files of the pristine tree that the patches touch, from the sdist that pip downloads once into the user's cache."""

import re
import shutil
from pathlib import Path

import pytest

from pyggml_spec import patching as patches
from pyggml_spec.folders import build_folder


def sdist() -> Path:
    return patches.fetch_sdist(build_folder())


TOUCHED = {"ggml/CMakeLists.txt", "src/llama-context.cpp"}.union(*(patch.files for patch in patches.series()))
HEADERS = re.compile(
    r"(ggml/(include|src(/ggml-cpu(/amx)?)?)|include|src(/models)?|common(/\w+)?|tools/(mtmd|server)|vendor/.*)/[^/]+\.(h|hpp)"
)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory) -> Path:
    """What the patches touch, and what a compiler needs. Without a network and without a cached sdist this fails, with pip's reason."""
    folder = tmp_path_factory.mktemp("unpacked")
    return patches.unpack(sdist(), folder, only=lambda name: name in TOUCHED or bool(HEADERS.fullmatch(name)))


@pytest.fixture(scope="session")
def patched(unpacked: Path, tmp_path_factory) -> Path:
    tree = shutil.copytree(unpacked, tmp_path_factory.mktemp("patched") / "llama.cpp")
    assert patches.apply(tree) == patches.series()
    return tree


@pytest.fixture
def tree(unpacked: Path, tmp_path: Path) -> Path:
    """A copy of the touched files that a test may change."""
    for name in TOUCHED:
        if (unpacked / name).is_file():
            (tmp_path / "llama.cpp" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(unpacked / name, tmp_path / "llama.cpp" / name)
    return tmp_path / "llama.cpp"
