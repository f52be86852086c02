"""The bench on prompts: its figures are those of the generations that it names, by category, thinking mode and run."""

import statistics
from dataclasses import replace

import pytest
from chat_model import with_control_tokens

import pyggml_spec as ps
from pyggml_spec.chat import chat_template
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import ContextError, PairError, PyspecError, TemplateError
from pyggml_spec.tools.bench_prompts import PromptsOptions, PromptsRow, bench_prompts
from pyggml_spec.tools.prompts import CATEGORIES, Prompt, included_prompts, read_prompts

HE, WHY = ({"role": "user", "content": text} for text in ("he", "why"))
PROMPTS = [Prompt("talk", "a", messages=(HE,)), Prompt("talk", "b", messages=(WHY,)), Prompt("raw", "c", text="def f(")]


@pytest.fixture(scope="module")
def talker(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker")
    files = [with_control_tokens(path, folder / name, end=301) for path, name in zip(pair, ("target.gguf", "drafter.gguf"))]
    with ps.load(*files, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        yield session


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


def test_several_categories_have_a_row_for_all(talker):
    prompts = [Prompt("a", "1", text="he"), Prompt("b", "2", text="she"), Prompt("b", "3", text="it")]
    rows = bench_prompts(talker, prompts, PromptsOptions(4, 1), chat_template(talker)[0])
    assert [(row.category, row.prompts) for row in rows] == [("a", 1), ("b", 2), ("all", 3)]
    assert rows[2].runs[0] == rows[0].runs[0] + rows[1].runs[0]


def test_mean_and_deviation_are_over_runs():
    def spec(drafted, matched):
        return Stats(drafted=drafted, matched=matched, steps=10, emitted=11 + matched, seconds={"decode": 2.0})

    plain = Stats(steps=20, emitted=21, seconds={"decode": 10.0})
    row = PromptsRow("x", None, 2, [[(plain, spec(30, 10)), (plain, spec(10, 10))], [(plain, spec(40, 10)), (plain, spec(40, 10))]])
    seen = row.as_dict()
    assert row.acceptance == [0.5, 0.25] and seen["acceptance"] == {
        "mean": 0.375,
        "deviation": statistics.stdev([0.5, 0.25]),
        "runs": [0.5, 0.25],
    }
    assert row.plain_speed == [2.0, 2.0] and row.speed == [10.0, 10.0] and row.speedup == [5.0, 5.0]
    nothing = PromptsRow("x", None, 1, [[(plain, Stats())]]).as_dict()  # all steps plain, or the first token was the last
    assert nothing["acceptance"] == nothing["speedup"] == {"mean": None, "deviation": None, "runs": []}


def test_an_interrupt_leaves_the_complete_runs(talker):
    seen = []
    rows = bench_prompts(
        talker,
        PROMPTS[2:],
        PromptsOptions(4, 3),
        chat_template(talker)[0],
        interrupted=lambda: len(seen) == 3,
        progress=lambda *what: seen.append(what),
    )
    assert len(rows[0].runs) == 2


def test_what_cannot_be_measured_is_refused(talker, pair):
    template, _ = chat_template(talker)
    with pytest.raises(ContextError, match=r"need \d+ tokens.*use `n_ctx` \d+"):
        bench_prompts(talker, PROMPTS, PromptsOptions(300, 1), template)
    late = Prompt("x", "late", messages=(HE, {"role": "system", "content": "x"}))
    with pytest.raises(TemplateError, match="'late'.*has to come first"):
        bench_prompts(talker, [late], PromptsOptions(4, 1), template)
    with ps.load(pair[0], device="CPU", threads=1, n_ctx=64, spec=[]) as alone, pytest.raises(PairError, match="`draft`"):
        bench_prompts(alone, PROMPTS, PromptsOptions(4, 1), template)


def test_included_prompts_are_the_same_number_of_each_category():
    prompts = included_prompts()
    assert [sum(p.category == c for p in prompts) for c in CATEGORIES] == [6, 6, 6] and len(prompts) == 18
    assert len({(p.category, p.name) for p in prompts}) == 18
    assert all(p.text is None and p.messages[-1]["role"] == "user" for p in prompts)
    assert [p.category for p in included_prompts(("chat",))] == ["chat"] * 6


def test_prompt_files(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "category": "c", "name": "d"}\n')
    assert read_prompts(file) == [Prompt("prompts", "1", "a"), Prompt("c", "d", None, ({"role": "user", "content": "b"},))]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"), (b"\n \n", "is empty"), (b"{", "line 1"), (b"[]", "line 1"), (b'{"prompt": 1}', "line 1"), (b'{"prompt": ""}', "line 1"),
        (b'{"prompt": "a"}\n{}', "line 2"), (b'{"prompt": "a", "messages": []}', "line 1"), (b'{"messages": []}', "line 1"),
        (b'{"messages": [{"role": "user"}]}', "line 1"), (b'{"messages": ["a"]}', "line 1"), (b'{"prompt": "a", "category": 3}', "line 1"),
        (b'{"prompt": "a", "name": "\\u001b[2J"}', "printable"), (b"\xff\xfe", "line 1"),
    ],
)  # fmt: skip
def test_prompt_files_of_another_form_are_refused_by_line(tmp_path, content, words):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(PyspecError, match=words):
        read_prompts(tmp_path / "p.jsonl")


def test_prompt_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "no", "a\0b"):
        with pytest.raises(PyspecError, match="cannot be read"):
            read_prompts(path)


def test_seeds_count_up_and_around():
    assert PromptsOptions(repetitions=3, sampling=ps.Sampling(seed=(1 << 32) - 2)).seeds == [(1 << 32) - 2, 0, 1]
    assert PromptsOptions(repetitions=3).seeds == []
