"""Several sequences in one forward pass give what each of them gives alone, whatever the others do, did or left behind.

Solo streams come from the one-slot engine in plain decoding. The hybrid model carries recurrent state; the same harness runs on a dense
model and on one with sliding windows as control.
"""

from pathlib import Path

import numpy as np
import pytest
from architectures import others, params
from engine.batch_helpers import Pair, accept, prompts, random_work, run, serve
from random_gguf.model import Shape
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.cache.kv import GPU_KV_BUCKET, KV_BUCKET
from pyggml_spec.cache.slots import SlotRange, covering
from pyggml_spec.engine.batch import Draft, Prefill, Verify
from pyggml_spec.engine.graphs import commit_key
from pyggml_spec.engine.inputs import InputBuilder
from pyggml_spec.errors import ContextError, EngineError
from pyggml_spec.ggml.library import ffi, lib, text
from pyggml_spec.ggml.step_io import StepFields

pytestmark = pytest.mark.slow
KINDS = ("qwen35", "granitehybrid", "lfm2", "qwen3", "gemma4")  # states, rows alone, rings: what slots have to keep apart
OTHERS = others(KINDS)


@pytest.fixture(scope="module", params=params(KINDS, ("qwen35",)))
def pair(request, tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("pairs"), request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    made = Pair(tmp_path_factory.mktemp("hybrid"), "qwen35")
    yield made
    made.close()


@pytest.mark.parametrize("count", range(1, 8))
def test_distinct_prompts_equal_their_solo_streams(hybrid, count):
    texts = prompts(count)
    assert run(hybrid.batch(count), texts, 24) == [hybrid.solo(text, 24) for text in texts]


def test_identical_prompts_and_single_tokens_in_turn(pair):
    """Compared with each other, not with a model's answer: nothing can excuse a difference."""
    text = prompts(3)[2]
    answers = run(pair.batch(5), [text] * 5, 24)
    assert all(answer == answers[0] for answer in answers) and answers[0] == pair.solo(text, 24)
    # The shape of every step is the same and only the slot differs: a graph that was kept must not answer for the other one.
    texts, batch = prompts(2, seed=3), pair.batch(2)
    slots, out = [batch.admit(), batch.admit()], {0: [], 1: []}
    for slot, text in zip(slots, texts):
        accept(batch, batch.step({slot: Prefill(text)}), out)
    for _ in range(20):
        for slot in slots:
            accept(batch, batch.step({slot: Verify()}), out)
    assert [out[0], out[1]] == [pair.solo(text, 21) for text in texts]


def test_one_sequence_ends_in_the_middle_of_a_block(hybrid):
    texts, batch = prompts(4), hybrid.batch(4)
    want = [hybrid.solo(text, 30) for text in texts]
    slots, out = [batch.admit() for _ in texts], {i: [] for i in range(4)}
    accept(batch, batch.step({slot: Prefill(text) for slot, text in zip(slots, texts)}), out)
    batch.step({slot: Draft(16) for slot in slots})
    for slot in slots:
        batch.rollback(batch.rollback_range(slot)[0] + 1, slot) if slot != 1 else batch.release(slot)
    for slot in (0, 2, 3):  # one row of the block was kept: the last token after it is a draft, not the target's choice
        assert batch.slots[slot].cursor.committed == len(texts[slot]) + 1
        batch.slots[slot].cursor.last_token = want[slot][1]
        out[slot].append(want[slot][1])
    while min(len(out[s]) for s in (0, 2, 3)) < 30:
        accept(batch, batch.step({slot: Draft(16) for slot in (0, 2, 3) if len(out[slot]) < 30}), out)
    assert [out[s][:30] for s in (0, 2, 3)] == [want[s] for s in (0, 2, 3)]


@pytest.mark.parametrize("least", [KV_BUCKET, GPU_KV_BUCKET])
def test_slots_on_both_sides_of_what_a_ring_has_in_use(tmp_path, least):
    """A ring of 512 rows is read up to the span of the longest sequence: half of it at first, all of it behind its wrap."""
    pair, rng = Pair(tmp_path, "gemma4", n_ctx=1100), np.random.default_rng(5)
    texts = [rng.integers(0, 256, length).tolist() for length in (100, 210, 480, 30)]
    expected, spans = [pair.solo(text, 60) for text in texts], set()
    for count in (2, 4):
        batch = pair.batch(count, chunk=300)
        batch.kv._least = least  # 1,024 as on a GPU
        assert batch.kv.ring == 512
        slots = [batch.admit() for _ in range(count)]
        out = {slot: [] for slot in slots}
        for slot in slots:
            for first in range(0, len(texts[slot]), 300):
                results = batch.step({slot: Prefill(texts[slot][first : first + 300])})
            accept(batch, results, out)
        work = random_work(rng, dict(enumerate(expected)))
        while unfinished := [slot for slot in slots if len(out[slot]) < 60]:
            items = {slot: item for slot in unfinished if (item := work(slot, out[slot])) is not None}
            if items:
                accept(batch, batch.step(items), out)
        assert all(pair.agrees(texts[slot], out[slot][:60]) for slot in slots)
        spans |= {key.kv_bucket for key in batch.graphs.steps() if key.kind == "fused"}
    assert spans >= ({256, 512, 768} if least == KV_BUCKET else {1024})
    pair.close()


def test_no_step_reads_what_others_left_in_the_step_buffer(pair, monkeypatch):
    """Graphs share it: where one has ids of padding rows, another has logits. A decoding slot beside a prompt had such rows, and their embeddings
    were looked up wherever the bytes of a logit pointed."""
    checked = []

    def fill(name):
        of = getattr(InputBuilder, name)

        def filled(self, step, *args):
            step.fields.io.mirror[:] = 0x41
            of(self, step, *args)

        return filled

    launch = StepFields.launch

    def checked_launch(fields):
        for name in ("tokens", "given"):
            ids = fields.host.get(name, np.zeros(0, np.int32))
            ids = ids[: max(0, fields._upload_end - fields._offsets.get(name, 0)) // 4]
            assert ((ids >= 0) & (ids < pair.session.target.n_vocab)).all(), ids  # ggml would end the process
            checked.append(ids.size)
        launch(fields)

    for name in ("certain", "block", "draft"):
        monkeypatch.setattr(InputBuilder, name, fill(name))
    monkeypatch.setattr(StepFields, "launch", checked_launch)
    batch, texts = pair.batch(3), [[1, 2], [3, 4, 5, 6, 7], [8, 9, 10]]
    got = {batch.admit(): [] for _ in texts}
    accept(batch, batch.step({0: Prefill(texts[0])}), got)
    accept(batch, batch.step({0: Verify(), 1: Prefill(texts[1])}), got)
    accept(batch, batch.step({0: Draft(4), 1: Verify(), 2: Prefill(texts[2])}), got)
    for slot, text in enumerate(texts):
        assert pair.agrees(text, got[slot])
    assert serve(pair, seed=65, requests=4) == [] and max(checked) > 16


@pytest.mark.parametrize("poison", [0xFF, 0x71, 0x3E], ids=["NaN bytes", "1e30", "0x3e bytes"])
def test_a_poisoned_freed_slot_changes_nothing(pair, poison):
    texts, clean = prompts(4, seed=7), pair.batch(4)
    want, batch = run(clean, texts, 20), pair.batch(4)
    slots, out = [batch.admit() for _ in texts], {i: [] for i in range(4)}
    for slot, text in zip(slots, texts):
        accept(batch, batch.step({slot: Prefill(text)}), out)
    for _ in range(4):
        accept(batch, batch.step({slot: Draft(16) for slot in slots}), out)
    for gone in (1, 2):
        batch.release(gone)
        for cache in (batch.kv, batch.draft_kv):
            cache.fill_slot(gone, poison)
        if batch.recurrent is not None:
            batch.recurrent.fill_slot(gone, poison)
    for _ in range(2):
        accept(batch, batch.step({0: Draft(16), 3: Draft(16)}), out)
    assert batch.admit() == 1
    out[1] = []
    accept(batch, batch.step({1: Prefill(texts[1]), 0: Draft(16), 3: Draft(16)}), out)  # 5 rows of prompt in a step with drafts
    while min(len(out[s]) for s in (0, 1, 3)) < 20:
        accept(batch, batch.step({slot: Draft(16) for slot in (0, 1, 3)}), out)
    assert [out[s][:20] for s in (0, 1, 3)] == [want[s] for s in (0, 1, 3)]


@pytest.mark.parametrize("gone, between", [(1, None), (2, 4)], ids=["same width", "another width between"])
def test_a_block_of_nan_leaves_nothing_in_its_slot(hybrid, gone, between):
    """A sequence whose verified block is NaN throughout is released: conv rows, keys, decays and betas of that block are stale then. Rows that are
    switched off are multiplied by 0, which NaN survives, so they are zeroed: at the slot's next sequence for the layout of that moment, and for
    every other layout when it begins. Emptying either, or leaving the betas out, changed nothing that a test saw.
    """
    texts = prompts(3, seed=11)
    want = run(hybrid.batch(3), texts, 24)
    batch, out = hybrid.batch(3), {i: [] for i in range(3)}
    for slot, text in zip([batch.admit() for _ in texts], texts, strict=True):
        accept(batch, batch.step({slot: Prefill(text)}), out)
    table, row = hybrid.session.target.weights["token_embd.weight"], 300  # a token that neither prompts nor drafts have
    held = ffi.buffer(ffi.cast("char *", table.data) + row * table.nb[1], table.nb[1])
    whole = bytes(held)
    held[:] = b"\xff" * len(whole)
    others = [slot for slot in range(3) if slot != gone]
    poisoned = batch.step({gone: Verify([row] * 15)} | {slot: Draft(16) for slot in others})
    held[:] = whole
    assert not poisoned.pop(gone).target_finite
    accept(batch, poisoned, out)
    batch.release(gone)
    if between is not None:  # these steps do not cover the slot, which is zeroed for their layout then
        accept(batch, batch.step({slot: Draft(between) for slot in others}), out)
    assert batch.admit() == gone
    out[gone] = []
    accept(batch, batch.step({gone: Prefill(texts[gone])}), out)
    while min(len(tokens) for tokens in out.values()) < 24:
        results = batch.step({slot: Draft(16) for slot in range(3)})
        assert all(result.target_finite for result in results.values())
        accept(batch, results, out)
    assert all(hybrid.agrees(texts[slot], out[slot][:24]) for slot in range(3)) and want[gone] == out[gone][:24]


def test_four_prompts_of_512_tokens(tmp_path):
    pair = Pair(tmp_path, "qwen35", n_ctx=768)
    texts, batch = [np.random.default_rng(i).integers(0, 256, 512).tolist() for i in range(4)], pair.batch(4)
    slots = [batch.admit() for _ in texts]
    before, computes = batch.totals.forwards, sum(c.computes for c in batch.graphs.counters().values())
    got = batch.logits_together(dict(zip(slots, texts)))
    assert batch.totals.forwards - before == 1 and sum(c.computes for c in batch.graphs.counters().values()) - computes == 1
    assert batch.totals.rows_used == batch.totals.rows_computed == 4 * 512
    engine = pair.session.runner
    for slot, text in zip(slots, texts):
        engine.reset()
        want = engine.logits(text)
        assert (((got[slot] - want) ** 2).sum() / (want**2).sum()) <= 1e-10
        assert abs(_perplexity(got[slot], text) / _perplexity(want, text) - 1) <= 1e-6 and _perplexity(want, text) > 10
    pair.close()
    # The embedded target on Python source: what it has learnt is still there when four texts share a pass.
    text = Path(np.__file__).parent.joinpath("lib", "_function_base_impl.py").read_text()
    with ps.load(device="CPU", threads=1, n_ctx=512, draft_width=8) as session:
        ids = session.tokenizer.encode(text[:12000])
        texts = [ids[512 * i : 512 * (i + 1)] for i in range(4)]
        with session.batch(4) as scheduler:
            batch = scheduler.runner
            got = batch.logits_together({batch.admit(): part for part in texts})
            assert batch.totals.forwards == 1
        for slot, part in enumerate(texts):
            session.runner.reset()
            want = session.runner.logits(part)
            assert ((got[slot] - want) ** 2).sum() <= 1e-10 * (want**2).sum() and 2 < _perplexity(got[slot], part) < 100


def _perplexity(logits, text) -> float:
    rows = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    picked = rows[np.arange(len(text) - 1), text[1:]] - np.log(np.exp(rows).sum(axis=1))
    return float(np.exp(-picked.mean()))


@pytest.mark.parametrize(
    "pair, seed", [(arch, seed) for arch in KINDS for seed in range(2)] + [(arch, 6) for arch in OTHERS], indirect=["pair"]
)
def test_ragged_steps_with_random_acceptance(pair, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 8))
    texts = prompts(count, seed)
    want = {i: pair.solo(text, 24) for i, text in enumerate(texts)}
    got = run(pair.batch(count), texts, 24, random_work(rng, want))
    assert all(pair.agrees(text, tokens) for text, tokens in zip(texts, got)) and pair.ties <= 2


def _after_block(pair, text, drafts):
    """A batch of two whose slot 0 has verified ``drafts`` behind ``text``; slot 1 is busy with something else."""
    batch = pair.batch(2)
    assert (batch.admit(), batch.admit()) == (0, 1)
    batch.step({0: Prefill(text), 1: Prefill([9, 8, 7])})
    batch.step({0: Verify(drafts), 1: Draft(4)})
    batch.accept(1, 5, 1)
    return batch


def _continues(batch, text, pair, n=6, slot=0):
    """Whether plain tokens from here on are those of a fresh sequence that was fed ``text``; its last token is not computed yet."""
    out = []
    for _ in range(n):
        r = batch.step({slot: Verify()})[slot]
        batch.accept(1, int(r.ids[0]), slot)
        out.append(int(r.ids[0]))
    return out == pair.solo(text, n)


DRAFTS = np.random.default_rng(6).integers(0, 256, 15).tolist()


@pytest.mark.parametrize("keep", range(17))
def test_rollback_to_every_length_of_a_block(hybrid, keep):
    text = prompts(3, seed=4)[2]
    first, batch = hybrid.solo(text, 1)[0], _after_block(hybrid, text, DRAFTS)
    batch.accept(16, 3, 0)
    batch.rollback(len(text) + keep, 0)
    rows = [*text, first, *DRAFTS]
    assert batch.slots[0].cursor.committed == len(text) + keep
    if keep < 16:
        assert batch.slots[0].cursor.last_token == rows[len(text) + keep]
    assert _continues(batch, [*rows[: len(text) + keep], batch.slots[0].cursor.last_token], hybrid)


def test_rollbacks_folds_and_their_limits(hybrid):
    text = prompts(3, seed=4)[2]
    first, batch = hybrid.solo(text, 1)[0], _after_block(hybrid, text, DRAFTS)
    for keep in (12, 3, 9):
        batch.rollback(len(text) + keep, 0)
    assert _continues(batch, [*text, first, *DRAFTS[:9]], hybrid)
    batch = _after_block(hybrid, text, DRAFTS)
    batch.rollback(len(text) + 5, 0)
    for n in (0, len(text) - 1, len(text) + 17):
        fails_with(EngineError, f"{n} tokens.*{len(text)} to {len(text) + 16}", batch.rollback, n, 0)
    assert _continues(batch, [*text, first, *DRAFTS[:5]], hybrid)
    # What a snapshot does first: the uncommitted block goes into the state, and rollback starts from there.
    text = prompts(3, seed=4)[2]
    first, batch = hybrid.solo(text, 1)[0], _after_block(hybrid, text, DRAFTS)
    batch.accept(7, 11, 0)
    batch.settle()
    n = len(text) + 7
    assert batch.rollback_range(0) == (n, n)
    with pytest.raises(EngineError):
        batch.rollback(n - 1, 0)
    assert _continues(batch, [*text, first, *DRAFTS[:6], 11], hybrid)


def test_after_plain_steps_only_the_current_length_is_left(hybrid):
    """llama.cpp accepts a rollback here and returns a wrong state."""
    text = prompts(3, seed=4)[2]
    want, batch = hybrid.solo(text, 12), hybrid.batch(2)
    batch.admit()
    batch.step({0: Prefill(text)})
    for token in want[1:5]:
        batch.step({0: Verify()})
        batch.accept(1, token, 0)
    n = len(text) + 4
    assert batch.rollback_range(0) == (n, n)
    for wrong in (n - 1, n - 4, n + 1):
        fails_with(EngineError, "cannot be rolled back", batch.rollback, wrong, 0)
    batch.rollback(n, 0)
    assert _continues(batch, [*text, *want[:5]], hybrid)


@pytest.mark.parametrize("work", [Verify(), Prefill([7, 8, 9])], ids=["plain token", "prompt"])
def test_an_open_block_outlives_certain_rows_of_its_neighbours(hybrid, work):
    """Slot 1 waits with its block while slots 0 and 2, one with an uncommitted block, go on in steps that cover it."""
    texts = prompts(3, seed=4)
    batch, want = hybrid.batch(3), hybrid.solo(texts[1], 24)
    assert [batch.admit() for _ in texts] == [0, 1, 2]
    batch.step({slot: Prefill(text) for slot, text in enumerate(texts)})
    r = batch.step({0: Draft(16), 1: Verify(want[1:8] + [3] * 8), 2: Draft(16)})
    batch.accept(3, 5, 0), batch.accept(2, 6, 2)
    n = len(texts[1])
    for _ in range(3):
        batch.step({0: work, 2: work})
        for slot in (0, 2):
            if batch.slots[slot].open_rows:
                batch.accept(1, 9, slot)
    fails_with(EngineError, "slot 1 .*open block", lambda: batch.step({0: Draft(16), 2: Draft(16)}))
    assert batch.slots[1].cursor.committed == n
    batch.accept(8, int(r[1].ids[7]), 1)
    assert int(r[1].ids[7]) == want[8] and _continues(batch, [*texts[1], *want[:9]], hybrid, slot=1)


def test_what_cannot_be_done_is_said_and_changes_nothing(hybrid):
    batch = hybrid.batch(2)
    assert (batch.admit(), batch.admit(), batch.admit()) == (0, 1, None)
    text = prompts(3, seed=4)[2]
    batch.step({0: Prefill(text)})
    before = batch.totals.forwards
    for work, error, words in (
        ({}, EngineError, "at least one slot"),
        ({2: Verify()}, EngineError, "slot 2 has no sequence"),
        ({1: Verify()}, EngineError, "slot 1 has no last token"),
        ({0: Verify([1] * 16)}, EngineError, "17 rows"),
        ({0: Draft(1)}, EngineError, "block of 1 rows"),
        ({0: Prefill([])}, ContextError, "empty"),
        ({0: Prefill([9999])}, ContextError, "9999"),
        ({0: Prefill([1] * 512)}, ContextError, "do not fit"),
        ({0: Draft(16), 1: Prefill([1] * 17)}, EngineError, "at most 16 rows"),
    ):
        fails_with(error, words, batch.step, work)
    assert batch.totals.forwards == before
    fails_with(EngineError, "1 rows cannot be accepted of a block of 0", batch.accept, 1, 5, 0)
    for slot, words in ((-1, "the slot is -1"), (2, "slot 2 has no sequence"), (True, "the slot is True")):  # -1 was the last one
        for call in (batch.reset, batch.settle, lambda slot: batch.read_candidates(4, slot)):
            fails_with(EngineError, words, call, slot=slot)
    batch.step({0: Draft(16)})
    fails_with(EngineError, "nothing was accepted of", lambda: batch.step({0: Verify()}))
    batch.rollback(len(text), 0)
    assert _continues(batch, [*text, batch.slots[0].cursor.last_token], hybrid)


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 8, 12, 64])
def test_a_step_covers_few_rows_too_many_in_few_different_ways(slots):
    rng, seen = np.random.default_rng(slots), set()
    for _ in range(500):
        used = rng.choice(slots, int(rng.integers(1, slots + 1)), replace=False).tolist()
        covered = covering(used, slots)
        assert set(used) <= set(covered.slots) and covered.slots.stop <= slots
        seen.add(covered)
    lowest = {n: covering(range(n), slots).count for n in range(1, slots + 1)}
    assert all(count < 1.5 * n for n, count in lowest.items()) and len(seen) < 3 * slots
    if slots == 8:
        assert lowest == {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 6, 7: 8, 8: 8}


