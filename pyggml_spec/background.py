"""Calls in threads of their own, for C code that lets other threads of Python run."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


class Background(Generic[T]):
    """A call. ``start`` begins it, ``result`` waits for what it returns or raises; ``end`` waits too, and ``close`` closes what it returned.

    Whoever frees what the call uses owns this before it starts: after Ctrl-C within ``start`` it may run, or may yet begin.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()

    def start(self) -> Self:
        threading.Thread(target=self._run, name="pyggml_spec background").start()
        return self

    def _run(self) -> None:
        with self._lock:
            call, self._call = self._call, None
        if call is None:  # it was ended before it began
            return
        try:
            self._result = call()
        except BaseException as error:  # raised by result
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> T:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def end(self) -> None:
        """The call is over afterwards, or never begins. Ctrl-C counts once it is."""
        with self._lock:
            begun, self._call = self._call is None, None
        interrupt = None
        while begun and not self._ended.is_set():
            try:
                self._ended.wait()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        try:
            self.end()
        finally:
            if self._result is not None:
                with suppress(Exception):
                    self._result.close()


def in_threads(call: Callable[[Item], object], items: Iterable[Item], threads: int) -> None:
    """Calls ``call`` with each of ``items``, in so many threads; in this one, if that is one. However this ends, no call goes on: after Ctrl-C its memory is freed."""
    todo = deque(items)

    def work() -> None:
        while True:
            try:
                item = todo.popleft()
            except IndexError:
                return
            call(item)

    if threads == 1 or len(todo) == 1:
        work()
        return
    workers = [Background(work) for _ in range(min(threads, len(todo)))]
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.end)
        stack.callback(todo.clear)  # first
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.result()
