"""Work of threads, and its cancellation: what takes long calls ``check`` regularly."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

_thread = threading.local()


class Cancelled(Exception):
    """The work was cancelled; its result is not needed."""


def check() -> None:
    """Raises Cancelled if this thread's work was cancelled."""
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Cancelled


@contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """Within it ``check`` raises in this thread once ``event`` is set."""
    _thread.stop = event
    try:
        yield
    finally:
        del _thread.stop


class Work(Future[Any]):
    """A call that a thread runs. Where it runs already, ``cancel`` ends it at its next ``check``.

    Attributes:
        began: time.monotonic() of its beginning, 0 before; ``seconds``: its run time, once it is done.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call, self._stop = call, threading.Event()
        self.began = self.seconds = 0.0

    def cancel(self) -> bool:
        self._stop.set()
        return super().cancel()

    def run(self) -> None:
        self.began = time.monotonic()
        if not self.set_running_or_notify_cancel():
            return
        try:
            with cancelled_by(self._stop):
                result = self._call()
        except BaseException as error:
            self._end()
            self.set_exception(error)
        else:
            self._end()
            self.set_result(result)

    def _end(self) -> None:
        del self._call  # the call may refer to this work
        self.seconds = time.monotonic() - self.began
