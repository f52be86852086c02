"""Building llama-cpp-python and putting it into place: from a tiny source with its shape, by the real pip, CMake and compiler."""

import os
import runpy
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import run_sanitized_tests as sanitized
from click.testing import CliRunner
from sessions import fails_with
from workers import need_library

from pyggml_spec import building, rpc_library
from pyggml_spec.cli.build import command
from pyggml_spec.errors import BuildError
from pyggml_spec.folders import build_folder
from pyggml_spec.patching import SDIST
from pyggml_spec.pin import LLAMA_CPP_PYTHON, RECIPE

pytestmark = pytest.mark.slow
PROJECT = f"""
[build-system]
requires = ["scikit-build-core"]
build-backend = "scikit_build_core.build"
[project]
name = "llama_cpp_python"
version = "{LLAMA_CPP_PYTHON}"
[tool.scikit-build]
wheel.packages = ["llama_cpp"]
wheel.py-api = "py3"
"""
CMAKE = """
cmake_minimum_required(VERSION 3.21)
project(llama_cpp C CXX)
option(LLAMA_BUILD_TOOLS "" ON)
option(MTMD_VIDEO "" ON)
set(LLAMA_BUILD_COMMON ON CACHE BOOL "" FORCE)
option(LLAMA_OPENSSL "" ON)
if(LLAMA_BUILD_TOOLS OR MTMD_VIDEO OR LLAMA_BUILD_COMMON OR LLAMA_OPENSSL)
    message(FATAL_ERROR "error: built more than is loaded")
endif()
add_library(llama SHARED llama.c fix.cpp)
install(TARGETS llama DESTINATION llama_cpp/lib)
"""
FIX = "#include <cstdio>\n"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CMAKE_ARGS", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    (folder / "llama_cpp").mkdir(parents=True)
    files = {"pyproject.toml": PROJECT, "CMakeLists.txt": CMAKE, "llama.c": "void llama_backend_init(void) {}\n", "fix.cpp": FIX}
    for name, text in {**files, "llama_cpp/__init__.py": ""}.items():
        (folder / name).write_text(text)
    return folder


def test_a_build_shows_its_steps_and_keeps_its_wheel(cache, source):
    """The recipe reaches the build of llama-cpp-python, leaves out what is never loaded, and the wheel is found again."""
    steps, key = [], building.build_key()
    assert building.kept_wheel(key) is None
    wheel = building.build_wheel(key, source=source, progress=lambda done, total: steps.append((done, total)))
    assert building.kept_wheel(key) == wheel and cache in wheel.parents
    assert steps[0] == (0, 0) and steps[-1][0] == steps[-1][1] >= 3
    assert "llama_cpp/lib/libllama.so" in zipfile.ZipFile(wheel).namelist() or sys.platform != "linux"


def test_builds_that_fail(cache, source):
    (source / "llama.c").write_text('#error "no such luck"\n')
    with pytest.raises(BuildError, match="llama-cpp-python could not be built: .*no such luck") as caught:
        building.build_wheel(building.build_key(), source=source)
    assert any("no such luck" in line for line in caught.value.log) and building.kept_wheel(building.build_key()) is None
    assert not list((cache / "pyggml_spec" / "wheels").glob("building-*"))
    lines = ["-- Found", "  CMake Error at ggml-cuda/CMakeLists.txt:178 (target_link_libraries):", '    Target "ggml-cuda" links to:', "", "      CUDA::cublas", "",
             "    but the target was not found.  Possible reasons include:", "ERROR: Failed to build"]  # fmt: skip
    assert building.failure_reason(lines).endswith(
        'Target "ggml-cuda" links to: CUDA::cublas but the target was not found.  Possible reasons include:'
    )
    assert building.failure_reason(["x.cu(3): error: identifier is undefined", "error: subprocess-exited-with-error"]).startswith("x.cu(3)")
    assert building.failure_reason(["ERROR: No matching distribution", "more"]) == "ERROR: No matching distribution"
    assert building.failure_reason(["fine"]) == ""


