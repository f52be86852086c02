"""The llama.cpp patch set: contents, applicability, application.

The patches are made for the tree in the sdist of llama-cpp-python `pin.LLAMA_CPP_PYTHON`, and each needs those before it in ``series``. git applies them
to a copy; the tree changes only if all of them fit.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import PatchError
from .pin import LLAMA_CPP_PYTHON

MADE_FOR = f"llama.cpp 0c1e57098 with ggml 0.25.3, the tree in the sdist of llama-cpp-python {LLAMA_CPP_PYTHON}"
SDIST = f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
VENDORED = f"llama_cpp_python-{LLAMA_CPP_PYTHON}/vendor/llama.cpp"


@dataclass(frozen=True)
class Patch:
    """Attributes:
    path: the file; its name starts with its number.
    title: first line of its header.
    files: what it changes, relative to the tree's root.
    """

    path: Path
    title: str
    files: tuple[str, ...]


def patches_dir() -> Path:
    """The folder with ``series``, in the package or in the repository. Raises PatchError without one."""
    package = Path(__file__).parent
    for folder in (package / "patches", package.parent / "patches"):
        if (folder / "series").is_file():
            return folder
    raise PatchError(f"there is no patches/series in {package} or its parent; install pyggml_spec again, or run from its repository")


def series(folder: Path | None = None) -> list[Patch]:
    """The patches in order. Raises PatchError for a missing or invalid file."""
    folder = folder or patches_dir()
    names = [line.strip() for line in (folder / "series").read_text().splitlines()]
    found = []
    for name in (name for name in names if name and not name.startswith("#")):
        path = folder / name
        if not path.is_file():
            raise PatchError(f"{folder / 'series'} names {name}, which is not there")
        text = path.read_text()
        files = tuple(dict.fromkeys(re.findall(r"^diff --git a/\S+ b/(\S+)$", text, re.MULTILINE)))
        if not files:
            raise PatchError(f"{path} changes no file; is it a patch in git's format?")
        found.append(Patch(path, text.splitlines()[0], files))
    return found


def ggml_version(tree: Path) -> str:
    """Version of ggml in a llama.cpp tree. Raises PatchError for another tree."""
    file = tree / "ggml" / "CMakeLists.txt"
    if not (tree / "src" / "llama-context.cpp").is_file() or not file.is_file():
        wanted = "src/llama-context.cpp and ggml/CMakeLists.txt expected"
        raise PatchError(f"{tree} is no llama.cpp source tree ({wanted}); the patches are for {MADE_FOR}")
    parts = re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\d+)\)", file.read_text(errors="replace"))
    return ".".join(parts) or "of an unknown version"


def _git_apply(tree: Path, patches: list[Patch], *options: str) -> subprocess.CompletedProcess:
    if not shutil.which("git"):
        raise PatchError("git is not installed, and it is git that applies the patches; install git")
    command = ["git", "apply", "--whitespace=nowarn", *options, *(str(patch.path.resolve()) for patch in patches)]
    # inside another repository git would silently skip all files
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent), "LC_ALL": "C"}
    return subprocess.run(command, check=False, cwd=tree, env=alone, capture_output=True, text=True)


@contextmanager
def _scratch(tree: Path, patches: list[Patch]) -> Iterator[Path]:
    """A copy of the patched files. git checks several patches of one file only by applying them in order."""
    with tempfile.TemporaryDirectory(prefix="pyspec-patches-") as folder:
        copy = Path(folder) / "llama.cpp"
        copy.mkdir()
        for name in {name for patch in patches for name in patch.files if (tree / name).is_file()}:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
        yield copy


def n_applied(tree: Path, patches: list[Patch] | None = None) -> int:
    """Number of patches, from the start of the series, that the tree has."""
    patches = series() if patches is None else patches
    with _scratch(tree, patches) as whole:
        for n in range(len(patches), 0, -1):
            if _git_apply(whole, patches[n - 1 : n], "--reverse", "--check").returncode == 0:
                with _scratch(whole, patches) as copy:
                    if _git_apply(copy, patches[n - 1 :: -1], "--reverse").returncode == 0:
                        return n
    return 0


def _apply_to(copy: Path, tree: Path, applied: int, left: list[Patch]) -> None:
    for patch in left:
        done = _git_apply(copy, [patch])
        if done.returncode:
            hunks = re.findall(r"^error: patch failed: (\S+:\d+)$", done.stderr, re.MULTILINE)
            said = done.stderr.strip().removeprefix("error: ") or f"git ended with {done.returncode}"
            where = f"hunk at {', '.join(hunks)}" if hunks else said
            have = f", which has the first {applied} of the series" if applied else ""
            versions = f"It was made for {MADE_FOR}; this tree has ggml {ggml_version(tree)}"
            raise PatchError(f"{patch.path.name} does not fit {tree}{have}: {where}. {versions}")


def check(tree: str | Path, patches: list[Patch] | None = None) -> list[Patch]:
    """Dry run of ``apply``: the patches that are missing and fit."""
    return apply(tree, patches, write=False)


def apply(tree: str | Path, patches: list[Patch] | None = None, write: bool = True) -> list[Patch]:
    """Applies the missing patches, or none; returns them in order.

    Args:
        tree: root of a llama.cpp source tree, possibly with the first patches applied.
        patches: the series; None for the package's.

    Raises:
        PatchError: no llama.cpp tree, or a patch that does not fit, with its hunk; the tree is unchanged.
    """
    tree, patches = Path(tree), series() if patches is None else patches
    ggml_version(tree)
    applied = n_applied(tree, patches)
    left = patches[applied:]
    with _scratch(tree, left) as copy:
        _apply_to(copy, tree, applied, left)
        for name in dict.fromkeys(name for patch in left for name in patch.files) if write else ():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if (copy / name).is_file():
                shutil.copyfile(copy / name, tree / name)
            else:
                (tree / name).unlink(missing_ok=True)
    return left


def fetch_sdist(folder: Path) -> Path:
    """The sdist with the tree, downloaded once into ``folder`` by pip. Raises PatchError."""
    sdist = folder / SDIST
    if not sdist.is_file():
        folder.mkdir(0o700, parents=True, exist_ok=True)
        # pip builds an sdist's metadata before it keeps it, with this environment's build tools if it has them
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
        if importlib.util.find_spec("scikit_build_core"):
            command.append("--no-build-isolation")
        command += ["--dest", str(folder), f"llama-cpp-python=={LLAMA_CPP_PYTHON}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode or not sdist.is_file():
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            failure = f"pip could not download the source of llama-cpp-python {LLAMA_CPP_PYTHON} ({said})"
            raise PatchError(f"{failure}; put {SDIST} into {folder}, or pass a tree")
    return sdist


def unpack(sdist: Path, folder: Path, only: Callable[[str], bool] | None = None) -> Path:
    """Unpacks the sdist into ``folder`` and returns the llama.cpp tree; ``only`` selects files by path in the tree. Raises PatchError: the
    sdist is damaged, or another one."""
    try:
        with tarfile.open(sdist) as archive:
            for member in archive:
                if only is None or (member.name.startswith(f"{VENDORED}/") and only(member.name.removeprefix(f"{VENDORED}/"))):
                    archive.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise PatchError(f"{sdist} cannot be unpacked ({error}); delete it and try again") from None
    tree = folder / VENDORED
    if not tree.is_dir():
        raise PatchError(f"{sdist} holds no {VENDORED}; it is not the sdist of llama-cpp-python {LLAMA_CPP_PYTHON}")
    return tree
