"""Names the file that was truncated while mapped, where the process would die of SIGBUS (csrc/map_watch.c)."""

import contextlib
import weakref
from mmap import mmap
from pathlib import Path

from ..ggml.library import ffi, lib


class Watch:
    """Watches the map ``data`` of a whole file until ``close``, or until it is garbage-collected."""

    def __init__(self, data: mmap, path: Path) -> None:
        message = f"pyspec: {path} was cut while it was in use; load it again, and put a new file in the place of another by renaming it\n"
        with memoryview(data) as view, ffi.from_buffer(view) as start:
            number = lib.pgs_watch_map(start, len(view), message.encode("utf-8", "replace"))
        self._data, self._end = weakref.ref(data), weakref.finalize(data, lib.pgs_unwatch_map, number)
        self._end.atexit = False  # ggml's threads may still read

    def close(self) -> None:
        """Closes the map, unless views of it exist. Idempotent."""
        with contextlib.suppress(BufferError):
            if (data := self._data()) is not None:
                data.close()
            self._end()
