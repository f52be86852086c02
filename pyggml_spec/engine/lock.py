"""One piece of work at a time has a session's engine: a generation, a measurement, or the requests of ``concurrent``.

Whoever comes second gets a sentence, at once. Two cases are no conflict: the work before is over, or it is a generation that waits to be read
on by this very thread (or by one that has ended), which the next one then ends.
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


class Turn:
    """A stretch of work. ``why``: the sentence for those who come meanwhile."""

    def __init__(self, close: Callable[[], object], why: str) -> None:
        self.close, self.why = close, why
        self.over: Callable[[], bool] = lambda: False  # whether it has ended without a word
        self.running, self.thread = True, threading.current_thread()

    @property
    def free(self) -> bool:
        """Whether another one may take its place."""
        return self.over() or (not self.running and (self.thread is threading.current_thread() or not self.thread.is_alive()))


class Turns:
    """Hands out the turns of one engine."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # never held while a step runs; a generator may be collected, and end its turn, inside of it
        self._holder: Turn | None = None
        self._shut: Turn | None = None

    def take(self, why: str = BUSY) -> Turn:
        """A turn for the caller, who sets its ``close`` if something is to be closed when the next one takes its place.

        Raises:
            EngineError: somebody else has it.
        """
        with self._lock:
            if self._holder is not None:
                if not self._holder.free:
                    raise EngineError(self._holder.why)
                self.end(self._holder)
            self._holder = Turn(lambda: None, why)
            return self._holder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A turn for a ``with`` block."""
        turn = self.take()
        try:
            yield
        finally:
            self.end(turn)

    def holds(self, turn: Turn) -> bool:
        """Whether nobody has taken its place."""
        return self._holder is turn

    def pause(self, turn: Turn) -> None:
        """Its thread goes elsewhere, and may come back."""
        turn.running = False

    def resume(self, turn: Turn) -> bool:
        """Its thread, or another one, goes on; False if the turn was taken away meanwhile."""
        with self._lock:
            if self._holder is not turn:
                return False
            turn.running, turn.thread = True, threading.current_thread()
            return True

    def end(self, turn: Turn) -> None:
        """Closes what it holds, unless that was done. Twice is fine."""
        with self._lock:
            if self._holder is turn:
                turn.close()
                self._holder = None
        release_threads()  # the next turn may be another thread's

    def shut(self, why: str) -> None:
        """Ends whoever waits to go on, in whatever thread; nobody gets a turn any more. Twice is fine.

        Raises:
            EngineError: somebody is at work.
        """
        with self._lock:
            if self._holder is not None and self._holder is not self._shut:
                if self._holder.running and not self._holder.over():
                    raise EngineError(self._holder.why)
                self.end(self._holder)
            self._holder = self._shut = Turn(lambda: None, why)
