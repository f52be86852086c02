"""Which failure is the cause, and verdicts that no file can provoke."""

import json
import sys
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from gguf_io.build import STR, Model
from random_gguf.eagle3 import write_eagle3
from random_gguf.model import Shape, write_qwen35
from random_gguf.mtp import write_mtp, write_mtp_target
from sessions import fails_with, loaded

import pyggml_spec as ps
from pyggml_spec.doctor import trees
from pyggml_spec.doctor.examine import Effort, Subject, examine, examine_drafter
from pyggml_spec.doctor.precision import _verdict, relative_error
from pyggml_spec.doctor.probe import BEST, Measured, Probe, Reading, _mask, ranks_of, write_passages
from pyggml_spec.doctor.readings import better, gain, longer_blocks_pay
from pyggml_spec.doctor.report import FAIL, FILES, FIT, OK, READING, WARN, Check, causes_only
from pyggml_spec.doctor.running import _same, loop_acceptance, other_work, pays, repeated_step, replay
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import PyspecError
from pyggml_spec.ggml.cores import ThreadRule
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.quants import type_id


def test_readings_and_their_causes():
    rule = ThreadRule(2)
    backends = [SimpleNamespace(rule=None), SimpleNamespace(rule=rule)]
    assert not other_work(backends)
    rule.threads = 1
    (check,) = other_work(backends)
    assert check.verdict == WARN and "other processes used the CPU" in check.found
    weights, features = Check("weights", FAIL, "", stage=FILES), Check("fit", FAIL, "", stage=FIT)
    assert failed(weights, features) == ["weights"] and failed(features) == ["fit"]
    assert failed(weights, Check("tokenizer", FAIL, "", stage=FILES)) == ["weights", "tokenizer"]  # neither explains the other
    few, many = (Check(name, FAIL, "", stage=READING, data={"gain": g}) for name, g in (("base", 0.4), ("layers", 2.0)))
    demoted = causes_only([few, many])[0]
    assert failed(few, many) == ["layers"] and demoted.verdict == WARN and "'layers' first" in demoted.remedy

    def named(*gains):
        checks = [Check(name, FAIL, "", "", READING, {"gain": gain}) for name, gain in zip(("block size", "block direction"), gains)]
        return [check.name for check in causes_only(checks) if check.verdict == FAIL]

    assert named(1.01, 0.98) == named(0.98, 1.01) == ["block size"] and named(0.2, 1.0) == ["block direction"]
    from pyggml_spec.doctor.readings import soft_cap

    drafter = SimpleNamespace(hp=SimpleNamespace(softcap=0.0))
    assert soft_cap(None, None, None, drafter, SimpleNamespace(softcap=0.0)).verdict == "n/a"


def failed(*checks: Check) -> list[str]:
    return [check.name for check in causes_only(list(checks)) if check.verdict == FAIL]


def measured(matched, likelihood) -> Measured:
    matched = np.asarray(matched)
    return Measured(matched, np.zeros(0), np.full((len(matched), 6), likelihood, np.float32), True)


def test_noise_late_graphs_and_break_even():
    rng, base = np.random.default_rng(0), measured(np.full(30, 3), -2.0)
    for _ in range(200):
        other = measured(np.full(30, 3), -2.0)
        other.likelihood[:] += rng.normal(0, 0.3, other.likelihood.shape)
        assert not better(base, other)
    assert better(base, measured(np.full(30, 4), -1.5)) and gain(base, measured(np.full(30, 4), -1.5))[0] == pytest.approx(0.5)
    good, late, nan = Stats(computes=100), Stats(computes=100, graphs_built_after_warmup=2), Stats(nan_drafts=1)
    assert replay([good]).verdict == OK and replay([good, late]).verdict == FAIL
    eager = Stats(computes=100, cuda_graphs={"warmup": 4, "captured": 1, "replayed": 10, "eager": 90})
    assert replay([eager]).verdict == WARN and "10.0 %" in replay([eager]).found
    assert loop_acceptance([nan], measured([3, 3], -1)).verdict == FAIL

    # Three drafts of three accepted: a block of 4 yields 4 tokens; at 2 plain steps it doubles the speed, at 5 it loses.
    def leg(tokens, seconds):
        return Stats(emitted=tokens + 1, seconds={"decode": seconds})

    base = measured([3, 3, 3, 3], -1)
    even, speed = pays({1: 1.0, 2: 1.5, 4: 2.0}, base, [leg(100, 1.0)], [leg(100, 0.55)])
    assert even.verdict == OK and even.data["widths"]["4"] == {"ms": 2.0, "break_even": 2.0, "expected": 4.0, "speedup": 2.0}
    assert speed.verdict == OK and speed.data["measured"] == pytest.approx(1 / 0.55)
    even, speed = pays({1: 1.0, 4: 5.0}, base, [leg(100, 1.0)], [leg(100, 2.0)])
    assert even.verdict == WARN and speed.verdict == WARN
    errors = [relative_error(type_id(name)) for name in ("f32", "f16", "q8_0", "q6_K", "q4_K", "q2_K")]
    assert errors == sorted(errors) and errors[0] == 0 and 0.004 < errors[2] < 0.008 and errors[-1] > 0.2


