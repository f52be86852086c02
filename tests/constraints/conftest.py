"""The tokenizer of the embedded target."""

import pytest

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    with GGUFFile(DEMO_TARGET) as file:
        made = Tokenizer(file)
        yield made
        made.close()
