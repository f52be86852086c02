"""The width of a step over several slots: learnt costs per number of slots, acceptance per sequence, and never stuck in plain decoding."""

import pytest

from pyggml_spec.decode.batch_width import TRIES, BatchWidths
from pyggml_spec.decode.width import Acceptance

ONE = {1: 11.1, 2: 13.6, 4: 19.8, 8: 28.9, 16: 24.4}  # 27B shape on one H200
FOUR = {1: 12.9, 2: 24.0, 4: 25.0, 8: 30.0, 16: 39.0}


def learnt(covered=4, costs=FOUR) -> BatchWidths:
    widths = BatchWidths((2, 4, 8, 16))
    for width, ms in costs.items():
        for _ in range(TRIES):
            widths.observe(covered, width, ms)
    return widths


def seen(matched: int, steps: int = 60) -> Acceptance:
    acceptance = Acceptance(15)
    for _ in range(steps):
        acceptance.observe(16, matched)
    return acceptance


def test_expected_tokens_are_those_of_all_sequences():
    acceptances = [seen(15), seen(0), None]
    expected = learnt().expected(acceptances)
    for width in (1, 2, 4, 8, 16):
        want = 3 + sum(sum(a.survival()[: width - 1]) for a in acceptances[:2])
        assert expected[width] == pytest.approx(want)


def test_every_width_is_tried_once_per_number_of_slots():
    widths, used = BatchWidths((2, 4)), []
    for covered in (1, 2, 1, 2):
        while not widths.settled(covered):
            width = widths.choose(covered, [seen(1)])
            widths.observe(covered, width, {1: 10, 2: 11, 4: 12}[width])
            used.append((covered, width))
    assert {pair: used.count(pair) for pair in used} == {(c, w): TRIES for c in (1, 2) for w in (1, 2, 4)}


@pytest.mark.parametrize("matched, want", [(15, 16), (0, 1)])
def test_what_is_accepted_decides(matched, want):
    assert learnt().choose(4, [seen(matched)] * 4) == want


def test_the_number_of_slots_decides():
    """Two drafts accepted of each block: alone the block of 4 is best, among four sequences the block of 2."""
    assert learnt(1, ONE).choose(1, [seen(2)]) == 4
    assert learnt(4, {**FOUR, 2: 15.0}).choose(4, [seen(2)] * 4) == 2
    assert learnt().choose(4, [None] * 4) == 1


def test_plain_decoding_is_left_again_when_drafts_become_right():
    widths, acceptance, used = learnt(), seen(0), []
    for step in range(6000):
        width = widths.choose(4, [acceptance] * 4)
        if width > 1:
            acceptance.observe(width, width - 1 if step > 1000 else 0)
        widths.observe(4, width, FOUR[width])
        used.append(width)
    early, late = used[:1000], used[-1000:]
    assert late.count(16) > 900
    extra = sum(FOUR[w] for w in early if w > 1) / (1000 * FOUR[1])
    assert 0 < extra < 0.03  # a probe costs two percent, and the first ones come a little early


def test_one_stalled_step_changes_nothing():
    widths, acceptances = learnt(), [seen(15)] * 4
    widths.observe(4, 16, 5000.0)
    assert widths.choose(4, acceptances) == 16


def test_between_known_numbers_of_slots_nothing_is_tried_again():
    """Costs of 3 slots lie between those of 2 and 4 until steps say otherwise."""
    widths = learnt(4)
    for width, ms in FOUR.items():
        for _ in range(TRIES):
            widths.observe(2, width, ms - 4.0)
    assert widths.choose(3, [seen(15)] * 3) == 16 and widths.settled(3) and not widths.settled(8)
    assert widths.costs[3, 16] == pytest.approx(FOUR[16] - 2.0)
    for ms in (500.0, 500.0, 60.0, 60.0):  # two that build and capture the graph, then what it costs
        widths.observe(3, 16, ms)
    assert widths.costs[3, 16] == 60.0 and widths.choose(3, [seen(15)] * 3) == 8
    assert widths.choose(8, [seen(15)] * 8) == 16 and (8, 16) not in widths.costs  # outside of what is known it is tried
