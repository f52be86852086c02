"""Masks on the device: the graph that a GPU runs, on the CPU, against numpy over the same logits."""

import numpy as np
import pytest

import pyggml_spec as ps
from pyggml_spec.engine.batch import Draft
from pyggml_spec.engine.masked import MOST_ROWS, MaskedRows
from pyggml_spec.errors import EngineError
from pyggml_spec.ggml.library import ffi, lib


@pytest.fixture(scope="module")
def session():
    with ps.load(device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        yield session


def packed(allowed: np.ndarray) -> np.ndarray:
    bits = np.packbits(allowed, bitorder="little")
    return np.concatenate([bits, np.zeros(-bits.size % 4, np.uint8)])


@pytest.mark.parametrize("n", [4096, 1000, 5, 33000])
def test_the_likeliest_and_the_largest_of_the_allowed(session, n):
    """Vocabularies that fill blocks of 128 bits and that do not; one row and more than fit one graph; few allowed tokens, and none."""
    rng, rows = np.random.default_rng(n), 9
    masked = MaskedRows(session.backend, n, rows, 64)
    try:
        logits = rng.normal(0, 5, (rows, n)).astype(np.float32)
        lib.ggml_backend_tensor_set(masked.logits, ffi.from_buffer(logits), 0, logits.nbytes)
        for share in (0.9, 0.02):
            for count in (1, 2, 7, MOST_ROWS + 5):
                asked, allowed = rng.integers(0, rows, count), rng.random((count, n)) < share
                allowed[:, -1] = True
                want = np.where(allowed, logits[asked], -np.inf).argmax(axis=1)
                assert masked.likeliest([(int(row), packed(a)) for row, a in zip(asked, allowed)]) == want.tolist()
        for allowed in (rng.random(n) < 0.5, np.arange(n) == n - 1, np.zeros(n, bool)):
            ids, values = masked.largest(4, packed(allowed), 32)
            order = np.argsort(-values)
            want = np.sort(np.where(allowed, logits[4], -np.inf))[::-1][:32]
            np.testing.assert_array_equal(values[order], want)
            assert all(allowed[i] and logits[4, i] == v for i, v in zip(ids, values) if v > -np.inf)
    finally:
        masked.close()


def test_what_was_not_kept_cannot_be_asked_about(session):
    session.engine.reset()
    session.engine.prefill([1, 2, 3])
    with pytest.raises(EngineError, match="read_candidates"):
        session.engine.likeliest([(0, 0, packed(np.ones(4096, bool)))])
    with pytest.raises(EngineError, match="read_candidates"):
        session.engine.largest(0, packed(np.ones(4096, bool)))


def test_drafts_are_looked_at_before_they_are_verified(session):
    """The block made in two graphs has the drafts of the block made in one, and is as wide as the drafts that pass."""
    engine, prompt, seen = session.engine, session.tokenizer.encode("def quicksort(items):\n    "), []
    for passes in (None, 3, 2, 1, 0):
        engine.reset()
        engine.prefill(prompt)
        if passes is None:
            whole = engine.fused_step(4)
            continue
        check = lambda drafts, n=passes: seen.append(drafts.tolist()) or n  # noqa: E731
        result = engine.step({0: Draft(4, check=check)})[0]
        rows = {3: 4, 2: 4, 1: 2, 0: 1}[passes]
        assert seen.pop() == whole.tokens[1:].tolist() and not seen
        assert result.tokens.tolist() == whole.tokens[:rows].tolist()
        assert result.ids.tolist() == whole.ids[:rows].tolist() and result.draft_finite
        engine.accept(1, int(result.ids[0]))
        assert engine.plain_step().target_finite
