"""What the inputs of a step are: positions, cache rows, ids, and which rows are switched off."""

from collections.abc import Mapping

import numpy as np

from ..memory.features import RING
from ..memory.kv import NOWHERE
from ..memory.slots import SlotRange
from .graph_store import Step
from .parts import Parts
from .slot import Draft, Ids, Prompt, Work

Given = Mapping[int, Work]
Rows = Mapping[int, int]


class Fill:
    """Writes the host's side of a step's fields, for the slots that it covers: ``width`` rows each, of which ``rows`` says how many count."""

    def __init__(self, parts: Parts) -> None:
        self._slots, self._options = parts.slots, parts.options
        self._target = parts.target
        self._kv, self._delta, self._ring, self._boundary = parts.kv, parts.delta, parts.ring, parts.boundary
        self._drafting = parts.graphs.draft_part
        self._iota = np.arange(max(parts.options.chunk, parts.options.width, RING), dtype=np.int32)

    def certain(self, step: Step, width: int, work: Given, rows: Rows, covered: SlotRange) -> None:
        """The inputs of rows that certainly come next."""
        self._rows(step, width, rows, covered)
        host = step.host
        tokens = host["tokens"]
        if len(rows) < covered.count:
            tokens[:] = 0
        for slot, n in rows.items():
            at, ids = (slot - covered.first) * width, self._known(slot, work[slot])
            tokens[at : at + n] = ids
            if n < width:
                tokens[at + n : at + width] = ids[-1]  # padding rows are real tokens: NaN in one would leak through 0 * NaN
        if "out_row" in host:
            host["out_row"][:] = [(slot - covered.first) * width + rows.get(slot, 1) - 1 for slot in covered.slots]
        self._boundary_rows(host, rows, covered)
        if self._delta is not None:
            self._certain_states(host, width, rows, covered)
        if "ring_row" in host:
            assert self._ring is not None
            host["ring_row"][0] = self._ring.waiting

    def _certain_states(self, host: dict[str, np.ndarray], width: int, rows: Rows, covered: SlotRange) -> None:
        delta = self._delta
        assert delta is not None
        if "tail" in host:
            delta.fill_tail(host["tail"], covered)
            return
        real = np.array([rows.get(slot, 0) for slot in covered.slots])[:, None]
        host["on"].reshape(covered.count, width)[:] = self._iota[:width] < real
        host["last"].reshape(covered.count, -1)[:] = real + np.arange(delta.history_rows)
        if "take" in host:
            delta.fill_take(host["take"], width, covered, single=True)

    def block(self, step: Step, width: int, drafts: int, work: Given, rows: Rows, covered: SlotRange) -> None:
        """The inputs of blocks, given, or with so many drafts of each slot that are to be made."""
        self._rows(step, width, rows, covered)
        host = step.host
        known = host.get("given", host["tokens"])
        drafting = "draft_last" in host
        if not drafting or "given" in host:  # or else the drafter writes all but the first
            known[: width * covered.count] = 0
        for slot, item in work.items():
            at, ids = (slot - covered.first) * width, self._known(slot, item)
            known[at : at + len(ids)] = ids
        self._boundary_rows(host, rows, covered)
        if drafting:
            self._drafts(host, width, drafts, work, covered)
        if self._delta is not None:
            self._delta.fill_tail(host["tail"], covered)
            self._delta.fill_keep(host["keep"], covered)
            if "take" in host:
                self._delta.fill_take(host["take"], width, covered)

    def _known(self, slot: int, item: Work) -> Ids:
        """The ids of the work's rows that the host knows."""
        if isinstance(item, Prompt):
            return item.tokens
        pending = self._slots[slot].cursor.pending
        assert pending is not None
        return [pending] if isinstance(item, Draft) else [pending, *item.drafts]

    def _rows(self, step: Step, width: int, rows: Rows, covered: SlotRange) -> None:
        """Positions and cache rows. A slot without work looks at its first row, so that what it computes is finite, and writes trash."""
        host, kv = step.host, self._kv
        positions, kv_rows = host["positions"], host["kv_rows"]
        for at, slot in enumerate(covered.slots):
            real, part = rows.get(slot, 0), slice(at * width, (at + 1) * width)
            n = self._slots[slot].cursor.committed if real else 0
            if real:
                np.add(self._iota[:width], n, out=positions[part])
            else:
                positions[part] = 0
            kv.rows_for(n, width, real, kv_rows[part])
            if at:
                kv_rows[part] += at * (kv.live + kv.trash)
            if kv.ring:
                self._ring_rows(host, width, real, n, at, covered)
        host["q_last"][:] = host["positions"]
        if self._target.window:
            host["q_first"][:] = host["positions"]
            host["q_first"] -= self._target.window - 1

    def _ring_rows(self, host: dict[str, np.ndarray], width: int, real: int, n: int, at: int, covered: SlotRange) -> None:
        rows = host["sliding_rows"].reshape(covered.count, width)[at]
        near = host["sliding_near"].reshape(covered.count, -1)[at]
        self._kv.fill_ring(n, width, real, rows, near)
        rows += at * (self._kv.ring + self._kv.trash)
        if not real:
            near[:] = NOWHERE
            near[0] = 0.5

    def drafts(self, step: Step, width: int, drafting: Mapping[int, Draft], covered: SlotRange) -> None:
        """The inputs of blocks that are drafted alone."""
        assert self._drafting is not None
        host = step.host
        host["positions"][:] = 0
        for slot in drafting:
            at = (slot - covered.first) * width
            np.add(self._iota[:width], self._slots[slot].cursor.committed, out=host["positions"][at : at + width])
        if self._boundary is not None:
            host["before"][:] = [self._boundary.row(slot) for slot in covered.slots]
        self._drafting.fill(host, width, width - 1, drafting, covered, self._slots)

    def _drafts(self, host: dict[str, np.ndarray], width: int, drafts: int, work: Given, covered: SlotRange) -> None:
        """What the drafter reads, and which of its ids are whose."""
        assert self._drafting is not None
        self._drafting.fill(host, width, drafts, work, covered, self._slots)
        if "source" not in host:  # one slot, whose drafts are the target's ids in place
            return
        total = width * covered.count
        host["source"][:] = np.arange(total)
        for at, slot in enumerate(covered.slots):
            if isinstance(item := work.get(slot), Draft):
                first, real = at * width + 1, item.width - 1
                host["source"][first : first + real] = total + self._drafting.order(at, drafts, covered.count)[:real]

    def _boundary_rows(self, host: dict[str, np.ndarray], rows: Rows, covered: SlotRange) -> None:
        """Which hidden state each slot goes on from, and where those of this step go: of certain rows the last, of blocks the one before and all."""
        boundary = self._boundary
        if boundary is None or "boundary" not in host:
            return
        kept = host["boundary"].reshape(covered.count, -1)
        most = kept.shape[1]
        for at, slot in enumerate(covered.slots):
            host["before"][at] = boundary.row(slot)
            boundary.fill(slot, min(rows[slot] + 1, most) if slot in rows else 0, kept[at])
