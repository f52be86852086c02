"""Tests in a child process whether the installed ggml runs on this processor, before this process loads it.

A miscompiled kernel or a build for another processor kills the process without an exception. So on first use a child multiplies a small matrix of
every weight type in every buffer type. The cache folder keeps the result per hash of libraries and processor; ``PYSPEC_NO_PROBE=1`` skips it.
"""

import hashlib
import os
import platform
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from ..background import Background
from ..errors import LibraryError
from ..files import keep_json, kept_json
from ..folders import cache_folder
from ..pin import installed_libraries, pip_command

SKIP = "PYSPEC_NO_PROBE"
LIMIT_S = 120  # it takes a second or two
START, PLAIN = "start", "plain"  # stages of the child before the extra buffer types
NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}  # whose start would take most of the child's time
_OWN_FAULT = {
    getattr(signal, f"SIG{name}") for name in ["ILL", "SEGV", "BUS", "FPE", "ABRT", "TRAP", "SYS"]
}  # signals that the code itself raises
REMEDY = f"build it again here: {pip_command()}"

# ggml's compile-time features -> Linux flags. AMX is absent: ggml queries the kernel at run time
_FLAGS = {
    "sse3": "pni", "ssse3": "ssse3", "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi2": "bmi2", "avx_vnni": "avx_vnni",
    "avx512": "avx512f", "avx512_vbmi": "avx512vbmi", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
    "neon": "asimd", "dotprod": "asimddp", "fp16_va": "asimdhp", "matmul_int8": "i8mm", "sve": "sve", "sme": "sme",
}  # fmt: skip


@dataclass(frozen=True)
class Fitness:
    """The result of the probe.

    Attributes:
        features: processor features that the build uses, by ggml's names.
        refused: how the child ended, by extra buffer type.
        broken: how it ended before the extra buffer types; empty if it did not.
    """

    features: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    broken: str = ""

    @property
    def notes(self) -> list[str]:
        """A sentence per unused buffer type."""
        return [
            f"the buffer type {name} is not used: its products {how} in this build of llama-cpp-python; {REMEDY}"
            for name, how in self.refused.items()
        ]


def processor() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; elsewhere what Python reports."""
    found = {}
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, colon, value = line.partition(":")
                if not colon:
                    break
                found[name.strip()] = value.strip()
    except OSError:
        pass
    return found or {"machine": platform.machine(), "processor": platform.processor()}


def flags(found: dict[str, str]) -> set[str] | None:
    """Processor flags by Linux's names; None if unknown."""
    words = found.get("flags") or found.get("Features")
    return set(words.split()) if words else None


def missing(features: tuple[str, ...], found: dict[str, str]) -> list[str]:
    """Features that the build uses and this processor lacks."""
    has = flags(found)
    return [] if has is None else [name for name in features if name in _FLAGS and _FLAGS[name] not in has]


def check(folder: Path, found: dict[str, str] | None = None) -> Fitness:
    """Probes the libraries in ``folder``, or reads the kept result.

    Raises:
        LibraryError: they do not run on this processor.
    """
    libraries = sorted(path for name in ("ggml-cpu", "ggml-base") for path in plain_libraries(folder, name))
    if os.environ.get(SKIP) or not libraries:  # without a plain name, ggml selects among variants itself
        return Fitness()
    found = found or processor()
    path = cache_folder() / f"probe-{cache_key(libraries, found)}.json"
    fitness = _load(path)
    if fitness is None:
        fitness, lasting = _examine(folder)
        if lasting:
            keep_json(path, asdict(fitness))
    name = found.get("model name") or platform.machine()
    if lacking := missing(fitness.features, found):
        raise LibraryError(
            f"the installed llama-cpp-python was built for a processor with {', '.join(lacking)}, which this one ({name}) does not have; {REMEDY}"
        )
    if fitness.broken:
        raise LibraryError(
            f"the installed llama-cpp-python does not run on this processor ({name}): a process that tried it {fitness.broken}; {REMEDY}"
        )
    return fitness


_begun: dict[Path, Background[Fitness]] = {}


def begin() -> None:
    """Begins ``check`` of the installed libraries, for imports that need none of them meanwhile."""
    folder = libraries()
    if folder is not None and folder not in _begun:
        _begun[folder] = Background(partial(check, folder)).start()


def settled(folder: Path) -> Fitness:
    """``check``, which may have begun."""
    begun = _begun.pop(folder, None)
    return check(folder) if begun is None else begun.result()


def libraries() -> Path | None:
    """The folder of llama.cpp's libraries, as for the package llama_cpp; None where there is none."""
    return Path(elsewhere) if (elsewhere := os.environ.get("LLAMA_CPP_LIB_PATH")) else installed_libraries()


def plain_libraries(folder: Path, name: str) -> list[Path]:
    return [path for path in folder.glob(f"*{name}.*") if path.suffix in (".so", ".dylib", ".dll")]


def cache_key(libraries: list[Path], found: dict[str, str]) -> str:
    """Hash of build and processor, without fields that vary by core or time."""
    steady = sorted(
        (name, value)
        for name, value in found.items()
        if not any(word in name for word in ("MHz", "apicid", "core", "processor", "bogomips", "BogoMIPS", "siblings", "physical"))
    )
    digest = hashlib.sha256(repr(steady).encode())
    for path in libraries:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _load(path: Path) -> Fitness | None:
    try:
        stored = kept_json(path)
        fitness = Fitness(tuple(stored["features"]), dict(stored["refused"]), stored["broken"])
    except (ValueError, KeyError, TypeError):
        return None
    texts = [*fitness.features, *fitness.refused, *fitness.refused.values(), fitness.broken]
    return fitness if all(isinstance(text, str) for text in texts) else None


def _examine(folder: Path) -> tuple[Fitness, bool]:
    """Runs children until one finishes, each without the buffer types that killed the ones before. The flag: whether to keep the result."""
    features: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    lasting = True
    while True:
        try:
            done = run_child(folder, refused)
        except (OSError, ValueError):
            return Fitness(features), False  # no child can be started
        lines = done.stdout.splitlines()
        features = next((tuple(line.split()[1:]) for line in lines if line.startswith("features ")), features)
        if done.returncode >= 0:  # an exception is no crash: this process will raise it too
            return Fitness(features, refused), lasting and lines[-1:] == ["done"]
        at = next((line.split(maxsplit=1)[1] for line in reversed(lines) if line.startswith("at ")), START)
        number = -done.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else number  # most of the real-time ones have none
        own, how = number in _OWN_FAULT, f"ended with the signal {name}"
        lasting = lasting and own
        if at in (START, PLAIN) or at in refused:
            return Fitness(features, refused, how if own else ""), lasting  # killed from outside, or too slow
        refused[at] = how


def run_child(folder: Path, refused: dict[str, str]) -> subprocess.CompletedProcess:
    env = {**os.environ, **NO_GPU, SKIP: "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "pyggml_spec.ggml.probe_child", str(folder), *refused]
    try:
        return subprocess.run(
            command, env=env, check=False, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return subprocess.CompletedProcess(
            command, -signal.SIGKILL, output.decode("utf-8", "replace") if isinstance(output, bytes) else output, ""
        )
