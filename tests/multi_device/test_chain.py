"""Drafts that follow from each other, among several sequences: what is drafted is what is drafted for each of them alone."""

import subprocess
import sys

import numpy as np
import pytest
from engine.batch_helpers import Pair, accept, prompts, random_work, run

from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.errors import EngineError

WIDTHS = (8, 2, 1, 4, 8, 1, 3)


@pytest.fixture(scope="module", params=["mtp", "eagle3", "assistant", "dflash2", "dspark"])
def pair(request, tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("pair"), request.param)
    yield made
    made.close()


def drafts_of(engine, slot, step):
    """The drafts of a block whose width and accepted rows follow from ``step``, which counts for the slot alone."""
    width = WIDTHS[step % len(WIDTHS)]
    result = engine.step({slot: Draft(width) if width > 1 else Verify()})[slot]
    take(engine, slot, step, result)
    return result.tokens.tolist()


def take(engine, slot, step, result):
    rows = 1 + step % len(result.ids)
    engine.accept(rows, int(result.ids[rows - 1]), slot)


def alone(pair, text, steps):
    engine = pair.session.engine
    engine.reset()
    engine.prefill(text)
    return [drafts_of(engine, 0, i) for i in range(steps)]


@pytest.mark.slow
def test_drafts_of_several_slots_are_those_of_each_alone(pair):
    texts, batch = prompts(4), pair.batch(4)
    want = [alone(pair, text, 14) for text in texts]
    slots = [batch.admit() for _ in texts]
    got, done, rng = [[] for _ in texts], [0] * 4, np.random.default_rng(1)
    for slot, text in zip(slots, texts):
        batch.step({slot: Prefill(text)})
    while min(done) < 14:
        who = [slot for slot in slots if done[slot] < 14 and rng.random() < 0.7]
        if not who:
            continue
        work = {slot: Draft(w) if (w := WIDTHS[done[slot] % len(WIDTHS)]) > 1 else Verify() for slot in who}
        for slot, result in batch.step(work).items():
            take(batch, slot, done[slot], result)
            got[slot].append(result.tokens.tolist())
            done[slot] += 1
    assert got == want


@pytest.mark.slow
def test_texts_are_those_of_solo_streams_whatever_slots_do(pair):
    texts = prompts(5)
    expected = dict(enumerate(pair.solo(text, 60) for text in texts))
    out = run(pair.batch(5), texts, 24, random_work(np.random.default_rng(3), expected, 8))
    assert all(pair.agrees(text, got) for text, got in zip(texts, out))


def test_a_rollback_to_before_the_block_drafts_the_same_again(pair):
    engine, text = pair.session.engine, prompts(3)[2]
    engine.reset()
    engine.prefill(text)
    for rows in (3, 8, 1):
        first = engine.fused_step(8)
        engine.rollback(engine.rollback_range()[0])
        again = engine.fused_step(8)
        assert again.tokens.tolist() == first.tokens.tolist()
        engine.accept(rows, int(again.ids[rows - 1]))


@pytest.mark.slow
def test_slots_and_prompts_of_every_length(pair):
    """Its first row is paired with zeros, not with what the last sequence there left."""
    text, batch = prompts(2)[1][:1], pair.batch(2)
    want = alone(pair, text, 3)
    for _ in range(2):
        slot = batch.admit()
        batch.step({slot: Prefill(text)})
        assert [drafts_of(batch, slot, i) for i in range(3)] == want
        batch.release(slot)
    # In one chunk, in several, and with its last token alone: the hidden state of the token before is carried from chunk to chunk.
    engine, rng = pair.session.engine, np.random.default_rng(4)
    text = rng.integers(0, 256, 120).tolist()
    want = alone(pair, text, 3)
    for cuts in ((119,), (1, 2), (64, 96), (50,)):
        engine.reset()
        for first, end in zip((0, *cuts), (*cuts, 120)):
            engine.prefill(text[first:end])
        assert [drafts_of(engine, 0, i) for i in range(3)] == want


def test_a_block_that_is_given_up_changes_nothing(pair):
    engine, text = pair.session.engine, prompts(4)[3]
    want = alone(pair, text, 2)
    engine.reset()
    engine.prefill(text)
    engine.fused_step(8)
    assert engine.fused_step(8).tokens.tolist() == want[0]


@pytest.mark.slow
def test_accepting_through_the_helpers_gives_the_plain_text(pair):
    text, batch = prompts(3)[2], pair.batch(1)
    slot, out = batch.admit(), {0: []}
    accept(batch, batch.step({slot: Prefill(text)}), out)
    while len(out[0]) < 20:
        accept(batch, batch.step({slot: Draft(4)}), out)
    assert out[0][:20] == pair.solo(text, 20)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3])
def test_drafts_and_verified_rows_are_chosen_apart(pair, slots):
    """Three drafts in a graph of eight rows are those of a graph of four, and what is accepted of them leaves the same after."""
    text, batch = prompts(3)[2], pair.batch(slots)
    seen = []
    for verified in (0, 8, 16):
        slot = batch.admit()
        batch.step({slot: Prefill(text)})
        out = []
        for rows in (2, 4, 1, 3):
            result = batch.step({slot: Draft(4, verified=verified)})[slot]
            assert len(result.tokens) == len(result.ids) == 4
            out.append((result.tokens.tolist(), result.ids.tolist()))
            batch.accept(rows, int(result.ids[rows - 1]), slot)
        seen.append(out)
        batch.release(slot)
    assert seen[0] == seen[1] == seen[2]
    slot = batch.admit()
    batch.step({slot: Prefill(text)})
    with pytest.raises(EngineError, match="verified rows is 2"):
        batch.step({slot: Draft(4, verified=2)})
    batch.release(slot)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3])
def test_drafts_that_are_looked_at_first_are_the_same(pair, slots):
    """A constraint has the drafts made by a graph of their own, and may pass fewer of them on."""
    texts, batch = prompts(slots), pair.batch(slots)
    want = [alone(pair, text, 5) for text in texts]
    for text in texts:
        slot = batch.admit()
        batch.step({slot: Prefill(text)})
    seen = {}
    for step, width in enumerate(WIDTHS[:5]):
        work = {
            slot: Draft(width, check=lambda drafts, slot=slot: seen.setdefault((slot, step), drafts.tolist()) and len(drafts))
            for slot in range(slots)
        }
        if width == 1:
            work = dict.fromkeys(range(slots), Verify())
        for slot, result in batch.step(work).items():
            assert result.tokens.tolist() == want[slot][step]
            assert width == 1 or seen[slot, step] == result.tokens[1:].tolist()
            take(batch, slot, step, result)


SCRIPT = """
import sys
import pyggml_spec as ps

with ps.load(device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
    text, stats = session.generate("def f(", 12, ignore_end=True)
    with session.concurrent(slots=2, prefix_memory=0) as server:
        assert server.submit("def f(", 12, ignore_end=True).result(60)[0] == text
assert stats.emitted == 12
print([name for name in sys.modules if name.startswith("pyggml_spec.multi_device")])
"""


def test_one_device_imports_no_module_of_several():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
