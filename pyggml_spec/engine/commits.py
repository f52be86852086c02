"""What steps left to be done later: accepted rows of blocks are folded into the recurrent states, and the drafter catches up with plain tokens."""

import numpy as np

from ..errors import EngineError
from ..memory.features import CATCH_UPS, RING
from ..memory.slots import SlotRange
from .parts import Parts


class Commits:
    """Runs the graphs ``commit`` and ``catchup`` over the parts of an engine."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._delta, self._ring = parts, parts.delta, parts.ring
        self.catch_ups = 0  # graphs that caught up so far

    def before_rows(self, covered: SlotRange, plain: bool) -> None:
        """Rows that are certain, ``plain`` tokens or chunks, are about to be written into the states of these slots."""
        delta = self._delta
        self._make_room(1) if plain else self.catch_up()
        if delta is None:
            return
        if delta.inline:
            self.lay_out(int(plain))
        elif delta.is_behind(covered):
            self.flush(covered)

    def before_block(self, width: int, method: str, late: bool) -> None:
        """Blocks of ``width`` rows are about to be computed, drafted by ``method`` if that is not empty; ``late``: other drafters' rows wait."""
        if late:
            self._make_room(width)
            if method:
                self.catch_up(method)
        else:
            self.catch_up()
        self.lay_out(width)

    def _make_room(self, rows: int) -> None:
        """For what drafters will read of so many rows."""
        ring = self._ring
        for method in ring.methods if ring is not None else ():
            assert ring is not None
            if RING - rows < ring.waiting(method, self._committed) > 0:
                self.catch_up(method)

    @property
    def _committed(self) -> int:
        return self._parts.slots[0].cursor.committed

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

    def catch_up(self, *methods: str) -> None:
        """Computes the K/V rows that drafters lack, all of them or those of these ``methods``, and what the next draft of a chain begins with (one slot)."""
        ring = self._ring
        for method in methods or (ring.methods if ring is not None else ()):
            if ring is None:
                return
            if count := ring.waiting(method, self._committed):
                self._parts.arrive()
                first = self._committed - count
                for done in range(0, count, RING):
                    self._catch_up(method, first + done, min(RING, count - done))
            ring.caught_up(method)

    def _catch_up(self, method: str, first: int, count: int) -> None:
        p, ring = self._parts, self._ring
        assert p.draft_kv is not None and ring is not None
        width = next(w for w in CATCH_UPS if count <= w)
        step = p.graphs.get(p.graphs.role("catchup", method), width, 0)
        host, at = step.host, ring.at(first, width)
        at[count:] = at[count - 1]  # rows of trash are computed of real ones: NaN among what was left there would stay
        host["ring_at"][:] = at
        host["positions"][:] = first + np.arange(width)
        p.draft_kv.rows_for(first, width, count, host["kv_rows"])
        if "boundary" in host:
            assert p.boundary is not None
            host["ring_tokens"][:], host["last"][0] = ring.tokens[at], count - 1
            host["before"][0] = p.boundary.row(0)
            p.boundary.fill(0, 1, host["boundary"])
            p.boundary.at[0] = 0
            if "draft_context" in host:
                np.maximum(host["positions"] - 1, 0, out=host["draft_context"])
        step.fields.run()
        self.catch_ups += 1
