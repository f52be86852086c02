"""What steps left to be done later: accepted rows of blocks are folded into the recurrent states, and the drafter catches up with plain tokens."""

import numpy as np

from ..errors import EngineError
from ..memory.features import RING
from ..memory.slots import SlotRange
from .parts import Parts


class Commits:
    """Runs the graphs ``commit`` and ``catchup`` over the parts of an engine."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._delta, self._ring = parts, parts.delta, parts.ring

    def before_rows(self, covered: SlotRange, plain: bool) -> None:
        """Rows that are certain, ``plain`` tokens or chunks, are about to be written into the states of these slots."""
        delta, ring = self._delta, self._ring
        if ring is not None and (not plain or ring.waiting == RING):
            self.catch_up()
        if delta is None:
            return
        if delta.inline:
            self.lay_out(int(plain))
        elif delta.is_behind(covered):
            self.flush(covered)

    def before_block(self, width: int) -> None:
        """Blocks of ``width`` rows are about to be computed."""
        self.catch_up()
        self.lay_out(width)

    def settle(self, slot: int | None = None) -> None:
        """Commits what is accepted in one slot, or in all: caches and recurrent states hold the whole sequences, whose lengths are final."""
        covered = self._parts.graphs.every if slot is None else SlotRange(slot, 1)
        self._parts.check_landed(covered)
        for index in covered.slots:
            if rows := self._parts.slots[index].open_rows:
                raise EngineError(f"the last block of {rows} rows in slot {index} is neither accepted nor given up: call accept first")
        self.catch_up()
        self.flush(covered)

    def flush(self, covered: SlotRange) -> None:
        """Folds what was accepted of last blocks into the recurrent states now; the next step would otherwise do it first.

        Open blocks stay open.
        """
        self._parts.check_landed(covered)
        if self._delta is not None and self._delta.is_behind(covered):
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
            self.settle()
        delta.lay_out(width)

    def _commit(self, covered: SlotRange, width_to: int) -> None:
        delta = self._delta
        assert delta is not None
        self._parts.arrive()
        replay = delta.unfolded or not delta.inline
        step = self._parts.graphs.get("commit", delta.width, 0, covered, width_to, replay)
        delta.fill_commit(step.fields.at, covered)
        step.fields.run()
        delta.accepted[covered.part] = 0

    def catch_up(self) -> None:
        """Computes the drafter's K/V rows of the tokens that were decoded plainly since it last had any (one slot)."""
        ring, draft_kv = self._ring, self._parts.draft_kv
        if ring is None or not ring.waiting:
            return
        assert draft_kv is not None
        self._parts.arrive()
        step, count = self._parts.graphs.get("catchup", RING, 0), ring.waiting
        first = self._parts.slots[0].cursor.committed - count
        step.host["positions"][:] = first + np.arange(RING)
        draft_kv.rows_for(first, RING, count, step.host["kv_rows"])
        step.fields.run()
        ring.waiting = 0
