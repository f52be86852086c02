"""Random models from descriptions alone, and the comparison that finds the first wrong node of one."""

import argparse
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import check_replay
import numpy as np
import pytest
from architectures import FAST, SHAPES, TARGETS, TINY, having, params, thorough, write_tiny
from click.testing import CliRunner
from drafters.parity import assert_blocks_equal
from engine.batch_helpers import prompts
from engine.helpers import reference, run
from gguf_io.build import Model as Parts
from models.dress import dressed, opened, with_tensor
from models.test_archs import assert_equal, lean
from models.test_placement import logits, placed
from random_gguf.archs import write_llama, write_qwen3
from random_gguf.described import write_described
from random_gguf.model import Shape, write_dflash
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.cli import compare, inspect
from pyggml_spec.engine.engine import Engine
from pyggml_spec.engine.graphs import NODES_BESIDE_LAYERS, most_nodes
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.errors import EngineError, ModelError
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import SPARE, Graph, GraphAllocator
from pyggml_spec.ggml.kernels import levels
from pyggml_spec.ggml.library import ffi, lib, text
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models import decoder
from pyggml_spec.models.archs import qwen2
from pyggml_spec.models.decoder import Decoder
from pyggml_spec.models.registry import TARGETS as CLASSES
from pyggml_spec.models.registry import open_target
from pyggml_spec.models.weights import Weights
from pyggml_spec.tools.compare import compare_nodes
from pyggml_spec.tools.inspect import inspect_file

LEAN = Shape(n_ff=128)


def test_right_descriptions_of_every_architecture(tmp_path):
    nodes = compare_nodes(write_described("qwen2", tmp_path / "t.gguf", LEAN), 9, threads=1)
    assert {node.nmse for node in nodes} == {0.0} and len(nodes) >= 8 * LEAN.n_layer and CLASSES.keys() == TARGETS.keys()


@pytest.mark.parametrize("wrong, first", [({"rope": "pairs"}, "Qcur-0"), ({"eps": 1e-2}, "attn_norm-0"), ({"ffn": "gelu"}, "ffn_out-0")])
def test_the_first_wrong_node_is_named(tmp_path, monkeypatch, wrong, first):
    path = write_described("qwen2", tmp_path / "t.gguf", LEAN)

    def mistaken(f):
        model = qwen2.qwen2(f)
        model.eps = wrong.get("eps", model.eps)
        layer = model.layers[0]
        if "rope" in wrong:
            layer = replace(layer, mixer=replace(layer.mixer, rope=replace(layer.mixer.rope, neox=False)))
        if "ffn" in wrong:
            layer = replace(layer, ffn=replace(layer.ffn, act=wrong["ffn"]))
        model.layers = (layer,) * len(model.layers)
        return model

    monkeypatch.setitem(CLASSES, "qwen2", decoder.described(mistaken, "qwen2"))
    shown = CliRunner().invoke(compare.command, ["--nodes", str(path), "--tokens", "9", "-t", "1"])
    assert f"first difference: {first} (" in shown.output and shown.exit_code == 3


def products(graph):
    """What each product reads: its weights, and what is rounded already or what it rounds itself."""
    for i in range(graph.n_nodes):
        node = lib.ggml_graph_node(graph.gf, i)
        if text(lib.ggml_op_desc(node)) == "CUSTOM" and text(lib.ggml_get_name(node)) in ("native product", "native gated product"):
            weights, rounded, *own = node.src[0:5]
            yield weights, *((rounded,) if rounded != ffi.NULL else own)


@pytest.mark.slow
@pytest.mark.skipif(not levels(), reason="native kernels do not run on this processor")
def test_every_architecture_and_drafter(tmp_path):
    looked = 0
    for name, target, drafter, spec in check_replay.pairs(argparse.Namespace(model=None, only=", Q8_0"), tmp_path):
        try:
            more = {"draft_width": 4 if drafter or spec else None, "spec": spec, "kernels": "native"}
            session = ps.load(target, drafter, device="CPU", threads=1, n_ctx=64, **more)
        except EngineError:  # an architecture without hidden states for this drafter
            continue
        with session:
            for kind, width in (("plain", 1), ("verify", 4), *((("fused", 4),) if session.drafter is not None else ())):
                twice = [what for what, count in Counter(products(session.runner.step_graph(kind, width))).items() if count > 1]
                assert not twice, (name, kind)
                looked += 1
    assert looked > 50


