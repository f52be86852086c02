"""Recurrent states of a whole small model that drafts.

The pool has the states before each slot's last block. The block's rows are computed pass by pass, from states that stay in the graph; how many of them
are committed tokens is known when the next graph begins, which replays those.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.step_io import StepFields
from ..models.base import RecurrentLayers
from ..models.decoder import Decoder
from .recurrent import RecurrentInputs, RecurrentSegment, RecurrentState
from .slots import SlotRange

Host = Mapping[str, np.ndarray]


class DraftState(RecurrentState):
    """Owns the pool.

    A block's first pass has two rows: the last committed token, if its row is missing, and the last token; otherwise the last token and padding.

    Attributes:
        position: by slot, tokens in the states.
        rows: by slot, those of its last block that the tokens from ``position`` on have, in order; some may be rejected.
    """

    def __init__(self, backend: Backend, model: Decoder, width: int, slots: int) -> None:
        shape = model.recurrent_shape()
        assert shape is not None
        super().__init__([RecurrentSegment(0, backend, shape.layers, model.recurrent_row())], shape, width, slots, True)
        self.position: list[int] = [0] * slots
        self.rows: list[Sequence[int]] = [()] * slots
        hist = self.history_rows
        self._tables = (hist + width + 1) * slots * np.arange(shape.layers).reshape(-1, 1, 1)  # rows before each layer's table

    def clear(self, slot: int) -> None:
        """The states before a first token."""
        self.fill_slot(slot, 0)
        self.written(slot, 0)

    def written(self, slot: int, position: int) -> None:
        """The states are those of ``position`` tokens, and there is no block."""
        self.position[slot], self.rows[slot] = position, ()

    def pending(self, slot: int, known: int) -> int:
        """Rows of the last block that belong to the first ``known`` tokens."""
        return min(max(known - self.position[slot], 0), len(self.rows[slot]))

    # -- graphs

    def begin_replay(self, g: Graph, f: StepFields, covered: SlotRange) -> None:
        """Commits what ``fill_replay`` says of these slots' blocks."""
        width, count = self.max_width, covered.count
        keep, tail = (
            f.input("draft_keep", "f32", 1, width * count),
            f.input("draft_tail", "i32", self.history_rows * count * self.shape.layers),
        )
        self.begin(g, covered, width, width, keep, tail)

    def chunk(self, g: Graph, f: StepFields, covered: SlotRange, rows: int) -> RecurrentLayers:
        """The states under ``rows`` rows in all, which are written directly."""
        on, after = f.input("draft_on", "f32", 1, rows), f.input("draft_next", "i32", self.history_rows, covered.count)
        return RecurrentInputs(self, 0, False, on, after)

    def passes(self, g: Graph, f: StepFields, covered: SlotRange, drafts: int) -> Sequence[RecurrentLayers]:
        """The states under each pass of a chain."""
        hist, count = self.history_rows, covered.count
        take, on, out, at = f.input("draft_take", "i32", self._takes(drafts) * count), f.input("draft_on", "f32", 1, 2 * count), [], 0
        for i in range(drafts):
            rows = 1 if i else 2
            of_pass = g.slice(take, 0, at, (hist + rows) * count)
            out.append(RecurrentInputs(self, rows, True, None if i else on, None, of_pass, i + 1 if i else 0))
            at += of_pass.ne[0]
        return out

    @property
    def input_bytes(self) -> int:
        """Of a slot's inputs in the step buffer, beside those that every row has."""
        return 4 * (self.history_rows * (self.shape.layers + 1) + self._takes(self.max_width) + self.max_width)

    def _takes(self, drafts: int) -> int:
        """Table rows that the passes of a slot gather."""
        return drafts * (self.history_rows + 1) + 1

    # -- inputs

    def _table(self, slot: int, rows: Sequence[int]) -> np.ndarray:
        """Rows of a layer's table: the slot's history, and then ``rows`` of its block."""
        hist = self.history_rows
        return np.array([*range(slot * hist, (slot + 1) * hist), *(self.slots * hist + slot * self.max_width + row for row in rows)])

    def fill_replay(self, host: Host, covered: SlotRange, known: Mapping[int, int]) -> None:
        """Of slots that have so many ``known`` tokens; the blocks of others stay as they are."""
        keep, tail = host["draft_keep"].reshape(covered.count, -1), host["draft_tail"].reshape(self.shape.layers, covered.count, -1)
        for at, slot in enumerate(covered.slots):
            count = self.pending(slot, known[slot]) if slot in known else 0
            rows = self.rows[slot][:count]
            keep[at] = np.arange(self.max_width) <= max(rows, default=-1)  # padding between leaves the states as they are
            tail[:, at] = self._tables[:, 0] + self._table(slot, rows)[count:]

    def fill_rows(self, host: Host, covered: SlotRange, counts: Mapping[int, int]) -> None:
        """The first ``counts`` rows of each slot are written directly."""
        on, after = host["draft_on"].reshape(covered.count, -1), host["draft_next"].reshape(covered.count, -1)
        for at, slot in enumerate(covered.slots):
            count = counts.get(slot, 0)
            on[at] = np.arange(on.shape[1]) < count
            after[at] = count + np.arange(self.history_rows)

    def fill_passes(self, host: Host, covered: SlotRange, known: Mapping[int, int], missing: Mapping[int, bool], drafts: int) -> None:
        """Of a chain of ``drafts``; slots have ``known`` tokens with rows, and those that draft perhaps one more that is ``missing``."""
        self.fill_replay(host, covered, known)
        hist, count = self.history_rows, covered.count
        take, on = host["draft_take"], host["draft_on"].reshape(count, 2)
        for at, slot in enumerate(covered.slots):
            rows = (0, 1) if missing.get(slot) else (0,)
            on[at] = 1, len(rows) > 1
            take[: (hist + 2) * count].reshape(count, -1)[at] = self._table(slot, (0, 1))
            table = self._table(slot, (*rows, *range(2, drafts + 1)))
            later = take[(hist + 2) * count :].reshape(drafts - 1, count, hist + 1)
            for i in range(drafts - 1):
                later[i, at] = table[len(rows) + i :][: hist + 1]
            self.position[slot] += self.pending(slot, known[slot])
            self.rows[slot] = (*rows, *range(2, drafts + 1)) if slot in missing else ()
