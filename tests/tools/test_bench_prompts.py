"""The bench on prompts: its figures are those of the generations that it names, by category, thinking mode and run."""

import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from bench_workloads import Watched, step_costs
from click.testing import CliRunner
from pairs import write_pair
from sessions import fails_with, loaded

import pyggml_spec as ps
from pyggml_spec.chat import chat_template
from pyggml_spec.cli.main import cli
from pyggml_spec.engine.batch import Draft, Verify
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import ContextError, EngineError, PairError, PyspecError, TemplateError
from pyggml_spec.ggml import peer
from pyggml_spec.tools import split_steps as split_steps_module
from pyggml_spec.tools.anatomy import anatomy, copy_bandwidth
from pyggml_spec.tools.bench import BenchOptions
from pyggml_spec.tools.bench_prompts import PromptsOptions, PromptsRow, bench_prompts
from pyggml_spec.tools.bench_slots import bench_slots, tokens_needed
from pyggml_spec.tools.prompts import CATEGORIES, Prompt, included_prompts, read_prompts
from pyggml_spec.tools.split_steps import CopySpeed, DeviceShare, SplitStep, copy_speeds, split_steps, way_of_copies, without_waiting

HE, WHY = ({"role": "user", "content": text} for text in ("he", "why"))
PROMPTS = [Prompt("talk", "a", messages=(HE,)), Prompt("talk", "b", messages=(WHY,)), Prompt("raw", "c", text="def f(")]


talker = loaded(pair="talkers", n_ctx=256, draft_width=4)


@pytest.mark.slow
def test_figures_are_those_of_the_generations(talker):
    options = PromptsOptions(8, 2, ps.Sampling(seed=5))
    template, _ = chat_template(talker)
    rows = bench_prompts(talker, PROMPTS, options, template)
    assert [(row.category, row.thinking, row.prompts) for row in rows] == [("talk", True, 2), ("talk", False, 2), ("raw", None, 1)]
    for row in rows:
        for run in range(2):
            counts = []
            for prompt in PROMPTS:
                if prompt.category == row.category:
                    ids = prompt.text or template.encode(talker.tokenizer, prompt.messages, thinking=row.thinking)
                    counts.append(talker.generate(ids, 8, sampling=replace(options.sampling, seed=5 + run))[1])
            assert sum(s.drafted for s in counts) > 0
            assert row.acceptance[run] == sum(s.matched for s in counts) / sum(s.drafted for s in counts)
            assert row.tokens_per_step[run] == sum(s.steps + s.matched for s in counts) / sum(s.steps for s in counts)
            assert all(plain.drafted == 0 and plain.emitted == spec.emitted for plain, spec in row.runs[run])
        seen = row.as_dict()
        assert sum(seen["matched_at"]) == sum(spec.matched for run in row.runs for _, spec in run) and seen["tokens"] > 0
        assert seen["speedup"]["runs"] == [spec / plain for spec, plain in zip(row.speed, row.plain_speed)]


def test_categories_and_means(talker):
    prompts = [Prompt("a", "1", text="he"), Prompt("b", "2", text="she"), Prompt("b", "3", text="it")]
    rows = bench_prompts(talker, prompts, PromptsOptions(4, 1), chat_template(talker)[0])
    assert [(row.category, row.prompts) for row in rows] == [("a", 1), ("b", 2), ("all", 3)]
    assert rows[2].runs[0] == rows[0].runs[0] + rows[1].runs[0]

    def spec(drafted, matched):
        return Stats(drafted=drafted, matched=matched, steps=10, emitted=11 + matched, seconds={"decode": 2.0})

    plain = Stats(steps=20, emitted=21, seconds={"decode": 10.0})
    row = PromptsRow("x", None, 2, [[(plain, spec(30, 10)), (plain, spec(10, 10))], [(plain, spec(40, 10)), (plain, spec(40, 10))]])
    seen, deviation = row.as_dict(), statistics.stdev([0.5, 0.25])
    assert row.acceptance == [0.5, 0.25] and seen["acceptance"] == {"mean": 0.375, "deviation": deviation, "runs": [0.5, 0.25]}
    assert row.plain_speed == [2.0, 2.0] and row.speed == [10.0, 10.0] and row.speedup == [5.0, 5.0]
    nothing = PromptsRow("x", None, 1, [[(plain, Stats())]]).as_dict()  # all steps plain, or the first token was the last
    assert nothing["acceptance"] == nothing["speedup"] == {"mean": None, "deviation": None, "runs": []}


