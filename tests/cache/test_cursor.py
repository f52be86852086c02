"""The cursor never passes the context's end, and says what did not fit."""

import pytest

from pyggml_spec.cache.cursor import Cursor
from pyggml_spec.errors import ContextError, EngineError


def test_a_new_cursor_holds_nothing():
    cursor = Cursor(10)
    assert (cursor.committed, cursor.last_token, cursor.room) == (0, None, 10)


def test_advance_commits_rows_and_remembers_the_next_token():
    cursor = Cursor(10)
    cursor.advance(4, 7)
    cursor.advance(1, 8)
    assert (cursor.committed, cursor.last_token, cursor.room) == (5, 8, 5)


def test_the_context_can_be_filled_to_the_last_row_and_no_further():
    cursor = Cursor(4)
    cursor.advance(4, 1)
    assert cursor.room == 0
    cursor.advance(0, 1)
    with pytest.raises(EngineError, match="cannot move by 1"):
        cursor.advance(1, 2)
    assert (cursor.committed, cursor.last_token) == (4, 1)  # a refused move changes nothing


def test_a_cursor_never_moves_back():
    cursor = Cursor(4, 2, 9)
    with pytest.raises(EngineError, match="-1"):
        cursor.advance(-1, 2)
    assert (cursor.committed, cursor.last_token) == (2, 9)


def test_what_does_not_fit_is_said_with_all_three_numbers_and_the_remedy():
    cursor = Cursor(100, 30)
    cursor.check_fits(70)
    with pytest.raises(ContextError) as caught:
        cursor.check_fits(71)
    assert all(word in str(caught.value) for word in ("71", "100", "30", "`n_ctx`"))


def test_reset_forgets_everything():
    cursor = Cursor(4, 4, 1)
    cursor.reset()
    assert (cursor.committed, cursor.last_token, cursor.room) == (0, None, 4)
