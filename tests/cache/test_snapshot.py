"""Snapshots of a whole sequence: going on after a restored one gives the same bits, whatever happened in between."""

import numpy as np
import pytest
from engine.helpers import run
from pairs import write_pair
from random_gguf.model import Shape

import pyggml_spec as ps
from pyggml_spec.engine.batch import Prefill, Verify
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import ContextError, EngineError

PROMPT = np.random.default_rng(1).integers(0, 256, 330).tolist()
OTHER = np.random.default_rng(2).integers(0, 256, 400).tolist()


@pytest.fixture(scope="module", params=["qwen35", "mtp", "eagle3", "assistant", "gemma4", "laguna", "qwen3"])
def engine(request, tmp_path_factory):
    """Chunks of 64 in a context that is longer than the sliding layers' ring of 256 rows."""
    folder = tmp_path_factory.mktemp(request.param)
    target, draft = write_pair(folder, request.param, Shape(window=12))
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_width=8) as session:
        engine = ModelRunner(session.backend, session.target, session.drafter, EngineOptions(n_ctx=1280, width=8, chunk=64))
        yield engine
        engine.close()


def go_on(engine, steps=6):
    """Plain and fused steps of changing width; every id, and the bytes that the sequence left."""
    out = []
    for step in range(steps):
        width = (8, 1, 4, 1, 1, 2)[step % 6]
        result = engine.plain_step() if width == 1 else engine.fused_step(width)
        rows = 1 + step % width
        engine.accept(rows, int(result.ids[rows - 1]))
        out.append((result.tokens.tolist(), result.ids.tolist()))
    engine.settle()
    with engine.sequence.whole(engine.cursor.committed, True) as pieces:
        return out, pieces.read()


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 1, 3])
def test_restoring_a_snapshot(engine, before):
    """Taken after the prompt, with an uncommitted block, and with plain tokens that the drafter has not seen; in between another sequence runs."""
    engine.reset()
    engine.prefill(PROMPT)
    go_on(engine, before)
    snapshot = engine.snapshot()
    want, left = go_on(engine)
    run(engine, OTHER, 30, width=8)
    for _ in range(2):
        engine.restore(snapshot)
        got, bytes_left = go_on(engine)
        assert got == want
        assert np.array_equal(bytes_left, left)
    snapshot.close()


@pytest.mark.slow
def test_a_snapshot_in_the_middle_of_a_block_is_refused(engine):
    engine.reset()
    engine.prefill(PROMPT[:40])
    engine.fused_step(4)
    with pytest.raises(EngineError, match="neither accepted"):
        engine.snapshot()
    engine.reset()
    assert engine.snapshot().committed == 0


def test_what_was_not_sound_is_not_when_it_comes_back(engine):
    """Nothing of a sequence that gave NaN goes to later prompts, and its rows are cleared after it: a restored one's were not."""
    engine.reset()
    engine.prefill(PROMPT[:40])
    engine.slots[0].sound = engine.slots[0].clean = False
    snapshot = engine.snapshot()
    engine.reset()
    assert engine.slots[0].sound and engine.slots[0].clean
    engine.restore(snapshot)
    assert not engine.slots[0].sound and not engine.slots[0].clean
    snapshot.close()
    engine.reset()


def test_a_sound_sequence_in_a_slot_of_nan(tmp_path):
    """What a sequence of NaN left after the rows of a copy was there still. The epoch of the slots counts it."""
    target, _ = write_pair(tmp_path, "qwen3", Shape())
    with ps.load(target, device="CPU", threads=1, n_ctx=64) as session:
        engine = ModelRunner(session.backend, session.target, None, EngineOptions(n_ctx=64, slots=2))
        for _ in range(2):
            engine.admit(candidates=None)
        engine.step({0: Prefill([1, 2, 3])})
        snapshot = engine.snapshot(0)
        engine.kv.fill_slot(1, 0xFF)
        engine.slots[1].sound = engine.slots[1].clean = False
        epoch = engine.epoch
        for slot in (1, 0):
            engine.restore(snapshot, slot)
            assert engine.epoch > epoch and engine.slots[slot].sound and engine.slots[slot].clean
            epoch = engine.epoch
        engine.step({slot: Verify([4, 5]) for slot in (0, 1)})
        rows = [engine.candidates(2, slot)[1] for slot in (0, 1)]
        assert np.isfinite(rows).all()
        np.testing.assert_array_equal(*rows)
        snapshot.close()
        engine.close()


def test_resuming_with_fewer_tokens_than_there_are_is_refused(engine):
    engine.reset()
    engine.prefill(PROMPT[:40])
    with pytest.raises(EngineError, match="40"):
        engine.resume(39)
    engine.reset()
    with pytest.raises(EngineError, match="9999"):
        engine.resume(9999)


def test_a_snapshot_is_closed_after_its_session(tmp_path):
    """The device that it lies on is freed then; closing it raised, and its memory stayed."""
    target, _ = write_pair(tmp_path, "qwen3", Shape())
    with ps.load(target, device="CPU", threads=1, n_ctx=64) as session:
        session.engine.reset()
        session.engine.prefill([1, 2, 3])
        snapshot = session.engine.snapshot()
    snapshot.close()
    assert snapshot.pieces.closed
    snapshot.close()


def test_rows_beyond_the_context_are_not_accepted(tmp_path):
    target, _ = write_pair(tmp_path, "qwen3", Shape())
    with ps.load(target, device="CPU", threads=1, n_ctx=32) as session:
        engine = ModelRunner(session.backend, session.target, None, EngineOptions(n_ctx=32, width=8))
        engine.prefill([1] * 29)
        engine.step({0: Verify([1] * 7)})
        with pytest.raises(ContextError, match="4 rows cannot be accepted in slot 0: the context holds 32 and 29 are in it"):
            engine.accept(4, 1)
        engine.accept(3, 1)
        assert engine.cursor.committed == 32
        engine.close()