def test_an_interrupt_leaves_the_complete_runs(talker):
    seen = []
    told = {"interrupted": lambda: len(seen) == 3, "progress": lambda *what: seen.append(what)}
    assert len(bench_prompts(talker, PROMPTS[2:], PromptsOptions(4, 3), chat_template(talker)[0], **told)[0].runs) == 2


def test_what_cannot_be_measured_is_refused(talker, pair):
    template, _ = chat_template(talker)
    with pytest.raises(ContextError, match=r"need \d+ tokens.*use `n_ctx` \d+"):
        bench_prompts(talker, PROMPTS, PromptsOptions(300, 1), template)
    late = Prompt("x", "late", messages=(HE, {"role": "system", "content": "x"}))
    fails_with(TemplateError, "'late'.*has to come first", lambda: bench_prompts(talker, [late], PromptsOptions(4, 1), template))
    with ps.load(pair[0], device="CPU", threads=1, n_ctx=64, spec=[]) as alone, pytest.raises(PairError, match="`draft`"):
        bench_prompts(alone, PROMPTS, PromptsOptions(4, 1), template)


def test_prompt_files_and_seeds(tmp_path):
    prompts = included_prompts()
    assert [sum(p.category == c for p in prompts) for c in CATEGORIES] == [6, 6, 6] and len(prompts) == 18
    assert len({(p.category, p.name) for p in prompts}) == 18
    assert all(p.text is None and p.messages[-1]["role"] == "user" for p in prompts)
    assert [p.category for p in included_prompts(("chat",))] == ["chat"] * 6
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "category": "c", "name": "d"}\n')
    assert read_prompts(file) == [Prompt("prompts", "1", "a"), Prompt("c", "d", None, ({"role": "user", "content": "b"},))]
    for path in (tmp_path, tmp_path / "no", "a\0b"):
        fails_with(PyspecError, "cannot be read", read_prompts, path)
    assert PromptsOptions(repetitions=3, sampling=ps.Sampling(seed=(1 << 32) - 2)).seeds == [(1 << 32) - 2, 0, 1]
    assert PromptsOptions(repetitions=3).seeds == []


@pytest.mark.parametrize("content, words", [
    (b"", "is empty"), (b"\n \n", "is empty"), (b"{", "line 1"), (b"[]", "line 1"), (b'{"prompt": 1}', "line 1"), (b'{"prompt": ""}', "line 1"),
    (b'{"prompt": "a"}\n{}', "line 2"), (b'{"prompt": "a", "messages": []}', "line 1"), (b'{"messages": []}', "line 1"),
    (b'{"messages": [{"role": "user"}]}', "line 1"), (b'{"messages": ["a"]}', "line 1"), (b'{"prompt": "a", "category": 3}', "line 1"),
    (b'{"prompt": "a", "name": "\\u001b[2J"}', "printable"), (b"\xff\xfe", "line 1"),
])  # fmt: skip
def test_prompt_files_of_another_form_are_refused_by_line(tmp_path, content, words):
    (tmp_path / "p.jsonl").write_bytes(content)
    fails_with(PyspecError, words, read_prompts, tmp_path / "p.jsonl")


session = loaded(n_ctx=512, draft_width=4)


def test_bytes_of_a_step(session):
    engine = session.runner
    engine.reset(drafting=False)
    engine.prefill([1, 2, 3])
    moved, weights = engine.step_graph("plain", 1).traffic(), session.target.weights.nbytes
    state = engine.recurrent.nbytes
    assert weights <= moved <= weights + engine.kv.nbytes + 3 * state
    engine = session.runner
    engine.reset(drafting=False)
    engine.prefill([1] * 100)
    short = engine.step_graph("plain", 1).traffic()
    engine.prefill([1] * 200)
    rows = 256 * sum(t.nb[1] for layer in engine.kv.layers for t in (layer.k, layer.v))
    # our own mask looks at all positions, whatever the span; ggml's at those of the span
    assert engine.step_graph("plain", 1).traffic() - short == rows + (256 * 4 if session.backend.level is None else 0)