def test_what_is_called_better_and_what_is_lost():
    """The limits that docs/doctor.md names."""
    base = measured(np.full(30, 3), -2.0)  # 4 tokens per block
    for matched, likelihood, verdict in ((4, -1.94, True), (4, -1.96, False), (3, -1.94, False), (3, -1.79, True), (2, -1.79, False)):
        assert better(base, measured(np.full(30, matched), likelihood)) == verdict
    assert better(base, measured(np.where(np.arange(30) < 21, 3, 2), -1.79))  # less than a tenth fewer tokens
    long = measured(np.full(100, 9), -2.0)  # 10 tokens per block
    for more, likelihood, verdict in ((9, -2.0, True), (7, -2.0, False), (-9, -1.0, False)):
        assert longer_blocks_pay(long, measured(9 + np.sign(more) * (np.arange(100) % 10 < abs(more)), likelihood)) == verdict
    for right, likelihood, verdict in ((2.52, -2.2, FAIL), (2.58, -2.2, WARN), (2.52, -2.1, WARN), (2.9, -2.2, OK)):
        noisy = measured(np.where(np.arange(100) < 100 * (right - 2), 3, 2), likelihood)
        assert _verdict("x", "", measured(np.full(100, 3), -2.0), noisy, "", {}).verdict == verdict
    usual = Stats(steps=10, drafted=100, matched=50)
    for matched, drafted, nan, verdict in ((30, 100, 0, OK), (29, 100, 0, FAIL), (50, 100, 1, FAIL), (0, 0, 0, FAIL)):
        assert _same("x", usual, Stats(steps=10, drafted=drafted, matched=matched, nan_drafts=nan), "", "").verdict == verdict
    for replayed, verdict in ((90, OK), (89, WARN)):
        cuda = {"warmup": 4, "captured": 1, "replayed": replayed, "eager": 100 - replayed}
        assert replay([Stats(computes=100, cuda_graphs=cuda)]).verdict == verdict


TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}{% endfor %}{% if enable_thinking %}\n# thinking:\n{% else %}\n{% endif %}"
)


@pytest.mark.slow
def test_a_whole_examination(tmp_path):
    """Every check of the list, generations included; on the embedded pair none fails, and the report is plain JSON."""
    model, said = Model(DEMO_TARGET), []
    model.keys["tokenizer.chat_template"] = (STR, TEMPLATE)
    effort = Effort(prompts=2, prompt_tokens=48, tokens=64, blocks=8, generated=12)
    with closing(Subject(model.write(tmp_path / "target.gguf"), device="CPU", threads=1, effort=effort)) as subject:
        report = examine_drafter(subject, DEMO_DRAFTER, lambda what, done, total: said.append(what))
    names = [check.name for check in report.checks]
    assert names == [
        "build", "tokenizer", "mask embedding", "drafter weights", "target weights", "features", "target layers", "mask token", "block size", "rope base", "rope sections",
        "embedding scale", "attention scale", "activation", "sliding window", "block direction", "soft-cap", "fit to this target", "drafter quantisation",
        "target quantisation", "template and thinking", "micro-batches", "repeated prompt", "cache hit", "acceptance", "graph replay",
        "repeated step", "time split", "break-even", "speed-up", "trees",
    ]  # fmt: skip
    assert not report.failed, [(c.name, c.found) for c in report.failed]
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["passed"] is True and said[-1] == "generations"
    check = report.check("template and thinking")
    assert set(check.data["ways"]) == {"raw text", "template, thinking", "template, no thinking"}
    assert check.verdict in ("ok", "warn") and all(value >= 1 for value in check.data["ways"].values())


