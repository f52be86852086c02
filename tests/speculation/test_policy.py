"""Width control: the fastest width for what is measured and accepted, plain decoding when that wins, and never stuck in it."""

import json
import random
import statistics
from pathlib import Path

import pytest

from pyggml_spec.speculation.policy import (
    PLAIN_STEP,
    PROBE_LOSS,
    TEXT_LOSS,
    TRIES,
    AcceptancePrior,
    AcceptanceTracker,
    SpeculationPolicy,
    SpeculationState,
    StepPlan,
    chain_plans,
    losses,
    useful_widths,
    worth_keeping,
)

H200_27B = {1: 11.1, 2: 13.6, 4: 19.8, 8: 28.9, 16: 24.4}  # not monotonic: measured
FAST_PLAIN = {1: 1.16, 2: 3.47, 4: 4.92, 8: 7.02, 16: 10.41}  # the embedded pair on two fast cores: it fits their cache
SLOW_BLOCKS = {1: 2.0, 2: 3.4, 4: 4.7, 8: 8.7, 16: 12.6}  # a small model on two cores
FOUR = {1: 12.9, 2: 24.0, 4: 25.0, 8: 30.0, 16: 39.0}  # 27B shape on one H200, four slots
DRAFTER = "draft-dflash"
RECORDED = json.loads((Path(__file__).parent / "recorded_drafts.json").read_text())  # scripts/record_drafts.py
CHAINS = json.loads((Path(__file__).parent / "recorded_chains.json").read_text())  # of the MTP layer, behind the same tokens


class One:
    """Width control of one sequence of one drafter."""

    def __init__(self, costs):
        self.control = SpeculationPolicy.measured_for(DRAFTER, costs)
        self.sequence = self.control.begin()

    def next(self):
        self.kind = self.control.choose(1, [self.sequence])
        return self.kind.tokens

    def observe(self, width, matched, milliseconds=None):
        assert width == self.kind.tokens
        known = milliseconds is not None
        self.control.observe(1, self.kind, milliseconds if known else 0.0, [self.sequence], [matched], known)

    @property
    def current(self):
        return self.control._uses[1].kind.tokens

    def reason(self):
        return self.control.reason(self.sequence)


def _drive(control, tokens, accept):
    """Runs until ``tokens`` tokens came out; ``accept(width)`` says how many drafts match. Returns the widths used."""
    used, done = [], 0
    while done < tokens:
        width = control.next()
        matched = accept(width) if width > 1 else 0
        control.observe(width, matched)
        used.append(width)
        done += matched + 1
    return used


@pytest.mark.parametrize("costs", [H200_27B, SLOW_BLOCKS])
def test_a_drafter_that_is_never_right_ends_in_plain_decoding_within_64_tokens(costs):
    control = One(costs)
    _drive(control, 64, lambda width: 0)
    assert control.current == 1
    used = _drive(control, 2000, lambda width: 0)
    assert used.count(1) / len(used) > 0.97  # the rest are probes, further and further apart
    assert "plain decoding" in control.reason()


@pytest.mark.parametrize("costs", [H200_27B, SLOW_BLOCKS])
def test_a_drafter_that_is_always_right_ends_in_the_widest_paying_block_within_64_tokens(costs):
    control = One(costs)
    _drive(control, 64, lambda width: width - 1)
    assert control.current == 16


@pytest.mark.parametrize("tokens", [128, 512, 4096])
def test_probes_that_never_pay_cost_at_most_three_percent_however_dear_blocks_are(tokens):
    """128 tokens with three probes of 6 plain steps each lost 13 %."""
    used = _drive(One(FAST_PLAIN), tokens, lambda width: 0)
    assert sum(FAST_PLAIN[w] for w in used) <= 1.03 * FAST_PLAIN[1] * tokens


def test_widths_that_a_wider_block_undercuts_are_never_used():
    assert useful_widths(H200_27B) == [1, 2, 4, 16]
    assert useful_widths({1: 5.0, 2: 10.5, 4: 21.0}) == [1]


def test_an_unmeasured_acceptance_is_called_an_assumption():
    """Where blocks are dear none is tried for a while: 80 % were said to be accepted when nothing had been drafted."""
    control = One(FAST_PLAIN)
    assert _drive(control, 50, lambda width: 0) == [1] * 50 and "no draft yet, 80 % of the first ones assumed right" in control.reason()
    _drive(control, 2000, lambda width: 0)
    assert "assumed" not in control.reason() and "first draft accepted" in control.reason()


def test_a_drafter_that_gets_better_is_noticed():
    control = One(SLOW_BLOCKS)
    _drive(control, 200, lambda width: 0)
    assert control.current == 1
    _drive(control, 1500, lambda width: width - 1)
    assert control.current == 16


@pytest.mark.parametrize("costs", [H200_27B, SLOW_BLOCKS, {1: 2.84, 2: 3.93, 4: 5.05, 8: 7.3, 16: 6.24}])
def test_an_unknown_passage_costs_nothing_later(costs):
    """What it lost was a debt, paid back in 5,000 plain steps: code behind a page of prose was decoded plainly."""
    control = One(costs)
    for _ in range(2):
        _drive(control, 500, lambda width: width - 1)
        _drive(control, 200, lambda width: 0)
        used = _drive(control, 300, lambda width: width - 1)
        assert control.current == 16 and sum(costs[w] for w in used) < 0.8 * 300 * costs[1]


