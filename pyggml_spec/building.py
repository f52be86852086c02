"""Building wheels of llama-cpp-python, their cache, and their installation. Setup runs it first, so it uses the standard library only."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from . import patching
from .errors import BuildError
from .files import make_private
from .folders import build_folder, trusted
from .pin import COMPILER_FIX, LLAMA_CPP_PYTHON, RECIPE

_FLAGS = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS", "CUDACXX", "CUDAFLAGS", "CUDA_PATH")
_STEP = re.compile(r"^\s*\[\s*(\d+)/(\d+)\] |^\s*\[\s*(\d+)(%)\] ")
_TAIL, _SHOWN = 300, 30  # lines of output that are kept, and that are shown
NOTE = "pyggml_spec_build.json"  # in the folder of the installed libraries: which build they are

Progress = Callable[[int, int], None]
"""Called with (files compiled, total); with (0, 0) during preparation."""


def cmake_args(*options: str) -> str:
    """``CMAKE_ARGS`` of a build: the environment's, the recipe, and ``options``."""
    return " ".join([*os.environ.get("CMAKE_ARGS", "").split(), *map(shlex.quote, (f"-DCMAKE_PROJECT_INCLUDE={RECIPE}", *options))])


# -- requirements


def find_compilers() -> None:
    """Raises BuildError without a C and a C++ compiler."""
    for variable, default, language in (("CC", "cc", "C"), ("CXX", "c++", "C++")):
        compiler = os.environ.get(variable) or default
        if not shutil.which(compiler.split()[0]):
            raise BuildError(f"there is no {language} compiler {compiler}; install one (Debian and Ubuntu: g++), or name it in {variable}")


def driver_version() -> tuple[int, int] | None:
    """The CUDA version of the installed NVIDIA driver; None without one."""
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):
        if not ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return version.value // 1000, version.value % 1000 // 10
    return None


def gpu_architectures() -> tuple[str, ...]:
    """CMake's names of this machine's NVIDIA GPUs, like ("90",); empty without a driver or GPU."""
    count, value, found = ctypes.c_int(), ctypes.c_int(), set()
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
        for device in range(0 if failed else count.value):
            name = 0
            for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
                if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                    return ()
                name = 10 * name + value.value
            found.add(name)
    return tuple(map(str, sorted(found)))


def cuda_options(arch: str | None) -> tuple[str, ...]:
    """CMake's options of a CUDA build, after checks of compiler and driver.

    Args:
        arch: CMake's names of the GPUs ("90", "86;89", "native"); None: those of this machine, or without one ggml's default.

    Raises:
        BuildError: no compiler, an old driver, or "native" without a GPU.
    """
    named = os.environ.get("CUDACXX")
    nvcc = shutil.which(named or "nvcc") or (None if named else shutil.which("/usr/local/cuda/bin/nvcc"))
    if nvcc is None:
        missing = f"there is no CUDA compiler {named or 'nvcc'} on PATH or in /usr/local/cuda/bin"
        raise BuildError(f"{missing}; install NVIDIA's CUDA toolkit, or name it in CUDACXX")
    found = re.search(r"release (\d+)\.(\d+)", captured([nvcc, "--version"]).stdout)
    if not found:
        raise BuildError(f"{nvcc} --version names no release; is it CUDA's compiler? Name the right one in CUDACXX")
    driver = driver_version()  # without one the build may be for another machine
    if driver is not None and driver[0] < int(found[1]):
        raise BuildError(
            f"the NVIDIA driver knows CUDA {driver[0]}.{driver[1]}, and the compiler is CUDA {found[1]}.{found[2]}: what it builds would not "
            f"start here; update the driver, or name a compiler of CUDA {driver[0]} in CUDACXX"
        )
    here = gpu_architectures()
    if arch == "native" and not here:
        raise BuildError("there is no NVIDIA GPU that a driver knows here; name the architecture of one, like 90 for an H100 or H200")
    if arch is not None and not re.fullmatch(r"native|all|all-major|\d{2,3}[af]?(-real|-virtual)?(;\d{2,3}[af]?(-real|-virtual)?)*", arch):
        raise BuildError(f"{arch!r} is no CUDA architecture; name one like 90, several like 86;89, or native")
    arch = ";".join(here) if arch in (None, "native") else arch  # explicit, because the wheel is cached
    return ("-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}", *([f"-DCMAKE_CUDA_ARCHITECTURES={arch}"] if arch else ()))


# -- building