def test_names_of_builds_and_of_unnamed_processors(cache, monkeypatch, tmp_path):
    # pip's name is the version alone: it gave a wheel without the compiler's fix to machines that need it, and those of other processors.
    keys = [building.build_key(*more) for more in ((), (["-DGGML_CUDA=ON"],), ([], [b"a patch"]), ([], [b"another"]))]
    monkeypatch.setenv("CXXFLAGS", "-O2")
    keys.append(building.build_key())
    recipe = tmp_path / "recipe.cmake"
    recipe.write_text(RECIPE.read_text() + "\n")
    monkeypatch.setattr(building, "RECIPE", recipe)
    keys.append(building.build_key())
    assert len(set(keys)) == len(keys) and building.build_key() == keys[-1]
    monkeypatch.setenv("CUDACXX", "/nothing/nvcc")
    done = CliRunner().invoke(command, ["--cuda", "--out", str(cache)])
    assert isinstance(done.exception, BuildError) and "no CUDA compiler /nothing/nvcc" in str(done.exception)
    # Without macros, all compilers and processors had one name for their wheels.
    keys = []
    for version, flags in (("one 1.0", "avx"), ("one 2.0", "avx"), ("one 2.0", "avx avx512")):
        compiler = tmp_path / "compiler"
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexit 1\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setattr(building, "_processor", lambda flags=flags: [flags])
        keys.append(building.build_key())
    assert len(set(keys)) == len(keys)


def test_damaged_wheels_and_killed_builds(tmp_path):
    """A kept wheel on a disk that lost a part of it ended every set-up with a traceback."""
    wheel = tmp_path / "llama_cpp_python-x.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llama_cpp/lib/libllama.so", os.urandom(1000))
    whole = wheel.read_bytes()
    for data in (whole[:500], whole[:200] + bytes(100) + whole[300:], b""):
        wheel.write_bytes(data)
        fails_with(BuildError, "is damaged .*delete it and build again", building.check_wheel, wheel, tmp_path / "out")
    with pytest.raises(BuildError, match="ended with -9"):
        building.run([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"], "failed")
    name, before, after = sanitized.INJECTED
    assert (ROOT / name).read_text().count(before) == 1 and before in after
    assert all((ROOT / test).exists() for test in sanitized.TESTS)


def test_options_and_compilers(monkeypatch):
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=ON")
    assert building.cmake_args("-DX=a b") == f"-DGGML_BLAS=ON -DCMAKE_PROJECT_INCLUDE={RECIPE} '-DX=a b'"
    monkeypatch.setenv("CXX", "/nothing/c++")
    set_up = Path(__file__).parents[1] / "scripts" / "set_up.py"
    code = f"import runpy; s = runpy.run_path({str(set_up)!r}); s['llama_cpp_python']()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "BuildError: there is no C++ compiler /nothing/c++" in done.stderr.splitlines()[-1]
    fails_with(BuildError, r"no C\+\+ compiler /nothing/c\+\+; install one", building.plan)


def test_an_interrupted_build_leaves_no_compilers(tmp_path):
    """Ctrl-C is for this process; what it started has a session of its own."""
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); print('[1/2] one', flush=True); time.sleep(60)"

    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        building.run([sys.executable, "-c", script], "failed", progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.fixture
def site(tmp_path) -> Path:
    """The libraries of an environment with an older build."""
    folder = tmp_path / "site-packages"
    (folder / "llama_cpp" / "lib").mkdir(parents=True)
    (folder / "llama_cpp" / "lib" / "libllama.so").write_text("old")
    (folder / "llama_cpp" / "lib" / "libmtmd.so").write_text("old")
    info = folder / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("llama_cpp/__init__.py,,\nllama_cpp/lib/libllama.so,sha256=x,3\nllama_cpp/lib/libmtmd.so,,\n")
    return folder


def wheel_of(tmp_path: Path, code: str) -> Path:
    library, wheel = tmp_path / "libllama.so", tmp_path / f"llama_cpp_python-{LLAMA_CPP_PYTHON}-py3-none-any.whl"
    (tmp_path / "new.c").write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "new.c"), "-o", str(library)], check=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, "llama_cpp/lib/libllama.so")
        archive.writestr("llama_cpp/__init__.py", "")
    return wheel


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".installing"}


GOOD = "void llama_backend_init(void) {}"


def test_installations_are_exchanged_whole(site, tmp_path):
    libraries = site / "llama_cpp" / "lib"
    building.install(wheel_of(tmp_path, GOOD), libraries, {"key": "k", "cuda": True})
    assert {path.name for path in libraries.iterdir()} == {"libllama.so", building.NOTE}  # what the new build has not is gone
    assert building.build_note(libraries) == {"key": "k", "cuda": True}
    record = next(site.glob("*.dist-info/RECORD")).read_text()
    assert "libllama.so,," in record and "libmtmd" not in record and "llama_cpp/__init__.py" in record and building.NOTE in record
    assert {path.name for path in libraries.parent.iterdir()} == {"lib", ".installing"}
    libraries, wheel = site / "llama_cpp" / "lib", wheel_of(tmp_path, GOOD)
    (libraries.parent / ".new-killed").mkdir()
    with building.exclusive(libraries.parent):
        assert not (libraries.parent / ".new-killed").exists()
        fails_with(BuildError, "another process is installing", building.install, wheel, libraries, {})


