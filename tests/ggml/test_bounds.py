"""Native kernels read and write nothing beyond their operands: each of these ends at a page without access, which would end the process."""

import ctypes
import itertools
import mmap
from contextlib import ExitStack, closing

import numpy as np
import pytest

from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.kernels import Packed, levels, packed_shape
from pyggml_spec.ggml.library import check, ffi, lib, new_err, text

pytestmark = pytest.mark.skipif(not levels(), reason="native kernels do not run on this processor")

PAGE = mmap.PAGESIZE
F32, F16, I32, I8 = lib.GGML_TYPE_F32, lib.GGML_TYPE_F16, lib.GGML_TYPE_I32, lib.GGML_TYPE_I8
TYPES = {text(lib.ggml_type_name(i)): i for i in range(lib.GGML_TYPE_COUNT) if lib.ggml_blck_size(i)}
WEIGHTS = (
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4", "q2_K", "q3_K", "iq4_xs", "q4_K", "q5_K", "q6_K", "f16", "bf16", "f32",
)  # fmt: skip
C = ctypes.CDLL(None, use_errno=True)
C.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """A graph whose operands, and what it leaves, lie at the ends of pages with forbidden ones on either side."""

    def __init__(self, backend: Backend, allocator: GraphAllocator, stack: ExitStack):
        self.level, self.stack = backend.level_handle, stack
        self.g = stack.enter_context(closing(Graph(allocator)))

    def tensor(self, kind: int, *ne: int, values: np.ndarray | None = None):
        context = lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": 2 * lib.ggml_tensor_overhead(), "no_alloc": True})[0])
        self.stack.callback(lib.ggml_free, context)
        tensor = lib.ggml_new_tensor(context, kind, len(ne), ne)
        nbytes = lib.ggml_nbytes(tensor)
        room = -(-nbytes // PAGE) * PAGE
        pages = mmap.mmap(-1, room + 2 * PAGE)
        self.stack.callback(pages.close)
        base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for forbidden in (base, base + PAGE + room):
            assert C.mprotect(forbidden, PAGE, 0) == 0  # PROT_NONE
        buffer = lib.ggml_backend_cpu_buffer_from_ptr(ffi.cast("void *", base + PAGE), room)
        self.stack.callback(lib.ggml_backend_buffer_free, buffer)
        lib.pgs_attach(buffer, room - nbytes, tensor)
        rng = np.random.default_rng(1)
        if values is None:
            values = rng.standard_normal(nbytes // 4).astype(np.float32) if kind == F32 else rng.integers(0, 60, nbytes).astype(np.uint8)
        lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(values), 0, nbytes)
        return tensor

    def packed(self, kind: int, n_in: int, n_out: int, n_expert: int = 0) -> Packed:
        shape = (n_in, n_out, n_expert) if n_expert else (n_in, n_out)
        ne = packed_shape(kind, shape)
        rows, to = self.tensor(kind, *shape), self.tensor(I8, *ne, values=np.zeros(int(np.prod(ne)), np.uint8))
        if n_expert:
            lib.pgs_pack_experts(self.level, kind, rows.data, n_in, n_out, n_expert, to.data)
        else:
            lib.pgs_pack_rows(kind, rows.data, n_in, n_out, 0, n_out, to.data)
        return Packed(kind, (n_in, n_out, n_expert or 1, 1), to)

    def run(self, node) -> None:
        node = self.g.view_source(node)
        self.g.place(self.tensor(I8, lib.ggml_nbytes(node)), 0, node)
        self.g.expand(node)
        assert self.g.op_counts().keys() <= OWN | {"VIEW", "PERMUTE"}
        self.g.plan()
        err = new_err()
        check(lib.pgs_graph_compute(self.g.handle, err), err)


OWN = {
    f"native {name}"
    for name in (
        "product", "gated product", "rounding", "rows", "experts", "order", "norm", "gate", "sum", "argmax", "join", "mask", "attention", "convolution",
    )
}  # fmt: skip


@pytest.fixture(scope="module", params=[1, 3])
def guarded(request):
    backend = Backend(pick_device("CPU"), request.param, "native")
    with closing(backend), closing(GraphAllocator(backend, "test", 2048)) as allocator:

        def made(of) -> None:
            with ExitStack() as stack:
                graph = Guarded(backend, allocator, stack)
                graph.run(of(graph))

        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_products(guarded, name):
    """Of as many rows and outputs as fill tiles and groups, of fewer and of more; of inputs that fill blocks, and where a type has none also others."""
    kind = TYPES[name]
    block = lib.ggml_blck_size(kind)
    for n_in, n_out, rows in itertools.product((block, 3 * block) if block > 1 else (1, 31, 45), (1, 16, 17), (1, 8, 9)):
        guarded(lambda of: of.g.matmul(of.packed(kind, n_in, n_out), of.tensor(F32, n_in, rows)))
        guarded(lambda of: of.g.add(of.g.matmul(of.packed(kind, n_in, n_out), of.tensor(F32, n_in, rows)), of.tensor(F32, n_out, rows)))
        guarded(lambda of: of.g.add(of.g.matmul(of.packed(kind, n_in, n_out), of.tensor(F32, n_in, rows)), of.tensor(F32, n_out)))
    for n, rows in itertools.product((32 if block == 1 else block, 96 if block < 256 else 768), (1, 8, 9, 32)):
        guarded(lambda of: of.g.matmul(
            of.packed(kind, n, 17), of.g.swiglu_halves(of.g.matmul(of.packed(TYPES["q8_0"], 32, 2 * n), of.tensor(F32, 32, rows)))
        ))  # fmt: skip
    index = np.array([0, 36, 17, 15, 16], np.int32)
    guarded(lambda of: of.g.rows(of.packed(kind, n_in, 37), of.tensor(I32, 5, values=index)))
    for n_out, used, rows, packed in itertools.product((1, 19), (1, 2), (1, 7), (False, True)):
        chosen = np.stack([np.random.default_rng(i).permutation(3)[:used] for i in range(rows)]).astype(np.int32)
        guarded(lambda of: of.g.matmul_experts(
            of.packed(kind, n_in, n_out, 3) if packed else of.tensor(kind, n_in, n_out, 3), of.tensor(F32, n_in, used, rows), of.tensor(I32, used, rows, values=chosen)
        ))  # fmt: skip


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 100])
def test_rows_of_values(guarded, n):
    for rows in (1, 3):
        guarded(lambda of: of.g.rms_norm(of.tensor(F32, n, rows), of.tensor(F32, n), 1e-5))
        guarded(lambda of: of.g.swiglu(of.tensor(F32, n, rows), of.tensor(F32, n, rows)))
        guarded(lambda of: of.g.sigmoid_gated(of.tensor(F32, 2 * n, rows), of.tensor(F32, n, 2, rows)))
        guarded(lambda of: of.g.sum_rows(of.tensor(F32, n, rows)))
        guarded(lambda of: of.g.argmax(of.tensor(F32, n, rows)))
        guarded(lambda of: of.g.concat([of.tensor(F32, n, rows), of.tensor(F32, 5, rows), of.tensor(F32, 1, rows)]))
        guarded(lambda of: of.g.kv_mask(of.tensor(F32, n), of.tensor(F32, 1, rows), of.tensor(F32, 1, rows), n))
        guarded(lambda of: lib.pgs_convolution(of.g.ctx, of.level, of.tensor(F32, 16 * n, 3 + rows, 2), of.tensor(F32, 4, 16 * n), 0, 0))


@pytest.mark.parametrize("name", ["f16", "q8_0", "f32", "bf16"])
def test_attention(guarded, name):
    """Spans that fill blocks of positions, and others; heads of K and V of different sizes; query rows enough to turn K, and fewer."""
    kind = TYPES[name]
    for size, span, rows, heads, slots in itertools.product((32, 96, 576), (1, 32, 33), (1, 9), (1, 2), (1, 2)):

        def attention(of):
            k, v = of.tensor(kind, size * heads, span, slots), of.tensor(kind, 64 * heads, span, slots)
            mask = of.tensor(F16, span, rows, 1, slots, values=np.zeros(2 * span * rows * slots, np.uint8))
            return of.g.flash_attention(of.tensor(F32, size, 4, rows * slots), k, v, mask, heads, span, 0.1)

        guarded(attention)
