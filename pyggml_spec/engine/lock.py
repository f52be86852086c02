"""One user at a time of a session's engine: a generation, a measurement, or the requests of ``concurrent``.

A second user gets an error at once, except where the first has ended, or is a paused generation of the same thread (or of one that has ended): that is closed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import EngineError
from ..ggml.device import release_threads

BUSY = (
    "this session is generating already, in another thread or in a call that this one was made from; read that generation to its end or close "
    "it, and for several at a time use concurrent()"
)
ENDED = "this generation was ended by the next one of its session; for several at a time use concurrent()"


class Hold:
    """One user's hold of the lock.

    Attributes:
        close: called when the next user replaces this one.
        why: error text for others meanwhile.
        ended: whether the user has ended without releasing.
        running: whether its thread is inside the engine.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        self.close: Callable[[], object] = lambda: None
        self.ended: Callable[[], bool] = lambda: False
        self.running, self.thread = True, threading.current_thread()

    @property
    def replaceable(self) -> bool:
        return self.ended() or (not self.running and (self.thread is threading.current_thread() or not self.thread.is_alive()))


class EngineLock:
    """The lock of one engine."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a generator that is collected inside of it releases its hold; never held during a step
        self._hold: Hold | None = None
        self._shut: Hold | None = None

    def acquire(self, why: str = BUSY) -> Hold:
        """A hold for the caller.

        Raises:
            EngineError: there is another user.
        """
        with self._lock:
            if self._hold is not None:
                if not self._hold.replaceable:
                    raise EngineError(self._hold.why)
                self.release(self._hold)
            self._hold = Hold(why)
            return self._hold

    @contextmanager
    def held(self) -> Iterator[None]:
        """A hold for a ``with`` block."""
        hold = self.acquire()
        try:
            yield
        finally:
            self.release(hold)

    def holds(self, hold: Hold) -> bool:
        """Whether ``hold`` was not replaced."""
        return self._hold is hold

    def pause(self, hold: Hold) -> None:
        """The user's thread leaves the engine, and may come back."""
        hold.running = False

    def resume(self, hold: Hold) -> bool:
        """The user goes on, in this thread; False if it was replaced."""
        with self._lock:
            if self._hold is not hold:
                return False
            hold.running, hold.thread = True, threading.current_thread()
            return True

    def release(self, hold: Hold) -> None:
        """Closes what the user holds, unless that was done. Twice is fine."""
        with self._lock:
            if self._hold is hold:
                hold.close()
                self._hold = None
        release_threads()  # the next user may be another thread

    def shut(self, why: str) -> None:
        """Ends a paused user of any thread; ``acquire`` raises ``why`` from now on. Twice is fine.

        Raises:
            EngineError: a user is running.
        """
        with self._lock:
            if self._hold is not None and self._hold is not self._shut:
                if self._hold.running and not self._hold.ended():
                    raise EngineError(self._hold.why)
                self.release(self._hold)
            self._hold = self._shut = Hold(why)
