"""How far ahead of use weights are asked for is decided by what products took, of each kind and in each thread by itself."""

import pytest
from ggml.broken_c import run

BUILD = "cpu/prefetch_tune.c", "prefetch_clock.c"
BROKEN = {
    "a slower way": ("[TRIALS / 2] < t->took[t->best]", "[TRIALS / 2] > t->took[t->best]"),
    "the fastest product": ("t->took[way][TRIALS / 2] <", "t->took[way][0] <"),
    "the first products as well": ("#define SKIPPED 63", "#define SKIPPED 0"),
    "one way twice": ("return sum % WAYS", "return seen / 2 % WAYS"),
    "a thread without a share": (" || bytes == 0", ""),
    "rows alike": ("rows <= 8 ? 3", "rows <= 7 ? 3"),
    "types alike": ("case GGML_TYPE_Q5_K: return 4", "case GGML_TYPE_Q5_K: return 3"),
    "one of all threads": ("static _Thread_local trial", "static trial"),
    "another distance": ("AHEAD[t->best], 0", "AHEAD[0], 0"),
}


def test_the_faster_way_is_kept(tmp_path):
    assert run(tmp_path, *BUILD, apart=False) == ""


@pytest.mark.parametrize("what", BROKEN)
def test_what_decides_otherwise_is_noticed(tmp_path, what):
    assert run(tmp_path, *BUILD, *BROKEN[what], apart=False) != ""
