"""Without a drafter the text's own repetitions are verified where that is expected to pay: the text stays that of plain decoding, and it is said."""

import pytest
from speculation.test_ngram_policy import PROMPT

import pyggml_spec as ps
from pyggml_spec.chat import chat_template
from pyggml_spec.cli.report import configuration_line
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.speculation.ngram import NOTHING, PLAIN_STEPS, NgramMethod
from pyggml_spec.tools.bench_prompts import PromptsOptions, bench_prompts
from pyggml_spec.tools.plan import check
from pyggml_spec.tools.prompts import Prompt

N = 100
CPU = {"device": "CPU", "threads": 1, "n_ctx": 1024}


@pytest.fixture(scope="module", autouse=True)
def cheap():
    """Rows cost little, whatever else runs on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramMethod, "cost", lambda self, covered, rows: 1.0 + 0.05 * rows)
        yield


@pytest.fixture(scope="module")
def session():
    with ps.load(DEMO_TARGET, **CPU) as loaded:
        yield loaded


def test_it_is_on_and_said(session):
    assert session.methods == ("suffix",)
    assert "| n-gram drafts (suffix) where the text repeats |" in configuration_line(session.configuration(), None)


@pytest.mark.parametrize("options", [{"spec": []}, {"spec": ["none"]}, {"no_spec": ["suffix"]}])
def test_it_is_taken_away(options):
    with ps.load(DEMO_TARGET, **CPU, **options) as loaded:
        assert loaded.methods == () and "no drafter: plain decoding" in configuration_line(loaded.configuration(), None)
        assert loaded.generate(PROMPT, 5)[1].mode == "plain"


@pytest.mark.parametrize(
    "sampling", [None, ps.Sampling(temperature=0.8, seed=3), ps.Sampling(temperature=0, regex='[a-z0-9 =;:."\n]{20,80}')]
)
def test_the_text_is_that_of_plain_decoding(session, sampling):
    ignore = sampling is None or not sampling.constrained
    plain, _ = session.generate(PROMPT, N, mode="plain", sampling=sampling, ignore_end=ignore)
    text, stats = session.generate(PROMPT, N, sampling=sampling, ignore_end=ignore)
    assert text == plain
    assert sampling is not None or stats.matched > 10


def test_so_are_texts_of_several_slots(session):
    prompts = [PROMPT, PROMPT[30:], "import os\n"]
    plains = [session.generate(prompt, 60, mode="plain", ignore_end=True)[0] for prompt in prompts]
    found = session.generate_all(prompts, 60, slots=3, ignore_end=True)
    assert [text for text, _ in found] == plains and sum(stats.matched for _, stats in found) > 10


def test_near_ties_are_named_where_kernels_depend_on_the_shape(session):
    assert session.batch_invariant and not any("near-tie" in note for note in session.notes)
    with ps.load(DEMO_TARGET, kernels="ggml", **CPU) as loaded:
        assert not loaded.batch_invariant and any("near-tie" in note for note in loaded.notes)


def test_nothing_is_verified_before_plain_steps_were_timed():
    """Costs are estimates of those steps, on the dear side."""
    control = NgramMethod.unmeasured("suffix", (2, 4, 8))
    sequence = control.begin([1, 2, 3, 4] * 8)
    for _ in range(PLAIN_STEPS + 1):
        assert control.finds_nothing(1, sequence) and control.choose(1, [sequence], [1.0], 1.0, 1) is NOTHING[1]
        control.observe(1, 1, 2.0, 1)
    assert any(control.choose(1, [sequence], [1.0], 2.0, 1).drafts)


@pytest.mark.parametrize("slots", [1, 16])
def test_memory_is_planned(slots):
    assert check(DEMO_TARGET, device="CPU", n_ctx=512, slots=slots).error < 0.01


def test_blocks_of_many_slots_are_narrow(session):
    with session.batch(32, n_ctx=128) as scheduler:
        assert scheduler.runner.options.width == 2 and scheduler.ngram is not None and scheduler.ngram.widths == (2,)
    with session.batch(4, n_ctx=128) as scheduler:
        assert scheduler.ngram is not None and scheduler.ngram.widths == (2, 4, 8, 16)


def test_bench_takes_it_and_no_run_repeats_the_one_before(session):
    template, _ = chat_template(session)
    (row,) = bench_prompts(session, [Prompt("list", "1", text=PROMPT)], PromptsOptions(40, 2), template)
    steps = [spec.steps for run in row.runs for _, spec in run]
    assert min(steps) > 3 and row.as_dict()["acceptance"]["mean"] > 0  # 39 tokens of a text that is known are three blocks of 16
