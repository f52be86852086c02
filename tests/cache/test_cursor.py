"""The cursor never passes the context's end, and names what does not fit."""

import pytest

from pyggml_spec.cache.cursor import Cursor
from pyggml_spec.errors import ContextError, EngineError


def state(cursor):
    return cursor.committed, cursor.last_token, cursor.room


def test_advance_and_reset():
    cursor = Cursor(10)
    assert state(cursor) == (0, None, 10)
    cursor.advance(4, 7)
    cursor.advance(1, 8)
    assert state(cursor) == (5, 8, 5)
    cursor.reset()
    assert state(cursor) == (0, None, 10)


def test_a_refused_move_changes_nothing():
    cursor = Cursor(4)
    cursor.advance(4, 1)
    cursor.advance(0, 1)
    for rows in (1, -1):
        with pytest.raises(EngineError, match=f"{rows}"):
            cursor.advance(rows, 2)
        assert state(cursor) == (4, 1, 0)


def test_the_error_names_all_three_numbers_and_the_remedy():
    cursor = Cursor(100, 30)
    cursor.check_fits(70)
    with pytest.raises(ContextError) as caught:
        cursor.check_fits(71)
    assert all(word in str(caught.value) for word in ("71", "100", "30", "`n_ctx`"))
