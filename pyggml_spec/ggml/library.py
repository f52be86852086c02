"""Loads llama-cpp-python's libraries and refuses any ggml but the one that the extension was compiled against.

The package ``llama_cpp`` is not imported: the extension calls libllama directly, which saves 0.2 s per start. Two copies of ggml in one process
have two sets of global tables and crash, so the import checks the memory map.
"""

import ctypes
import functools
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..errors import DeviceError, EngineError, LibraryError
from ..pin import LLAMA_CPP_PYTHON, installed_version, pip_command
from . import probe

REMEDY = f"run: {pip_command()}"
SYSTEM = {  # libraries that no wheel holds, and where they are
    "libgomp.": "libgomp (Debian and Ubuntu: libgomp1)", "libstdc++.": "libstdc++ (Debian and Ubuntu: libstdc++6)", "libcuda.": "NVIDIA's driver",
    "libcu": "CUDA's runtime of the version that is named",
}  # fmt: skip
_LIBLLAMA = {"win32": ("llama.dll", "libllama.dll"), "darwin": ("libllama.so", "libllama.dylib")}.get(
    sys.platform,
    ("libllama.so", "libllama.so.0"),  # a wheel of this package has the second only
)


def check_distribution(installed: str | None) -> None:
    """Raises LibraryError unless ``installed`` is the pinned llama-cpp-python version."""
    if installed is None:
        raise LibraryError(f"llama-cpp-python is not installed, and pyggml_spec runs on its ggml; {REMEDY}")
    if installed != LLAMA_CPP_PYTHON:
        raise LibraryError(
            f"llama-cpp-python {installed} is installed, but this pyggml_spec was made for {LLAMA_CPP_PYTHON}: "
            f"a ggml of another version has other structures; {REMEDY}"
        )


def check_version(loaded: str, compiled: str) -> None:
    """Raises LibraryError unless the ggml in memory is the one whose headers the extension was compiled against."""
    if loaded != compiled:
        raise LibraryError(f"the loaded ggml is {loaded}, but pyggml_spec was compiled against {compiled}; {REMEDY}")


def mapped_ggml(maps: str) -> set[str]:
    """Paths of the libggml-base files in the text of a /proc/self/maps."""
    return {path for line in maps.splitlines() if "libggml-base" in (path := line.split(maxsplit=5)[-1])}


def check_single(paths: set[str]) -> None:
    """Raises LibraryError when more than one libggml-base is mapped."""
    if len(paths) > 1:
        raise LibraryError(
            f"{len(paths)} copies of ggml are loaded in this process ({', '.join(sorted(paths))}); "
            "import pyggml_spec before, or without, the package that brings the other one"
        )


