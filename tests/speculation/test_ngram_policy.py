"""What came before is verified instead of drafts, alone and beside a drafter, in one slot and in many: the text stays what it is."""

import json
from itertools import islice

import pytest
from random_gguf.archs import write_gemma4
from random_gguf.model import Shape

import pyggml_spec as ps
from pyggml_spec.chat import chat_template
from pyggml_spec.cli.report import configuration_line
from pyggml_spec.errors import EngineError
from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.speculation.ngram import NOTHING, PLAIN_STEPS, Choice, NgramMethod
from pyggml_spec.speculation.policy import SpeculationPolicy, StepPlan
from pyggml_spec.tools.bench_prompts import PromptsOptions, bench_prompts
from pyggml_spec.tools.plan import check
from pyggml_spec.tools.prompts import Prompt

pytestmark = pytest.mark.slow
LIST = "".join(f'item {i}: value = {i * 7 % 13}; name = "object number {i}"\n' for i in range(12))
PROMPT = f"Repeat this list:\n{LIST}\nThe list again:\n{LIST[:400]}"
N = 100


@pytest.fixture(scope="module", autouse=True)
def steady():
    """Rows cost little, whatever else runs on this machine: what is looked up does not depend on its load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            NgramMethod, "cost", lambda self, covered, rows: self.fixed.get(rows, 60.0) if hasattr(self, "fixed") else 1.0 + 0.05 * rows
        )
        yield


PROMPTS = [PROMPT, PROMPT[: len(PROMPT) // 2], "import os\n", PROMPT[30:]]


HOT = ps.Sampling(temperature=0.8, seed=5)
LINES = ps.Sampling(temperature=0, grammar='root ::= ("item " [0-9]+ ": value\\n")+')


@pytest.fixture(scope="module")
def alone():
    """Without drafts: the texts of PROMPTS, and of the first one by HOT and by LINES."""
    with ps.load(DEMO_TARGET, device="CPU", threads=1, n_ctx=1024, spec=["none"]) as session:
        texts = [session.generate(prompt, N, ignore_end=True)[0] for prompt in PROMPTS]
        return texts, session.generate(PROMPT, 60, sampling=HOT, ignore_end=True)[0], session.generate(PROMPT, 40, sampling=LINES)[0]


@pytest.fixture(scope="module")
def plains(alone):
    return alone[0]


@pytest.fixture(scope="module")
def plain(plains):
    return plains[0]


@pytest.fixture(scope="module", params=["suffix", "draft-dflash,suffix", "ngram-simple"])
def session(request):
    spec = request.param.split(",")
    draft = DEMO_DRAFTER if "draft-dflash" in spec else None
    with ps.load(DEMO_TARGET, draft, device="CPU", threads=1, n_ctx=1024, spec=spec) as loaded:
        yield loaded


def test_the_text_is_plain_text_and_repeated_requests_are_copied(session, plain):
    text, first = session.generate(PROMPT, N, ignore_end=True)
    again, second = session.generate(PROMPT, N, ignore_end=True)
    assert text == again == plain
    method = session.lookup.method
    assert method in first.drafters and first.emitted == N == 1 + first.steps + first.matched
    assert sum(n for _, n, _ in first.drafters.values()) == first.drafted
    assert sum(right for _, _, right in first.drafters.values()) == first.matched
    if session.lookup.pool.lookup.shared:  # the answer of the first one is the corpus of the second
        assert second.steps < 15 and second.acceptance > 0.9
    assert first.graphs_built_after_warmup == second.graphs_built_after_warmup == first.buffer_growths_after_warmup == 0
    steps = session.runner.graphs.steps()
    rows = {(key.kind, key.verify_len) for key, step in steps.items() if step.ready and key.kind in ("plain", "verify", "fused", "draft")}
    drafters = ("verify", "fused") if session.drafter is not None else ("verify",)
    assert rows <= {("plain", 1), *((role, width) for role in drafters for width in (2, 4, 8, 16))}  # each is a graph that a GPU captures
    assert json.loads(json.dumps(first.as_dict()))["drafters"][method] == list(first.drafters[method])


def test_sampled_text_and_what_is_looked_up(session, alone):
    text, stats = session.generate(PROMPT, 60, sampling=HOT, ignore_end=True)
    assert text == alone[1] and (stats.drafters or session.lookup.method != "suffix")
    assert session.generate(PROMPT, 40, sampling=LINES)[0] == alone[2]
    for mode in ("plain", "reference"):
        assert not session.generate(PROMPT, 20, mode=mode, ignore_end=True)[1].drafters


def test_what_no_drafter_costs(tmp_path):
    """The constraint decides the first step behind a plain generation, and no kind of step was chosen: its drafter had no name."""
    sampling = ps.Sampling(temperature=0, regex="item one: value = [0-9], item two: value = [0-9]")
    with ps.load(device="CPU", threads=1, n_ctx=256, spec=["draft-dflash", "suffix"]) as session:
        want = session.generate("a\n", 40, mode="plain", sampling=sampling)[0]
        text, stats = session.generate("a\n", 40, sampling=sampling)
    assert text == want and "constraint" in stats.drafters
    target, prompt = write_gemma4(tmp_path / "t.gguf", Shape()), [1, 2, 3, 4, 5, 6, 7, 8] * 30
    with ps.load(target, device="CPU", threads=1, n_ctx=1024, spec=["suffix"]) as session:
        want, _ = session.generate(prompt, 80, mode="plain", ignore_end=True)
        text, stats = session.generate(prompt, 80, ignore_end=True)
        assert text == want and stats.drafters["suffix"][2] > 0
        with pytest.raises(EngineError, match="there is no drafter"):
            with ps.load(target, device="CPU", threads=1, n_ctx=256, spec=[]) as alone:
                alone.generate(prompt[:20], 5, mode="speculative")
    control = NgramMethod.unmeasured("suffix", (2, 4, 8))
    sequence = control.begin([1, 2, 3, 4] * 8)
    for _ in range(PLAIN_STEPS + 1):
        assert control.finds_nothing(1, sequence) and control.choose(1, [sequence], [1.0], 1.0, 1) is NOTHING[1]
        control.observe(1, 1, 2.0, 1)
    assert any(control.choose(1, [sequence], [1.0], 2.0, 1).drafts)


def test_an_answer_left_early_is_no_corpus_of_half_a_step(session, plain):
    steps = session.steps(PROMPT, N, ignore_end=True)
    begun = [event.text for event in islice(steps, 4)]
    steps.close()
    assert plain.startswith("".join(begun)) and session.generate(PROMPT, N, ignore_end=True)[0] == plain


def test_what_is_looked_up_teaches_a_drafter_nothing(session, monkeypatch):
    """One of two sequences verifies what came before, in a step in which the other one's drafter drafts."""
    if session.drafter is None:
        pytest.skip("nobody drafts")
    looked, taught, observe = [], [], SpeculationPolicy.observe

    def choose(self, covered, sequences, otherwise, milliseconds, rows):
        drafts = self._cut(sequences, [i == 0 and s is not None and s.find() is not None for i, s in enumerate(sequences)], rows)
        looked[:] = map(bool, drafts)
        return Choice(drafts, True)

    def observed(self, covered, kind, milliseconds, sequences, *more):
        taught.append(([*looked, False, False][: len(sequences)], [s is None for s in sequences]))
        looked.clear()
        observe(self, covered, kind, milliseconds, sequences, *more)

    monkeypatch.setattr(NgramMethod, "choose", choose)
    for method in (NgramMethod, SpeculationPolicy):  # other work on this machine changes nothing
        monkeypatch.setattr(method, "set_condition" if method is NgramMethod else "condition_changed", lambda *_: False)
    monkeypatch.setattr(SpeculationPolicy, "choose", lambda *_: StepPlan.of("draft-dflash", 4))
    monkeypatch.setattr(SpeculationPolicy, "observe", observed)
    session.generate_all(PROMPTS[:2], 60, slots=2, ignore_end=True)
    assert any(was[0] for was, _ in taught) and all(was == untaught for was, untaught in taught)


