"""Direct copies between NVIDIA GPUs (peer access) of a split model; without it copies go through the host.

ggml leaves peer access off because some machines (IOMMU, firmware) corrupt or block such copies. A child process (``peer_child.py``) tests it in
both directions; the cache folder keeps the result per driver version, GPU ids and boot. ``PYSPEC_PEER_COPIES=0`` disables it. Enabling it in
ggml's contexts is enough; ``GGML_CUDA_P2P`` makes ggml do so itself for all GPUs.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from ..files import keep_json, kept_json
from ..folders import cache_folder
from . import peer_child
from .device import Device

LIBRARY = "libcuda.so.1"
DISABLE, BY_GGML = "PYSPEC_PEER_COPIES", "GGML_CUDA_P2P"
LIMIT_S = 60  # the test takes about a second
END_S = 5  # to wait for a killed process; one that hangs in the driver does not end
BOOT = Path("/proc/sys/kernel/random/boot_id")
HANGS = "waits"
_REASONS = {
    peer_child.NONE: "the driver offers no peer access between them",
    peer_child.WRONG: "copies between them arrive corrupted",
    HANGS: f"a test process did not end within {LIMIT_S} s",
}
_results: dict[frozenset[str], str] = {}  # by pair of names: the reason against direct copies, empty where they work


def enable_peer_access(devices: Sequence[Device]) -> list[str]:
    """Enables direct copies between those of these GPUs that support it. Returns a sentence for each pair that does not."""
    names = list(dict.fromkeys(device.name for device in devices if device.name.startswith("CUDA")))
    if len(names) < 2 or BY_GGML in os.environ:
        return []
    for a, b in combinations(names, 2):
        if frozenset((a, b)) not in _results:
            _results[frozenset((a, b))] = _enable(a, b)
    whys = [(a, b, why) for a, b in combinations(names, 2) if (why := _results[frozenset((a, b))])]
    return [f"{a} and {b} copy to each other through the host: {why}" for a, b, why in whys]


def no_peer_reason(a: str, b: str) -> str:
    """Why these two GPUs do not copy directly; empty where they do."""
    return _results.get(frozenset((a, b)), "it was not requested")


def _enable(a: str, b: str) -> str:
    if os.environ.get(DISABLE) == "0":
        return f"{DISABLE}=0 is set"
    try:
        cuda = peer_child.Cuda(LIBRARY)
        count = cuda.number("cuDeviceGetCount")
        ordinals = [int(name.removeprefix("CUDA")) % count for name in (a, b)]
        if ordinals[0] == ordinals[1]:  # ggml can present one GPU as several
            return ""
        here = [cuda.device(ordinal) for ordinal in ordinals]
        boot = ""
        with suppress(OSError, ValueError):
            boot = BOOT.read_text("utf-8").strip()
        about = " ".join((boot, str(cuda.number("cuDriverGetVersion")), *sorted(map(cuda.uuid, here))))
        path = cache_folder() / f"peer-{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
        result = _test(ordinals, path)
        if result == peer_child.WORKS:
            cuda.enable(*here)
            return ""
        if result == HANGS:
            return f"{_REASONS[HANGS]}; it is tested again after a reboot, or without {path}"
    except (OSError, AttributeError, ValueError) as error:
        return f"the driver call failed ({error})"
    return _REASONS.get(result, result)


def _test(ordinals: Sequence[int], path: Path) -> str:
    """The result of a child process, or how it ended; kept at ``path``."""
    kept = kept_json(path)
    if isinstance(kept, dict) and kept.get("found") in (peer_child.WORKS, *_REASONS):
        return kept["found"]
    command = [sys.executable, "-I", peer_child.__file__, LIBRARY, *map(str, ordinals), str(LIMIT_S + 2 * END_S)]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return f"no test process can be started ({error})"
    try:
        result, errors = (what.strip() for what in child.communicate(timeout=LIMIT_S))
    except subprocess.TimeoutExpired:  # kept, so that the next start does not wait again
        result, errors = HANGS, ""
    finally:
        _end(child)
    if result not in (peer_child.WORKS, *_REASONS):
        lines = errors.splitlines() or [f"it ended with {child.returncode}"]
        return f"the test process failed ({lines[-1]})"
    keep_json(path, {"found": result})
    return result


def _end(child: subprocess.Popen) -> None:
    """Kills a running process; one that hangs in the driver is abandoned."""
    if child.poll() is None:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=END_S)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