def test_candidates_of_requests_that_want_different_numbers(hybrid):
    """As on a GPU: so many of each row's largest logits as the most demanding request wants, and never fewer; all rows if one needs all."""
    texts, batch = prompts(3, seed=9), hybrid.batch(3)
    assert [batch.admit() for _ in range(3)] == [0, 1, 2]

    def run(wanted):
        for slot, count in enumerate(wanted):
            batch.slots[slot].candidates = count
        batch.step({0: Draft(8), 1: Verify([5, 6]), 2: Verify()})
        rows = [(ids, logits.copy()) for ids, logits in (batch.candidates(row, slot) for slot, row in ((0, 3), (1, 2), (2, 0)))]
        for slot in range(3):
            batch.rollback(batch.rollback_range(slot)[0], slot)
        return rows

    batch.step({slot: Prefill(text) for slot, text in enumerate(texts)})
    whole = run((None, 40, 0))
    for wanted, count in (((40, 0, 3), 64), ((65, 0, 0), 256)):
        for (_, logits), (ids, best) in zip(whole, run(wanted)):
            assert len(ids) == min(count, hybrid.session.target.n_vocab) == len(set(ids))
            assert np.allclose(best, logits[ids], atol=1e-4) and best.min() >= np.sort(logits)[-len(ids)] - 1e-4


