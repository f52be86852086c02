"""Whether weights are asked for ahead of use is decided by what products took, of each kind and in each thread by itself."""

import subprocess
from pathlib import Path

import pytest
from ggml.test_levels import headers

ROOT = Path(__file__).parents[2]
ASKING = ROOT / "csrc" / "cpu" / "asking.c"
BROKEN = {
    "the slower way": ("t->took[1][TRIALS / 2] < t->took[0][TRIALS / 2]", "t->took[1][TRIALS / 2] > t->took[0][TRIALS / 2]"),
    "the fastest product": ("t->took[1][TRIALS / 2] <", "t->took[1][0] <"),
    "the first products as well": ("#define SKIPPED 64", "#define SKIPPED 0"),
    "one way twice": ("__builtin_parity((unsigned) t->seen) != 0", "t->seen % 4 < 2"),
    "a thread without a share": (" || bytes == 0", ""),
    "rows alike": ("rows <= 8 ? 3", "rows <= 7 ? 3"),
    "types alike": ("case GGML_TYPE_Q5_K: return 4", "case GGML_TYPE_Q5_K: return 3"),
    "one of all threads": ("static _Thread_local trial", "static trial"),
}


def run(folder: Path, *broken: str) -> str:
    source = ASKING.read_text()
    if broken:
        assert source.count(broken[0]) == 1
        source = source.replace(*broken)
    (folder / "cpu").mkdir()
    (folder / "cpu" / "asking.c").write_text(source)
    program, includes = folder / "asking", ["-I", folder, "-I", ROOT / "csrc" / "cpu", "-I", headers()]
    parts = ["-std=gnu11", "-O1", *includes, Path(__file__).with_name("asking_clock.c"), "-pthread", "-o", program]
    subprocess.run(list(map(str, ["cc", *parts])), check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == bool(done.stdout)
    return done.stdout


def test_the_faster_way_is_kept(tmp_path):
    assert run(tmp_path) == ""


@pytest.mark.parametrize("what", BROKEN)
def test_what_decides_otherwise_is_noticed(tmp_path, what):
    assert run(tmp_path, *BROKEN[what]) != ""
