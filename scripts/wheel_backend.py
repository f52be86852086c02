"""The build backend (PEP 517): scikit-build-core's, with the libraries of llama.cpp inside each wheel, so that it needs no compiler where it is installed.

    pip install .                            for this machine's processor
    pip wheel . -C portable=true             for every x86-64 processor: ggml chooses among its CPU libraries at run time
    pip wheel . -C portable=true -C cuda=90  for NVIDIA GPUs too, with the patches; several: -C "cuda=80;90"

llama-cpp-python is built once per recipe, compiler and processor, and cached (`pyggml_spec.building`). Editable installs use that of the environment.
"""

import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from scikit_build_core import build as core
from set_up import wheel_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pyggml_spec import building  # noqa: E402
from pyggml_spec.errors import BuildError  # noqa: E402
from pyggml_spec.pin import LLAMA_CPP_PYTHON, installed_libraries  # noqa: E402

Settings = dict[str, Any] | None
build_sdist = core.build_sdist
get_requires_for_build_sdist = core.get_requires_for_build_sdist


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*core.get_requires_for_build_wheel(core_settings(config_settings)), "pip", "ninja"]  # pip: uv's environments have none


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*core.get_requires_for_build_editable(config_settings), f"llama-cpp-python=={LLAMA_CPP_PYTHON}"]


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    settings = {**core_settings(config_settings), "cmake.define.PGS_BUNDLE": ""}  # a wheel's, in the same build folder
    return core.build_editable(wheel_directory, settings, metadata_directory)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return core.prepare_metadata_for_build_wheel(metadata_directory, core_settings(config_settings))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    settings = config_settings or {}
    with tempfile.TemporaryDirectory(prefix="pyspec-wheel-") as folder:
        bundle = Path(folder) / "libs"
        bundle.mkdir()
        try:
            plan = building.plan("cuda" in settings, settings.get("cuda"), "cuda" in settings, portable=settings.get("portable") == "true")
            libraries = libraries_of(plan, Path(folder) / "site")
        except BuildError as error:
            sys.exit("\n".join([*error.log, f"error: {error}"]))
        for library in runtime_libraries(libraries):
            shutil.copy(library, bundle)
        building.write_note(bundle, plan.note)
        return core.build_wheel(
            wheel_directory, {**core_settings(settings), "cmake.define.PGS_BUNDLE": bundle.as_posix()}, metadata_directory
        )


def libraries_of(plan: building.Plan, site: Path) -> Path:
    """The library folder of this build: the installed one, or that of its wheel, unpacked into ``site``, where csrc/find_llama_cpp.py will find it."""
    installed = installed_libraries()
    if installed is not None and building.build_note(installed).get("key") == plan.key:
        return installed
    for name in ("_PYPROJECT_HOOKS_BACKEND_PATH", "PEP517_BACKEND_PATH"):  # a pip inside would look for llama-cpp-python's backend here
        os.environ.pop(name, None)
    with zipfile.ZipFile(wheel_of(plan)) as archive:
        archive.extractall(site)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return site / "llama_cpp" / "lib"


def core_settings(settings: Settings) -> dict[str, Any]:
    """The settings that are scikit-build-core's."""
    return {name: value for name, value in (settings or {}).items() if name not in ("portable", "cuda")}


def runtime_libraries(folder: Path) -> list[Path]:
    """Each library once: a wheel of llama-cpp-python has libggml.so, libggml.so.0 and libggml.so.0.25.3, and programs load the second."""
    numbered = {path.name.partition(".so.")[0]: path for path in folder.iterdir() if re.search(r"\.so\.\d+$", path.name)}
    others = [
        path for path in folder.iterdir() if path.suffix in (".so", ".dylib", ".dll") and path.name.partition(".so")[0] not in numbered
    ]
    return sorted([*numbered.values(), *others])
