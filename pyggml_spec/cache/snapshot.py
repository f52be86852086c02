"""Views of a sequence's memory, and copies of it on the device.

rows    K/V rows of layers that keep every position, target and drafter: row = position, written once
state   state of the last token only: recurrent states, convolution histories, ring rows within the window, the last hidden state
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..ggml.device import Backend
from ..ggml.library import Buffer, Context, Tensor, ffi, lib, new_context, read_tensor
from .hidden import LastHiddenState
from .kv import KVCache
from .recurrent import RecurrentState


class Pieces:
    """Contiguous tensors in a fixed order: views of a part of a sequence, or a copy that owns its memory. ``backends``: of each tensor."""

    def __init__(self, most: int) -> None:
        self._ctx: Any = new_context(most)
        self._store: list[tuple[Backend, Context, Buffer]] = []
        self.tensors: list[Tensor] = []
        self.backends: list[Backend] = []

    def add_view(self, view: Tensor, backend: Backend) -> None:
        lib.ggml_backend_view_init(view)
        self.tensors.append(view)
        self.backends.append(backend)

    def add_rows(self, tensor: Tensor, backend: Backend, slot: int, first: int, count: int) -> None:
        """Rows first .. first + count - 1 of one slot of ``tensor``."""
        if count:
            view = lib.ggml_view_2d(self._ctx, tensor, tensor.ne[0], count, tensor.nb[1], slot * tensor.nb[2] + first * tensor.nb[1])
            self.add_view(view, backend)

    def add_state(self, delta: RecurrentState, slot: int, layer: int) -> None:
        """State and convolution history of a recurrent layer."""
        *views, backend = delta.kept(self._ctx, slot, layer)
        for view in views:
            self.add_view(view, backend)

    @property
    def nbytes(self) -> int:
        return sum(lib.ggml_nbytes(t) for t in self.tensors)

    def copy(self, wait: bool = True) -> "Pieces | None":
        """A copy on the same devices; None without memory. ``wait`` as of ``write_to``."""
        out = Pieces(0)
        out.tensors, out.backends = list(self.tensors), list(self.backends)
        for backend in dict.fromkeys(self.backends):
            ctx = new_context(len(self.tensors))
            for i, t in enumerate(self.tensors):
                if self.backends[i] is backend:
                    out.tensors[i] = lib.ggml_new_tensor(ctx, t.type, 2, (t.ne[0], t.ne[1]))
            out._store.append((backend, ctx, backend.allocate_temporary(ctx)))
            if out._store[-1][2] == ffi.NULL:
                out.close()
                return None
        self.write_to(out, wait)
        return out

    def first_rows(self, count: int) -> "Pieces":
        """Views of the first ``count`` rows of each tensor."""
        out = Pieces(len(self.tensors))
        for t, backend in zip(self.tensors, self.backends):
            out.add_view(lib.ggml_view_2d(out._ctx, t, t.ne[0], count, t.nb[1], 0), backend)
        return out

    def write_to(self, other: "Pieces", wait: bool = True) -> None:
        """Copies into ``other``, of the same shapes and devices. ``wait`` False only queues the copies."""
        for source, target, backend in zip(self.tensors, other.tensors, self.backends, strict=True):
            lib.ggml_backend_tensor_copy_async(backend.handle, backend.handle, source, target)
        if wait:
            self._synchronize()

    def _synchronize(self) -> None:
        for backend in dict.fromkeys(self.backends):
            backend.synchronize()

    def read(self) -> np.ndarray:
        """The contents as bytes, U8 [nbytes], concatenated."""
        self._synchronize()
        out = np.empty(self.nbytes, np.uint8)
        for t, part, backend in zip(self.tensors, self._parts(out), self.backends, strict=True):
            read_tensor(t, part, 0, backend.workers)
        return out

    def write(self, contents: np.ndarray) -> None:
        """Overwrites the contents with bytes of ``read``."""
        if contents.nbytes != self.nbytes:
            raise ValueError(f"{contents.nbytes} bytes for tensors of {self.nbytes}")
        self._synchronize()
        for t, part in zip(self.tensors, self._parts(contents)):
            lib.ggml_backend_tensor_set(t, ffi.from_buffer(part), 0, part.nbytes)

    def _parts(self, contents: np.ndarray) -> list[np.ndarray]:
        """The bytes of each tensor, as views."""
        return np.split(contents, np.cumsum([lib.ggml_nbytes(t) for t in self.tensors]))[:-1]

    @property
    def closed(self) -> bool:
        return self._ctx is None

    def close(self) -> None:
        if self._ctx is not None:
            for backend, _, _ in self._store:
                if backend.handle is not None:  # a session closes its devices before the copies
                    backend.synchronize()
            for backend, ctx, buffer in self._store:
                backend.free_temporary(buffer)
                lib.ggml_free(ctx)
            lib.ggml_free(self._ctx)
            self._ctx, self._store, self.tensors, self.backends = None, [], [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Rows:
    """The tensors of a cache's first ``layers``: those that keep every position, and those in a ring."""

    def __init__(self, kv: KVCache, layers: int) -> None:
        pairs = [(ring, t) for layer, ring in zip(kv.layers[:layers], kv.in_ring) for t in layer.stored]
        self.full, self.ringed = ([t for ring, t in pairs if ring == wanted] for wanted in (False, True))
        self.rotated = {t for layer in kv.layers for t, by in ((layer.k, layer.rotation_k), (layer.v, layer.rotation_v)) if by is not None}
        self.ring, self.backends, self._window = kv.ring, kv.backends, kv.window

    def visible(self, n: int) -> list[tuple[int, int]]:
        """First rows and counts of the parts of a ring that are visible at position ``n``."""
        seen = min(n, self._window)
        first = (n - seen) % self.ring
        before_wrap = min(seen, self.ring - first)
        return [(first, before_wrap), (0, seen - before_wrap)]


