"""A file in a memory map. A process that reads a map whose file was truncated dies of SIGBUS: the file is named then (csrc/map_watch.c)."""

import contextlib
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import ClassVar, Self

from ..errors import PyspecError
from ..ggml.library import ffi, lib


class MappedFile:
    """An open file, mapped until ``close``, or until it is garbage-collected. ``kind``: what it should be; ``magic``: its first bytes."""

    kind: ClassVar[str]
    magic: ClassVar[bytes] = b""
    error: ClassVar[type[PyspecError]]
    path: Path
    _map: mmap.mmap
    _opened: os.stat_result
    _unwatch: weakref.finalize | None = None

    def _open_map(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # opening a pipe would block
                raise self.error(f"{self.path} is not a file; name a {self.kind} file")
            with open(self.path, "rb") as file:
                if file.read(len(self.magic)) != self.magic:
                    raise self.error(f"{self.path} is not a {self.kind} file (it does not start with {self.magic.decode()!r})")
                self._opened = os.fstat(file.fileno())
                self._map = data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise self.error(f"{self.path} does not exist; check the path") from None
        except (OSError, ValueError) as error:
            raise self.error(f"{self.path} cannot be read: {error}") from None
        message = (
            f"pyspec: {self.path} was cut while it was in use; load it again, and put a new file in the place of another by renaming it\n"
        )
        with memoryview(data) as view, ffi.from_buffer(view) as start:
            number = lib.pgs_watch_map(start, len(view), message.encode("utf-8", "replace"))
        self._unwatch = weakref.finalize(data, lib.pgs_unwatch_map, number)
        self._unwatch.atexit = False  # ggml's threads may still read
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        """Reads what is known of the file after it has been mapped."""
        raise NotImplementedError

    def reopened(self) -> int | None:
        """A descriptor of the same file, which the caller closes; None if another one has its name now."""
        try:
            fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            return None
        if os.path.samestat(os.fstat(fd), self._opened):
            return fd
        os.close(fd)
        return None

    def close(self) -> None:
        """Closes the map, unless views of it exist. Idempotent."""
        if self._unwatch is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
                self._unwatch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
