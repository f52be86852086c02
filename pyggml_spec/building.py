"""How llama-cpp-python is built for this package, where its wheels are kept, and how one takes the place of the installed libraries.

Set-up runs this before anything is installed, so it needs the standard library alone.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import patching
from .errors import BuildError
from .files import make_private
from .folders import build_folder, trusted
from .pin import COMPILER_FIX, LLAMA_CPP_PYTHON, RECIPE

_FLAGS = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS", "CUDACXX", "CUDAFLAGS", "CUDA_PATH")
_STEP = re.compile(r"^\s*\[\s*(\d+)/(\d+)\] |^\s*\[\s*(\d+)(%)\] ")
_TAIL, _SHOWN = 300, 30  # lines of a build that are searched for the reason, and that are shown
NOTE = "pyggml_spec_build.json"  # beside the libraries that were built here: which build they are

Progress = Callable[[int, int], None]
"""Called with (files compiled, files in all) as a build goes on; with (0, 0) while it is prepared."""


def cmake_args(*options: str) -> str:
    """``CMAKE_ARGS`` of a build: what the environment has, the recipe, and ``options``."""
    return " ".join(
        [*os.environ.get("CMAKE_ARGS", "").split(), shlex.quote(f"-DCMAKE_PROJECT_INCLUDE={RECIPE}"), *map(shlex.quote, options)]
    )


# -- what a build needs


def find_compilers() -> None:
    """Raises BuildError unless there is a compiler for C and one for C++."""
    for variable, default, language in (("CC", "cc", "C"), ("CXX", "c++", "C++")):
        compiler = os.environ.get(variable) or default
        if not shutil.which(compiler.split()[0]):
            raise BuildError(f"there is no {language} compiler {compiler}; install one (Debian and Ubuntu: g++), or name it in {variable}")


def find_nvcc() -> Path:
    """CUDA's compiler: that of ``CUDACXX``, on PATH, or where its installer puts it.

    Raises:
        BuildError: there is none.
    """
    named = os.environ.get("CUDACXX")
    found = shutil.which(named or "nvcc") or (None if named else shutil.which("/usr/local/cuda/bin/nvcc"))
    if found is None:
        raise BuildError(
            f"there is no CUDA compiler {named or 'nvcc'} on PATH or in /usr/local/cuda/bin; install NVIDIA's CUDA toolkit, or name it in CUDACXX"
        )
    return Path(found)


def toolkit_version(nvcc: Path) -> tuple[int, int]:
    """(major, minor) of the toolkit.

    Raises:
        BuildError: the compiler does not say.
    """
    said = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    if not found:
        raise BuildError(f"{nvcc} --version names no release; is it CUDA's compiler? Name the right one in CUDACXX")
    return int(found[1]), int(found[2])


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the NVIDIA driver of this machine knows; None without a driver."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def gpu_architectures() -> tuple[str, ...]:
    """CMake's names of the NVIDIA GPUs of this machine, like ("90",); none where there is no driver, or no GPU for it."""
    count, value, found = ctypes.c_int(), ctypes.c_int(), set()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        for device in range(count.value):
            parts = []
            for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
                if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                    return ()
                parts.append(value.value)
            found.add(10 * parts[0] + parts[1])
    except (OSError, AttributeError):
        return ()
    return tuple(map(str, sorted(found)))


def check_driver(toolkit: tuple[int, int], driver: tuple[int, int] | None) -> None:
    """Raises BuildError where the driver is older than the toolkit's major version: nothing that is built would start.

    A machine without a driver may build for another one.
    """
    if driver is not None and driver[0] < toolkit[0]:
        raise BuildError(
            f"the NVIDIA driver knows CUDA {driver[0]}.{driver[1]}, and the compiler is CUDA {toolkit[0]}.{toolkit[1]}: what it builds would not "
            f"start here; update the driver, or name a compiler of CUDA {driver[0]} in CUDACXX"
        )


def cuda_options(arch: str | None) -> tuple[str, ...]:
    """CMake's options of a CUDA build, after its compiler and the driver are found to fit.

    Args:
        arch: CMake's name of the GPUs to build for ("90", "86;89", "native"); None: the one of this machine, or without one all that ggml names.

    Raises:
        BuildError: no compiler, an old driver, or "native" without a GPU.
    """
    nvcc = find_nvcc()
    check_driver(toolkit_version(nvcc), driver_version())
    here = gpu_architectures()
    if arch == "native" and not here:
        raise BuildError("there is no NVIDIA GPU that a driver knows here; name the architecture of one, like 90 for an H100 or H200")
    if arch is not None and not re.fullmatch(r"native|all|all-major|\d{2,3}[af]?(-real|-virtual)?(;\d{2,3}[af]?(-real|-virtual)?)*", arch):
        raise BuildError(f"{arch!r} is no CUDA architecture; name one like 90, several like 86;89, or native")
    arch = ";".join(here) if arch in (None, "native") else arch  # by number: the wheel is kept, and another machine has other GPUs
    return ("-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}", *([f"-DCMAKE_CUDA_ARCHITECTURES={arch}"] if arch else ()))


