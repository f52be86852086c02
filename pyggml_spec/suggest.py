"""What somebody perhaps meant. Loads nothing: `pyspec --help` needs no ggml."""

from collections.abc import Iterable
from difflib import get_close_matches


def meant(word: object, known: Iterable[str]) -> str:
    """The end of a sentence that names what ``word`` was perhaps meant to be; empty where nothing is near."""
    by = {name.lower(): name for name in known}
    near = get_close_matches(str(word).lower(), by, 1, 0.6)
    return f"; did you mean {by[near[0]]}?" if near else ""