def test_a_replay_that_computes_something_else_is_noticed(pair, monkeypatch):
    """ggml-cuda's replays of gemma4 with shared K/V were wrong on one GPU from the third call of a graph on, and nothing said so."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        engine, prompt = session.runner, list(range(20))
        check = repeated_step(engine, prompt)
        assert check.verdict == OK and "replayed" not in check.found  # nothing is, on a CPU
        honest, calls = engine.candidates, iter(range(1000))

        def candidates(row):
            ids, logits = honest(row)
            return ids, logits + np.float32(1e-3) if next(calls) == 2 else logits

        monkeypatch.setattr(engine, "candidates", candidates)
        check = repeated_step(engine, prompt)
        assert check.verdict == FAIL and check.data["width"] == 1 and "GGML_CUDA_PDL=0" in check.remedy


PROMPT = "class Stack:\n    def __init__(self):\n"
session = loaded(DEMO_TARGET, DEMO_DRAFTER, n_ctx=512, draft_width=16)


def test_the_probe_drafts_what_the_engine_drafts(session):
    engine, layers = session.runner, session.drafter.hp.target_layers
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
    engine, layers = session.runner, session.drafter.hp.target_layers
    prompts = [session.tokenizer.encode(text) for text in (PROMPT, "import os\n\n")]
    passages = write_passages(engine, prompts, layers, 60)
    with closing(Probe(session.backend, session.target, session.drafter, passages, blocks=4)) as probe:
        right, wrong = probe.measure(Reading(session.drafter.hp)), probe.measure(Reading(session.drafter.hp, features_of=1))
    assert right.likelihood.mean() > wrong.likelihood.mean() + 1
    assert right.likelihood.max() <= 0 and np.isfinite(wrong.likelihood).all()
    engine, ids = session.runner, session.tokenizer.encode(PROMPT)
    engine.reset(drafting=False)
    chosen, features = engine.capture(ids, (0, 8))
    assert features.shape == (2, len(ids), 512) and chosen.shape == (len(ids),)
    engine.reset(drafting=False)
    assert engine.logits(ids).argmax(axis=1).tolist() == chosen.tolist()
    for bad in (-1, 9):
        fails_with(ps.EngineError, f"captured layer is {bad}", engine.capture, ids, (bad,))


def test_masks_and_second_choices(session):
    anchors = np.array([1, 3])
    seen = np.isfinite(_mask(anchors, 2, 3, 8, 0, False).astype(np.float32))
    assert seen.astype(int).tolist() == [[1, 0, 0, 1, 1, 0, 0, 0]] * 2 + [[1, 1, 1, 0, 0, 1, 1, 0]] * 2
    causal = np.isfinite(_mask(anchors, 2, 3, 8, 0, True).astype(np.float32))
    assert causal[0, 4] == 0 and causal[1, 3] == 1
    window = np.isfinite(_mask(anchors, 2, 3, 8, 2, False).astype(np.float32))
    assert window[2].astype(int).tolist() == [0, 0, 1, 0, 0, 1, 1, 0]  # position 3 sees 2 and later
    assert sum(trees.leaves(15)) == 16 and trees.leaves(15)[:2] == [2, 1] and trees.leaves(3) == [BEST - 1] * 3
    nothing = Measured(np.array([3]), np.empty(0, np.int32), np.empty((0, 0)), True, np.array([-1]), np.array([-1]))
    assert trees.check(nothing, COSTS).verdict == "n/a"
    assert trees.check(Measured(np.array([3]), np.empty(0, np.int32), np.empty((0, 0)), True), COSTS).verdict == "n/a"  # a chain's
    ids = session.tokenizer.encode(PROMPT)
    passage = write_passages(session.runner, [ids], session.drafter.hp.target_layers, 80)[0]
    with closing(Probe(session.backend, session.target, session.drafter, [passage], blocks=12)) as probe:
        plain, ranked = (probe.measure(Reading(session.drafter.hp, ranked=ranked)) for ranked in (False, True))
    assert not plain.ranks.size and (ranked.matched == plain.matched).all() and len(ranked.ranks) == len(ranked.matched)
    assert not (ranked.ranks == 1).any()  # the best choice is the draft, and that was wrong
    assert (ranked.ranks >= 2).any()


@pytest.mark.slow
def test_targets_that_draft_and_ways_of_asking(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[Subject.__module__], "Subject", partial(Subject, effort=Effort(tokens=32, generated=12)))
    target = write_mtp_target(tmp_path / "t.gguf", Shape())
    report = examine(target, device="CPU", threads=1, n_ctx=256, prompts=["def f(x):\n    return x"])
    names = [check.name for check in report.checks]
    assert {"drafter weights", "target weights", "micro-batches", "cache hit", "repeated prompt", "acceptance", "break-even"} <= set(names)
    assert "mask embedding" not in names and not [check for check in report.failed if check.name != "tokenizer"]
    target, chain = write_qwen35(tmp_path / "t.gguf", Shape()), write_eagle3(tmp_path / "c.gguf", Shape(), tokens=100, layers=2, mask=7)
    report = examine(target, chain, device="CPU", threads=1, n_ctx=256, prompts=["def f(x):\n    return x"])
    assert report.check("drafter weights").verdict == report.check("repeated prompt").verdict == "ok" and not report.failed
    target, other = write_qwen35(tmp_path / "t.gguf", Shape()), write_mtp(tmp_path / "d.gguf", Shape(n_embd=128))
    report = examine(target, other, device="CPU", threads=1, n_ctx=256, prompts=["def f(x):\n    return x"])
    check = report.check("pair")
    assert check.verdict == FAIL and "hidden states of 128 values" in check.found
    fails_with(PyspecError, "examines a pair", lambda: examine(write_qwen35(tmp_path / "t.gguf", Shape()), device="CPU"))


COSTS = {1: 10.0, 2: 11.0, 4: 12.0, 8: 14.0, 16: 18.0}


def scripted(second, next_right, blocks=400, drafts=15, seed=1):
    """A drafter whose third draft is always wrong: the target's token is its second choice there in this share of the blocks, and the draft
    after it is right in that share."""
    rng = np.random.default_rng(seed)
    tokens, anchors = rng.integers(100, 200, 20 * blocks + 40), np.arange(blocks) * 20
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
