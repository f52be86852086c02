"""Measured costs: kept, measured again when the entry is damaged, and noticed when they were taken in a busy moment."""

import itertools
import os
import time

import pytest
from random_gguf.archs import write_qwen35moe
from random_gguf.model import Shape, write_dflash
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.engine.batch import Draft
from pyggml_spec.engine.engine import Engine
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import BuildError, ContextError, PyspecError
from pyggml_spec.folders import build_folder, cache_folder, why_nothing_is_kept
from pyggml_spec.ggml.kernels import levels
from pyggml_spec.speculation import calibrate
from pyggml_spec.speculation.calibrate import (
    FILL,
    START,
    cost_key,
    keep_costs,
    keep_drafts,
    known_costs,
    known_drafts,
    step_cost,
    step_costs,
)
from pyggml_spec.speculation.policy import PLAIN_STEP, SpeculationPolicy, StepPlan
from pyggml_spec.speculation.synthetic import SyntheticAcceptance

pytestmark = pytest.mark.slow


@pytest.fixture
def idle(monkeypatch):
    """No other process uses the CPU, whatever runs here."""
    monkeypatch.setattr("pyggml_spec.speculation.calibrate.cpu_wait_s", lambda: 0.0)


def test_nothing_is_measured_before_the_first_token(pair, tmp_path, monkeypatch):
    """Every width was measured at load: 9 to 13 s of a pair whose first text takes 4."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    forward, steps = ModelRunner.forward, []
    monkeypatch.setattr(ModelRunner, "forward", lambda self, work, *args: (steps.append(dict(work.items)), forward(self, work, *args))[1])
    for _ in range(2):  # without costs of earlier sessions, and with them
        with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
            assert not steps
            for _ in session.stream([1, 2, 3], 200, ignore_end=True):
                assert len(steps) > 1 or [len(item.tokens) for item in steps[0].values()] == [3]
        assert len(steps) > 10 and any(isinstance(item, Draft) for work in steps for item in work.values())
        steps.clear()


def test_costs_of_texts_are_kept_and_a_damaged_entry_is_none(pair, tmp_path, monkeypatch, idle):
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        assert session.costs == {}
        for _ in range(40):  # a first block that a busy machine delays is all that a text of such a small model may lose
            if len(costs := session.costs) > 1:
                break
            session.generate([1, 2, 3], 200, ignore_end=True, synthetic=SyntheticAcceptance(3.0, 15))
        assert set(costs) > {1} and set(costs) <= {1, 2, 4, 8, 16} and all(ms > 0 for ms in costs.values())
    entry = next(cache_folder().glob("costs-*.json"))
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        runner, plans = session.runner, session._plans
        assert session.costs == pytest.approx(costs) and set(session.engine.policy.plans) <= set(plans)
        assert known_costs(runner, plans)[PLAIN_STEP] == pytest.approx(costs[1])
        name = f"{plans[1].method}/{plans[1].draft_tokens}/{plans[1].verify_len}"
        for damage in ("", "{", '{"/0/1": "x"}', '{"/0/1": null}', "[" * 100000, f'{{"/0/1": -1, "{name}": 1}}', "[]", '{"x": 1}'):
            entry.write_text(damage)
            assert known_costs(runner, plans) == {}
        keep_costs(runner, plans, {PLAIN_STEP: 1.0})  # nothing to choose among
        assert entry.read_text() == '{"x": 1}'


def test_costs_of_other_conditions_and_contexts(pair):
    keys = []
    for conditions in ({}, {}, {"threads": 2}, {"n_ctx": 512}, {"kernels": "ggml"}, {"draft": None}):
        files = {
            "target": pair[0],
            "draft": pair[1],
            "device": "CPU",
            "threads": 1,
            "n_ctx": 256,
            "kernels": None,
            "spec": None,
        } | conditions
        with ps.load(**files) as session:
            keys.append(cost_key(session.runner, (2, 4)))
    assert keys[0] == keys[1] and len(set(keys)) == len(keys) - (1 if levels() else 2)
    with ps.load(*pair, device="CPU", threads=1, n_ctx=1) as session, pytest.raises(ContextError, match="context of 1"):
        session.calibrate_plain()


def test_costs_of_a_busy_moment_are_used_but_not_kept(pair, tmp_path, monkeypatch):
    """They stayed in the cache folder, and every later run on the idle machine chose its widths by them."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("pyggml_spec.speculation.calibrate.cpu_wait_s", itertools.count(0.0, 60.0).__next__)
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        session.generate([1, 2, 3], 100, ignore_end=True)
        assert session.costs
    assert not list(tmp_path.glob("costs-*"))


