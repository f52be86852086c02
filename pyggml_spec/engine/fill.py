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
        self._target, self._drafter = parts.target, parts.drafter
        self._kv, self._draft_kv, self._delta, self._ring = parts.kv, parts.draft_kv, parts.delta, parts.ring
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

    def block(self, step: Step, width: int, work: Given, rows: Rows, covered: SlotRange) -> None:
        """The inputs of blocks, given or to be drafted."""
        self._rows(step, width, rows, covered)
        host = step.host
        known = host.get("given", host["tokens"])
        if "block" not in host or "given" in host:  # or else the drafter writes all but the first
            known[: width * covered.count] = 0
        for slot, item in work.items():
            at, ids = (slot - covered.first) * width, self._known(slot, item)
            known[at : at + len(ids)] = ids
        if "block" in host:
            self._drafts(host, width, work, covered)
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
        host = step.host
        host["positions"][:] = 0
        for slot in drafting:
            at = (slot - covered.first) * width
            np.add(self._iota[:width], self._slots[slot].cursor.committed, out=host["positions"][at : at + width])
        self._blocks(host, width, drafting, covered)
        self._draft_rows(host, width, drafting, covered)

    def _drafts(self, host: dict[str, np.ndarray], width: int, work: Given, covered: SlotRange) -> None:
        """What the drafter reads. Where its rows are the target's (one slot), and its drafts the target's ids in place, there is less to say."""
        drafting = {slot: item for slot, item in work.items() if isinstance(item, Draft)}
        self._blocks(host, width, drafting, covered)
        if "source" not in host:
            return
        self._draft_rows(host, width, drafting, covered)
        total = width * covered.count
        host["source"][:] = np.arange(total)
        for slot, item in drafting.items():
            at, real = slot - covered.first, item.width
            host["source"][at * width + 1 : at * width + real] = total + at * (width - 1) + self._iota[: real - 1]

    def _blocks(self, host: dict[str, np.ndarray], width: int, drafting: Mapping[int, Draft], covered: SlotRange) -> None:
        """What blocks are made of, and which rows they see."""
        assert self._drafter is not None
        host["block"][:] = self._drafter.hp.mask_token
        for window in set(self._drafter.hp.window) - {0}:
            host[f"draft_first_{window}"][:] = host["positions"] - window + 1
        if len(drafting) < covered.count:
            host["draft_last"][:] = 0
        for slot, item in drafting.items():
            first, n, real, last = (slot - covered.first) * width, self._slots[slot].cursor.committed, item.width, host["draft_last"]
            host["block"][first] = self._slots[slot].cursor.pending
            if item.masks is not None:
                host["block"][first + 1 : first + real] = item.masks
            last[first : first + real] = self._drafter.last_seen(n, real)
            last[first + real : first + width] = n + real - 1

    def _draft_rows(self, host: dict[str, np.ndarray], width: int, drafting: Mapping[int, Draft], covered: SlotRange) -> None:
        """Where the drafter writes."""
        assert self._draft_kv is not None
        for at, slot in enumerate(covered.slots):
            rows, real = host["draft_rows"][at * width : (at + 1) * width], drafting[slot].width if slot in drafting else 0
            self._draft_kv.rows_for(self._slots[slot].cursor.committed, width, real, rows)
            rows += at * (self._draft_kv.live + self._draft_kv.trash)
