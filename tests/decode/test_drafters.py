"""Whoever drafts, the text is the plain one, byte for byte: greedy, sampled, under a constraint, in several slots, and behind a prompt that was kept."""

import re

import pytest
from ggml.kernel_graphs import LEVELS
from random_gguf.archs import write_gemma4, write_llama
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash, write_qwen35

import pyggml_spec as ps

pytestmark = pytest.mark.skipif(not LEVELS, reason="our own kernels do not run on this processor: ggml's promise no such thing")
QUANT = "Q8_0"  # own kernels: a row has the same bits in every step
KINDS = {
    "eagle3": (write_llama, write_eagle3, {}),
    "dflash2": (write_qwen35, write_dflash2, {"taps": 3}),
    "dflash, d2t": (write_qwen35, write_dflash, {"own": ("head",), "tokens": 90}),
    "dspark": (write_gemma4, write_dspark, {"own": ("head",), "tokens": 90}),
    "dspark, not from the anchor": (write_qwen35, write_dspark, {"from_anchor": False}),
    "gemma4-assistant": (write_gemma4, write_gemma4_assistant, {}),
    "dspark and gemma4-assistant": (write_gemma4, (write_dspark, write_gemma4_assistant), {}),
    "dflash2 and eagle3": (write_llama, (write_dflash2, write_eagle3), {}),
    "eagle3, d2t": (write_llama, write_eagle3, {"tokens": 90, "norm_before_fc": True}),
}
PROMPTS = ["def quicksort(items):\n", "import os\n", "class Queue:\n    ", "x = [", "for i in range(", "# sort\n"]
REGEX = r"def [a-z]{3,9}\(self, (name|number)\):\n    return [^\n]{3,20}\n"
VALUES = {
    "greedy": {},
    "sampled": {"sampling": ps.Sampling(seed=7, temperature=0.8)},
    "regex": {"sampling": ps.Sampling(seed=3, temperature=1.0, regex=REGEX)},
}


@pytest.fixture(scope="module", params=KINDS)
def session(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target, draft, options = KINDS[request.param]
    drafts = draft if isinstance(draft, tuple) else (draft,)
    files = (
        target(folder / "t.gguf", Shape(), QUANT),
        [write(folder / f"{i}.gguf", Shape(), QUANT, **options) for i, write in enumerate(drafts)],
    )
    with ps.load(*files, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        yield session


@pytest.mark.parametrize("values", VALUES)
def test_the_text_is_the_plain_one(session, values):
    for prompt in (PROMPTS[0], PROMPTS[0] + PROMPTS[1], PROMPTS[0]):  # the second and third begin with what was kept of the first
        plain, _ = session.generate(prompt, 40, mode="plain", **VALUES[values])
        text, stats = session.generate(prompt, 40, mode="speculative", **VALUES[values])
        assert text == plain and stats.drafted > 0
        assert values != "regex" or re.match(r"def [a-z]{3,9}\(self, (name|number)\):\n    return ", text)
        assert values == "regex" or any(stats.drafters[method][1] > 0 for method in session.methods if method in stats.drafters)


@pytest.mark.parametrize("slots", [1, 4])
def test_the_text_does_not_depend_on_slots(session, slots):
    options = VALUES["sampled"]
    want = [session.generate(prompt, 24, mode="plain", **options)[0] for prompt in PROMPTS]
    with session.concurrent(slots=slots) as server:
        got = [server.submit(prompt, 24, **options) for prompt in PROMPTS]
        assert [handle.result()[0] for handle in got] == want


def test_nothing_is_built_while_it_runs(session):
    session.generate(PROMPTS[0], 40)
    stats = session.generate(PROMPTS[0], 60)[1]
    assert stats.drafted > 0 and (stats.graphs_built_after_warmup, stats.buffer_growths_after_warmup) == (0, 0)
