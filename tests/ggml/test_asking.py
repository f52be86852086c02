"""Whether weights are asked for ahead of use is decided by what products took, of each kind and in each thread by itself."""

import pytest
from ggml.broken_c import run

BUILD = "cpu/asking.c", "asking_clock.c"
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


def test_the_faster_way_is_kept(tmp_path):
    assert run(tmp_path, *BUILD, apart=False) == ""


@pytest.mark.parametrize("what", BROKEN)
def test_what_decides_otherwise_is_noticed(tmp_path, what):
    assert run(tmp_path, *BUILD, *BROKEN[what], apart=False) != ""
