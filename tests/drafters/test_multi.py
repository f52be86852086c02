"""Several drafters of one target: each drafts what it drafts alone, whichever drafted before, and the text is the plain one."""

import itertools
import random
from contextlib import ExitStack, closing

import pytest
from ggml.kernel_graphs import LEVELS
from random_gguf.model import Shape, write_dflash, write_qwen35
from random_gguf.mtp import write_mtp, write_mtp_target
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.cache import hidden as features
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import EngineError, PairError
from pyggml_spec.ggml.library import lib
from pyggml_spec.speculation.policy import PLAIN_STEP, SpeculationPolicy, StepPlan

BLOCKS, CHAIN, BOTH = "draft-dflash", "draft-mtp", ["draft-dflash", "draft-mtp"]
PROMPTS = ["def quicksort(items):\n", "import os\n", "class Queue:\n    ", "x = [", "for i in range("]
KINDS = [
    StepPlan.of(BLOCKS, 4), StepPlan.of(CHAIN, 3, 4), StepPlan.of(CHAIN, 2), PLAIN_STEP, StepPlan.of(BLOCKS, 8),
    StepPlan.of(CHAIN, 5, 8),
]  # fmt: skip
VALUES = {
    "greedy": {},
    "sampled": {"sampling": ps.Sampling(seed=7, temperature=0.8)},
    "regex": {"sampling": ps.Sampling(seed=3, temperature=1.0, regex=r"def [a-z]{3,9}\(self\):\n    return [^\n]{3,20}\n")},
}


class InTurn(SpeculationPolicy):
    """Takes the kinds one after the other, whatever they give."""

    def __init__(self, kinds=KINDS):
        super().__init__(kinds, dict.fromkeys((PLAIN_STEP, *kinds), 1.0))
        self.plans, self._turn = list(kinds), itertools.cycle(kinds)

    def choose(self, covered, sequences):
        self.last = sequences
        return next(self._turn) if any(sequences) else PLAIN_STEP

    def observe(self, *args, **more):
        pass

    def reason(self, sequence):
        return "in turn"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, shape = tmp_path_factory.mktemp("files"), Shape()
    writers = {"target": write_mtp_target, "blocks": write_dflash, "layer": write_mtp, "plain": write_qwen35}
    return {name: write(folder / f"{name}.gguf", shape, "Q8_0") for name, write in writers.items()}


@pytest.fixture(scope="module")
def team(files):
    with ps.load(files["target"], files["blocks"], spec=BOTH, device="CPU", threads=1, n_ctx=512, draft_width=8) as session:
        yield session


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3])
def test_each_drafts_what_it_drafts_alone(files, team, slots):
    """After every token both draft; what the other one did before leaves no trace in caches, boundary and states."""
    with ExitStack() as stack:
        options = {"device": "CPU", "threads": 1, "n_ctx": 512, "draft_width": 8}
        each = [ps.load(files["target"], draft, spec=[m], **options) for m, draft in ((BLOCKS, files["blocks"]), (CHAIN, None))]
        alone = [stack.enter_context(session) for session in each]
        engines = [session.runner if slots == 1 else stack.enter_context(session.batch(slots)).runner for session in (team, *alone)]
        drafts = []
        for engine, methods in zip(engines, (BOTH, [BLOCKS], [CHAIN])):
            drafts.append({method: [] for method in methods})
            slot = engine.admit() if slots > 1 else 0
            if slots == 1:
                engine.reset()
            engine.prefill(list(range(40)), slot=slot)
            for i in range(24):
                kept = 1 + i % 3
                for method in methods:
                    result = engine.fused_step(4, slot=slot, drafter=method, verified=8 if method == CHAIN else 0)
                    drafts[-1][method].append(result.tokens[1:].tolist())
                    engine.rollback(engine.rollback_range(slot)[0], slot)
                ids = engine.verify_step([7, 7, 7], slot=slot)
                engine.accept(kept, int(ids.ids[kept - 1]), slot)
    assert drafts[0] == {**drafts[1], **drafts[2]} and drafts[0][BLOCKS] != drafts[0][CHAIN]


@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing")
@pytest.mark.parametrize("values", VALUES)
def test_the_text_is_plain_with_every_drafter(team, values):
    team.engine.policy = InTurn()
    for prompt in (PROMPTS[0], PROMPTS[0] + PROMPTS[1], PROMPTS[0]):  # after what was kept of the first
        plain, _ = team.generate(prompt, 48, mode="plain", **VALUES[values])
        whole, _ = team.generate(prompt, 48, mode="reference", **VALUES[values])
        text, stats = team.generate(prompt, 48, mode="speculative", **VALUES[values])
        assert text == plain == whole and {*stats.drafters} >= {*BOTH} and all(stats.drafters[method][1] > 0 for method in BOTH)