@pytest.mark.parametrize("arch", params(TARGETS, ("step35",)))
def test_rows_have_no_gaps_where_ggml_cuda_knows_none(tmp_path, arch):
    """Its kernels for these take as many values as there are, one behind the other: rows of step35's blocks behind the first were clamped elsewhere."""
    with ps.load(write_tiny(arch, tmp_path / "t.gguf"), device="CPU", threads=1, n_ctx=64, kernels="ggml") as session:
        session.runner.prefill([1, 2, 3])
        for step in session.runner.graphs.steps().values():
            for node in (lib.ggml_graph_node(step.graph.gf, i) for i in range(step.graph.n_nodes)):
                assert text(lib.ggml_op_desc(node)) not in ("CLAMP", "SCALE") or lib.ggml_is_contiguous(node.src[0])


@pytest.mark.parametrize("arch", params(thorough(), ("gemma4",)))
def test_every_layer_has_room(tmp_path, arch):
    """Four layers more take no more nodes of any graph than is planned for them: prompts, blocks and single tokens, alone and in two slots."""

    def nodes(n_layer: int) -> tuple[dict[tuple, int], int]:
        shape = replace(SHAPES.get(arch, TINY), n_layer=n_layer, target_layers=(1, n_layer - 1))
        more = {"routed": True} if arch == "gemma4" else {}
        found, target, draft = {}, TARGETS[arch](tmp_path / "t.gguf", shape, **more), write_dflash(tmp_path / "d.gguf", shape)
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=64, draft_width=4) as s:
            for slots in (1, 2):
                options = EngineOptions(n_ctx=64, slots=slots, width=4)
                runner = s.runner if slots == 1 else ModelRunner(s.backend, s.target, s.drafter, options)
                with Engine(runner, 4) as scheduler:
                    for mode in (SPECULATIVE, PLAIN):
                        for _ in range(slots):
                            scheduler.submit([1, 2, 3], GenerationOptions(4, mode))
                        scheduler.run()
                    found |= {(slots, key): step.graph.n_nodes for key, step in scheduler.runner.graphs.steps().items()}
            return found, most_nodes(s.target, s.drafter)

    (few, planned), (many, planned_for_many) = nodes(4), nodes(8)
    growth = max(many[key] - few[key] for key in few)
    assert 0 < growth <= planned_for_many - planned and max(few.values()) - growth <= NODES_BESIDE_LAYERS - SPARE


@pytest.mark.slow
def test_hundreds_of_layers(tmp_path):
    """Speculation over them, a prefill of several rows, and two sequences at once: the graph of 16,384 nodes had overflowed."""
    shape = replace(TINY, n_layer=1024, target_layers=(1, 1023))  # as many as there may be
    target, draft = write_qwen3(tmp_path / "t.gguf", shape), write_dflash(tmp_path / "d.gguf", shape)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=64, draft_width=4, chunk=32) as session:
        text, stats = session.generate([1, 2, 3], 6, ignore_end=True)
        assert stats.emitted == 6 and session.generate([1, 2, 3], 6, ignore_end=True, mode="reference")[0] == text
        with session.concurrent(2) as server:
            assert [handle.result(300)[1].emitted for handle in [server.submit([1, 2, 3], 3, ignore_end=True) for _ in range(2)]] == [3, 3]


@pytest.mark.slow
def test_many_layers(tmp_path):
    assert_equal(write_qwen3(tmp_path / "t.gguf", replace(TINY, n_layer=512, n_ctx=256)), 37)
    with GGUFFile(tmp_path / "t.gguf") as file:
        file.metadata["qwen3.block_count"] = 1025
        fails_with(ModelError, "block_count is 1025, but it has to be between 1 and 1024", open_target, file)
    with ExitStack() as stack:
        backend = stack.enter_context(closing(Backend(pick_device("CPU"), 1)))
        allocator = stack.enter_context(closing(GraphAllocator(backend, "small", SPARE + 100)))
        g = stack.enter_context(closing(Graph(allocator)))
        x = lib.ggml_new_tensor(g.ctx, lib.GGML_TYPE_F32, 2, (8, 8))
        for _ in range(100):
            x = g.scale(x, 1.0)
            g.expand(x)
        fails_with(EngineError, "a graph of 101 nodes exceeds the 1124 planned for this model", lambda: g.expand(g.scale(x, 1.0)))


QUANTS = ["F32", "Q4_K", "MXFP4"]


@pytest.mark.parametrize("arch, quant", params(
    [*((arch, "NVFP4") for arch in thorough()), *((arch, quant) for arch in FAST for quant in QUANTS)],
    lambda case: case == ("qwen35moe", "NVFP4"),
))  # fmt: skip
def test_logits(tmp_path, arch, quant):
    path, counts = dressed(TARGETS[arch](tmp_path / "t.gguf", Shape(**lean(quant)), quant))
    # matrices whose scales llama.cpp applies
    least = {
        "deepseek2": 4,
        "granitehybrid": 12,
        "glm5-next": 0,
        "kimi-k3": 0,
        "kimi-linear": 0,
        "lfm2": 8,
        "lfm2moe": 8,
        "nemotron_h": 10,
        "nemotron_h_moe": 14,
    }
    assert counts["scale"] >= least.get(arch, 16) and (counts["bias"] > 0) == (
        arch not in ("gemma3n", "gemma4", "qwen4exp", *having("latent"))
    )
    assert_equal(path, 1, 37)


