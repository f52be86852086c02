"""Widths that follow from what an engine is asked for."""

import pytest

from pyggml_spec.engine.options import prefill_widths


@pytest.mark.parametrize("chunk", [2048, 4096])
def test_tails_of_wide_chunks_are_padded_by_less_than_their_rows(chunk):
    """A prompt of 600 tokens was computed as 2,048 rows, or 4,096."""
    widths = prefill_widths(chunk)
    assert widths[-1] == chunk
    assert all(next(width for width in widths if rows <= width) < 2 * rows for rows in range(513, chunk + 1))


def test_chunks_of_512_have_the_widths_of_small_tails_only():
    assert prefill_widths(512) == (32, 128, 512)