def test_nothing_is_built_while_drafters_take_turns(team):
    team.engine.policy = InTurn()
    team.generate(PROMPTS[0], 16, ignore_end=True)
    stats = team.generate(PROMPTS[0], 300, ignore_end=True)[1]
    assert len(stats.drafters) == 2 and (stats.graphs_built_after_warmup, stats.buffer_growths_after_warmup) == (0, 0)


@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing")
@pytest.mark.parametrize("values", VALUES)
def test_the_text_does_not_depend_on_slots(team, values):
    want = [team.generate(prompt, 24, mode="plain", **VALUES[values])[0] for prompt in PROMPTS]
    with team.concurrent(slots=4) as server:
        server.engine.policy = InTurn()
        got = [server.submit(prompt, 24, **VALUES[values]) for prompt in PROMPTS]
        results = [handle.result() for handle in got]
    assert [text for text, _ in results] == want
    assert values == "regex" or {*BOTH} <= {name for _, stats in results for name in stats.drafters}


def test_names_and_steps_of_two_drafters(files, team):
    both = {"device": "CPU", "threads": 1, "n_ctx": 256}
    fails_with(PairError, "both draft blocks", ps.load, files["plain"], [files["blocks"], files["blocks"]], **both)
    fails_with(PairError, "nothing that drafts as draft-mtp", ps.load, files["plain"], files["blocks"], spec=BOTH, **both)
    with ps.load(files["plain"], [files["layer"], files["blocks"]], draft_width=4, **both) as session:
        assert session.methods == (CHAIN, BLOCKS) and session.configuration().drafter == "layer.gguf and blocks.gguf"
    with team.batch(2) as scheduler:
        engine = scheduler.runner
        for slot in (engine.admit(), engine.admit()):
            engine.prefill([1, 2, 3], slot=slot)
        with pytest.raises(EngineError, match="cannot draft in one step"):
            engine.step({0: Draft(4, drafter=BLOCKS), 1: Draft(4, drafter=CHAIN)})
        fails_with(EngineError, "unknown drafting method 'suffix'", lambda: engine.step({0: Draft(4, drafter="suffix")}))


def test_a_layer_of_nan_switches_speculation_off_and_keeps_the_text(files):
    """Of a chain every draft after the first NaN is token 0: it has to be noticed, counted, and the text has to stay the target's."""
    for draft, spec in ((None, [CHAIN]), (files["blocks"], BOTH)):
        with ps.load(files["target"], draft, spec=spec, device="CPU", threads=1, n_ctx=512, draft_width=4) as session:
            want, chain = session.generate(PROMPTS[0], 20, mode="plain")[0], session.drafter.methods[-1]
            weight = chain.weights[f"{chain.prefix}nextn.hnorm.weight"]
            lib.ggml_backend_tensor_memset(weight, 0xFF, 0, 4)
            session.engine.policy = InTurn([StepPlan.of(CHAIN, 4), StepPlan.of(CHAIN, 3, 4)])
            text, stats = session.generate(PROMPTS[0], 20)
            assert stats.nan_drafts == 1 and stats.widths[1] == stats.steps - 1 and text == want
            assert session.engine.policy.last == [None], "no width is chosen for whom nobody drafts for"


def test_a_width_that_the_first_drafter_does_not_draft_is_refused_at_load(tmp_path):
    """Every generation had failed, with a sentence that named no remedy."""
    target, blocks = write_mtp_target(tmp_path / "t.gguf", Shape(), "Q8_0"), write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0", block=8)
    with pytest.raises(PairError, match="use `draft_width` 8 or less"):
        ps.load(target, blocks, device="CPU", threads=1, n_ctx=256, spec=BOTH, draft_width=16)


@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing")
def test_rows_that_wait_come_along(files):
    load = {"spec": BOTH, "device": "CPU", "threads": 1, "n_ctx": 512, "draft_width": 8, "chunk": 64}

    def drafts(engine):
        out = []
        for method in (*BOTH, *BOTH):
            out.append(engine.fused_step(4, drafter=method).tokens.tolist())
            engine.accept(2, 7)
        return out

    with ps.load(files["target"], files["blocks"], **load) as session:
        engine = session.runner
        for last in (BLOCKS, CHAIN, ""):
            for snapshots in (False, True):
                engine.reset()
                engine.prefill(list(range(40)))
                for method in (CHAIN, BLOCKS, last):
                    engine.accept(1, int(engine.plain_step().ids[0]))
                    if method:
                        engine.fused_step(4, drafter=method)
                        engine.accept(3, 9)
                if not snapshots:
                    want = drafts(engine)
                    continue
                with closing(engine.snapshot()) as kept:
                    assert drafts(engine) == want
                    engine.restore(kept)
                    assert drafts(engine) == want


