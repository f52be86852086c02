"""Ids that a gemma4-assistant drafts equal those of llama.cpp's `draft-mtp` over shared memory, block after block, whatever was accepted before."""

import numpy as np
import pytest
from drafters.parity import LAST, UB, disagreement
from llama_oracle import LlamaMTP
from random_gguf.archs import write_gemma4, write_llama
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape

import pyggml_spec as ps
from pyggml_spec.cache.kv import NOWHERE
from pyggml_spec.cache.kv_types import KVTypes
from pyggml_spec.engine.drafting import BorrowingDrafting
from pyggml_spec.errors import ModelError, PairError
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan


def both(target, draft, prompt, n_ctx=512, width=5, kv=KVTypes()):
    """A session and llama.cpp with the same files; the prompt is in both."""
    types = {"cache_type_k": kv.k, "cache_type_v": kv.v}
    session = ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=n_ctx, draft_width=width, chunk=UB, **types)
    oracle = LlamaMTP(target, draft, n_ctx=n_ctx, n_ubatch=UB, width=width, kv=kv, draft_kv=kv, shared=True)
    assert session.engine.prefill(prompt) == oracle.prefill(prompt)
    return session, oracle


CASES = [
    *((quant, {}, {}, 20, 60) for quant in ("F32", "Q8_0", "Q4_K")),
    ("F32", {"shared": False, "n_per_layer": 0}, {"layers": 4}, 60, 40),
    ("F32", {}, {"layers": 2, "n_embd": 64}, 40, 60),
    ("Q8_0", {"routed": True}, {}, 20, 20),
    *(("F32", {}, {}, prompt, 13) for prompt in (1, UB - 1, UB, UB + 1, LAST)),
]


@pytest.mark.parametrize("quant, of_target, of_drafter, prompt, blocks", CASES)
def test_ids_equal_llama_cpp(tmp_path, quant, of_target, of_drafter, prompt, blocks):
    target = write_gemma4(tmp_path / "t.gguf", Shape(), quant, **of_target)
    draft = write_gemma4_assistant(tmp_path / "d.gguf", Shape(), quant, **of_drafter)
    session, oracle = both(target, draft, np.random.default_rng(3).integers(0, 256, prompt).tolist())
    try:
        assert disagreement(session, oracle, blocks) is None
    finally:
        oracle.close()
        session.close()


def test_rows_that_are_quantised_are_read_as_they_are(tmp_path):
    """The target's K/V are stored rotated then."""
    target, draft = write_gemma4(tmp_path / "t.gguf", Shape()), write_gemma4_assistant(tmp_path / "d.gguf", Shape())
    session, oracle = both(target, draft, list(range(40)), kv=KVTypes("q8_0", "q8_0"))
    try:
        assert disagreement(session, oracle, 20) is None
    finally:
        oracle.close()
        session.close()


@pytest.mark.parametrize("field", ["draft_last", "draft_positions"])
def test_all_drafts_see_the_committed_tokens_only(tmp_path, monkeypatch, field):
    """With the last token's row, or at the next position, other ids come: the comparison with llama.cpp sees it."""
    target, draft = write_gemma4(tmp_path / "t.gguf", Shape()), write_gemma4_assistant(tmp_path / "d.gguf", Shape(), n_embd=64, layers=2)
    fill = BorrowingDrafting.fill

    def one_more(self, host, *more):
        fill(self, host, *more)
        host[field] += 1

    monkeypatch.setattr(BorrowingDrafting, "fill", one_more)
    session, oracle = both(target, draft, list(range(40)))
    try:
        assert disagreement(session, oracle, 60) is not None
    finally:
        oracle.close()
        session.close()


def test_rings_hold_the_positions_that_masks_are_made_from(tmp_path):
    """As C fills them for a step of the target, at every length around the ring's end."""
    target = write_gemma4(tmp_path / "t.gguf", Shape())
    with ps.load(target, device="CPU", threads=1, n_ctx=2048) as session:
        kv, near = session.engine.kv, np.empty(256, np.float32)
        assert kv.ring
        for n in (1, 2, 255, 256, 257, kv.ring - 1, kv.ring, kv.ring + 1, 3 * kv.ring + 5):
            kv.positions_of_ring(n, near)
            held = np.array([max((p for p in range(n) if p % kv.ring == j), default=-1) for j in range(256)])
            assert np.array_equal(near, np.where(held < 0, np.float32(NOWHERE), 0.5 - held))


def test_what_inspect_and_plan_say(tmp_path):
    target, draft = write_gemma4(tmp_path / "t.gguf", Shape()), write_gemma4_assistant(tmp_path / "d.gguf", Shape(), tables=True)
    seen = inspect_file(draft)
    assert seen.usable and "a gemma4-assistant drafter that reads the K/V of its target and drafts up to 15 tokens" in seen.verdict
    assert set(seen.unused) == {"masked_embd_centroids.weight", "masked_embd_ordering"}
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
        assert plan(target, draft, device="CPU", n_ctx=256).memory == session.engine.memory()


@pytest.mark.parametrize(
    "write, shape, options, words",
    [
        (write_llama, Shape(), {}, "reads the K/V of gemma4 models, and that one is llama"),
        (write_gemma4, Shape(n_embd=512), {}, "hidden states of 512 values, the target's have 256"),
        (write_gemma4, Shape(n_vocab=330), {}, "it has 330 tokens, the target has 320"),
        (write_gemma4, Shape(target_window=32), {}, "its window is 32, the target's 24"),
        (write_gemma4, Shape(head_size=32), {}, "layer 0 has 4 heads of 32, the rows that it reads are of 2 of 64"),
        (write_gemma4, Shape(), {"n_embd": 256}, "embedding_length_out is the drafter's own 256"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, write, shape, options, words):
    target, draft = write(tmp_path / "t.gguf", Shape()), write_gemma4_assistant(tmp_path / "d.gguf", shape, **options)
    with pytest.raises((PairError, ModelError), match=words):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=256)
