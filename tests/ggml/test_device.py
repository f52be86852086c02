"""What is known about the processor."""

import os
import sys
import time
from pathlib import Path

import pytest

from pyggml_spec.ggml.device import waited_for_core


@pytest.mark.skipif(sys.platform != "linux" or not Path("/proc/thread-self/schedstat").exists(), reason="this system does not say")
def test_waiting_for_a_core_is_seen():
    """Two processes on one core: the one that asks has to wait for the other."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    child = os.fork()
    if not child:
        while True:
            pass
    try:
        before, until = waited_for_core(), time.monotonic() + 20
        while waited_for_core() - before < 0.01 and time.monotonic() < until:
            sum(range(10000))
        assert waited_for_core() - before >= 0.01
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, mine)


def test_a_system_that_does_not_say(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError))
    assert waited_for_core() is None