@pytest.mark.slow
@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing")
def test_what_a_conversation_leaves_on_disk_has_the_rows_that_waited(files, tmp_path):
    """A slot keeps what its sequence leaves at its end, where the last step has left rows for both drafters to compute: without them the next turn,
    in a process that reads the file, would draft something else."""
    load = {"spec": BOTH, "device": "CPU", "threads": 1, "n_ctx": 512, "draft_width": 8, "chunk": 64}
    turn, waited = [*range(40, 100)], []

    def said(server, prompt, tokens, kinds=KINDS):
        server.engine.policy = InTurn(kinds)
        handle = server.submit(prompt, tokens, ignore_end=True)
        events = list(handle)
        return [token for event in events for token in event.tokens], [event.drafts for event in events], handle.stats

    def next_turn(server, history):
        tokens, drafts, stats = said(server, [*history, 7, 8, 9], 24)
        return tokens, drafts, stats.reused_tokens

    with ps.load(files["target"], files["blocks"], **load) as session:
        with session.concurrent(1, prefix_cache=tmp_path / "files") as server:
            engine, keep = server.engine.runner, server.engine.prefixes.store_end

            def kept(slot, *args, **more):
                waited.append([engine.hidden_states.missing(method, engine.slots[slot].cursor.committed) for method in BOTH])
                keep(slot, *args, **more)

            server.engine.prefixes.store_end = kept
            history = [*turn, *said(server, turn, 29, [StepPlan.of(BLOCKS, 4), StepPlan.of(CHAIN, 3, 4), *[PLAIN_STEP] * 29])[0]]
        assert min(waited[-1]) > 0, waited  # at its end, after what was kept of the prompt
        with session.concurrent(1, prefix_memory=0) as server:
            want = next_turn(server, history)
    with ps.load(files["target"], files["blocks"], **load) as session, session.concurrent(1, prefix_cache=tmp_path / "files") as server:
        got = next_turn(server, history)
    assert got[2] == len(history) - 1 and not want[2] and got[:2] == want[:2]


@pytest.mark.slow
@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing")
def test_several_answers_to_one_prompt_in_eight_slots(team):
    seeds = [ps.Sampling(seed=seed, temperature=0.8) for seed in range(8)]
    want = [team.generate(PROMPTS[0] * 6, 16, mode="plain", sampling=sampling)[0] for sampling in seeds]
    with team.concurrent(slots=8) as server:
        server.engine.policy = InTurn()
        handles = [server.submit(PROMPTS[0] * 6, 16, sampling=sampling) for sampling in seeds]
        assert [handle.result()[0] for handle in handles] == want


@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing")
def test_rows_wait_in_each_slot_for_itself(team):
    """Slots draft, verify and take plain tokens in steps of their own choice, by either drafter, alongside one that is not drafted for and one that ends:
    each has the drafts that a sequence alone has."""
    rng, steps = random.Random(5), 45
    with team.batch(5) as scheduler, closing(ExitStack()) as kept:
        engine, alone = scheduler.runner, team.runner
        lengths = {0: 11, 1: 40, 2: 70, 4: 33}
        for slot in range(5):
            assert engine.admit(drafting=slot != 4) == slot
            engine.prefill(list(range(slot, slot + lengths.get(slot, 20))), slot=slot)
        done = {slot: [] for slot in lengths}
        for i in range(steps):
            if i == 20:
                engine.release(3)
            if i == 10:
                snapshot = kept.enter_context(closing(engine.snapshot(1)))
            if i == 30:
                engine.restore(snapshot, 1)
                done[1].append(("restore", done[1].index(("snapshot",))))
            if i == 10:
                done[1].append(("snapshot",))
            method, work = rng.choice(["", "", *BOTH]), {}
            for slot in rng.sample(sorted(lengths), rng.randint(1, 4)):
                drafting = method and slot != 4 and rng.random() < 0.7
                work[slot] = Draft(4, drafter=method) if drafting else Verify(rng.choice([[], [], [7, 8, 9]]))
            if i == 5:
                work = {0: Verify(), 2: Prefill([3, 4, 5]), 1: Verify([7, 8, 9])}
            for slot, result in engine.step(work).items():
                item, many = work[slot], len(result.tokens)
                rows = rng.randint(1, many)
                done[slot].append((item, rows, result.tokens.tolist()))
                if not isinstance(item, Prefill):
                    engine.accept(rows, int(result.ids[rows - 1]), slot)
        catch_ups = engine.state.catch_ups
        used = sum(item.rows for work in done.values() for item, *_ in work if isinstance(item, (Draft, Verify, Prefill)))
    assert 0 < catch_ups < used / 4
    for slot in (0, 1, 2):
        alone.reset()
        alone.prefill(list(range(slot, slot + lengths[slot])))
        drafted, snapshot = 0, None
        for item, *what in done[slot]:
            if item == "snapshot":
                snapshot = alone.snapshot()
                continue
            if item == "restore":
                alone.restore(snapshot)
                snapshot.close()
                continue
            result = alone.step({0: item})[0]
            rows, tokens = what
            assert result.tokens.tolist() == tokens, slot
            drafted += isinstance(item, Draft)
            if not isinstance(item, Prefill):
                alone.accept(rows, int(result.ids[rows - 1]))
        assert drafted > 5