def test_eight_ragged_slots_share_one_graph_per_span(tmp_path):
    """Whatever their lengths and widths, and it is there before it is needed: no step waits for a graph, no buffer grows."""
    pair = Pair(tmp_path, "qwen35", n_ctx=1024)
    batch, rng = pair.batch(8), np.random.default_rng(0)
    batch.prebuilder.overlaps = True  # as on a GPU
    slots, out = [batch.admit() for _ in range(8)], {i: [] for i in range(8)}
    for slot, length in zip(slots, (3, 250, 17, 90, 128, 1, 60, 200)):
        accept(batch, batch.step({slot: Prefill([slot + 1] * length)}), out)
    planned = {key.kv_bucket for key in batch.graphs.steps() if key.kind == "fused"}  # the one that needs most memory, whichever that is
    batch.step({slot: Draft(16) for slot in slots})
    waited = 0
    while max(slot.cursor.committed for slot in batch.slots) < 900:
        for slot in slots:
            batch.accept(int(rng.integers(1, batch.slots[slot].open_rows + 1)), 7, slot)
        kept = list(batch.graphs.steps().values())
        batch.step({slot: Draft(16 if slot == 1 else int(rng.integers(9, 17))) for slot in slots})
        waited += not any(batch.resources.last is step for step in kept)
    spans = [key.kv_bucket for key in batch.graphs.steps() if key.kind == "fused"]
    assert waited == 0 and sorted(spans) == sorted({*planned, 512, 768, 1024}) and len(planned) <= 2
    assert sum(c.buffer_growths for c in batch.graphs.counters().values()) == sum(r.buffer_bytes > 0 for r in batch.graphs.roles.values())
    pair.close()


