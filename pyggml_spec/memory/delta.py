"""The recurrent states of the delta-net layers of N slots, and which part of each slot's last block still has to be committed.

The states themselves are on the device (csrc/delta_net.c). Here is the host's side: the width for which the pools are laid out, and how many
rows of each slot's last block were accepted. All slots share one block width at a time, because the pools are compact per width. A slot that
has nothing to do in a step takes part with rows that are switched off: its state is then committed up to what was accepted, and otherwise left
as it is, bit for bit.

One slot has its history right before its block (``inline``), which several cannot have: their rows are gathered from a table, and a change of
the width needs no graph but cleared pools. This is decided here and nowhere else.
"""

from typing import Any

import numpy as np

from ..errors import EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.library import Tensor, check, ffi, lib, new_err, text
from ..models.base import DeltaShape
from .slots import SlotRange


class DeltaState:
    """Owns the device pools, or with ``planned`` only their sizes.

    Attributes:
        width: rows of the blocks that the pools are laid out for; of one slot 0 after a prompt, and 1 after plain tokens.
        accepted: I64 [slots] rows of each slot's last block that count. They are still to be replayed, or, where the step has written the state
            itself (``unfolded`` False, one slot), only say where the history lies.
        unfolded: whether the last step has left blocks that are not in the states.
    """

    def __init__(self, backend: Backend, shape: DeltaShape, row: int, max_width: int, slots: int = 1, planned: bool = False) -> None:
        self.shape, self.max_width, self.slots, self.inline = shape, max_width, slots, slots == 1
        self._err = new_err()
        sizes = [
            shape.layers,
            shape.head_size,
            shape.n_head_k,
            shape.n_head_v,
            shape.repeat,
            shape.conv,
            row,
            max_width,
            0 if self.inline else slots,
        ]
        spec = ffi.new("pgs_delta_shape *", [*sizes, planned, backend.level_handle])
        self.handle: Any = lib.pgs_delta_new(backend.handle, spec, self._err)
        if self.handle == ffi.NULL:
            raise EngineError(text(self._err))
        self._every = np.arange(slots).reshape(-1, 1)
        self._taken: dict[tuple, np.ndarray] = {}  # what fill_take has been asked for
        self.width, self.accepted, self.unfolded = 0, np.zeros(slots, np.int64), False
        self._accepted = ffi.cast("int64_t *", self.accepted.ctypes.data)

    # -- host side

    def lay_out(self, width: int) -> None:
        """Blocks of ``width`` rows from now on; nothing may be left to fold."""
        if not self.inline and width != self.width:
            lib.pgs_delta_clear_blocks(self.handle, width)
        self.width, self.unfolded = width, False
        if self.inline:
            self.accepted[0] = 0

    def after_block(self, covered: SlotRange) -> None:
        """A step has left blocks of these slots; none of their rows counts until somebody says so."""
        self.accepted[covered.part] = 0
        self.unfolded = True

    def after_rows(self, width: int) -> None:
        """A step has written the states itself: chunks (``width`` 0), or a plain token of one slot."""
        if self.inline:
            self.width, self.accepted[0], self.unfolded = width, width, False

    def is_behind(self, covered: SlotRange) -> bool:
        """Whether these slots' states, or where they lie, are not yet those of everything that was accepted."""
        return self.width != 0 if self.inline else bool(self.accepted[covered.part].any())

    def fill_slot(self, slot: int, value: int) -> None:
        """Sets every byte that belongs to one slot: 0 is the state before the first token, by a write and not by 0 * what was there."""
        if self.inline:
            lib.pgs_delta_fill(self.handle, value)
            self.width, self.unfolded = 0, False
        else:
            lib.pgs_delta_fill_slot(self.handle, slot, self.width, value)
        self.accepted[slot] = 0

    @property
    def history_rows(self) -> int:
        return self.shape.conv - 1

    def tail_shape(self, covered: SlotRange) -> tuple[int, ...]:
        """Of the input "tail", in ggml order: a row per layer, or rows of the whole table."""
        hist, layers = self.history_rows, self.shape.layers
        return (hist, layers) if self.inline else (hist * covered.count * layers,)

    def fill_commit(self, tail: Any, keep: Any, covered: SlotRange) -> None:
        """Fills in the inputs of a commit, C's pointers: ``tail`` I32, the rows that become the histories, which are the d_conv - 1 before the
        first that is not accepted, of [history ; block] or of the table; ``keep`` F32, 1 for the rows of blocks that count (NULL: no input)."""
        replay = self.unfolded or not self.inline
        lib.pgs_delta_fill_commit(self.handle, self._accepted, replay, covered.first, covered.count, self.width, tail, keep)

    def fill_take(self, take: np.ndarray, width: int, covered: SlotRange, single: bool = False) -> None:
        """Of one layer's table, the rows [history ; block of ``width`` rows] of every slot; ``single``: the block is one plain token."""
        key = width, covered, single
        if key not in self._taken:
            start = self.max_width * self.slots if single else 0
            self._taken[key] = self._table(np.arange(self.history_rows + width), width, covered, start).astype(np.int32)
        take.reshape(covered.count, -1)[:] = self._taken[key]

    def _table(self, numbers: np.ndarray, width: int, covered: SlotRange, start: int = 0) -> np.ndarray:
        """Where the rows ``numbers`` of [history ; block] of each slot lie in a layer's table, whose blocks begin ``start`` rows late."""
        hist, slots = self.history_rows, self._every[covered.part]
        return np.where(numbers < hist, slots * hist + numbers, start + self.slots * hist + slots * width + numbers - hist)

    # -- device side

    def begin(self, g: Graph, covered: SlotRange, width_from: int, width_to: int, keep: Tensor | None, tail: Tensor | None) -> None:
        """Adds the commit of these slots' last blocks, and the convolution histories of the next; ``keep`` and ``tail`` None where there is
        nothing to commit."""
        keep, tail = (x if x is not None else ffi.NULL for x in (keep, tail))
        status = lib.pgs_delta_begin(self.handle, g.ctx, g.gf, covered.first, covered.count, width_from, width_to, keep, tail, self._err)
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
    ``take`` is for several slots, see DeltaState.fill_take.
    """

    def __init__(
        self,
        state: DeltaState,
        width: int,
        unfolded: bool,
        on: Tensor | None = None,
        last: Tensor | None = None,
        take: Tensor | None = None,
    ) -> None:
        self.state, self.width = state, width
        self.mode = lib.PGS_DELTA_UNFOLDED if unfolded else lib.PGS_DELTA_DIRECT
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
