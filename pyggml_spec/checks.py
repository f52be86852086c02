"""Checks of arguments. ggml ends the process on a number that is out of range, or reads memory that is not there."""

import operator
import os
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .ggml import library as _library  # noqa: F401  (mapped before numpy; see tools/__init__.py)

# isort: split
import numpy as np

from .errors import ContextError, EngineError, PyspecError


def whole(value: Any, what: str, low: int, high: int, error: type[PyspecError] = EngineError) -> int:
    """``value`` as int, if it is a whole number from ``low`` to ``high``: Python's or NumPy's, but no bool. Raises ``error``."""
    if type(value) is int and low <= value <= high:  # several per step: 0.1 us instead of 0.6
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise error(f"{what} is {reprlib.repr(value)}, but it has to be a whole number from {low} to {high}")
    return number


def path(value: Any, what: str) -> Path:
    """``value`` as a path, if it is one: a string, or what has one; an empty one would be the current folder. Raises PyspecError."""
    found = os.fspath(value) if hasattr(value, "__fspath__") else value
    if not isinstance(found, str) or not found:
        raise PyspecError(f"{what} is {reprlib.repr(value)}, but it has to be a path")
    return Path(found)


def numbers(values: Any, what: str) -> list[float]:
    """``values``, if they are numbers in a row. Raises PyspecError."""
    try:
        if not isinstance(values, (str, bytes)):
            return [float(value) for value in values]
    except (TypeError, ValueError):
        pass
    raise PyspecError(f"{what} are {reprlib.repr(values)}, but they have to be numbers in a row")


def either(value: Any, kind: type, what: str) -> None:
    """Raises PyspecError unless ``value`` is None or a ``kind``."""
    if value is not None and not isinstance(value, kind):
        raise PyspecError(f"{what} is {reprlib.repr(value)}, but it has to be {kind.__name__} or None")


def token_ids(tokens: Iterable[int], n_vocab: int, what: str = "the prompt") -> np.ndarray:
    """``tokens`` as I64 [T], if they are a sequence of at least one id of the vocabulary: ggml does not check row numbers everywhere.
    Raises ContextError: anything else."""
    if isinstance(tokens, (str, bytes, set, dict)):
        raise ContextError(f"{what} is {reprlib.repr(tokens)}; give token ids as a list of whole numbers")
    try:
        ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    except (TypeError, ValueError):
        raise ContextError(f"{what} is {reprlib.repr(tokens)}; give token ids as a list of whole numbers") from None
    if ids.ndim == 1 and ids.size == 0:
        raise ContextError(f"{what} is empty; give at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iuO":
        raise ContextError(f"{what} holds {ids.dtype} in {ids.ndim} dimensions, but token ids have to be whole numbers in a row")
    if ids.dtype.kind == "O":  # Python's numbers beyond 64 bits, or no numbers at all
        ids = np.array([whole(i, "a token id", 0, n_vocab - 1, ContextError) for i in ids], np.int64)
    bad = ids[(ids < 0) | (ids >= n_vocab)]
    if bad.size:
        raise ContextError(f"token id {bad[0]} is outside the vocabulary of {n_vocab}")
    return ids.astype(np.int64)
