"""Recurrent states of N slots (delta-nets, Mamba-2, short convolutions), and the part of each slot's last block that is not committed yet.

The states are on the device (csrc/delta_net.c); this is the host side: the block width of the pools, and the accepted rows of each slot's last block.
All slots share one block width, because the pools are compact per width. A slot without work in a step takes part with rows switched off: its
state is committed up to the accepted rows and otherwise unchanged, bit for bit.

One slot has its history directly before its block (``inline``). Several slots gather rows from a table; a change of width only clears the pools.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.library import Context, Tensor, check, ffi, lib, new_err, text
from ..models.base import RecurrentShape
from .slots import SlotRange


class RecurrentSegment(NamedTuple):
    """Recurrent states of consecutive layers: the ``segment`` of a split model, the number of ``layers``, and floats per projected ``row``."""

    segment: int
    backend: Backend
    layers: int
    row: int


class _Pool(NamedTuple):
    """The states of one device: C's handle, the first of its layers, and the step field that selects the next histories."""

    home: RecurrentSegment
    handle: Any
    first: int
    tail: str


class RecurrentState:
    """Owns the device pools, of a counting backend only their sizes. ``homes``: the placement of the layers, in order. ``chained``: blocks are computed
    in several passes, and always have the layout of ``max_width`` rows.

    Attributes:
        width: rows of the blocks that the pools are laid out for; with one slot 0 after a prompt, and 1 after plain tokens.
        accepted: I64 [slots] accepted rows of each slot's last block, to be replayed; with one slot and ``uncommitted`` False only the position of
            the history.
        uncommitted: whether the last step left blocks that are not part of the states.
        segments: those with states.
    """

    def __init__(
        self, homes: Sequence[RecurrentSegment], shape: RecurrentShape, max_width: int, slots: int = 1, chained: bool = False
    ) -> None:
        self.shape, self.max_width, self.slots, self.inline = shape, max_width, slots, slots == 1 and not chained
        self._err = new_err()
        self._pools: list[_Pool] = []
        first = 0
        for home in homes:
            sizes = [int(shape.recurrence), home.layers, shape.head_size, shape.state_size, shape.n_head_k, shape.n_head_v, shape.repeat]
            sizes += [shape.conv, home.row, max_width]
            spec = ffi.new("pgs_delta_shape *", [*sizes, 0 if self.inline else slots, home.backend.counting, home.backend.level_handle])
            handle = lib.pgs_delta_new(home.backend.handle, spec, self._err)
            if handle == ffi.NULL:
                self.close()
                raise EngineError(text(self._err))
            self._pools.append(_Pool(home, handle, first, "tail" if not self._pools else f"tail_{home.segment}"))
            first += home.layers
        self.segments, self.history_rows = [home.segment for home in homes], shape.conv - 1
        self._taken: dict[tuple, np.ndarray] = {}  # cache of fill_take
        self.width, self.accepted, self.uncommitted = 0, np.zeros(slots, np.int64), False
        self._accepted = ffi.cast("int64_t *", self.accepted.ctypes.data)

    def pool(self, segment: int) -> _Pool | None:
        """The states of a segment; None without any. A model that is not split has one pool for every argument."""
        if segment < 0:
            return self._pools[0]
        return next((pool for pool in self._pools if pool.home.segment == segment), None)

    # -- host side

    def lay_out(self, width: int) -> None:
        """Sets the block width; nothing may be uncommitted."""
        if not self.inline and width != self.width:
            for pool in self._pools:
                lib.pgs_delta_clear_blocks(pool.handle, width)
        self.width, self.uncommitted = width, False
        if self.inline:
            self.accepted[0] = 0

    def after_rows(self, width: int) -> None:
        """After a step that wrote the states itself: prefill (``width`` 0), or a plain token of one slot."""
        if self.inline:
            self.width, self.accepted[0], self.uncommitted = width, width, False

    def needs_commit(self, covered: SlotRange) -> bool:
        """Whether accepted rows of these slots are not part of the states yet."""
        return self.width != 0 if self.inline else bool(self.accepted[covered.part].any())

    def fill_slot(self, slot: int, value: int) -> None:
        """Sets every byte of a slot: 0 is the initial state, written and not multiplied because of NaN."""
        for pool in self._pools:
            if self.inline:
                lib.pgs_delta_fill(pool.handle, value)
            else:
                lib.pgs_delta_fill_slot(pool.handle, slot, self.width, value)
        if self.inline:
            self.width, self.uncommitted = 0, False
        self.accepted[slot] = 0

    def tail_shape(self, covered: SlotRange, pool: _Pool) -> tuple[int, ...]:
        """Shape of the input "tail" in ggml order: a row per layer, or rows of the whole table."""
        hist, layers = self.history_rows, pool.home.layers
        return (hist, layers) if self.inline else (hist * covered.count * layers,)

    def fill_commit(self, at: Mapping[str, Any], covered: SlotRange) -> None:
        """Fills the inputs of a commit through the C pointers ``at`` of a step's fields: per pool "tail", I32, the d_conv - 1 rows before the first
        row that is not accepted, of [history ; block] or of the table; and "keep", F32, 1 for accepted rows (optional)."""
        replay, keep = self.uncommitted or not self.inline, at.get("keep", ffi.NULL)
        for _, handle, _, tail in self._pools:
            lib.pgs_delta_fill_commit(handle, self._accepted, replay, covered.first, covered.count, self.width, at[tail], keep)

    def fill_take(self, take: np.ndarray, width: int, covered: SlotRange, single: bool = False) -> None:
        """Table rows [history ; block of ``width`` rows] of every slot for one layer; ``single``: the block is one plain token."""
        key = width, covered, single
        if key not in self._taken:
            hist, slots = self.history_rows, np.array(covered.slots).reshape(-1, 1)
            start, numbers = self.max_width * self.slots if single else 0, np.arange(hist + width)
            rows = np.where(numbers < hist, slots * hist + numbers, start + self.slots * hist + slots * width + numbers - hist)
            self._taken[key] = rows.astype(np.int32)
        take.reshape(covered.count, -1)[:] = self._taken[key]

    # -- device side

    def begin(self, g: Graph, covered: SlotRange, width_from: int, width_to: int, keep: Tensor | None, tail: Tensor | None) -> None:
        """Adds the commit of these slots' last blocks and the next convolution histories; ``keep`` and ``tail`` None if nothing is uncommitted."""
        keep, tail = (x if x is not None else ffi.NULL for x in (keep, tail))
        if (pool := self.pool(g.segment)) is not None:
            args = (pool.handle, g.ctx, g.gf, covered.first, covered.count, width_from, width_to, keep, tail, self._err)
            check(lib.pgs_delta_begin(*args), self._err)

    def kept(self, ctx: Context, slot: int, layer: int) -> tuple[Tensor, Tensor, Backend]:
        """Views of one layer's state and convolution history, and their backend."""
        pool = next(pool for pool in reversed(self._pools) if pool.first <= layer)
        out = ffi.new("struct ggml_tensor *[2]")
        lib.pgs_delta_kept(pool.handle, ctx, slot, layer - pool.first, out, out + 1)
        return out[0], out[1], pool.home.backend

    def read(self) -> np.ndarray:
        """The committed states, F32, flat (tests)."""
        out = []
        for pool in self._pools:
            out.append(np.empty(lib.pgs_delta_state_bytes(pool.handle) // 4, np.float32))
            lib.pgs_delta_read_state(pool.handle, ffi.from_buffer(out[-1]))
        return np.concatenate(out)

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_by_segment.values())

    @property
    def nbytes_by_segment(self) -> dict[int, int]:
        return {pool.home.segment: lib.pgs_delta_bytes(pool.handle) for pool in self._pools}

    def close(self) -> None:
        for pool in self._pools:
            lib.pgs_delta_free(pool.handle)
        self._pools = []


class RecurrentInputs:
    """The recurrent state as input of one graph (``models.base.RecurrentLayers``).

    ``width`` 0: prefill, with ``on`` F32 [1, T] 0 for padding rows and ``last`` I32 [d_conv - 1] the rows of the next history. ``take``: rows of
    several slots, see ``RecurrentState.fill_take``. ``row``: of the block, where a pass of a chain begins; -1 for none.
    """

    def __init__(
        self, state: RecurrentState, width: int, uncommitted: bool, on: Any = None, last: Any = None, take: Any = None, row: int = -1
    ) -> None:
        self.state, self.width, self.row = state, width, max(row, 0)
        self.mode = lib.PGS_DELTA_CHAINED if row >= 0 else lib.PGS_DELTA_UNCOMMITTED if uncommitted else lib.PGS_DELTA_DIRECT
        self.inputs = [x or ffi.NULL for x in (on, last, take)]

    def __call__(
        self, g: Graph, index: int, proj: Tensor, conv_w: Tensor, beta: Tensor | None = None, alpha: Tensor | None = None,
        dt: Tensor | None = None, a: Tensor | None = None, conv_b: Tensor | None = None, eps: float = 0.0, bound: float = 0.0
    ) -> Tensor:  # fmt: skip
        tensors = [x or ffi.NULL for x in (proj, beta, alpha, conv_w, conv_b, dt, a)]
        inputs = ffi.new("pgs_delta_inputs *", [*tensors, *self.inputs, self.row, eps, bound])
        err, pool = new_err(), self.state.pool(g.segment)
        assert pool is not None
        out = lib.pgs_delta_layer(pool.handle, g.ctx, g.gf, index - pool.first, self.width, self.mode, inputs, err)
        if out == ffi.NULL:
            raise EngineError(text(err))
        return out