def _geometric(p, rng):
    def accept(width):
        matched = 0
        while matched < width - 1 and rng.random() < p:
            matched += 1
        return matched

    return accept


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("costs", [H200_27B, SLOW_BLOCKS])
def test_close_to_the_best_fixed_width_and_never_slower_than_plain(costs, p):
    """Drafts that are right with probability p, 2,000 tokens, 20 seeds: on average within 7 % of the width that hindsight names, and no
    run more than 3 % slower than plain decoding. The seeds are fixed: a failure is a change in the controller, not bad luck."""
    best = max((1 + sum(p**i for i in range(1, w))) / costs[w] for w in costs)
    speeds = [_speed(costs, p, seed) for seed in range(20)]
    assert sum(speeds) / len(speeds) >= 0.93 * best
    assert min(speeds) >= 0.97 / costs[1]


def _speed(costs, p, seed, tokens=2000):
    """Tokens per millisecond of one simulated run."""
    control, accept = One(costs), _geometric(p, random.Random(seed))
    spent = done = 0
    while done < tokens:
        width = control.next()
        matched = accept(width) if width > 1 else 0
        control.observe(width, matched)
        spent += costs[width]
        done += matched + 1
    return done / spent


def test_two_unlucky_blocks_at_the_start_do_not_decide_the_next_sixty_steps():
    """On one H200 a 4B pair that emits six tokens per block fell to plain decoding for 60 steps in one of twelve runs."""
    costs = {1: 2.84, 2: 3.93, 4: 5.05, 8: 7.3, 16: 6.24}
    assert min(_speed(costs, 0.845, seed, 128) for seed in range(100)) > 1.8 / costs[1]


@pytest.mark.slow
@pytest.mark.parametrize("p, costs", [(0.6, {1: 10.0, 2: 10.7, 4: 14.6}), (0.8, {1: 10.0, 4: 19.8, 8: 28.0})])
def test_widths_of_the_same_speed_are_not_exchanged_all_the_time(p, costs):
    """2,000 steps, 4 seeds: 56 to 77 changes, each of which takes a graph that commits; without MARGIN 180 to 238, for the same speed."""
    for seed in range(4):
        control, accept = One(costs), _geometric(p, random.Random(seed))
        for _ in range(2000):
            width = control.next()
            control.observe(width, accept(width) if width > 1 else 0)
        assert 10 < control.control.changes < 100


OWN_KERNELS = {1: 1.0, 2: 1.24, 4: 1.33, 8: 1.73, 16: 3.27}  # the embedded pair on an idle two-core EPYC, in plain steps
GGML = {1: 3.0, 2: 4.7, 4: 6.2, 8: 10.5, 16: 17.5}  # the same on two cores with ggml's kernels


def _session(costs, rows, tokens=128, real=None):
    """Speed-up over plain decoding of recorded texts, one after the other; steps take ``real`` where that is not what was measured."""
    control, real, out = One(costs), real or costs, []
    for row in rows:
        right = {int(width): [int(digit, 16) for digit in digits] for width, digits in row.items()}
        control.sequence, at, spent = control.control.begin(), 0, 0.0
        while at < tokens:
            width = control.next()
            matched = min(right[width][at], tokens - 1 - at) if width > 1 else 0
            control.observe(width, matched, real[width])
            spent += real[width]
            at += matched + 1
        out.append(tokens * real[1] / spent)
    return out


def _thinned(share, seed=2):
    """The recorded drafts, each right with this probability only: a drafter that knows little of the text."""
    rng = random.Random(seed)
    rows = []
    for row in RECORDED:
        cut = [next((j for j in range(15) if rng.random() > share), 15) for _ in row["16"]]
        rows.append({width: "".join(f"{min(int(a, 16), b):x}" for a, b in zip(digits, cut)) for width, digits in row.items()})
    return rows


@pytest.mark.parametrize(
    "costs, mean, least", [(OWN_KERNELS, 2.15, 1.6), (GGML, 1.36, 0.96), (H200_27B, 1.63, 1.25), (SLOW_BLOCKS, 1.17, 0.96)]
)
def test_recorded_prompts_gain(costs, mean, least):
    """The rules before these gave 2.12, 1.40, 1.64 and 1.19 on average, and 1.50, 1.07, 1.33 and 0.967 at least, with a first text as free as the last one."""
    gains = _session(costs, RECORDED)
    assert statistics.mean(gains) > mean and min(gains) > least


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("costs", [OWN_KERNELS, GGML, H200_27B, SLOW_BLOCKS, FAST_PLAIN])
def test_no_text_is_expected_to_lose(costs, share):
    """Drafters that know little of the text, or nothing, cost at most 2 % on average: every prompt lost 4 %."""
    gains = _session(costs, _thinned(share))
    assert statistics.mean(gains) > 0.98


