"""Worker threads for slow masks, so that the step loop never waits for one."""

import os
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

from llguidance import LLExecutor, LLMatcher

THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))  # leaves cores to the steps


class MaskJob:
    """Work of one thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._began, self._ended = 0.0, threading.Event()
        self.seconds = 0.0  # run time
        _queue().put(self)

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def running_s(self) -> float:
        """Seconds since a thread started it; 0 while queued and when done."""
        return time.monotonic() - self._began if self._began and not self.done else 0.0

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is done within ``seconds``."""
        return self._ended.wait(seconds)

    def finish(self) -> None:
        """Waits, and raises what the work raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Runs in a worker thread."""
        self._began = time.monotonic()
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:  # raised by finish()
            self._error = error
        self._work = None  # frees the constraint, which refers to this job
        self.seconds = time.monotonic() - self._began
        self._ended.set()


def consume(matcher: LLMatcher, token: int, other: LLMatcher) -> bool:
    """``matcher.consume_token(token)`` without the GIL, which llguidance releases for two matchers but not for one."""
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
        del job  # freed before the next one


def _forget_threads() -> None:
    _queue.cache_clear()
    _executor.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a forked child has no threads
