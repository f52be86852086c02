"""Operands that do not fit each other: every verb says so and shows them. ggml would end the process, which would end these tests."""

from contextlib import ExitStack, closing

import pytest
from sessions import fails_with

from pyggml_spec.errors import EngineError
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator, described
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.ggml.step_io import StepFields, StepIO
from pyggml_spec.multi_device.chain import ChainFields, ChainGraph


class Tensors:
    """Tensors of any type and shape by name, as in t.f32(64, 5)."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def __getattr__(self, name: str):
        kind = getattr(lib, f"GGML_TYPE_{name.upper()}")
        return lambda *ne: lib.ggml_new_tensor(self.graph.ctx, kind, len(ne), ne)


@pytest.fixture(scope="module")
def g():
    with (
        closing(Backend(pick_device("CPU"), 1)) as backend,
        closing(GraphAllocator(backend, "test")) as allocator,
        closing(Graph(allocator)) as graph,
    ):
        yield graph


WRONG = {
    "matmul": [lambda g, t: g.matmul(t.f16(64, 32), t.f32(32, 5)), lambda g, t: g.matmul(g.permute(t.f32(64, 32), 1, 0, 2, 3), t.f32(32, 5)),
               lambda g, t: g.matmul(t.f32(64, 32, 3), t.f32(64, 5, 4))],
    "matmul_experts": [lambda g, t: g.matmul_experts(t.f32(64, 32, 8), t.f32(64, 1, 5), t.i32(2, 4)),
                       lambda g, t: g.matmul_experts(t.f32(64, 32, 8), t.f32(64, 1, 5), t.f32(2, 5)),
                       lambda g, t: g.matmul_experts(t.f32(64, 32, 8), t.f32(64, 3, 5), t.i32(2, 5))],
    "add": [lambda g, t: g.add(t.f32(64, 5), t.f32(63, 5)), lambda g, t: g.add(t.f32(64), t.f32(64, 5))],
    "add_rows": [lambda g, t: g.add_rows(t.f32(64, 2, 5), t.f32(63, 8), t.i32(2, 5)), lambda g, t: g.add_rows(t.f32(64, 2, 5), t.f32(64, 8), t.i32(5, 2)),
                 lambda g, t: g.add_rows(t.f32(64, 2, 5), t.f32(64, 8), t.f32(2, 5)), lambda g, t: g.add_rows(t.f32(64, 2, 5), t.f16(64, 8), t.i32(2, 5))],
    "mul": [lambda g, t: g.mul(t.f32(64, 5), t.f32(64, 4))],
    "div": [lambda g, t: g.div(t.f32(64, 5), t.f32(64, 5, 2))],
    "rms_norm": [lambda g, t: g.rms_norm(t.f32(64, 5), t.f32(65), 1e-6)],
    "layer_norm": [lambda g, t: g.layer_norm(t.f32(64, 5), t.f32(65), t.f32(64), 0.0), lambda g, t: g.layer_norm(t.f32(64, 5), t.f32(64), t.f32(65), 0.0)],
    "hadamard_product": [lambda g, t: g.hadamard_product(t.f32(64, 3, 5), t.f32(32, 32))],
    "index_scores": [lambda g, t: g.index_scores(t.f32(64, 3, 5), t.f16(64, 300), t.f32(3, 5), t.f16(512, 5), 512),
                     lambda g, t: g.index_scores(t.f32(32, 3, 5), t.f16(64, 300), t.f32(3, 5), t.f16(256, 5), 256),
                     lambda g, t: g.index_scores(t.f32(64, 3, 5), t.f16(64, 300), t.f32(4, 5), t.f16(256, 5), 256),
                     lambda g, t: g.index_scores(t.f32(64, 3, 5), t.f16(64, 300), t.f32(3, 4), t.f16(256, 5), 256),
                     lambda g, t: g.index_scores(t.f32(64, 3, 5), t.f16(64, 300), t.f32(3, 5), t.f16(256, 4), 256),
                     lambda g, t: g.index_scores(t.f32(64, 3, 6), t.f16(64, 300), t.f32(3, 6), t.f16(256, 3, 1, 2), 256)],
    "top_k_mask": [lambda g, t: g.top_k_mask(t.f16(256, 5), t.f32(256, 4), 8), lambda g, t: g.top_k_mask(t.f16(256, 5), t.f32(256, 5), 257),
                     lambda g, t: g.top_k_mask(t.f16(256, 5), t.f32(256, 5), 0), lambda g, t: g.top_k_mask(t.f16(256, 5), t.f16(256, 5), 8)],
    "gated": [lambda g, t: g.gated("geglu", t.f32(64, 5), t.f32(32, 5)), lambda g, t: g.gated("swiglu", t.f32(64, 5), t.f16(64, 5)),
              lambda g, t: g.gated("swiglu_oai", t.f32(64, 5), t.f32(32, 5))],
    "gated_halves": [lambda g, t: g.gated_halves("geglu", t.f32(63, 5)), lambda g, t: g.gated_halves("swiglu", t.f32(63, 5))],
    "slice": [lambda g, t: g.slice(t.f32(64, 5), 0, 5, 60), lambda g, t: g.slice(t.f32(64, 5), 0, -1, 4), lambda g, t: g.slice(t.f32(64, 4, 5), 0, 32, 33),
             lambda g, t: g.slice(t.f32(64, 4, 5), 0, 0, 0), lambda g, t: g.slice(t.f32(64, 4, 2), 1, 0, 5), lambda g, t: g.slice(t.f32(64, 5), 1, 5, 0),
             lambda g, t: g.slice(t.f16(64, 9, 4), 2, 2, 3), lambda g, t: g.slice(t.f16(64, 9, 4), 2, -1, 1), lambda g, t: g.slice(t.f16(64, 9, 4), 3, 0, 1),
             lambda g, t: g.slice(t.f16(64, 9, 4, 2), 0, 0, 8), lambda g, t: g.slice(t.i32(8), 0, 6, 3)],
    "pick": [lambda g, t: g.pick(t.f32(64, 4, 5), 1, 4), lambda g, t: g.pick(t.f32(64, 4, 5), 1, -1), lambda g, t: g.pick(t.f32(64, 4, 5), 2, 5),
             lambda g, t: g.pick(t.f32(64, 4, 5), 0, 0)],
    "rows": [lambda g, t: g.rows(t.f32(64, 10), t.f32(5)), lambda g, t: g.rows(t.f32(64, 10), t.i32(5, 2)), lambda g, t: g.rows(t.f32(64, 10, 2), t.i32(5))],
    "concat": [lambda g, t: g.concat([t.f32(64, 5), t.f32(64, 4)]), lambda g, t: g.concat([t.f32(64, 5), t.f16(64, 5)])],
    "swiglu_limited": [lambda g, t: g.swiglu_limited(t.f32(64, 5), t.f32(33, 5), 7.0)],
    "swiglu_clamped": [lambda g, t: g.swiglu_clamped(t.f32(64, 5), t.f32(33, 5), 7.0)],
    "mixing_matrices": [lambda g, t: g.mixing_matrices(t.f32(23, 5), t.f32(3), t.f32(24), 0.0, 1), lambda g, t: g.mixing_matrices(t.f32(24, 5), t.f32(3), t.f32(24), 0.0, 0)],
    "masked_softmax": [lambda g, t: g.masked_softmax(t.f32(64, 1, 5), t.f32(63, 1, 1), 1.0), lambda g, t: g.masked_softmax(t.f32(64, 1, 5), t.f16(64, 1, 1), 1.0)],
    "draw": [lambda g, t: g.draw(t.f16(64, 5), t.i32(8, 5), 0), lambda g, t: g.draw(t.f32(64, 5), t.i32(8, 5), 1), lambda g, t: g.draw(t.f32(64, 5), t.i32(8, 5), 0, t.i32(63))],
    "stack": [lambda g, t: g.stack([t.f32(64, 5), t.f32(63, 5)]), lambda g, t: g.stack([t.f32(64, 5), t.f16(64, 5)])],
    "top_k": [lambda g, t: g.top_k(t.f32(64, 5), 65), lambda g, t: g.top_k(t.f32(64, 5), 0)],
    "argmax": [lambda g, t: g.argmax(t.f16(64, 5)), lambda g, t: g.argmax(t.f32(64, 5, 2))],
    "top_k_unordered": [lambda g, t: g.top_k_unordered(t.f32(64, 5), 65), lambda g, t: g.top_k_unordered(t.f32(64, 5), -1)],
    "rope": [lambda g, t: g.rope(t.f32(64, 4, 5), t.i32(4), 64, True, 1e4, 1.0), lambda g, t: g.rope(t.f32(64, 4, 5), t.f32(5), 64, True, 1e4, 1.0),
             lambda g, t: g.rope(t.f32(64, 4, 5), t.i32(5), 66, True, 1e4, 1.0), lambda g, t: g.rope(t.f32(64, 4, 5), t.i32(5), 63, True, 1e4, 1.0),
             lambda g, t: g.rope(t.f32(64, 4, 5), t.i32(5), -2, True, 1e4, 1.0),
             lambda g, t: g.rope(t.f32(64, 4, 5), t.i32(5), 64, True, 1e4, 1.0, t.f32(31))],
    "rope_by_axis": [lambda g, t: g.rope_by_axis(t.f32(64, 4, 5), t.i32(5), 64, (8, 8, 8, 8), True, 1e4, 1.0), lambda g, t: g.rope_by_axis(t.f32(64, 4, 5), t.f32(20), 64, (8, 8, 8, 8), True, 1e4, 1.0),
                     lambda g, t: g.rope_by_axis(t.f32(64, 4, 5), t.i32(20), 66, (8, 8, 8, 8), True, 1e4, 1.0), lambda g, t: g.rope_by_axis(t.f32(64, 4, 5), t.i32(20), 64, (8, 8, 8), True, 1e4, 1.0),
                     lambda g, t: g.rope_by_axis(t.f32(64, 4, 5), t.i32(20), 64, (0, 0, 0, 0), True, 1e4, 1.0), lambda g, t: g.rope_by_axis(t.f32(64, 4, 5), t.i32(20), 64, (8, 8, 8, 8), True, 1e4, 1.0, t.f32(31))],
    "first_outputs": [lambda g, t: g.first_outputs(t.f32(64, 32), 33), lambda g, t: g.first_outputs(t.f32(64, 32), 0), lambda g, t: g.first_outputs(t.f32(64, 32, 2), 8)],
    "every_nth": [lambda g, t: g.every_nth(t.f32(64, 6), 4, 0), lambda g, t: g.every_nth(t.f32(64, 6), 3, 3), lambda g, t: g.every_nth(t.f32(64, 6), 3, -1)],
    "group_firsts": [lambda g, t: g.group_firsts(t.i32(7), 3)],
    "gather": [lambda g, t: g.gather(t.f32(64, 5), t.i32(4)), lambda g, t: g.gather(t.f32(64, 5), t.f32(5)), lambda g, t: g.gather(t.f32(64, 5, 2), t.i32(5))],
    "heads": [lambda g, t: g.heads(t.f32(64, 5), 16, 5), lambda g, t: g.heads(t.f32(64, 5), 16, 4, first=1), lambda g, t: g.heads(t.f32(64, 5), 16, -1),
              lambda g, t: g.heads(t.f32(64, 5), 16, 4, first=-4), lambda g, t: g.heads(t.f16(64, 5), 16, 4)],
    "group_tails": [lambda g, t: g.group_tails(t.f32(64, 10), 4, 1), lambda g, t: g.group_tails(t.f32(64, 8), 4, 4)],
    "prepend_row": [lambda g, t: g.prepend_row(t.f32(64, 2), t.f32(64, 5)), lambda g, t: g.prepend_row(t.f32(63, 2), t.f32(64, 4)), lambda g, t: g.prepend_row(t.f16(64, 2), t.f32(64, 4)),
               lambda g, t: g.prepend_row(t.f32(64, 2), g.permute(t.f32(4, 64), 1, 0, 2, 3))],
    "sigmoid_gated": [lambda g, t: g.sigmoid_gated(t.f32(256, 5), t.f32(64, 3, 5)), lambda g, t: g.sigmoid_gated(t.f32(256, 5), t.f32(64, 4, 4)),
                      lambda g, t: g.sigmoid_gated(t.f16(256, 5), t.f32(64, 4, 5))],
    "gated_norm": [lambda g, t: g.gated_norm(t.f32(64, 4, 5), t.f32(64), 1e-6, t.f32(255, 5)),
                   lambda g, t: g.gated_norm(t.f32(64, 4, 5), t.f32(64), 1e-6, t.f32(256, 4)),
                   lambda g, t: g.gated_norm(t.f32(64, 4, 5), t.f32(64), 1e-6, t.f16(256, 5))],
    "permute": [lambda g, t: g.permute(t.f32(64, 5), 0, 0, 2, 3), lambda g, t: g.permute(t.f32(64, 5), 0, 1, 2, 4)],
    "reshape": [lambda g, t: g.reshape(t.f32(64, 5), 319), lambda g, t: g.reshape(t.f32(64, 5), -64, -5), lambda g, t: g.reshape(t.f32(64, 5), 4, 4, 4, 6), lambda g, t: g.reshape(t.f32(64, 5), 4, 4, 4, 1, 5),
               lambda g, t: g.reshape(g.permute(t.f32(64, 5), 1, 0, 2, 3), 320)],
    "fill_other_rows": [lambda g, t: g.fill_other_rows(t.f32(8, 4, 5), t.i32(2, 4), 0.0), lambda g, t: g.fill_other_rows(t.f32(8, 4, 5), t.i32(5, 5), 0.0)],
    "flat": [lambda g, t: g.flat(g.permute(t.f32(8, 4, 5), 1, 0, 2, 3))],
    "repeat": [lambda g, t: g.repeat(t.f32(64, 2), 64, 5, 1), lambda g, t: g.repeat(t.f32(64, 1), 64, 5)],
    "kv_write_rows": [lambda g, t: g.kv_write_rows(t.f16(128, 9), t.f32(64, 1, 5), t.i64(5)), lambda g, t: g.kv_write_rows(t.f16(128, 9), t.f32(64, 2, 5), t.i64(4)),
                      lambda g, t: g.kv_write_rows(t.f16(128, 9), t.f32(64, 2, 5), t.f32(5))],
    "kv_mask": [lambda g, t: g.kv_mask(t.f32(300), t.f32(1, 5), None, 512), lambda g, t: g.kv_mask(t.f32(300, 2), t.f32(1, 6), None, 256, 3),
                  lambda g, t: g.kv_mask(t.f32(300, 2), t.f32(1, 5), None, 256, 2), lambda g, t: g.kv_mask(t.f32(300), t.f32(1, 6), None, 256, 2, 128)],
    "flash_attention": [lambda g, t: g.flash_attention(t.f32(64, 4, 5), t.f16(64, 300), t.f16(64, 300), t.f16(256, 5), 2, 256, 0.1),
                lambda g, t: g.flash_attention(t.f32(64, 4, 5), t.f16(128, 200), t.f16(128, 200), t.f16(256, 5), 2, 256, 0.1),
                lambda g, t: g.flash_attention(t.f32(64, 3, 5), t.f16(128, 300), t.f16(128, 300), t.f16(256, 5), 2, 256, 0.1),
                lambda g, t: g.flash_attention(t.f32(64, 4, 5), t.f16(128, 300), t.f16(128, 300), t.f16(256, 4), 2, 256, 0.1),
                lambda g, t: g.flash_attention(t.f32(64, 4, 5), t.f16(128, 300), t.f16(128, 300), t.f16(512, 5), 2, 256, 0.1),
                lambda g, t: g.flash_attention(t.f32(64, 4, 5), t.f16(128, 300), t.f16(128, 300), t.f16(128, 5), 2, 256, 0.1),
                lambda g, t: g.flash_attention(t.f32(64, 4, 5), t.f16(128, 300), t.f16(128, 300), t.f16(256, 5), 2, 256, 0.1, t.f32(3)),
                lambda g, t: g.flash_attention(t.f32(64, 4, 5), t.f16(128, 300), t.f16(128, 300), t.f16(256, 5), 2, 256, 0.1, t.f16(4))],
    "sub": [lambda g, t: g.sub(t.f32(64, 5), t.f32(63, 5))],
    "pile": [lambda g, t: g.pile(t.f32(64, 5, 2), t.f32(64, 4, 2)), lambda g, t: g.pile(t.f32(64, 5, 2), t.f16(64, 5, 2))],
    "arange": [lambda g, t: g.arange(3.0, 3.0), lambda g, t: g.arange(0.0, 3.0, 0.0)],
    "situ": [lambda g, t: g.situ(t.f32(64, 5), t.f32(64, 4), 1.0, 1.0)],
    "streams_mean": [lambda g, t: g.streams_mean(t.f32(64, 4, 5), t.f32(64, 3, 5)), lambda g, t: g.streams_mean(t.f32(64, 4, 5), t.f16(64, 4, 5))],
    "streams_sum": [lambda g, t: g.streams_sum(t.f32(64, 4, 5), t.f32(5, 4)), lambda g, t: g.streams_sum(t.f32(64, 4, 5), t.f16(4, 5))],
    "add_to_streams": [lambda g, t: g.add_to_streams(t.f32(64, 4), t.f32(64, 4, 5), t.f32(4, 5)), lambda g, t: g.add_to_streams(t.f32(64, 5), t.f32(64, 4, 5), t.f32(5, 4)),
                       lambda g, t: g.add_to_streams(t.f32(64, 5), t.f32(64, 4, 5), t.f32(4, 5), t.f32(4, 3, 5))],
    "block_max": [lambda g, t: g.block_max(t.f32(64, 5), 7), lambda g, t: g.block_max(t.f16(64, 5), 8), lambda g, t: g.block_max(g.permute(t.f32(5, 64), 1, 0, 2, 3), 8)],
    "top_blocks": [lambda g, t: g.top_blocks(t.f32(8, 5), 9), lambda g, t: g.top_blocks(t.f32(8, 5), 0), lambda g, t: g.top_blocks(t.f16(8, 5), 2)],
    "block_mask": [lambda g, t: g.block_mask(t.f32(8, 2, 5), 9, 4), lambda g, t: g.block_mask(t.f32(8, 2, 5, 2), 2, 4), lambda g, t: g.block_mask(t.f16(8, 2, 5), 2, 4)],
    "of_head": [lambda g, t: g.of_head(t.f16(128, 300), 64, 2)],
    "rows_before": [lambda g, t: g.rows_before(t.f16(64, 8), t.i32(5), 1), lambda g, t: g.rows_before(t.f32(64, 8, 2), t.i32(5), 1), lambda g, t: g.rows_before(t.f32(64, 8), t.i32(5), -1)],
    "ngram_rows": [lambda g, t: g.ngram_rows(t.f32(2, 8), t.i32(5), None), lambda g, t: g.ngram_rows(t.f32(1, 8), t.f32(5), None)],
    "host_view": [lambda g, t: g.host_view(t.f32(64, 5)), lambda g, t: g.host_view(t.i32(5))],
}  # fmt: skip
ANY_SHAPE = {  # one operand of any shape, or nothing but a graph's own nodes
    "scale", "clamp", "sigmoid", "silu", "softplus", "tanh", "soft_cap", "gelu", "relu_squared", "softmax", "sum_rows", "cont", "view_source", "cont_flat", "hadamard",
    "expand", "expand_norm", "keep_output", "name", "plan", "measure", "measure_between", "n_cuts", "op_counts", "traffic", "close", "place", "aligned_outputs", "capture",
    "abs", "sgn", "sqrt", "sqr", "mean", "step", "scale_bias", "xielu", "cast",
}  # fmt: skip


@pytest.mark.parametrize("verb", WRONG)
def test_operands_that_do_not_fit_are_shown(g, verb):
    t = Tensors(g)
    for call in WRONG[verb]:
        fails_with(EngineError, "cannot be computed of .*[0-9]", call, g, t)


def test_descriptions_of_tensors(g):
    """A new verb needs a case above, or has to be one that cannot be given wrong shapes."""
    verbs = {name for name, value in vars(Graph).items() if callable(value) and not name.startswith("_")}
    assert verbs == set(WRONG) | (ANY_SHAPE & verbs) and not set(WRONG) & ANY_SHAPE
    t = Tensors(g)
    assert described(t.f16(64, 5)) == "F16 [64, 5]" and described(t.f32(1)) == "F32 [1]" and described(t.i32(3, 1, 2)) == "I32 [3, 1, 2]"


def test_fields_of_a_step(g):
    with closing(StepIO(g.backend, 4096)) as io:
        fields = StepFields(io, g)
        fields.input("a", "i32", 8)
        sizes = (8, 0, -1, 1 << 40, 1.5)
        for wrong in (("b", "i8", 8), *(("a" if n == 8 else "b", "i32", n) for n in sizes), ("b", "f32", 32, 64)):
            with pytest.raises(EngineError):
                fields.input(*wrong)
        node = g.scale(Tensors(g).f32(8), 2.0)
        with pytest.raises(EngineError, match="an output of the type i32 cannot be computed of node F32"):
            fields.output("out", "i32", node)
        with pytest.raises(EngineError, match="ends at byte"):
            fields.output("out", "f32", g.scale(Tensors(g).f32(5000), 2.0))


def test_a_copy_between_devices_of_other_strides():
    with closing(Backend(pick_device("CPU"), 1)) as first, closing(Backend(pick_device("CPU"), 1)) as second:
        allocators = [GraphAllocator(backend, "test") for backend in (first, second)]
        with (
            closing(StepIO(second, 4096, [first])) as io,
            closing(ChainGraph(io, lambda part, at: allocators[at], lambda at: None)) as chain,
        ):
            fields = ChainFields(io, chain)
            chain.enter(0)
            x = chain.slice(fields.input("x", "f32", 8, 1), 0, 0, 4)
            chain.enter(1)
            fields.output("y", "f32", chain.scale(chain.bring(x, 0), 2.0))
            fails_with(EngineError, "a copy from part 0 to part 1 of a step of 2 parts does not fit", chain.plan)
        for allocator in allocators:
            allocator.close()


HOME = 1024  # bytes


@pytest.fixture
def made():
    """A graph, and a tensor of HOME bytes in a buffer that is much larger."""
    with ExitStack() as stack:
        backend = stack.enter_context(closing(Backend(pick_device("CPU"), 1)))
        allocator = stack.enter_context(closing(GraphAllocator(backend, "place")))
        g = stack.enter_context(closing(Graph(allocator)))
        ctx = lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": 8 * lib.ggml_tensor_overhead(), "no_alloc": True})[0])
        stack.callback(lib.ggml_free, ctx)
        home, _ = (lib.ggml_new_tensor(ctx, lib.GGML_TYPE_F32, 1, (n,)) for n in (HOME // 4, 1 << 16))
        stack.callback(lib.ggml_backend_buffer_free, backend.allocate(ctx, backend.default_buffer_type))
        yield g, home


def node(g: Graph, nbytes: int):
    return lib.ggml_new_tensor(g.ctx, lib.GGML_TYPE_F32, 1, (nbytes // 4,))


@pytest.mark.parametrize("nbytes, offset", [(HOME, 0), (4, HOME - 4), (HOME // 2, HOME // 2)])
def test_what_fits_is_placed(made, nbytes, offset):
    g, home = made
    placed = node(g, nbytes)
    g.place(home, offset, placed)
    assert int(ffi.cast("uintptr_t", placed.data)) == int(ffi.cast("uintptr_t", home.data)) + offset


@pytest.mark.parametrize("nbytes, offset", [(HOME + 4, 0), (4, HOME), (8, HOME - 4), (HOME, 4), (4, 1 << 40), (64, (1 << 64) - 32)])
def test_what_does_not_fit_is_refused(made, nbytes, offset):
    g, home = made
    placed = node(g, nbytes)
    with pytest.raises(EngineError, match=f"a node of {nbytes} bytes does not fit at byte {offset} of a buffer of {HOME}"):
        g.place(home, offset, placed)
    assert placed.data == ffi.NULL


def test_a_home_without_memory_and_a_node_that_has_a_place_are_refused(made):
    g, home = made
    placed = node(g, 64)
    g.place(home, 0, placed)
    for where, what in ((node(g, 64), node(g, 64)), (home, placed), (home, lib.ggml_view_2d(g.ctx, placed, 4, 2, 16, 0))):
        fails_with(EngineError, "only an unallocated tensor that is not a view", g.place, where, 0, what)
