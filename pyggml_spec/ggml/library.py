"""Loads llama-cpp-python's libraries, and refuses any ggml but the one that the extension was compiled against.

The package ``llama_cpp`` itself is not imported: libllama is called as ggml is, through the extension, which saves 0.2 s of processor time at
every start.

Two copies of ggml in one process have two sets of global tables and crash far from the cause, so the import checks the map of the process.
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
from ..pin import LLAMA_CPP_PYTHON, installed_libraries, installed_version, pip_command
from . import probe

_REMEDY = f"run: {pip_command()}"
_LIBLLAMA = {"win32": ("llama.dll", "libllama.dll"), "darwin": ("libllama.so", "libllama.dylib")}.get(sys.platform, ("libllama.so",))


def check_distribution(installed: str | None) -> None:
    """Raises LibraryError unless ``installed`` is the pinned llama-cpp-python version."""
    if installed is None:
        raise LibraryError(f"llama-cpp-python is not installed, and pyggml_spec runs on its ggml; {_REMEDY}")
    if installed != LLAMA_CPP_PYTHON:
        raise LibraryError(
            f"llama-cpp-python {installed} is installed, but this pyggml_spec was made for {LLAMA_CPP_PYTHON}: "
            f"a ggml of another version has other structures; {_REMEDY}"
        )


def check_version(loaded: str, compiled: str) -> None:
    """Raises LibraryError unless the ggml in memory is the one whose headers the extension was compiled against."""
    if loaded != compiled:
        raise LibraryError(f"the loaded ggml is {loaded}, but pyggml_spec was compiled against {compiled}; {_REMEDY}")


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


def load_libllama(folder: Path) -> None:
    """Loads libllama, and ggml with it, from the file that the package ``llama_cpp`` loads: should somebody import that too, it finds this copy.

    A wheel holds the same library under three names, and the loader takes them for three: the extension would load another one of them.

    Raises:
        LibraryError: there is none, or it cannot be loaded.
    """
    found = next((path for name in _LIBLLAMA if (path := folder / name).is_file()), None)
    if found is None:
        raise LibraryError(f"{folder} holds no libllama; {_REMEDY}")
    if sys.platform == "win32":
        os.add_dll_directory(str(folder))  # where the libraries that it needs, and the extension needs, are looked for
    try:
        ctypes.CDLL(str(found))
    except OSError as error:
        raise LibraryError(f"the installed llama-cpp-python cannot be loaded: {error}; {_REMEDY}") from None


check_distribution(installed_version())
_libraries = Path(elsewhere) if (elsewhere := os.environ.get("LLAMA_CPP_LIB_PATH")) else installed_libraries()  # llama_cpp heeds it too
if _libraries is None:
    raise LibraryError(f"llama-cpp-python is installed without its libraries; {_REMEDY}")
FITNESS = probe.check(_libraries)  # before the first of its instructions runs here
load_libllama(_libraries)

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
else:  # to cffi, every pointer is of one class
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
lib.llama_backend_init()
lib.ask_extra_bufts()  # the first time, ggml writes to stderr if the kernel refuses AMX


LOST: list[Callable[[Collection[str]], str | None]] = []  # who knows why a device that was there is gone (rpc.py); empty without workers
_WORKER = re.compile(r"RPC\d+\[(\d+\.\d+\.\d+\.\d+:\d+)\]")  # how ggml calls a worker's backends


def why_absent(workers: Collection[str]) -> str | None:
    """What to say of the first of these workers (``Backend.workers``) that is lost; None while all are there."""
    return next((why for ask in LOST if (why := ask(workers)) is not None), None) if workers else None


def check_present(workers: Collection[str]) -> None:
    """Raises DeviceError where one of these is lost: what is read of it is zero, and what is asked of it fails for no other reason."""
    if (why := why_absent(workers)) is not None:
        raise DeviceError(why)


def check(status: int, err: CData) -> None:
    """Turns the (status, message) of a C call into an EngineError, or a DeviceError where a worker is lost."""
    if status != 0:
        refuse(err)


def refuse(err: CData) -> NoReturn:
    """The same of a call that gave nothing. Every message of a backend that fails names it."""
    message = text(err)
    check_present(_WORKER.findall(message))
    raise EngineError(message)


def read_tensor(tensor: Tensor, out: "np.ndarray", at: int, workers: Collection[str]) -> None:
    """Fills ``out`` from the bytes of ``tensor`` behind ``at``; raises DeviceError if one of ``workers``, where it may lie, is lost."""
    lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(out), at, out.nbytes)
    check_present(workers)


def new_err() -> CData:
    """The message buffer that C functions write into."""
    return ffi.new("char[]", lib.PGS_ERR)


@functools.cache
def _own_version() -> str:
    """Read once: metadata of a package take up to 8 ms, and every request of a server has its versions."""
    return importlib.metadata.version("pyggml_spec")


def versions() -> dict[str, str]:
    """Versions that a benchmark or a statistics file has to name."""
    return {
        "pyggml_spec": _own_version(),
        "llama_cpp_python": LLAMA_CPP_PYTHON,
        "ggml": GGML_VERSION,
        "ggml_commit": GGML_COMMIT,
        "python": sys.version.split()[0],
    }
