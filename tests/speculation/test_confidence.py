"""How many drafts are verified, by what their drafter says of each: what it says counts for as much as it was right."""

import random

import pytest
from random_gguf.archs import write_qwen3
from random_gguf.dflash2 import write_dspark
from random_gguf.model import Shape

import pyggml_spec as ps
from pyggml_spec.engine.batch import Draft, Prefill
from pyggml_spec.engine.sequence import GenerationOptions
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.speculation.confidence import Confidence
from pyggml_spec.speculation.policy import PLAIN_STEP, SpeculationPolicy, StepPlan

COSTS = {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.2, 16: 3.6}


def test_as_many_as_win_more_than_they_cost():
    confidence, pace = Confidence(COSTS), 1.5
    assert confidence.worth({0: [0.99] * 15}, pace) == 15 and confidence.worth({0: [0.01] * 15}, pace) == 0
    assert confidence.worth({0: [0.99, 0.99, 0.99, 0.1, *[0.99] * 11]}, pace) == 3
    assert confidence.worth({0: []}, pace) == 0 and confidence.worth({0: [float("nan")] * 3}, pace) == 0


def test_what_is_said_is_weighed_by_how_often_it_was_right():
    confidence = Confidence(COSTS)
    for _ in range(60):
        confidence.worth({0: [0.95, 0.95, 0.25]}, 0.1)
        confidence.observe({0: (3, 0)})  # it says much of what is never right
    assert confidence.chance(0.95) < 0.2 and confidence.chance(0.25) == 0.25 and confidence.worth({0: [0.95] * 7}, 1.0) == 0
    for _ in range(400):
        confidence.worth({0: [0.25] * 7}, 0.1)
        confidence.observe({0: (7, 7)})
    assert confidence.chance(0.25) > 0.9 and confidence.worth({0: [0.25] * 7}, 1.0) == 7


def test_blocks_that_are_cut_where_their_drafter_doubts_take_less_time():
    """A drafter whose next drafts are right up to a place that it knows, 0 to 15: fixed widths verify too much or too little."""

    def spent(cut):
        rng, confidence, total, done = random.Random(1), Confidence(COSTS), 0.0, 0
        while done < 4000:
            right = rng.choice((0, 1, 3, 7, 15))
            said = [0.95 if i < right else 0.05 for i in range(15)]
            rows = 1 + confidence.worth({0: said}, 1.8) if cut is None else cut
            matched = min(right, rows - 1)
            confidence.observe({0: (rows - 1, matched)})
            total += 0.5 + COSTS[next(w for w in COSTS if rows <= w)]
            done += matched + 1
        return total

    assert spent(None) < 0.85 * min(spent(rows) for rows in COSTS)


def test_what_cuts_save_is_an_average_over_blocks():
    """Half of the blocks are cut to their first row; a narrower block is cut as far as it reaches beyond, a wider one no further."""
    confidence = Confidence(COSTS)
    assert confidence.saved_ms(8) == 0
    for i in range(200):
        confidence.worth({0: [0.5] * 7}, 1.0)
        confidence.observe({0: (0 if i % 2 else 7, 0)})
    assert confidence.saved_ms(8) == pytest.approx((COSTS[8] - COSTS[1]) / 2, rel=0.05)
    assert confidence.saved_ms(4) == pytest.approx((COSTS[4] - COSTS[1]) / 2, rel=0.05)
    assert confidence.saved_ms(16) == pytest.approx((COSTS[16] - COSTS[1]) / 2, rel=0.05) and confidence.saved_ms(
        1
    ) == 0 == confidence.saved_ms(3)


GIVEN = {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}


