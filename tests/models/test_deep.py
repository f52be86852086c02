"""Models of hundreds of layers: their graphs have room, or a sentence says that they do not; ggml would end the process."""

from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from architectures import SHAPES, TARGETS, TINY, params, thorough
from models.test_archs import assert_equal
from random_gguf.archs import write_qwen3
from random_gguf.model import write_dflash

import pyggml_spec as ps
from pyggml_spec.engine.engine import Engine
from pyggml_spec.engine.graphs import NODES_BESIDE_LAYERS, most_nodes
from pyggml_spec.engine.options import EngineOptions
from pyggml_spec.engine.runner import ModelRunner
from pyggml_spec.engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from pyggml_spec.errors import EngineError, ModelError
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import SPARE, Graph, GraphAllocator
from pyggml_spec.ggml.library import lib


@pytest.mark.parametrize("arch", params(thorough(), ("gemma4",)))
def test_every_layer_has_room(tmp_path, arch):
    """Twelve layers more take no more nodes of any graph than is planned for them: prompts, blocks and single tokens, alone and in two slots."""

    def nodes(n_layer: int) -> tuple[dict[tuple, int], int]:
        shape = replace(SHAPES.get(arch, TINY), n_layer=n_layer, target_layers=(1, n_layer - 1))
        more = {"routed": True} if arch == "gemma4" else {}
        found, target, draft = {}, TARGETS[arch](tmp_path / "t.gguf", shape, **more), write_dflash(tmp_path / "d.gguf", shape)
        with ps.load(target, draft, device="CPU", threads=1, n_ctx=64) as s:
            for slots in (1, 2):
                with Engine(ModelRunner(s.backend, s.target, s.drafter, EngineOptions(n_ctx=64, slots=slots, width=4)), 4) as scheduler:
                    for mode in (SPECULATIVE, PLAIN):
                        for _ in range(slots):
                            scheduler.submit([1, 2, 3], GenerationOptions(4, mode))
                        scheduler.run()
                    found |= {(slots, key): step.graph.n_nodes for key, step in scheduler.runner.graphs.steps().items()}
            return found, most_nodes(s.target, s.drafter)

    (few, planned), (many, planned_for_many) = nodes(12), nodes(24)
    growth = max(many[key] - few[key] for key in few)
    assert 0 < growth <= planned_for_many - planned
    assert max(few.values()) - growth <= NODES_BESIDE_LAYERS - SPARE


@pytest.mark.slow
@pytest.mark.parametrize("arch, n_layer", [("gemma4", 420), ("qwen3", 1024)])
def test_hundreds_of_layers(tmp_path, arch, n_layer):
    """Speculation over them, a prefill of several rows, and two sequences at once: the graph of 16,384 nodes had overflowed."""
    shape = replace(TINY, n_layer=n_layer, target_layers=(1, n_layer - 1))
    more = {"routed": True} if arch == "gemma4" else {}
    target, draft = TARGETS[arch](tmp_path / "t.gguf", shape, **more), write_dflash(tmp_path / "d.gguf", shape)
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=64, draft_width=4) as session:
        text, stats = session.generate([1, 2, 3], 6, ignore_end=True)
        assert stats.emitted == 6 and session.generate([1, 2, 3], 6, ignore_end=True, mode="reference")[0] == text
        with session.concurrent(2) as server:
            assert [handle.result(300)[1].emitted for handle in [server.submit([1, 2, 3], 3, ignore_end=True) for _ in range(2)]] == [3, 3]


@pytest.mark.slow
def test_as_many_layers_as_llama_cpp_takes_are_equal(tmp_path):
    assert_equal(write_qwen3(tmp_path / "t.gguf", replace(TINY, n_layer=512, n_ctx=256)), 37)


def test_more_layers_are_refused(tmp_path):
    path = write_qwen3(tmp_path / "t.gguf", replace(TINY, n_layer=1025))
    with pytest.raises(ModelError, match="block_count is 1025, but it has to be between 1 and 1024"):
        ps.load(path, device="CPU", threads=1, n_ctx=64)


def test_a_graph_that_outgrows_its_arena_says_so():
    with ExitStack() as stack:
        backend = stack.enter_context(closing(Backend(pick_device("CPU"), 1)))
        allocator = stack.enter_context(closing(GraphAllocator(backend, "small", SPARE + 100)))
        g = stack.enter_context(closing(Graph(allocator)))
        x = lib.ggml_new_tensor(g.ctx, lib.GGML_TYPE_F32, 2, (8, 8))
        for _ in range(100):
            x = g.scale(x, 1.0)
            g.expand(x)
        with pytest.raises(EngineError, match="a graph of 101 nodes exceeds the 1124 planned for this model"):
            g.expand(g.scale(x, 1.0))