# Step costs of Xeons with AMX in virtual machines, two threads, two and one, and what a block behind plain steps takes longer, in plain steps, for up to 8 of
# them and for more: 0.45 and 1.85 ms where a plain step took 3.86.
DEAR = {
    "two threads, busy": {1: 1.36, 2: 3.05, 4: 3.37, 8: 4.94, 16: 9.13},
    "two threads": {1: 1.04, 2: 1.59, 4: 2.8, 8: 3.03, 16: 4.44},
    "one thread": {1: 3.86, 2: 5.68, 4: 6.3, 8: 8.05, 16: 14.0},
}
LATE = 0.12, 0.48


# Step costs of two cores of an EPYC 9004 in a virtual machine, two threads and one.
EPYC = {"two threads": {1: 0.8, 2: 1.5, 4: 1.6, 8: 2.1, 16: 3.5}, "one thread": {1: 1.03, 2: 1.8, 4: 2.05, 8: 3.2, 16: 6.0}}
START = json.loads(
    (Path(__file__).parent / "recorded_start.json").read_text()
)  # record_drafts.py's digits behind what `pyspec run` begins with


def _spent(control, sequence, costs, row, tokens, clock=lambda: 1.0):
    """Milliseconds of a recorded text, blocks behind plain steps being late; control sees them through a ``clock``."""
    at, spent, plain = 0, 0.0, 0
    while at < tokens:
        chosen = control.choose(1, [sequence])
        width = chosen.tokens
        matched = min(int(row[str(width)][at], 16), width - 1, tokens - 1 - at) if width > 1 else 0
        late = costs[1] * LATE[plain > 8] if width > 1 and plain else 0.0
        plain, seen = plain + 1 if width == 1 else 0, clock()
        control.observe(1, chosen, (costs[width] + late) * seen, [sequence], [matched], late=late * seen)
        spent, at = spent + costs[width] + late, at + matched + 1
    return spent


def _first(costs, row, tokens, told=True):
    """Speed-up of a text that is the first of its session, and how many tokens are asked for is told or not."""
    control = SpeculationPolicy.measured_for(DRAFTER, costs)
    return tokens * costs[1] / _spent(control, control.begin(tokens=tokens if told else None), costs, row, tokens)


@pytest.mark.parametrize(
    "costs, least", [(EPYC["two threads"], 1.4), (EPYC["one thread"], 1.1), (DEAR["two threads, busy"], 1.1), (GGML, 1.4)]
)
def test_a_long_text_may_begin_badly(costs, least):
    """The first eight blocks of the embedded prompt bring eleven tokens, and all behind them almost four each: it was decoded plainly to its end, whose 240
    tokens could pay for more than a text of 96."""
    assert _first(costs, START, 240) > least > _first(costs, START, 240, told=False)


@pytest.mark.slow
def test_first_texts_gain_where_many_tokens_are_asked_for():
    for costs, more in (
        (EPYC["one thread"], 0.07),
        (DEAR["two threads, busy"], 0.06),
        (DEAR["one thread"], 0.04),
        (EPYC["two threads"], -0.01),
    ):
        told, untold = (statistics.mean(_first(costs, row, 156, said) for row in RECORDED) for said in (True, False))
        assert told > untold + more


@pytest.mark.parametrize("costs", [*EPYC.values(), *DEAR.values(), OWN_KERNELS, GGML])
def test_a_drafter_that_knows_nothing_costs_long_texts_two_percent(costs):
    """And its first one 4 %, once, and one of those behind it 2.9: each may take what all may lose until it is known how good drafts are."""
    useless = [{width: "0" * len(digits) for width, digits in row.items()} for row in RECORDED[:3]]
    assert _first(costs, useless[0], 156) > 0.96
    control, spent = SpeculationPolicy.measured_for(DRAFTER, costs), []
    for _ in range(12):
        sequence, ms = control.begin(control.should_disable(), 256), 0.0
        for _ in range(256):
            chosen = control.choose(1, [sequence])
            control.observe(1, chosen, costs[chosen.tokens], [sequence], [0])
            ms += costs[chosen.tokens]
        spent.append(ms)
    gains = [256 * costs[1] / ms for ms in spent[1:]]
    assert statistics.mean(gains) > 0.985 and min(gains) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("costs", [*EPYC.values(), *DEAR.values(), OWN_KERNELS])
def test_a_text_that_is_unlike_those_before_it_loses_little(costs, share):
    """Behind texts whose drafts were good one whose drafts are all wrong took 1.3 times as long: what the others showed counted for more than its own."""
    control = SpeculationPolicy.measured_for(DRAFTER, costs)
    for row in RECORDED:
        _spent(control, control.begin(control.should_disable(), 96), costs, row, 96)
    for row in _thinned(share)[:6]:
        assert 96 * costs[1] / _spent(control, control.begin(control.should_disable(), 96), costs, row, 96) > 0.9


@pytest.mark.parametrize("costs, rests", [({1: 0.34, 2: 0.83, 4: 1.04, 8: 1.77, 16: 2.22}, True), (EPYC["two threads"], False)])
def test_where_no_block_pays_by_what_texts_showed_most_texts_rest(costs, rests):
    """Two threads whose cores do not share a cache: each text tried one block, three of its 96 plain steps, and kept the drafter's inputs, three more."""
    control, rested = SpeculationPolicy.measured_for(DRAFTER, costs), []
    for text in range(40):
        rested.append(control.should_disable())
        _spent(control, control.begin(rested[-1], 96), costs, RECORDED[text % 20], 96)
    late = rested[20:]
    assert (sum(late) > 14 and not all(late)) if rests else not any(late)


