"""Ids that a DSpark drafter makes equal those of llama.cpp's `draft-dspark`, block after block, whatever was accepted before."""

import numpy as np
import pytest
from drafters.parity import LAST, UB, disagreement
from llama_oracle import LlamaDFlash
from random_gguf.archs import write_gemma4, write_qwen3
from random_gguf.dflash2 import write_dspark
from random_gguf.model import Shape, write_qwen35

import pyggml_spec as ps
from pyggml_spec.drafters.base import Chosen
from pyggml_spec.drafters.dspark import DSpark
from pyggml_spec.engine.batch import Draft
from pyggml_spec.errors import ModelError, PairError
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan

TARGETS = {"qwen3": write_qwen3, "qwen35": write_qwen35, "gemma4": write_gemma4}


def both(target, draft, prompt, n_ctx=512, width=5):
    """A session and llama.cpp with the same files; the prompt is in both."""
    session = ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=n_ctx, draft_width=width, chunk=UB)
    drafter = session.drafter
    options = {"causal": drafter.hp.causal, "from_anchor": drafter.from_anchor, "confident": drafter.confident}
    oracle = LlamaDFlash(target, draft, drafter.hp.target_layers, drafter.hp.mask_token, n_ctx, UB, block=width, **options)
    assert session.engine.prefill(prompt) == oracle.prefill(prompt)
    return session, oracle


CASES = [
    *((quant, "qwen35", {}, 20, 60, 5) for quant in ("F32", "Q8_0", "Q4_K")),
    *((quant, "qwen35", {"from_anchor": False}, 20, 30, 5) for quant in ("F32", "Q8_0", "Q4_K")),
    *(("F32", "qwen3", {"confidence": True, "from_anchor": True}, 20, 13, width) for width in (2, 3, 9)),
    ("F32", "qwen3", {"from_anchor": False, "causal": True}, 20, 13, 8),
    ("F32", "gemma4", {"factors": True, "norms_behind": True, "gelu": True}, 40, 13, 5),
    ("F32", "qwen3", {"own": ("head",), "tokens": 100}, 20, 20, 5),
    ("F32", "qwen3", {"own": ("head",), "tokens": 100, "from_anchor": False}, 20, 20, 5),
    *(("F32", "qwen3", {}, prompt, 13, 5) for prompt in (1, UB - 1, UB, UB + 1, LAST)),
]


@pytest.mark.parametrize("quant, arch, options, prompt, blocks, width", CASES)
def test_ids_equal_llama_cpp(tmp_path, quant, arch, options, prompt, blocks, width):
    target = TARGETS[arch](tmp_path / "t.gguf", Shape(), quant)
    scale = 16.0 if arch == "gemma4" else 0.0  # in the file, as the converter writes it: llama.cpp asks nobody else
    draft = write_dspark(tmp_path / "d.gguf", Shape(embedding_scale=scale), quant, **options)
    session, oracle = both(target, draft, np.random.default_rng(3).integers(0, 256, prompt).tolist(), width=width)
    try:
        assert disagreement(session, oracle, blocks) is None
    finally:
        oracle.close()
        session.close()


def test_the_markov_head_matters(tmp_path, monkeypatch):
    """Without it the drafts are other ones: the comparison with llama.cpp sees that."""

    def alone(self, g, hidden, block, slots, target):
        logits = self.logits(g, hidden, target)
        return Chosen((self.choose(g, logits),), logits)

    monkeypatch.setattr(DSpark, "drafts", alone)
    target, draft = write_qwen3(tmp_path / "t.gguf", Shape()), write_dspark(tmp_path / "d.gguf", Shape())
    session, oracle = both(target, draft, list(range(40)))
    try:
        assert disagreement(session, oracle, 13) is not None
    finally:
        oracle.close()
        session.close()


@pytest.mark.parametrize("from_anchor", [True, False])
def test_what_it_says_of_its_drafts_is_what_it_says_in_llama_cpp(tmp_path, from_anchor):
    """And so many are verified as whoever weighs it wants."""
    target, draft = (
        write_qwen3(tmp_path / "t.gguf", Shape()),
        write_dspark(tmp_path / "d.gguf", Shape(), confidence=True, from_anchor=from_anchor),
    )
    session, oracle = both(target, draft, list(range(40)), width=8)
    try:
        for kept in (1, 3, 2, 0):
            said = []
            result = session.engine.step({0: Draft(8, weigh=lambda of, said=said: said.append(of[0]) or 3)})[0]
            assert len(said[0]) == 7 and np.abs(said[0] - oracle.said(8)).max() < 1e-5 and np.ptp(said[0]) > 0.01
            assert result.tokens[1:].tolist() == oracle.draft(8)[:3]
            ids, _ = oracle.verify(result.tokens[1:].tolist(), kept)
            session.engine.accept(kept + 1, int(ids[kept]))
    finally:
        oracle.close()
        session.close()


@pytest.mark.parametrize("from_anchor, rows", [(None, 9), (False, 8)])
def test_what_inspect_and_plan_say(tmp_path, from_anchor, rows):
    target = write_qwen3(tmp_path / "t.gguf", Shape())
    draft = write_dspark(tmp_path / "d.gguf", Shape(), from_anchor=from_anchor, confidence=True)
    seen = inspect_file(draft)
    assert seen.usable and f"a dflash drafter with blocks of {rows} that reads the inputs of target layers 1, 2, 3" in seen.verdict
    assert not seen.unused
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
        assert session.engine.options.width == rows and session.methods == ("draft-dspark",)
        assert plan(target, draft, device="CPU", n_ctx=256).memory == session.engine.memory()


@pytest.mark.parametrize(
    "shape, options, words",
    [
        (Shape(n_vocab=330), {}, "its markov_w1.weight has 330 tokens, the target has 320"),
        (Shape(), {"tokens": 100}, "its output.weight has 320 tokens, but d2t has 100"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, shape, options, words):
    target, draft = write_qwen3(tmp_path / "t.gguf", Shape()), write_dspark(tmp_path / "d.gguf", shape, **options)
    with pytest.raises((PairError, ModelError), match=words):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=256)
