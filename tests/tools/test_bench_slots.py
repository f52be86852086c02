"""The benchmark of several sequences: its figures add up, and one slot is the engine for one sequence."""

import pytest

import pyggml_spec as ps
from pyggml_spec.errors import ContextError
from pyggml_spec.tools.bench import BenchOptions
from pyggml_spec.tools.bench_slots import bench_slots, tokens_needed

OPTIONS = BenchOptions(prompts=(), tokens=12, repetitions=1, synthetic=6.0)


@pytest.fixture(scope="module")
def session(pair):
    with ps.load(*pair, device="CPU", threads=1, n_ctx=tokens_needed(OPTIONS), draft_width=16) as loaded:
        yield loaded


def test_one_slot_uses_the_engine_for_one_sequence(session, monkeypatch):
    monkeypatch.setattr(session, "batch", lambda *_: pytest.fail("one slot needs no batch engine"))
    plain, drafted = bench_slots(session, (1,), OPTIONS)
    assert (plain.test, drafted.test) == ("tg12x1", "spec12x1") and plain.widths.keys() == {1} and drafted.tokens_per_step > 1


def test_several_slots(session):
    plain, drafted = bench_slots(session, (3,), OPTIONS)
    assert plain.slots == drafted.slots == 3 and plain.tokens_per_step == 1.0
    assert drafted.widths.keys() == {16} and drafted.tokens_per_step > 1.5
    for row in (plain, drafted):
        assert row.mean == pytest.approx(3000 * row.tokens_per_step / row.ms_per_step, rel=0.01)
        assert row.used == 1.0
        assert row.slot_bytes > 0 and row.as_dict()["mean"] == row.mean


def test_a_context_that_is_too_short_is_said_before_anything_is_measured(session):
    with pytest.raises(ContextError, match="use `n_ctx`"):
        bench_slots(session, (2,), BenchOptions(prompts=(), tokens=200, repetitions=1))
