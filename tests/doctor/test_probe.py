"""The probe drafts what the engine drafts; otherwise it would judge another program."""

from contextlib import closing

import numpy as np
import pytest
from gguf_io.build import STR, Model
from random_gguf.model import Shape, write_qwen35
from random_gguf.mtp import write_mtp, write_mtp_target
from sessions import loaded

import pyggml_spec as ps
from pyggml_spec.doctor import trees
from pyggml_spec.doctor.examine import Effort, Subject, examine, examine_drafter
from pyggml_spec.doctor.probe import BEST, Measured, Probe, Reading, _mask, ranks_of, write_passages
from pyggml_spec.doctor.report import FAIL
from pyggml_spec.errors import PyspecError
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET

PROMPT = "class Stack:\n    def __init__(self):\n"
session = loaded(DEMO_TARGET, DEMO_DRAFTER, n_ctx=512, draft_width=16)


def test_the_probe_drafts_what_the_engine_drafts(session):
    engine, layers = session.engine, session.drafter.hp.target_layers
    passage = write_passages(engine, [session.tokenizer.encode(PROMPT)], layers, 80)[0]
    with closing(Probe(session.backend, session.target, session.drafter, [passage], blocks=6)) as probe:
        measured, anchors = probe.measure(Reading(session.drafter.hp)), probe.anchors(passage)
    ours = measured.drafts.reshape(len(anchors), -1)
    assert measured.finite and len(anchors) == 6
    for drafts, anchor in zip(ours, anchors):
        engine.reset()
        engine.prefill(passage.tokens[:anchor])
        assert engine.cursor.last_token == passage.tokens[anchor]
        theirs = engine.fused_step(16).tokens[1:]
        agree = int((drafts == theirs).sum())
        assert agree >= 14, (anchor, drafts, theirs)  # other batch shapes: a near-tie may fall the other way
    assert measured.matched.max() > 3


def test_likelihoods_and_captured_layers(session):
    engine, layers = session.engine, session.drafter.hp.target_layers
    prompts = [session.tokenizer.encode(text) for text in (PROMPT, "import os\n\n")]
    passages = write_passages(engine, prompts, layers, 60)
    with closing(Probe(session.backend, session.target, session.drafter, passages, blocks=4)) as probe:
        right, wrong = probe.measure(Reading(session.drafter.hp)), probe.measure(Reading(session.drafter.hp, features_of=1))
    assert right.likelihood.mean() > wrong.likelihood.mean() + 1
    assert right.likelihood.max() <= 0 and np.isfinite(wrong.likelihood).all()
    engine = session.engine
    ids = session.tokenizer.encode(PROMPT)
    engine.reset(drafting=False)
    chosen, features = engine.capture(ids, (0, 8))
    assert features.shape == (2, len(ids), 512) and chosen.shape == (len(ids),)
    engine.reset(drafting=False)
    assert engine.logits(ids).argmax(axis=1).tolist() == chosen.tolist()
    for bad in (-1, 9):
        with pytest.raises(ps.EngineError, match=f"captured layer is {bad}"):
            engine.capture(ids, (bad,))


def test_mask_shows_each_block_itself_and_what_was_committed():
    anchors = np.array([1, 3])
    seen = np.isfinite(_mask(anchors, 2, 3, 8, 0, False).astype(np.float32))
    assert seen.astype(int).tolist() == [
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 1, 1, 0],
    ]
    causal = np.isfinite(_mask(anchors, 2, 3, 8, 0, True).astype(np.float32))
    assert causal[0, 4] == 0 and causal[1, 3] == 1
    window = np.isfinite(_mask(anchors, 2, 3, 8, 2, False).astype(np.float32))
    assert window[2].astype(int).tolist() == [0, 0, 1, 0, 0, 1, 1, 0]  # position 3 sees 2 and later


@pytest.mark.slow
def test_targets_that_draft_for_themselves(tmp_path):
    target = write_mtp_target(tmp_path / "t.gguf", Shape())
    report = examine(target, device="CPU", threads=1, n_ctx=256, prompts=["def f(x):\n    return x"])
    names = [check.name for check in report.checks]
    assert {"drafter weights", "target weights", "micro-batches", "cache hit", "repeated prompt", "acceptance", "break-even"} <= set(names)
    assert "mask embedding" not in names and not [check for check in report.failed if check.name != "tokenizer"]
    target, other = write_qwen35(tmp_path / "t.gguf", Shape()), write_mtp(tmp_path / "d.gguf", Shape(n_embd=128))
    report = examine(target, other, device="CPU", threads=1, n_ctx=256, prompts=["def f(x):\n    return x"])
    check = report.check("pair")
    assert check.verdict == FAIL and "hidden states of 128 values" in check.found
    with pytest.raises(PyspecError, match="examines a pair"):
        examine(write_qwen35(tmp_path / "t.gguf", Shape()), device="CPU")


TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}{% endfor %}{% if enable_thinking %}\n# thinking:\n{% else %}\n{% endif %}"
)


@pytest.mark.slow
def test_ways_of_asking_are_compared(tmp_path):
    model = Model(DEMO_TARGET)
    model.keys["tokenizer.chat_template"] = (STR, TEMPLATE)
    model.write(tmp_path / "target.gguf")
    subject = Subject(
        tmp_path / "target.gguf", device="CPU", threads=1, effort=Effort(prompts=2, prompt_tokens=48, tokens=48, blocks=4, generated=8)
    )
    try:
        check = examine_drafter(subject, DEMO_DRAFTER).check("template and thinking")
    finally:
        subject.close()
    assert set(check.data["ways"]) == {"raw text", "template, thinking", "template, no thinking"}
    assert check.verdict in ("ok", "warn") and all(value >= 1 for value in check.data["ways"].values())


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


def test_second_choices():
    assert sum(trees.leaves(15)) == 16 and trees.leaves(15)[:2] == [2, 1] and trees.leaves(3) == [BEST - 1] * 3
    nothing = Measured(np.array([3]), np.empty(0, np.int32), np.empty((0, 0)), True, np.array([-1]), np.array([-1]))
    assert trees.check(nothing, COSTS).verdict == "n/a"
    assert trees.check(Measured(np.array([3]), np.empty(0, np.int32), np.empty((0, 0)), True), COSTS).verdict == "n/a"  # a chain's
    with ps.load(DEMO_TARGET, DEMO_DRAFTER, device="CPU", threads=1, n_ctx=512, draft_width=16) as session:
        ids = session.tokenizer.encode("class Stack:\n    def __init__(self):\n")
        passage = write_passages(session.engine, [ids], session.drafter.hp.target_layers, 80)[0]
        with closing(Probe(session.backend, session.target, session.drafter, [passage], blocks=12)) as probe:
            plain, ranked = (probe.measure(Reading(session.drafter.hp, ranked=ranked)) for ranked in (False, True))
    assert not plain.ranks.size and (ranked.matched == plain.matched).all() and len(ranked.ranks) == len(ranked.matched)
    assert not (ranked.ranks == 1).any()  # the best choice is the draft, and that was wrong
    assert (ranked.ranks >= 2).any()
