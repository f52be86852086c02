"""Work in threads that is cancelled: it asks ``check`` between its pieces."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


class Cancelled(Exception):
    """The work was cancelled: its result has no reader."""


@contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """In it ``check`` raises in this thread once ``event`` is set."""
    _thread.event = event
    try:
        yield
    finally:
        del _thread.event


def check() -> None:
    """Raises Cancelled: this thread's work was."""
    event: threading.Event | None = getattr(_thread, "event", None)
    if event is not None and event.is_set():
        raise Cancelled