def decoded(seed, counted, tokens=2000):
    """Tokens per plain step of a text whose next seven drafts are right four times in ten and wrong otherwise, which their drafter knows, under
    width control. ``counted``: whether that is told what cuts save. Drafts cost 0.3 of a plain step."""
    name, rng, confidence = "draft-dspark", random.Random(seed), Confidence(GIVEN)
    control = SpeculationPolicy.measured_for(name, {rows: ms + 0.3 * (rows > 1) for rows, ms in GIVEN.items()})
    control.confidence = {name: confidence} if counted else {}
    sequence, spent, done = control.begin(), 0.0, 0
    while done < tokens:
        kind, right = control.choose(1, [sequence]), 7 if rng.random() < 0.4 else 0
        ms, matched, rows = 1.0, 0, 1
        if kind != PLAIN_STEP:
            worth = confidence.worth(
                {0: [0.95 if i < right else 0.05 for i in range(kind.tokens - 1)]}, control.tokens_per_ms(1, kind, [sequence])
            )
            rows = next(w for w in GIVEN if worth < w)
            matched = min(right, rows - 1)
            confidence.observe({0: (rows - 1, matched)})
            ms = 0.3 + GIVEN[rows]
        control.observe(1, kind, ms, [sequence], [matched], rows == kind.tokens)
        spent, done = spent + ms, done + matched + 1
    return done / spent


def test_width_control_counts_what_doubts_save():
    """Blocks of eight rows bring 3.8 tokens: whole ones for 2.7 plain steps, cut ones for 1.9. As whole ones they were hardly ever in use."""
    told, untold = (sum(decoded(seed, counted) for seed in range(6)) / 6 for counted in (True, False))
    assert told > 1.7 > 1.15 * untold


def test_a_plan_has_a_cost_before_plain_steps_do():
    """N-gram drafts compare themselves with it while the steps of several slots are measured: KeyError."""
    plan = StepPlan.of("draft-dspark", 4)
    control = SpeculationPolicy([plan])
    control.confidence = {plan.method: Confidence(GIVEN)}
    states = [control.begin(), control.begin()]
    for _ in range(4):
        assert control.choose(2, states) == plan
        control.observe(2, plan, 2.0, states, [3, 3])
    assert control.choose(2, states) == PLAIN_STEP and control.cost(2, plan) == 2.0


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    files = write_qwen3(folder / "t.gguf", Shape(), "Q8_0"), write_dspark(folder / "d.gguf", Shape(), "Q8_0", confidence=True)
    with ps.load(*files, device="CPU", threads=1, n_ctx=512) as session:
        yield session


class Always(SpeculationPolicy):
    """Blocks of eight rows, whatever they give."""

    def __init__(self):
        costs = {PLAIN_STEP: 1.0, **{StepPlan.of("draft-dspark", n): COSTS[n] for n in (2, 4, 8)}}
        super().__init__(costs, costs)

    def choose(self, covered, sequences):
        return StepPlan.of("draft-dspark", 8) if any(sequences) else PLAIN_STEP


@pytest.mark.parametrize("bias, widths", [(-30.0, {1}), (30.0, {8})])
def test_a_session_verifies_what_the_head_believes_in(session, bias, widths):
    """The text stays the target's, and nothing is built for it behind the first steps."""
    want = session.generate("def f(", 40, mode="plain", ignore_end=True)[0]
    weight = session.drafter.weights["conf_proj.bias"]
    lib.ggml_backend_tensor_set(weight, ffi.new("float[]", [bias]), 0, 4)
    session.scheduler.policy = Always()
    session.scheduler.policy.confidence = {"draft-dspark": Confidence(COSTS)}
    session.scheduler.policy.confidence["draft-dspark"].observe = lambda *_: None  # the head of a random file is believed here
    text, stats = session.generate("def f(", 40, ignore_end=True)
    assert text == want and {*stats.widths} == widths
    assert (stats.graphs_built_after_warmup, stats.buffer_growths_after_warmup) == (0, 0)


def test_blocks_of_several_sequences_are_cut_together():
    """The rows of one are the rows of all: a sequence whose drafts are doubtful has them verified beside one whose are not."""
    confidence, sure, doubted = Confidence(COSTS), [0.99] * 15, [0.01] * 15
    assert confidence.worth({0: sure, 3: sure}, 1.5, 2) == 15 and confidence.worth({0: doubted, 3: doubted}, 1.5, 2) == 0
    assert confidence.worth({0: sure, 3: doubted}, 0.4, 2) == 15 and confidence.worth({0: sure, 3: doubted}, 3.0, 2) < 15
    confidence.worth({0: [0.95] * 7, 3: [0.25] * 7}, 0.1, 2)
    confidence.observe({0: (7, 0), 3: (7, 7)}, 2)
    assert confidence.chance(0.95) < 0.95 and confidence.chance(0.25) > 0.5


