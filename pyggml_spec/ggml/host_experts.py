"""Routed experts whose weights are partly or wholly in host memory: two cuts of a step's graph per such layer.

At the first cut the host reads the router's choices; the device then computes its resident ("hot") experts and the host the others ("cold"). At
the second cut the host's rows are uploaded, and each (token, choice) selects the row of its side.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import EngineError
from .device import Backend
from .graph import Graph
from .library import Tensor, check, ffi, lib, new_err, text

GLU = {"swiglu": lib.PGS_SWIGLU, "geglu": lib.PGS_GEGLU, "swiglu_oai": lib.PGS_SWIGLU_OAI}


class ExpertCounts(NamedTuple):
    """(token, expert) pairs so far, those with the expert on the device, and microseconds of host computation."""

    chosen: int = 0
    hits: int = 0
    host_us: int = 0


def _needs_distinct(device: Backend) -> bool:
    """Whether wide products require distinct experts per token; only the CPU's do not."""
    return device.device.kind != "cpu"


class HostExperts:
    """The transfers between a device and the host, and the host's graphs. Owns their memory, not the weights.

    Args:
        sizes: n_layer, n_embd, n_ff, n_expert, n_used, and max_rows, the rows of the widest step.
        types: ggml types of the experts' weights.
        glu: the method of ``Graph`` that combines gate and up.
    """

    def __init__(self, device: Backend, host: Backend, sizes: dict[str, int], glu: str, types: Sequence[int] = ()) -> None:
        self.n_layer, self.n_expert, self._err = sizes["n_layer"], sizes["n_expert"], new_err()
        self.rule = host.rule
        more = {"glu": GLU[glu], "distinct": _needs_distinct(device), "level": host.level_handle}
        if host.level is not None:
            pairs, widest = sizes["n_used"] * sizes["max_rows"], max(sizes["n_embd"], sizes["n_ff"])
            more["tiles"] = max((lib.pgs_expert_tiles(host.level.handle, kind, widest, self.n_expert, pairs) for kind in types), default=0)
        shape = ffi.new("pgs_experts_shape *", {**sizes, **more})
        self.handle: Any = lib.pgs_experts_new(device.handle, host.handle, shape, self._err)
        if self.handle == ffi.NULL:
            raise EngineError(text(self._err))
        self._layers: dict[int, int] = {}  # layer -> hot experts

    def set_layer(
        self, index: int, weights: dict[str, Tensor], hot: Sequence[int], scales: dict[str, np.ndarray], biases: dict[str, Tensor]
    ) -> None:
        """Registers the experts of a layer.

        Args:
            weights: gate_up, or gate and up, and down, of all experts in host memory.
            hot: the device's experts in their order there.
            scales: factors of the products of gate and up, F32 [n_expert] each, where present.
            biases: their biases, F32 [n_ff, n_expert] in host memory, where present.
        """
        slots = np.full(self.n_expert, -1, np.int32)
        slots[list(hot)] = np.arange(len(hot))
        gate_up, gate, up, down = (weights.get(name, ffi.NULL) for name in ("gate_up", "gate", "up", "down"))
        scale = {name: ffi.cast("float *", ffi.from_buffer(values)) for name, values in scales.items()}
        gate_scale, up_scale, gate_bias, up_bias = (of.get(name, ffi.NULL) for of in (scale, biases) for name in ("gate", "up"))
        more = gate_scale, up_scale, gate_bias, up_bias, ffi.cast("int32_t *", ffi.from_buffer(slots))
        check(lib.pgs_experts_set_layer(self.handle, index, gate_up, gate, up, down, *more, self._err), self._err)
        self._layers[index] = len(hot)

    def __contains__(self, index: int) -> bool:
        return index in self._layers

    def run(self, g: Graph, index: int, x: Tensor, chosen: Tensor, hot: Callable[[Tensor], Tensor]) -> Tensor:
        """The results of the chosen experts, F32 [n_embd, n_used, T].

        Args:
            x: F32 [n_embd, T].
            chosen: I32 [n_used, T], the first part of a full argsort over all experts.
            hot: builds the results of the device's experts from their slots, I32 [n_used, T]; called if there are any.
        """
        slots = lib.pgs_experts_begin(self.handle, g.handle, index, x, chosen, self._err)
        check(slots == ffi.NULL, self._err)
        mine = hot(slots) if self._layers[index] else ffi.NULL
        out = lib.pgs_experts_end(self.handle, g.handle, index, mine, x.ne[1], self._err)
        check(out == ffi.NULL, self._err)
        return out

    def counts(self) -> ExpertCounts:
        out = ffi.new("pgs_experts_counts *")
        lib.pgs_experts_counters(self.handle, out)
        return ExpertCounts(out.chosen, out.hits, out.host_us)

    def chosen(self) -> dict[int, np.ndarray]:
        """Number of choices of each expert so far, I64 [n_expert] by layer."""
        out = {}
        for index in self._layers:
            row = np.empty(self.n_expert, np.int64)
            lib.pgs_experts_layer_counts(self.handle, index, ffi.cast("int64_t *", ffi.from_buffer(row)))
            out[index] = row
        return out

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return lib.pgs_experts_device_bytes(self.handle)

    def close(self) -> None:
        if self.handle is not None:
            lib.pgs_experts_free(self.handle)
            self.handle = None