class SequenceMemory:
    """The memory of a slot's sequence in the caches of an engine, which it borrows.

    ``first``: only the target's first (attention, recurrent) layers. ``stateful``: whether a position needs state besides rows to continue from.
    """

    def __init__(
        self, kv: KVCache, draft_kv: KVCache | None, delta: RecurrentState | None, last_hidden: LastHiddenState | None = None,
        draft_state: RecurrentState | None = None, first: tuple[int, int] | None = None
    ) -> None:  # fmt: skip
        self._delta, self._last_hidden, self._draft_state = delta, last_hidden, draft_state
        layers, self._states = first if first is not None else (len(kv.layers), delta.shape.layers if delta is not None else 0)
        self._target = _Rows(kv, layers)
        self._drafter = _Rows(draft_kv, len(draft_kv.layers)) if draft_kv is not None else None
        ringed = any(rows.ringed for rows in self._caches(True))
        self.stateful = delta is not None or ringed or last_hidden is not None or draft_state is not None

    def _caches(self, drafting: bool) -> "list[_Rows]":
        return [rows for rows in (self._target, self._drafter if drafting else None) if rows is not None]

    def rows(self, first: int, count: int, drafting: bool, slot: int = 0) -> Pieces:
        """Rows of positions first .. first + count - 1, of the drafter only if ``drafting``."""
        return self._pieces(slot, first, count, drafting, None)

    def state(self, n: int, drafting: bool, slot: int = 0) -> Pieces:
        """State of ``n`` committed tokens besides rows, without a last token; of a ring, the rows visible at position n."""
        return self._pieces(slot, 0, 0, drafting, n)

    def whole(self, n: int, drafting: bool, slot: int = 0) -> Pieces:
        """Everything of ``n`` committed tokens, without a last token."""
        return self._pieces(slot, 0, n, drafting, n)

    def _pieces(self, slot: int, first: int, count: int, drafting: bool, state_of: int | None) -> Pieces:
        caches = self._caches(drafting)
        states = [(self._delta, self._states)] if self._delta is not None else []
        states += [(self._draft_state, self._draft_state.shape.layers)] if self._draft_state is not None else []
        most = sum(len(rows.full) + 2 * len(rows.ringed) for rows in caches)
        pieces = Pieces(most + 2 * sum(layers for _, layers in states) + 1)
        for rows in caches:
            for tensor in rows.full:
                pieces.add_rows(tensor, rows.backends[tensor], slot, first, count)
        if state_of is None:
            return pieces
        for delta, layers in states:
            for layer in range(layers):
                pieces.add_state(delta, slot, layer)
        for rows in caches:
            for tensor in rows.ringed:
                for begin, visible in rows.visible(state_of):
                    pieces.add_rows(tensor, rows.backends[tensor], slot, begin, visible)
        if self._last_hidden is not None:
            pieces.add_rows(self._last_hidden.table, self._last_hidden.backend, 0, self._last_hidden.row(slot), 1)
        return pieces

    def describe(self) -> str:
        """Types, widths, rotations and rings as text."""

        def kinds(tensors: Sequence[Tensor], rotated: Collection[Tensor] = ()) -> str:
            names = [f"{ffi.string(lib.ggml_type_name(t.type)).decode()}[{t.ne[0]}]" + " rotated" * (t in rotated) for t in tensors]
            runs = [i for i in range(len(names)) if i == 0 or names[i] != names[i - 1]]
            return " ".join(f"{end - start}x{names[start]}" for start, end in zip(runs, [*runs[1:], len(names)])) or "none"

        def all_of(rows: _Rows | None) -> str:
            if rows is None:
                return "none"
            ring = f", ring of {rows.ring} rows {kinds(rows.ringed, rows.rotated)}" if rows.ringed else ""
            return kinds(rows.full, rows.rotated) + ring

        last_hidden = f" and a hidden state {kinds([self._last_hidden.table])}" if self._last_hidden is not None else ""
        state = f" and recurrent states {self._draft_state.shape}" if self._draft_state is not None else ""
        return f"{all_of(self._target)}, drafter {all_of(self._drafter)}{last_hidden}{state}"


@dataclass
class Snapshot:
    """A copy of a whole sequence of ``engine``: ``committed`` tokens and the ``last_token``. ``sound`` as of a slot."""

    pieces: Pieces
    committed: int
    last_token: int | None
    drafting: bool
    sound: bool
    engine: object
    lag: Callable[[int], int] | None = None

    @property
    def nbytes(self) -> int:
        return self.pieces.nbytes

    def close(self) -> None:
        self.pieces.close()
