"""Memory of the C library's allocator, which goes back to the system after peaks."""

import asyncio
import ctypes
import gc
import sys
from typing import Any

LARGE = 256 << 10  # bytes of a request, or of its response, after which memory is given back
TRIM_SECONDS = 0.5
_ARENAS, _M_ARENA_MAX = 2, -8  # each arena keeps what its threads have freed; threads come and go here


def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def prepare() -> None:
    """Few arenas, and a frozen heap: a full garbage collection takes 50 ms otherwise."""
    if hasattr(libc := _libc(), "mallopt"):
        libc.mallopt(_M_ARENA_MAX, _ARENAS)
    gc.collect()
    gc.freeze()


class Heap:
    """Gives memory back, at most once in ``TRIM_SECONDS``, in a thread."""

    def __init__(self) -> None:
        self._trim = getattr(_libc(), "malloc_trim", None)
        self._timer: asyncio.TimerHandle | None = None

    def shrink(self) -> None:
        if self._trim is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._shrink)

    def _shrink(self) -> None:
        self._timer = None
        if self._trim is not None:
            asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
