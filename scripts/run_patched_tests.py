#!/usr/bin/env python3
"""Builds the patched llama.cpp for the CPU and runs its tests of patched code; `make test-patches` in CI.

One of them writes a random model of every architecture with every tensor that llama.cpp's loader knows. Those of supported architectures are then
compared with llama.cpp: bit-equal, or refused with the reason in REFUSED.

    run_patched_tests.py [--jobs N]

The build is cached under a hash of its inputs, continued if interrupted, and deleted when the hash changes. Exits with the number of failures.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import build_patched_llamacpp as build

from pyggml_spec import patching as patches
from pyggml_spec.building import compiler_identity
from pyggml_spec.errors import PyspecError
from pyggml_spec.folders import build_folder
from pyggml_spec.models.registry import TARGETS
from pyggml_spec.tools.compare import compare_logits

EQUAL = {  # files that must be equal; others may be refused, for REASONS
    "cohere2-dense", "deepseek32-moe", "glm-dsa-moe", "nemotron_h-dense", "nemotron_h_moe-dense", "llama-dense", "llama-moe", "mistral3-dense", "mistral3-moe", "qwen3-dense", "qwen3moe-moe", "qwen35-dense",
    "qwen35moe-moe",
}  # fmt: skip
NOT_WRITTEN = {"apertus", "gemma3n", "gemma4", "step35"}  # architectures without a file of llama.cpp's test
ROUNDING = 1e-6  # NMSE of the kernels that are the default here, which add in another order; 1e-10 was seen
REASONS = ("which llama.cpp reads and does not apply to {arch} models", "has routed experts, which {arch} models here do not")


def key() -> str:
    """Hash of sources, build script, compiler and processor."""
    parts = [patches.SDIST.encode(), Path(build.__file__).read_bytes(), *(patch.path.read_bytes() for patch in patches.series())]
    parts.append(compiler_identity())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def built(cache: Path, jobs: int) -> Path:
    """The folder of the tools, which are built if they are not there yet. The caller holds the cache's lock."""
    folder = cache / f"patched-{key()}"
    done = folder / "done"
    if not done.exists():
        for other in set(cache.glob("patched-*/")) - {folder}:
            shutil.rmtree(other)
        targets = (
            build.TESTS + build.NEW_TESTS + ["server-context"]
        )  # no test here runs what the patches change of the server: it has to compile
        build.run(
            [
                sys.executable,
                build.__file__,
                "--out",
                str(folder),
                "--sdist",
                str(patches.fetch_sdist(cache)),
                "--jobs",
                str(jobs),
                *targets,
            ]
        )
        done.touch()
        shutil.rmtree(folder / Path(patches.VENDORED).parts[0])  # 200 MB that the tests do not read
    return folder / "build" / "bin"


def compare(models: Path, archs: Iterable[str] = TARGETS) -> int:
    """Compares the logits of the ``models`` of our architectures with llama.cpp's. Returns how many differ, or are missing."""
    found = {path.stem: path for path in models.glob("*.gguf") if path.stem.rsplit("-", 1)[0] in archs}
    there = {name.rsplit("-", 1)[0] for name in found}
    missing = {name for name in EQUAL if name.rsplit("-", 1)[0] in archs and name not in found} | (set(archs) - there - NOT_WRITTEN)
    for name in sorted(missing):
        print(f"FAILED: logits of {name}, there is no such file", flush=True)
    return len(missing) + sum(not _as_promised(name, path) for name, path in sorted(found.items()))


def _as_promised(name: str, path: Path) -> bool:
    try:
        result = compare_logits(path, device="CPU", threads=1, kernels="ggml")
        native = compare_logits(path, device="CPU", threads=1).nmse
        good = result.max_abs == 0.0 and result.greedy_agree == 1.0 and native < ROUNDING
        text = f"NMSE {result.nmse:g}, largest difference {result.max_abs:g}, {result.greedy_agree:.0%} of the greedy tokens equal; by default NMSE {native:.0e}"
    except PyspecError as error:
        reasons = [reason.format(arch=name.rsplit("-", 1)[0]) for reason in REASONS]
        text, good = f"refused: {error}", name not in EQUAL and any(reason in str(error) for reason in reasons)
    print(f"{'passed' if good else 'FAILED'}: logits of {name}, {text}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    build.find_tools()
    cache = build_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "patched.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another run builds or tests in {cache}; this one waits for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tools = built(cache, args.jobs)
        print(f"tests of the patched tree in {tools}", flush=True)
        failed = build.test(tools)
        failed += compare(tools.parent / "test-runs" / "models")
        shutil.rmtree(tools.parent / "test-runs" / "models")  # 900 MB of random weights
    sys.exit(failed)


if __name__ == "__main__":
    try:
        main()
    except PyspecError as error:
        sys.exit(f"run_patched_tests.py: {error}")