COPIES = ("CPY", "CONT", "DUP", "GET_ROWS", "CONCAT", "REPEAT")


def _state_copies(graph, floats: int) -> int:
    """Nodes that do nothing but move at least ``floats`` values."""
    nodes = [lib.ggml_graph_node(graph.gf, i) for i in range(graph.n_nodes)]
    return sum(text(lib.ggml_op_desc(n)) in COPIES and n.ne[0] * n.ne[1] * n.ne[2] * n.ne[3] >= floats for n in nodes)


@pytest.fixture(scope="module")
def large_states(tmp_path_factory):
    """Three delta-net layers with states of 65,536 floats, larger than anything else that a step moves."""
    made = Pair(tmp_path_factory.mktemp("large"), "qwen35", n_ctx=256, shape=Shape(delta_head=128, delta_k=1))
    yield made
    made.close()


def test_slots_move_no_state_but_the_one_write_back(large_states):
    engine, floats = large_states.session.runner, 128 * 128 * 4
    back = 0 if large_states.session.backend.level is not None else 3
    counts = {}
    for role, width in (("prefill", 32), ("plain", 1), ("verify", 4), ("fused", 4), ("fused", 16)):
        counts[role, width] = _state_copies(engine.graphs.get(engine.graphs.key(role, width, 256)).graph, floats)
    assert counts == {("prefill", 32): back, ("plain", 1): back, ("verify", 4): 0, ("fused", 4): 0, ("fused", 16): 0}
    assert _state_copies(engine.graphs.get(commit_key(16, engine.graphs.every, 0, True)).graph, floats) == 0
    # Of all slots in place; some of many are replayed layer by layer, with one write-back each, which native kernels do not need.
    batch, floats = large_states.batch(4), 128 * 128 * 4
    back = 0 if large_states.session.backend.level is not None else 3
    every, half = SlotRange(0, 4), SlotRange(2, 2)
    for role, width, covered, want in (
        ("plain", 1, every, back), ("prefill", 32, SlotRange(1, 1), back), ("fused", 4, every, 0), ("verify", 4, every, 0), ("fused", 4, half, back),
    ):  # fmt: skip
        assert _state_copies(batch.graphs.get(batch.graphs.key(role, width, 256, covered)).graph, floats) == want, (role, width, covered)
