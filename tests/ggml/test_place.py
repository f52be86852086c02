"""A node is placed inside of the tensor that is its home, or an error says that it does not fit: ggml would let it write after the end."""

from contextlib import ExitStack, closing

import pytest

from pyggml_spec.errors import EngineError
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.library import ffi, lib

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
    """The last one is where offset and size together pass 2^64."""
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
        with pytest.raises(EngineError, match="only an unallocated tensor that is not a view"):
            g.place(where, 0, what)
