"""Prints ``include;lib;ggml version`` of the installed llama-cpp-python, or says what to install. Used by CMake."""

import importlib.metadata
import re
import sys
from pathlib import Path


def main(wanted: str) -> None:
    recipe = Path(__file__).resolve().parents[1] / "cmake" / "llama_cpp_python.cmake"
    remedy = f'run: CMAKE_ARGS="-DCMAKE_PROJECT_INCLUDE={recipe}" pip install --no-cache-dir "llama-cpp-python=={wanted}"'
    try:
        dist = importlib.metadata.distribution("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"llama-cpp-python {wanted} is not installed in the building environment; {remedy}")
    if dist.version != wanted:
        sys.exit(f"llama-cpp-python {dist.version} is installed, but this package is compiled against {wanted}; {remedy}")
    files = [Path(dist.locate_file(f)).resolve() for f in dist.files or []]
    header = next((f for f in files if f.name == "llama.h"), None)  # in the same folder as ggml's
    libs = [f for f in files if f.parent.parent.name == "llama_cpp" and f.name.startswith("libggml-base.")]
    if header is None or not libs:
        sys.exit(f"llama-cpp-python {wanted} is installed without its headers or its libraries; {remedy} --force-reinstall")
    version = next((m.group(1) for f in libs if (m := re.search(r"(\d+\.\d+\.\d+)", f.name))), "")
    print(header.parent, libs[0].parent, version, sep=";")


if __name__ == "__main__":
    main(sys.argv[1])
