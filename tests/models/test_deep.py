"""Models of hundreds of layers: their graphs have room, or a sentence says that they do not; ggml would end the process."""

from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from models.test_arch_lies import TINY
from models.test_archs import TARGETS, assert_equal
from random_gguf.archs import write_qwen3
from random_gguf.model import write_dflash

import pyggml_spec as ps
from pyggml_spec.errors import EngineError, ModelError
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import SPARE, Graph, Role
from pyggml_spec.ggml.library import lib

DEEP = sorted({*TARGETS} - {"qwen3", "gemma4", "qwen35", "qwen3moe", "llama"})  # those take more nodes per layer, or more layers below


@pytest.mark.parametrize("arch, n_layer", [*((arch, 420) for arch in DEEP), ("qwen3", 1024), ("gemma4", 1024)])
def test_hundreds_of_layers(tmp_path, arch, n_layer):
    """Speculation over them, a prefill of several rows, and two sequences at once: the graph of 16,384 nodes had overflowed."""
    shape = replace(TINY, n_layer=n_layer, target_layers=(1, n_layer - 1))
    more = {"routed": True} if arch == "gemma4" else {}
    target, draft = TARGETS[arch](tmp_path / "t.gguf", shape, **more), write_dflash(tmp_path / "d.gguf", shape)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=64, draft_width=4) as session:
        text, stats = session.generate([1, 2, 3], 6, ignore_end=True)
        assert stats.emitted == 6 and session.generate([1, 2, 3], 6, ignore_end=True, mode="reference")[0] == text
        if n_layer == 420:
            with session.concurrent(2) as server:
                assert [handle.result(300)[1].emitted for handle in [server.submit([1, 2, 3], 3, ignore_end=True) for _ in range(2)]] == [
                    3,
                    3,
                ]


def test_as_many_layers_as_llama_cpp_takes_are_equal(tmp_path):
    assert_equal(write_qwen3(tmp_path / "t.gguf", replace(TINY, n_layer=512, n_ctx=256)), 37)


def test_more_layers_are_refused(tmp_path):
    path = write_qwen3(tmp_path / "t.gguf", replace(TINY, n_layer=1025))
    with pytest.raises(ModelError, match="block_count is 1025, but it has to be between 1 and 1024"):
        ps.load(path, device="CPU", threads=1, n_ctx=64)


def test_a_graph_that_outgrows_its_arena_says_so():
    with ExitStack() as stack:
        backend = stack.enter_context(closing(Backend(pick_device("CPU"), 1)))
        role = stack.enter_context(closing(Role(backend, "small", SPARE + 100)))
        g = stack.enter_context(closing(Graph(role)))
        x = lib.ggml_new_tensor(g.ctx, lib.GGML_TYPE_F32, 2, (8, 8))
        for _ in range(100):
            x = g.scale(x, 1.0)
            g.expand(x)
        with pytest.raises(EngineError, match="a graph of 101 nodes is larger than the 1124 that were planned"):
            g.expand(g.scale(x, 1.0))
