"""ggml's RPC backend as a library of its own, which llama-cpp-python lacks; built once from two source files and cached.

It links to the installed libggml-base only and uses no special instructions, so one build fits all variants. Standard library only.
"""

import os
import re
import sysconfig
import tempfile
from pathlib import Path

from . import building, patching
from .errors import BuildError
from .files import make_private
from .folders import build_folder, trusted
from .pin import LLAMA_CPP_PYTHON, installed_libraries, pip_command

FOLDER = "ggml/src/ggml-rpc"
SOURCES = ("ggml-rpc.cpp", "transport.cpp")
OPTIONS = (
    "-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-DGGML_BUILD", "-DGGML_SHARED", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED",
)  # fmt: skip
BUILD_IT = "run `pyspec build --rpc`, which takes seconds"


def rpc_patches() -> list[patching.Patch]:
    """Patches of the series that change only the RPC backend and its header."""
    return [patch for patch in patching.series() if any(name.startswith(f"{FOLDER}/") for name in patch.files)]


def place() -> Path:
    """Path of the library, named by a hash of everything that determines it."""
    patches = [patch.path.read_bytes() for patch in rpc_patches()]
    key = building.hash_of(LLAMA_CPP_PYTHON, sysconfig.get_platform(), repr(OPTIONS), *patches)
    return build_folder() / f"rpc-{key}" / "libggml-rpc.so"


def kept() -> Path | None:
    """The library, if it was built."""
    path = place()
    if path.is_file():
        trusted(path.parent.parent, path.parent, path)
        return path
    return None


def build(fresh: bool = False) -> Path:
    """The library; built unless cached. Raises BuildError: llama-cpp-python or a compiler is missing, or the compiler failed; ``log`` has
    its last lines; PatchError: the source is unavailable."""
    path = place()
    if not fresh and (cached := kept()) is not None:
        return cached
    libraries = installed_libraries()
    found = libraries.glob("libggml-base.*") if libraries is not None else ()
    if (base := next((lib for lib in found if lib.suffix in (".so", ".dylib")), None)) is None:
        raise BuildError(f"llama-cpp-python {LLAMA_CPP_PYTHON} is not installed in this environment; run: {pip_command()}")
    building.find_compilers()
    for made in (build_folder(), path.parent):
        make_private(made)
    with tempfile.TemporaryDirectory(prefix="building-", dir=path.parent) as folder:
        tree = patching.unpack(patching.fetch_sdist(build_folder()), Path(folder), only=_needed)
        patching.apply(tree, rpc_patches())
        built = Path(folder) / path.name
        command = [*(os.environ.get("CXX") or "c++").split(), *OPTIONS, *os.environ.get("CXXFLAGS", "").split()]
        command += [f"-I{tree / 'ggml' / sub}" for sub in ("include", "src")] + [str(tree / FOLDER / name) for name in SOURCES]
        command += ["-o", str(built), str(base), *os.environ.get("LDFLAGS", "").split()]
        building.run(command, "ggml's RPC backend could not be built")
        code = "import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); ctypes.CDLL(sys.argv[2]).ggml_backend_rpc_reg()"
        building.check_loads(code, base, built, failure="ggml's RPC backend was built, but cannot be loaded: {}")
        built.chmod(0o755)
        os.replace(built, path)
    return path


def _needed(name: str) -> bool:
    """Source files that the build reads, and two that identify the tree."""
    headers = re.fullmatch(r"ggml/(include|src)/[^/]+\.h", name)
    return bool(headers) or name.startswith(f"{FOLDER}/") or name in ("ggml/CMakeLists.txt", "src/llama-context.cpp")
