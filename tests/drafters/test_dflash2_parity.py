"""Ids that a DFlash2 drafter makes equal llama.cpp's walk through its lattice, block after block, whatever was accepted before."""

from dataclasses import replace

import numpy as np
import pytest
from drafters.parity import LAST, UB, disagreement
from llama_oracle import LlamaDFlash
from random_gguf.archs import write_gemma4, write_muse_glimmer, write_qwen3
from random_gguf.dflash2 import write_dflash2
from random_gguf.model import Shape, write_qwen35

import pyggml_spec as ps
from pyggml_spec.drafters.base import Chosen
from pyggml_spec.drafters.dflash import BlockInputs
from pyggml_spec.drafters.dflash2 import DFlash2
from pyggml_spec.engine.batch import Draft, Prefill
from pyggml_spec.engine.graphs import most_nodes
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import ModelError, PairError
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.step_io import StepFields, StepIO
from pyggml_spec.tools.inspect import inspect_file
from pyggml_spec.tools.plan import plan

TARGETS = {"qwen3": write_qwen3, "qwen35": write_qwen35, "gemma4": write_gemma4, "muse-glimmer": write_muse_glimmer}


def both(target, draft, prompt, n_ctx=512, width=5):
    """A session and llama.cpp with the same files; the prompt is in both."""
    session = ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=n_ctx, draft_width=width, chunk=UB)
    hp, options = session.drafter.hp, {"causal": session.drafter.hp.causal, "top_k": session.drafter.top_k}
    oracle = LlamaDFlash(target, draft, hp.target_layers, hp.mask_token, n_ctx, UB, block=width, **options)
    assert session.engine.prefill(prompt) == oracle.prefill(prompt)
    return session, oracle


CASES = [
    *((quant, "qwen35", {}, 20, 60, 5) for quant in ("F32", "Q8_0", "Q4_K")),
    *(("F32", "qwen3", {"taps": 3, "group_size": 64}, 20, 20, width) for width in (2, 3, 8)),
    ("F32", "qwen3", {"taps": 1, "top_k": 3, "logit_scale": 0.3, "softcap": 2.0, "own": ("head", "embedding")}, 20, 20, 5),
    ("F32", "gemma4", {"factors": True, "norms_behind": True, "gelu": True}, 40, 20, 5),
    ("Q8_0", "muse-glimmer", {"causal": True}, 40, 20, 5),
    ("F32", "qwen3", {"own": ("head",), "tokens": 100}, 20, 20, 5),
    *(("F32", "qwen3", {}, prompt, 13, 5) for prompt in (1, UB - 1, UB, UB + 1, LAST)),
]


@pytest.mark.parametrize("quant, arch, options, prompt, blocks, width", CASES)
def test_ids_equal_llama_cpp(tmp_path, quant, arch, options, prompt, blocks, width):
    target = TARGETS[arch](tmp_path / "t.gguf", Shape(), quant)
    scale = 16.0 if arch == "gemma4" else 0.0  # in the file, as the converter writes it: llama.cpp asks nobody else
    draft = write_dflash2(tmp_path / "d.gguf", Shape(embedding_scale=scale), quant, **options)
    session, oracle = both(target, draft, np.random.default_rng(3).integers(0, 256, prompt).tolist(), width=width)
    try:
        assert disagreement(session, oracle, blocks) is None
    finally:
        oracle.close()
        session.close()


MUTATIONS = {
    "the largest logit alone": lambda self, g, hidden, block, slots, target: Chosen(
        (self.choose(g, x := self.logits(g, hidden, target)),), x
    ),
    "no convolutions": lambda self, g, i, part, side, x, moving, rows: x,
}


@pytest.mark.parametrize("what, name", [("the largest logit alone", "drafts"), ("no convolutions", "_convolved")])
def test_selector_and_convolutions_matter(tmp_path, monkeypatch, what, name):
    """Without them the drafts are other ones: the comparison with llama.cpp sees that."""
    monkeypatch.setattr(DFlash2, name, MUTATIONS[what])
    target, draft = write_qwen3(tmp_path / "t.gguf", Shape()), write_dflash2(tmp_path / "d.gguf", Shape())
    session, oracle = both(target, draft, list(range(40)))
    try:
        assert disagreement(session, oracle, 13) is not None
    finally:
        oracle.close()
        session.close()


