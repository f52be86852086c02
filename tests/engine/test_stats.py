"""Statistics: slot 0 is never a draft, the sums add up, and what is written is plain JSON."""

import json

import pytest

from pyggml_spec.engine.stats import Stats


def counted(*blocks: tuple[int, int], prompt_token: bool = True) -> Stats:
    """Statistics after blocks of (width, matched drafts)."""
    stats = Stats(emitted=int(prompt_token))
    for width, matched in blocks:
        stats.add_step(width, matched, width > 1)
    return stats


def test_emitted_is_one_from_the_prompt_and_one_per_step_and_the_accepted_drafts():
    stats = counted((4, 3), (4, 0), (1, 0), (8, 5))
    assert stats.emitted == 1 + stats.steps + stats.matched == 1 + 4 + 8
    assert sum(n * count for n, count in stats.block_sizes.items()) == stats.emitted - 1


def test_the_pending_token_is_neither_drafted_nor_accepted():
    stats = counted((4, 0))
    assert (stats.drafted, stats.matched, stats.tokens_per_step) == (3, 0, 1.0)


def test_plain_steps_draft_nothing():
    stats = counted((1, 0), (1, 0))
    assert (stats.steps, stats.drafted, stats.draft_forwards, stats.tokens_per_step, stats.acceptance) == (2, 0, 0, 1.0, 0.0)


def test_acceptance_by_position_is_per_draft_that_was_offered_there():
    """With changing widths, a late position is offered less often; dividing by steps would make it look worse than it is."""
    stats = counted((3, 2), (3, 1), (5, 4), (2, 0))
    assert stats.offered_at == [4, 3, 1, 1] and stats.matched_at == [3, 2, 1, 1]
    assert stats.matched_per_position == [3 / 4, 2 / 3, 1.0, 1.0]
    assert sum(stats.matched_at) == stats.matched and sum(stats.offered_at) == stats.drafted


def test_widths_and_block_sizes_are_counted():
    stats = counted((4, 3), (4, 3), (1, 0))
    assert stats.widths == {4: 2, 1: 1} and stats.block_sizes == {4: 2, 1: 1}


def test_speed_counts_the_tokens_after_the_first():
    stats = counted((4, 3))
    stats.seconds["decode"] = 2.0
    assert stats.tokens_per_second == 2.0


@pytest.mark.parametrize("stats", [Stats(), counted(), counted((1, 0))])
def test_no_division_by_zero(stats):
    out = stats.as_dict()
    assert out["tokens_per_second"] == 0.0 and out["acceptance"] == 0.0 and out["matched_per_position"] == []


def test_as_dict_is_json_with_the_derived_figures_and_ordered_counts():
    out = json.loads(json.dumps(counted((4, 3), (1, 0), (4, 1)).as_dict(), allow_nan=False))
    assert out["block_sizes"] == {"1": 1, "2": 1, "4": 1} and list(out["block_sizes"]) == ["1", "2", "4"]
    assert out["tokens_per_step"] == 7 / 3 and out["matched_per_position"] == [1.0, 0.5, 0.5]


def test_two_statistics_share_nothing():
    one, other = Stats(), Stats()
    one.seconds["load"] = 1.0
    one.add_step(4, 2, True)
    assert other.seconds["load"] == 0.0 and not other.widths and not other.matched_at
