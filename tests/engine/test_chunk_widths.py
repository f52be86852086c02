"""Prompts on a CPU cost what their tokens cost: no pass is padded to much more than it needs, and memory stays what was planned."""

import pytest
from architectures import TARGETS
from random_gguf.model import Shape

import pyggml_spec as ps
from pyggml_spec.engine.options import fine_width


@pytest.fixture(scope="module", params=["qwen35", "qwen3", "gemma4"])
def session(request, tmp_path_factory):
    path = TARGETS[request.param](tmp_path_factory.mktemp(request.param) / "t.gguf", Shape(window=12), "Q8_0")
    with ps.load(path, device="CPU", threads=1, n_ctx=1200) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 10, 33, 36, 60, 120, 129, 400])
def test_a_prompt_computes_its_own_rows(session, rows):
    engine = session.engine
    engine.reset()
    before = engine.rows_computed
    engine.prefill([7] * rows)
    assert rows <= engine.rows_computed - before <= max(rows, rows * 17 / 16 + 1)


@pytest.mark.slow
def test_memory_that_was_planned_does_for_every_length(session):
    """No buffer grows, and the graphs of many lengths are not all kept."""
    graphs, engine = session.engine.graphs, session.engine
    planned = graphs.compute_bytes
    for rows in {graphs.chunk_width(n) for n in range(1, 513)}:
        for span in graphs.buckets[:: max(1, len(graphs.buckets) - 1)]:
            if span >= rows:
                graphs.build(graphs.key("prefill", rows, span))
    assert graphs.compute_bytes == planned
    assert sum(key.kind == "prefill" for key in graphs.steps()) < 40
    engine.reset()
    engine.prefill([7] * 1000)


def test_widths_are_close_and_few():
    widths = {fine_width(n) for n in range(1, 513)}
    assert all(n <= fine_width(n) <= n + max(0, n - 1) // 16 for n in range(1, 513)) and len(widths) <= 96
