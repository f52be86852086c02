"""The one llama-cpp-python that this package is made for, and how it is built."""

import importlib.metadata
import importlib.util
import shlex
from pathlib import Path

LLAMA_CPP_PYTHON = "0.3.36"
_CMAKE = next((f for f in (Path(__file__).parent / "cmake", Path(__file__).parents[1] / "cmake") if f.is_dir()), Path("cmake"))
RECIPE = _CMAKE / "llama_cpp_python.cmake"  # what is left out, and the compiler's fix
COMPILER_FIX = _CMAKE / "amx_tile_config.h"


def pip_command(*options: str) -> str:
    """The command that builds llama-cpp-python by hand. pip may have kept a wheel of another compiler or machine: it is told not to look."""
    arguments = " ".join([shlex.quote(f"-DCMAKE_PROJECT_INCLUDE={RECIPE}"), *options])
    return f'CMAKE_ARGS="{arguments}" pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python=={LLAMA_CPP_PYTHON}'


def installed_version() -> str | None:
    """Of llama-cpp-python; None where there is none."""
    try:
        return importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_libraries() -> Path | None:
    """The folder of llama-cpp-python's libraries, found without loading them; None where there is none of the pinned version."""
    spec = importlib.util.find_spec("llama_cpp") if installed_version() == LLAMA_CPP_PYTHON else None
    folder = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else None
    return folder if folder is not None and folder.is_dir() else None