def test_costs_are_kept_as_they_were_after_the_last_undisturbed_text(pair, tmp_path, monkeypatch, idle):
    """A session during which other processes ran for a while kept nothing."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    options, busy = {"ignore_end": True, "synthetic": SyntheticAcceptance(3.0, 15)}, False
    monkeypatch.setattr(Stats, "contended", property(lambda stats: busy))
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        for _ in range(9):
            session.generate([1, 2, 3], 200, **options)
        before = dict(session.engine.policy.undisturbed)
        busy = True
        monkeypatch.setattr("pyggml_spec.speculation.calibrate.cpu_wait_s", itertools.count(60.0, 60.0).__next__)
        session.generate([4, 5, 6], 200, **options)
        assert session.engine.policy.learnt != before and len(before) > 1
        runner, plans = session.runner, session._plans
    assert known_costs(runner, plans) == pytest.approx(before)


def test_the_plain_speed_is_that_of_this_process(pair, tmp_path, monkeypatch):
    """It came from the cache file: with the number in it doubled, the speed-up that the footer claims was, too."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        keep_costs(session.runner, session._plans, dict.fromkeys(session._plans, 1e5))
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        assert session.costs[1] == 1e5
        assert session.calibrate_plain() < 1e4  # of a step that takes about one millisecond
        assert session.calibrate_plain(steps=1) > 0


def test_the_plain_speed_is_what_texts_get(pair, monkeypatch):
    """It was that of steps alone: on two fast cores, where the host's work is a fifth of a plain step, a run that lost nothing said 0.75x."""
    slow, step = 0.02, Engine._step
    monkeypatch.setattr(Engine, "_step", lambda *args: (time.sleep(slow), step(*args))[1])
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        assert session.calibrate_plain(steps=3) >= 1000 * slow
        slow, before = 0.0, session.engine.stats.steps
        session.calibrate_plain(steps=12)
        assert session.engine.stats.steps - before <= 12 + calibrate.WARMUP + 1  # as it says: it took 36


def test_measuring_plain_steps_teaches_the_policy_nothing(pair):
    """`pyspec run` measures them behind each text: compared with those, cold blocks looked so dear that the second run of the embedded pair drafted nothing."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        session.generate([1, 2, 3], 100, ignore_end=True)
        policy = session.engine.policy
        before, undisturbed = dict(policy.costs), dict(policy.undisturbed)
        session.calibrate_plain()
        assert dict(policy.costs) == before and policy.undisturbed == undisturbed and policy.costs.told((1, PLAIN_STEP))


def test_plain_steps_are_measured_at_the_length_of_the_text(pair, monkeypatch):
    """They had eight tokens behind them, where attention reads next to nothing: a text of 256 tokens seemed to lose 5 %."""
    monkeypatch.setattr(calibrate, "FILL_S", 60)  # on slow machines there are fewer
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        behind, steps = [], session.runner.forward

        def seen(work, *args):
            behind.append(session.runner.cursor.committed)
            return steps(work, *args)

        monkeypatch.setattr(session.runner, "forward", seen)
        session.calibrate_plain(3, 100)
        assert behind[-1] >= 100
        monkeypatch.setattr(calibrate, "FILL_S", 1e-9)  # computing them takes too long: as before
        session.calibrate_plain(3, 100)
        assert behind[-1] < 32
        assert session.calibrate_plain(3, 10_000) > 0  # more than the context holds


def test_costs_of_other_kernels_are_not_taken(pair, tmp_path, monkeypatch):
    """A build with other kernels, or a switch of ggml-cuda, has costs of its own: widths were chosen by those that were measured first."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        engine, plans = session.runner, session._plans
        keep_costs(engine, plans, dict.fromkeys(plans, 2.0))
        assert known_costs(engine, plans) == dict.fromkeys(plans, 2.0)
        with monkeypatch.context() as switched:
            switched.setenv("GGML_CUDA_SMALL_BATCH", "0")
            assert not known_costs(engine, plans)
        monkeypatch.setattr("pyggml_spec.building.build_note", lambda libraries: {"patches": ["0020-small-batch"]})
        assert not known_costs(engine, plans)


