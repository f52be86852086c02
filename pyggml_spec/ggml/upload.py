"""Weights on their way from files to a device in threads (csrc/upload.c), while the host goes on."""

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import GGUFError
from ..gguf_io import GGUFFile, TensorInfo
from .device import Backend, device_handle
from .library import Tensor, ffi, lib

THREADS = 8  # at most: together they read as fast as the bus takes
LEAST = 64 << 20  # bytes of files from which on threads and pinned memory are worth their start
POLL_MS = 100  # between two reports


class Uploads:
    """Owns the threads and the files that they read; ``close`` before the tensors are freed.

    Attributes:
        total: bytes that were queued.
        done: of those, how many are on the device, as of the last ``wait``.
    """

    def __init__(self, backend: Backend, threads: int | None = None) -> None:
        """``threads``: None for as many as this process has cores, up to THREADS."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._handle = lib.pgs_upload_new(device_handle(backend.device), min(THREADS, cores) if threads is None else threads) or None
        self._files: dict[Path, int | None] = {}  # descriptors
        self._parts: list[tuple[GGUFFile, TensorInfo]] = []
        self.total = self.done = 0

    @property
    def running(self) -> bool:
        """Whether there are threads, which may write."""
        return self._handle is not None

    @staticmethod
    def worth(backend: Backend, nbytes: int) -> bool:
        """Whether the files of so many bytes are read this way: a CPU packs weights, or has them where they are read."""
        return backend.device.kind in ("gpu", "igpu") and nbytes >= LEAST

    def add(self, file: GGUFFile, info: TensorInfo, tensor: Tensor, offset: int) -> bool:
        """Queues a tensor of the file for byte ``offset`` of ``tensor``; False if it has to be copied by other means."""
        if self._handle is None:
            return False
        part = file.part_of(info)
        if part.path not in self._files:
            self._files[part.path] = part.reopened()
        fd = self._files[part.path]
        if fd is None or not lib.pgs_upload_add(self._handle, fd, info.offset, tensor, offset, info.nbytes):
            return False
        self._parts.append((part, info))
        self.total += info.nbytes
        return True

    def wait(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Until all are on the device; ends the threads. ``report``: called with (done, total) bytes meanwhile.

        Raises:
            GGUFError: a file cannot be read to its end.
        """
        if self._handle is None:
            return
        state, ended = ffi.new("pgs_upload_state *"), False
        while not ended:
            ended, before = lib.pgs_upload_wait(self._handle, POLL_MS, state), self.done
            self.done = state.bytes
            if self.done != before:
                report(self.done, self.total)
        self.close()
        if state.failed >= 0:
            file, info = self._parts[state.failed]
            why = f"cannot be read: {os.strerror(state.error)}" if state.error else "was cut while it was read"
            raise GGUFError(
                f"{file.path} {why}, at the tensor {info.name!r} of {info.nbytes} bytes from byte {info.offset} on; fetch it again"
            )

    def close(self) -> None:
        """Ends the threads, whatever is left to read. Idempotent."""
        if self._handle is not None:
            lib.pgs_upload_free(self._handle)
            self._handle = None
        for fd in self._files.values():
            if fd is not None:
                os.close(fd)
        self._files = {}
