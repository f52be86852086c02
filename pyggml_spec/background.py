"""A call in a thread of its own, for C code that lets other threads of Python run."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Begins at once. ``result`` waits for what the call returns or raises; ``close`` waits, and closes what it returned."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pyggml_spec background")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # raised by result
            self._error = error

    def result(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def close(self) -> None:
        with suppress(Exception):
            self.result().close()  # type: ignore[attr-defined]
