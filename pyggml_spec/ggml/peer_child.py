"""Run by `peer`: ``python peer_child.py LIBCUDA A B LIMIT`` tests direct copies between two GPUs and prints the result.

Uses the standard library only. Broken peer access corrupts data or hangs, so the process ends after LIMIT seconds even if its parent was killed.
"""

import ctypes
import os
import signal
import sys

SIZES = (4096, (1 << 20) + 20, 16 << 20)  # bytes of the copies
ROUNDS = 2
ALREADY = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
WORKS, NONE, WRONG = "works", "none", "wrong"


class Cuda:
    """The CUDA driver API."""

    def __init__(self, library: str) -> None:
        self._lib = ctypes.CDLL(library)
        self.call("cuInit", 0)

    def call(self, name: str, *args: object, also: int = 0) -> None:
        """Raises OSError for any status but 0 and ``also``."""
        status = getattr(self._lib, name)(*args)
        if status not in (0, also):
            raise OSError(f"{name} gave {status}")

    def number(self, name: str, *args: object) -> int:
        """The int that a function writes to its first argument."""
        out = ctypes.c_int()
        self.call(name, ctypes.byref(out), *args)
        return out.value

    def device(self, ordinal: int) -> int:
        return self.number("cuDeviceGet", ordinal)

    def uuid(self, device: int) -> str:
        out = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid_v2", out, device)
        return out.raw.hex()

    def context(self, device: int) -> ctypes.c_void_p:
        """The primary context, which the runtime and ggml use."""
        out = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(out), device)
        return out

    def inside(self, context: ctypes.c_void_p, name: str, *args: object, also: int = 0) -> None:
        """``call`` with ``context`` as the current one."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            self.call(name, *args, also=also)
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def can(self, a: int, b: int) -> bool:
        """Whether the driver offers peer access in both directions."""
        return bool(self.number("cuDeviceCanAccessPeer", a, b)) and bool(self.number("cuDeviceCanAccessPeer", b, a))

    def enable(self, a: int, b: int) -> None:
        """Enables peer access in both directions, for present and future allocations."""
        there, back = self.context(a), self.context(b)
        self.inside(there, "cuCtxEnablePeerAccess", back, 0, also=ALREADY)
        self.inside(back, "cuCtxEnablePeerAccess", there, 0, also=ALREADY)


def found(cuda: Cuda, a: int, b: int) -> str:
    """WORKS, NONE where the driver offers no peer access, or WRONG."""
    if not cuda.can(a, b):
        return NONE
    cuda.enable(a, b)
    contexts = [cuda.context(device) for device in (a, b)]
    memory = [ctypes.c_uint64() for _ in contexts]
    for context, pointer in zip(contexts, memory, strict=True):
        cuda.inside(context, "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(SIZES)))
    for size in SIZES * ROUNDS:
        for source, target in ((0, 1), (1, 0)):
            sent, got, count = ctypes.create_string_buffer(os.urandom(size), size), ctypes.create_string_buffer(size), ctypes.c_size_t(size)
            cuda.inside(contexts[source], "cuMemcpyHtoD_v2", memory[source], sent, count)
            cuda.inside(contexts[target], "cuMemsetD8_v2", memory[target], ctypes.c_ubyte(0), count)
            cuda.inside(contexts[target], "cuCtxSynchronize")
            cuda.inside(contexts[source], "cuMemcpyPeer", memory[target], contexts[target], memory[source], contexts[source], count)
            cuda.inside(contexts[source], "cuCtxSynchronize")
            cuda.inside(contexts[target], "cuMemcpyDtoH_v2", got, memory[target], count)
            if got.raw != sent.raw:
                return WRONG
    return WORKS


if __name__ == "__main__":
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[4]))
    driver = Cuda(sys.argv[1])
    print(found(driver, driver.device(int(sys.argv[2])), driver.device(int(sys.argv[3]))))
