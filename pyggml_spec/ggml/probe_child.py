"""Run by `probe`: ``python -m pyggml_spec.ggml.probe_child LIBRARIES [BUFFER TYPE TO SKIP ...]``.

Prints each stage before it starts: the last line of a process that died names the culprit.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

from .probe import _FLAGS, PLAIN, START, plain_libraries

N_IN, N_OUT, ROWS = 512, 64, (1, 16, 33)  # whole blocks of every type; a row, a tile, more than two


def say(line: str) -> None:
    print(line, flush=True)


def load(folder: Path, name: str) -> ctypes.CDLL:
    """Loads by the name that other libraries link to: a wheel has copies instead of links, and each would load separately."""
    numbered = sorted(folder.glob(f"lib{name}.so.?"))
    return ctypes.CDLL(str((*numbered, *plain_libraries(folder, name))[0]), ctypes.RTLD_GLOBAL)


def multiply(backend: Any, buffer_type: Any) -> None:
    """Products with a matrix of every type that this buffer type supports, in one graph."""
    from .graph import NOT_WEIGHTS, Graph, GraphAllocator
    from .library import check, ffi, lib, new_context, new_err, text

    kinds = [kind for kind in range(lib.GGML_TYPE_COUNT) if lib.ggml_blck_size(kind) and N_IN % lib.ggml_blck_size(kind) == 0]
    kinds = [kind for kind in kinds if text(lib.ggml_type_name(kind)) not in NOT_WEIGHTS]
    weights, others, allocator, err = new_context(len(kinds)), new_context(len(ROWS)), GraphAllocator(backend, "probe"), new_err()
    matrices = [lib.ggml_new_tensor(weights, kind, 2, (N_IN, N_OUT)) for kind in kinds]
    inputs = [lib.ggml_new_tensor(others, lib.GGML_TYPE_F32, 2, (N_IN, rows)) for rows in ROWS]
    buffers = [backend.allocate(weights, buffer_type), backend.allocate(others)]
    for x in inputs:
        lib.ggml_backend_tensor_memset(x, 0, 0, lib.ggml_nbytes(x))
    graph = Graph(allocator)
    for weight in matrices:
        products = [product for x in inputs if backend.supports(product := lib.ggml_mul_mat(graph.ctx, weight, x))]
        if products:
            lib.ggml_backend_tensor_set(weight, ffi.new("char[]", lib.ggml_nbytes(weight)), 0, lib.ggml_nbytes(weight))
        for product in products:
            graph.expand(product)
    if graph.n_nodes:
        graph.plan()
        check(lib.pgs_graph_compute(graph.handle, err), err)
    graph.close()
    allocator.close()
    for buffer in buffers:
        lib.ggml_backend_buffer_free(buffer)
    lib.ggml_free(weights)
    lib.ggml_free(others)


def main() -> None:
    say(f"at {START}")
    load(Path(sys.argv[1]), "ggml-base")
    library = load(Path(sys.argv[1]), "ggml-cpu")  # whose functions of compile-time features return constants
    named = {name: f"ggml_cpu_has_{name}" for name in _FLAGS}
    say(" ".join(["features", *(name for name, function in named.items() if hasattr(library, function) and library[function]())]))
    from .device import Backend, devices
    from .library import lib, text

    backend = Backend(next(device for device in devices() if device.kind == "cpu"), 2)  # AMX tiles are configured per thread
    say(f"at {PLAIN}")
    multiply(backend, backend.default_buffer_type)
    for buffer_type in backend.extra_buffer_types():
        name = text(lib.ggml_backend_buft_name(buffer_type))
        if name not in sys.argv[2:]:
            say(f"at {name}")
            multiply(backend, buffer_type)
    say("done")


if __name__ == "__main__":
    main()
