"""Masks of constraints that take long are computed by threads of their own: the thread that runs the steps waits for none of them."""

import os
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

from llguidance import LLExecutor, LLMatcher

THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))  # more would take cores from the steps


class MaskJob:
    """Work that one of the threads does."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._began, self._ended = 0.0, threading.Event()
        self.seconds = 0.0  # that it took
        _queue().put(self)

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def running_s(self) -> float:
        """Seconds since a thread began with it; 0 while it waits for one, and when it is done."""
        return time.monotonic() - self._began if self._began and not self.done else 0.0

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is done within that time."""
        return self._ended.wait(seconds)

    def finish(self) -> None:
        """Waits for the end, and raises what the work has raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """In one of the threads."""
        self._began = time.monotonic()
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        self._work = None  # the constraint, which refers to this job
        self.seconds = time.monotonic() - self._began
        self._ended.set()


def consume(matcher: LLMatcher, token: int, other: LLMatcher) -> bool:
    """``matcher.consume_token(token)`` without Python's lock, which llguidance keeps for one matcher, and lets go of for two."""
    return bool(_executor().consume_token_par([(matcher, token), (other, token)])[0])


@cache
def _executor() -> LLExecutor:
    return LLExecutor(THREADS)


@cache
def _queue() -> "SimpleQueue[MaskJob]":
    jobs: SimpleQueue[MaskJob] = SimpleQueue()
    for _ in range(THREADS):
        threading.Thread(target=_work_off, args=(jobs,), name="pyggml_spec masks", daemon=True).start()
    return jobs


def _work_off(jobs: "SimpleQueue[MaskJob]") -> None:
    while True:
        job = jobs.get()
        job.run()
        del job  # not kept until the next one comes


def _forget_threads() -> None:
    _queue.cache_clear()
    _executor.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a child has none of the threads
