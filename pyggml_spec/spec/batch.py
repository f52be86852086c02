"""The batch engine: one target, perhaps a drafter, N sequences. One forward pass per step, whatever each of them needs.

A slot is one sequence for its whole life and never moves. Order of life: ``admit`` -> any number of ``step`` and ``accept`` (a prompt is
work for ``step`` like everything else) -> ``release``. What each slot does in a step is its own business: a part of a prompt, a plain
token, given drafts or drafting, at widths of its own; slots that are not named do nothing and are left as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cache.cursor import Cursor
from ..cache.kv import NOWHERE
from ..cache.slots import DeltaSlots, SlotRange, covering
from ..cache.snapshot import Snapshot
from ..checks import token_ids, whole
from ..errors import ContextError, DeviceError, EngineError
from ..ggml.device import Backend
from ..ggml.library import ffi, lib
from ..ggml.step_io import StepTimes
from ..models.base import DeltaShape, Target
from ..models.dflash import DFlash
from .batch_graphs import BatchGraphs
from .graphs import MOST_CANDIDATES, Step
from .parts import MOST_WIDTH, EngineOptions, EngineParts, StepResult, candidate_widths

MAX_SLOTS = 64
CANDIDATES = (0, 64, 256, MOST_CANDIDATES)  # more than enough never hurts, and each number is a family of graphs
AHEAD = 64  # tokens, or a whole step, before a span ends the graph of the next one is built


@dataclass(frozen=True)
class Prompt:
    """Tokens that certainly come next: they are committed by the step, and the choice after the last one becomes pending."""

    tokens: Sequence[int]

    @property
    def rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Verify:
    """The pending token and given drafts behind it; without drafts a plain token. Follow with ``accept``."""

    drafts: Sequence[int] = ()

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts)


@dataclass(frozen=True)
class Draft:
    """The pending token and ``width`` - 1 drafts of the drafter's. Follow with ``accept``."""

    width: int

    @property
    def rows(self) -> int:
        return self.width


Work = Prompt | Verify | Draft


@dataclass
class Slot:
    """One sequence. ``tokens`` are the rows of its last block, from position ``base`` on; ``ids`` the choices after them.

    The recurrent state holds the tokens before ``base``; the block's accepted rows are folded in by the next step over this slot.
    """

    cursor: Cursor
    used: bool = False
    clean: bool = True  # nothing of an earlier sequence is left in it
    drafting: bool = True
    candidates: int | None = 0  # see Engine.read_candidates
    base: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    open_rows: int = 0  # of the last block, until accept says how many count
    row: int = 0  # of the last step's choices: the slot's first one

    def settle(self) -> None:
        """What is committed is in the recurrent state; nothing is left to roll back."""
        self.base, self.tokens, self.ids, self.open_rows = self.cursor.committed, self.tokens[:0], self.ids[:0], 0


