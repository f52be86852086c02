"""Delta-net state: padding, rollback by replay, width changes, dirty memory. Everything here is exact."""

import numpy as np
import pytest
from engine.helpers import oracle, reference, run
from sessions import loaded

PROMPT = np.random.default_rng(5).integers(0, 256, 21).tolist()
BLOCK = np.random.default_rng(6).integers(0, 256, 15).tolist()
session = loaded(pair=True, n_ctx=1024)


def _state_after(engine, tokens):
    """The committed recurrent state after exactly these tokens, computed one exact chunk at a time."""
    engine.reset()
    engine.logits(tokens)
    return engine.delta.read()


def _commit(engine):
    """Folds whatever is pending, by the transition that a prefill would take."""
    engine.flush()


@pytest.mark.parametrize("rows", range(1, 17))
def test_replay_of_the_first_rows_is_the_state_after_them(session, rows):
    """For every accepted length: verify 16 rows, keep some, and compare the state with one that never saw the others."""
    engine = session.engine
    engine.reset()
    engine.prefill(PROMPT)
    first = engine.cursor.last_token
    engine.verify_step(BLOCK)
    engine.accept(rows, 7)
    _commit(engine)
    got = engine.delta.read()
    engine.reset()
    engine.prefill(PROMPT)
    for token in [first, *BLOCK][:rows]:
        engine.cursor.last_token = token
        engine.plain_step()
        engine.accept(1, 0)
    _commit(engine)
    # one row at a time and sixteen at once are different matrix kernels, so nearly equal; the wrong row count is off by 1e-1
    want = engine.delta.read()
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 15, 16])
def test_rollback_then_going_on_equals_a_sequence_that_never_drafted(session, rows):
    engine = session.engine
    text = reference(engine, PROMPT, 60)
    tokens, _ = run(engine, PROMPT, 60, drafts=oracle(PROMPT, text, lambda s: rows - 1))
    assert tokens == text


def test_padding_rows_do_not_step_the_recurrence(session):
    """21 tokens in a chunk of 32: the padded rows must leave the state alone (0.63 relative error when they do not)."""
    engine = session.engine
    want = _state_after(engine, PROMPT)
    engine.reset()
    engine.prefill(PROMPT)
    np.testing.assert_allclose(engine.delta.read(), want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_changing_the_width_in_the_middle_changes_nothing(session):
    engine = session.engine
    text = reference(engine, PROMPT, 90)
    engine.reset()
    tokens = [engine.prefill(PROMPT)]
    widths = [16, 4, 1, 8, 2, 1, 1, 16, 3, 16]
    i = 0
    while len(tokens) < 80:
        width = widths[i % len(widths)]
        i += 1
        if width == 1:
            ids = engine.plain_step().ids
            engine.accept(1, int(ids[0]))
            tokens.append(int(ids[0]))
            continue
        guess = text[len(tokens) : len(tokens) + width - 1]
        guess[-1] = (guess[-1] + 1) % 256
        ids = engine.verify_step(guess).ids
        engine.accept(width - 1, int(ids[width - 2]))
        tokens += ids[: width - 1].tolist()
    assert tokens == text[: len(tokens)]


def test_plain_steps_then_a_block_then_plain_steps(session):
    engine = session.engine
    text = reference(engine, PROMPT, 40)
    engine.reset()
    tokens = [engine.prefill(PROMPT)]
    for kind in "pppbppbbp":
        if kind == "p":
            ids, keep = engine.plain_step().ids, 1
        else:
            ids, keep = engine.verify_step([*text[len(tokens) : len(tokens) + 2], *[0] * 13]).ids, 3
        engine.accept(keep, int(ids[keep - 1]))
        tokens += ids[:keep].tolist()
    assert tokens == text[: len(tokens)]


def test_prefill_commits_an_uncommitted_block_first(session):
    engine = session.engine
    more = [11, 12, 13, 14]
    engine.reset()
    engine.prefill(PROMPT)
    first = engine.cursor.last_token
    engine.verify_step(BLOCK)
    engine.accept(3, 0)
    got = engine.prefill(more)
    engine.reset()
    want = engine.prefill([*PROMPT, first, *BLOCK[:2], *more])
    assert got == want


@pytest.mark.slow
@pytest.mark.parametrize("poison", [0xFF, 0x3E], ids=["NaN bytes", "0x3e bytes"])
def test_dirty_memory_changes_nothing(session, poison):
    """Everything that a clean start must not depend on is filled with garbage: K/V rows of both models and step buffers."""
    engine = session.engine
    want, _ = run(engine, PROMPT, 40)
    engine.reset()
    engine.io.mirror[:] = poison
    if poison != 0xFF:  # a masked NaN row would be a row that attention reads; rows past the cursor are zeroed at creation
        engine.kv.fill(poison)
        engine.draft_kv.fill(poison)
    got, _ = run(engine, PROMPT, 40)
    assert got == want
    engine.kv.fill(0)
    engine.draft_kv.fill(0)


def test_identical_prompts_give_identical_counts(session):
    """Repeating a prompt must not depend on what was there before (a fork's drafter went blind on the second one)."""
    runs = [run(session.engine, PROMPT, 50) for _ in range(3)]
    assert all(r[0] == runs[0][0] and r[1].matched_at == runs[0][1].matched_at for r in runs)


def test_several_layers_replay_in_place(session):
    """All layers are replayed by one node that writes the states where they are; the counts say that it is one node."""
    engine = session.engine
    engine.reset()
    engine.prefill(PROMPT)
    engine.verify_step(BLOCK)
    step = next(s for key, s in engine.graphs.steps().items() if key.kind == "verify")
    layers = session.target.delta_shape().layers
    counts = step.graph.op_counts()
    if session.backend.level is None:
        assert counts["GATED_DELTA_NET"] == layers + 1
    else:
        assert (counts["native delta-net"], counts["native replay"]) == (layers, 1)