def test_what_rows_of_several_sequences_take_is_learnt():
    confidence = Confidence(COSTS)
    guessed = confidence.cost(4, 4)
    assert guessed == COSTS[16] and confidence.cost(4, 16) == pytest.approx(4 * COSTS[16])
    for milliseconds in (90.0, 90.0, *[2.0] * 60, 200.0):  # the first two build graphs, and the last one stalled
        confidence.worth({slot: [0.5] * 3 for slot in range(4)}, 0.1, 4)
        confidence.observe(dict.fromkeys(range(4), (3, 0)), 4, milliseconds)
    assert confidence.cost(4, 4) == pytest.approx(2.1) and confidence.cost(1, 4) == COSTS[4]


@pytest.mark.parametrize("bias, widths", [(-30.0, {1}), (30.0, {8})])
def test_slots_verify_what_the_head_believes_in(session, bias, widths):
    """In texts that stay the target's, after whole blocks have taught what they cost."""
    prompts = ["def f(", "import os\n", "x = ["]
    want = [session.generate(prompt, 24, mode="plain", ignore_end=True)[0] for prompt in prompts]
    weight = session.drafter.weights["conf_proj.bias"]
    lib.ggml_backend_tensor_set(weight, ffi.new("float[]", [bias]), 0, 4)
    with session.concurrent(slots=3) as server:
        scheduler = server.engine
        assert {*scheduler.policy.confidence} == {"draft-dspark"}
        scheduler.policy = Always()
        scheduler.policy.confidence = {"draft-dspark": Confidence(COSTS)}
        seen = []
        scheduler.policy.confidence["draft-dspark"].observe = lambda taken, *_: seen.append(taken)  # it is believed here
        for covered in (1, 2, 3):
            for plan in scheduler.policy.plans:
                for _ in range(4):
                    SpeculationPolicy.observe(scheduler.policy, covered, plan, 40.0, [], [])
            assert scheduler.policy.calibrated(covered)
        results = [handle.result() for handle in [server.submit(prompt, 24, ignore_end=True) for prompt in prompts]]
    assert [text for text, _ in results] == want
    assert seen and {verified for taken in seen for verified, _ in taken.values()} == {width - 1 for width in widths}
    assert any(len(taken) > 1 for taken in seen)


def test_slots_of_several_devices_have_their_graphs_at_load(tmp_path):
    """Those of drafts that are looked at before they are verified: their memory grew with the first of them."""
    files = write_qwen3(tmp_path / "t.gguf", Shape(), "Q8_0"), write_dspark(tmp_path / "d.gguf", Shape(), "Q8_0", confidence=True)
    more = {"device": "CPU,CPU", "tensor_split": [2, 2], "threads": 1, "n_ctx": 256, "draft_width": 8}
    with ps.load(*files, **more) as session, session.batch(2) as scheduler:
        engine, said = scheduler.runner, []
        for slot in (engine.admit(), engine.admit()):
            engine.step({slot: Prefill([1, 2, 3 + slot])})
        before = engine.memory(), engine.graphs.changes
        drafted = Draft(8, weigh=lambda of: said.append([*of]) or 7)
        engine.step({0: drafted, 1: drafted})
        assert (engine.memory(), engine.graphs.changes) == before and said == [[0, 1]]


def test_width_policy_of_slots_learns_whole_blocks_first(session):
    """A block that doubts had cut says nothing of what whole ones take: with nothing but such ones the costs had never been known."""
    with session.batch(2) as scheduler:
        scheduler.policy = SpeculationPolicy([StepPlan.of("draft-dspark", n) for n in (2, 4)])
        scheduler.policy.confidence = {"draft-dspark": Confidence(COSTS)}
        for start in (5, 9):
            scheduler.submit([start, 7, 8], GenerationOptions(120, ignore_end=True))
        while not scheduler.idle and not scheduler.policy.calibrated(2):
            scheduler.step()
        assert scheduler.policy.calibrated(2) and not scheduler.planner._weighed