def test_what_a_text_may_lose_grows_with_the_tokens_that_are_asked_for():
    assert losses(None) == losses(0) == losses(96) == PROBE_LOSS < losses(112) < losses(128) < losses(256) == losses(1 << 62)
    for tokens in (128, 192, 256, 4096):
        assert TEXT_LOSS + losses(tokens) * tokens <= 0.02 * tokens + 1e-9


def _rounds(costs, rows, seed, rounds=8, tokens=96):
    """Speed-up of each text: the median of the rounds behind the first one, all of one session, with clocks that stall."""
    rng, gains, control = random.Random(seed), [[] for _ in rows], SpeculationPolicy.measured_for(DRAFTER, costs)

    def clock():
        return rng.lognormvariate(0, 0.08) * (2.5 if rng.random() < 0.01 else 1)

    for text in list(range(len(rows))) * rounds:
        sequence = control.begin(rests=control.should_disable())
        gains[text].append(tokens * costs[1] / _spent(control, sequence, costs, rows[text], tokens, clock))
    return [statistics.median(of[1:]) for of in gains]


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine, mean, least", [("two threads, busy", 1.01, 0.94), ("two threads", 1.15, 0.97), ("one thread", 1.63, 1.22)]
)
def test_dear_blocks_gain_what_they_can(machine, mean, least):
    """1.03, 1.16 and 1.66 on average, 0.98, 0.98 and 1.25 at least, of three sessions. The rules before gave 1.00, 1.11 and 1.60, and 0.98, 0.92 and 1.24: what all texts had
    won any of them could lose, and one that had lost what it might hardly drafted again."""
    gains = [gain for seed in range(3) for gain in _rounds(DEAR[machine], RECORDED, seed)]
    assert statistics.mean(gains) > mean and min(gains) > least


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("machine", DEAR)
def test_dear_blocks_of_a_drafter_that_knows_nothing_cost_no_text_more_than_two_percent(machine, share):
    assert min(_rounds(DEAR[machine], _thinned(share), 0)) > 0.98


def test_a_text_that_lost_what_it_may_goes_on_with_blocks_that_pay():
    """Where a block of two took 1.6 plain steps, the first texts' unlucky blocks were their last ones, however good others' drafts were."""
    control = SpeculationPolicy.measured_for(DRAFTER, {1: 1.0, 2: 1.5, 4: 1.9})
    for _ in range(8):
        sequence = control.begin()
        for _ in range(40):
            chosen = control.choose(1, [sequence])
            control.observe(1, chosen, {1: 1.0, 2: 1.5, 4: 1.9}[chosen.tokens], [sequence], [chosen.tokens - 1])
    sequence, used = control.begin(), []
    for step in range(40):
        chosen = control.choose(1, [sequence])
        used.append(chosen.tokens)
        control.observe(1, chosen, {1: 1.0, 2: 1.5, 4: 1.9}[chosen.tokens], [sequence], [chosen.tokens - 1 if step > 3 else 0])
    assert sequence.allowed > 0 and used[-20:].count(4) > 15


def test_what_may_be_lost_pays_for_several_blocks():
    """The first block of a new process was the widest that its credit paid for: where that was wrong, 11 of 20 first texts were plain to their end, now 5."""
    costs, plain = {1: 1.0, 4: 1.9, 16: 3.0}, []
    for row in RECORDED:
        control, widths, at = SpeculationPolicy.measured_for(DRAFTER, costs), [], 0
        sequence = control.begin()
        while at < 128:
            chosen = control.choose(1, [sequence])
            matched = min(int(row[str(chosen.tokens)][at], 16), 127 - at) if chosen.tokens > 1 else 0
            control.observe(1, chosen, costs[chosen.tokens], [sequence], [matched])
            widths.append(chosen.tokens)
            at += matched + 1
        plain.append(widths.count(1))
    assert sum(n > 100 for n in plain) < 7


def test_what_texts_teach_is_known_by_position():
    """One chance for all positions made wide blocks seem good in every new text whose first drafts are mostly right."""
    control = SpeculationPolicy.measured_for(DRAFTER, {1: 1.0, 2: 1.2, 8: 2.4})
    for _ in range(6):
        sequence = control.begin()
        for _ in range(30):
            control.observe(1, kind(8), 2.4, [sequence], [1])
    tokens = control.begin().acceptance[DRAFTER].tokens()
    assert tokens[1] > 1.9 and tokens[7] < 2.3
    assert control.choose(1, [control.begin()]) == kind(2)


