"""Published models: logits equal llama.cpp's bit for bit, and speculative text equals plain decoding."""

import os
from pathlib import Path

import pytest

import pyggml_spec as ps
from pyggml_spec.tools.compare import compare_logits

FOLDER = Path(os.environ.get("PYSPEC_TEST_MODELS", "~/.cache/real-gguf")).expanduser()
FILES = sorted(FOLDER.rglob("*.gguf"))

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not FILES, reason="no GGUF in the folder that PYSPEC_TEST_MODELS names: published models are not compared"),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_logits_equal_llama_cpp(path):
    result = compare_logits(path, 37, seed=1, device="CPU", threads=1, kernels="ggml")
    assert (result.nmse, result.max_abs) == (0.0, 0.0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_speculative_text_equals_plain(path):
    """n-gram drafts of a prompt that repeats itself."""
    with ps.load(path, spec=["ngram-simple"], device="CPU", threads=1, kernels="ggml", n_ctx=256) as session:
        prompt = "def add(a, b):\n    return a + b\n\n\n" * 4
        plain, _ = session.generate(prompt, 32, mode="reference")
        assert session.generate(prompt, 32)[0] == plain
