"""Small graphs around single nodes, for the tests of native kernels."""

import itertools
from contextlib import contextmanager

import numpy as np

from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.graph import Graph, GraphAllocator
from pyggml_spec.ggml.kernels import levels, new_packed, pack, pack_experts
from pyggml_spec.ggml.library import check, ffi, lib, new_err
from pyggml_spec.tools.quants import TYPES, quantise, type_id

LEVELS = levels()


@contextmanager
def bench(level=None, threads=1):
    """A backend and a graph on it; ``level`` None: ggml's kernels."""
    backend = Backend(pick_device("CPU"), threads, "ggml" if level is None else "native")
    backend.level = level
    allocator = GraphAllocator(backend, "test")
    graph, memory = Graph(allocator), Memory(backend)
    try:
        yield graph, memory
    finally:
        graph.close()
        allocator.close()
        memory.close()
        backend.close()


class Memory:
    """Tensors with memory, each filled from an array. Owns contexts and buffers."""

    def __init__(self, backend):
        self.backend, self._parts = backend, []

    def _context(self):
        return lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": 4 * lib.ggml_tensor_overhead(), "no_alloc": True})[0])

    def tensor(self, array, kind=lib.GGML_TYPE_F32, shape=None):
        """A tensor of ``shape`` (innermost first; default: the array's) that holds the array's bytes."""
        ctx, array = self._context(), np.ascontiguousarray(array)
        shape = tuple(reversed(array.shape)) if shape is None else shape
        tensor = lib.ggml_new_tensor(ctx, kind, len(shape), shape)
        self._keep(ctx)
        lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(array), 0, array.nbytes)
        return tensor

    def packed(self, rows, kind, shape, pieces=1, threads=1):
        """The rows of a file (U8 [n_out, row bytes]) as a packed matrix, filled in ``pieces`` calls into memory that was not clean."""
        ctx = self._context()
        packed = new_packed(ctx, kind, shape)
        self._keep(ctx)
        lib.ggml_backend_tensor_memset(packed.tensor, 0, 0, lib.ggml_nbytes(packed.tensor))
        cuts = [len(rows) * i // pieces for i in range(pieces + 1)]
        for first, end in itertools.pairwise(cuts):
            if end > first:
                pack(packed, ffi.from_buffer(np.ascontiguousarray(rows[first:end])), first, end - first, threads)
        return packed

    def packed_experts(self, level, rows, kind, shape, threads=1):
        """The rows of a file (U8 [n_expert, n_out, row bytes]) as packed experts."""
        ctx, rows = self._context(), np.ascontiguousarray(rows)
        packed = new_packed(ctx, kind, shape)
        self._keep(ctx)
        pack_experts(level, packed, ffi.from_buffer(rows), threads)
        return packed

    def _keep(self, ctx):
        buffer = self.backend.allocate(ctx)
        assert buffer != ffi.NULL
        self._parts.append((ctx, buffer))

    def close(self):
        for ctx, buffer in self._parts:
            lib.ggml_backend_buffer_free(buffer)
            lib.ggml_free(ctx)


def compute(graph, node):
    """Plans and runs the graph for ``node``; its values, F32 [rows, n]."""
    graph.keep_output(node)
    graph.plan()
    err = new_err()
    check(lib.pgs_graph_compute(graph.handle, err), err)
    lib.ggml_backend_synchronize(graph.backend.handle)
    return graph.host_view(node).copy()


def product(level, kind, rows, x, threads=1, pieces=1):
    """x F32 [T, n_in] times the matrix of which ``rows`` are a file's rows, F32 [T, n_out]; by ggml with ``level`` None."""
    shape = (x.shape[1], len(rows))
    with bench(level, threads) as (graph, memory):
        weight = memory.tensor(rows, kind, shape) if level is None else memory.packed(rows, kind, shape, pieces, threads)
        return compute(graph, graph.matmul(weight, memory.tensor(x)))


QUANTISED = [type_id(name) for name in TYPES]


def matrix(kind, n_in, n_out, seed=0):
    """Random rows as a file of this type has them; of types of grids, which ggml searches for minutes, random bits."""
    rng = np.random.default_rng(seed)
    if kind in QUANTISED:
        return quantise(rng.standard_normal((n_out, n_in), np.float32), kind)
    return scaled(rng.integers(0, 256, (n_out, lib.ggml_row_size(kind, n_in)), np.uint8), kind, 0.02)


def scaled(rows, kind, d):
    """U8 [n_out, row bytes] of a type of grids with ``d`` as the scale of every block."""
    words, half = rows.reshape(len(rows), -1, lib.ggml_type_size(kind)).view(np.uint16), int(np.float16(d).view(np.uint16))
    if kind == type_id("iq1_m"):  # four bits of it above each word of scales
        words[:, :, 24:] = words[:, :, 24:] & 0x0FFF | np.array([half << 12 - 4 * i & 0xF000 for i in range(4)], np.uint16)
    else:
        words[:, :, 0] = half
    return rows