def _late_session(costs, seed):
    """Speed-ups of the recorded texts, in some order, where a block behind plain steps computes the drafter's rows of those, too, and clocks stall."""
    rng, gains = random.Random(seed), {}
    control = SpeculationPolicy.measured_for(DRAFTER, costs)
    for text in [*rng.sample(range(len(RECORDED)), len(RECORDED)), *range(len(RECORDED))]:
        sequence, at, spent, plain = control.begin(rests=control.should_disable()), 0, 0.0, 0
        while at < 96:
            chosen = control.choose(1, [sequence])
            matched = min(int(RECORDED[text][str(chosen.tokens)][at], 16), chosen.tokens - 1, 95 - at) if chosen.tokens > 1 else 0
            took = costs[chosen.tokens] + (0.4 + 0.025 * plain if chosen.tokens > 1 and plain else 0.0)
            plain = plain + 1 if chosen.tokens == 1 else 0
            control.observe(1, chosen, took * rng.lognormvariate(0, 0.1) * (3 if rng.random() < 0.02 else 1), [sequence], [matched])
            kept = 1.03 if chosen.tokens == 1 and not sequence.disabled else 1.0  # of plain steps: the drafter's inputs
            spent, at = spent + kept * took, at + matched + 1
        gains[text] = 96 / spent
    return gains, control


def test_texts_are_plain_to_their_end_while_no_block_can_be_afforded():
    costs, rested = {1: 1.0, 2: 2.0, 4: 3.5}, []
    control = SpeculationPolicy.measured_for(DRAFTER, costs)
    for _ in range(12):
        sequence, widths = control.begin(rests=control.should_disable()), set()
        for _ in range(96):
            chosen = control.choose(1, [sequence])
            widths.add(chosen.tokens)
            control.observe(1, chosen, costs[chosen.tokens], [sequence], [0])
        assert not sequence.disabled or widths == {1}
        rested.append(sequence.disabled)
    assert not rested[0] and 6 <= sum(rested) < 12  # what plain steps pay for is tried again


@pytest.mark.slow
@pytest.mark.parametrize(
    "costs", [{1: 1.0, 2: 2.2, 4: 3.3, 8: 5.8, 16: 10.0}, {1: 1.0, 2: 2.2, 4: 3.6, 8: 6.8, 16: 13.0}], ids=["busy", "dear"]
)
def test_few_texts_lose_where_blocks_cost_what_they_win(costs):
    """Costs of AVX2 kernels on a busy machine. Tries for 1 % of the time, charged as if every block followed a block, in texts that all keep the
    drafter's inputs gave 0.96 on average, all of them below 0.98."""
    sessions = [_late_session(costs, seed) for seed in range(5)]
    texts = [gain for gains, _ in sessions for gain in gains.values()]
    assert statistics.mean(texts) > 0.98 and min(texts) > 0.92
    assert sum(gain < 0.98 for gain in texts) < 0.4 * len(texts)
    for _, control in sessions:  # what blocks behind plain steps took longer is not what blocks cost
        assert all(control.costs[1, kind] < 1.3 * costs[kind.tokens] * control.costs[1, PLAIN_STEP] for kind in control.kinds)


