"""The bench's claim about memory: bytes that a step moves at least, against weights and caches counted by hand."""

import pytest

import pyggml_spec as ps
from pyggml_spec.tools.anatomy import anatomy, copy_bandwidth


@pytest.fixture(scope="module")
def session():
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=4) as loaded:
        yield loaded


def test_a_plain_step_reads_every_weight_once_and_one_row_of_a_tied_embedding_not_twice(session):
    engine = session.engine
    engine.reset(drafting=False)
    engine.prefill([1, 2, 3])
    moved = engine.step_graph("plain", 1).traffic()
    weights = session.target.weights.nbytes
    state = engine.delta.nbytes
    assert weights <= moved <= weights + engine.kv.nbytes + 3 * state


def test_a_longer_span_moves_its_rows_more(session):
    engine = session.engine
    engine.reset(drafting=False)
    engine.prefill([1] * 100)
    short = engine.step_graph("plain", 1).traffic()
    engine.prefill([1] * 200)
    rows = 256 * sum(t.nb[1] for layer in engine.kv.layers for t in (layer.k, layer.v))
    # our own mask looks at all positions, whatever the span; ggml's at those of the span
    assert engine.step_graph("plain", 1).traffic() - short == rows + (256 * 4 if session.backend.level is None else 0)


def test_the_phases_of_a_step_add_up_and_widths_that_do_not_fit_are_left_out(session):
    plain, block = anatomy(session, (1, 4, 512))
    assert (plain.width, block.width) == (1, 4)
    assert plain.draft_ms == plain.commit_ms == 0 and block.step_ms == pytest.approx(block.draft_ms + block.verify_ms)
    assert block.bytes > plain.bytes and block.nodes > plain.nodes
    assert plain.bandwidth_share > 0


def test_the_copy_bandwidth_is_one_that_a_machine_can_have(session):
    assert 1e7 < copy_bandwidth(session.backend) < 1e13
