"""The life of a slot's sequence beside its steps: admitted and released, moved within its last block, copied and brought back."""

import numpy as np

from ..cache.slots import SlotRange
from ..cache.snapshot import Snapshot
from ..checks import token_ids, whole
from ..errors import ContextError, DeviceError, EngineError
from .batch import BatchItem, Draft, Ids, Prefill, Verify
from .commits import Commits
from .options import MOST_SLOTS, MOST_WIDTH
from .resources import Resources
from .slot import Slot

_IMPOSSIBLE = "a block of {} rows is impossible here: 2 to {} were planned for at load"


class Sequences:
    """The slots of an engine. What callers hand in is checked here."""

    def __init__(self, parts: Resources, commits: Commits) -> None:
        self._parts, self._commits = parts, commits
        self._slots, self._delta, self._flying = parts.slots, parts.delta, parts.flying
        self._only = (
            len(parts.slots) == 1
        )  # which need not be admitted, and whose rows may stay: only what is below its cursor is ever read

    def of(self, slot: int) -> Slot:
        """The admitted slot of this number.

        Raises:
            EngineError: there is none.
        """
        if type(slot) is not int or not 0 <= slot < len(self._slots):
            slot = self.number(slot)
        s = self._slots[slot]
        if self._flying and slot in self._flying:
            raise EngineError(f"the step of slot {slot} is still under way: land its group first")
        if not s.used:
            if not self._only:
                raise EngineError(f"slot {slot} has no sequence: admit one first")
            self._parts.check_open()
            self._begin(slot, True)
        return s

    def number(self, slot: int) -> int:
        """``slot``, admitted or not.

        Raises:
            EngineError: there is none of this number.
        """
        slot = whole(slot, "the slot", 0, MOST_SLOTS)
        if slot >= len(self._slots):
            raise EngineError(f"slot {slot} has no sequence: there are {len(self._slots)} slots")
        return slot

    def token(self, token: int) -> int:
        return whole(token, "the last token", 0, self._parts.target.n_vocab - 1)

    # -- what can be asked of them

    def rows_of(self, slot: int, item: BatchItem) -> int:
        """Rows that the work takes, at least 1.

        Raises:
            ContextError: a prompt that is empty, does not fit the context or has ids outside the vocabulary.
            EngineError: what the slot cannot do now, or a width that was not planned for.
        """
        s, options = self.of(slot), self._parts.options
        if s.open_rows:
            raise EngineError(f"slot {slot} has a block of {s.open_rows} rows that nothing was accepted of: call accept or rollback first")
        if isinstance(item, Prefill):
            ids = self._fitting(s, item.tokens)
            if ids.size > options.chunk:
                raise EngineError(f"a prompt of {ids.size} tokens in one step: the widest chunk is {options.chunk}")
            return ids.size
        if not isinstance(item, (Verify, Draft)):
            raise EngineError(f"the work of slot {slot} is {item!r}: use Prefill, Verify or Draft")
        if s.cursor.last_token is None:
            raise EngineError(f"slot {slot} has no last token: prefill a prompt first")
        if s.cursor.room < 1:
            raise ContextError(f"the context of {s.cursor.n_ctx} tokens is full; raise `n_ctx`")
        if isinstance(item, Draft):
            return self._rows_drafted(slot, item)
        if not len(item.drafts):
            return 1
        width = 1 + token_ids(item.drafts, self._parts.target.n_vocab, "the block of drafts").size
        if width > options.width:
            raise EngineError(_IMPOSSIBLE.format(width, options.width))
        return width

    def _rows_drafted(self, slot: int, item: Draft) -> int:
        options, width = self._parts.options, whole(item.width, "the width of the block", 0, MOST_WIDTH)
        if not 2 <= width <= options.width:
            raise EngineError(_IMPOSSIBLE.format(width, options.width))
        if not self._slots[slot].drafting:
            why = "there is no drafter" if self._parts.drafter is None else f"the sequence in slot {slot} was started without drafting"
            raise EngineError(f"{why}: use Verify or a plain step")
        if (most := self._parts.widest(item.drafter)) < width:
            raise EngineError(f"a block of {width} rows is wider than the {most} that {self._parts.graphs.method_of(item.drafter)} drafts")
        if item.verified:
            whole(item.verified, "the number of verified rows", width, options.width)
        return width

    def _fitting(self, s: Slot, tokens: Ids) -> np.ndarray:
        """``tokens`` as I64 [T], if they are ids of the vocabulary that fit behind what is there."""
        ids = token_ids(tokens, self._parts.target.n_vocab)
        s.cursor.check_fits(ids.size)
        return ids

    def next_tokens(self, tokens: Ids, slot: int) -> np.ndarray:
        """``tokens`` as I64 [T], if they can come next; nothing of an open block counts then."""
        ids = self._fitting(self.of(slot), tokens)
        self._parts.check_open()
        self.give_up(slot)
        return ids

    # -- from the first step to the last

    def free(self) -> int | None:
        """The lowest slot that can be admitted."""
        return next((index for index, slot in enumerate(self._slots) if not slot.used), None)

    def begin(self, slot: int, drafting: bool) -> None:
        """Forgets the slot's sequence, if it has one, and begins another."""
        if self._slots[slot].used:
            self.release(slot)
        self._begin(slot, drafting)

    def _begin(self, index: int, drafting: bool) -> None:
        s, p = self._slots[index], self._parts
        p.synchronize()
        self._clean(index)
        if self._delta is not None and self._delta.inline:  # whatever stays of the rows
            self._delta.fill_slot(index, 0)
        if p.ring is not None:
            p.ring.reset(index)
        if p.last_hidden is not None:
            p.last_hidden.reset(index)
        s.cursor.reset()
        s.folded()
        s.used, s.sound, s.drafting = True, True, drafting and p.drafter is not None
        p.epoch += 1

    def release(self, slot: int) -> None:
        """Ends the sequence. Its memory is cleared before any step of another slot looks at it."""
        s = self.of(slot)
        s.used, s.clean = False, s.clean and self._only
        if self._parts.ring is not None:
            self._parts.ring.reset(slot)
        s.cursor.reset()
        s.folded()
        if self._delta is not None:
            self._delta.accepted[slot] = 0

    def clean_unused(self, covered: SlotRange) -> None:
        """No step looks at what sequences of these slots left that have ended."""
        for index in covered.slots:
            if not self._slots[index].used:
                self._clean(index)

    def _clean(self, index: int) -> None:
        """Writes zeros over what the sequence before left: it may be NaN, which neither masks nor switched-off rows stop."""
        s, p = self._slots[index], self._parts
        if s.clean:
            return
        p.synchronize()
        rows = s.cursor.max_committed + max(p.options.chunk, p.options.width)
        for cache in (p.kv, p.draft_kv):
            if cache is not None:
                cache.fill_slot(index, 0, rows)
        s.cursor.max_committed = s.cursor.committed
        if p.ring is not None:
            p.ring.clear(index)
        if self._delta is not None and not self._delta.inline:
            self._delta.fill_slot(index, 0)
        if p.guests is not None:
            p.guests.clear(index)
        s.clean = True

    # -- within the last block

    def accept(self, rows: int, last_token: int, slot: int) -> None:
        s = self.of(slot)
        last_token = self.token(last_token)
        if not 1 <= whole(rows, "the number of accepted rows", 0, self._parts.options.width) <= s.open_rows:
            raise EngineError(f"{rows} rows cannot be accepted of a block of {s.open_rows} in slot {slot}: run a step first")
        if s.tokens.size:
            if s.base + rows > s.cursor.n_ctx:
                raise ContextError(
                    f"{rows} rows cannot be accepted in slot {slot}: the context holds {s.cursor.n_ctx} and {s.base} are in it; accept fewer"
                )
            self.move(slot, s.base + rows, last_token)
        else:  # a plain token is in the recurrent state already
            s.cursor.advance(0, last_token)
            s.open_rows = 0

    def choose(self, last_token: int, slot: int) -> None:
        s = self.of(slot)
        if s.open_rows:
            raise EngineError(f"slot {slot} has an open block: accept says which token comes after it")
        s.cursor.advance(0, self.token(last_token))

    def rollback_range(self, slot: int) -> tuple[int, int]:
        s = self.of(slot)
        return s.base, s.base + s.tokens.size

    def rollback(self, n: int, slot: int) -> None:
        s = self.of(slot)
        low, high = self.rollback_range(slot)
        if not low <= whole(n, "the length of the sequence", 0, self._parts.options.n_ctx) <= high:
            raise EngineError(f"slot {slot} cannot be rolled back to {n} tokens: its last block holds the lengths {low} to {high}")
        if s.tokens.size:
            self.move(slot, n, int(s.tokens[n - low] if n < high else s.ids[-1]))

    def move(self, slot: int, committed: int, last_token: int) -> None:
        """Rows of the last block count up to ``committed``."""
        s = self._slots[slot]
        s.cursor.place(committed, last_token)
        s.open_rows = 0
        if self._delta is not None:
            self._delta.accepted[slot] = committed - s.base
        if self._parts.last_hidden is not None and not self._parts.chain_waits(slot):
            self._parts.last_hidden.at[slot] = committed - s.base

    def give_up(self, slot: int) -> None:
        """Nothing of an open block counts."""
        s = self.of(slot)
        if s.open_rows:
            s.folded()

    # -- copies

    def snapshot(self, slot: int, engine: object) -> Snapshot:
        """A copy of the slot's sequence, for ``engine``."""
        p, s = self._parts, self.of(slot)
        self._commits.settle(slot)
        n = s.cursor.committed
        with p.sequence.whole(n, s.drafting, slot) as pieces:
            copy = pieces.copy()
        if copy is None:
            name = p.backend.device.name
            raise DeviceError(f"no memory on {name} for a snapshot of {n} tokens; close another one or use a smaller `n_ctx`")
        return Snapshot(copy, n, s.cursor.last_token, s.drafting, s.sound, engine)

    def restore(self, snapshot: Snapshot, slot: int, engine: object) -> None:
        p, s = self._parts, self.of(slot)
        if not isinstance(snapshot, Snapshot) or snapshot.engine is not engine or snapshot.pieces.closed:
            raise EngineError("this is no open snapshot of this engine: take one with snapshot()")
        if self._only or not s.clean:  # NaN that the sequence before left lies behind what is written, too
            self.begin(slot, snapshot.drafting)
        p.epoch += 1
        with p.sequence.whole(snapshot.committed, snapshot.drafting, slot) as pieces:
            snapshot.pieces.write_to(pieces)
        if p.ring is not None:
            p.ring.reset(slot)
        s.cursor.reset()
        s.drafting, s.sound = snapshot.drafting, snapshot.sound
        s.clean = s.clean and s.sound
        self.resume(snapshot.committed, snapshot.last_token, slot)

    def resume(self, committed: int, last_token: int | None, slot: int) -> None:
        s, last_token = self.of(slot), None if last_token is None else self.token(last_token)
        n = whole(committed, "the length of the sequence", s.cursor.committed, self._parts.options.n_ctx)
        s.cursor.advance(n - s.cursor.committed, last_token)
        s.folded()
        if self._delta is not None:
            self._delta.accepted[slot] = 0
