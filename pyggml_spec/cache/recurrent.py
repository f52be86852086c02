"""The recurrent state of the delta-net layers, and which part of the last block still has to be committed.

The state itself is on the device (csrc/delta_net.c). Here is the host's side: the width for which the pool is laid out, how many rows of
the last block were accepted, and whether they are still to be replayed. Changing the width needs one transition graph; the engine builds it.
"""

from typing import Any

import numpy as np

from ..errors import EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.library import Tensor, check, ffi, lib, new_err, text
from ..models.base import DeltaShape


class DeltaState:
    """Owns the device pools, or with ``planned`` only their sizes. ``width`` is 0 after prefill, 1 after plain decoding, W after a verified block of W rows."""

    slots = 0  # one sequence; see DeltaSlots
    accepted: Any  # rows of the last block that count: an int, and one for each slot in DeltaSlots

    def __init__(self, backend: Backend, shape: DeltaShape, row: int, max_width: int, planned: bool = False) -> None:
        self.shape, self.max_width = shape, max_width
        self._history = np.arange(shape.conv - 1, dtype=np.int32)
        self._err = new_err()
        sizes = [shape.layers, shape.head_size, shape.n_head_k, shape.n_head_v, shape.conv, row, max_width, self.slots]
        spec = ffi.new("pgs_delta_shape *", [*sizes, planned])
        self.handle: Any = lib.pgs_delta_new(backend.handle, spec, self._err)
        if self.handle == ffi.NULL:
            raise EngineError(text(self._err))
        self.reset_cursor()

    # -- host side

    def reset_cursor(self) -> None:
        self.width, self.accepted, self.pending = 0, 0, False

    def clear(self) -> None:
        """Back to the state before the first token."""
        lib.pgs_delta_clear(self.handle)
        self.reset_cursor()

    def after_step(self, width: int, accepted: int, pending: bool) -> None:
        """Records what a step left: a block of ``width`` rows of which ``accepted`` count, replayed by the next step if ``pending``."""
        self.width, self.accepted, self.pending = width, accepted, pending

    @property
    def history_rows(self) -> int:
        return self.shape.conv - 1

    def fill_tail(self, tail: np.ndarray) -> None:
        """Rows of [history ; block] that become the convolution history: the d_conv - 1 rows before the first row that is not accepted."""
        tail.reshape(self.shape.layers, self.history_rows)[:] = self._history + self.accepted

    def fill_keep(self, keep: np.ndarray) -> None:
        """1 for the rows of the pending block that count, 0 for the others."""
        accepted = self.accepted if self.pending else 0
        keep[:accepted] = 1
        keep[accepted:] = 0

    # -- device side

    def begin(self, g: Graph, width_from: int, width_to: int, keep: Tensor | None, tail: Tensor | None) -> None:
        """Adds the commit of the block before, and the convolution history of the next one."""
        status = lib.pgs_delta_begin(
            self.handle, g.ctx, g.gf, 0, 1, width_from, width_to, keep if keep is not None else ffi.NULL, tail if tail is not None else ffi.NULL,
            self._err,
        )  # fmt: skip
        check(status, self._err)

    def read(self) -> np.ndarray:
        """The committed states, F32, as one flat array (tests)."""
        out = np.empty(lib.pgs_delta_state_bytes(self.handle) // 4, np.float32)
        lib.pgs_delta_read_state(self.handle, ffi.from_buffer(out))
        return out

    @property
    def nbytes(self) -> int:
        return lib.pgs_delta_bytes(self.handle)

    def close(self) -> None:
        if self.handle is not None:
            lib.pgs_delta_free(self.handle)
            self.handle = None


class DeltaRows:
    """The recurrent state in one graph: what ``models.base.DeltaLayers`` asks for.

    ``width`` is 0 for prefill, where ``on`` F32 [1, T] switches padding rows off and ``last`` I32 [d_conv - 1] names the next history.
    ``take`` is for slots, see DeltaSlots.fill_take.
    """

    def __init__(
        self, state: DeltaState, width: int, pending: bool, on: Tensor | None = None, last: Tensor | None = None, take: Tensor | None = None
    ) -> None:
        self.state, self.width = state, width
        self.mode = lib.PGS_DELTA_PENDING if pending else lib.PGS_DELTA_DIRECT
        self.on, self.last, self.take = (x or ffi.NULL for x in (on, last, take))

    def layer(
        self, g: Graph, index: int, proj: Tensor, beta: Tensor, alpha: Tensor, conv_w: Tensor, dt: Tensor, a: Tensor, eps: float
    ) -> Tensor:
        inputs = ffi.new("pgs_delta_inputs *", [proj, beta, alpha, conv_w, dt, a, self.on, self.last, self.take, eps])
        err = new_err()
        out = lib.pgs_delta_layer(self.state.handle, g.ctx, g.gf, index, self.width, self.mode, inputs, err)
        if out == ffi.NULL:
            raise EngineError(text(err))
        return out