# -- building


def compiler_identity() -> bytes:
    """What compiler and processor a build is made by and for: ggml uses all instructions of the machine that it is built on.

    Raises:
        BuildError: there is no compiler.
    """
    find_compilers()
    flags = [f"{name}={os.environ.get(name, '')}" for name in _FLAGS]
    compiler = (os.environ.get("CXX") or "c++").split()
    macros = subprocess.run([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull], check=False, capture_output=True)
    said = macros.stdout
    if macros.returncode:  # a compiler that cannot name this processor's instructions: itself, and what the kernel says of the processor
        said = subprocess.run([*compiler, "--version"], check=False, capture_output=True).stdout + repr(_processor()).encode()
    return "\0".join(flags).encode() + said


def _processor() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    return sorted({line for line in lines if re.match(r"(flags|Features|model|vendor|CPU (implementer|part|variant))", line)})


def build_key(options: Iterable[str] = (), sources: Iterable[bytes] = ()) -> str:
    """Names a wheel by all that decides it: version, recipe, options, further sources (patches), compiler, processor."""
    parts = [
        LLAMA_CPP_PYTHON.encode(),
        RECIPE.read_bytes(),
        COMPILER_FIX.read_bytes(),
        sysconfig.get_platform().encode(),
        compiler_identity(),
    ]
    parts += [*map(str.encode, options), *sources]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def kept_wheel(key: str) -> Path | None:
    """The wheel of an earlier build of this key."""
    folder = build_folder()
    wheel = next((folder / "wheels" / key).glob("llama_cpp_python-*.whl"), None)
    if wheel is not None:
        trusted(folder, folder / "wheels", wheel.parent, wheel)
    return wheel


def build_wheel(
    key: str,
    options: Iterable[str] = (),
    source: str | Path | None = None,
    progress: Progress = lambda done, total: None,
    python: str = sys.executable,
) -> Path:
    """Builds a wheel of llama-cpp-python and keeps it under ``key``, whole or not at all.

    Args:
        options: further options for CMake.
        source: folder of its unpacked source; None: pip gets the pinned version.
        python: the environment that it is built in.

    Raises:
        BuildError: no compiler, or the build failed; ``log`` has its last lines.
    """
    folder = build_folder()
    place = folder / "wheels" / key
    for made in (folder, folder / "wheels", place):  # whatever the umask
        make_private(made)
    with tempfile.TemporaryDirectory(prefix="building-", dir=place.parent) as part:
        command = [
            python,
            "-m",
            "pip",
            "wheel",
            "--verbose",
            "--no-cache-dir",
            "--disable-pip-version-check",
            "--no-deps",
            "--wheel-dir",
            part,
        ]
        if _has(python, "scikit_build_core"):  # otherwise pip gets the build tools for itself
            command.append("--no-build-isolation")
        command.append(str(source) if source is not None else f"llama-cpp-python=={LLAMA_CPP_PYTHON}")
        beside = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])  # CMake and Ninja of the environment
        run(command, "llama-cpp-python could not be built", {**os.environ, "CMAKE_ARGS": cmake_args(*options), "PATH": beside}, progress)
        built = next(Path(part).glob("llama_cpp_python-*.whl"), None)
        if built is None:
            raise BuildError(f"pip built no wheel of llama-cpp-python {LLAMA_CPP_PYTHON}; is {source} its source?")
        built.chmod(0o644)  # whatever the umask
        return Path(shutil.move(built, place / built.name))


def _has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], check=False, capture_output=True).returncode == 0


def run(command: list[str], failure: str, env: dict[str, str] | None = None, progress: Progress | None = None) -> None:
    """Runs a command in silence; what it says is kept for the case that it fails.

    Raises:
        BuildError: ``failure`` and the last line that says why; ``log`` has more.
    """
    tail: list[str] = []
    if progress:
        progress(0, 0)
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            for line in process.stdout or ():
                tail = [*tail[1 - _TAIL :], line.decode("utf-8", "replace").rstrip()]
                if progress and (step := _STEP.match(tail[-1])):
                    progress(int(step[1] or step[3]), int(step[2] or 100))
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # compilers among its children
            raise
    if process.returncode:
        raise BuildError(f"{failure}: {failure_reason(tail) or f'{command[0]} ended with {process.returncode}'}", tail[-_SHOWN:])


def failure_reason(lines: list[str]) -> str:
    """The first complaint of a compiler, or of CMake with what it says below; without one, the last of pip."""
    said = [line.strip() for line in lines]
    for i, line in enumerate(said):
        if line.startswith("CMake Error"):
            return " ".join([line, *filter(None, said[i + 1 : i + 8])][:4])
        if re.search(r"\berror: ", line) and not line.startswith(("error: subprocess", "ERROR:")):
            return line
    return next((line for line in reversed(said) if line.startswith("ERROR")), "")


