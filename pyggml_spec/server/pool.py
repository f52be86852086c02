"""Threads that render, encode and compile: round robin over clients, and short work does not wait for long work.

There are two lanes, each with as many threads as its limit. Work of the short lane that overruns ``OVERRUN_SECONDS`` no longer counts in it, so that
the next one begins; one client has at most ``SHORT_SHARE`` and ``LONG_SHARE`` threads of a lane.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from ..cancel import Work

SHORT, LONG = 2, 2  # threads of each lane
MAX_THREADS = 10
SHORT_SHARE, LONG_SHARE = 4, 1  # threads of one client, those that overrun included
OVERRUN_SECONDS = 0.05


class PoolWork(Work):
    """``cancel`` removes it from its lane, too."""

    def __init__(self, call: Callable[[], Any], client: str, long: bool) -> None:
        super().__init__(call)
        self.client, self.long = client, long


class Pool(Executor):
    """Threads are started when they are needed, and are daemons: the process can exit at any time."""

    def __init__(self) -> None:
        self._waiting: tuple[OrderedDict[str, deque[PoolWork]], ...] = (OrderedDict(), OrderedDict())
        self._running: set[PoolWork] = set()
        self._lock, self._threads, self._free, self._closed = threading.Lock(), 0, 0, False
        self._more, self._done = threading.Condition(self._lock), threading.Condition(self._lock)  # of work

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.start(lambda: function(*args, **kwargs))

    def start(self, call: Callable[[], Any], client: str = "", long: bool = False) -> PoolWork:
        """Raises RuntimeError: it is shut down."""
        work = PoolWork(call, client, long)
        with self._lock:
            if self._closed:
                raise RuntimeError("this pool is shut down; make another one")
            self._waiting[long].setdefault(client, deque()).append(work)
            self._keep_one_free()
            self._more.notify()
        return work

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True
            if cancel_futures:
                for work in (*self._running, *(w for lane in self._waiting for works in lane.values() for w in works)):
                    work.cancel()
            self._more.notify_all()
        if wait:
            self.idle(None)

    def idle(self, seconds: float | None) -> bool:
        """Waits until nothing runs, ``seconds`` at most; whether nothing does."""
        with self._lock:
            return self._done.wait_for(lambda: not self._running and not any(self._waiting), seconds)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._free += 1
                while (work := self._next()) is None:
                    if self._closed and not any(self._waiting):
                        self._threads -= 1
                        self._free -= 1
                        return
                    self._more.wait(OVERRUN_SECONDS if any(self._waiting) else None)
                self._free -= 1
                if any(self._waiting):
                    self._keep_one_free()
            work.run()
            with self._lock:
                self._running.discard(work)
                self._done.notify_all()
            del work

    def _keep_one_free(self) -> None:
        """A free thread notices that others overrun."""
        if not self._free and self._threads < MAX_THREADS:
            self._threads += 1
            threading.Thread(target=self._work, name="pyspec prepares", daemon=True).start()

    def _next(self) -> PoolWork | None:
        """The next work, round robin over clients."""
        now = time.monotonic()
        for long, limit in ((False, SHORT), (True, LONG)):
            counted = sum(w.long == long and (long or now - w.began < OVERRUN_SECONDS) for w in self._running)
            if counted >= limit:
                continue
            lane = self._waiting[long]
            for client, works in lane.items():
                if client and sum((w.client, w.long) == (client, long) for w in self._running) >= (LONG_SHARE if long else SHORT_SHARE):
                    continue
                work = works.popleft()
                del lane[client]
                if works:
                    lane[client] = works  # at the end of the order
                work.began = now
                self._running.add(work)
                return work
        return None
