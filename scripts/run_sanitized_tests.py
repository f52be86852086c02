#!/usr/bin/env python3
"""Tests of the C extension built with AddressSanitizer and UndefinedBehaviorSanitizer; `make test-sanitized`, weekly in CI's slow set.

    run_sanitized_tests.py [pytest's arguments]
    run_sanitized_tests.py --proof

A finding ends its process and test. New memory is full of NaN, so that a result that depends on it differs. ``--proof`` builds a copy with a write past an
allocation, and fails unless it is found and new memory is full of NaN. The build stays in build/sanitized. Without arguments, all tests of the C
extension; ggml itself is not rebuilt.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/ggml",
    "tests/cache/test_recurrent.py",
    "tests/cache/test_kv.py",
    "tests/engine",
    "tests/multi_device/test_pipeline.py",
    "tests/vision",
]
ADDRESS = "detect_leaks=0:halt_on_error=1:malloc_fill_byte=255:max_malloc_fill_size=67108864"  # Python does not free at exit
QUICK = ["tests/cache/test_recurrent.py", "-x", "-k", "replay_of_the_first_rows"]
FILLED = "import numpy; assert numpy.isnan(numpy.empty(99999)).all()"
WITHOUT_KERNELS = [f"-DPGS_COMPILES_{level}=OFF" for level in ("avx2", "avx512vnni", "neondot")]  # what takes long to build
INJECTED = (
    "csrc/step_graph.c",
    "    allocator->backend = backend;\n",
    "    allocator->backend = backend;\n    ((volatile char *) allocator)[sizeof(*allocator)] = 1;\n",
)


def build(source: Path, folder: Path, *options: str) -> Path:
    """The extension."""
    configure = [
        "-DPGS_SANITIZE=ON",
        "-DSKBUILD_SABI_COMPONENT=Development.SABIModule",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Debug",
        *options,
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # CMake and Ninja of the environment
    for command in (["cmake", "-S", source, "-B", folder, "-G", "Ninja", "--no-warn-unused-cli", *configure], ["cmake", "--build", folder]):
        subprocess.run(
            [shutil.which("cmake", path=path) or "cmake", *command[1:]],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PATH": path},
        )
    return next(folder.glob("_native*.so"))


def runtime(name: str) -> str:
    """The path of a sanitizer's library, which has to be there before Python's own."""
    found = subprocess.run(
        [*(os.environ.get("CC") or "cc").split(), f"-print-file-name={name}"], check=True, capture_output=True, text=True
    )
    return found.stdout.strip()


def environment(extension: Path) -> dict[str, str]:
    import llama_cpp

    from pyggml_spec.folders import build_folder

    cache = extension.parent / "cache"  # separate from that of the ordinary build
    cache.mkdir(mode=0o700, exist_ok=True)
    if not (cache / "pyggml_spec").exists():
        (cache / "pyggml_spec").symlink_to(build_folder())
    return {
        **os.environ,
        "SANITIZED_NATIVE": str(extension),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts" / "sanitized"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "LD_LIBRARY_PATH": str(Path(llama_cpp.__file__).parent / "lib"),
        "LD_PRELOAD": " ".join(map(runtime, ("libasan.so", "libubsan.so"))),
        "ASAN_OPTIONS": f"{ADDRESS}:log_path={extension.parent / 'reports' / 'address'}",
        "UBSAN_OPTIONS": f"halt_on_error=1:print_stacktrace=1:log_path={extension.parent / 'reports' / 'undefined'}",
        "XDG_CACHE_HOME": str(cache),
        "PYTHONMALLOC": "malloc",  # so that what is Python's has borders, too
    }


def run(extension: Path, tests: list[str]) -> tuple[int, str]:
    """pytest's exit status, and what the sanitizers have found in its process and in those that it started."""
    reports = extension.parent / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env=environment(extension), check=False)
    return done.returncode, "".join(path.read_text(errors="replace") for path in sorted(reports.iterdir()))


def prove() -> int:
    """0 if new memory is full of NaN, and a write past an allocation is found."""
    name, before, after = INJECTED
    with tempfile.TemporaryDirectory(prefix="sanitized-") as folder:
        copy = Path(folder) / "source"
        copy.mkdir()
        shutil.copy(ROOT / "CMakeLists.txt", copy)
        for part in ("csrc", "cmake", "patches"):
            shutil.copytree(ROOT / part, copy / part)
        text = (copy / name).read_text()
        assert text.count(before) == 1
        (copy / name).write_text(text.replace(before, after))
        extension = build(copy, Path(folder) / "build", "-DPGS_SANITIZE_LEVEL=-O0", *WITHOUT_KERNELS)
        subprocess.run([sys.executable, "-c", FILLED], check=True, env=environment(extension))
        status, found = run(extension, QUICK)
    shown = next((line for line in found.splitlines() if "heap-buffer-overflow" in line), "")
    print(shown or "a write past an allocation was not found")
    return 0 if status and shown else 1


def main() -> int:
    if sys.argv[1:] == ["--proof"]:
        return prove()
    status, found = run(build(ROOT, ROOT / "build" / "sanitized"), sys.argv[1:] or TESTS)
    print(found or "the sanitizers have found nothing")
    return status or bool(found)


if __name__ == "__main__":
    sys.exit(main())
