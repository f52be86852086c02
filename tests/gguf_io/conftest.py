"""The pair that the malformed files are made from."""

import pytest
from gguf_io.build import SMALL
from random_gguf.model import write_dflash, write_qwen35


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return write_qwen35(folder / "t.gguf", SMALL), write_dflash(folder / "d.gguf", SMALL)
