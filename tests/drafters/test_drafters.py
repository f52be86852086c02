"""With every drafter the text is the plain one, byte for byte: greedy, sampled, under a constraint, in several slots, and after a prompt that was kept."""

import importlib
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cli.process import one_sentence, pyspec
from click.testing import CliRunner
from ggml.kernel_graphs import LEVELS
from gguf_io.build import STR, U32, Model
from random_gguf.archs import WRITERS, write_gemma4, write_llama, write_qwen3moe
from random_gguf.dflash2 import write_dflash2, write_dspark
from random_gguf.eagle3 import write_eagle3
from random_gguf.gemma4_assistant import write_gemma4_assistant
from random_gguf.model import Shape, write_dflash, write_qwen35
from random_gguf.mtp import write_mtp_target

import pyggml_spec as ps
from pyggml_spec.cli.inspect import command
from pyggml_spec.doctor import examine
from pyggml_spec.drafters import base as drafter
from pyggml_spec.drafters import pairs
from pyggml_spec.drafters.pairs import PUBLISHED
from pyggml_spec.engine import drafting
from pyggml_spec.engine.graph_prebuilder import GraphPrebuilder
from pyggml_spec.engine.graphs import StepGraphs
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import ModelError
from pyggml_spec.ggml.graph import Graph
from pyggml_spec.ggml.library import ffi, lib, read_tensor
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import TARGETS
from pyggml_spec.sampling.sampler import Sampler
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan


