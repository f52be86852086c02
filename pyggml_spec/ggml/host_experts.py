"""Routed experts whose weights are partly or wholly in host memory: the two cuts that a step's graph has per such layer.

At the first cut the host reads what the router chose; the device then computes its own ("hot") experts while the host computes the others
("cold"); at the second cut the host's rows go up, and each (token, choice) picks the row of the side that has the expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import EngineError
from .device import Backend
from .graph import Graph
from .library import Tensor, check, ffi, lib, new_err, text

GLU = {"swiglu": lib.PGS_SWIGLU, "geglu": lib.PGS_GEGLU, "swiglu_oai": lib.PGS_SWIGLU_OAI}


@dataclass(frozen=True)
class ExpertCounts:
    """(token, expert) pairs so far, those of them whose expert was on the device, and microseconds that the host computed."""

    chosen: int = 0
    hits: int = 0
    host_us: int = 0


def fillers(n_used: int, n_hot: int) -> int:
    """Slots behind ``n_hot`` > 0 hot experts that the device's tensors need, for choices that are the host's."""
    return lib.pgs_experts_fillers(n_used, n_hot)


def _needs_distinct(device: Backend) -> bool:
    """Whether wide products take it for granted that a token uses an expert once; the CPU's do not."""
    return device.device.kind != "cpu"


class HostExperts:
    """What moves between a device and the host, and the host's own graphs. Owns their memory, not the weights.

    Args:
        sizes: n_layer, n_embd, n_ff, n_expert, n_used, and max_rows, the rows of the widest step.
        types: of the experts' weights; those that native kernels multiply on the host are.
        glu: how gate and up become one: the name of a method of ``Graph``.
    """

    def __init__(self, device: Backend, host: Backend, sizes: dict[str, int], glu: str, types: Sequence[int] = ()) -> None:
        self.n_layer, self.n_expert, self._err = sizes["n_layer"], sizes["n_expert"], new_err()
        self.rule = host.rule  # of the host's threads
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
        """A layer's experts.

        Args:
            weights: gate_up, or gate and up, and down, of all experts in host memory.
            hot: the device's experts in their order there.
            scales: what products of gate and up are multiplied with, F32 [n_expert] each, where there is something.
            biases: what is added to them, F32 [n_ff, n_expert] in host memory, where there is something.
        """
        slots = np.full(self.n_expert, -1, np.int32)
        slots[list(hot)] = np.arange(len(hot))
        gate_up, gate, up, down = (weights.get(name, ffi.NULL) for name in ("gate_up", "gate", "up", "down"))
        pointer = ffi.cast("int32_t *", ffi.from_buffer(slots))
        gate_scale, up_scale = (
            ffi.cast("float *", ffi.from_buffer(scales[name])) if name in scales else ffi.NULL for name in ("gate", "up")
        )
        more = gate_scale, up_scale, biases.get("gate", ffi.NULL), biases.get("up", ffi.NULL)
        check(lib.pgs_experts_set_layer(self.handle, index, gate_up, gate, up, down, *more, pointer, self._err), self._err)
        self._layers[index] = len(hot)

    def __contains__(self, index: int) -> bool:
        return index in self._layers

    def run(self, g: Graph, index: int, x: Tensor, chosen: Tensor, hot: Callable[[Tensor], Tensor]) -> Tensor:
        """The results of the chosen experts, F32 [n_embd, n_used, T].

        Args:
            x: F32 [n_embd, T].
            chosen: I32 [n_used, T], the first part of a whole order of all experts.
            hot: makes the results of the device's experts from their slots, I32 [n_used, T]; called if there are any.
        """
        slots = lib.pgs_experts_begin(self.handle, g.handle, index, x, chosen, self._err)
        if slots == ffi.NULL:
            raise EngineError(text(self._err))
        mine = hot(slots) if self._layers[index] else ffi.NULL
        out = lib.pgs_experts_end(self.handle, g.handle, index, mine, x.ne[1], self._err)
        if out == ffi.NULL:
            raise EngineError(text(self._err))
        return out

    def counts(self) -> ExpertCounts:
        out = ffi.new("pgs_experts_counts *")
        lib.pgs_experts_counters(self.handle, out)
        return ExpertCounts(out.chosen, out.hits, out.host_us)

    def chosen(self) -> dict[int, np.ndarray]:
        """How often each expert was chosen so far, I64 [n_expert] by layer."""
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
