"""Calls in threads of their own: their errors come to whoever needs the result, and what they made is closed."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.background import Background, in_threads
from pyggml_spec.errors import ModelError
from pyggml_spec.large_stack import on_large_stack
from pyggml_spec.text.tokenizer import Tokenizer
from pyggml_spec.tools.plan import plan


def test_results_and_errors():
    closed = []
    made = Background(lambda: SimpleNamespace(close=lambda: closed.append(1))).start()
    assert made.result() is made.result()
    made.close()
    assert closed == [1]
    failed = Background(lambda: 1 / 0).start()
    with pytest.raises(ZeroDivisionError):
        failed.result()
    failed.close()  # there is nothing to close
    never = Background(lambda: closed.append(2))
    never.close()
    never.start()
    assert closed == [1]
    done = []
    in_threads(done.append, range(100), 3)
    assert sorted(done) == [*range(100)]
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda i: 1 // i, range(3), 2)


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C comes while a second thread starts, and again while it is waited for."""
    start, wait, count = threading.Thread.start, threading.Event.wait, itertools.count(1)

    def then_interrupt(self):
        start(self)
        if next(count) == 2:
            monkeypatch.setattr(threading.Event, "wait", interrupt_once)
            raise KeyboardInterrupt

    def interrupt_once(self, timeout=None):
        monkeypatch.setattr(threading.Event, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", then_interrupt)


def test_no_thread_writes_after_an_interrupt(interrupted):
    """The memory of weights is freed then: the process ended with a segmentation fault."""
    running, left = [], []

    def call(item):
        running.append(item)
        time.sleep(0.05)
        left.append(item)

    with pytest.raises(KeyboardInterrupt):
        in_threads(call, range(100), 4)
    assert 0 < len(left) == len(running) < 100


def test_deep_calls_end_before_an_interrupt_goes_on(interrupted):
    began, ended = [], []

    def call():
        began.append(1)
        time.sleep(0.05)
        ended.append(1)

    on_large_stack(1 << 20, call)
    with pytest.raises(KeyboardInterrupt):
        on_large_stack(1 << 20, call)
    assert began == ended


def test_a_vocabulary_that_libllama_refuses_is_told_after_all(pair, monkeypatch):
    """It is loaded while graphs are planned; `plan` tells what loading would."""

    def refuses(self, file):
        raise ModelError("llama.cpp cannot load the vocabulary")

    monkeypatch.setattr(Tokenizer, "__init__", refuses)
    for call in (ps.load, plan):
        fails_with(ModelError, "cannot load the vocabulary", call, *pair, device="CPU", threads=1, n_ctx=256)