@pytest.mark.slow
@pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing")
@pytest.mark.parametrize("most, slots, at_once", [(100, 1, 512), (100, 2, 512), (64, 2, 512), (100, 2, 20), (20, 2, 16)])
def test_where_few_rows_can_wait_the_oldest_are_computed(team, monkeypatch, most, slots, at_once):
    """And drafts are those of a drafter for which all of them waited. A copy of 1,500 tokens paid 4 % of its time for rows that were not read.
    Graphs of many slots take few rows of each: 64 slots of the embedded pair took 67 MB for it."""
    drafts, catch_ups = [], []
    for few in (False, True):
        with monkeypatch.context() as patched:
            if few:
                patched.setattr(features, "room", lambda *_: most)
                patched.setattr(features, "AT_ONCE", at_once)
            engine = ModelRunner(team.backend, team.target, team.drafter, EngineOptions(n_ctx=512, width=8, slots=slots))
        with closing(engine):
            for slot in range(slots):
                assert slots == 1 or engine.admit() == slot
                engine.prefill(list(range(30 + slot)), slot=slot)
            for i in range(80):
                for slot, result in engine.step({slot: Verify([5, 6, 7] if (i + slot) % 3 else []) for slot in range(slots)}).items():
                    rows = 1 + i % len(result.tokens)
                    engine.accept(rows, int(result.ids[rows - 1]), slot)
            engine.rollback(engine.rollback_range(0)[0] + 1, 0)
            waited = engine.state.catch_ups
            for method in BOTH:
                done = engine.step(dict.fromkeys(range(slots), Draft(4, drafter=method)))
                drafts.append({slot: result.tokens.tolist() for slot, result in done.items()})
                for slot in done:
                    engine.accept(1, 3, slot)
            catch_ups.append(waited)
            batches = {key.verify_len for key in engine.graphs.steps() if key.kind == "catchup"}
            assert batches == ({8, 16, 32, 64} if not few or at_once == 512 else {8})
    assert drafts[:2] == drafts[2:] and catch_ups[0] == 0 < catch_ups[1] <= (8 if at_once == 512 else 60)


@pytest.mark.parametrize("slots, batch", [(1, 64), (8, 64), (12, 40), (64, 8), (4096, 8)])
def test_rows_that_are_caught_up_with_at_once(slots, batch):
    assert features.batch_of(slots) == batch


@pytest.mark.parametrize("slots", [1, 3])
def test_a_drafter_that_does_not_draft_catches_up_in_batches(files, slots):
    """Its rows were computed in every step: a plain step with both drafters took 1.21 times what it takes without."""
    with ExitStack() as stack:
        options = {"spec": BOTH, "device": "CPU", "threads": 1, "n_ctx": 512, "draft_width": 8}
        session = stack.enter_context(ps.load(files["target"], files["blocks"], **options))
        engine = session.runner if slots == 1 else stack.enter_context(session.batch(slots)).runner
        for slot in range(slots):
            assert slots == 1 or engine.admit() == slot
            engine.prefill(list(range(40)), slot=slot)
        for method, runs in (("", 2), (BLOCKS, 2), (CHAIN, 2), ("", 3), (BLOCKS, 2)):
            engine.settle()
            before = engine.state.catch_ups
            for _ in range(60):
                work = Draft(4, drafter=method) if method else Verify()
                for slot, result in engine.step(dict.fromkeys(range(slots), work)).items():
                    engine.accept(1, int(result.ids[0]), slot)
            assert engine.state.catch_ups - before <= runs
            if method == CHAIN:
                built = engine.graphs.counters()
        after = engine.graphs.counters()
        assert all(after[name].buffer_growths == was.buffer_growths for name, was in built.items()) and after.keys() == built.keys()
        assert all(after[name].graphs_built == was.graphs_built for name, was in built.items() if name.startswith("catchup"))
