"""Calls that recurse deeply in C or Rust, in a thread with a large stack; the main one's is 8 MB or less."""

import threading
from collections.abc import Callable
from typing import TypeVar

from .background import Background

T = TypeVar("T")
_starting = threading.Lock()  # the stack size of new threads is global


def on_large_stack(size: int, call: Callable[[], T]) -> T:
    """The result (or exception) of ``call`` in a thread with ``size`` bytes of stack. Raises RuntimeError: no memory for such a thread."""
    worker = Background(call)
    try:
        with _starting:
            before = threading.stack_size(size // 4096 * 4096)
            try:
                worker.start()
            finally:
                threading.stack_size(before)
        return worker.result()
    finally:  # Ctrl-C: memory in use must not be freed
        worker.end()
