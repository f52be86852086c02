"""Suggestions for misspelt names. Imports nothing of ggml, so that `pyspec --help` is fast."""

from collections.abc import Iterable
from difflib import get_close_matches


def meant(word: object, known: Iterable[str]) -> str:
    """The end of a sentence with the known name nearest to ``word``; empty without one."""
    by = {name.lower(): name for name in known}
    near = get_close_matches(str(word).lower(), by, 1, 0.6)
    return f"; did you mean {by[near[0]]}?" if near else ""