@pytest.mark.parametrize("code", ["void llama_backend_init(void) { __builtin_trap(); }", "void something_else(void) {}"])
def test_what_does_not_start_is_not_installed(site, tmp_path, code):
    """A wheel of another machine, or one that was built wrong."""
    wheel, before = wheel_of(tmp_path, code), contents(site)
    fails_with(BuildError, "does not start here.*left as it was", building.install, wheel, site / "llama_cpp" / "lib", {})
    assert contents(site) == before


@pytest.mark.parametrize("where", ["check_wheel", "exchange"])
def test_an_interrupted_exchange_keeps_the_old_libraries(site, tmp_path, monkeypatch, where):
    wheel, before = wheel_of(tmp_path, GOOD), contents(site)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(building, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        building.install(wheel, site / "llama_cpp" / "lib", {})
    assert contents(site) == before


def test_without_an_exchange_in_one_step_a_failed_second_step_is_undone(site, tmp_path, monkeypatch):
    libraries, new, before = site / "llama_cpp" / "lib", tmp_path / "not there", contents(site)

    class NoExchange:
        def __init__(self, *_, **__):
            pass

    monkeypatch.setattr(building.ctypes, "CDLL", NoExchange)
    with pytest.raises(FileNotFoundError):
        building.exchange(new, libraries)
    assert contents(site) == before
    new.mkdir()
    (new / "x").write_text("new")
    building.exchange(new, libraries)
    assert (libraries / "x").read_text() == "new"


def test_readers_never_see_half_of_the_libraries(site, tmp_path):
    """A library opened at any moment of an exchange is there, old or new."""
    libraries, wheel, seen, stop = site / "llama_cpp" / "lib", wheel_of(tmp_path, GOOD), set(), threading.Event()

    def watch():
        while not stop.is_set():
            seen.add((libraries / "libllama.so").read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(3):
            building.install(wheel, libraries, {})
    finally:
        stop.set()
        watcher.join()
    assert seen == {b"old", (libraries / "libllama.so").read_bytes()}


@pytest.fixture
def nvcc(tmp_path, monkeypatch) -> Path:
    """A compiler that only says its version."""
    path = tmp_path / "cuda" / "nvcc"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n")
    path.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(path))
    return path


def test_an_old_driver_is_a_sentence(monkeypatch, nvcc):
    monkeypatch.setattr(building, "driver_version", lambda: (12, 4))
    with pytest.raises(BuildError, match=r"driver knows CUDA 12\.4, and the compiler is CUDA 13\.0.*update the driver"):
        building.plan(cuda=True)
    monkeypatch.setattr(building, "driver_version", lambda: (13, 2))
    building.plan(cuda=True)


def test_the_gpus_of_this_machine_are_named_by_number(monkeypatch, nvcc):
    """A wheel that is kept as "native" would be given to a machine with other GPUs."""
    monkeypatch.setattr(building.ctypes, "CDLL", Driver)
    assert building.driver_version() == (13, 0) and building.gpu_architectures() == ("86", "90")
    for arch in (None, "native"):
        assert "-DCMAKE_CUDA_ARCHITECTURES=86;90" in building.plan(True, arch).options


def test_without_a_driver_only_a_wheel_for_others_is_built(monkeypatch, nvcc):
    """It took half an hour to find out that libcuda.so.1 is missing."""
    monkeypatch.setattr(building, "driver_version", lambda: None)
    done = CliRunner().invoke(command, ["--cuda"])
    assert isinstance(done.exception, BuildError) and "no NVIDIA driver" in str(done.exception) and "--out" in str(done.exception)


def test_architectures_are_named_or_found(monkeypatch, nvcc):
    monkeypatch.setattr(building, "driver_version", lambda: None)
    monkeypatch.setattr(building, "gpu_architectures", lambda: ())
    assert "-DCMAKE_CUDA_ARCHITECTURES=80;90a-real" in building.plan(True, "80;90a-real").options
    assert not [option for option in building.plan(True).options if "ARCHITECTURES" in option]  # those that ggml names
    for wrong in ("hopper", "90;", "-DX=1", "native"):
        with pytest.raises(BuildError, match="no CUDA architecture|no NVIDIA GPU"):
            building.plan(True, wrong)


def test_a_patched_build_is_named_by_its_patches(nvcc, monkeypatch):
    monkeypatch.setattr(building, "driver_version", lambda: None)
    plan = building.plan(cuda=True, patched=True)
    assert plan.key != building.plan(cuda=True).key and "0011-amx-tile-config" in plan.note["patches"]
    assert f"{len(plan.patches)} patches" in plan.description


class Driver:
    """libcuda with two GPUs of compute capability 9.0 and one of 8.6."""

    def __init__(self, name):
        if name != "libcuda.so.1":
            raise OSError(name)

    def cuInit(self, flags):
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 13000
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 3
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = {75: (9, 8, 9), 76: (0, 6, 0)}[attribute][device]
        return 0


def test_the_command_writes_a_wheel_and_installs_nothing(cache, tmp_path, nvcc, monkeypatch):
    monkeypatch.setattr(building, "driver_version", lambda: None)
    monkeypatch.setattr(building, "install", lambda *_: pytest.fail("installed"))
    wheel = wheel_of(tmp_path, GOOD)
    monkeypatch.setattr(building.Plan, "build", lambda self, progress: wheel)
    done = CliRunner().invoke(command, ["--cuda", "--arch", "90", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / wheel.name).read_bytes() == wheel.read_bytes()
    assert CliRunner().invoke(command, ["--arch", "90"]).exit_code == 2


@pytest.mark.parametrize("options, patched", [([], False), (["--cuda"], True), (["--patches"], True), (["--cuda", "--no-patches"], False)])
def test_patches_are_built_in_where_they_are_asked_for_and_with_cuda(monkeypatch, tmp_path, options, patched):
    plans = []
    monkeypatch.setattr(building, "plan", lambda cuda, arch, patched: plans.append((cuda, patched)))
    CliRunner().invoke(command, [*options, "--out", str(tmp_path)])
    assert plans == [("--cuda" in options, patched)]


@pytest.mark.parametrize("note", [{"cuda": True}, {"cuda": False, "patches": ["0011-amx-tile-config"]}])
def test_set_up_keeps_an_explicit_build(monkeypatch, note):
    """A patched build for the CPU was taken away by the first `make` after a change of csrc."""
    set_up = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "set_up.py"))
    monkeypatch.setattr(building, "build_note", lambda libraries: {"key": "another", **note})
    monkeypatch.setattr(building, "kept_wheel", lambda key: Path("a wheel"))
    monkeypatch.setattr(building, "install", lambda *_: pytest.fail("installed"))
    set_up["llama_cpp_python"]()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """With the source alone in it."""
    need_library()
    sdist = build_folder() / SDIST
    if not sdist.is_file():
        rpc_library.build(fresh=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build_folder().mkdir()
    (build_folder() / SDIST).symlink_to(sdist)


def test_without_a_compiler_it_is_not_built(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"there is no C\+\+ compiler no-such-compiler"):
        rpc_library.build()


def test_a_build_that_fails_says_why_and_leaves_nothing(empty_cache, monkeypatch):
    monkeypatch.setenv("CXXFLAGS", "-include /no/such/header")
    with pytest.raises(BuildError, match=r"ggml's RPC backend could not be built: .*error: ") as raised:
        rpc_library.build()
    assert raised.value.log and rpc_library.kept() is None and not list(rpc_library.place().parent.iterdir())


def test_the_rpc_library_is_built_alone():
    need_library()
    path = rpc_library.kept()
    before, done = path.stat().st_mtime_ns, CliRunner().invoke(command, ["--rpc"])
    assert done.exit_code == 0 and str(path) in done.output and path.stat().st_mtime_ns == before
    for other in (["--cuda"], ["--arch", "90"], ["--no-patches"], ["--out", "x"]):
        done = CliRunner().invoke(command, ["--rpc", *other])
        assert done.exit_code == 2 and "give it alone" in done.output
    files = {name for patch in rpc_library.rpc_patches() for name in patch.files}
    assert files and all(name.startswith(rpc_library.FOLDER) or name == "ggml/include/ggml-rpc.h" for name in files)


ROOT = Path(__file__).parents[1]
ALWAYS = ["lint", "test", "test-train", "test-patches"]


@pytest.mark.parametrize("slow, targets", [(None, ALWAYS), ("0", ALWAYS), ("1", [*ALWAYS, "test-sanitized"])])
def test_the_weekly_set_of_ci_has_the_sanitizers(tmp_path, slow, targets):
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$@"\n')
    make.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({"SLOW": slow} if slow is not None else {})
    assert subprocess.run([ROOT / ".ci" / "run"], env=env, check=True, capture_output=True, text=True).stdout.split() == targets
    command = ["make", "-n", "test-sanitized", "-o", ".venv/.ready"]
    planned = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert planned.index("run_sanitized_tests.py --proof") < planned.rindex("run_sanitized_tests.py\n")