class BatchEngine(EngineParts):
    """Runs steps over N slots."""

    graphs_class, row_bytes = BatchGraphs, 112
    graphs: BatchGraphs
    delta: DeltaSlots | None

    def __init__(self, backend: Backend, target: Target, drafter: DFlash | None, options: EngineOptions) -> None:
        whole(options.slots, "the number of slots", 1, MAX_SLOTS)
        super().__init__(backend, target, drafter, options)
        self.slots = [Slot(Cursor(options.n_ctx)) for _ in range(options.slots)]
        self.forwards = self.rows_computed = self.rows_used = 0
        self.builds_ahead = backend.device.kind != "cpu"  # which has no time to spare while it computes

    def _allocate(self) -> None:
        super()._allocate()
        opt, blocks = self.options, candidate_widths(self.options.width)
        widths = {"direct": (1, *self.chunks), "logits": (opt.chunk,), "verify": blocks, "fused": blocks}
        self.graphs = self._own(
            self.graphs_class(self.backend, self.io, self.target, self.drafter, self.kv, self.draft_kv, self.delta, widths, opt.slots)
        )

    def _reserve(self) -> None:
        """Plans the largest graph of every role that a generation uses, as for one sequence."""
        live, width, every = self.kv.live, self.options.width, SlotRange(0, self.options.slots)
        self.graphs.get("direct", 1, live, every)
        if self.drafter is not None and width > 1:
            self.graphs.get("fused", width, live, every)
        if self.delta is not None:
            self.graphs.get("commit", width, 0, every)

    def _recurrent(self, shape: DeltaShape) -> DeltaSlots:
        return DeltaSlots(self.backend, shape, self.target.delta_row(), self.options.width, self.options.slots, self.planned)

    # -- sequences

    def admit(self, drafting: bool = True, candidates: int | None = 0) -> int | None:
        """Takes the lowest free slot for a new sequence; None if there is none.

        ``drafting`` False: it will not be drafted for. ``candidates``: what ``candidates()`` is to give, as in Engine.read_candidates.
        """
        self._check_open()
        candidates = candidates if candidates is None else whole(candidates, "the number of candidates", 0, MOST_CANDIDATES)
        for index, slot in enumerate(self.slots):
            if not slot.used:
                self._clean(index)
                slot.cursor.reset()
                slot.settle()
                slot.used, slot.drafting = True, drafting and self.drafter is not None
                slot.candidates = 0 if self.backend.device.kind == "cpu" else candidates
                return index
        return None

    def release(self, slot: int) -> None:
        """Ends the sequence; the slot can be admitted again. Its memory is cleared before any step looks at it."""
        s = self._sequence(slot)
        s.used = s.clean = False
        s.cursor.reset()
        s.settle()
        if self.delta is not None:
            self.delta.accepted[slot] = 0

    def _clean(self, index: int) -> None:
        """Writes zeros over what the sequence before left: it may be NaN, which neither masks nor switched-off rows stop."""
        if self.slots[index].clean:
            return
        self.kv.fill_slot(index, 0)
        if self.draft_kv is not None:
            self.draft_kv.fill_slot(index, 0)
        if self.delta is not None:
            self.delta.fill_slot(index, 0)
        self.slots[index].clean = True

    def accept(self, slot: int, rows: int, pending: int) -> None:
        """Commits the first ``rows`` rows of the slot's last block; ``pending`` is the token chosen after them."""
        s = self._sequence(slot)
        pending = self._token(pending)
        if not 1 <= whole(rows, "the number of accepted rows", 0, self.options.width) <= s.open_rows:
            raise EngineError(f"{rows} rows cannot be accepted of a block of {s.open_rows} in slot {slot}")
        if s.tokens.size:
            self._move(slot, s.base + rows, pending)
        else:  # a plain token is in the recurrent state already
            s.cursor.advance(0, pending)
            s.open_rows = 0

    def candidates(self, slot: int, row: int) -> tuple[np.ndarray | None, np.ndarray]:
        """What may come after ``row`` of the slot's last work (of a prompt, after its last row): I32 token ids (None: all of the vocabulary)
        and F32 logits. Valid until the next step; ``admit`` says how many there are."""
        s = self._sequence(slot)
        if self._last is None or self.graphs.closed:
            raise EngineError("no step has been computed whose candidates could be read")
        return self._last.candidates(s.row + whole(row, f"the row of slot {slot}", 0, max(0, s.ids.size - 1)))

    def choose(self, slot: int, pending: int) -> None:
        """Puts ``pending`` in the place of the greedy choice after a prompt."""
        s = self._sequence(slot)
        if s.open_rows:
            raise EngineError(f"slot {slot} has an open block: accept says which token comes after it")
        s.cursor.advance(0, self._token(pending))

    def rollback_range(self, slot: int) -> tuple[int, int]:
        """The lengths, lowest and highest, that ``rollback`` takes now."""
        s = self._sequence(slot)
        return s.base, s.base + s.tokens.size

    def rollback(self, slot: int, n: int) -> None:
        """Makes the sequence ``n`` tokens long; the token that stood at position n becomes pending again.

        Valid exactly for lengths within the last block, rows that were not accepted included: shorter ones are in the recurrent state
        already. After plain steps and prompts the only such length is the current one.

        Raises:
            EngineError: any other length; nothing has changed then.
        """
        s = self._sequence(slot)
        low, high = self.rollback_range(slot)
        if not low <= whole(n, "the length of the sequence", 0, self.options.n_ctx) <= high:
            raise EngineError(f"slot {slot} cannot be rolled back to {n} tokens: its last block holds the lengths {low} to {high}")
        if s.tokens.size:
            self._move(slot, n, int(s.tokens[n - low] if n < high else s.ids[-1]))

    def _move(self, slot: int, committed: int, pending: int) -> None:
        s = self.slots[slot]
        s.cursor.place(committed, pending)
        s.open_rows = 0
        if self.delta is not None:
            self.delta.accepted[slot] = committed - s.base

    def fold(self, slot: int | None = None) -> None:
        """Commits what is pending in one slot, or all, into the recurrent states: their lengths are final."""
        seats = SlotRange(0, self.options.slots) if slot is None else SlotRange(slot, 1)
        if any(s.open_rows for s in self.slots[seats.part]):
            raise EngineError("a block is open: accept its rows before its slot is folded")
        self._commit(seats)

    def _commit(self, seats: SlotRange) -> None:
        """``fold`` of the slots that have no open block; those that have keep it."""
        if self.delta is not None and self.delta.accepted[seats.part].any():
            step = self.graphs.get("commit", self.delta.width, 0, seats)
            self._fill_commit(step, seats)
            step.fields.run()
            self.delta.accepted[seats.part] = 0
        for s in self.slots[seats.part]:
            if not s.open_rows:
                s.settle()

    def snapshot(self, slot: int) -> Snapshot:
        """A copy of the slot's sequence as it stands, on the device. ``restore`` it any number of times, into any slot; ``close`` it.

        Raises:
            DeviceError: the device has no memory for it.
            EngineError: the slot has no sequence, or a block that was not accepted yet.
        """
        s = self._sequence(slot)
        self.fold(slot)
        with self.sequence.whole(s.cursor.committed, s.drafting, slot) as pieces:
            copy = pieces.copy(self.backend)
        if copy is None:
            raise DeviceError(f"no memory on {self.backend.device.name} for a snapshot of {s.cursor.committed} tokens; close another one")
        return Snapshot(copy, s.cursor.committed, s.cursor.pending, s.drafting, self)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Makes ``snapshot`` of this engine the sequence of an admitted slot: the next step gives what it would have given then.

        Raises:
            EngineError: the slot has no sequence; the snapshot was closed, or taken of another engine.
        """
        s = self._sequence(slot)
        if not isinstance(snapshot, Snapshot) or snapshot.engine is not self or snapshot.pieces.closed:
            raise EngineError("this is no open snapshot of this engine: take one with snapshot()")
        with self.sequence.whole(snapshot.committed, snapshot.drafting, slot) as pieces:
            snapshot.pieces.write_to(pieces, self.backend)
        s.cursor.reset()
        s.drafting = snapshot.drafting
        self.resume(slot, snapshot.committed, snapshot.pending)

    def resume(self, slot: int, n: int, pending: int | None = None) -> None:
        """Says that ``n`` tokens of the slot's sequence are in the caches, whatever brought them there; a prompt goes on behind them.

        Raises:
            EngineError: fewer than it has already, more than the context holds, or a pending token that there is not.
        """
        s, pending = self._sequence(slot), None if pending is None else self._token(pending)
        s.cursor.advance(whole(n, "the length of the sequence", s.cursor.committed, self.options.n_ctx) - s.cursor.committed, pending)
        s.settle()
        if self.delta is not None:
            self.delta.accepted[slot] = 0

    # -- steps

    def step(self, work: Mapping[int, Work], meanwhile: Callable[[], object] | None = None) -> dict[int, StepResult]:
        """One forward pass over the slots named in ``work``. Results have the rows of their slot only; a prompt's has its last row.

        ``meanwhile`` is called once the pass is under way: what it does costs no time as long as a device computes on its own.

        Raises:
            ContextError: a prompt that is empty, does not fit the context or has ids outside the vocabulary.
            EngineError: a slot without a sequence, a block that was not accepted yet, a width that was not planned for.
        """
        self._check_open()
        if not isinstance(work, Mapping) or not work:
            raise EngineError("a step needs work for at least one slot, as {slot: Prompt(...), Verify(...) or Draft(...)}")
        rows = {slot: self._check(slot, item) for slot, item in work.items()}
        seats = covering(rows, self.options.slots)
        for slot in seats.slots:
            if not self.slots[slot].used:
                self._clean(slot)
        self.graphs.drafting = self.drafter is not None and any(self.slots[slot].drafting for slot in work)
        wanted = [self.slots[slot].candidates for slot in work]
        counted = [n for n in wanted if n is not None]
        self.graphs.candidates = None if len(counted) < len(wanted) else next(n for n in CANDIDATES if max(counted) <= n)
        if all(isinstance(item, Prompt) or (isinstance(item, Verify) and len(item.drafts) == 0) for item in work.values()):
            return self._direct(work, rows, seats, meanwhile=meanwhile)
        return self._block(work, rows, seats, meanwhile)

    def _check(self, slot: int, item: Work) -> int:
        """Rows that the work takes, at least 1."""
        s = self._sequence(slot)
        if s.open_rows:
            raise EngineError(f"slot {slot} has a block of {s.open_rows} rows that nothing was accepted of: call accept or rollback first")
        if isinstance(item, Prompt):
            return self._check_prompt(s, item.tokens)
        if not isinstance(item, (Verify, Draft)):
            raise EngineError(f"the work of slot {slot} is {item!r}: use Prompt, Verify or Draft")
        if s.cursor.pending is None:
            raise EngineError(f"slot {slot} has no pending token: give it a prompt first")
        if s.cursor.room < 1:
            raise ContextError(f"the context of {s.cursor.n_ctx} tokens is full; raise `n_ctx`")
        if isinstance(item, Draft):
            width = whole(item.width, "the width of the block", 0, MOST_WIDTH)
        else:
            width = 1 + (token_ids(item.drafts, self.target.n_vocab, "the block of drafts").size if len(item.drafts) else 0)
        if not 1 <= width <= self.options.width or (isinstance(item, Draft) and width < 2):
            raise EngineError(f"a block of {width} rows is impossible here: 2 to {self.options.width} were planned for at load")
        if isinstance(item, Draft) and not s.drafting:
            why = "there is no drafter" if self.drafter is None else f"slot {slot} was admitted without drafting"
            raise EngineError(f"{why}: use Verify")
        return width

    def _check_prompt(self, s: Slot, tokens: Sequence[int]) -> int:
        ids = token_ids(tokens, self.target.n_vocab)
        s.cursor.check_fits(ids.size)
        if ids.size > self.options.chunk:
            raise EngineError(f"a prompt of {ids.size} tokens in one step: the widest chunk is {self.options.chunk}")
        return ids.size

    def chunk_width(self, rows: int) -> int:
        """Rows of the graph that computes ``rows`` certain rows of a slot."""
        return next(w for w in (1, *self.chunks) if rows <= w)

    def _direct(
        self, work: Mapping[int, Work], rows: dict[int, int], seats: SlotRange, role: str = "direct", meanwhile: Callable | None = None
    ) -> dict[int, StepResult]:
        """All rows are certain: the recurrent states are written by the step itself."""
        if self.delta is not None and self.delta.accepted[seats.part].any():
            self._commit(seats)
        need = max(rows.values())
        width = need if role == "logits" else self.chunk_width(need)
        step = self.graphs.get(role, width, self._span(seats, width), seats)
        self._fill_rows(step, width, rows, seats)
        host = step.host
        tokens = host["tokens"].reshape(seats.count, width)
        tokens[:] = 0
        for slot, n in rows.items():
            tokens[slot - seats.first, :n] = self._known(slot, work[slot])
        if "out_row" in host:
            host["out_row"][:] = [(slot - seats.first) * width + rows.get(slot, 1) - 1 for slot in seats.slots]
        if self.delta is not None:
            real = np.array([rows.get(slot, 0) for slot in seats.slots])[:, None]
            host["on"].reshape(tokens.shape)[:] = self._iota[:width] < real
            host["last"].reshape(seats.count, -1)[:] = real + np.arange(self.delta.history_rows)
            if "take" in host:
                self.delta.fill_take(host["take"], width, seats, single=True)
        times = self._run(step, role, width, seats, meanwhile)
        self._count(width * seats.count, rows)
        ids, out = step.ids() if role == "direct" else None, {}
        for slot, n in rows.items():
            s, at = self.slots[slot], slot - seats.first
            s.cursor.advance(n, None if ids is None else int(ids[at]))
            s.settle()
            if ids is not None:
                s.open_rows, s.row = 0 if isinstance(work[slot], Prompt) else 1, at
                out[slot] = StepResult(tokens[at, :n].copy(), ids[at : at + 1], True, _finite(step, slice(at, at + 1)), times)
        return out

    def _block(self, work: Mapping[int, Work], rows: dict[int, int], seats: SlotRange, meanwhile: Callable | None) -> dict[int, StepResult]:
        """Some rows may turn out wrong: nothing is written into the recurrent states but what the steps before left pending."""
        need = max(rows.values())
        width = next((w for w in candidate_widths(self.options.width) if need <= w), None)
        if width is None:
            raise EngineError(f"a step with drafts has at most {self.options.width} rows per slot, but a prompt has {need}")
        for slot in seats.slots:
            if self.slots[slot].open_rows and slot not in work:
                raise EngineError(f"this step covers slot {slot} and would take its open block away: call accept or rollback there first")
        self._lay_out(width)
        drafting = any(isinstance(item, Draft) for item in work.values())
        role = "fused" if drafting else "verify"
        step = self.graphs.get(role, width, self._span(seats, width), seats)
        self._fill_rows(step, width, rows, seats)
        given = step.host["given"][: width * seats.count] if drafting else step.host["tokens"]
        known = given.reshape(seats.count, width)
        known[:] = 0
        for slot, item in work.items():
            mine = self._known(slot, item)
            known[slot - seats.first, : len(mine)] = mine
        if drafting:
            self._fill_drafts(step, width, work, seats)
        if self.delta is not None:
            self._fill_commit(step, seats)
            self.delta.fill_take(step.host["take"], width, seats)
        times = self._run(step, role, width, seats, meanwhile)
        self._count(width * seats.count, rows)
        for slot in seats.slots:  # whatever was pending there is committed now
            self.slots[slot].settle()
            if self.delta is not None:
                self.delta.accepted[slot] = 0
        ids, sound = step.ids(), _finite(step, slice(None), drafts=True)
        return {slot: self._block_result(step, ids, sound, width, slot, item, rows[slot], seats, times) for slot, item in work.items()}

    def _run(self, step: Step, role: str, width: int, seats: SlotRange, meanwhile: Callable | None) -> StepTimes:
        self._last = step
        step.fields.launch()
        try:
            if meanwhile is not None:
                meanwhile()
            # only where the buffer will do, which is being computed in, and holds the logits that somebody is still to read
            whole_rows = role == "logits" or self.graphs.candidates is None
            if self.builds_ahead and not whole_rows and self.graphs.reserves(role, width, seats):
                self.graphs.get(role, width, self._span(seats, width + max(width, AHEAD)), seats)
        finally:
            times = step.fields.wait()
        return times

    def _block_result(
        self, step: Step, ids: np.ndarray, sound: bool, width: int, slot: int, item: Work, n: int, seats: SlotRange, times: StepTimes
    ) -> StepResult:
        """``sound``: everything that the step computed is finite, whatever the slot."""
        s = self.slots[slot]
        part = slice((slot - seats.first) * width, (slot - seats.first) * width + n)
        s.tokens, s.ids, s.open_rows, s.row = step.host["tokens"][part].copy(), ids[part], n, part.start
        draft_finite = sound or not isinstance(item, Draft) or bool(np.isfinite(step.host["draft_sum"][part]).all())
        if isinstance(item, Prompt):
            self._move(slot, s.base + n, int(s.ids[-1]))
            s.row += n - 1
        return StepResult(s.tokens, s.ids[-1:] if isinstance(item, Prompt) else s.ids, draft_finite, sound or _finite(step, part), times)

    def logits(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Logits of all tokens of several slots, F32 [T, n_vocab] each, in one forward pass as wide as the longest (one prefill chunk at
        most). Commits the tokens; no token becomes pending."""
        work = {slot: Prompt(tokens) for slot, tokens in prompts.items()}
        rows = {slot: self._check(slot, item) for slot, item in work.items()}
        seats = covering(rows, self.options.slots)
        for slot in seats.slots:
            if not self.slots[slot].used:
                self._clean(slot)
        self.graphs.drafting, self.graphs.candidates = self.drafter is not None, 0
        width = max(rows.values())
        logits = self.graphs.get("logits", width, self._span(seats, width), seats).extra["logits"]
        self._direct(work, rows, seats, "logits")
        out = {}
        for slot, n in rows.items():
            out[slot] = np.empty((n, self.target.n_vocab), np.float32)
            at = (slot - seats.first) * width * logits.nb[1]
            lib.ggml_backend_tensor_get(logits, ffi.from_buffer(out[slot]), at, out[slot].nbytes)
        return out

    # -- helpers

    def _sequence(self, slot: int) -> Slot:
        if whole(slot, "the slot", 0, MAX_SLOTS) >= len(self.slots) or not self.slots[slot].used:
            raise EngineError(f"slot {slot} has no sequence: admit one first")
        return self.slots[slot]

    def _known(self, slot: int, item: Work) -> list[int]:
        """The ids of the work's rows that the host knows."""
        if isinstance(item, Prompt):
            return list(item.tokens)
        pending = self.slots[slot].cursor.pending
        assert pending is not None  # _check has looked
        return [pending] if isinstance(item, Draft) else [pending, *item.drafts]

    def _span(self, seats: SlotRange, width: int) -> int:
        longest = max(self.slots[slot].cursor.committed for slot in seats.slots)
        return self.kv.span(longest + width)

    def _lay_out(self, width: int) -> None:
        if self.delta is not None and self.delta.width != width:
            self.fold()
            self.delta.lay_out(width)

    def _fill_commit(self, step: Step, seats: SlotRange) -> None:
        assert self.delta is not None
        self.delta.fill_tail(step.host["tail"], seats)
        self.delta.fill_keep(step.host["keep"], seats)

    def _fill_rows(self, step: Step, width: int, rows: dict[int, int], seats: SlotRange) -> None:
        """Positions and cache rows. A slot without work looks at its first row, so that what it computes is finite, and writes trash."""
        host, kv = step.host, self.kv
        positions, kv_rows = (host[name].reshape(seats.count, width) for name in ("positions", "kv_rows"))
        for at, slot in enumerate(seats.slots):
            real = rows.get(slot, 0)
            n = self.slots[slot].cursor.committed if real else 0
            positions[at] = self._iota[:width] + n if real else 0
            kv.rows_for(n, width, real, kv_rows[at])
            kv_rows[at] += at * (kv.live + kv.trash)
            if kv.ring:
                self._fill_ring(host, width, real, n, at, seats)
        host["q_last"][:] = host["positions"]
        if self.target.window:
            host["q_first"][:] = host["positions"]
            host["q_first"] -= self.target.window - 1

    def _fill_ring(self, host: dict[str, np.ndarray], width: int, real: int, n: int, at: int, seats: SlotRange) -> None:
        rows = host["sliding_rows"].reshape(seats.count, width)[at]
        near = host["sliding_near"].reshape(seats.count, -1)[at]
        self.kv.fill_ring(n, width, real, rows, near)
        rows += at * (self.kv.ring + self.kv.trash)
        if not real:
            near[:] = NOWHERE
            near[0] = 0.5

    def _fill_drafts(self, step: Step, width: int, work: Mapping[int, Work], seats: SlotRange) -> None:
        assert self.drafter is not None and self.draft_kv is not None
        host, total = step.host, width * seats.count
        shape = (seats.count, width)
        host["block"][:] = self.drafter.hp.mask_token
        host["source"][:] = np.arange(total)
        host["draft_last"][:] = 0
        for window in set(self.drafter.hp.window) - {0}:
            host[f"draft_first_{window}"][:] = host["positions"] - window + 1
        for at, slot in enumerate(seats.slots):
            item, cursor = work.get(slot), self.slots[slot].cursor
            rows = host["draft_rows"].reshape(shape)[at]
            real = item.width if isinstance(item, Draft) else 0
            self.draft_kv.rows_for(cursor.committed, width, real, rows)
            rows += at * (self.draft_kv.live + self.draft_kv.trash)
            if real:
                host["block"].reshape(shape)[at, 0] = cursor.pending
                last = host["draft_last"].reshape(shape)[at]
                last[:real], last[real:] = self.drafter.last_seen(cursor.committed, real), cursor.committed + real - 1
                drafts = total + at * (width - 1)
                host["source"].reshape(shape)[at, 1:real] = drafts + self._iota[: real - 1]

    def _count(self, computed: int, rows: dict[int, int]) -> None:
        self.forwards += 1
        self.rows_computed += computed
        self.rows_used += sum(rows.values())


def _finite(step: Step, part: slice, drafts: bool = False) -> bool:
    """Whether the target, with ``drafts`` the drafter too, produced neither NaN nor Inf in these rows."""
    names = ("ids_sum", "logits_sum", "draft_sum") if drafts else ("ids_sum", "logits_sum")
    return all(np.isfinite(step.host[name][part]).all() for name in names if name in step.host)
