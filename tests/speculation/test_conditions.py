"""What steps cost beside other work ends with it."""

import itertools

import pytest

from pyggml_spec.speculation.ngram import NgramMethod
from pyggml_spec.speculation.policy import PLAIN_STEP, SpeculationPolicy, StepPlan

DRAFTER = "draft-dflash"
COSTS = {1: 1.0, 2: 1.4, 4: 1.9, 8: 3.0}
CALM, FEW, BUSY = ((2, False),), ((1, False),), ((2, True),)


class Told:
    """A control that is told of steps, with a look at others behind every ``each`` of them."""

    def __init__(self) -> None:
        self.control, self.looks = SpeculationPolicy.measured_for(DRAFTER, COSTS), 0
        self.control.condition_changed(CALM, 0, ())
        self.drafted = self.control.begin(tokens=400)

    def steps(self, condition, count: int, times: float, width: int = 1, each: int = 10) -> None:
        kind = PLAIN_STEP if width == 1 else StepPlan.of(DRAFTER, width)
        for n in range(count):
            self.looks += n % each == 0
            changed = self.control.condition_changed(condition, self.looks, [self.drafted])
            self.control.observe(1, kind, times * COSTS[width], [self.drafted], [width - 1], not changed)

    def costs(self) -> dict[int, float]:
        return {width: self.control.costs[1, PLAIN_STEP if width == 1 else StepPlan.of(DRAFTER, width)] for width in COSTS}


def test_costs_of_a_busy_machine_end_with_it():
    """Blocks had become dear while others had the cores, and nothing but blocks says what blocks cost."""
    told = Told()
    told.steps(CALM, 60, 1.0, 4)
    told.steps(CALM, 60, 1.0)
    before = told.costs()
    told.steps(CALM, 8, 30.0, 4)  # others have come, and were not seen yet
    told.steps(BUSY, 50, 30.0, 4)
    told.steps(BUSY, 50, 30.0)
    assert told.costs()[4] > 10 * before[4]
    told.steps(CALM, 2, 1.0)
    assert told.costs() == pytest.approx(before, rel=0.05)
    told.steps(BUSY, 2, 30.0, 4)  # and those of a busy machine are known the next time
    assert told.costs()[4] > 10 * before[4]


def test_kinds_that_were_not_seen_with_fewer_threads_are_as_much_slower_as_those_that_were():
    told = Told()
    told.steps(FEW, 12, 1.8)
    assert told.costs() == pytest.approx({width: 1.8 * ms for width, ms in COSTS.items()}, rel=0.05)
    told.steps(FEW, 12, 1.2, 4)
    assert told.costs()[1] == pytest.approx(1.8, rel=0.05) and told.costs()[4] == pytest.approx(1.2 * COSTS[4], rel=0.1)


def test_a_text_may_try_blocks_again_when_others_have_gone():
    told = Told()
    told.steps(CALM, 10, 1.0)
    told.steps(BUSY, 10, 1.0)
    told.drafted.budget, told.drafted.won = 0.0, -50.0
    told.steps(CALM, 2, 1.0)
    assert told.drafted.budget > 0 and told.drafted.won >= 0


@pytest.mark.parametrize("slots", [1, 2])
def test_costs_that_were_learnt_under_another_condition_are_learnt_again(slots):
    """A server began on a calm machine, learnt its costs on a busy one, and failed with KeyError once that was calm again."""
    plans = [StepPlan.of(DRAFTER, width) for width in (2, 4)]
    control = SpeculationPolicy(plans)
    looks = itertools.count()

    def steps(condition, count: int) -> list[StepPlan]:
        state, chosen = control.begin(tokens=400), []
        for _ in range(count):
            chosen.append(control.choose(slots, [state]))
            changed = control.condition_changed(condition, next(looks), [state])
            control.observe(slots, chosen[-1], COSTS[chosen[-1].tokens], [state], [chosen[-1].draft_tokens], not changed)
        return chosen

    steps(CALM, 1)
    steps(BUSY, 40)
    assert control.calibrated(slots)
    steps(CALM, 1)
    assert not control.calibrated(slots) and not control.should_disable()
    assert set(steps(CALM, 20)) == {PLAIN_STEP, *plans} and control.calibrated(slots)


def test_costs_of_what_came_before_end_with_other_work_too():
    control = NgramMethod("ngram-simple", COSTS)
    control.set_condition(CALM)

    def steps(condition, rows: int, times: float, count: int = 20) -> None:
        for n in range(count):
            changed = control.set_condition(condition, steps.looks)
            steps.looks += n % 5 == 0
            control.observe(1, None if changed else rows, times * COSTS[rows], rows)

    steps.looks = 0
    for rows in (1, 4):
        steps(CALM, rows, 1.0)
    before = {rows: control.cost(1, rows) for rows in COSTS}
    steps(BUSY, 1, 20.0)
    assert control.cost(1, 8) == pytest.approx(20 * before[8], rel=0.1)
    steps(BUSY, 4, 40.0)
    steps(CALM, 1, 1.0, 2)
    assert {rows: control.cost(1, rows) for rows in COSTS} == pytest.approx(before, rel=0.1)