def test_costs_are_of_steps_with_context(pair, monkeypatch):
    """Behind eight tokens attention has nothing to read: blocks looked cheaper than they are in texts, and the first texts lost."""
    monkeypatch.setattr(calibrate, "FILL_S", 60)  # on slow machines less is computed than here
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        engine, behind = session.runner, []
        for name in ("plain_step", "fused_step"):
            step = getattr(engine, name)

            def seen(*args, step=step, **options):
                behind.append(engine.cursor.committed)
                return step(*args, **options)

            monkeypatch.setattr(engine, name, seen)
        for width in (1, 4):
            behind.clear()
            assert step_cost(engine, StepPlan.of("", width)) > 0 and behind[0] >= len(START) + len(FILL)


def test_a_cache_that_cannot_be_written_is_no_error(pair, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PYSPEC_CACHE", str(blocked / "below"))
    with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
        words = f"{blocked / 'below'} cannot keep what was measured (Not a directory), so every"
        assert words in session.configuration().notes[-1]
        monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "a" / "b"))
        assert why_nothing_is_kept() == "" and (tmp_path / "a" / "b").is_dir()
        monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
        assert "b cannot keep what was measured (it cannot be written)" in why_nothing_is_kept()


def test_a_full_disk_is_left_as_it_was(pair, tmp_path, monkeypatch):
    """An empty file stayed behind, one more with every load."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pyggml_spec.files.os.replace", full)
        with ps.load(*pair, device="CPU", threads=1, n_ctx=256) as session:
            keep_costs(session.runner, session._plans, dict.fromkeys(session._plans, 2.0))
            assert not list(tmp_path.iterdir())


def test_costs_that_are_outdated_are_learnt_again():
    """Blocks that seemed three times as dear as they are stayed unused, and so as dear."""
    plans = {PLAIN_STEP: 10.0, StepPlan.of("drafter", 2): 36.0, StepPlan.of("drafter", 4): 42.0}
    control, real = SpeculationPolicy(plans, plans, relative=True, told=True), {1: 10.0, 2: 12.0, 4: 14.0}
    for _ in range(2):
        sequence = control.begin()
        for _ in range(200):
            kind = control.choose(1, [sequence])
            control.observe(1, kind, real[kind.tokens], [sequence], [kind.tokens - 1])
    assert control.choose(1, [sequence]).tokens == 4
    assert {plan.tokens: ms for plan, ms in control.learnt.items()}[4] == pytest.approx(14.0, rel=0.01)


def test_blocks_that_are_measured_have_different_tokens(tmp_path):
    model, draft = write_qwen35moe(tmp_path / "t.gguf", Shape(), "Q8_0"), write_dflash(tmp_path / "d.gguf", Shape(), "Q8_0")
    with ps.load(model, draft, device="CPU", threads=1, n_ctx=128, draft_width=16) as session:
        engine, seen = session.runner, []
        step = engine.fused_step
        engine.fused_step = lambda *args, **more: seen.append(step(*args, **more)) or seen[-1]
        step_costs(engine, (16,))
        assert min(len(set(result.tokens.tolist())) for result in seen) > 8
        engine.prefill([0] * 8)
        assert len(set(step(16).tokens.tolist())) < 4


@pytest.mark.parametrize("n_ctx", [1, 5, 9, 10, 12, 20, 26])
def test_a_context_shorter_than_a_block_loads_and_generates(pair, n_ctx):
    """Measuring had nothing to measure there and ended in a traceback."""
    with ps.load(*pair, device="CPU", threads=1, n_ctx=n_ctx) as session:
        stats = session.generate([65], None)[1]
        assert stats.emitted == n_ctx and stats.stop_reason in ("context", "end")


def test_a_user_without_a_home_has_a_cache(monkeypatch, tmp_path):
    for name in ("PYSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert cache_folder() == tmp_path / f"pyspec-{os.getuid()}" and cache_folder().stat().st_mode & 0o777 == 0o700
    assert build_folder() == tmp_path / f"pyggml_spec-{os.getuid()}" and build_folder().stat().st_mode & 0o777 == 0o700
    build_folder().chmod(0o777)  # libraries in it would be loaded
    fails_with(BuildError, "can be written by others; .*XDG_CACHE_HOME", build_folder)
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (tmp_path / f"pyggml_spec-{os.getuid()}").rmdir()
    (tmp_path / f"pyggml_spec-{os.getuid()}").symlink_to(mine)
    fails_with(BuildError, "is a link, which is not followed; .*XDG_CACHE_HOME", build_folder)
    cache_folder().chmod(0o777)  # somebody else's hashes of files, costs and findings would be believed
    fails_with(PyspecError, "can be written by others; .*PYSPEC_CACHE", cache_folder)
    (tmp_path / f"pyspec-{os.getuid()}").rmdir()
    (tmp_path / f"pyspec-{os.getuid()}").symlink_to(mine)
    fails_with(PyspecError, "is a link, which is not followed; .*PYSPEC_CACHE", cache_folder)


def test_what_is_computed_beforehand_leaves_room_for_the_block_that_is_measured(monkeypatch, tmp_path):
    """A context of 100 with blocks of 64 rows could not be loaded: half of it had been filled."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    with ps.load(device="CPU", threads=1, n_ctx=100, spec=["suffix"], draft_width=64) as session:
        assert session.generate("def ", 4, ignore_end=True)[1].emitted == 4