@pytest.mark.slow
@pytest.mark.parametrize("arch", thorough())
def test_matrices_that_are_not_fused(tmp_path, arch):
    assert_equal(dressed(TARGETS[arch](tmp_path / "t.gguf", Shape(), "Q4_K", mixed=True))[0], 65)


@pytest.mark.parametrize("more", [{"scales": False}, {"biases": False}], ids=["biases", "scales"])
def test_one_without_the_other(tmp_path, more):
    for quant in ("F32", "NVFP4"):
        assert_equal(dressed(write_llama(tmp_path / "t.gguf", Shape(), quant), **more)[0], 37)


def test_scales_change_the_text_or_are_refused(tmp_path):
    """Whether the comparison could fail: without them the logits are others."""
    ids, seen = prompts(1)[0], []
    for path in (TARGETS["qwen35"](tmp_path / "a.gguf"), dressed(TARGETS["qwen35"](tmp_path / "b.gguf"))[0]):
        with ps.load(path, device="CPU", threads=1, n_ctx=256) as session:
            seen.append(session.runner.logits(ids))
    assert ((seen[0] - seen[1]) ** 2).sum() > 0.1 * (seen[0] ** 2).sum()
    parts = Parts(TARGETS["laguna"](tmp_path / "t.gguf"))
    path = with_tensor(parts, "blk.0.attn_gate.scale", np.ones(1)).write(tmp_path / "one.gguf")
    assert_equal(path, 37)
    path = with_tensor(parts, "blk.1.ffn_up_exps.scale", np.full(Shape().n_expert, 1.25)).write(tmp_path / "other.gguf")
    with GGUFFile(path) as file, pytest.raises(ModelError, match=r"'blk\.1\.ffn_up_exps\.scale', which llama.cpp reads and does not apply"):
        opened(file).specs()


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["F32", "NVFP4"])
def test_drafted_ids(tmp_path, quant):
    shape = Shape(window=12)
    target = dressed(TARGETS["qwen35"](tmp_path / "t.gguf", shape, quant))[0]
    draft, counts = dressed(write_dflash(tmp_path / "d.gguf", shape, quant))
    assert counts == {"scale": 7 * shape.draft_layers + 1, "bias": 0}
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=512) as session:
        assert_blocks_equal(session, target, draft, np.random.default_rng(3).integers(0, 256, 100).tolist(), 10)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "llama"])
def test_blocks_and_slots(tmp_path, arch):
    shape = Shape()
    target = dressed(TARGETS[arch](tmp_path / "t.gguf", shape, "Q8_0"))[0]
    draft = dressed(write_dflash(tmp_path / "d.gguf", shape, "Q8_0"))[0]
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_width=8) as session:
        prompt = prompts(1)[0]
        assert run(session.runner, prompt, 60, width=8)[0] == reference(session.runner, prompt, 60, width=8)
        alone = [session.generate(prompt, 24, ignore_end=True)[0] for prompt in prompts(3)]
        with session.concurrent(3) as server:
            handles = [server.submit(prompt, 24, ignore_end=True) for prompt in prompts(3)]
            assert [handle.result(120)[0] for handle in handles] == alone


class OtherKind:
    """The CPU under another kind: weights then keep the parts of fused matrices apart for steps of one row, as on a GPU."""

    def __init__(self, backend):
        self._backend, self.device = backend, replace(backend.device, kind="gpu")

    def __getattr__(self, name):
        return getattr(self._backend, name)


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen35"])
def test_parts_of_fused_matrices(tmp_path, arch):
    """A GPU multiplies with gate and up apart where there is one row, each with its own scale and bias, as fused ones have theirs in one vector."""
    path = dressed(TARGETS[arch](tmp_path / "t.gguf"))[0]
    ids, rows = prompts(1)[0], []
    for kind in (lambda backend: backend, OtherKind):
        with ExitStack() as stack:
            file, made = GGUFFile(path), closing(Backend(pick_device("CPU"), 1, kernels="ggml"))
            file, backend = stack.enter_context(file), stack.enter_context(made)
            target = opened(file)
            parts = (kind(backend), file, target.specs(), target.groups(), target.fused_alike())
            target.weights = stack.enter_context(closing(Weights(*parts)))
            assert bool(target.weights.group("blk.0.ffn").parts) == (kind is OtherKind)
            engine = stack.enter_context(closing(ModelRunner(backend, target, None, EngineOptions(n_ctx=64))))
            rows.append(np.concatenate([engine.logits(ids), *(engine.logits([i]) for i in range(4))]))
    np.testing.assert_array_equal(*rows)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["Q8_0", "NVFP4"])
