"""Cancellation of work in threads, which calls ``check`` regularly."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


class Cancelled(Exception):
    """The work was cancelled; its result is not needed."""


@contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """Within it ``check`` raises in this thread once ``event`` is set."""
    _thread.event = event
    try:
        yield
    finally:
        del _thread.event


def check() -> None:
    """Raises Cancelled if this thread's work was cancelled."""
    event: threading.Event | None = getattr(_thread, "event", None)
    if event is not None and event.is_set():
        raise Cancelled