@dataclass(frozen=True)
class Plan:
    """A build: what CMake is told, which patches it has, and the ``key`` that it is kept under."""

    key: str
    options: tuple[str, ...]
    patches: tuple[str, ...]
    cuda: bool

    @property
    def description(self) -> str:
        gpus = next((option.partition("=")[2] for option in self.options if option.startswith("-DCMAKE_CUDA_ARCHITECTURES=")), "all")
        return f"{f'the CPU and NVIDIA GPUs ({gpus})' if self.cuda else 'the CPU'}, {f'{len(self.patches)} patches' if self.patches else 'no patches'}"

    @property
    def note(self) -> dict:
        """What is left beside the installed libraries."""
        return {"key": self.key, "cuda": self.cuda, "options": self.options, "patches": self.patches}

    def build(self, progress: Progress = lambda done, total: None) -> Path:
        """The wheel, which is kept.

        Raises:
            BuildError: as `build_wheel`.
            PatchError: the source cannot be had.
        """
        if not self.patches:
            return build_wheel(self.key, self.options, progress=progress)
        with tempfile.TemporaryDirectory(prefix="pyspec-source-") as folder:
            tree = patching.unpack(patching.fetch_sdist(build_folder()), Path(folder))
            patching.apply(tree)
            return build_wheel(self.key, self.options, Path(folder) / Path(patching.VENDORED).parts[0], progress)


def plan(cuda: bool = False, arch: str | None = None, patched: bool = False) -> Plan:
    """What a build for this machine is; raises BuildError where a compiler is missing or the driver is too old for it."""
    options = cuda_options(arch) if cuda else ()
    patches = [patch.path for patch in patching.series()] if patched else []
    key = build_key(options, [path.read_bytes() for path in patches])
    return Plan(key, options, tuple(path.stem for path in patches), cuda)


# -- installing


def check_wheel(wheel: Path, folder: Path) -> Path:
    """Unpacks the libraries of ``wheel`` into ``folder`` and starts them in a process of their own.

    Returns:
        The folder of the libraries.

    Raises:
        BuildError: they do not load, or they end their process.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if re.fullmatch(r"llama_cpp/lib/[^/]+", name)]
            archive.extractall(folder, names)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BuildError(f"{wheel} is damaged ({error}); delete it and build again") from None
    except OSError as error:
        raise BuildError(
            f"{wheel} cannot be unpacked into {folder}: {error.strerror}; the installed llama-cpp-python was left as it was"
        ) from None
    libraries = folder / "llama_cpp" / "lib"
    main = next((path for path in libraries.glob("*llama.*") if path.suffix in (".so", ".dylib", ".dll")), None)
    if main is None:
        raise BuildError(f"{wheel} holds no libllama; it is not a wheel of llama-cpp-python that was built whole")
    done = subprocess.run(
        [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1]).llama_backend_init()", main],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"])[-1]
        raise BuildError(f"what was built does not start here: {why}; the installed llama-cpp-python was left as it was")
    return libraries


def build_note(libraries: Path) -> dict:
    """What ``install`` noted about the libraries in this folder; empty where something else put them there."""
    try:
        note = json.loads((libraries / NOTE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def install(wheel: Path, libraries: Path, note: dict) -> None:
    """Puts the libraries of ``wheel`` in the place of those in ``libraries``, all of them in one step; ``note`` says what they are.

    The version, and so the Python part, is the same. Programs that run keep the files that they have open. Whoever is interrupted, even by
    a power cut, finds the old libraries or the new ones.

    Raises:
        BuildError: the new ones do not start, or another installation goes on.
    """
    with exclusive(libraries.parent), tempfile.TemporaryDirectory(prefix=".new-", dir=libraries.parent) as part:
        new = check_wheel(wheel, Path(part))
        (new / NOTE).write_text(json.dumps(note), "utf-8")
        for path in new.iterdir():
            path.chmod(0o755)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        exchange(new, libraries)
        _rewrite_record(libraries)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    with (folder / ".installing").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(f"another process is installing into {folder}; wait for it") from None
        for left in folder.glob(".new-*"):  # of one that was ended
            shutil.rmtree(left, ignore_errors=True)
        yield


def exchange(new: Path, old: Path) -> None:
    """The two folders change names, on Linux in one step; elsewhere in two, and back after the first if the second fails."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is not None and exchange(-100, os.fsencode(new), -100, os.fsencode(old), 2) == 0:  # AT_FDCWD, RENAME_EXCHANGE
        return
    aside = new.with_name("aside")
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise


def _rewrite_record(libraries: Path) -> None:
    """pip removes what RECORD names: the libraries that are there now."""
    record = next(libraries.parents[1].glob("llama_cpp_python-*.dist-info/RECORD"), None)
    if record is None:
        return
    lines = [line for line in record.read_text("utf-8").splitlines() if not line.startswith("llama_cpp/lib/")]
    lines += [f"llama_cpp/lib/{path.name},," for path in sorted(libraries.iterdir())]
    part = record.with_name("RECORD.part")
    part.write_text("\n".join(lines) + "\n", "utf-8")
    os.replace(part, record)
