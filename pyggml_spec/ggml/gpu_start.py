"""Starts the GPU that a command line names while Python imports what the command needs: its context takes as long as that."""

import ctypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from ..background import Background

DEVICE, LAYERS = ("--device", "-dev"), ("-ngl", "--gpu-layers", "--n-gpu-layers")
LOADS_NOTHING = ("-h", "--help", "--models-", "--sleep-idle-seconds", "--print-config")  # or another process does


def begin(args: Sequence[str], libraries: Path | None) -> None:
    """Begins to start the device that a command with these arguments will use, if ggml's library in this folder is one for it."""
    index = wanted(args)
    if index is not None and libraries is not None and any(libraries.glob("*ggml-cuda.*")) and "GGML_CUDA_DEVICES" not in os.environ:
        Background(lambda: _start(index)).start()


def wanted(args: Sequence[str]) -> int | None:
    """Number of the one NVIDIA GPU that they name, or leave to the default; None where they name another device, or several."""
    given = [*pairwise(args), *((name, value) for name, equals, value in (arg.partition("=") for arg in args) if equals)]
    if any(arg.startswith(LOADS_NOTHING) for arg in args) or any(name in LAYERS and value == "0" for name, value in given):
        return None
    named = next((value for name, value in reversed(given) if name in DEVICE), "CUDA0")
    match = re.fullmatch(r"CUDA(\d{1,3})", named, re.IGNORECASE)
    return int(match[1]) if match is not None else None


def _start(index: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError, AttributeError):  # no driver
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # which ggml-cuda's calls find
