"""Threads that read requests: no client has all of them, short work never waits for long work, and what has no reader any more ends."""

import threading
import time

import pytest

from pyggml_spec.cancel import Cancelled, cancelled_by, check
from pyggml_spec.server import pool
from pyggml_spec.server.pool import Pool


@pytest.fixture
def work():
    """A pool, and calls that go on until they are let go."""
    made, let_go = Pool(), threading.Event()
    yield made, lambda: let_go.wait(20)
    let_go.set()
    made.shutdown()


def test_short_work_does_not_wait_for_long_work(work):
    threads, hold = work
    held = [threads.start(hold, f"client {i}", long=True) for i in range(20)]
    assert threads.start(lambda: "done", "another").future.result(5) == "done"
    assert sum(w.future.running() for w in held) == pool.LONG


def test_short_work_that_takes_long_holds_up_nothing(work):
    """A short request may compile a grammar for seconds."""
    threads, hold = work
    for _ in range(20):
        threads.start(hold, "one")
    assert threads.start(lambda: "done", "another").future.result(5) == "done"
    assert threads.submit(lambda: "done").result(5) == "done"


@pytest.mark.parametrize("long, most", [(False, pool.SHORT_SHARE), (True, pool.LONG_SHARE)])
def test_one_client_has_its_share_of_the_threads(work, long, most):
    threads, hold = work
    begun = []
    for i in range(20):
        threads.start(lambda i=i: (begun.append(i), hold()), "one", long)
    time.sleep(4 * most * pool.OVERRUN_SECONDS)
    assert len(begun) == most
    assert threads.start(lambda: "done", "another", long).future.result(5) == "done"


def test_clients_take_turns():
    threads, order, first = Pool(), [], threading.Event()
    try:
        for i in range(pool.LONG):
            threads.start(lambda: first.wait(20), f"before {i}", long=True)
        for name in ["a"] * 5 + ["b"]:
            threads.start(lambda name=name: order.append(name), name, long=True)
        first.set()
        assert threads.idle(10) and order.index("b") < 3, order
    finally:
        threads.shutdown()


def test_what_is_cancelled_ends_and_what_waits_is_never_begun(work):
    threads, _ = work
    began, ended = threading.Event(), []

    def go_on():
        began.set()
        try:
            while True:
                check()
                time.sleep(0.001)
        except Cancelled:
            ended.append(True)
            raise

    runs = threads.start(go_on, "one", long=True)
    waits = threads.start(lambda: ended.append("never"), "one", long=True)
    assert began.wait(5)
    waits.cancel()
    runs.cancel()
    assert isinstance(runs.future.exception(5), Cancelled) and waits.future.cancelled()
    threads.shutdown()
    assert ended == [True]


def test_the_end_waits_for_nothing_that_can_be_cancelled():
    threads, began = Pool(), threading.Event()

    def never():
        began.set()
        time.sleep(1)  # nothing interrupts it

    threads.start(never)
    assert began.wait(5)
    waits = [threads.start(never, "one", long=True) for _ in range(50)]
    threads.shutdown(wait=False, cancel_futures=True)
    assert not threads.idle(0.05) and threads.idle(10)
    assert sum(w.future.cancelled() for w in waits) >= 49
    with pytest.raises(RuntimeError, match="shut down"):
        threads.start(never)


def test_only_the_thread_that_is_told_is_cancelled():
    event = threading.Event()
    event.set()
    check()
    with cancelled_by(event), pytest.raises(Cancelled):
        check()
    check()
