"""Drafted ids equal llama.cpp's own DFlash, block after block, whatever was accepted before."""

import numpy as np
import pytest
from engine.helpers import count_matched
from llama_oracle import LlamaDFlash
from random_gguf.model import Shape, write_dflash, write_qwen35

import pyggml_spec as ps
from pyggml_spec.api import DEMO_DRAFTER, DEMO_TARGET


def assert_blocks_equal(session, target, draft, prompt, blocks):
    """Runs both engines in step; returns how many drafts were accepted in all."""
    engine, hp, opt = session.engine, session.drafter.hp, session.engine.options
    kv = {"kv": opt.kv, "draft_kv": opt.draft_kv}
    oracle = LlamaDFlash(target, draft, hp.target_layers, hp.mask_token, n_ctx=opt.n_ctx, block=hp.block_size, causal=hp.causal, **kv)
    accepted = 0
    try:
        assert engine.prefill(prompt) == oracle.prefill(prompt)
        for i in range(blocks):
            result = engine.fused_step()
            assert result.tokens[1:].tolist() == oracle.draft_logits().argmax(axis=1).tolist(), f"block {i}"
            ids, matched = oracle.verify(result.tokens[1:].tolist())
            assert np.where(oracle.unsure, ids, result.ids).tolist() == ids.tolist(), f"verified ids of block {i}"
            assert matched == count_matched(result)
            engine.accept(matched + 1, int(result.ids[matched]))
            accepted += matched
    finally:
        oracle.close()
    return accepted


@pytest.mark.parametrize("quant, window, prompt", [("F32", 0, 20), ("Q8_0", 12, 300), ("Q4_K", 12, 700)])
def test_random_pair(tmp_path, quant, window, prompt):
    """Past the drafter's sliding window (12), and with a prompt longer than a micro-batch (700 > 512)."""
    shape = Shape(window=window)
    target, draft = write_qwen35(tmp_path / "t.gguf", shape, quant), write_dflash(tmp_path / "d.gguf", shape, quant)
    ids = np.random.default_rng(3).integers(0, 256, prompt).tolist()
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=1024) as session:
        assert_blocks_equal(session, target, draft, ids, 20)


def test_embedded_pair_over_60_blocks_with_partial_acceptance():
    with ps.load(device="CPU", threads=1, kernels="ggml", n_ctx=1024) as session:
        prompt = session.tokenizer.encode("class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n")
        accepted = assert_blocks_equal(session, DEMO_TARGET, DEMO_DRAFTER, prompt, 60)
    assert 60 < accepted < 15 * 60  # some accepted and some rejected, or the comparison shows little
