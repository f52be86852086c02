"""Wheels of this package: with llama.cpp's libraries inside, installed where no compiler is."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import wheel_backend

from pyggml_spec import building
from pyggml_spec.pin import installed_libraries

ROOT = Path(__file__).resolve().parents[1]
OURS = ("llama_cpp", "pyggml_spec", "_pyggml_spec", "__editable__")


def test_each_library_is_bundled_once(tmp_path):
    names = [
        "libggml.so",
        "libggml.so.0",
        "libggml.so.0.25.3",
        "libggml-cpu-haswell.so",
        "libllama.so",
        "libllama.so.0",
        "libggml.dylib",
        "a.txt",
    ]
    for name in names:
        (tmp_path / name).touch()
    found = [path.name for path in wheel_backend.runtime_libraries(tmp_path)]
    assert found == ["libggml-cpu-haswell.so", "libggml.dylib", "libggml.so.0", "libllama.so.0"]


def test_a_bundle_is_replaced_and_recorded(tmp_path):
    libraries, info = tmp_path / "pyggml_spec" / "libs", tmp_path / "pyggml_spec-1.dist-info"
    other = tmp_path / "llama_cpp_python-0.1.dist-info"
    for folder in (libraries, info, other):
        folder.mkdir(parents=True)
    (info / "RECORD").write_text("pyggml_spec/libs/libold.so,,\npyggml_spec/api.py,,\n")
    (other / "RECORD").write_text("llama_cpp/lib/libllama.so,,\n")
    (libraries / "libnew.so").touch()
    building.rewrite_record(libraries)
    assert (info / "RECORD").read_text() == "pyggml_spec/api.py,,\npyggml_spec/libs/libnew.so,,\n"
    assert (other / "RECORD").read_text() == "llama_cpp/lib/libllama.so,,\n"


@pytest.mark.slow
def test_a_wheel_runs_without_llama_cpp_python_and_compilers(tmp_path):
    """In a new environment with the dependencies alone; this machine's build of llama-cpp-python is cached by the set-up."""
    if building.build_note(installed_libraries()).get("key") != building.build_key():
        pytest.skip("the installed llama-cpp-python is no build of the set-up, and building one takes minutes")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("pyggml_spec-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = tmp_path / "env" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for path in Path(sysconfig.get_path("purelib")).iterdir():  # dependencies
        if not path.name.startswith(OURS) and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    subprocess.run([*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    env = {"PATH": str(python.parent), "HOME": str(tmp_path), "LANG": os.environ.get("LANG", "C.UTF-8")}
    done = subprocess.run([python.parent / "pyspec", "run", "-n", "8"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "configuration" in done.stderr, done.stderr
    where = "import pyggml_spec.ggml.library, pyggml_spec.pin as p; print(p.installed_libraries())"
    libs = subprocess.run([python, "-c", where], env=env, cwd=tmp_path, capture_output=True, text=True).stdout.strip()
    assert Path(libs) == site / "pyggml_spec" / "libs"
