"""Which slots the chosen experts of a token are called with.

ggml-cuda's wide product over experts reads row numbers that were never written, and ends with an illegal access, if a token uses a slot twice.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyggml_spec.ggml.host_experts import fillers
from pyggml_spec.ggml.library import ffi, lib


def slots(hot: list[int], n_expert: int, chosen: list[int], distinct: bool) -> list[int]:
    where, ids, out = np.full(n_expert, -1, np.int32), np.array(chosen, np.int32), np.empty(len(chosen), np.int32)
    where[hot] = np.arange(len(hot))
    pointers = (ffi.cast("int32_t *", ffi.from_buffer(a)) for a in (where, ids))
    lib.pgs_experts_slots(*pointers, len(chosen), len(hot), distinct, ffi.cast("int32_t *", ffi.from_buffer(out)))
    return out.tolist()


@given(st.data())
def test_no_token_uses_a_slot_twice(data):
    n_expert = data.draw(st.integers(2, 40))
    order = data.draw(st.permutations(range(n_expert)))
    hot = list(order[: data.draw(st.integers(1, n_expert - 1))])
    chosen = list(data.draw(st.permutations(range(n_expert))))[: data.draw(st.integers(1, n_expert))]
    got = slots(hot, n_expert, chosen, True)
    assert len(set(got)) == len(got) and min(got) >= 0 and max(got) < len(hot) + fillers(len(chosen), len(hot))
    assert [hot.index(e) for e in chosen if e in hot] == [s for s, e in zip(got, chosen) if e in hot]


def test_narrow_steps_use_one_slot_for_all_cold_choices():
    assert slots([4, 2], 6, [0, 2, 1, 4], False) == [2, 1, 2, 0]
    assert slots([4, 2], 6, [0, 2, 1, 4], True) == [2, 1, 3, 0]