def test_in_slots_each_text_is_its_own(session, plains):
    for _ in range(2):
        done = session.generate_all(PROMPTS, N, slots=4, ignore_end=True)
        assert [text for text, _ in done] == plains
    assert any(session.lookup.method in stats.drafters for _, stats in done)


CPU = {"device": "CPU", "threads": 1, "n_ctx": 1024}


@pytest.fixture(scope="module")
def implied():
    with ps.load(DEMO_TARGET, **CPU) as loaded:
        yield loaded


def test_implied_drafts(implied, plains):
    assert implied.methods == ("suffix",)
    assert "| n-gram drafts (suffix) where the text repeats |" in configuration_line(implied.configuration(), None)
    found = implied.generate_all(PROMPTS[:3], N, slots=3, ignore_end=True)
    assert [text for text, _ in found] == plains[:3] and sum(stats.matched for _, stats in found) > 10
    assert implied.batch_invariant and not any("near-tie" in note for note in implied.notes)
    with ps.load(DEMO_TARGET, kernels="ggml", **CPU) as loaded:
        assert not loaded.batch_invariant and any("near-tie" in note for note in loaded.notes)
    with implied.batch(32, n_ctx=128) as scheduler:
        assert scheduler.runner.options.width == 2 and scheduler.ngram is not None and scheduler.ngram.widths == (2,)
    with implied.batch(4, n_ctx=128) as scheduler:
        assert scheduler.ngram is not None and scheduler.ngram.widths == (2, 4, 8, 16)
    template, _ = chat_template(implied)
    (row,) = bench_prompts(implied, [Prompt("list", "1", text=PROMPT)], PromptsOptions(40, 2), template)
    steps = [spec.steps for run in row.runs for _, spec in run]
    assert min(steps) > 3 and row.as_dict()["acceptance"]["mean"] > 0  # 39 tokens of a text that is known are three blocks of 16


@pytest.mark.parametrize("options", [{"spec": []}, {"spec": ["none"]}, {"no_spec": ["suffix"]}])
def test_it_is_taken_away(options):
    with ps.load(DEMO_TARGET, **CPU, **options) as loaded:
        assert loaded.methods == () and "no drafter: plain decoding" in configuration_line(loaded.configuration(), None)
        assert loaded.generate(PROMPT, 5)[1].mode == "plain"


@pytest.mark.parametrize(
    "sampling", [None, ps.Sampling(temperature=0.8, seed=3), ps.Sampling(temperature=0, regex='[a-z0-9 =;:."\n]{20,80}')]
)
def test_the_text_is_that_of_plain_decoding(implied, sampling):
    ignore = sampling is None or not sampling.constrained
    plain, _ = implied.generate(PROMPT, N, mode="plain", sampling=sampling, ignore_end=ignore)
    text, stats = implied.generate(PROMPT, N, sampling=sampling, ignore_end=ignore)
    assert text == plain
    assert sampling is not None or stats.matched > 10


@pytest.mark.parametrize("slots", [1, 16])
def test_memory_is_planned(slots):
    assert check(DEMO_TARGET, device="CPU", n_ctx=512, slots=slots).error < 0.01
