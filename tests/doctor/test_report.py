"""Which failure is the cause, and verdicts that no file can provoke."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import pyggml_spec as ps
from pyggml_spec.doctor import examine_drafter
from pyggml_spec.doctor.examine import Effort, Subject
from pyggml_spec.doctor.precision import relative_error
from pyggml_spec.doctor.probe import Measured
from pyggml_spec.doctor.readings import better, gain
from pyggml_spec.doctor.report import FAIL, FILES, FIT, OK, READING, WARN, Check, causes_only
from pyggml_spec.doctor.running import loop_acceptance, other_work, pays, repeated_step, replay
from pyggml_spec.engine.stats import Stats
from pyggml_spec.ggml.cores import ThreadRule
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.quants import type_id


def test_times_under_load_are_a_warning():
    rule = ThreadRule(2)
    backends = [SimpleNamespace(rule=None), SimpleNamespace(rule=rule)]
    assert not other_work(backends)
    rule.threads = 1
    (check,) = other_work(backends)
    assert check.verdict == WARN and "other processes used the CPU" in check.found


def failed(*checks: Check) -> list[str]:
    return [check.name for check in causes_only(list(checks)) if check.verdict == FAIL]


def test_causes_of_readings():
    weights, features = Check("weights", FAIL, "", stage=FILES), Check("fit", FAIL, "", stage=FIT)
    assert failed(weights, features) == ["weights"]
    assert failed(features) == ["fit"]
    assert failed(weights, Check("tokenizer", FAIL, "", stage=FILES)) == ["weights", "tokenizer"]  # neither explains the other
    few, many = (Check(name, FAIL, "", stage=READING, data={"gain": g}) for name, g in (("base", 0.4), ("layers", 2.0)))
    demoted = causes_only([few, many])[0]
    assert failed(few, many) == ["layers"]
    assert demoted.verdict == WARN and "'layers' first" in demoted.remedy


def measured(matched, likelihood) -> Measured:
    matched = np.asarray(matched)
    return Measured(matched, np.zeros(0), np.full((len(matched), 6), likelihood, np.float32), True)


def test_noise_late_graphs_and_break_even():
    rng, base = np.random.default_rng(0), measured(np.full(30, 3), -2.0)
    for _ in range(200):
        other = measured(np.full(30, 3), -2.0)
        other.likelihood[:] += rng.normal(0, 0.3, other.likelihood.shape)
        assert not better(base, other)
    assert better(base, measured(np.full(30, 4), -1.5))
    assert gain(base, measured(np.full(30, 4), -1.5))[0] == pytest.approx(0.5)
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


@pytest.mark.slow
def test_a_whole_examination():
    """Every check of the list, generations included; on the embedded pair none fails, and the report is plain JSON."""
    subject = Subject(DEMO_TARGET, device="CPU", threads=1, effort=Effort(prompts=2, prompt_tokens=48, tokens=64, blocks=8, generated=24))
    said = []
    try:
        report = examine_drafter(subject, DEMO_DRAFTER, lambda what, done, total: said.append(what))
    finally:
        subject.close()
    names = [check.name for check in report.checks]
    assert names == [
        "build", "tokenizer", "mask embedding", "drafter weights", "target weights", "features", "target layers", "mask token", "block size", "rope base", "rope sections",
        "embedding scale", "attention scale", "activation", "sliding window", "block direction", "soft-cap", "fit to this target", "drafter quantisation",
        "target quantisation", "template and thinking", "micro-batches", "repeated prompt", "cache hit", "acceptance", "graph replay",
        "repeated step", "time split", "break-even", "speed-up", "trees",
    ]  # fmt: skip
    assert not report.failed, [(c.name, c.found) for c in report.failed]
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["passed"] is True
    assert said[-1] == "generations"


def test_equal_gains_and_caps():
    def named(*gains):
        checks = [Check(name, FAIL, "", "", READING, {"gain": gain}) for name, gain in zip(("block size", "block direction"), gains)]
        return [check.name for check in causes_only(checks) if check.verdict == FAIL]

    assert named(1.01, 0.98) == named(0.98, 1.01) == ["block size"] and named(0.2, 1.0) == ["block direction"]
    from pyggml_spec.doctor.readings import soft_cap

    drafter = SimpleNamespace(hp=SimpleNamespace(softcap=0.0))
    assert soft_cap(None, None, None, drafter, SimpleNamespace(softcap=0.0)).verdict == "n/a"


def test_a_replay_that_computes_something_else_is_noticed(pair, monkeypatch):
    """ggml-cuda's replays of gemma4 with shared K/V were wrong on one GPU from the third call of a graph on, and nothing said so."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        engine, prompt = session.engine, list(range(20))
        check = repeated_step(engine, prompt)
        assert check.verdict == OK and "replayed" not in check.found  # nothing is, on a CPU
        honest, calls = engine.candidates, iter(range(1000))

        def candidates(row):
            ids, logits = honest(row)
            return ids, logits + np.float32(1e-3) if next(calls) == 2 else logits

        monkeypatch.setattr(engine, "candidates", candidates)
        check = repeated_step(engine, prompt)
        assert check.verdict == FAIL and check.data["width"] == 1 and "GGML_CUDA_PDL=0" in check.remedy