def slow_with_kernels(test):
    reason = "native kernels do not run on this processor: ggml's promise no such thing"
    return pytest.mark.slow(pytest.mark.skipif(not LEVELS, reason=reason)(test))


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
    "draft-simple": (write_llama, write_llama, {"seed": 1, "quant": "Q4_0"}),
    "draft-simple, windows": (write_gemma4, partial(WRITERS["gemma3"], seed=1), {}),
    "draft-simple, recurrent": (write_qwen35, partial(write_qwen35, seed=1), {}),
    "draft-simple and eagle3": (write_llama, (write_llama, write_eagle3), {}),
    "eagle3 of three layers, in one pass": (write_qwen35, write_eagle3, {"layers": 3, "mask": 7}),
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
    drafts = [write(folder / f"{i}.gguf", Shape(), **{"quant": QUANT, **options}) for i, write in enumerate(drafts)]
    files = target(folder / "t.gguf", Shape(), QUANT), drafts
    with ps.load(*files, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        yield session


@slow_with_kernels
@pytest.mark.parametrize("values", VALUES)
def test_the_text_is_the_plain_one(session, values):
    for prompt in (PROMPTS[0], PROMPTS[0] + PROMPTS[1], PROMPTS[0]):  # the second and third begin with what was kept of the first
        plain, _ = session.generate(prompt, 40, mode="plain", **VALUES[values])
        text, stats = session.generate(prompt, 40, mode="speculative", **VALUES[values])
        assert text == plain and stats.drafted > 0
        assert values != "regex" or re.match(r"def [a-z]{3,9}\(self, (name|number)\):\n    return ", text)
        assert values == "regex" or any(stats.drafters[method][1] > 0 for method in session.methods if method in stats.drafters)


@slow_with_kernels
@pytest.mark.parametrize("slots", [1, 8])
def test_the_text_does_not_depend_on_slots(session, slots):
    options, texts = VALUES["sampled"], [*PROMPTS, *(prompt + "#" for prompt in PROMPTS[:2])]
    want = [session.generate(prompt, 20, mode="plain", **options)[0] for prompt in texts]
    with session.concurrent(slots=slots) as server:
        got = [server.submit(prompt, 20, **options) for prompt in texts]
        assert [handle.result()[0] for handle in got] == want


@slow_with_kernels
@pytest.mark.parametrize(
    "values",
    [{"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8}, {"temperature": 0.7, "samplers": ("temperature", "min_p", "top_k")}],
)
def test_a_model_that_drafts_for_itself_is_right_at_temperature(tmp_path, monkeypatch, values):
    """Drafter and target draw with the same noise; argmaxes are wrong often enough."""
    target, drafter = (write_llama(tmp_path / name, Shape(), QUANT) for name in ("t.gguf", "d.gguf"))
    with ps.load(target, drafter, device="CPU", threads=1, n_ctx=256, draft_width=4) as session:
        for sampling in (ps.Sampling(seed=5, **values), ps.Sampling(seed=6, **values)):
            stats = session.generate(PROMPTS[0], 60, sampling=sampling)[1]
            assert stats.matched >= 0.95 * stats.drafted > 0
        monkeypatch.setattr(Sampler, "draft_options", lambda self, count: np.zeros((count, 8), np.int32))
        stats = session.generate(PROMPTS[0], 60, sampling=ps.Sampling(seed=5, **values))[1]
        assert stats.matched < 0.7 * stats.drafted


@slow_with_kernels
def test_nothing_is_built_while_it_runs(session):
    session.generate(PROMPTS[0], 40)
    stats = session.generate(PROMPTS[0], 60)[1]
    assert stats.drafted > 0 and (stats.graphs_built_after_warmup, stats.buffer_growths_after_warmup) == (0, 0)


@slow_with_kernels
def test_a_constraint_finds_the_graphs_of_every_number_of_drafts(monkeypatch):
    """12 drafts of a chain, all of which may come, were verified by a graph that was not built: blocks are of 2, 4, 8 and 16 rows."""
    monkeypatch.setattr(
        "pyggml_spec.api.known_costs", lambda runner, plans: {p: 1.0 if p.tokens in (1, 12) else 0.9 * p.tokens for p in plans}
    )
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


@slow_with_kernels
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


@slow_with_kernels
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
        patched.setattr(drafting, "draws_input", lambda *of: None)  # as on devices that do not draw
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


ROOT = Path(__file__).parents[2]
NAMES = {  # shapes of scripts/make_random_gguf.py: the target that each of them is
    "4B": "Qwen3.5-4B", "9B": "Qwen3.5-9B", "27B": "Qwen3.6-27B", "35B-A3B": "Qwen3.6-35B-A3B", "gemma4-31B": "gemma-4-31B-it",
    "gemma4-26B-A4B": "gemma-4-26B-A4B-it", "laguna-XS.2": "Laguna-XS-2.1", "qwen3-4B": "Qwen3-4B, not thinking", "qwen3-8B": "Qwen3-8B, not thinking",
    "qwen3-30B-A3B": "Qwen3-Coder-30B-A3B", "coder-next": "Qwen3-Coder-Next", "gpt-oss-20b": "gpt-oss-20b", "gpt-oss-120b": "gpt-oss-120b",
    "llama-8B": "Llama-3.1-8B-Instruct", "minimax-m2": "MiniMax-M2.7", "kimi-k2": "Kimi-K2.6", "glm-5.1": "GLM-5.1",
}  # fmt: skip


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


def test_the_table_is_that_of_the_pages(scripts):
    rows = scripts("pairs_table").rows()
    assert len(rows) == len(PUBLISHED) + 2 and "\n".join(rows) in (ROOT / "docs" / "pairs.md").read_text("utf-8")
    # Two lists of published sizes that contradict each other would name a drafter of another model, or none.
    models = scripts("make_random_gguf").MODELS
    for name, target in NAMES.items():
        shape, found = models[name].shape, next(p for p in PUBLISHED if p.target == target)
        routed = found.n_expert > 0
        assert (found.n_layer, found.n_embd, found.n_expert) == (shape.n_layer, shape.n_embd, shape.n_expert if routed else 0), name
    assert {p.target for p in PUBLISHED if p.arch in TARGETS and p.n_embd} >= set(NAMES.values())


def of_shape(path, write, arch, **keys):
    """A file whose keys say the shape of a published model; its tensors are tiny."""
    model = Model(write(path, Shape()))
    model.keys |= {f"{arch}.{name}": (U32, value) for name, value in keys.items()}
    return model.write(path)


def test_drafters_of_a_target_and_their_options(tmp_path):
    path = of_shape(tmp_path / "t.gguf", write_qwen35, "qwen35", block_count=65, nextn_predict_layers=1, embedding_length=5120)
    drafters = {p.drafter for p in inspect_file(path).drafters}
    assert {"z-lab/Qwen3.5-27B-DFlash", "z-lab/Qwen3.6-27B-DFlash", "incoai/Qwen3.8-27B-DFlash2"} <= drafters
    assert not [name for name in drafters if "27B" not in name]
    path = of_shape(tmp_path / "t.gguf", write_qwen3moe, "qwen3moe", block_count=48, embedding_length=2048, expert_count=128)
    shown = CliRunner().invoke(command, [str(path), "--no-tensors"]).output
    line = "a public DFlash drafter for Qwen3-Coder-30B-A3B, which has this shape: z-lab/Qwen3-Coder-30B-A3B-DFlash, to be converted (pyspec convert)"
    assert line in shown.splitlines()
    listed = json.loads(CliRunner().invoke(command, [str(path), "--json"]).output)["drafters"]
    assert [one["drafter"] for one in listed][:1] == ["z-lab/Qwen3-Coder-30B-A3B-DFlash"] and listed[0]["refused"] == ""
    assert not inspect_file(write_llama(tmp_path / "a.gguf")).drafters and not inspect_file(write_dflash(tmp_path / "d.gguf")).drafters
    path = of_shape(tmp_path / "t.gguf", write_llama, "llama", block_count=32, embedding_length=4096, expert_count=8)
    assert not inspect_file(path).drafters
    small = WRITERS["phi3"](tmp_path / "small.gguf")
    for name in ("run", "serve", "chat", "plan"):
        done = pyspec(name, "-m", small, "-md", small, "--device", "CPU", *(["-p", "a"] if name == "run" else []))
        one_sentence(done, "positions that depend on the context", "do not draft as a whole model here yet", "--spec-type suffix")
    one_sentence(pyspec("doctor", "-m", small, "--device", "CPU"), "examines a pair", "-md", "n-gram drafting")


def test_what_does_not_run_has_its_reason(monkeypatch):
    pair = pairs.Published("T", "deepseek9", 1, 1, 0, "a/b")
    assert "architecture deepseek9" in pair.refused
    monkeypatch.setitem(pairs.ARCHITECTURES, "deepseek9", object)
    assert pair.refused == "" and "Domino drafters" in pairs.Published("T", "qwen3", 1, 1, 0, "a/b", "Domino").refused
    assert "layout Other" in pairs.Published("T", "qwen3", 1, 1, 0, "a/b", layout="Other").refused
    assert {p.arch for p in PUBLISHED if not p.refused} <= TARGETS.keys()


@pytest.fixture
def unknown(tmp_path):
    """A model of an architecture that is not there."""
    model = Model(write_llama(tmp_path / "l.gguf"))
    model.keys = {name.replace("llama.", "qwen9."): value for name, value in model.keys.items()}
    model.keys["general.architecture"] = (STR, "qwen9")
    return model.write(tmp_path / "unknown.gguf")


@pytest.mark.parametrize("use", ["load", "plan", "examine", "inspect"])
def test_an_unsupported_architecture_says_what_can_be_done(unknown, use):
    """It named what is supported, and no remedy for this file."""
    words = (
        "'qwen9', which does not run here yet",
        "nearest is qwen3",
        "docs/adding-an-architecture.md",
        "`pyspec inspect`",
        "llama.cpp runs it",
    )
    if use == "inspect":
        said = inspect_file(unknown).verdict
    else:
        with pytest.raises(ModelError) as raised:
            {"load": ps.load, "plan": plan, "examine": examine}[use](unknown, device="CPU")
        said = str(raised.value)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("use", ["load", "plan"])
def test_a_file_that_does_not_draft_says_what_does(tmp_path, unknown, use):
    """For this target, today: n-gram drafting always, its own MTP layer, and what is published for its shape."""
    small, target = WRITERS["phi3"](tmp_path / "small.gguf"), write_qwen3moe(tmp_path / "t.gguf")
    for draft in (small, unknown):
        with pytest.raises(ModelError) as raised:
            {"load": ps.load, "plan": plan}[use](target, draft, device="CPU")
        said = str(raised.value)
        assert "for t.gguf there is n-gram drafting, which needs no file (`spec` suffix)" in said and "`pyspec inspect`" in said, said
        assert "--" not in said
    model = Model(target)
    model.keys |= {"qwen3moe.block_count": (U32, 48), "qwen3moe.embedding_length": (U32, 2048), "qwen3moe.expert_count": (U32, 128)}
    with GGUFFile(model.write(tmp_path / "shape.gguf")) as file:
        assert (
            "the published z-lab/Qwen3-Coder-30B-A3B-DFlash or JetSpec/jetspec-qwen3-30b-a3b (`pyspec drafters` lists all)"
            in pairs.drafters_for(file)
        )
    with GGUFFile(write_mtp_target(tmp_path / "mtp.gguf")) as file:
        assert "its own MTP layer" in pairs.drafters_for(file)
