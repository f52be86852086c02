"""Scales and biases alongside matrices are applied as llama.cpp applies them: per tensor, per expert, of every type, fused or not."""

from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
from architectures import TARGETS, having, params, thorough
from drafters.parity import assert_blocks_equal
from engine.batch_helpers import prompts
from engine.helpers import reference, run
from gguf_io.build import Model as Parts
from models.dress import dressed, opened, with_tensor
from models.test_archs import assert_equal, lean
from models.test_placement import logits, placed
from random_gguf.archs import write_llama
from random_gguf.model import Shape, write_dflash

import pyggml_spec as ps
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.errors import ModelError
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.weights import Weights

QUANTS = ["F32", "Q4_K", "MXFP4", "NVFP4"]


@pytest.mark.parametrize("quant", params(QUANTS, ("NVFP4",)))
@pytest.mark.parametrize("arch", params(thorough(), ("qwen35moe",)))
def test_logits(tmp_path, arch, quant):
    path, counts = dressed(TARGETS[arch](tmp_path / "t.gguf", Shape(**lean(quant)), quant))
    assert counts["scale"] >= (4 if arch == "deepseek2" else 16) and (counts["bias"] > 0) == (arch not in ("gemma4", *having("latent")))
    for tokens in (1, 37):
        assert_equal(path, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("arch", thorough())
def test_matrices_that_are_not_fused(tmp_path, arch):
    assert_equal(dressed(TARGETS[arch](tmp_path / "t.gguf", Shape(), "Q4_K", mixed=True))[0], 65)


@pytest.mark.parametrize("more", [{"scales": False}, {"biases": False}], ids=["biases", "scales"])
def test_one_without_the_other(tmp_path, more):
    for quant in ("F32", "NVFP4"):
        assert_equal(dressed(write_llama(tmp_path / "t.gguf", Shape(), quant), **more)[0], 37)


def test_they_change_the_text(tmp_path):
    """Whether the comparison could fail: without them the logits are others."""
    ids, seen = prompts(1)[0], []
    for path in (TARGETS["qwen35"](tmp_path / "a.gguf"), dressed(TARGETS["qwen35"](tmp_path / "b.gguf"))[0]):
        with ps.load(path, device="CPU", threads=1, n_ctx=256) as session:
            seen.append(session.engine.logits(ids))
    assert ((seen[0] - seen[1]) ** 2).sum() > 0.1 * (seen[0] ** 2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["F32", "NVFP4"])
def test_drafted_ids(tmp_path, quant):
    """A drafter with scales for a target with scales, block by block."""
    shape = Shape(window=12)
    target = dressed(TARGETS["qwen35"](tmp_path / "t.gguf", shape, quant))[0]
    draft, counts = dressed(write_dflash(tmp_path / "d.gguf", shape, quant))
    assert counts == {"scale": 7 * shape.draft_layers + 1, "bias": 0}
    with ps.load(target, draft, device="CPU", threads=1, kernels="ggml", n_ctx=512) as session:
        assert_blocks_equal(session, target, draft, np.random.default_rng(3).integers(0, 256, 100).tolist(), 10)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "llama"])
def test_blocks_and_slots(tmp_path, arch):
    """Speculative text equals plain decoding on the same graph, and of several sequences each is as alone."""
    shape = Shape()
    target = dressed(TARGETS[arch](tmp_path / "t.gguf", shape, "Q8_0"))[0]
    draft = dressed(write_dflash(tmp_path / "d.gguf", shape, "Q8_0"))[0]
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_width=8) as session:
        prompt = prompts(1)[0]
        assert run(session.engine, prompt, 60, width=8)[0] == reference(session.engine, prompt, 60, width=8)
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
            file, backend = (
                stack.enter_context(GGUFFile(path)),
                stack.enter_context(closing(Backend(pick_device("CPU"), 1, kernels="ggml"))),
            )
            target = opened(file)
            parts = (kind(backend), file, target.specs(), target.groups(), target.fused_alike())
            target.weights = stack.enter_context(closing(Weights(*parts)))
            assert bool(target.weights.group("blk.0.ffn").parts) == (kind is OtherKind)
            engine = stack.enter_context(closing(ModelRunner(backend, target, None, EngineOptions(n_ctx=64))))
            rows.append(np.concatenate([engine.logits(ids), *(engine.logits([i]) for i in range(4))]))
    np.testing.assert_array_equal(*rows)


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


def test_a_scale_that_llama_cpp_does_not_apply_is_refused_unless_it_is_one(tmp_path):
    parts = Parts(TARGETS["laguna"](tmp_path / "t.gguf"))
    path = with_tensor(parts, "blk.0.attn_gate.scale", np.ones(1)).write(tmp_path / "one.gguf")
    assert_equal(path, 37)
    path = with_tensor(parts, "blk.1.ffn_up_exps.scale", np.full(Shape().n_expert, 1.25)).write(tmp_path / "other.gguf")
    with GGUFFile(path) as file, pytest.raises(ModelError, match=r"'blk\.1\.ffn_up_exps\.scale', which llama.cpp reads and does not apply"):
        opened(file).specs()


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
    with pytest.raises(ModelError, match=named):
        ps.load(parts.write(tmp_path / "t.gguf"), device="CPU", threads=1, n_ctx=64)