def compiler_identity() -> bytes:
    """Identity of compiler and processor: ggml is built for this machine's instructions. Raises BuildError without a compiler."""
    find_compilers()
    flags = [f"{name}={os.environ.get(name, '')}" for name in _FLAGS]
    compiler = (os.environ.get("CXX") or "c++").split()
    macros = captured([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    output = macros.stdout
    if macros.returncode:  # a compiler without -march=native here: its version and the kernel's description instead
        output = captured([*compiler, "--version"]).stdout + repr(_processor())
    return ("\0".join(flags) + output).encode()


def _processor() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    return sorted({line for line in lines if re.match(r"(flags|Features|model|vendor|CPU (implementer|part|variant))", line)})


def build_key(options: Iterable[str] = (), sources: Iterable[bytes] = ()) -> str:
    """Hash of everything that determines a wheel: version, recipe, options, sources (patches), compiler, processor."""
    files = RECIPE.read_bytes(), COMPILER_FIX.read_bytes()
    return hash_of(LLAMA_CPP_PYTHON, *files, sysconfig.get_platform(), compiler_identity(), *options, *sources)


def hash_of(*parts: str | bytes) -> str:
    """A name for what these parts determine."""
    digests = [hashlib.sha256(part.encode() if isinstance(part, str) else part).digest() for part in parts]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def kept_wheel(key: str) -> Path | None:
    """The cached wheel of this key."""
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
    """Builds a wheel of llama-cpp-python and caches it under ``key`` atomically.

    Args:
        options: further options for CMake.
        source: folder of its unpacked source; None: pip downloads the pinned version.
        python: the environment to build in.

    Raises:
        BuildError: no compiler, or the build failed; ``log`` has its last lines.
    """
    folder = build_folder()
    place = folder / "wheels" / key
    for made in (folder, folder / "wheels", place):
        make_private(made)
    with tempfile.TemporaryDirectory(prefix="building-", dir=place.parent) as part:
        command = [
            python,
            *["-m", "pip", "wheel", "--verbose", "--no-cache-dir", "--disable-pip-version-check", "--no-deps", "--wheel-dir"],
            part,
        ]
        if not captured([python, "-c", "import scikit_build_core"]).returncode:  # otherwise pip downloads the build tools
            command.append("--no-build-isolation")
        command.append(str(source) if source is not None else f"llama-cpp-python=={LLAMA_CPP_PYTHON}")
        path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])  # with the environment's CMake and Ninja
        run(command, "llama-cpp-python could not be built", {**os.environ, "CMAKE_ARGS": cmake_args(*options), "PATH": path}, progress)
        built = next(Path(part).glob("llama_cpp_python-*.whl"), None)
        if built is None:
            raise BuildError(f"pip built no wheel of llama-cpp-python {LLAMA_CPP_PYTHON}; is {source} its source?")
        built.chmod(0o644)
        return Path(shutil.move(built, place / built.name))


