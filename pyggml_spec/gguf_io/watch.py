"""Says which file was cut while it was mapped, where the process would end with "Bus error" (csrc/map_watch.c)."""

from mmap import mmap
from pathlib import Path

from ..ggml.library import ffi, lib


class Watch:
    """Of the map ``data`` of a whole file, until ``close``. Closing twice is fine."""

    def __init__(self, data: mmap, path: Path) -> None:
        said = f"pyspec: {path} was cut while it was in use; load it again, and put a new file in the place of another by renaming it\n"
        with memoryview(data) as view, ffi.from_buffer(view) as start:
            self._number = lib.pgs_watch_map(start, len(view), said.encode("utf-8", "replace"))

    def close(self) -> None:
        lib.pgs_unwatch_map(self._number)
        self._number = -1