@pytest.mark.slow
def test_phases_and_bandwidths(session):
    plain, block = anatomy(session, (1, 4, 512))
    assert (plain.width, block.width) == (1, 4)
    assert plain.draft_ms == plain.commit_ms == 0 and block.step_ms == pytest.approx(block.draft_ms + block.verify_ms)
    assert block.bytes > plain.bytes and block.nodes > plain.nodes and plain.bandwidth_share > 0
    assert 1e7 < copy_bandwidth(session.backend) < 1e13


OPTIONS = BenchOptions(prompts=(), tokens=12, repetitions=1, synthetic=6.0)
slots_session = loaded(pair=True, n_ctx=tokens_needed(OPTIONS), draft_width=16)


def test_one_slot_uses_the_engine_for_one_sequence(slots_session, monkeypatch):
    monkeypatch.setattr(slots_session, "batch", lambda *_: pytest.fail("one slot needs no batch engine"))
    plain, drafted = bench_slots(slots_session, (1,), OPTIONS)
    assert (plain.test, drafted.test) == ("tg12x1", "spec12x1") and plain.widths.keys() == {1} and drafted.tokens_per_step > 1


def test_slots_and_short_contexts(slots_session):
    plain, drafted = bench_slots(slots_session, (3,), OPTIONS)
    assert plain.slots == drafted.slots == 3 and plain.tokens_per_step == 1.0
    assert drafted.widths.keys() == {16} and drafted.tokens_per_step > 1.5
    for row in (plain, drafted):
        assert row.mean == pytest.approx(3000 * row.tokens_per_step / row.ms_per_step, rel=0.01) and row.used == 1.0
        assert row.slot_bytes > 0 and row.as_dict()["mean"] == row.mean
    with pytest.raises(ContextError, match="use `n_ctx`"):
        bench_slots(slots_session, (2,), BenchOptions(prompts=(), tokens=200, repetitions=1))


BLOCK, PLAIN = ("draft-dflash", 2, 0), ("", 1, 0)


def engine(new_graphs: list[bool]) -> SimpleNamespace:
    """Of whose steps those build a graph."""
    graphs, state = SimpleNamespace(changes=0, get=None), SimpleNamespace(_commit=None, catch_up_us=0)
    out = SimpleNamespace(io=SimpleNamespace(replay=None, uploads=0), graphs=graphs, state=state)

    def forward(batch, meanwhile):
        out.graphs.changes += new_graphs.pop(0)

    out.forward = forward
    return out


def test_costs_of_new_graphs():
    """Only the last round's new graphs were looked at: KeyError, where a text has a drafter's block tried once."""
    watched = Watched(engine([True, False, False]))
    watched.begin()
    watched(SimpleNamespace(items={0: Draft(2, drafter="draft-dflash")}))
    watched(SimpleNamespace(items={0: Verify()}))
    watched.begin()
    watched(SimpleNamespace(items={0: Verify()}))
    assert [kind for kind, _ in watched.new] == [] and watched.first.keys() == {BLOCK}
    costs = step_costs([watched])
    assert costs.keys() == {BLOCK, PLAIN} and costs[BLOCK] == watched.first[BLOCK][0]
    one = SimpleNamespace(took={}, first={BLOCK: [90.0]})
    other = SimpleNamespace(took={BLOCK: [3.0, 2.0, 9.0, 1.0]}, first={PLAIN: [7.0]})
    assert step_costs([one, other]) == {BLOCK: pytest.approx(2.0), PLAIN: 7.0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), "qwen35")


@pytest.fixture(scope="module")
def split_session(files):
    with ps.load(*files, device="CPU,CPU", threads=1, n_ctx=256, draft_width=8, tensor_split=[3, 1], prefix_memory=0) as made:
        yield made


