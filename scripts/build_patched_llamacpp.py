#!/usr/bin/env python3
"""Builds llama.cpp with the patch set.

    build_patched_llamacpp.py --out DIR [--tree LLAMA_CPP | --sdist FILE] [--cuda [--cuda-arch 90] [--sanitizers]] [--unpatched] [--jobs N] [TARGET ...]
    build_patched_llamacpp.py --out DIR --test

The tree comes from the llama-cpp-python sdist (downloaded into DIR), or is a copy of --tree; tools land in DIR/build/bin. `pyspec build --patches`
builds llama-cpp-python on it. --sanitizers: for check_cuda.py, without what memcheck and racecheck take for errors. --unpatched builds the original
tree. --test runs the tree's tests of patched code and exits with the number of failures. CMake and Ninja are those of this Python (`pip install cmake
ninja`) or on PATH.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pyggml_spec import building
from pyggml_spec import patching as patches
from pyggml_spec.errors import PyspecError
from pyggml_spec.pin import RECIPE

TARGETS = ["llama-server", "llama-bench"]
TESTS = ["test-backend-ops", "test-llama-archs", "test-recurrent-state-rollback", "test-batch-alloc", "test-alloc"]
NEW_TESTS = ["test-perf-counters", "test-greedy-rows", "test-layer-features", "test-extra-products"]
OPS = "ARGMAX,CONT,GATED_DELTA_NET,GET_ROWS,REPEAT,SET_ROWS,SSM_CONV"  # what the graphs of the patches are made of
TEST_RUNS = [
    f"test-backend-ops test -b CPU -o {OPS}",
    "test-backend-ops test -b CPU -o FLASH_ATTN_EXT -p hsk=64,.*type_K=f16.*columns=",
    "test-llama-archs -o models",
    "test-recurrent-state-rollback --models models -t 1",
    "test-batch-alloc",
    "test-alloc",
    "test-perf-counters models/qwen3-dense.gguf",
    "test-greedy-rows models/qwen35-dense.gguf",
    "test-extra-products",
    "test-layer-features models/laguna-moe.gguf models/qwen3-dense.gguf models/qwen35-dense.gguf models/qwen35moe-moe.gguf",
]


def test(tools: Path) -> int:
    """Runs the tests; their random models and logs stay in the folder of the tools. Returns how many fail."""
    work, failed = tools.parent / "test-runs", 0
    (work / "models").mkdir(parents=True, exist_ok=True)
    for line in TEST_RUNS:
        name, *arguments = line.split()
        with (work / f"{name}.log").open("w") as log:
            started = time.monotonic()
            status = subprocess.run([tools.resolve() / name, *arguments], check=False, cwd=work, stdout=log, stderr=log).returncode
        status = status or int(" 0/0 tests passed" in Path(log.name).read_text(errors="replace"))  # a filter that chooses no case
        failed += status != 0
        print(
            f"{'passed' if status == 0 else f'FAILED, status {status}, see {log.name}'}: {line} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        if status:
            print(*Path(log.name).read_text(errors="replace").splitlines()[-20:], sep="\n", flush=True)
    return failed


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    print("+", *command, flush=True)
    status = subprocess.run(command, check=False, env=env).returncode
    if status:
        sys.exit(f"{command[0]} ended with {status}")


def find_tools() -> None:
    """Puts CMake and Ninja of this Python on PATH. Ends with a sentence where CMake or a compiler is missing."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if not shutil.which("cmake"):
        sys.exit(f"cmake is neither next to {sys.executable} nor on PATH; {sys.executable} -m pip install cmake ninja gets it")
    building.find_compilers()


def unpack(sdist: Path, out: Path, patched: bool) -> None:
    """The whole tree with all patches, or nothing: one that was cut off would be taken for whole the next time."""
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=out) as part:
        tree = patches.unpack(sdist, Path(part))
        if patched:
            patches.apply(tree)
        root = Path(patches.VENDORED).parts[0]
        (Path(part) / root).rename(out / root)


def copy_tree(source: Path, target: Path) -> None:
    """Copies a source tree without .git and top-level build folders."""
    left_out = {entry.name for entry in source.iterdir() if entry.name == ".git" or (entry.is_dir() and entry.name.startswith("build"))}
    shutil.copytree(source, target, symlinks=True, ignore=lambda folder, names: left_out if Path(folder) == source else set())


def cmake_options(args) -> list[str]:
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", f"-DGGML_CUDA={'ON' if args.cuda else 'OFF'}"]
    options.append(f"-DCMAKE_PROJECT_INCLUDE={RECIPE}")  # of it, here: the compiler's fix, for a tree without 0011
    options.append("-DGGML_CCACHE=OFF")  # finds one that is not on PATH, and then calls it by name; ours is below
    if args.cuda and args.cuda_arch:
        options.append(f"-DCMAKE_CUDA_ARCHITECTURES={args.cuda_arch}")
    if args.sanitizers:  # a pool that does not grow by mapping more memory behind it; a stage that every lane gives back
        options += ["-DGGML_CUDA_NO_VMM=ON", "-DCMAKE_CUDA_FLAGS=-DGGML_CUDA_RACECHECK"]
    if shutil.which("ccache"):
        languages = ("C", "CXX", "CUDA") if args.cuda else ("C", "CXX")
        options += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in languages]
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tree", type=Path, help="llama.cpp source tree, which is copied")
    parser.add_argument("--sdist", type=Path, help=f"{patches.SDIST}, if it is here already")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--cuda-arch", default="", help="for example 90 for H100 and H200; by default CMake's choice")
    parser.add_argument("--sanitizers", action="store_true", help="with --cuda: without what compute-sanitizer takes for errors")
    parser.add_argument("--unpatched", action="store_true")
    parser.add_argument("--test", action="store_true", help="run the tests after the build")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("targets", nargs="*", help=f"by default {' '.join(TARGETS)} and the tests that the patches touch")
    args = parser.parse_args()
    if args.sanitizers and not args.cuda:
        parser.error("--sanitizers is of the CUDA build; add --cuda")

    find_tools()
    args.out.mkdir(parents=True, exist_ok=True)
    tree = args.out / "llama.cpp" if args.tree else args.out / patches.VENDORED
    if not tree.is_dir():
        if args.tree:
            patches.ggml_version(args.tree)
            copy_tree(args.tree, tree)
        else:
            unpack(args.sdist or patches.fetch_sdist(args.out), args.out, patched=not args.unpatched)
    if not args.unpatched:
        patches.apply(tree)  # the tree may come from an earlier call, or from --tree
        print(f"patched with {', '.join(patch.path.name for patch in patches.series())}", flush=True)

    build = args.out / "build"
    ninja = shutil.which("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []  # explicit: a cached path may be gone
    run(
        [
            "cmake",
            *generator,
            "-S",
            str(tree),
            "-B",
            str(build),
            *cmake_options(args),
            "-DLLAMA_USE_PREBUILT_UI=OFF",
            "-DLLAMA_BUILD_TESTS=ON",
        ]
    )
    targets = args.targets or TARGETS + TESTS + ([] if args.unpatched else NEW_TESTS)
    run(["cmake", "--build", str(build), "--parallel", str(args.jobs), "--target", *targets])
    print(build / "bin")
    if args.test:
        sys.exit(test(build / "bin"))


if __name__ == "__main__":
    try:
        main()
    except PyspecError as error:
        sys.exit(f"build_patched_llamacpp.py: {error}")