def load_remedy(error: str) -> str:
    """What to do about the linker's ``error``."""
    name = re.match(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file", error)
    package = next((package for library, package in SYSTEM.items() if name is not None and name[1].startswith(library)), None)
    return REMEDY if package is None else f"install {package}"


def load_libllama(folder: Path) -> None:
    """Loads libllama (and ggml) from the file that ``llama_cpp`` would load, so that both share one copy.

    A wheel has the library under three names, which the loader takes for three libraries.

    Raises:
        LibraryError: it is missing or cannot be loaded.
    """
    found = next((path for name in _LIBLLAMA if (path := folder / name).is_file()), None)
    if found is None:
        raise LibraryError(f"{folder} holds no libllama; {REMEDY}")
    if sys.platform == "win32":
        os.add_dll_directory(str(folder))  # search path of its dependencies
    try:
        ctypes.CDLL(str(found))
    except OSError as error:
        raise LibraryError(f"the installed llama-cpp-python cannot be loaded: {error}; {load_remedy(str(error))}") from None


check_distribution(installed_version())
_found = probe.libraries()
if _found is None:
    raise LibraryError(f"llama-cpp-python is installed without its libraries; {REMEDY}")
LIBRARIES: Path = _found  # the folder
FITNESS = probe.settled(LIBRARIES)  # before any of its code runs here
load_libllama(LIBRARIES)

from .. import _native

ffi = _native.ffi
lib = _native.lib

if TYPE_CHECKING:
    import numpy as np

    from .._native import CData
    from .._native import ggml_backend_buffer as Buffer
    from .._native import ggml_backend_buffer_type as BufferType
    from .._native import ggml_backend_device as DeviceHandle
    from .._native import ggml_context as Context
    from .._native import ggml_tensor as Tensor
    from .._native import llama_sampler as LlamaSampler
    from .._native import llama_vocab as Vocab
    from .._native import pgs_level as LevelHandle
else:  # cffi has one class for all pointers
    Buffer = BufferType = CData = Context = DeviceHandle = LevelHandle = LlamaSampler = Tensor = Vocab = _native.ffi.CData


def text(c_string: CData) -> str:
    """A ``const char *`` as str."""
    return ffi.string(c_string).decode("utf-8", "replace")


GGML_VERSION = text(lib.ggml_version())
GGML_COMMIT = text(lib.ggml_commit())

check_version(GGML_VERSION, text(lib.compiled_ggml_version()))
if sys.platform == "linux":
    check_single(mapped_ggml(Path("/proc/self/maps").read_text()))

lib.quiet_log()
if not lib.ggml_backend_reg_count():  # a portable build: the best of its libraries for this processor, and of its GPUs
    lib.ggml_backend_load_all_from_path(os.fsencode(LIBRARIES))
lib.llama_backend_init()
lib.init_extra_bufts()  # on first use ggml writes to stderr if the kernel refuses AMX


def unloaded_gpu_library() -> str | None:
    """Why a library for GPUs that lies beside those for the CPU was not loaded, in one sentence; None if none lies there, or if it was."""
    path = LIBRARIES / "libggml-cuda.so"
    if not path.is_file():
        return None
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}; {load_remedy(str(error))}"
    return None


LOST_CHECKS: list[Callable[[Collection[str]], str | None]] = []  # reasons why workers are lost (rpc.py)
_WORKER = re.compile(r"RPC\d+\[(\d+\.\d+\.\d+\.\d+:\d+)\]")  # ggml's name of a worker's backend


def lost_reason(workers: Collection[str]) -> str | None:
    """The message about the first lost one of these workers (``Backend.workers``); None while all are connected."""
    return next((why for check in LOST_CHECKS if (why := check(workers)) is not None), None) if workers else None


def check_present(workers: Collection[str]) -> None:
    """Raises DeviceError if one of these workers is lost: reads from it give zeros."""
    if (why := lost_reason(workers)) is not None:
        raise DeviceError(why)


def check(status: int, err: CData) -> None:
    """Raises EngineError, or DeviceError if a worker is lost, unless ``status`` of a C call is 0."""
    if status != 0:
        raise_error(err)


def raise_error(err: CData) -> NoReturn:
    """Raises EngineError with the message of a failed C call, or DeviceError if a worker that it names is lost."""
    message = text(err)
    check_present(_WORKER.findall(message))
    raise EngineError(message)


def read_tensor(tensor: Tensor, out: "np.ndarray", at: int, workers: Collection[str]) -> None:
    """Fills ``out`` from the bytes of ``tensor`` from offset ``at`` on; raises DeviceError if one of its ``workers`` is lost."""
    lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(out), at, out.nbytes)
    check_present(workers)


def new_err() -> CData:
    """A message buffer for C functions."""
    return ffi.new("char[]", lib.PGS_ERR)


def new_context(tensors: int) -> Context:
    """A ggml context for the metadata of up to ``tensors`` tensors, without data."""
    params = ffi.new("struct ggml_init_params *", {"mem_size": (tensors + 1) * lib.ggml_tensor_overhead(), "no_alloc": True})
    return lib.ggml_init(params[0])


_own_version = functools.cache(importlib.metadata.version)  # reading package metadata takes up to 8 ms


def versions() -> dict[str, str]:
    """Versions for benchmark and statistics files."""
    return {
        "pyggml_spec": _own_version("pyggml_spec"),
        "llama_cpp_python": LLAMA_CPP_PYTHON,
        "ggml": GGML_VERSION,
        "ggml_commit": GGML_COMMIT,
        "python": sys.version.split()[0],
    }