def test_a_convolution_is_that_of_numpy(tmp_path):
    """Two blocks side by side, three taps: nothing comes from the block before."""
    target, draft = write_qwen3(tmp_path / "t.gguf", Shape()), write_dflash2(tmp_path / "d.gguf", Shape(), taps=3)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, kernels="ggml") as session:
        drafter, backend, rng = session.drafter, session.backend, np.random.default_rng(1)
        width, slots, n = 4, 2, 256
        x, moving = (rng.standard_normal((width * slots, m)).astype(np.float32) for m in (n, 2 * 3 * 16))
        allocator = GraphAllocator(backend, "test")
        io = StepIO(backend, 1 << 20)
        graph = Graph(allocator)
        fields = StepFields(io, graph)
        values, told = fields.input("x", "f32", n, width * slots), fields.input("moving", "f32", 96, width * slots)
        rows = BlockInputs(values, values, values, (), 0, (), slots)
        out = drafter._convolved(graph, 0, "ffn", 1, values, told, drafter._prepared(graph, values, rows))
        fields.output("y", "f32", out)
        graph.plan()
        fields.host["x"][:], fields.host["moving"][:] = x.ravel(), moving.ravel()
        fields.run()
        with session.drafter.file.read("blk.0.ffn_conv_base") as data:
            base = np.frombuffer(data, np.float32).reshape(2, 3, n)[1]
        coefficients = moving.reshape(slots, width, 2, 3, 16)[:, :, 1].repeat(16, axis=-1)
        blocks, want = x.reshape(slots, width, n), np.zeros((slots, width, n), np.float32)
        for t in range(width):
            for tap in range(min(3, t + 1)):
                want[:, t] += (base[tap] + coefficients[:, t, tap]) * blocks[:, t - tap]
        assert np.allclose(fields.host["y"].reshape(slots, width, n), want, atol=1e-5)
        graph.close()
        io.close()
        allocator.close()


def test_what_inspect_and_plan_say(tmp_path):
    target, draft = write_qwen3(tmp_path / "t.gguf", Shape()), write_dflash2(tmp_path / "d.gguf", Shape())
    seen = inspect_file(draft)
    assert seen.usable and "a dflash drafter with blocks of 8 that reads the inputs of target layers 1, 2, 3" in seen.verdict
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
        assert plan(target, draft, device="CPU", n_ctx=256).memory == session.engine.memory()


@pytest.mark.parametrize(
    "shape, options, words",
    [
        (Shape(), {"group_size": 24}, "do not split into groups of 24"),
        (Shape(), {"top_k": 16}, "selector_top_k is 16, which hidden states of 256 values have no room for"),
        (Shape(n_vocab=330), {}, "its selector_predecessor.weight has 330 tokens, the target has 320"),
        (Shape(n_vocab=330), {"own": ("head",), "tokens": 330}, "its selector_predecessor.weight has 330 tokens, the target has 320"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, shape, options, words):
    target, draft = write_qwen3(tmp_path / "t.gguf", Shape()), write_dflash2(tmp_path / "d.gguf", shape, **options)
    with pytest.raises((PairError, ModelError), match=words):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=256)


@pytest.mark.parametrize("slots", [1, 2])
def test_graphs_have_room_for_many_taps(tmp_path, slots):
    """As many nodes more for each layer and tap as are planned for, and no more."""
    target, found = write_qwen3(tmp_path / "t.gguf", Shape()), []
    for taps, layers in ((2, 2), (8, 2), (8, 6)):
        draft = write_dflash2(tmp_path / f"{taps}-{layers}.gguf", replace(Shape(), draft_layers=layers), taps=taps, block=16)
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=256) as session:
            engine = ModelRunner(session.backend, session.target, session.drafter, EngineOptions(n_ctx=256, slots=slots))
            batch = {engine.admit(): Prefill([1, 2, 3]) for _ in range(slots)}
            engine.step(batch)
            engine.step({slot: Draft(16) for slot in batch})
            fused = max(step.graph.n_nodes for key, step in engine.graphs._steps.items() if key[0] == "fused")
            found.append((fused, most_nodes(session.target, session.drafter)))
            engine.close()
    nodes, planned = np.diff(np.array(found), axis=0).T
    assert (nodes <= planned).all() and (planned < 1.6 * nodes).all()
