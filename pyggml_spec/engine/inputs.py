"""What the inputs of a step are: positions, cache rows, ids, and which rows are switched off."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..cache.slots import SlotRange
from ..ggml.library import ffi, lib
from .batch import BatchItem, Draft, Prefill, Verify
from .drafting import Asked
from .graph_cache import Step
from .graphs import StepGraphs
from .resources import Resources

Given = Mapping[int, BatchItem]
Rows = Mapping[int, int]


class InputBuilder:
    """Writes the host's side of a step's fields, for the slots that it covers: ``width`` rows each, of which ``rows`` says how many count."""

    def __init__(self, parts: Resources, graphs: StepGraphs) -> None:
        self._slots, self._target = parts.slots, parts.target
        self._kv, self._delta, self._ring, self._last_hidden = parts.kv, parts.delta, parts.ring, parts.last_hidden
        self._drafting, self._only = graphs.draft_parts, len(parts.slots) == 1
        self._committed, self._real = (ffi.new("int64_t[]", len(parts.slots)) for _ in range(2))

    def certain(self, step: Step, width: int, work: Given, rows: Rows, covered: SlotRange) -> None:
        """The inputs of rows that certainly come next."""
        self._rows(step, width, rows, covered)
        host, tokens = step.host, step.host["tokens"]
        if len(rows) < covered.count:
            tokens[:] = 0
        for slot, n in rows.items():
            first, item = (slot - covered.first) * width, work[slot]
            if isinstance(item, Prefill):
                tokens[first : first + n] = item.tokens
                tokens[first + n : first + width] = item.tokens[-1]  # padding rows are real tokens: NaN in one would leak through 0 * NaN
            else:
                tokens[first : first + width] = self._slots[slot].cursor.last_token
        if self._last_hidden is not None:
            self._last_hidden_rows(host, rows, covered)
        if "tail" in host:
            self._commit(step, covered)
        if "take" in host:
            assert self._delta is not None
            self._delta.fill_take(host["take"], width, covered, single=True)
        self._ring_rows(host, width, rows, covered)

    def block(self, step: Step, width: int, method: str, drafts: int, work: Given, rows: Rows, covered: SlotRange) -> None:
        """The inputs of blocks, given, or with so many drafts of each slot that ``method`` is to make."""
        self._rows(step, width, rows, covered)
        host = step.host
        known = host.get("given", host["tokens"])
        drafting = "draft_last" in host
        if not drafting or "given" in host:  # or else the drafter writes all but the first
            known[: width * covered.count] = 0
        for slot, item in work.items():
            first = (slot - covered.first) * width
            if isinstance(item, Prefill):
                known[first : first + len(item.tokens)] = item.tokens
                continue
            known[first] = self._slots[slot].cursor.last_token
            if isinstance(item, Verify) and len(item.drafts):
                known[first + 1 : first + 1 + len(item.drafts)] = item.drafts
        if self._last_hidden is not None:
            self._last_hidden_rows(host, rows, covered)
        if drafting:
            self._drafts(host, width, method, drafts, work, covered)
        if self._delta is not None:
            self._commit(step, covered)
            if "take" in host:
                self._delta.fill_take(host["take"], width, covered)
        self._ring_rows(host, width, rows, covered)

    def _ring_rows(self, host: dict[str, np.ndarray], width: int, rows: Rows, covered: SlotRange) -> None:
        """Where what drafters will read goes."""
        if "ring_rows" not in host:
            return
        assert self._ring is not None
        if self._only:
            host["ring_rows"][:] = self._ring.at(self._slots[0].cursor.committed, width)
            return
        at = host["ring_rows"]
        at[:] = self._ring.trash
        for slot, n in rows.items():
            if (s := self._slots[slot]).drafting:
                first = (slot - covered.first) * width
                at[first : first + n] = self._ring.at(s.cursor.committed, n, slot)

    def _commit(self, step: Step, covered: SlotRange) -> None:
        """What of the blocks before is folded into the states first."""
        assert self._delta is not None
        self._delta.fill_commit(step.fields.at, covered)

    def _rows(self, step: Step, width: int, rows: Rows, covered: SlotRange) -> None:
        """Positions, cache rows and what is switched off. A slot without work looks at its first row, and writes trash."""
        for at, slot in enumerate(covered.slots):
            self._committed[at], self._real[at] = self._slots[slot].cursor.committed, rows.get(slot, 0)
        if step.rows is None:
            step.rows = self._pointers(step, width, covered.count)
        lib.pgs_fill_rows(step.rows, self._committed, self._real)

    def _pointers(self, step: Step, width: int, count: int) -> Any:
        """What C fills in of a graph's fields."""
        kv, near = self._kv, step.host.get("sliding_near")
        sizes = {"width": width, "count": count, "live": kv.live, "ring": kv.ring, "trash": kv.trash, "window": self._target.window}
        sizes |= {
            "near": near.size // count if near is not None else 0,
            "history": self._delta.history_rows if self._delta is not None else 0,
        }
        names = ("positions", "kv_rows", "q_last", "q_first", "sliding_rows", "sliding_near", "on", "last", "out_row")
        return ffi.new("pgs_rows *", sizes | {name: step.fields.at[name] for name in names if name in step.fields.at})

    def drafts(self, step: Step, width: int, method: str, drafting: Mapping[int, Draft], covered: SlotRange) -> None:
        """The inputs of blocks that ``method`` drafts alone."""
        host = step.host
        host["positions"][:] = 0
        for slot in drafting:
            at = (slot - covered.first) * width
            host["positions"][at : at + width] = self._slots[slot].cursor.committed + np.arange(width)
        if self._last_hidden is not None and "before" in host:
            host["before"][:] = [self._last_hidden.row(slot) for slot in covered.slots]
        self._drafting[method].fill(host, Asked(width, width - 1, covered), drafting, self._slots)

    def _drafts(self, host: dict[str, np.ndarray], width: int, method: str, drafts: int, work: Given, covered: SlotRange) -> None:
        """What the drafter reads, and which of its ids are whose."""
        drafting = self._drafting[method]
        drafting.fill(host, Asked(width, drafts, covered), work, self._slots)
        if "source" not in host:  # one slot, whose drafts are the target's ids in place
            return
        total = width * covered.count
        host["source"][:] = np.arange(total)
        for at, slot in enumerate(covered.slots):
            if isinstance(item := work.get(slot), Draft):
                first, real = at * width + 1, item.width - 1
                host["source"][first : first + real] = total + drafting.order(at, drafts, covered.count)[:real]

    def _last_hidden_rows(self, host: dict[str, np.ndarray], rows: Rows, covered: SlotRange) -> None:
        """Which hidden state each slot goes on from, and where those of this step go: of certain rows the last, of blocks the one before and all."""
        last_hidden = self._last_hidden
        if last_hidden is None or "last_hidden" not in host:
            return
        if "draft_context" in host:  # the first token's is nobody's, and has to be a position all the same
            np.maximum(host["positions"] - 1, 0, out=host["draft_context"])
        kept = host["last_hidden"].reshape(covered.count, -1)
        most = kept.shape[1]
        for at, slot in enumerate(covered.slots):
            host["before"][at] = last_hidden.row(slot)
            last_hidden.fill(slot, min(rows[slot] + 1, most) if slot in rows else 0, kept[at])
