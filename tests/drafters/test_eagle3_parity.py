"""Ids that an EAGLE-3 drafter makes equal those of llama.cpp's `draft-eagle3`, block after block, whatever was accepted before."""

import numpy as np
import pytest
from drafters.parity import LAST, UB, disagreement
from llama_oracle import LlamaEagle3
from random_gguf.archs import write_gpt_oss, write_llama, write_qwen3
from random_gguf.dflash2 import write_dflash2
from random_gguf.eagle3 import write_eagle3
from random_gguf.model import Shape, write_qwen35

import pyggml_spec as ps
from pyggml_spec.drafters.eagle3 import Eagle3
from pyggml_spec.errors import ModelError, PairError
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan

TARGETS = {"llama": write_llama, "qwen3": write_qwen3, "qwen35": write_qwen35, "gpt-oss": write_gpt_oss}


def both(target, draft, prompt, layers=Shape().target_layers, n_ctx=512, width=5):
    """A session and llama.cpp with the same files; the prompt is in both."""
    session = ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=n_ctx, draft_width=width, chunk=UB)
    oracle = LlamaEagle3(target, draft, layers, n_ctx=n_ctx, n_ubatch=UB, width=width)
    assert session.engine.prefill(prompt) == oracle.prefill(prompt)
    return session, oracle


CASES = [
    *((quant, "llama", {}, 20, 60) for quant in ("F32", "Q8_0", "Q4_K")),
    *((quant, "llama", {"tokens": 100}, 20, 60) for quant in ("F32", "Q8_0", "Q4_K")),
    ("F32", "qwen3", {"own": ("head", "embedding"), "norm_before_residual": True}, 20, 13),
    ("Q8_0", "qwen3", {"own": (), "norm_before_fc": True}, 20, 13),
    ("F32", "qwen3", {"own": ("head", "embedding"), "n_embd": 128, "factors": True, "tokens": 60}, 20, 13),
    ("Q8_0", "qwen35", {"tokens": 100}, 20, 20),
    ("F32", "gpt-oss", {}, 40, 13),
    *(("F32", "llama", {"tokens": 100}, prompt, 13) for prompt in (1, UB - 1, UB, UB + 1, LAST)),
]


@pytest.mark.parametrize("quant, arch, options, prompt, blocks", CASES)
def test_ids_equal_llama_cpp(tmp_path, quant, arch, options, prompt, blocks):
    target = TARGETS[arch](tmp_path / "t.gguf", Shape(), quant)
    draft = write_eagle3(tmp_path / "d.gguf", Shape(), quant, **options)
    ids = np.random.default_rng(3).integers(0, 256, prompt).tolist()
    session, oracle = both(target, draft, ids)
    try:
        assert disagreement(session, oracle, blocks) is None
    finally:
        oracle.close()
        session.close()


def test_ids_do_not_depend_on_who_else_is_loaded(tmp_path):
    """A DFlash2 that reads other layers, and drafts some of the blocks: what the chain carries from block to block stays its own."""
    target, draft = write_llama(tmp_path / "t.gguf", Shape()), write_eagle3(tmp_path / "d.gguf", Shape(), tokens=100)
    other, ids = write_dflash2(tmp_path / "o.gguf", Shape(target_layers=(0, 2))), list(range(40))
    options = {"device": "CPU", "threads": 1, "kernels": "ggml", "n_ctx": 512, "draft_width": 5, "chunk": UB}
    with ps.load(target, [other, draft], **options) as session:
        engine, oracle = session.engine, LlamaEagle3(target, draft, Shape().target_layers, n_ctx=512, n_ubatch=UB, width=5)
        try:
            assert engine.prefill(ids) == oracle.prefill(ids)
            for i, accepted in enumerate((1, 0, 4, 2, 3, 4, 0, 0, 1, 2)):
                result = engine.fused_step(drafter="draft-eagle3" if i % 3 else "draft-dflash")
                drafts = result.tokens[1:].tolist()
                assert i % 3 == 0 or drafts == oracle.draft(5), f"block {i}"
                oracle.verify(drafts, accepted)
                engine.accept(accepted + 1, int(result.ids[accepted]))
        finally:
            oracle.close()


def test_the_next_draft_reads_what_is_before_the_norm(tmp_path, monkeypatch):
    """Behind it the drafts are other ones: the comparison with llama.cpp sees that."""
    target, draft = write_llama(tmp_path / "t.gguf", Shape()), write_eagle3(tmp_path / "d.gguf", Shape())
    step = Eagle3.step
    monkeypatch.setattr(Eagle3, "step", lambda self, g, rows, target: (step(self, g, rows, target)[0],) * 2)
    session, oracle = both(target, draft, list(range(40)))
    try:
        assert disagreement(session, oracle, 13) is not None
    finally:
        oracle.close()
        session.close()


def test_what_inspect_and_plan_say(tmp_path):
    target, draft = write_llama(tmp_path / "t.gguf", Shape()), write_eagle3(tmp_path / "d.gguf", Shape(), tokens=100)
    seen = inspect_file(draft)
    assert seen.usable and "an eagle3 drafter that reads the inputs of target layers 1, 2, 3 and drafts up to 15 tokens" in seen.verdict
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
        assert plan(target, draft, device="CPU", n_ctx=256).memory == session.engine.memory()


@pytest.mark.parametrize(
    "shape, options, words",
    [
        (Shape(n_embd=128), {}, "hidden states of 128 values, the target's have 256"),
        (Shape(), {"tokens": 100, "chosen": 320}, "names the token 320, but the target has 320"),
        (Shape(), {"tokens": 100, "own": ()}, "its head has 320 tokens, but d2t has 100"),
        (Shape(), {"n_embd": 128}, "no token_embd.weight of its own"),
        (Shape(target_layers=(1, 2, 4)), {}, "reads the input of layer 4, but of llama targets those of layers 0 to 3"),
        (Shape(target_layers=(1, 2)), {}, "has 2 eagle3.target_layers"),
        (Shape(n_vocab=330), {"own": ("head", "embedding")}, "its token_embd.weight has 330 tokens, the target has 320"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, shape, options, words):
    target, draft = write_llama(tmp_path / "t.gguf", Shape()), write_eagle3(tmp_path / "d.gguf", shape, **options)
    with pytest.raises((PairError, ModelError), match=words):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=256)