@pytest.mark.slow
def test_parts_of_a_split_step(split_session):
    engine = split_session.runner
    plain, block = split_steps(split_session.runner, (1, 8))
    for step, width in ((plain, 1), (block, 8)):
        engine.reset(drafting=width > 1)
        engine.prefill([1, 2, 3])
        chain = engine.step_graph("fused" if width > 1 else "plain", width)
        sent = [sum(nbytes for after, _, nbytes in chain.hops if chain.segments[after] == index) for index in range(2)]
        assert step.width == width and [d.copied_bytes for d in step.devices] == sent
        assert [d.layers for d in step.devices] == ["layers 0 to 2", "layer 3"]
        assert all(d.compute_ms > 0 for d in step.devices) and sum(d.waits for d in step.devices) == pytest.approx(1)
        assert 0 <= step.cut_share < 1 and step.step_ms > 0
    assert plain.devices[1].copies == 0 and block.devices[1].copies == 1  # drafts go from the last device to the first
    assert engine.io.lane is None

    def trace():
        engine, out = split_session.runner, []
        engine.reset()
        engine.prefill(list(range(20)))
        for item in (Draft(8), Draft(4), Draft(8)):
            result = engine.step({0: item})[0]
            out += [result.tokens, result.ids, engine.candidates(2)[1].copy()]
            engine.accept(2, int(result.ids[1]))
        return out

    want = trace()
    with split_session.runner.devices.apart():
        assert all(np.array_equal(a, b) for a, b in zip(want, trace(), strict=True))


@pytest.mark.slow
def test_copies_between_neighbours_and_back(split_session, files, monkeypatch):
    there, back = copy_speeds(split_session.runner)
    assert there.small_us > 0 and there.bandwidth > 1e7 and (back.source, back.target) == ("CPU", "CPU")
    monkeypatch.delenv("GGML_CUDA_P2P", raising=False)
    monkeypatch.setattr(peer, "_results", {frozenset(("CUDA0", "CUDA1")): "", frozenset(("CUDA0", "CUDA2")): "the driver offers none"})
    assert (
        way_of_copies("CUDA1", "CUDA0") == "directly" and way_of_copies("CUDA0", "CUDA2") == "without peer access: the driver offers none"
    )
    monkeypatch.setenv("GGML_CUDA_P2P", "1")
    assert "GGML_CUDA_P2P is set" in way_of_copies("CUDA0", "CUDA1")
    assert way_of_copies("RPC:a:1", "CPU") == "over the network, through this machine"
    with ps.load(files[0], device="CPU", threads=1, n_ctx=256) as alone, pytest.raises(EngineError, match="no cut to measure"):
        split_steps(alone.runner, (1,))


@pytest.mark.slow
def test_what_a_workers_copies_wait_for_is_its_computing(split_session, monkeypatch):
    """Otherwise a cut between two workers seemed to take 70 % of a step, and a layer there nothing. `pyspec bench` still said so."""
    shares = tuple(DeviceShare(f"D{i}", "layers", ms, 1, 4096, 3.0, 0.5) for i, ms in enumerate((0.1, 4.0)))
    far = [CopySpeed("D0", "D1", 100.0, 1e9, "over the network, through this machine")]
    first, last = without_waiting(SplitStep(1, 4.1, shares), far).devices
    assert first.copy_ms == pytest.approx(0.1 + 0.004096) and first.compute_ms == pytest.approx(3.1 - first.copy_ms)
    assert (last.copy_ms, last.compute_ms) == (3.0, 4.0) and first.waits + last.waits == pytest.approx(1)
    near = [CopySpeed("D0", "D1", 100.0, 1e9, "through the host")]
    assert [d.copy_ms for d in without_waiting(SplitStep(1, 4.1, shares), near).devices] == [3.0, 3.0]
    instant = [CopySpeed("CPU", "CPU", 0.0, 0.0, "over the network, through this machine")]  # then all of it is computing
    monkeypatch.setattr(split_steps_module, "copy_speeds", lambda engine: instant)
    for step in (*split_steps(split_session.runner, (1, 8)), split_steps_module.split_chunk(split_session.runner)):
        assert all(share.copies and share.copy_ms == 0 < share.compute_ms for share in step.devices[:1])
        assert sum(share.waits for share in step.devices) == pytest.approx(1)


@pytest.mark.slow
def test_bench_prints_them(files):
    command = ["bench", "-m", str(files[0]), "--device", "CPU,CPU", "-t", "1", "-p", "0", "-n", "4", "-r", "1", "--json"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout.splitlines()[-1])  # a busy machine is warned of on the other stream
    assert [step["width"] for step in about["split"]] == [1] and len(about["split"][0]["devices"]) == 2 == len(about["copies"])
    assert "| step | ms | device | layers | computes | copies | moved | copying | waits |" in result.stdout
    assert "| CPU to CPU |" in result.stdout
