"""Whether the installed ggml runs on this processor, found out by a child process before this one loads it.

A kernel that the compiler got wrong, or a build for another processor, ends the process: no exception can be caught. So the first time that a build
meets a processor, a child loads it and multiplies by a small matrix of every weight type in every buffer type. What it found is kept in the cache
folder under a hash of the libraries and of the processor; ``PYSPEC_NO_PROBE=1`` does without.
"""

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import LibraryError
from ..files import make_private, replacing
from ..folders import cache_folder
from ..pin import pip_command

SKIP = "PYSPEC_NO_PROBE"
LIMIT_S = 120  # it takes a second or two
START, PLAIN = "start", "plain"  # what the child is at when it is not at an extra buffer type
_OWN_FAULT = {  # others come from outside
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}
_REMEDY = f"build it again here: {pip_command()}"

# what ggml says that it was compiled with: Linux's names of it. AMX is not among them: ggml asks the kernel for it when it runs
_FLAGS = {
    "sse3": "pni", "ssse3": "ssse3", "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi2": "bmi2", "avx_vnni": "avx_vnni",
    "avx512": "avx512f", "avx512_vbmi": "avx512vbmi", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
    "neon": "asimd", "dotprod": "asimddp", "fp16_va": "asimdhp", "matmul_int8": "i8mm", "sve": "sve", "sme": "sme",
}  # fmt: skip


@dataclass(frozen=True)
class Fitness:
    """What was found.

    Attributes:
        features: what the build uses of the processor, as ggml names it.
        refused: how the child ended, by the extra buffer type that it was at.
        broken: how it ended before it came to them; empty if it did not.
    """

    features: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    broken: str = ""

    @property
    def notes(self) -> list[str]:
        """A sentence for each buffer type that is not used."""
        return [
            f"the buffer type {name} is not used: its products {how} in this build of llama-cpp-python; {_REMEDY}"
            for name, how in self.refused.items()
        ]


def processor() -> dict[str, str]:
    """The lines of /proc/cpuinfo about the first processor; elsewhere what Python knows."""
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
    """What the processor has, by Linux's names; None where nobody says."""
    words = found.get("flags") or found.get("Features")
    return set(words.split()) if words else None


def missing(features: tuple[str, ...], found: dict[str, str]) -> list[str]:
    """What a build uses and this processor lacks."""
    has = flags(found)
    return [] if has is None else [name for name in features if name in _FLAGS and _FLAGS[name] not in has]


def check(folder: Path, found: dict[str, str] | None = None) -> Fitness:
    """Examines the libraries in ``folder``, or remembers.

    Raises:
        LibraryError: they do not run on this processor.
    """
    libraries = sorted(
        path for name in ("ggml-cpu", "ggml-base") for path in folder.glob(f"*{name}.*") if path.suffix in (".so", ".dylib", ".dll")
    )
    if os.environ.get(SKIP) or not libraries:  # without one of its own name, ggml picks among several by itself
        return Fitness()
    found = found or processor()
    path = cache_folder() / f"probe-{_key(libraries, found)}.json"
    fitness = _remembered(path)
    if fitness is None:
        fitness, lasting = _examine(folder)
        if lasting:
            _remember(path, fitness)
    name = found.get("model name") or platform.machine()
    if lacking := missing(fitness.features, found):
        raise LibraryError(
            f"the installed llama-cpp-python was built for a processor with {', '.join(lacking)}, which this one ({name}) does not have; {_REMEDY}"
        )
    if fitness.broken:
        raise LibraryError(
            f"the installed llama-cpp-python does not run on this processor ({name}): a process that tried it {fitness.broken}; {_REMEDY}"
        )
    return fitness


def _key(libraries: list[Path], found: dict[str, str]) -> str:
    """Names build and processor. What changes from core to core and from minute to minute is left out."""
    steady = sorted(
        (name, value)
        for name, value in found.items()
        if not any(word in name for word in ("MHz", "apicid", "core", "processor", "bogomips", "BogoMIPS", "siblings", "physical"))
    )
    digest = hashlib.sha256(repr(steady).encode())
    for path in libraries:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _remembered(path: Path) -> Fitness | None:
    try:
        stored = json.loads(path.read_text("utf-8"))
        fitness = Fitness(tuple(stored["features"]), dict(stored["refused"]), stored["broken"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = [*fitness.features, *fitness.refused, *fitness.refused.values(), fitness.broken]
    return fitness if all(isinstance(text, str) for text in texts) else None


def _remember(path: Path, fitness: Fitness) -> None:
    try:
        make_private(path.parent)
        with replacing(path) as file:
            file.write(json.dumps(asdict(fitness)).encode())
    except OSError:
        pass  # a read-only home only means that the next start finds it out again


def _examine(folder: Path) -> tuple[Fitness, bool]:
    """Lets children try until one comes to the end, each without what its predecessors died of. The flag: whether to remember what was found."""
    features: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    lasting = True
    while True:
        try:
            done = _child(folder, refused)
        except (OSError, ValueError):
            return Fitness(features), False  # no child can be started here: nothing is known
        lines = done.stdout.splitlines()
        features = next((tuple(line.split()[1:]) for line in lines if line.startswith("features ")), features)
        if done.returncode >= 0:  # an exception is no crash: whatever it is, this process will meet it and say it
            return Fitness(features, refused), lasting and lines[-1:] == ["done"]
        at = next((line.split(maxsplit=1)[1] for line in reversed(lines) if line.startswith("at ")), START)
        own, how = -done.returncode in _OWN_FAULT, f"ended with the signal {_name(-done.returncode)}"
        lasting = lasting and own
        if at in (START, PLAIN) or at in refused:
            return Fitness(features, refused, how if own else ""), lasting  # something outside ended it, or it was slow: nothing is known
        refused[at] = how


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time ones have none
        return str(number)


def _child(folder: Path, refused: dict[str, str]) -> subprocess.CompletedProcess:
    env = {**os.environ, SKIP: "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "pyggml_spec.ggml.probe_child", str(folder), *refused]
    try:
        return subprocess.run(
            command, env=env, check=False, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return subprocess.CompletedProcess(
            command, -signal.SIGKILL, said.decode("utf-8", "replace") if isinstance(said, bytes) else said, ""
        )
