"""The chat templates of the pinned llama.cpp, from the sdist that pip downloads once into the user's cache."""

from pathlib import Path

import pytest

from pyggml_spec import patching
from pyggml_spec.folders import build_folder


@pytest.fixture(scope="session")
def templates(tmp_path_factory) -> Path:
    """Without a network and without a cached sdist this fails, with pip's reason."""
    folder, sdist = "models/templates/", patching.fetch_sdist(build_folder())
    return patching.unpack(sdist, tmp_path_factory.mktemp("templates"), only=lambda name: name.startswith(folder)) / folder
