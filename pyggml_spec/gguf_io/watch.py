"""Says which file was cut while it was mapped, where the process would end with "Bus error" (csrc/map_watch.c)."""

import contextlib
import weakref
from mmap import mmap
from pathlib import Path

from ..ggml.library import ffi, lib


class Watch:
    """Of the map ``data`` of a whole file, for as long as that is mapped: until ``close``, or until nobody has it any more."""

    def __init__(self, data: mmap, path: Path) -> None:
        said = f"pyspec: {path} was cut while it was in use; load it again, and put a new file in the place of another by renaming it\n"
        with memoryview(data) as view, ffi.from_buffer(view) as start:
            number = lib.pgs_watch_map(start, len(view), said.encode("utf-8", "replace"))
        self._data, self._end = weakref.ref(data), weakref.finalize(data, lib.pgs_unwatch_map, number)
        self._end.atexit = False  # ggml's threads may be reading still

    def close(self) -> None:
        """Closes the map, unless views of it are still read. Closing twice is fine."""
        with contextlib.suppress(BufferError):
            if (data := self._data()) is not None:
                data.close()
            self._end()
