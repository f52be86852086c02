"""The pinned version of llama-cpp-python, and its build recipe."""

import importlib.metadata
import importlib.util
import shlex
from pathlib import Path

LLAMA_CPP_PYTHON = "0.3.36"
_CMAKE = next((f for f in (Path(__file__).parent / "cmake", Path(__file__).parents[1] / "cmake") if f.is_dir()), Path("cmake"))
RECIPE = _CMAKE / "llama_cpp_python.cmake"
COMPILER_FIX = _CMAKE / "amx_tile_config.h"


def pip_command(*options: str) -> str:
    """The command that builds llama-cpp-python; without pip's cache, which may hold a wheel of another compiler or machine."""
    arguments = " ".join([shlex.quote(f"-DCMAKE_PROJECT_INCLUDE={RECIPE}"), *options])
    return f'CMAKE_ARGS="{arguments}" pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python=={LLAMA_CPP_PYTHON}'


BUNDLED = Path(__file__).parent / "libs"  # llama.cpp's libraries, in a wheel of this package


def installed_version() -> str | None:
    """Version of llama-cpp-python, or of the libraries inside this package; None without either."""
    if BUNDLED.is_dir():
        return LLAMA_CPP_PYTHON
    try:
        return importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_libraries() -> Path | None:
    """The library folder inside this package, else that of the pinned llama-cpp-python, found without loading it; None without one."""
    if BUNDLED.is_dir():
        return BUNDLED
    spec = importlib.util.find_spec("llama_cpp") if installed_version() == LLAMA_CPP_PYTHON else None
    folder = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else None
    return folder if folder is not None and folder.is_dir() else None
