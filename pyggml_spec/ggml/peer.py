"""GPUs of NVIDIA that copy to each other directly, where a model's layers are split over them: without that, copies go through the host.

ggml leaves this off, because peer access is broken on some machines: what arrives is something else, or nothing ever does. So a child process tries it
first (``peer_child.py``), both ways and in several sizes; what it found is kept in the cache folder under the driver's version, the GPUs' ids and
the machine's start, because it is the machine that breaks peer access (IOMMU, firmware), and its settings change from one start to the next.
``PYSPEC_PEER_COPIES=0`` does without. The memory that copies go between is the drivers' own (``cudaMalloc``), so it is enough to switch peer access
on in the contexts that ggml uses; ``GGML_CUDA_P2P`` has ggml itself do so, for all GPUs, when it starts.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from ..files import make_private, replacing
from ..folders import cache_folder
from . import peer_child
from .device import Device

LIBRARY = "libcuda.so.1"
REFUSED, BY_GGML = "PYSPEC_PEER_COPIES", "GGML_CUDA_P2P"
LIMIT_S = 60  # it takes about a second
END_S = 5  # for a process to end that was told to; one that is stuck in the driver does not
BOOT = Path("/proc/sys/kernel/random/boot_id")
WAITS = "waits"
_SAID = {
    peer_child.NONE: "the driver offers no peer access between them",
    peer_child.WRONG: "what one copies to the other arrives as something else",
    WAITS: f"a process that tried it did not end within {LIMIT_S} s",
}
_ways: dict[frozenset[str], str] = {}  # by the names of two GPUs: empty where they copy directly, or why not


def enable_peer_access(devices: Sequence[Device]) -> list[str]:
    """Has those of these GPUs copy to each other directly that can. Gives sentences about those that do not."""
    names = list(dict.fromkeys(device.name for device in devices if device.name.startswith("CUDA")))
    if len(names) < 2 or BY_GGML in os.environ:
        return []
    for a, b in combinations(names, 2):
        if frozenset((a, b)) not in _ways:
            _ways[frozenset((a, b))] = _opened(a, b)
    whys = [(a, b, why) for a, b in combinations(names, 2) if (why := _ways[frozenset((a, b))])]
    return [f"{a} and {b} copy to each other through the host: {why}" for a, b, why in whys]


def no_peer_reason(a: str, b: str) -> str:
    """Why these two GPUs do not copy directly; empty where they do."""
    return _ways.get(frozenset((a, b)), "nobody asked for it")


def _opened(a: str, b: str) -> str:
    if os.environ.get(REFUSED) == "0":
        return f"{REFUSED}=0 is set"
    try:
        cuda = peer_child.Cuda(LIBRARY)
        count = cuda.number("cuDeviceGetCount")
        ordinals = [int(name.removeprefix("CUDA")) % count for name in (a, b)]
        if ordinals[0] == ordinals[1]:  # ggml shows one GPU as several
            return ""
        here = [cuda.device(ordinal) for ordinal in ordinals]
        path = _path(_boot(), str(cuda.number("cuDriverGetVersion")), *sorted(map(cuda.uuid, here)))
        said = _tried(ordinals, path)
        if said == peer_child.WORKS:
            cuda.enable(*here)
            return ""
        if said == WAITS:
            return f"{_SAID[WAITS]}; it is tried again after a restart of the machine, or without {path}"
    except (OSError, AttributeError, ValueError) as error:
        return f"the driver cannot be asked ({error})"
    return _SAID.get(said, said)


def _boot() -> str:
    """Which start of the machine this is; empty where nobody says."""
    try:
        return BOOT.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""


def _path(*about: str) -> Path:
    """Where it is kept what was found about this."""
    return cache_folder() / f"peer-{hashlib.sha256(' '.join(about).encode()).hexdigest()[:32]}.json"


def _tried(ordinals: Sequence[int], path: Path) -> str:
    """What a child process found, or how it ended; remembered at ``path``."""
    try:
        said = json.loads(path.read_text("utf-8"))["found"]
        if said in (peer_child.WORKS, *_SAID):
            return said
    except (OSError, ValueError, KeyError, TypeError):
        pass
    command = [sys.executable, "-I", peer_child.__file__, LIBRARY, *map(str, ordinals), str(LIMIT_S + 2 * END_S)]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return f"no process can be started that tries it ({error})"
    try:
        said, errors = (what.strip() for what in child.communicate(timeout=LIMIT_S))
    except subprocess.TimeoutExpired:  # the next start does not wait for it again
        said, errors = WAITS, ""
    finally:
        _end(child)
    if said not in (peer_child.WORKS, *_SAID):
        lines = errors.splitlines() or [f"it ended with {child.returncode}"]
        return f"a process that tried it failed ({lines[-1]})"
    try:
        make_private(path.parent)
        with replacing(path) as file:
            file.write(json.dumps({"found": said}).encode())
    except OSError:
        pass  # it is tried again then
    return said


def _end(child: subprocess.Popen) -> None:
    """Ends a process that has not ended; one that cannot, because it is stuck in the driver, is left behind."""
    if child.poll() is None:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=END_S)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