@pytest.mark.slow
def test_costs_that_were_measured_wrong_are_learnt_from_the_steps():
    """A machine that was busy while they were measured: blocks seemed twice or three times as dear, or half as dear."""
    for width, factor in ((4, 2.0), (4, 3.0), (8, 0.5), (16, 0.4)):
        gains = _session({**OWN_KERNELS, width: factor * OWN_KERNELS[width]}, RECORDED, real=OWN_KERNELS)
        assert statistics.mean(gains) > 1.8
    dear = {width: ms * (3 if width > 1 else 1) for width, ms in OWN_KERNELS.items()}  # then every probe is behind plain steps
    assert statistics.mean(_session(dear, RECORDED, real=OWN_KERNELS)[len(RECORDED) // 2 :]) > 1.5


NEAR = {1: 0.345, 2: 0.60, 4: 0.63, 8: 0.92, 16: 1.52}  # two cores of an EPYC 9005 in a virtual machine, and the same while they were slow
SLOWED = {1: 0.42, 2: 0.85, 4: 1.01, 8: 1.15, 16: 1.87}


@pytest.mark.slow
def test_costs_of_a_slow_moment_keep_blocks_away_from_no_session():
    """Each block was one behind plain steps, whose time taught nothing, and what unlucky texts had lost was not there for those behind them: sessions stayed at
    1.03 of plain decoding. What one kind of block is found to cost says something of those that were measured in the same moment."""
    for seed in range(4):
        rows = random.Random(seed).sample(RECORDED, len(RECORDED))
        control, gains = SpeculationPolicy.measured_for(DRAFTER, SLOWED), []
        for row in rows * 2:
            gains.append(96 * NEAR[1] / _spent(control, control.begin(control.should_disable(), 96), NEAR, row, 96))
        assert statistics.mean(gains[len(rows) :]) > 1.35, seed
        assert all(control.costs[1, kind] < 1.25 * NEAR[kind.tokens] for kind in control.kinds if kind.tokens < 8)


def test_the_first_of_some_blocks_says_nothing_of_what_they_cost():
    """It finds caches cold. At the beginning of texts it counted: a block of four rows seemed to take 0.88 ms, which behind one another take 0.70."""
    control, block = SpeculationPolicy.measured_for(DRAFTER, NEAR), kind(4)
    for _ in range(20):
        sequence = control.begin(tokens=96)
        for took in (1.2, 0.63, 0.63):
            control.choose(1, [sequence])
            control.observe(1, block, took, [sequence], [3])
        for _ in range(3):
            control.observe(1, PLAIN_STEP, 0.345, [sequence], [0])
        control.observe(1, block, 1.2, [sequence], [3])
    assert control.costs[1, block] < 0.65


def test_texts_begin_where_no_block_could_ever_pay_and_earlier_sessions_taught_much():
    """What a text may lose was that of the best block, and there is none: each text failed."""
    control = SpeculationPolicy.measured_for(DRAFTER, {1: 1.0, 2: 2.5, 4: 4.6})
    for _ in range(150):
        control.priors[DRAFTER].observe(4, 2)
    assert control.never_pays and not control.should_disable()
    assert control.choose(1, [control.begin(rests=True)]) == control.choose(1, [control.begin()]) == PLAIN_STEP


def test_a_text_may_try_a_block_whatever_those_before_it_lost():
    control = SpeculationPolicy.measured_for(DRAFTER, {1: 1.0, 2: 1.5, 4: 2.3})
    for _ in range(3):
        sequence, used = control.begin(tokens=96), []
        for _ in range(40):
            chosen = control.choose(1, [sequence])
            used.append(chosen.tokens)
            control.observe(1, chosen, {1: 1.0, 2: 1.5, 4: 2.3}[chosen.tokens], [sequence], [0])
        assert any(width > 1 for width in used)


def test_the_best_block_is_tried_where_a_cheaper_one_would_not_pay():
    """What may be lost paid for one of four rows and not for three, and one of two was not worth it: there was none for five texts."""
    control = SpeculationPolicy.measured_for(DRAFTER, {1: 2.0, 2: 3.4, 4: 4.7})
    for _ in range(12):
        control.priors[DRAFTER].observe(4, 3)  # 2.6 tokens of four rows in 2.35 plain steps, 1.6 of two in 1.7
        control.priors[DRAFTER].observe(4, 0)
    control._allowed = 1.4
    sequence, used = control.begin(tokens=96), []
    for _ in range(6):
        chosen = control.choose(1, [sequence])
        used.append(chosen.tokens)
        control.observe(1, chosen, {1: 2.0, 2: 3.4, 4: 4.7}[chosen.tokens], [sequence], [chosen.tokens - 1])
    assert 4 in used


def learnt(covered=4, costs=FOUR) -> SpeculationPolicy:
    control = SpeculationPolicy({DRAFTER: (2, 4, 8, 16)})
    for width, ms in costs.items():
        for _ in range(TRIES):
            control.observe(covered, kind(width), ms, [], [])
    return control


def kind(width) -> StepPlan:
    return StepPlan.of(DRAFTER, width) if width > 1 else PLAIN_STEP


def seen(matched: int, steps: int = 60) -> SpeculationState:
    sequence = SpeculationState({DRAFTER: AcceptanceTracker(AcceptancePrior(15))})
    for _ in range(steps):
        sequence.acceptance[DRAFTER].observe(16, matched)
    return sequence


def test_expected_tokens_are_those_of_all_sequences():
    sequences = [seen(15), seen(0), None]
    expected = learnt().expected(sequences)
    for width in (1, 2, 4, 8, 16):
        want = 3 + sum(sum(s.acceptance[DRAFTER].survival()[: width - 1]) for s in sequences[:2])
        assert expected[kind(width)] == pytest.approx(want)


def test_every_kind_is_tried_once_per_number_of_slots():
    control, used = SpeculationPolicy({DRAFTER: (2, 4)}), []
    for covered in (1, 2, 1, 2):
        while not control.calibrated(covered):
            chosen, sequence = control.choose(covered, [seen(1)]), seen(1)
            control.observe(covered, chosen, {1: 10, 2: 11, 4: 12}[chosen.tokens], [sequence], [0])
            used.append((covered, chosen.tokens))
    assert {pair: used.count(pair) for pair in used} == {(c, w): TRIES for c in (1, 2) for w in (1, 2, 4)}


@pytest.mark.parametrize("matched, want", [(15, 16), (0, 1)])
def test_what_is_accepted_decides(matched, want):
    assert learnt().choose(4, [seen(matched)] * 4).tokens == want


def test_the_number_of_slots_decides():
    """Two drafts accepted of each block: alone the block of 4 is best, among four sequences the block of 2."""
    assert learnt(1, H200_27B).choose(1, [seen(2)]).tokens == 4
    assert learnt(4, {**FOUR, 2: 15.0}).choose(4, [seen(2)] * 4).tokens == 2
    assert learnt().choose(4, [None] * 4) == PLAIN_STEP


@pytest.mark.slow
def test_plain_decoding_of_many_is_left_again_when_drafts_become_right():
    control, sequences, used = learnt(), [seen(0) for _ in range(4)], []
    for step in range(6000):
        chosen = control.choose(4, sequences)
        matched = chosen.tokens - 1 if step > 1000 else 0
        control.observe(4, chosen, FOUR[chosen.tokens], sequences, [matched] * 4)
        used.append(chosen.tokens)
    early, late = used[:1000], used[-1000:]
    assert late.count(16) > 900
    extra = sum(FOUR[w] - FOUR[1] for w in early if w > 1) / (1000 * FOUR[1])
    assert 0 < extra < 0.03


def test_one_stalled_step_changes_nothing():
    control, sequences = learnt(), [seen(15)] * 4
    control.observe(4, kind(16), 5000.0, [], [])
    assert control.choose(4, sequences).tokens == 16


def test_between_known_numbers_of_slots_nothing_is_tried_again():
    """Costs of 3 slots lie between those of 2 and 4 until steps say otherwise."""
    control = learnt(4)
    for width, ms in FOUR.items():
        for _ in range(TRIES):
            control.observe(2, kind(width), ms - 4.0, [], [])
    assert control.calibrated(2) and control.calibrated(4)
    assert control.choose(3, [seen(15)] * 3).tokens == 16 and control.calibrated(3) and not control.calibrated(8)
    assert control.costs[3, kind(16)] == pytest.approx(FOUR[16] - 2.0)
    for ms in (500.0, 500.0, 60.0, 60.0):  # two that build and capture the graph, then what it costs
        control.observe(3, kind(16), ms, [], [])
    assert control.costs[3, kind(16)] == 60.0
    control._uses.clear()
    assert control.choose(3, [seen(15)] * 3).tokens == 8
    assert control.choose(8, [seen(15)] * 8).tokens == 16 and (8, kind(16)) not in control.costs  # outside of what is known it is tried


def test_of_two_drafters_the_better_one_drafts():
    """A drafter that costs nothing and is seldom right, and one that is dear and mostly right: each where it pays, and plain steps else."""
    costs = {
        PLAIN_STEP: 10.0,
        StepPlan.of("suffix", 4): 11.0,
        StepPlan.of("suffix", 8): 12.0,
        StepPlan.of("draft-mtp", 2): 14.0,
        StepPlan.of("draft-mtp", 4): 18.0,
    }
    for right, want in (
        ({"suffix": 3, "draft-mtp": 3}, "suffix"),
        ({"suffix": 0, "draft-mtp": 3}, "draft-mtp"),
        ({"suffix": 0, "draft-mtp": 0}, ""),
    ):
        control, used = SpeculationPolicy({"suffix": (4, 8), "draft-mtp": (2, 4)}, costs), []
        sequence = control.begin()
        for _ in range(300):
            chosen = control.choose(1, [sequence])
            control.observe(1, chosen, costs[chosen], [sequence], [min(right.get(chosen.method, 0), chosen.tokens - 1)])
            used.append(chosen.method)
        assert used[-100:].count(want) > 80


# Milliseconds that verifying so many rows takes, that drafting a block of them takes, and that each draft of a chain takes.
MACHINES = {
    "own kernels": ({1: 1.0, 2: 1.16, 4: 1.25, 8: 1.6, 16: 3.0}, {2: 0.08, 4: 0.08, 8: 0.13, 16: 0.27}, 0.1),
    "ggml's kernels": ({1: 3.0, 2: 4.4, 4: 5.8, 8: 9.8, 16: 16.4}, {2: 0.3, 4: 0.4, 8: 0.7, 16: 1.1}, 0.35),
    "27B, one H200": ({1: 11.1, 2: 12.4, 4: 18.0, 8: 26.5, 16: 21.5}, {2: 1.2, 4: 1.8, 8: 2.4, 16: 2.9}, 0.75),
    "the same, patched": ({1: 6.07, 2: 6.3, 4: 6.7, 8: 7.6, 16: 9.0}, {2: 0.5, 4: 0.6, 8: 0.8, 16: 0.9}, 0.25),
}


def _replayed(costs, choose, observe, order, tokens=128):
    """Mean speed-up over plain decoding of the recorded texts, in this order."""
    gains = []
    for text in order:
        at, spent = 0, 0.0
        sequence = observe(None, None, 0)
        while at < tokens:
            kind = choose(sequence)
            right = CHAINS[text]["16"] if kind.method == CHAIN else RECORDED[text].get(str(kind.tokens))
            matched = min(int(right[at], 16), kind.tokens - 1, tokens - 1 - at) if kind.tokens > 1 else 0
            observe(sequence, kind, matched)
            spent += costs[kind]
            at += matched + 1
        gains.append(tokens * costs[PLAIN_STEP] / spent)
    return statistics.mean(gains)


CHAIN = "draft-mtp"


@pytest.mark.slow
@pytest.mark.parametrize("names", [(DRAFTER,), (CHAIN,), (DRAFTER, CHAIN)], ids=["blocks", "chain", "both"])
@pytest.mark.parametrize("machine", MACHINES)
def test_regret_against_the_best_fixed_kind_is_bounded(machine, names):
    """Recorded drafts of the embedded target's two drafters, 20 texts in six orders: who drafts, how many, and in how many rows they are verified,
    against the one kind of step that hindsight names. With one drafter -2.0 to 2.4 %, with both -1.1 to 2.3 %, and 5.3 % in the worst order;
    both with looks half as often, and who is as good as 3 % better left out: 3.1 and 7.4 %; without looks at the other one 5.5 and 9 %."""
    verify, block, draft = MACHINES[machine]
    costs = {PLAIN_STEP: verify[1]}
    if DRAFTER in names:
        costs |= {StepPlan.of(DRAFTER, rows): verify[rows] + ms for rows, ms in block.items()}
    if CHAIN in names:
        costs |= {kind: verify[kind.verify_len] + draft * (kind.tokens - 1) for kind in chain_plans(CHAIN, (2, 4, 8, 16))}
    every = range(len(RECORDED))
    best = max(_replayed(costs, lambda _, kind=kind: kind, lambda *_: None, every) for kind in costs)
    kept, gains = worth_keeping(costs), []
    for seed in range(6):
        control = SpeculationPolicy({name: [kind.tokens for kind in kept if kind.method == name] for name in names}, kept)

        def observe(sequence, kind, matched, control=control):
            if sequence is None:
                return control.begin()
            return control.observe(1, kind, costs[kind], [sequence], [matched])

        order = random.Random(seed).sample(every, len(every))
        gains.append(_replayed(costs, lambda sequence, control=control: control.choose(1, [sequence]), observe, order))
    assert statistics.mean(gains) > (0.96 if len(names) < 2 else 0.97) * best
    assert min(gains) > (0.92 if len(names) < 2 else 0.94) * best


def test_a_chain_is_verified_in_the_rows_that_cost_least():
    """27B on one H200: 16 rows cost less than 8, so that six drafts go through the graph of 16 rows; two through that of 4."""
    verify, _, draft = MACHINES["27B, one H200"]
    kinds = chain_plans(CHAIN, (2, 4, 8, 16))
    assert (
        StepPlan.of(CHAIN, 6, 8) in kinds
        and StepPlan.of(CHAIN, 8, 16) in kinds
        and StepPlan.of(CHAIN, 3, 4) in kinds
        and StepPlan.of(CHAIN, 16) in kinds
    )
    kept = worth_keeping({kind: verify[kind.verify_len] + draft * (kind.tokens - 1) for kind in kinds})
    assert StepPlan.of(CHAIN, 8, 16) in kept and StepPlan.of(CHAIN, 8) not in kept and StepPlan.of(CHAIN, 3, 4) in kept
    control = SpeculationPolicy({CHAIN: (2, 4, 8, 16)}, {PLAIN_STEP: verify[1], **kept})
    sequence = control.begin()
    for _ in range(60):
        chosen = control.choose(1, [sequence])
        control.observe(1, chosen, control.measured[chosen], [sequence], [min(7, chosen.tokens - 1)])
    assert chosen == StepPlan.of(CHAIN, 8, 16) and "width 8 in 16 rows" in control.reason(sequence)


def test_what_a_drafter_has_to_catch_up_with_is_paid_for():
    """A block behind plain steps took two of them more, which nobody counted: drafts of prose, one of three right, cost 2.6 %, now 0.8."""
    costs, spent, tokens, blocks, waiting = {1: 1.0, 2: 1.6, 4: 1.9}, 0.0, 0, 0, False
    control = SpeculationPolicy.measured_for(DRAFTER, costs)
    sequence = control.begin()
    while tokens < 2000:
        kind = control.choose(1, [sequence])
        blocks += kind != PLAIN_STEP
        matched, late = int(kind != PLAIN_STEP and not blocks % 3), 2.0 * (kind != PLAIN_STEP and waiting)
        waiting = kind == PLAIN_STEP
        control.observe(1, kind, costs[kind.tokens] + late, [sequence], [matched], late=late)
        spent, tokens = spent + costs[kind.tokens] + late, tokens + 1 + matched
    assert spent < 1.012 * tokens
    for width in (2, 4):  # what is caught up with is no part of what a block costs
        assert control.cost(1, StepPlan.of(DRAFTER, width)) == pytest.approx(costs[width])


def test_one_stalled_catch_up_keeps_no_blocks_away():
    """90 ms of it, once, where a block takes 3: the average was 18 for twenty blocks, and none of them seemed affordable."""
    control, kind = SpeculationPolicy.measured_for(DRAFTER, {1: 1.0, 4: 3.0}), StepPlan.of(DRAFTER, 4)
    sequence = control.begin()
    for _ in range(2):
        control.choose(1, [sequence])
        control.observe(1, PLAIN_STEP, 1.0, [sequence], [0])
    control._allowed = sequence.allowed = 12.0
    control.observe(1, kind, 93.0, [sequence], [3], late=90.0)
    assert control._uses[1].late < 3.0 and sequence.allowed > 6.0


def test_of_a_block_that_catches_up_the_rest_is_learnt_and_all_is_spent():
    """A cost that was measured too dear stayed: a block behind plain steps never seemed faster than that."""
    kind, left = StepPlan.of(DRAFTER, 4), []
    for late in (0.0, 2.0):
        control = SpeculationPolicy.measured_for(DRAFTER, {1: 1.0, 4: 3.0})
        sequence = control.begin()
        for _ in range(40):
            control.choose(1, [sequence])
            control.observe(1, PLAIN_STEP, 1.0, [sequence], [0])
        control._allowed = 10.0
        control.observe(1, kind, 1.2 + late, [sequence], [0], late=late)
        left.append(control._allowed)
        assert control.cost(1, kind) < 3.0
    assert left[0] - left[1] == pytest.approx(2.0, rel=0.02)
