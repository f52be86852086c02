"""Ids that an MTP layer drafts equal those of llama.cpp's `draft-mtp`, block after block, whatever was accepted before."""

from contextlib import closing

import numpy as np
import pytest
from drafters.parity import LAST, LENGTHS, UB, disagreement
from llama_oracle import LlamaMTP
from random_gguf.model import Shape
from random_gguf.mtp import write_mtp, write_mtp_target

import pyggml_spec as ps
from pyggml_spec.api import DEMO, DEMO_MTP, DEMO_TARGET
from pyggml_spec.drafters.mtp import MTP
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.text.tokenizer import Tokenizer
from pyggml_spec.tools.prompts import read_prompts

FUNCTION = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def both(target, draft, prompt, n_ctx=512, width=5):
    """A session and llama.cpp with the same files; the prompt is in both."""
    session = ps.load(target, draft or target, device="CPU", threads=1, kernels="ggml", n_ctx=n_ctx, draft_width=width, chunk=UB)
    oracle = LlamaMTP(target, draft, n_ctx=n_ctx, n_ubatch=UB, width=width)
    assert session.engine.prefill(prompt) == oracle.prefill(prompt)
    return session, oracle


CASES = [
    *((quant, "qwen35", False, 20, 60) for quant in ("F32", "Q8_0", "Q4_K")),
    *((quant, "qwen35moe", False, 20, 60) for quant in ("F32", "Q8_0", "Q4_K")),
    ("Q8_0", "qwen35", True, 20, 20),
    ("F32", "qwen35moe", True, 20, 20),
    ("Q8_0", "qwen3next", False, 20, 20),
    ("F32", "qwen3next", True, 20, 20),
    *(("F32", "qwen35", False, prompt, 13) for prompt in (1, UB - 1, UB, UB + 1, LAST)),
]


@pytest.mark.parametrize("quant, arch, apart, prompt, blocks", CASES)
def test_ids_equal_llama_cpp(tmp_path, quant, arch, apart, prompt, blocks):
    target = write_mtp_target(tmp_path / "t.gguf", Shape(), quant, arch=arch)
    draft = write_mtp(tmp_path / "d.gguf", Shape(), quant, arch=arch) if apart else None
    ids = np.random.default_rng(3).integers(0, 256, prompt).tolist()
    session, oracle = both(target, draft, ids)
    try:
        assert disagreement(session, oracle, blocks, LENGTHS) is None
    finally:
        oracle.close()
        session.close()


@pytest.mark.parametrize("own", [("embedding",), ("norm",), ("head",), ("embedding", "norm", "head")])
def test_what_a_layer_has_of_its_own_is_used(tmp_path, own):
    target = write_mtp_target(tmp_path / "t.gguf", Shape(), "F32", own=own)
    session, oracle = both(target, None, list(range(40)))
    try:
        assert disagreement(session, oracle, 13, LENGTHS) is None
    finally:
        oracle.close()
        session.close()


def test_the_hidden_state_is_the_one_behind_its_norm(tmp_path, monkeypatch):
    """Of the target and of the chain. Before it the drafts are other ones: the comparison with llama.cpp sees that."""
    target = write_mtp_target(tmp_path / "t.gguf", Shape(), "F32")
    step, prompt = MTP.step, list(range(40))

    def before_its_norm(self, g, rows, target):
        rms, seen = g.rms_norm, []
        g.rms_norm = lambda x, weight, eps: seen.append(x) or rms(x, weight, eps)
        try:
            return step(self, g, rows, target)[0], seen[-1]
        finally:
            del g.rms_norm

    monkeypatch.setattr(MTP, "step", before_its_norm)
    session, oracle = both(target, None, prompt)
    try:
        assert disagreement(session, oracle, 13, LENGTHS) is not None
    finally:
        oracle.close()
        session.close()


def test_the_embedded_layer_drafts_real_text_as_llama_cpp_does():
    """60 blocks of what the embedded target writes, as many drafts accepted as are right: some, and not all."""
    with GGUFFile(DEMO_TARGET) as file, closing(Tokenizer(file)) as tokenizer:
        prompt = tokenizer.encode(FUNCTION)
    session, oracle = both(DEMO_TARGET, DEMO_MTP, prompt, n_ctx=1024, width=8)
    accepted = 0
    try:
        for _ in range(60):
            result = session.engine.fused_step()
            drafts = result.tokens[1:].tolist()
            assert drafts == oracle.draft(8)
            right = next((i for i, (a, b) in enumerate(zip(drafts, result.ids)) if a != b), 7)
            ids, _ = oracle.verify(drafts, right)
            assert result.ids.tolist() == ids.tolist()
            session.engine.accept(right + 1, int(result.ids[right]))
            accepted += right
    finally:
        oracle.close()
        session.close()
    assert 90 < accepted < 7 * 60


def test_the_embedded_layer_is_worth_its_drafts():
    """Held-out prompts: 3.7 tokens a step over 128 tokens of all 20, 2.4 over 64 of these; plain decoding gives 1, a layer without its training 1.1."""
    prompts = [prompt.text for prompt in read_prompts(DEMO / "prompts.jsonl")][:4]
    with ps.load(spec=["draft-mtp"], device="CPU", threads=1, n_ctx=512, draft_width=8) as session:
        assert session.methods == ("draft-mtp",) and DEMO_MTP.stat().st_size < 4e6
        assert "token_embd.weight" not in session.drafter._own  # the target's, bit for bit: one copy is kept
        stats = [session.generate(prompt, 64, ignore_end=True)[1] for prompt in prompts]
    assert sum(s.steps + s.matched for s in stats) / sum(s.steps for s in stats) > 2.0
