"""Target logits equal llama.cpp's bit for bit on the same file at the same batch shape."""

import os
from pathlib import Path

import pytest
from architectures import params
from engine.helpers import oracle, reference, run
from models.test_archs import assert_equal
from random_gguf.model import Shape, write_qwen35

import pyggml_spec as ps
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.tools.compare import compare_logits

pytestmark = pytest.mark.slow
QUANTS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("quant", params(QUANTS, ("F32", "Q4_K")))
def test_random_qwen35_of_every_type(tmp_path, quant):
    assert_equal(write_qwen35(tmp_path / "t.gguf", Shape(), quant), 1, 37, 300)


def test_texts_and_long_prompts(tmp_path):
    """Real k-quant files store attn_v and ffn_down in another type: groups that cannot be fused take the other path."""
    assert_equal(write_qwen35(tmp_path / "t.gguf", Shape(), "Q4_K", mixed=True), 65)
    assert_equal(write_qwen35(tmp_path / "t.gguf", Shape(), "F32"), 1100)
    assert_equal(DEMO_TARGET, 1, 37, 300)


@pytest.mark.parametrize("shape", [
    Shape(n_head=6, n_head_kv=3, n_embd=384, head_size=64, delta_k=1, delta_v=3, delta_head=128),
    Shape(n_head=2, n_head_kv=1, head_size=128, n_rot=64, delta_k=4, delta_v=4, delta_head=16, n_layer=8),
    Shape(every=2, n_layer=5, n_ff=768),
], ids=["odd heads", "one kv head", "every second layer"])  # fmt: skip
def test_odd_shapes(tmp_path, shape):
    assert_equal(write_qwen35(tmp_path / "t.gguf", shape, "F32"), 40)


FOLDER = Path(os.environ.get("PYSPEC_TEST_MODELS", "~/.cache/real-gguf")).expanduser()
FILES = sorted(FOLDER.rglob("*.gguf"))


@pytest.mark.real
@pytest.mark.skipif(not FILES, reason="no GGUF in the folder that PYSPEC_TEST_MODELS names: published models are not compared")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_logits_equal_llama_cpp(path):
    result = compare_logits(path, 37, seed=1, device="CPU", threads=1, kernels="ggml", greedy=8)
    assert (result.nmse, result.max_abs, result.greedy_agree) == (0.0, 0.0, 1.0)


@pytest.mark.real
@pytest.mark.skipif(not FILES, reason="no GGUF in the folder that PYSPEC_TEST_MODELS names: published models are not compared")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_speculative_text_equals_plain(path):
    """Of native kernels where the processor has them, whose bits do not depend on a block's rows; some drafts are accepted and some rejected."""
    with ps.load(path, spec=["ngram-simple"], device="CPU", threads=1, n_ctx=256) as session:
        prompt = session.tokenizer.encode("def add(a, b):\n    return a + b\n\n\n" * 2)
        text = reference(session.runner, prompt, 16)
        tokens, stats = run(session.runner, prompt, 16, drafts=oracle(prompt, text, wrong_at=lambda step: 3 * step))
        assert tokens == text and len(stats.block_sizes) > 2
