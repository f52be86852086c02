"""Files that replace others whole: no error and no signal leaves a part of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli.process import environment, one_sentence, pyspec
from sessions import fails_with
from test_pages import GUIDE, PAGES, arguments, blocks, commands

from pyggml_spec import building, rpc_library
from pyggml_spec.errors import BuildError, PyspecError
from pyggml_spec.files import replacing
from pyggml_spec.folders import build_folder, cache_folder, why_nothing_is_kept
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.convert import written_whole

WRITERS = {"replacing": replacing, "written_whole": lambda path: written_whole(path, replace=True)}


@pytest.mark.parametrize("writer", WRITERS)
def test_ctrl_c_as_the_file_is_created(writer, tmp_path, monkeypatch):
    """It had been created before the block that removes it began."""
    create = os.open

    def interrupted(*args, **options):
        os.close(create(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), WRITERS[writer](tmp_path / "out"):
        pytest.fail("the block began")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_an_error_in_the_block_keeps_the_old_file(writer, error, tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(Exception if error is not KeyboardInterrupt else error), WRITERS[writer](tmp_path / "out"):
        raise error("in the block")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "old"


CPU = ["--device", "CPU", "-t", "1", "-c", "64", "-p", "a", "-n", "1"]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757, 0o722])
@pytest.mark.parametrize("variable", ["PYSPEC_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_that_others_can_write_is_refused(tmp_path, monkeypatch, variable, mode):
    """Costs, hashes of model files and findings of the probe in it were believed from any writer."""
    monkeypatch.delenv("PYSPEC_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = tmp_path if variable == "PYSPEC_CACHE" else tmp_path / "pyspec"
    assert cache_folder() == folder
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    fails_with(PyspecError, f"can be written by others; .*PYSPEC_CACHE.*chmod go-w {folder}", cache_folder)
    folder.chmod(0o755)
    assert cache_folder() == folder


def test_a_cache_that_is_no_folder_keeps_nothing(monkeypatch):
    """PYSPEC_CACHE=/dev/null was refused with advice to change the mode of the device."""
    monkeypatch.setenv("PYSPEC_CACHE", "/dev/null")
    assert cache_folder() == Path("/dev/null") and "keep" in why_nothing_is_kept()


def test_a_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    fails_with(PyspecError, "belongs to the user", cache_folder)


def test_the_command_says_so_in_one_sentence(tmp_path):
    tmp_path.chmod(0o777)
    one_sentence(pyspec("run", *CPU, env={"PYSPEC_CACHE": str(tmp_path)}), str(tmp_path), "can be written by others", "PYSPEC_CACHE")


@pytest.mark.parametrize("place", ["", "wheels", "wheels/key", "wheels/key/llama_cpp_python-1.whl"])
def test_a_wheel_that_others_could_have_built_is_not_installed(tmp_path, monkeypatch, place):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = tmp_path / "pyggml_spec" / "wheels" / "key" / "llama_cpp_python-1.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_text("")
    assert building.kept_wheel("key") == wheel and building.kept_wheel("other") is None
    (tmp_path / "pyggml_spec" / place).chmod(0o777)
    fails_with(BuildError, r"can be written by others; .*XDG_CACHE_HOME.*chmod -R go-w", building.kept_wheel, "key")


@pytest.mark.parametrize("place", ["..", ".", "libggml-rpc.so"])
def test_a_backend_that_others_could_have_built_is_not_loaded(tmp_path, monkeypatch, place):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = rpc_library.place()
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert rpc_library.kept() == path
    (path.parent / place).chmod(0o777)
    fails_with(BuildError, "can be written by others", rpc_library.kept)


def test_what_is_built_is_private_whatever_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def builds(command, *_):
        (part,) = (command[i + 1] for i, word in enumerate(command) if word == "--wheel-dir")
        open(os.path.join(part, "llama_cpp_python-1.whl"), "w").close()

    monkeypatch.setattr(building, "run", builds)
    before = os.umask(0)
    try:
        wheel = building.build_wheel("key")
    finally:
        os.umask(before)
    assert building.kept_wheel("key") == wheel and build_folder().stat().st_mode & 0o777 == 0o700


ELSEWHERE = (
    "bench", "build", "doctor", "convert", "experts", "compare --weights",
)  # take long or need files of their own; run in tests/cli  # fmt: skip


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with the files that the guide names, and an environment in which one core is seen: threads that wait for each other are slow."""
    folder = tmp_path_factory.mktemp("desk")
    for name, path in (("target.gguf", DEMO_TARGET), ("drafter.gguf", DEMO_DRAFTER)):
        (folder / name).symlink_to(path)
    (folder / "prompt.txt").write_text("import os\n\n\ndef walk(path):\n" * 20)
    return folder


@pytest.fixture(scope="module")
def picture_desk(tmp_path_factory):
    """A folder with a target that sees images and hears."""
    from vision.families import file_of, wav, write_family

    folder = tmp_path_factory.mktemp("pictures")
    target, encoder = write_family(folder, "gemma4")
    target.rename(folder / "target.gguf")
    encoder.rename(folder / "mmproj.gguf")
    (folder / "photo.png").write_bytes(file_of((96, 64)))
    (folder / "question.wav").write_bytes(wav())
    return folder


def _one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def in_desk(folder: Path, command, **more) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, input="def f(x):\n", env=environment(PATH=path),
        preexec_fn=_one_core, **more
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for line in commands(GUIDE) if "model.gguf" not in line and not " ".join(arguments(line)).startswith(ELSEWHERE)]
)
def test_the_guides_commands_run(desk, line):
    if line == f"pyspec {' '.join(arguments(line))}":  # nothing that a shell would have to do
        done = pyspec(*arguments(line), stdin=b"def f(x):\n", cwd=desk, one_core=True)
    else:
        done = in_desk(desk, line, shell=True)
    refused = "--require-spec" in line and done.returncode == 3  # a machine on which drafting does not pay
    assert (done.returncode == 0 or refused) and "Traceback" not in done.stderr, done.stderr
    written = re.search(r"> (\S+)$", line)
    assert done.stdout.strip() or (desk / written[1]).read_text().strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_code_of_the_pages_runs(request, page):
    """Each block by itself, as a user would paste it: in a process that has imported nothing yet."""
    desk = request.getfixturevalue("picture_desk" if page.name == "images.md" else "desk")
    for code in blocks(page, "python"):
        done = in_desk(desk, [sys.executable, "-c", code])
        assert done.returncode == 0 and not done.stderr, done.stderr
