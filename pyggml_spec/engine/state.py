"""What every slot's sequence has left in caches and recurrent states: begun, moved within its last block, committed, copied.

Two kinds of work are left to later steps: accepted rows of blocks are replayed into the recurrent states (graphs of kind commit), and drafters
compute K/V rows from the hidden-state buffer in batches (kind catchup).
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ..cache.slots import Slot, SlotRange, covering
from ..cache.snapshot import Snapshot
from ..checks import token_ids, whole
from ..errors import ContextError, DeviceError, EngineError
from .batch import Batch, BatchItem, Draft, Ids, Prefill, Verify
from .drafting import apply_lag, fill_lagging, fill_near
from .graphs import StepGraphs, catch_up_key, commit_key
from .options import MOST_SLOTS, MOST_WIDTH
from .prompt import pictures_of
from .resources import Resources

_OPEN = "slot {} has a block of {} rows that nothing was accepted of: call accept or rollback first"
_IMPOSSIBLE = "a block of {} rows is impossible here: 2 to {} were planned for at load"


class StateManager:
    """The slots of a runner. Checks what callers hand in.

    Attributes:
        catch_ups, catch_up_us: graphs that caught up so far, and their microseconds, without building them.
        version: grows when slots begin or end sequences, or are read otherwise: batches have to be checked again.
    """

    def __init__(self, resources: Resources, graphs: StepGraphs) -> None:
        self._resources, self._graphs = resources, graphs
        self._slots, self._recurrent, self._hidden_states, self._devices = (
            resources.slots,
            resources.recurrent,
            resources.hidden_states,
            resources.devices,
        )
        self._alone = len(resources.slots) == 1  # the only slot need not be admitted; rows beyond its cursor are never read
        self.catch_ups = self.catch_up_us = self.version = 0

    def slot(self, slot: int) -> Slot:
        """The admitted slot of this number.

        Raises:
            EngineError: there is none, or its step is in flight.
        """
        if type(slot) is not int or not 0 <= slot < len(self._slots):
            slot = self.number(slot)
        s = self._slots[slot]
        if slot in self._devices.flying:
            raise EngineError(f"the step of slot {slot} is still under way: land its group first")
        if not s.used:
            if not self._alone:
                raise EngineError(f"slot {slot} has no sequence: admit one first")
            self.check_open()
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

    def check_open(self) -> None:
        if self._graphs.closed:
            raise EngineError("the session is closed: load the model again")

    # -- what a step may do

    def check(self, batch: Batch) -> None:
        """Checks the items, and fills in which rows and slots the step covers.

        Raises:
            ContextError: a prompt that is empty, does not fit the context or has ids outside the vocabulary.
            EngineError: what a slot cannot do now, or a width that was not planned for.
        """
        self.check_open()
        items, slots = batch.items, self._slots
        if not (type(items) is dict or isinstance(items, Mapping)) or not items:
            raise EngineError("a step needs work for at least one slot, as {slot: Prefill(...), Verify(...) or Draft(...)}")
        batch.computed, batch.proposed, batch.drafted = items, {}, {}
        batch.rows = {slot: self._rows_of(slot, item) for slot, item in items.items()}
        self._graphs.sampling_of(batch, [slots[slot] for slot in items])
        batch.slots = covering(items, len(slots))
        batch.pictures = any(isinstance(item, Prefill) and item.pictures is not None for item in items.values())
        if batch.pictures and len(items) > 1:
            raise EngineError("a step with rows of a picture computes one slot alone")
        if batch.slots.count > len(items):
            for index in batch.slots.slots:  # what ended sequences left
                if not slots[index].used:
                    self._clean(index)
        batch.context = max([s.cursor.committed for s in slots[batch.slots.part]])

    def _rows_of(self, slot: int, item: BatchItem) -> int:
        """Rows that the item takes, at least 1."""
        s, options = self.slot(slot), self._resources.options
        if isinstance(item, Prefill):
            if s.open_rows:
                raise EngineError(_OPEN.format(slot, s.open_rows))
            if item.pictures is not None and not self._resources.pictures:
                raise EngineError("this engine computes no pictures: load the model with `mmproj`")
            ids = self._fitting(s, item.tokens, item.pictures is not None)
            if ids.size > options.chunk:
                raise EngineError(f"a prompt of {ids.size} tokens in one step: the widest chunk is {options.chunk}")
            return ids.size
        if not isinstance(item, (Verify, Draft)):
            raise EngineError(f"the work of slot {slot} is {item!r}: use Prefill, Verify or Draft")
        self._check_decodes(slot, s)
        if isinstance(item, Draft):
            return self._rows_drafted(slot, item)
        if not len(item.drafts):
            return 1
        width = 1 + token_ids(item.drafts, self._resources.target.n_vocab, "the block of drafts").size
        if width > options.width:
            raise EngineError(_IMPOSSIBLE.format(width, options.width))
        return width

    def _check_decodes(self, slot: int, s: Slot) -> None:
        if s.open_rows:
            raise EngineError(_OPEN.format(slot, s.open_rows))
        if s.cursor.last_token is None:
            raise EngineError(f"slot {slot} has no last token: prefill a prompt first")
        if s.cursor.room < 1:
            raise ContextError(f"the context of {s.cursor.n_ctx} tokens is full; raise `n_ctx`")

    def begin(self, batch: Batch) -> None:
        """Before the step of a checked batch: computes what its slots lack in caches and recurrent states.

        Raises:
            ContextError, EngineError: as of ``check``.
        """
        slots, rows, buffer, recurrent, context = self._slots, batch.rows, self._hidden_states, self._recurrent, 0
        for slot in rows:
            s = slots[slot]
            n = s.cursor.committed
            if s.open_rows or n >= s.cursor.n_ctx:
                self._check_decodes(slot, s)
            context = max(context, n)
        if len(rows) < batch.slots.count:
            context = max([s.cursor.committed for s in slots[batch.slots.part]])
            if batch.is_block:
                self.check_covered(batch)
        batch.context = context
        if buffer is not None and buffer.lacking:
            self._serve_drafters(batch)
        if recurrent is None:
            return
        if batch.is_block or recurrent.inline:
            width = batch.verify_len if batch.is_block else int(batch.kind == "plain")
            if recurrent.width != width:
                self.lay_out(width)
        elif recurrent.needs_commit(batch.slots):
            self.flush(batch.slots)

    def check_covered(self, batch: Batch) -> None:
        """Raises EngineError where the step covers an open block, which it would overwrite."""
        for slot in batch.slots.slots:
            if self._slots[slot].open_rows:
                raise EngineError(f"this step covers slot {slot} and would take its open block away: call accept or rollback there first")

    def _rows_drafted(self, slot: int, item: Draft) -> int:
        r, width = self._resources, whole(item.verify_len, "the width of the block", 0, MOST_WIDTH)
        if not 2 <= width <= r.options.width:
            raise EngineError(_IMPOSSIBLE.format(width, r.options.width))
        if not self._slots[slot].drafting:
            why = "there is no drafter" if r.drafter is None else f"the sequence in slot {slot} was started without drafting"
            raise EngineError(f"{why}: use Verify or a plain step")
        method = r.method_of(item.drafter)
        if (most := r.member(method).block_size) < width:
            raise EngineError(f"a block of {width} rows is wider than the {most} that {method} drafts")
        if item.padded_len:
            whole(item.padded_len, "the number of verified rows", width, r.options.width)
        return width

    def _fitting(self, s: Slot, tokens: Ids, pictures: bool = False) -> np.ndarray:
        """``tokens`` as I64 [T], if they are ids of the vocabulary, or rows of ``pictures``, that fit the context."""
        ids = token_ids(np.maximum(tokens, 0) if pictures else tokens, self._resources.target.n_vocab)
        s.cursor.check_fits(ids.size)
        return ids

    def next_tokens(self, tokens: Ids, slot: int) -> np.ndarray:
        """``tokens`` as I64 [T], if they can come next; an open block is given up."""
        ids = self._fitting(self.slot(slot), tokens, bool(pictures_of(tokens)))
        self.check_open()
        self.give_up(slot)
        return ids

    def _token(self, token: int) -> int:
        return whole(token, "the last token", 0, self._resources.target.n_vocab - 1)

    # -- from the first step to the last

    def reset(self, drafting: bool = True, slot: int = 0) -> None:
        """Forgets the slot's sequence and begins another one. ``drafting``: whether drafter rows are computed."""
        self._resources.synchronize()
        self.check_open()
        slot = self.number(slot)
        if self._slots[slot].used:
            self.release(slot)
        self._begin(slot, drafting)

    def _begin(self, index: int, drafting: bool) -> None:
        s, r = self._slots[index], self._resources
        r.synchronize()
        self._clean(index)
        if self._recurrent is not None and self._recurrent.inline:  # also where the rows need no cleaning
            self._recurrent.fill_slot(index, 0)
        if r.hidden_states is not None:
            r.hidden_states.reset(index)
        if r.last_hidden is not None:
            r.last_hidden.reset(index)
        if r.draft_state is not None:
            r.draft_state.clear(index)
        s.cursor.reset()
        s.commit()
        s.used, s.sound, s.drafting = True, True, drafting and r.drafter is not None
        s.lag = None
        self.version += 1
        r.epoch += 1

    def release(self, slot: int) -> None:
        """Ends the sequence; the slot can be admitted again. Its memory is cleared before any step of another slot reads it."""
        self._resources.synchronize()
        s = self.slot(slot)
        s.used, s.clean = False, s.clean and self._alone
        self.version += 1
        if self._hidden_states is not None:
            self._hidden_states.reset(slot)
        s.cursor.reset()
        s.commit()
        if self._recurrent is not None:
            self._recurrent.accepted[slot] = 0

    def _clean(self, index: int) -> None:
        """Zeroes what the sequence before left: it may be NaN, which neither masks nor switched-off rows stop."""
        s, r = self._slots[index], self._resources
        if s.clean:
            return
        r.synchronize()
        rows = s.cursor.max_committed + max(r.options.chunk, r.options.width)
        for cache in (r.kv, r.draft_kv):
            if cache is not None:
                cache.fill_slot(index, 0, rows)
        s.cursor.max_committed = s.cursor.committed
        if r.hidden_states is not None:
            r.hidden_states.clear(index)
        if self._recurrent is not None and not self._recurrent.inline:
            self._recurrent.fill_slot(index, 0)
        if r.draft_state is not None:
            r.draft_state.clear(index)
        self._devices.clear(index)
        s.clean = True

    def check_finite(self, slot: int, finite: bool) -> bool:
        """Returns ``finite``. If it is not, nothing of the slot is reused, and it is cleared before its next sequence."""
        if not finite:
            self._slots[slot].clean = self._slots[slot].sound = False
            self._resources.epoch += 1
        return finite

    # -- within the last block

    def commit(self, batch: Batch, accepted: Mapping[int, Sequence[int]]) -> None:
        """Commits the tokens that each slot's step emitted; none of a prompt that is not complete."""
        for slot, tokens in accepted.items():
            s = self._slots[slot]
            if isinstance(batch.items[slot], Prefill):
                if tokens:
                    self.choose(tokens[0], slot)
            elif s.tokens.size and len(tokens) <= s.open_rows and s.base + len(tokens) <= s.cursor.n_ctx:
                self.move(slot, s.base + len(tokens), tokens[-1])
            else:
                self.accept(len(tokens), tokens[-1], slot)

    def accept(self, rows: int, last_token: int, slot: int = 0) -> None:
        """Commits the first ``rows`` rows of the slot's last block; ``last_token`` is the token chosen after them."""
        s = self.slot(slot)
        last_token = self._token(last_token)
        if not 1 <= whole(rows, "the number of accepted rows", 0, self._resources.options.width) <= s.open_rows:
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

    def choose(self, last_token: int, slot: int = 0) -> None:
        """Replaces the greedy choice after a prompt."""
        s = self.slot(slot)
        if s.open_rows:
            raise EngineError(f"slot {slot} has an open block: accept says which token comes after it")
        s.cursor.advance(0, self._token(last_token))

    def rollback_range(self, slot: int = 0) -> tuple[int, int]:
        """The lengths, lowest and highest, that ``rollback`` takes now."""
        s = self.slot(slot)
        return s.base, s.base + s.tokens.size

    def rollback(self, n: int, slot: int = 0) -> None:
        """Makes the sequence ``n`` tokens long; the token at position n becomes the last token again.

        Valid for lengths within the last block, rows that were not accepted included: shorter ones are in the recurrent state already. After plain
        steps and prompts the only such length is the current one.

        Raises:
            EngineError: any other length; nothing has changed then.
        """
        self._resources.synchronize()
        s = self.slot(slot)
        low, high = self.rollback_range(slot)
        if not low <= whole(n, "the length of the sequence", 0, self._resources.options.n_ctx) <= high:
            raise EngineError(f"slot {slot} cannot be rolled back to {n} tokens: its last block holds the lengths {low} to {high}")
        if s.tokens.size:
            self.move(slot, n, int(s.tokens[n - low] if n < high else s.ids[-1]))

    def move(self, slot: int, committed: int, last_token: int) -> None:
        """Accepts the rows of the last block before position ``committed``."""
        s, r = self._slots[slot], self._resources
        cursor, s.open_rows = s.cursor, 0
        cursor.committed, cursor.last_token = committed, last_token
        if committed > cursor.max_committed:  # as Cursor.place, without calls in every step
            cursor.max_committed = committed
        elif committed < cursor.min_committed:
            cursor.min_committed = committed
        if self._recurrent is not None:
            self._recurrent.accepted[slot] = committed - s.base
        if r.last_hidden is not None and r.chain is not None:
            buffer = self._hidden_states
            if buffer is None or (slot, r.chain.method) not in buffer.lacking:  # else the last hidden state is not its last token's
                r.last_hidden.at[slot] = committed - s.base

    def give_up(self, slot: int) -> None:
        """Drops an open block."""
        s = self.slot(slot)
        if s.open_rows:
            s.commit()

    # -- copies

    def snapshot(self, slot: int = 0) -> Snapshot:
        """A copy of the slot's sequence as it stands, on the device. ``restore`` it any number of times, into any slot; ``close`` it.

        Raises:
            DeviceError: the device has no memory for it.
            EngineError: the slot has no sequence, or a block that was not accepted yet.
        """
        self.settle(slot)
        r, s = self._resources, self.slot(slot)
        n = s.cursor.committed
        with r.sequence.whole(n, s.drafting, slot) as pieces:
            copy = pieces.copy()
        if copy is None:
            name = r.backend.device.name
            raise DeviceError(f"no memory on {name} for a snapshot of {n} tokens; close another one or use a smaller `n_ctx`")
        return Snapshot(copy, n, s.cursor.last_token, s.drafting, s.sound, self, s.lag)

    def restore(self, snapshot: Snapshot, slot: int = 0) -> None:
        """Makes ``snapshot`` of this runner the sequence of an admitted slot: the next step computes what it would have computed then.

        Raises:
            EngineError: the slot has no sequence; the snapshot was closed, or taken of another runner.
        """
        self._resources.synchronize()
        self.check_open()
        r, s = self._resources, self.slot(slot)
        if not isinstance(snapshot, Snapshot) or snapshot.engine is not self or snapshot.pieces.closed:
            raise EngineError("this is no open snapshot of this engine: take one with snapshot()")
        if self._alone or not s.clean:  # NaN of the sequence before may lie beyond what is written
            self.reset(snapshot.drafting, slot)
        r.epoch += 1
        with r.sequence.whole(snapshot.committed, snapshot.drafting, slot) as pieces:
            snapshot.pieces.write_to(pieces)
        if r.hidden_states is not None:
            r.hidden_states.reset(slot)
        s.cursor.reset()
        s.drafting, s.sound, s.lag = snapshot.drafting, snapshot.sound, snapshot.lag
        self.version += 1
        s.clean = s.clean and s.sound
        self.resume(snapshot.committed, snapshot.last_token, slot)

    def resume(self, committed: int, last_token: int | None = None, slot: int = 0) -> None:
        """Declares that ``committed`` tokens of the slot's sequence are in the caches; a prompt continues after them.

        Raises:
            EngineError: fewer than it has already, more than the context holds, or a last token outside the vocabulary.
        """
        s, last_token = self.slot(slot), None if last_token is None else self._token(last_token)
        n = whole(committed, "the length of the sequence", s.cursor.committed, self._resources.options.n_ctx)
        s.cursor.advance(n - s.cursor.committed, last_token)
        s.commit()
        if self._recurrent is not None:
            self._recurrent.accepted[slot] = 0
        if (states := self._resources.draft_state) is not None:
            states.written(slot, n)

    # -- recurrent states

    def settle(self, slot: int | None = None) -> None:
        """Commits what is accepted in one slot, or in all: caches and recurrent states hold the whole sequences, whose lengths are final."""
        self._resources.synchronize()
        self.check_open()
        slot = None if slot is None else self.number(slot)
        covered = self._graphs.every if slot is None else SlotRange(slot, 1)
        self._devices.check_landed(covered)
        self._check_accepted(covered)
        self.catch_up(covered.slots)
        self.flush(covered)

    def _check_accepted(self, covered: SlotRange) -> None:
        for index in covered.slots:
            if rows := self._slots[index].open_rows:
                raise EngineError(f"the last block of {rows} rows in slot {index} is neither accepted nor given up: call accept first")

    def flush(self, covered: SlotRange | None = None) -> None:
        """Commits accepted rows of last blocks to the recurrent states now; the next step would do it first. Open blocks stay open."""
        covered = covered or self._graphs.every
        self._devices.check_landed(covered)
        self._resources.synchronize()
        if self._recurrent is not None and self._recurrent.needs_commit(covered):
            self.lay_out(0) if self._recurrent.inline else self._commit(covered, self._recurrent.width)
        for s in self._slots[covered.part]:
            if not s.open_rows:
                s.commit()

    def lay_out(self, width: int) -> None:
        """Makes the recurrent states ready for blocks of ``width`` rows (one slot: also 0 for prompts, 1 for plain tokens)."""
        recurrent = self._recurrent
        if recurrent is None or recurrent.width == width:
            return
        if recurrent.inline:
            self._commit(self._graphs.every, width)
        else:
            self._check_accepted(self._graphs.every)
            self.flush(self._graphs.every)
        recurrent.lay_out(width)

    def _commit(self, covered: SlotRange, next_len: int) -> None:
        recurrent = self._recurrent
        assert recurrent is not None
        self._resources.synchronize()
        step = self._graphs.get(commit_key(recurrent.width, covered, next_len, recurrent.uncommitted or not recurrent.inline))
        recurrent.fill_commit(step.fields.at, covered)
        step.fields.run()
        recurrent.accepted[covered.part] = 0

    # -- drafter rows

    def _serve_drafters(self, batch: Batch) -> None:
        """Some drafters lack K/V rows: makes room for this step's hidden states, or computes the rows."""
        if batch.kind == "plain" or batch.method or batch.deferred:
            self._make_room(batch.verify_len, batch.rows)
        if batch.method:
            self.prepare_drafting(batch.rows, batch.method)
        elif batch.kind == "verify" and self._hidden_states is not None:
            self.catch_up(batch.rows, () if batch.deferred else self._hidden_states.others)
        elif batch.kind != "plain":
            self.catch_up(batch.rows)

    def _make_room(self, rows: int, slots: Collection[int]) -> None:
        """In the hidden-state buffer, for so many rows; slots that share a step share catch-up graphs too."""
        buffer = self._hidden_states
        if buffer is None:
            return
        for slot in slots:
            if not buffer.has_room(self._slots[slot].cursor.committed, rows, slot):
                break
        else:  # most steps
            return
        for method in buffer.methods:
            while max(waiting := [self._waiting(method, slot) for slot in slots], default=0) > max(buffer.most - rows, 0):
                if min(waiting) >= buffer.batch + buffer.width:  # the last block's rows stay: it may be rolled back
                    self._resources.synchronize()
                    self._catch_up(method, dict.fromkeys(slots, buffer.batch))
                else:
                    self.catch_up(slots, (method,))

    def _waiting(self, method: str, slot: int) -> int:
        assert self._hidden_states is not None
        return self._hidden_states.missing(method, self._slots[slot].cursor.committed, slot)

    def _known(self, slot: int) -> int:
        """Tokens whose rows a whole model has."""
        assert self._hidden_states is not None
        return self._slots[slot].cursor.committed - self._waiting(self._hidden_states.whole_model, slot)

    def _pending(self, method: str, slot: int) -> int:
        """Rows of a whole model's last block that its recurrent states lack."""
        states, buffer = self._resources.draft_state, self._hidden_states
        return states.pending(slot, self._known(slot)) if states is not None and buffer is not None and method == buffer.whole_model else 0

    def prepare_drafting(self, slots: Collection[int], method: str) -> None:
        """Computes the K/V rows that ``method`` needs to draft after these slots' tokens: a whole model's passes compute one missing row themselves."""
        buffer = self._hidden_states
        if buffer is not None and method == buffer.whole_model and all(self._waiting(method, slot) <= 1 for slot in slots):
            return
        self.catch_up(slots, (method,))

    def catch_up(self, slots: Collection[int], methods: Iterable[str] | None = None) -> None:
        """Computes K/V rows of these slots that drafters lack (all of them, or these ``methods``), and the last hidden state of chains."""
        buffer = self._hidden_states
        if buffer is None:
            return
        for method in buffer.methods if methods is None else methods:
            while counts := {
                slot: min(buffer.batch, n) for slot in slots if (n := self._waiting(method, slot)) or self._pending(method, slot)
            }:
                self._resources.synchronize()
                self._catch_up(method, counts)
            for slot in slots:
                buffer.set_complete(method, slot)

    def _catch_up(self, method: str, counts: Mapping[int, int]) -> None:
        """One batch: the first ``counts`` rows of each slot that wait."""
        r, buffer = self._resources, self._hidden_states
        began, waited = time.perf_counter_ns(), self._graphs.waited_us
        assert r.draft_kv is not None and buffer is not None
        covered, bucket = covering(counts, len(r.slots)), 0
        width = next(w for w in buffer.catch_ups if max(counts.values()) <= w)
        if method == buffer.whole_model or r.member(method).rows_read_rows:
            bucket = r.draft_kv.bucket(max(s.cursor.committed for s in r.slots[covered.part]))
        step = self._graphs.get(catch_up_key(method, width, covered, bucket))
        host = step.host
        for i, slot in enumerate(covered.slots):
            own, count = slice(i * width, (i + 1) * width), counts.get(slot, 0)
            first = r.slots[slot].cursor.committed - self._waiting(method, slot)
            at = buffer.at(first, width, slot).copy()
            at[count:] = at[max(count - 1, 0)]  # padding reads a real row: NaN that was left elsewhere would spread
            if "hidden_at" in host:
                host["hidden_at"][own] = at
            if "hidden_tokens" in host:
                host["hidden_tokens"][own] = buffer.tokens[at]
            host["positions"][own] = first + np.arange(width)
            r.draft_kv.rows_for(first, width, count, host["kv_rows"][own])
            host["kv_rows"][own] += i * (r.draft_kv.live + r.draft_kv.trash)
            if "last_hidden" in host:
                assert r.last_hidden is not None
                host["last"][i] = own.start + max(count - 1, 0)
                host["before"][i] = r.last_hidden.row(slot)
                r.last_hidden.fill(slot, min(count, 1), host["last_hidden"][i : i + 1])
        if "context_ring" in host:
            host["context_ring"][:] = r.draft_kv.in_rings(host["kv_rows"])
        fill_lagging(host)
        if "q_last" in host:
            host["q_last"][:] = host["positions"]
        fill_near(host, r.member(method).window, r.draft_kv, covered.count)
        states = r.draft_state if "draft_on" in host else None
        if states is not None:
            states.fill_replay(host, covered, {slot: self._known(slot) for slot in counts})
            states.fill_rows(host, covered, counts)
        if r.target.by_axis:
            apply_lag(host, r.slots[covered.part])
        step.fields.run()
        for slot, count in counts.items():
            if states is not None:
                states.written(slot, self._known(slot) + count)
            if "last_hidden" in host and r.last_hidden is not None:
                r.last_hidden.at[slot] = 0
            buffer.filled(method, count, slot)
        self.catch_ups += 1
        self.catch_up_us += max((time.perf_counter_ns() - began) // 1000 - (self._graphs.waited_us - waited), 0)