@pytest.mark.parametrize("arch", ["qwen35moe", "gemma4"])
def test_experts_in_host_memory(tmp_path, arch, quant):
    """Scaled inside, which the host does for its own, and after their last product, which the device does: the same bits at any placement."""
    more = {"routed": True} if arch == "gemma4" else {}
    path, _ = dressed(TARGETS[arch](tmp_path / "t.gguf", Shape(), quant, **more))
    kinds = [lambda i: (), lambda i: (2,), lambda i: (5, 0, 3), lambda i: tuple(range(7)), lambda i: tuple(range(8))]
    first, *others = (logits(path, lambda target, hot=hot: placed(target, hot)) for hot in kinds)
    assert np.isfinite(first).all()
    for other in others:
        np.testing.assert_array_equal(first, other)
    np.testing.assert_array_equal(first, logits(path, None))


REFUSED = [
    ("llama", "NVFP4", {"blk.0.ffn_up.scale": 1, "blk.0.ffn_up.bias": 512}, "ffn_up.bias"),
    ("qwen3", "F32", {"output.scale": 1}, "output.scale"),
    ("qwen3", "F32", {"blk.0.ffn_up.bias": 512}, "ffn_up.bias"),
    ("qwen35", "F32", {"blk.0.ssm_out.bias": 256}, "ssm_out.bias"),
    ("gemma4", "F32", {"blk.0.attn_q.bias": 256}, "attn_q.bias"),
    ("gemma4", "F32", {"blk.0.proj.scale": 1}, "proj.scale"),
    ("llama", "F32", {"blk.0.attn_q.scale": 2}, "attn_q.scale.*shape"),
    ("llama", "F32", {"blk.0.attn_q.bias": 255}, "attn_q.bias.*shape"),
]


@pytest.mark.parametrize("arch, quant, tensors, named", REFUSED, ids=[f"{case[0]} {case[3]}" for case in REFUSED])
def test_others_are_refused(tmp_path, arch, quant, tensors, named):
    parts = Parts(TARGETS[arch](tmp_path / "t.gguf", Shape(), quant))
    for name, size in tensors.items():
        with_tensor(parts, name, np.ones(size))
    fails_with(ModelError, named, lambda: ps.load(parts.write(tmp_path / "t.gguf"), device="CPU", threads=1, n_ctx=64))


LAYERS = Shape().n_layer
ALL = {arch: partial(write_tiny, arch) for arch in TARGETS} | {"dflash": partial(write_dflash, shape=TINY)}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ALL)
def test_an_unknown_tensor_is_refused_by_name(tmp_path, arch):
    """qwen35 ran such files, with text that looks right: it alone did not ask for the check."""
    parts, last = Parts(ALL[arch](tmp_path / "t.gguf")), SHAPES.get(arch, TINY).n_layer
    for name in (
        "unheard.weight",
        "blk.0.attn_q.unheard",
        f"blk.{last - 1}.unheard.weight",
        f"blk.{last}.attn_q.weight",
        "blk.x.attn_q.weight",
    ):
        path = with_tensor(parts.copy(), name, np.ones(4)).write(tmp_path / "u.gguf")
        with GGUFFile(path) as file, pytest.raises(ModelError, match=f"tensor '{name}'"):
            opened(file).specs()
        verdict = inspect_file(path)
        assert not verdict.usable and name in verdict.verdict


def test_tensors_that_are_left_aside(tmp_path):
    with pytest.raises(TypeError, match="refuses unknown tensors"):

        class Lax(Decoder):
            def specs(self):
                return self.tensors()

    parts = Parts(TARGETS["qwen35"](tmp_path / "t.gguf"))
    parts.keys |= {"qwen35.block_count": (4, LAYERS + 1), "qwen35.nextn_predict_layers": (4, 1)}
    path = with_tensor(parts, f"blk.{LAYERS}.nextn.eh_proj.weight", np.ones(4)).write(tmp_path / "m.gguf")
    with GGUFFile(path) as file:
        model = open_target(file)
        assert model.unused_in_file() == {f"blk.{LAYERS}.nextn.eh_proj.weight": "the model's own MTP layers"} and model.specs()
    shown = CliRunner().invoke(inspect.command, [str(path), "--no-tensors"]).output
    assert "not used: 1 tensor, the model's own MTP layers\n" in shown
    path = with_tensor(parts, f"blk.{LAYERS + 1}.nextn.eh_proj.weight", np.ones(4)).write(tmp_path / "n.gguf")
    with GGUFFile(path) as file, pytest.raises(ModelError, match=rf"blk\.{LAYERS + 1}\.nextn"):
        open_target(file).specs()
