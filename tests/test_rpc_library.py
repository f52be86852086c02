"""The library that workers need is built whole or not at all, and what is missing for it is one sentence."""

import pytest
from click.testing import CliRunner
from workers import need_library

from pyggml_spec import rpc_library
from pyggml_spec.cli.build import command
from pyggml_spec.errors import BuildError
from pyggml_spec.folders import build_folder
from pyggml_spec.patching import SDIST


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
    monkeypatch.setenv("CXXFLAGS", "-DRPC_PROTO_MAJOR_VERSION=x -Werror -O0 -fmax-errors=1")
    with pytest.raises(BuildError, match=r"ggml's RPC backend could not be built: .*error: ") as raised:
        rpc_library.build()
    assert raised.value.log and rpc_library.kept() is None and not list(rpc_library.place().parent.iterdir())


def test_it_is_built_once_and_alone():
    need_library()
    path = rpc_library.kept()
    before = path.stat().st_mtime_ns
    done = CliRunner().invoke(command, ["--rpc"])
    assert done.exit_code == 0 and str(path) in done.output and path.stat().st_mtime_ns == before
    for other in (["--cuda"], ["--arch", "90"], ["--no-patches"], ["--out", "x"]):
        done = CliRunner().invoke(command, ["--rpc", *other])
        assert done.exit_code == 2 and "give it alone" in done.output


def test_its_patch_changes_nothing_else():
    """It is built from a tree that has no other patch."""
    files = {name for patch in rpc_library.rpc_patches() for name in patch.files}
    assert files and all(name.startswith(rpc_library.FOLDER) or name == "ggml/include/ggml-rpc.h" for name in files)
