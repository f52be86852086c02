"""With every drafter the text is the plain one, byte for byte: greedy, sampled, under a constraint, in several slots, and after a prompt that was kept."""

import re

import numpy as np
import pytest
from ggml.kernel_graphs import LEVELS
from random_gguf.archs import write_gemma4, write_llama
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash, write_qwen35

import pyggml_spec as ps
from pyggml_spec.drafters import base as drafter
from pyggml_spec.engine.graph_prebuilder import GraphPrebuilder
from pyggml_spec.engine.graphs import StepGraphs
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.ggml.graph import Graph
from pyggml_spec.ggml.library import ffi, lib, read_tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LEVELS, reason="native kernels do not run on this processor: ggml's promise no such thing"),
]
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


@pytest.mark.parametrize("slots", [1, 8])
def test_the_text_does_not_depend_on_slots(session, slots):
    options, texts = VALUES["sampled"], [*PROMPTS, *(prompt + "#" for prompt in PROMPTS[:2])]
    want = [session.generate(prompt, 20, mode="plain", **options)[0] for prompt in texts]
    with session.concurrent(slots=slots) as server:
        got = [server.submit(prompt, 20, **options) for prompt in texts]
        assert [handle.result()[0] for handle in got] == want


def test_nothing_is_built_while_it_runs(session):
    session.generate(PROMPTS[0], 40)
    stats = session.generate(PROMPTS[0], 60)[1]
    assert stats.drafted > 0 and (stats.graphs_built_after_warmup, stats.buffer_growths_after_warmup) == (0, 0)


def test_a_constraint_finds_the_graphs_of_every_number_of_drafts(monkeypatch):
    """12 drafts of a chain, all of which may come, were verified by a graph that was not built: blocks are of 2, 4, 8 and 16 rows."""
    monkeypatch.setattr("pyggml_spec.api.cached_costs", lambda engine, widths, *_, **__: ({1: 1.0, **{w: 0.9 * w for w in widths}}, True))
    monkeypatch.setattr("pyggml_spec.api.cached_kinds", lambda _, kinds, *__: {k: 1.0 if k.tokens == 12 else 0.9 * k.tokens for k in kinds})
    unforeseen, prepare, add = [], GraphPrebuilder.prepare, StepGraphs._add

    def added(graphs, key):
        if key.family not in graphs.announced:
            unforeseen.append(key.family)
        return add(graphs, key)

    monkeypatch.setattr(StepGraphs, "_add", added)
    monkeypatch.setattr(GraphPrebuilder, "prepare", lambda *args: (prepare(*args), unforeseen.clear()))
    with ps.load(device="CPU", threads=1, n_ctx=256, spec=["draft-mtp"]) as session:
        stats = session.generate(PROMPTS[0], 60, sampling=ps.Sampling(temperature=0, regex=r"(.|\n){60,99}"))[1]
        assert stats.widths[12] > 0 and unforeseen == []


def test_control_c_between_two_steps_leaves_a_usable_session(session):
    want = session.generate(PROMPTS[2], 24)[0]
    for steps in (1, 2, 5):
        left = [steps]

        def interrupted(left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            for _ in session.steps(PROMPTS[2], 24, interrupted=interrupted):
                pass
        assert session.generate(PROMPTS[2], 24)[0] == want


def _argmax_of_cuda(x):
    """As ggml-cuda's kernel finds it."""
    best, most = -1, -np.finfo(np.float32).max
    for i, value in enumerate(x):
        if value > most:
            best, most = i, value
    return best


@pytest.mark.parametrize("kinds", [("cpu",), ()], ids=["CPU", "elsewhere"])
def test_drafts_of_nan_are_tokens_and_switch_speculation_off(session, monkeypatch, kinds):
    """Last, as it spoils the session. On CUDA the argmax of NaN is -1, and a chain would look that row up: what it is given elsewhere is finite."""
    want, asked, argmax = session.generate(PROMPTS[0], 12, mode="plain")[0], [], Graph.argmax
    for member in session.drafter.methods:
        lib.ggml_backend_tensor_memset(member.weights["output_norm.weight"], 0xFF, 0, 4)

    def keeping(g, x):
        for tensor in (x, x.view_src):
            if tensor != ffi.NULL:
                g.keep_output(tensor)
        asked.append((g, x))
        return argmax(g, x)

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "NAN_IS_A_TOKEN", kinds)
        patched.setattr(Graph, "argmax", keeping)
        engine = ModelRunner(session.backend, session.target, session.drafter, EngineOptions(n_ctx=256, width=4))
        try:
            for member in session.drafter.methods:
                engine.reset()
                engine.prefill([1, 2, 3])
                graph = engine.step_graph("fused", 4, member.method)
                assert not engine.fused_step(4, drafter=member.method).draft_finite
                mine = [x for g, x in asked if g is graph]
                assert mine
                for x in mine:
                    values = np.empty(x.ne[0], np.float32)
                    read_tensor(x, values, 0, ())
                    assert (_argmax_of_cuda(values) < 0) == (kinds != ())
        finally:
            engine.close()
    text, stats = session.generate(PROMPTS[0], 12)
    assert text == want and stats.nan_drafts == 1
