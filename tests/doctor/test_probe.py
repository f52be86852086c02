"""The probe drafts what the engine drafts; otherwise it would judge another program."""

from contextlib import closing

import numpy as np
import pytest

import pyggml_spec as ps
from pyggml_spec.doctor.probe import Probe, Reading, _mask, write_passages
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET

PROMPT = "class Stack:\n    def __init__(self):\n"


@pytest.fixture(scope="module")
def session():
    with ps.load(DEMO_TARGET, DEMO_DRAFTER, device="CPU", threads=1, n_ctx=512, draft_width=16) as session:
        yield session


def test_the_probe_drafts_what_the_engine_drafts(session):
    engine, layers = session.engine, session.drafter.hp.target_layers
    passage = write_passages(engine, [session.tokenizer.encode(PROMPT)], layers, 80)[0]
    with closing(Probe(session.backend, session.target, session.drafter, [passage], blocks=6)) as probe:
        measured, anchors = probe.measure(Reading(session.drafter.hp)), probe.anchors(passage)
    ours = measured.drafts.reshape(len(anchors), -1)
    assert measured.finite and len(anchors) == 6
    for drafts, anchor in zip(ours, anchors):
        engine.reset()
        engine.prefill(passage.tokens[:anchor])
        assert engine.cursor.last_token == passage.tokens[anchor]
        theirs = engine.fused_step(16).tokens[1:]
        agree = int((drafts == theirs).sum())
        assert agree >= 14, (anchor, drafts, theirs)  # other batch shapes: a near-tie may fall the other way
    assert measured.matched.max() > 3


def test_likelihood_is_that_of_the_text(session):
    """Drafts of a passage whose features are another one's are less likely, and everything stays finite."""
    engine, layers = session.engine, session.drafter.hp.target_layers
    prompts = [session.tokenizer.encode(text) for text in (PROMPT, "import os\n\n")]
    passages = write_passages(engine, prompts, layers, 60)
    with closing(Probe(session.backend, session.target, session.drafter, passages, blocks=4)) as probe:
        right, wrong = probe.measure(Reading(session.drafter.hp)), probe.measure(Reading(session.drafter.hp, features_of=1))
    assert right.likelihood.mean() > wrong.likelihood.mean() + 1
    assert right.likelihood.max() <= 0 and np.isfinite(wrong.likelihood).all()


def test_captured_layers_are_those_of_the_target(session):
    engine = session.engine
    ids = session.tokenizer.encode(PROMPT)
    engine.reset(drafting=False)
    chosen, features = engine.capture(ids, (0, 8))
    assert features.shape == (2, len(ids), 512) and chosen.shape == (len(ids),)
    engine.reset(drafting=False)
    assert engine.logits(ids).argmax(axis=1).tolist() == chosen.tolist()
    for bad in (-1, 9):
        with pytest.raises(ps.EngineError, match=f"captured layer is {bad}"):
            engine.capture(ids, (bad,))


def test_mask_shows_each_block_itself_and_what_was_committed():
    """Two blocks of two rows at 1 and 3; context rows 0..2, then the blocks' own rows."""
    anchors = np.array([1, 3])
    seen = np.isfinite(_mask(anchors, 2, 3, 8, 0, False).astype(np.float32))
    assert seen.astype(int).tolist() == [
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 1, 1, 0],
    ]
    causal = np.isfinite(_mask(anchors, 2, 3, 8, 0, True).astype(np.float32))
    assert causal[0, 4] == 0 and causal[1, 3] == 1
    window = np.isfinite(_mask(anchors, 2, 3, 8, 2, False).astype(np.float32))
    assert window[2].astype(int).tolist() == [0, 0, 1, 0, 0, 1, 1, 0]  # position 3 sees 2 and later
