"""Weight streaming: layers in host memory are copied to the device for each prompt chunk, alternating between two buffers.

The next layer is copied while the device computes one (csrc/weight_stream.c). A tensor has the same address in every chunk, so graphs are reused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import EngineError
from .device import Backend
from .graph import Graph
from .library import Context, Tensor, check, ffi, lib, new_context, new_err, text


class StreamCounts(NamedTuple):
    """Bytes copied so far, and the chunks computed with them."""

    bytes: int = 0
    chunks: int = 0


class WeightStream:
    """Owns the device memory and the copy queue; borrows the host memory.

    Attributes:
        layers: tensors on the device by layer and name, ascending.
        rows: smallest chunk that uses copies.
        need: device bytes.
        fits: whether they could be allocated; otherwise nothing else may be called.
    """

    def __init__(self, device: Backend, sources: Mapping[int, Mapping[str, Tensor]], rows: int = 1) -> None:
        """``sources``: the tensors in host memory, which must stay in place."""
        self.device, self.rows = device, rows
        self.layers: dict[int, dict[str, Tensor]] = {}
        self._numbers = {layer: number for number, layer in enumerate(sorted(sources))}
        self._handle: Any = None
        self._err, self.buffer = new_err(), ffi.NULL
        self._queue: Backend | None = None
        count = sum(len(tensors) for tensors in sources.values())
        self._contexts: list[Context] = [new_context(count + 1), new_context(count + 1)]
        self._ctx, self._home_ctx = self._contexts
        try:
            self._load(sources)
        except BaseException:
            self.close()
            raise

    def _load(self, sources: Mapping[int, Mapping[str, Tensor]]) -> None:
        buft = self.device.default_buffer_type
        alignment = lib.ggml_backend_buft_get_alignment(buft)
        offsets: dict[tuple[int, str], int] = {}
        sizes = [0, 0]  # of the two buffers
        for layer, number in self._numbers.items():
            at, self.layers[layer] = 0, {}
            for name, source in sources[layer].items():
                tensor = lib.ggml_new_tensor(self._ctx, source.type, 4, tuple(source.ne))
                lib.ggml_set_name(tensor, name.encode()[:63])
                self.layers[layer][name], offsets[layer, name] = tensor, at
                at += -(-lib.ggml_backend_buft_get_alloc_size(buft, tensor) // alignment) * alignment
            sizes[number % 2] = max(sizes[number % 2], at)
        home = lib.ggml_new_tensor(self._home_ctx, lib.GGML_TYPE_I8, 1, (sum(sizes),))
        self.need = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(self._home_ctx, buft)
        self.buffer = self.device.allocate(self._home_ctx)
        self.fits = self.buffer != ffi.NULL
        if not self.fits:
            return
        lib.ggml_backend_buffer_set_usage(self.buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        for layer, number in self._numbers.items():
            for name, tensor in self.layers[layer].items():
                offsets[layer, name] += sizes[0] * (number % 2)
                check(lib.pgs_place(home, offsets[layer, name], tensor, self._err), self._err)
        if not self.device.counting:
            self._fill(home, sources, offsets)

    def _fill(self, home: Tensor, sources: Mapping[int, Mapping[str, Tensor]], offsets: Mapping[tuple[int, str], int]) -> None:
        """Registers the copies of each layer: its tensors, and zeros for the padding that kernels read after them."""
        buft = self.device.default_buffer_type
        self._queue = Backend(self.device.device, 1, "ggml")
        self._handle = lib.pgs_stream_new(self.device.handle, self._queue.handle, home, len(self._numbers), self._err)
        if self._handle == ffi.NULL:
            self._handle = None
            raise EngineError(text(self._err))
        paddings = {
            key: lib.ggml_backend_buft_get_alloc_size(buft, self.layers[key[0]][key[1]]) - lib.ggml_nbytes(self.layers[key[0]][key[1]])
            for key in offsets
        }
        self._zeros = np.zeros(max(1, *paddings.values()), np.uint8)
        zeros = ffi.from_buffer(self._zeros)
        for (layer, name), offset in offsets.items():
            number, source, nbytes = self._numbers[layer], sources[layer][name], lib.ggml_nbytes(sources[layer][name])
            check(lib.pgs_stream_add(self._handle, number, source.data, offset, nbytes, self._err), self._err)
            if padding := paddings[layer, name]:
                check(lib.pgs_stream_add(self._handle, number, zeros, offset + nbytes, padding, self._err), self._err)

    def cut(self, g: Graph, layer: int, begins: bool) -> None:
        """Nodes added from now on may read the tensors of ``layer``, or (``begins`` False) all its readers are in the graph."""
        handle: Any = self._handle if self._handle is not None else ffi.NULL
        check(lib.pgs_graph_stream_cut(g.handle, handle, self._numbers[layer], begins, self._err), self._err)

    def expect(self, more: bool) -> None:
        """Whether another chunk follows the next one; its first layers are then copied early."""
        if self._handle is not None:
            lib.pgs_stream_more(self._handle, more)

    def counts(self) -> StreamCounts:
        out = ffi.new("pgs_stream_counts *")
        if self._handle is not None:
            lib.pgs_stream_counters(self._handle, out)
        return StreamCounts(out.bytes, out.chunks)

    @property
    def layer_bytes(self) -> int:
        """Bytes copied per chunk."""
        return sum(lib.ggml_nbytes(tensor) for tensors in self.layers.values() for tensor in tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.device.size_of(self.buffer)

    def close(self) -> None:
        if self._handle is not None:
            lib.pgs_stream_free(self._handle)
            self._handle = None
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self.buffer != ffi.NULL:
            lib.ggml_backend_buffer_free(self.buffer)
            self.buffer = ffi.NULL
        for ctx in self._contexts:
            lib.ggml_free(ctx)
        self._contexts = []
