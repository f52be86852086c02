"""What the doctor says of trees: the shares that a scripted drafter was given, and the ranks of a real one."""

from contextlib import closing

import numpy as np
import pytest

import pyggml_spec as ps
from pyggml_spec.doctor import trees
from pyggml_spec.doctor.probe import BEST, Measured, Probe, Reading, ranks_of, write_passages
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET

COSTS = {1: 10.0, 2: 11.0, 4: 12.0, 8: 14.0, 16: 18.0}


def scripted(second, next_right, blocks=400, drafts=15, seed=1):
    """A drafter whose third draft is always wrong: the target's token is its second choice there in this share of the blocks, and the draft
    after it is right in that share."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(100, 200, 20 * blocks + 40)
    anchors = np.arange(blocks) * 20
    best = rng.integers(1000, 2000, (blocks, drafts, BEST))
    for b, anchor in enumerate(anchors):
        best[b, :, 0] = tokens[anchor + 1 : anchor + 1 + drafts]
        best[b, 2, 0] = 7
        if b < second * blocks:
            best[b, 2, 1] = tokens[anchor + 3]
        if b % 10 >= 10 * next_right:
            best[b, 3, 0] = 8
    ranks, right = ranks_of(best, best[:, :, 0], tokens, anchors)
    return Measured(np.full(blocks, 2, np.int32), best[:, :, 0].ravel(), np.empty((0, 0)), True, ranks, right)


@pytest.mark.parametrize("second, next_right", [(0.4, 0.2), (0.75, 0.5), (0.0, 0.3)])
def test_the_shares_are_those_of_the_drafter(second, next_right):
    check = trees.check(scripted(second, next_right), COSTS)
    assert check.data["rank_shares"]["2"] == pytest.approx(second) and check.data["among_best"] == pytest.approx(second)
    assert check.data["right_behind_sibling"] == pytest.approx(next_right if second else 0.0, abs=0.01)
    assert check.data["tokens_of_path"] == 3.0 and check.data["tokens_of_tree"] == pytest.approx(3.0 + second)  # a sibling is one leaf
    assert check.data["tree_ms"] == 18.0 + 0.5 * 16 and check.data["best_width"] == 4
    assert check.data["speed_of_tree"] == pytest.approx((3.0 + second) / 26.0 / (3.0 / 12.0))
    assert f"second choice in {100 * second:.0f} % of 400 blocks" in check.found


def test_siblings_fill_the_rows_that_the_path_leaves():
    assert sum(trees.leaves(15)) == 16 and trees.leaves(15)[:2] == [2, 1] and trees.leaves(3) == [BEST - 1] * 3


def test_without_a_wrong_draft_there_is_nothing_to_say():
    nothing = Measured(np.array([3]), np.empty(0, np.int32), np.empty((0, 0)), True, np.array([-1]), np.array([-1]))
    assert trees.check(nothing, COSTS).verdict == "n/a"
    assert trees.check(Measured(np.array([3]), np.empty(0, np.int32), np.empty((0, 0)), True), COSTS).verdict == "n/a"  # a chain's


def test_the_embedded_pair_has_second_choices():
    with ps.load(DEMO_TARGET, DEMO_DRAFTER, device="CPU", threads=1, n_ctx=512, draft_width=16) as session:
        ids = session.tokenizer.encode("class Stack:\n    def __init__(self):\n")
        passage = write_passages(session.engine, [ids], session.drafter.hp.target_layers, 80)[0]
        with closing(Probe(session.backend, session.target, session.drafter, [passage], blocks=12)) as probe:
            plain, ranked = (probe.measure(Reading(session.drafter.hp, ranked=ranked)) for ranked in (False, True))
    assert not plain.ranks.size and (ranked.matched == plain.matched).all() and len(ranked.ranks) == len(ranked.matched)
    assert not (ranked.ranks == 1).any()  # the best choice is the draft, and that was wrong
    assert (ranked.ranks >= 2).any()
