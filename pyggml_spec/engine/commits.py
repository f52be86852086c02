"""What steps left to be done later: accepted rows of blocks are folded into the recurrent states, and the drafter catches up with plain tokens."""

import time
from collections.abc import Collection, Mapping

import numpy as np

from ..cache.slots import SlotRange, covering
from ..errors import EngineError
from .resources import Resources


class Commits:
    """Runs the graphs ``commit`` and ``catchup`` over the parts of an engine."""

    def __init__(self, parts: Resources) -> None:
        self._parts, self._delta, self._ring = parts, parts.delta, parts.ring
        self.catch_ups = self.catch_up_us = 0  # graphs that caught up so far, and microseconds of them

    def before_rows(self, slots: Collection[int], covered: SlotRange, plain: bool) -> None:
        """Rows of these ``slots`` that are certain, ``plain`` tokens or chunks, are about to be written into the states."""
        delta = self._delta
        self._make_room(1, slots) if plain else self.catch_up(slots)
        if delta is None:
            return
        if delta.inline:
            self.lay_out(int(plain))
        elif delta.needs_commit(covered):
            self.flush(covered)

    def before_block(self, width: int, slots: Collection[int], method: str, late: bool) -> None:
        """Blocks of ``width`` rows of these ``slots`` are about to be computed, drafted by ``method`` if that is not empty; ``late``: other
        drafters' rows wait."""
        if late:
            self._make_room(width, slots)
            if method:
                self.catch_up(slots, method)
        else:
            self.catch_up(slots)
        self.lay_out(width)

    def _make_room(self, rows: int, slots: Collection[int]) -> None:
        """For what drafters will read of so many rows; who shares steps shares graphs that catch up, too."""
        ring = self._ring
        if ring is None:
            return
        for slot in slots:
            if not ring.has_room(self._parts.slots[slot].cursor.committed, rows, slot):
                break
        else:  # most steps
            return
        for method in ring.methods:
            while max(waiting := [self._waiting(method, slot) for slot in slots], default=0) > max(ring.most - rows, 0):
                if min(waiting) >= ring.batch + ring.width:  # the last block's rows stay: it may be rolled back
                    self._parts.synchronize()
                    self._catch_up(method, dict.fromkeys(slots, ring.batch))
                else:
                    self.catch_up(slots, method)

    def _waiting(self, method: str, slot: int) -> int:
        assert self._ring is not None
        return self._ring.missing(method, self._parts.slots[slot].cursor.committed, slot)

    def settle(self, slot: int | None = None) -> None:
        """Commits what is accepted in one slot, or in all: caches and recurrent states hold the whole sequences, whose lengths are final."""
        covered = self._parts.graphs.every if slot is None else SlotRange(slot, 1)
        self._parts.check_landed(covered)
        self._check_accepted(covered)
        self.catch_up(covered.slots)
        self.flush(covered)

    def _check_accepted(self, covered: SlotRange) -> None:
        for index in covered.slots:
            if rows := self._parts.slots[index].open_rows:
                raise EngineError(f"the last block of {rows} rows in slot {index} is neither accepted nor given up: call accept first")

    def flush(self, covered: SlotRange) -> None:
        """Folds what was accepted of last blocks into the recurrent states now; the next step would otherwise do it first.

        Open blocks stay open.
        """
        self._parts.check_landed(covered)
        if self._delta is not None and self._delta.needs_commit(covered):
            self.lay_out(0) if self._delta.inline else self._commit(covered, self._delta.width)
        for s in self._parts.slots[covered.part]:
            if not s.open_rows:
                s.folded()

    def lay_out(self, width: int) -> None:
        """Makes the recurrent states ready for blocks of ``width`` rows (one slot: also 0 for prompts, 1 for plain tokens)."""
        delta = self._delta
        if delta is None or delta.width == width:
            return
        if delta.inline:
            self._commit(self._parts.graphs.every, width)
        else:
            self._check_accepted(self._parts.graphs.every)
            self.flush(self._parts.graphs.every)
        delta.lay_out(width)

    def _commit(self, covered: SlotRange, width_to: int) -> None:
        delta = self._delta
        assert delta is not None
        self._parts.synchronize()
        replay = delta.uncommitted or not delta.inline
        step = self._parts.graphs.get("commit", delta.width, 0, covered, width_to, replay)
        delta.fill_commit(step.fields.at, covered)
        step.fields.run()
        delta.accepted[covered.part] = 0

    def catch_up(self, slots: Collection[int], *methods: str) -> None:
        """Computes the K/V rows of these slots that drafters lack, all of them or those of these ``methods``, and what their next draft of a chain
        begins with."""
        ring = self._ring
        if ring is None:
            return
        for method in methods or ring.methods:
            while counts := {slot: min(ring.batch, n) for slot in slots if (n := self._waiting(method, slot))}:
                self._parts.synchronize()
                self._catch_up(method, counts)
            for slot in slots:
                ring.set_complete(method, slot)

    def _catch_up(self, method: str, counts: Mapping[int, int]) -> None:
        """The first rows of each of these slots that wait, at most a batch."""
        p, ring, began = self._parts, self._ring, time.perf_counter_ns()
        assert p.draft_kv is not None and ring is not None
        covered = covering(counts, len(p.slots))
        width = next(w for w in ring.catch_ups if max(counts.values()) <= w)
        step = p.graphs.catching_up(method, width, covered)
        host = step.host
        for i, slot in enumerate(covered.slots):
            own, count = slice(i * width, (i + 1) * width), counts.get(slot, 0)
            first = p.slots[slot].cursor.committed - self._waiting(method, slot)
            at = ring.at(first, width, slot).copy()
            at[count:] = at[max(count - 1, 0)]  # rows of trash are computed of real ones: NaN among what was left there would stay
            host["ring_at"][own] = at
            host["positions"][own] = first + np.arange(width)
            p.draft_kv.rows_for(first, width, count, host["kv_rows"][own])
            host["kv_rows"][own] += i * (p.draft_kv.live + p.draft_kv.trash)
            if "last_hidden" in host:
                assert p.last_hidden is not None
                host["ring_tokens"][own], host["last"][i] = ring.tokens[at], own.start + max(count - 1, 0)
                host["before"][i] = p.last_hidden.row(slot)
                p.last_hidden.fill(slot, min(count, 1), host["last_hidden"][i : i + 1])
        if "draft_context" in host:
            np.maximum(host["positions"] - 1, 0, out=host["draft_context"])
        step.fields.run()
        for slot, count in counts.items():
            if "last_hidden" in host and p.last_hidden is not None:
                p.last_hidden.at[slot] = 0
            ring.filled(method, count, slot)
        self.catch_ups += 1
        self.catch_up_us += (time.perf_counter_ns() - began) // 1000