def test_a_first_text_begins_with_what_earlier_sessions_texts_taught(tmp_path, monkeypatch, idle):
    """Every process began with an assumption: the embedded prompt, whose first blocks bring eleven tokens, was decoded plainly for a hundred steps each time."""
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("PYSPEC_KEEP_DRAFTS", "1")
    with ps.load(device="CPU", n_ctx=256) as session:
        control = session.new_policy()
        assert known_drafts(session.runner) == {} and control.priors["draft-dflash"].tries[0] == 0
        for _ in range(9):
            session.engine.policy.priors["draft-dflash"].observe(8, 3)
    entry = next(tmp_path.glob("drafts-*.json"))
    assert entry.stat().st_mode & 0o077 == 0
    with ps.load(device="CPU", n_ctx=512, threads=1) as session:  # costs are other ones, the drafter is the same
        record = session.engine.policy.priors["draft-dflash"]
        assert record.tries[0] == pytest.approx(8.8, rel=0.02) and record.hits[3] == 0 < record.hits[2] == record.hits[0]
        session._known_drafts = session.engine.policy.priors
        assert session.new_policy().priors["draft-dflash"].tries == record.tries  # what measuring costs again must not lose
        for damage in ("", "{", "[]", '{"draft-dflash": 1}', '{"draft-dflash": {"tries": [1.0], "hits": [2.0]}}', '{"x": {"tries": [], "hits": []}}',
                       '{"draft-dflash": {"tries": [NaN], "hits": [0]}}', "[" * 100000):  # fmt: skip
            entry.write_text(damage)
            assert known_drafts(session.runner) == {}
    assert entry.read_text() == "[" * 100000  # nothing was drafted, so nothing was kept
    monkeypatch.setenv("PYSPEC_KEEP_DRAFTS", "0")
    entry.unlink()
    with ps.load(device="CPU", n_ctx=256) as session:
        keep_drafts(session.runner, session.engine.policy.priors)
        session.engine.policy.priors["draft-dflash"].blocks = 100
    assert not list(tmp_path.glob("drafts-*.json"))


def test_what_is_accepted_at_random_teaches_nothing(tmp_path, monkeypatch, idle):
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("PYSPEC_KEEP_DRAFTS", "1")
    with ps.load(device="CPU", n_ctx=256) as session:
        session.generate("def f(", 8, synthetic=SyntheticAcceptance(6.0, 15))
        session.engine.policy.priors["draft-dflash"].blocks = 100
    assert not list(tmp_path.glob("drafts-*.json"))


def test_a_cache_that_cannot_be_written_keeps_no_session_from_closing(tmp_path, monkeypatch, idle):
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("PYSPEC_KEEP_DRAFTS", "1")
    with ps.load(device="CPU", n_ctx=256) as session:
        session.engine.policy.priors["draft-dflash"].blocks = 100
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path / "file" / "below"))
    assert session.runner.graphs.closed