def captured(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with its output as text."""
    return subprocess.run(command, check=False, capture_output=True, text=True)


def check_loads(code: str, *libraries: Path, failure: str) -> None:
    """Runs ``code`` that loads libraries in a child process. Raises BuildError: ``failure``, with {} for the reason."""
    done = captured([sys.executable, "-c", code, *libraries])
    if done.returncode:
        raise BuildError(failure.format((done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"])[-1]))


def run(command: list[str], failure: str, env: dict[str, str] | None = None, progress: Progress | None = None) -> None:
    """Runs a command without showing its output. Raises BuildError: ``failure`` and the most informative line; ``log`` has more."""
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
            os.killpg(process.pid, signal.SIGTERM)  # includes compilers
            raise
    if process.returncode:
        raise BuildError(f"{failure}: {failure_reason(tail) or f'{command[0]} ended with {process.returncode}'}", tail[-_SHOWN:])


def failure_reason(lines: list[str]) -> str:
    """The first error of a compiler, or of CMake with its explanation; else the last one of pip."""
    output = [line.strip() for line in lines]
    for i, line in enumerate(output):
        if line.startswith("CMake Error"):
            return " ".join([line, *filter(None, output[i + 1 : i + 8])][:4])
        if re.search(r"\berror: ", line) and not line.startswith(("error: subprocess", "ERROR:")):
            return line
    return next((line for line in reversed(output) if line.startswith("ERROR")), "")


@dataclass(frozen=True)
class Plan:
    """A build: CMake options, patches, and the cache ``key``."""

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
        """The note for the installed libraries."""
        return {"key": self.key, "cuda": self.cuda, "options": self.options, "patches": self.patches}

    def build(self, progress: Progress = lambda done, total: None) -> Path:
        """The cached wheel. Raises BuildError: as `build_wheel`; PatchError: the source is unavailable."""
        if not self.patches:
            return build_wheel(self.key, self.options, progress=progress)
        with tempfile.TemporaryDirectory(prefix="pyspec-source-") as folder:
            tree = patching.unpack(patching.fetch_sdist(build_folder()), Path(folder))
            patching.apply(tree)
            return build_wheel(self.key, self.options, Path(folder) / Path(patching.VENDORED).parts[0], progress)


PORTABLE = ("-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DCMAKE_INSTALL_BINDIR=llama_cpp/lib")
"""CMake's options of a build for every processor: one library per level of instructions, chosen at run time."""


def plan(cuda: bool = False, arch: str | None = None, patched: bool = False, portable: bool = False) -> Plan:
    """The build for this machine, or ``portable`` for every processor of its kind; raises BuildError without a compiler, or with an old driver."""
    options = (*(cuda_options(arch) if cuda else ()), *(PORTABLE if portable else ()))
    patches = [patch.path for patch in patching.series()] if patched else []
    key = build_key(options, [path.read_bytes() for path in patches])
    return Plan(key, options, tuple(path.stem for path in patches), cuda)


# -- installing


def check_wheel(wheel: Path, folder: Path) -> Path:
    """Unpacks the libraries of ``wheel`` into ``folder``, loads them in a child process, and returns their folder. Raises BuildError: they
    do not load, or crash."""
    left = "the installed llama-cpp-python was left as it was"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if re.fullmatch(r"llama_cpp/lib/[^/]+", name)]
            archive.extractall(folder, names)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BuildError(f"{wheel} is damaged ({error}); delete it and build again") from None
    except OSError as error:
        raise BuildError(f"{wheel} cannot be unpacked into {folder}: {error.strerror}; {left}") from None
    libraries = folder / "llama_cpp" / "lib"
    main = next((path for path in libraries.glob("*llama.*") if path.suffix in (".so", ".dylib", ".dll")), None)
    if main is None:
        raise BuildError(f"{wheel} holds no libllama; it is not a wheel of llama-cpp-python that was built whole")
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).llama_backend_init()"
    check_loads(code, main, failure=f"what was built does not start here: {{}}; {left}")
    return libraries


def build_note(libraries: Path) -> dict:
    """The note of ``install`` in this folder; empty for libraries from elsewhere."""
    try:
        note = json.loads((libraries / NOTE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write_note(libraries: Path, note: dict) -> None:
    (libraries / NOTE).write_text(json.dumps(note), "utf-8")


def install(wheel: Path, libraries: Path, note: dict) -> None:
    """Replaces ``libraries`` with those of ``wheel`` atomically, with ``note``. Running programs keep their open files. Raises BuildError:
    the new ones do not start, or another installation is running."""
    with exclusive(libraries.parent), tempfile.TemporaryDirectory(prefix=".new-", dir=libraries.parent) as part:
        new = check_wheel(wheel, Path(part))
        write_note(new, note)
        for path in new.iterdir():
            path.chmod(0o755)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        exchange(new, libraries)
        rewrite_record(libraries)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    with (folder / ".installing").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(f"another process is installing into {folder}; wait for it") from None
        for left in folder.glob(".new-*"):  # of killed installations
            shutil.rmtree(left, ignore_errors=True)
        yield


def exchange(new: Path, old: Path) -> None:
    """Swaps the names of two folders: on Linux atomically; elsewhere in two renames, undone on failure."""
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


def rewrite_record(libraries: Path) -> None:
    """Updates RECORD of llama-cpp-python, or of this package, so that pip removes the present libraries."""
    folder = f"{libraries.parent.name}/{libraries.name}/"  # llama_cpp/lib/ or pyggml_spec/libs/
    records = libraries.parents[1].glob("*.dist-info/RECORD")
    record = next(
        (path for path in records if re.match("(llama_cpp_python|pyggml_spec)-", path.parent.name) and folder in path.read_text("utf-8")),
        None,
    )
    if record is None:
        return
    lines = [line for line in record.read_text("utf-8").splitlines() if not line.startswith(folder)]
    lines += [f"{folder}{path.name},," for path in sorted(libraries.iterdir())]
    part = record.with_name("RECORD.part")
    part.write_text("\n".join(lines) + "\n", "utf-8")
    os.replace(part, record)
