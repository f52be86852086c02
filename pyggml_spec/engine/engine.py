"""The engine: one target, perhaps a drafter, 1 to 64 sequences in slots. One forward pass per step, whatever each of them needs.

Order of life of a slot (slot.py has its states): ``admit`` -> any number of ``step`` and ``accept`` (a prompt is work for ``step`` like
everything else) -> ``release``. What each slot does in a step is its own business: a part of a prompt, a plain token, given drafts or drafting,
at widths of its own; slots that are not named do nothing and are left as they are. Which steps to run is the scheduler's business, or the
loop's.

The only slot of an engine need not be admitted; ``reset``, ``prefill``, ``plain_step``, ``fused_step`` and ``verify_step`` are its steps by name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from ..checks import token_ids, whole
from ..errors import ContextError, DeviceError, EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.library import ffi, lib
from ..ggml.step_io import StepTimes
from ..memory.cursor import Cursor
from ..memory.features import RING
from ..memory.kv import NOWHERE, SPAN, padded
from ..memory.slots import SlotRange, covering
from ..memory.snapshot import Snapshot
from ..models.base import Target
from ..models.dflash import DFlash
from .graph_store import Step
from .graphs import MOST_CANDIDATES
from .parts import MOST_WIDTH, EngineOptions, EngineParts, StepResult, candidate_widths
from .slot import Draft, Ids, Prompt, Slot, Verify, Work

MAX_SLOTS = 64
CANDIDATES = (0, 64, 256, MOST_CANDIDATES)  # of several slots: more than enough never hurts, and each number is a family of graphs
AHEAD = 64  # tokens, or a whole step, before a span ends the graph of the next one is built
PREPARE_TOKENS = 2048


class Engine(EngineParts):
    """Runs steps over its slots."""

    def __init__(self, backend: Backend, target: Target, drafter: DFlash | None, options: EngineOptions) -> None:
        whole(options.slots, "the number of slots", 1, MAX_SLOTS)
        self.slots = [Slot(Cursor(options.n_ctx), drafting=drafter is not None) for _ in range(options.slots)]
        self.alone = options.slots == 1
        super().__init__(backend, target, drafter, options)
        self.forwards = self.rows_computed = self.rows_used = 0
        self.builds_ahead = backend.device.kind != "cpu"  # which has no time to spare while it computes
        self.built_ahead = 0  # graphs built while the device computed
        self.epoch = 0  # sequences begun so far: whoever remembers what lies in the caches can tell whether it still does
        self._kinds: tuple[tuple[str, int], ...] = ()  # steps that are expected, see prepare
        self._last_span = 0

    # -- sequences

    def admit(self, drafting: bool = True, candidates: int | None = 0) -> int | None:
        """Takes the lowest free slot for a new sequence; None if there is none.

        ``drafting`` False: it will not be drafted for. ``candidates``: as in ``read_candidates``.
        """
        self._check_open()
        for index, slot in enumerate(self.slots):
            if not slot.used:
                self.read_candidates(candidates, index)
                self._begin(index, drafting)
                return index
        return None

    def reset(self, drafting: bool = True, slot: int = 0) -> None:
        """Forgets the slot's sequence and begins another one. Of a slot that is alone K/V rows stay as they are, unless NaN came up: nothing
        below the cursor is theirs any more.

        ``drafting`` False: the next sequence will not be drafted for, and its drafter rows are not computed.
        """
        self._check_open()
        if self.slots[slot].used:
            self.release(slot)
        self._begin(slot, drafting)

    def _begin(self, index: int, drafting: bool) -> None:
        s = self.slots[index]
        self._clean(index)
        if self.alone and self.delta is not None:  # whose rows may stay, but not its state
            self.delta.fill_slot(index, 0)
        if self.ring is not None:
            self.ring.waiting = 0
        s.cursor.reset()
        s.certain()
        s.used, s.drafting = True, drafting and self.drafter is not None
        self.epoch += 1
        self._kinds = ()

    def release(self, slot: int) -> None:
        """Ends the sequence; the slot can be admitted again. Its memory is cleared before any step of another slot looks at it."""
        s = self._sequence(slot)
        s.used, s.clean = False, s.clean and self.alone
        s.cursor.reset()
        s.certain()
        if self.delta is not None:
            self.delta.accepted[slot] = 0

    def _clean(self, index: int) -> None:
        """Writes zeros over what the sequence before left: it may be NaN, which neither masks nor switched-off rows stop."""
        if self.slots[index].clean:
            return
        self.kv.fill_slot(index, 0)
        if self.draft_kv is not None:
            self.draft_kv.fill_slot(index, 0)
        if self.delta is not None and not self.alone:
            self.delta.fill_slot(index, 0)
        self.slots[index].clean = True

    @property
    def cursor(self) -> Cursor:
        """Of the first slot."""
        return self.slots[0].cursor

    def accept(self, rows: int, pending: int, slot: int = 0) -> None:
        """Commits the first ``rows`` rows of the slot's last block; ``pending`` is the token chosen after them."""
        s = self._sequence(slot)
        pending = self._token(pending)
        if not 1 <= whole(rows, "the number of accepted rows", 0, self.options.width) <= s.open_rows:
            raise EngineError(f"{rows} rows cannot be accepted of a block of {s.open_rows} in slot {slot}: run a step first")
        if s.tokens.size:
            self._move(slot, s.base + rows, pending)
        else:  # a plain token is in the recurrent state already
            s.cursor.advance(0, pending)
            s.open_rows = 0
        if not self.builds_ahead:  # computing keeps the host busy, and building may move the logits that were read until now
            self._build_expected()

    def read_candidates(self, count: int | None, slot: int = 0) -> None:
        """What ``candidates`` gives from the next step on: so many of a row's largest logits, None for all; 0 if nobody will ask.

        On the CPU all logits lie in host memory, and nothing has to be read.
        """
        count = count if count is None else whole(count, "the number of candidates", 0, MOST_CANDIDATES)
        self.slots[slot].candidates = 0 if self.backend.device.kind == "cpu" else count

    def candidates(self, row: int, slot: int = 0) -> tuple[np.ndarray | None, np.ndarray]:
        """What may come after ``row`` of the slot's last work (of a prompt, after its last row): I32 token ids (None: all of the vocabulary)
        and F32 logits. Valid until ``accept`` or the next step."""
        s = self._sequence(slot)
        if self._last is None or self.graphs.closed:
            raise EngineError("no step has been computed whose candidates could be read")
        return self._last.candidates(s.row + whole(row, f"the row of slot {slot}", 0, max(0, s.ids.size - 1)))

    def choose(self, pending: int, slot: int = 0) -> None:
        """Puts ``pending`` in the place of the greedy choice after a prompt."""
        s = self._sequence(slot)
        if s.open_rows:
            raise EngineError(f"slot {slot} has an open block: accept says which token comes after it")
        s.cursor.advance(0, self._token(pending))

    def rollback_range(self, slot: int = 0) -> tuple[int, int]:
        """The lengths, lowest and highest, that ``rollback`` takes now."""
        s = self._sequence(slot)
        return s.base, s.base + s.tokens.size

    def rollback(self, n: int, slot: int = 0) -> None:
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

    def settle(self, slot: int | None = None) -> None:
        """Commits what is pending in one slot, or in all: caches and recurrent states hold the whole sequences, whose lengths are final."""
        self._check_open()
        seats = self.graphs.every if slot is None else SlotRange(slot, 1)
        for index in seats.slots:
            if rows := self.slots[index].open_rows:
                raise EngineError(f"the last block of {rows} rows in slot {index} is neither accepted nor given up: call accept first")
        self._catch_up()
        self.flush(seats)

    def flush(self, seats: SlotRange | None = None) -> None:
        """Commits what was accepted of last blocks into the recurrent states now; the next step would otherwise do it first.

        Open blocks stay open.
        """
        seats = seats or self.graphs.every
        if self.delta is not None and (self.alone or self.delta.accepted[seats.part].any()):
            self._lay_out(0) if self.alone else self._commit(seats, self.delta.width)
        for s in self.slots[seats.part]:
            if not s.open_rows:
                s.certain()

    def _commit(self, seats: SlotRange, width_to: int) -> None:
        assert self.delta is not None
        replay = self.delta.pending or not self.delta.inline
        step = self.graphs.get("commit", self.delta.width, 0, seats, width_to, replay)
        self.delta.fill_tail(step.host["tail"], seats)
        if replay:
            self.delta.fill_keep(step.host["keep"], seats)
        step.fields.run()
        self.delta.accepted[seats.part] = 0

    def _lay_out(self, width: int) -> None:
        """Makes the recurrent state ready for blocks of ``width`` rows (one slot: also 0 for prompts, 1 for plain tokens)."""
        if self.delta is None or self.delta.width == width:
            return
        if self.alone:
            self._commit(self.graphs.every, width)
        else:
            self.settle()
        self.delta.lay_out(width)

    def snapshot(self, slot: int = 0) -> Snapshot:
        """A copy of the slot's sequence as it stands, on the device. ``restore`` it any number of times, into any slot; ``close`` it.

        Raises:
            DeviceError: the device has no memory for it.
            EngineError: the slot has no sequence, or a block that was not accepted yet.
        """
        self._check_open()
        s = self._sequence(slot)
        self.settle(slot)
        n = s.cursor.committed
        with self.sequence.whole(n, s.drafting, slot) as pieces:
            copy = pieces.copy(self.backend)
        if copy is None:
            name = self.backend.device.name
            raise DeviceError(f"no memory on {name} for a snapshot of {n} tokens; close another one or use a smaller `n_ctx`")
        return Snapshot(copy, n, s.cursor.pending, s.drafting, self)

    def restore(self, snapshot: Snapshot, slot: int = 0) -> None:
        """Makes ``snapshot`` of this engine the sequence of an admitted slot: the next step gives what it would have given then.

        Raises:
            EngineError: the slot has no sequence; the snapshot was closed, or taken of another engine.
        """
        self._check_open()
        s = self._sequence(slot)
        if not isinstance(snapshot, Snapshot) or snapshot.engine is not self or snapshot.pieces.closed:
            raise EngineError("this is no open snapshot of this engine: take one with snapshot()")
        if self.alone:
            self.reset(snapshot.drafting)
        with self.sequence.whole(snapshot.committed, snapshot.drafting, slot) as pieces:
            snapshot.pieces.write_to(pieces, self.backend)
        s.cursor.reset()
        s.drafting = snapshot.drafting
        self.resume(snapshot.committed, snapshot.pending, slot)

    def resume(self, committed: int, pending: int | None = None, slot: int = 0) -> None:
        """Says that ``committed`` tokens of the slot's sequence are in the caches, whatever brought them there; a prompt goes on behind them.

        Raises:
            EngineError: fewer than it has already, more than the context holds, or a pending token that there is not.
        """
        s, pending = self._sequence(slot), None if pending is None else self._token(pending)
        n = whole(committed, "the length of the sequence", s.cursor.committed, self.options.n_ctx)
        s.cursor.advance(n - s.cursor.committed, pending)
        s.certain()
        if self.delta is not None:
            self.delta.accepted[slot] = 0

    # -- steps of one slot, by name

    def prefill(
        self,
        tokens: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] | None = None,
        slot: int = 0,
    ) -> int | None:
        """Computes ``tokens`` behind what is already there and returns the greedy next token, which becomes pending. A block that nothing was
        accepted of is given up.

        Args:
            tokens: at least one token id.
            progress: called with (done, total) after each chunk.
            stop: asked before each chunk; True ends the prefill early with None, the chunks done so far stay committed.

        Raises:
            ContextError: empty, too long for the context, or an id outside the vocabulary.
            EngineError: NaN or Inf came out.
        """
        ids, pending = self._next_tokens(tokens, slot), None
        for done in range(0, ids.size, self.options.chunk):
            if stop is not None and stop():
                return None
            part = ids[done : done + self.options.chunk]
            result = self.step({slot: Prompt(part)})[slot]
            if not result.target_finite:
                raise EngineError(self.not_finite(slot))
            pending = int(result.ids[0])
            if progress is not None:
                progress(done + part.size, ids.size)
        return pending

    def plain_step(self, slot: int = 0) -> StepResult:
        """Computes the pending token alone, which is committed by it. Follow with ``accept(1, ids[0])``."""
        return self._alone(slot, Verify())

    def fused_step(self, width: int | None = None, masks: np.ndarray | None = None, slot: int = 0) -> StepResult:
        """Drafts a block behind the pending token and verifies it, in one graph. Follow with ``accept``. ``masks``: as in ``Draft``."""
        return self._alone(slot, Draft(self.options.width if width is None else width, masks))

    def verify_step(self, drafts: Sequence[int], slot: int = 0) -> StepResult:
        """Verifies given ids behind the pending token: a block of len(drafts) + 1 rows. Follow with ``accept``."""
        return self._alone(slot, Verify(token_ids(drafts, self.target.n_vocab, "the block of drafts")))

    def _alone(self, slot: int, item: Work) -> StepResult:
        self._give_up(slot)
        return self.step({slot: item})[slot]

    def _give_up(self, slot: int) -> None:
        """Nothing of an open block counts."""
        s = self._sequence(slot)
        if s.open_rows:
            s.certain()

    def logits(self, tokens: Sequence[int], slot: int = 0) -> np.ndarray:
        """Logits of all ``tokens`` in graphs of exactly their number of rows (chunked by the prefill chunk). F32 [T, n_vocab].

        This is llama.cpp's batch shape, so results can be compared bit for bit. Commits the tokens; no drafter rows are written.
        """
        ids = self._next_tokens(tokens, slot)
        out = np.empty((ids.size, self.target.n_vocab), np.float32)
        for first, n, step in self._exact("logits", ids, slot):
            block = out[first : first + n]
            lib.ggml_backend_tensor_get(step.extra["logits"], ffi.from_buffer(block), 0, block.nbytes)
            self.slots[slot].cursor.pending = int(block[-1].argmax())
        return out

    def capture(self, tokens: Sequence[int], layers: Sequence[int], slot: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Greedy ids after each of ``tokens``, I32 [T], and the inputs of the target ``layers``, F32 [len(layers), T, n_embd].

        Layer v means what it does in a drafter's ``target_layers``: n_layer is the last layer's output. Commits the tokens; no drafter rows
        are written.

        Raises:
            ContextError: as ``prefill``.
            EngineError: a layer that the target does not have.
        """
        layers = [whole(v, "a captured layer", 0, self.target.n_layer) for v in layers]
        ids = self._next_tokens(tokens, slot)
        chosen = np.empty(ids.size, np.int32)
        out = np.empty((len(layers), ids.size, self.target.n_embd), np.float32)
        for first, n, step in self._exact("capture", ids, slot, tuple(layers)):
            chosen[first : first + n] = step.ids()
            for block, feature in zip(out[:, first : first + n], step.extra["features"], strict=True):
                lib.ggml_backend_tensor_get(feature, ffi.from_buffer(block), 0, block.nbytes)
            self.slots[slot].cursor.pending = int(chosen[first + n - 1])
        return chosen, out

    def _exact(self, role: str, ids: np.ndarray, slot: int, *more: object) -> Iterator[tuple[int, int, Step]]:
        """Computes ``ids`` in chunks of their own number of rows; gives each one's first row, number of rows and step."""
        for first in range(0, ids.size, self.options.chunk):
            part = ids[first : first + self.options.chunk]
            self._aim([slot])
            step = self._run_rows(role, {slot: Prompt(part)}, {slot: part.size}, SlotRange(slot, 1), part.size, None, more)[0]
            self.slots[slot].cursor.advance(part.size, None)
            yield first, part.size, step

    def logits_together(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Logits of all tokens of several slots, F32 [T, n_vocab] each, in one forward pass as wide as the longest (one prefill chunk at
        most). Commits the tokens; no token becomes pending, and no drafter rows are written."""
        work = {slot: Prompt(tokens) for slot, tokens in prompts.items()}
        rows, seats = self._checked(work)
        self.graphs.candidates = 0
        width = max(rows.values())
        step = self._run_rows("logits", work, rows, seats, width, None)[0]
        logits, out = step.extra["logits"], {}
        for slot, n in rows.items():
            self.slots[slot].cursor.advance(n, None)
            out[slot] = np.empty((n, self.target.n_vocab), np.float32)
            at = (slot - seats.first) * width * logits.nb[1]
            lib.ggml_backend_tensor_get(logits, ffi.from_buffer(out[slot]), at, out[slot].nbytes)
        return out

    # -- steps

    def step(self, work: Mapping[int, Work], meanwhile: Callable[[], object] | None = None) -> dict[int, StepResult]:
        """One forward pass over the slots named in ``work``. Results have the rows of their slot only; a prompt's has its last row.

        ``meanwhile`` is called once the pass is under way: what it does costs no time as long as a device computes on its own.

        Raises:
            ContextError: a prompt that is empty, does not fit the context or has ids outside the vocabulary.
            EngineError: a slot without a sequence, a block that was not accepted yet, a width that was not planned for.
        """
        self._check_open()
        if not (type(work) is dict or isinstance(work, Mapping)) or not work:
            raise EngineError("a step needs work for at least one slot, as {slot: Prompt(...), Verify(...) or Draft(...)}")
        rows, seats = self._checked(work)
        certain = all(n == 1 or isinstance(work[slot], Prompt) for slot, n in rows.items())
        return (self._direct if certain else self._block)(work, rows, seats, meanwhile)

    def _checked(self, work: Mapping[int, Work]) -> tuple[dict[int, int], SlotRange]:
        """The rows of each slot, and the slots that the step covers."""
        rows = {slot: self._check(slot, item) for slot, item in work.items()}
        self._aim(work)
        if self.alone:
            return rows, self.graphs.every
        seats = covering(rows, len(self.slots))
        for slot in seats.slots:
            if not self.slots[slot].used:
                self._clean(slot)
        return rows, seats

    def _aim(self, slots: Sequence[int] | Mapping[int, Work]) -> None:
        """Which variants of its graphs a step over these slots needs."""
        if self.alone:
            self.graphs.drafting, self.graphs.candidates = self.slots[0].drafting, self.slots[0].candidates
            return
        self.graphs.drafting = any(self.slots[slot].drafting for slot in slots)
        wanted = [self.slots[slot].candidates for slot in slots]
        self.graphs.candidates = None if None in wanted else next(n for n in CANDIDATES if max(w or 0 for w in wanted) <= n)

    def _check(self, slot: int, item: Work) -> int:
        """Rows that the work takes, at least 1."""
        s = self._sequence(slot)
        if s.open_rows:
            raise EngineError(f"slot {slot} has a block of {s.open_rows} rows that nothing was accepted of: call accept or rollback first")
        if isinstance(item, Prompt):
            ids = self._fitting(s, item.tokens)
            if ids.size > self.options.chunk:
                raise EngineError(f"a prompt of {ids.size} tokens in one step: the widest chunk is {self.options.chunk}")
            return ids.size
        if not isinstance(item, (Verify, Draft)):
            raise EngineError(f"the work of slot {slot} is {item!r}: use Prompt, Verify or Draft")
        if s.cursor.pending is None:
            raise EngineError(f"slot {slot} has no pending token: prefill a prompt first")
        if s.cursor.room < 1:
            raise ContextError(f"the context of {s.cursor.n_ctx} tokens is full; raise `n_ctx`")
        if isinstance(item, Draft):
            width = whole(item.width, "the width of the block", 0, MOST_WIDTH)
        else:
            if not len(item.drafts):
                return 1
            width = 1 + token_ids(item.drafts, self.target.n_vocab, "the block of drafts").size
        if not 1 <= width <= self.options.width or (isinstance(item, Draft) and width < 2):
            raise EngineError(f"a block of {width} rows is impossible here: 2 to {self.options.width} were planned for at load")
        if isinstance(item, Draft) and not s.drafting:
            why = "there is no drafter" if self.drafter is None else f"the sequence in slot {slot} was started without drafting"
            raise EngineError(f"{why}: use Verify or a plain step")
        return width

    def _fitting(self, s: Slot, tokens: Ids) -> np.ndarray:
        """``tokens`` as I64 [T], if they are ids of the vocabulary that fit behind what is there."""
        ids = token_ids(tokens, self.target.n_vocab)
        s.cursor.check_fits(ids.size)
        return ids

    def _next_tokens(self, tokens: Sequence[int], slot: int) -> np.ndarray:
        ids = self._fitting(self._sequence(slot), tokens)
        self._check_open()
        self._give_up(slot)
        return ids

    def chunk_width(self, rows: int) -> int:
        """Rows of the graph that computes ``rows`` certain rows of one of several slots."""
        return next(w for w in (1, *self.chunks) if rows <= w)

    def _direct(
        self, work: Mapping[int, Work], rows: dict[int, int], seats: SlotRange, meanwhile: Callable[[], object] | None
    ) -> dict[int, StepResult]:
        """All rows are certain: the recurrent states are written by the step itself."""
        need = max(rows.values())
        chunk = need > 1 or (self.alone and isinstance(work[0], Prompt))  # one token of a prompt is a chunk, as it is without neighbours
        width = next(w for w in self.chunks if need <= w) if chunk else 1
        step, times = self._run_rows("prefill" if chunk else "plain", work, rows, seats, width, meanwhile)
        ids, out = step.ids(), {}
        for slot, n in rows.items():
            s, at = self.slots[slot], slot - seats.first
            s.cursor.advance(n, int(ids[at]))
            s.certain()
            s.open_rows, s.row = 0 if isinstance(work[slot], Prompt) else 1, at
            tokens = step.host["tokens"][at * width : at * width + n].copy()
            finite = step.finite(None if self.alone else slice(at, at + 1))
            out[slot] = StepResult(tokens, ids[at : at + 1], True, self._sound(slot, finite), times)
        return out

    def _run_rows(
        self,
        role: str,
        work: Mapping[int, Work],
        rows: dict[int, int],
        seats: SlotRange,
        width: int,
        meanwhile: Callable[[], object] | None,
        more: tuple = (),
    ) -> tuple[Step, StepTimes]:
        """Computes rows that are certain, ``width`` of each slot."""
        plain = role == "plain"
        if self.ring is not None and (not plain or self.ring.waiting == RING):
            self._catch_up()
        if self.alone:
            self._lay_out(int(plain))
        elif self.delta is not None and self.delta.accepted[seats.part].any():
            self.flush(seats)
        step = self.graphs.get(role, width, self._row_span(role, seats, width), seats, *more)
        self._fill_rows(step, width, rows, seats)
        host = step.host
        tokens = host["tokens"]
        if len(rows) < seats.count:
            tokens[:] = 0
        for slot, n in rows.items():
            at, ids = (slot - seats.first) * width, self._known(slot, work[slot])
            tokens[at : at + n] = ids
            if n < width:
                tokens[at + n : at + width] = ids[-1]  # padding rows are real tokens: NaN in one would leak through 0 * NaN
        if "out_row" in host:
            host["out_row"][:] = [(slot - seats.first) * width + rows.get(slot, 1) - 1 for slot in seats.slots]
        if self.delta is not None:
            self._fill_direct(step, width, rows, seats)
        if self.ring is not None and "ring_row" in host:
            host["ring_row"][0] = self.ring.waiting
        times = self._run(step, role, width, seats, meanwhile)
        self._count(width * seats.count, rows)
        if self.delta is not None:
            self.delta.after_rows(int(plain))
        if self.ring is not None and "ring_row" in host:
            self.ring.waiting += 1
        return step, times

    def _fill_direct(self, step: Step, width: int, rows: dict[int, int], seats: SlotRange) -> None:
        assert self.delta is not None
        host = step.host
        if "tail" in host:
            self.delta.fill_tail(host["tail"], seats)
            return
        real = np.array([rows.get(slot, 0) for slot in seats.slots])[:, None]
        host["on"].reshape(seats.count, width)[:] = self._iota[:width] < real
        host["last"].reshape(seats.count, -1)[:] = real + np.arange(self.delta.history_rows)
        if "take" in host:
            self.delta.fill_take(host["take"], width, seats, single=True)

    def _block(
        self, work: Mapping[int, Work], rows: dict[int, int], seats: SlotRange, meanwhile: Callable[[], object] | None
    ) -> dict[int, StepResult]:
        """Some rows may turn out wrong: nothing is written into the recurrent states but what the steps before left pending."""
        need = max(rows.values())
        width = need if self.alone else next((w for w in candidate_widths(self.options.width) if need <= w), 0)
        if not width:
            raise EngineError(f"a step with drafts has at most {self.options.width} rows per slot, but a prompt has {need}")
        for slot in seats.slots if len(work) < seats.count else ():
            if self.slots[slot].open_rows and slot not in work:
                raise EngineError(f"this step covers slot {slot} and would take its open block away: call accept or rollback there first")
        self._catch_up()
        self._lay_out(width)
        drafting = any(isinstance(item, Draft) for item in work.values())
        role = "fused" if drafting else "verify"
        step = self.graphs.get(role, width, self._span(seats, width), seats)
        self._fill_rows(step, width, rows, seats)
        self._fill_tokens(step, width, work, seats)
        if drafting:
            self._fill_drafts(step, width, work, seats)
        if self.delta is not None:
            self.delta.fill_tail(step.host["tail"], seats)
            self.delta.fill_keep(step.host["keep"], seats)
            if "take" in step.host:
                self.delta.fill_take(step.host["take"], width, seats)
        times = self._run(step, role, width, seats, meanwhile)
        self._count(width * seats.count, rows)
        for slot in seats.slots:  # whatever was pending there is committed now
            self.slots[slot].certain()
        if self.delta is not None:
            self.delta.after_block(seats)
        ids, sound = step.ids(), step.finite(drafts=True)
        return {slot: self._block_result(step, ids, sound, width, slot, item, rows[slot], seats, times) for slot, item in work.items()}

    def _run(self, step: Step, role: str, width: int, seats: SlotRange, meanwhile: Callable[[], object] | None) -> StepTimes:
        self._last = step
        step.fields.launch()
        try:
            if meanwhile is not None:
                meanwhile()
            if self.builds_ahead and role not in ("logits", "capture"):
                self._build_expected() if self._kinds else self._build_next(role, width, seats)
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
        target_finite = sound or step.finite(part)
        self._sound(slot, draft_finite and target_finite)
        if isinstance(item, Prompt):
            self._move(slot, s.base + n, int(s.ids[-1]))
            s.row += n - 1
        return StepResult(s.tokens, s.ids[-1:] if isinstance(item, Prompt) else s.ids, draft_finite, target_finite, times)

    def _sound(self, slot: int, finite: bool) -> bool:
        """``finite``; if it is not, nothing of the slot is to be reused, and it is cleared before its next sequence: masks do not stop NaN."""
        if not finite:
            self.slots[slot].clean = False
            self.epoch += 1
        return finite

    def not_finite(self, slot: int = 0) -> str:
        """What to say of a slot whose target produced NaN or Inf."""
        return (
            f"{self.target.file.path.name} produced NaN or Inf after {self.slots[slot].cursor.committed} tokens; the weights are damaged or "
            "overflow on this device"
        )

    # -- graphs ahead of their steps

    def _reserve(self) -> None:
        """Plans the largest graph of every role that a generation uses: what does not fit is said now, and no buffer grows later."""
        live, width = self.kv.live, self.options.width
        self.graphs.get("prefill", self.options.chunk, live, SlotRange(0, 1))
        self.graphs.get("plain", 1, live)
        if self.ring is not None:
            self.graphs.get("catchup", RING, 0)
        if self.drafter is not None and width > 1:
            self.graphs.get("fused", width, live)
        if self.delta is not None:
            self.graphs.get("commit", width, 0, None, 0 if self.alone else width, width > 1 or not self.alone)

    def prepare(self, kinds: Sequence[tuple[str, int]], tokens: int) -> None:
        """Announces the (role, width) of the steps that the next ``tokens`` tokens of the first slot will take, so that none of them waits for
        its graph.

        What is needed at once is built here. The graphs of the next span are built one per step, while the device computes; the CPU has no
        such time to spare and builds the spans of PREPARE_TOKENS tokens here.
        """
        self._kinds, self._last_span = tuple(kinds), self.kv.span(self.cursor.committed + tokens)
        self._aim([0])
        ahead = min(tokens, SPAN // 4 if self.builds_ahead else PREPARE_TOKENS)
        for role, width in self._kinds:
            span, last = 0, self.kv.span(self.cursor.committed + ahead + width)
            while span < last:
                span = max(self._span(self.graphs.every, width), self.kv.span(span + 1))
                self.graphs.get(role, width, span)

    def prepare_transitions(self, widths: Sequence[int]) -> None:
        """Builds the commit graphs between blocks of these widths, and from prompts into them: ten nodes each."""
        if self.delta is None or not self.alone:
            return
        self._aim([0])
        for left in (0, *widths):
            for entered in widths:
                if left != entered:
                    self.graphs.get("commit", left, 0, None, entered, left > 1)

    def _build_expected(self) -> None:
        """Builds one graph of the next span, of the steps that were announced, if one is missing."""
        for role, width in self._kinds:
            span = self.kv.span(self._span(self.graphs.every, width) + 1)
            if span <= self._last_span and not self.graphs.has(role, width, span):
                self.graphs.get(role, width, span)
                self.built_ahead += 1
                return

    def _build_next(self, role: str, width: int, seats: SlotRange) -> None:
        """Builds the graph of the next span shortly before it is needed, but only where the buffer will do, which is being computed in, and holds
        the logits that somebody is still to read."""
        if self.graphs.candidates is not None and self.graphs.reserves(role, width, seats):
            self.graphs.get(role, width, self._span(seats, width + max(width, AHEAD)), seats)

    def step_graph(self, role: str, width: int) -> Graph:
        """The graph that a step of the first slot, of this role and width, would compute now."""
        self._aim([0])
        return self.graphs.get(role, width, self._span(SlotRange(0, 1), width), SlotRange(0, 1)).graph

    # -- helpers

    def _sequence(self, slot: int) -> Slot:
        if type(slot) is not int or not 0 <= slot < len(self.slots):
            slot = whole(slot, "the slot", 0, MAX_SLOTS)
            if slot >= len(self.slots):
                raise EngineError(f"slot {slot} has no sequence: there are {len(self.slots)} slots")
        s = self.slots[slot]
        if not s.used:
            if not self.alone:
                raise EngineError(f"slot {slot} has no sequence: admit one first")
            self._check_open()
            self._begin(slot, True)
        return s

    def _known(self, slot: int, item: Work) -> Ids:
        """The ids of the work's rows that the host knows."""
        if isinstance(item, Prompt):
            return item.tokens
        pending = self.slots[slot].cursor.pending
        assert pending is not None
        return [pending] if isinstance(item, Draft) else [pending, *item.drafts]

    def _span(self, seats: SlotRange, width: int) -> int:
        return self.kv.span(self._longest(seats) + width)

    def _longest(self, seats: SlotRange) -> int:
        return self.cursor.committed if self.alone else max(s.cursor.committed for s in self.slots[seats.part])

    def _row_span(self, role: str, seats: SlotRange, width: int) -> int:
        """Of rows that are certain. Exact ones read what llama.cpp would: where a sum over rows is split depends on their number."""
        longest = self._longest(seats)
        if role in ("logits", "capture"):
            return min(padded(longest + width), self.kv.live)
        return self.kv.span(longest + width, SPAN if self.alone and role == "prefill" else None)

    def _catch_up(self) -> None:
        """Computes the drafter's K/V rows of the tokens that were decoded plainly since it last had any (one slot)."""
        if self.ring is None or not self.ring.waiting:
            return
        assert self.draft_kv is not None
        step = self.graphs.get("catchup", RING, 0)
        first, count = self.cursor.committed - self.ring.waiting, self.ring.waiting
        np.add(self._iota[:RING], first, out=step.host["positions"])
        self.draft_kv.rows_for(first, RING, count, step.host["kv_rows"])
        step.fields.run()
        self.ring.waiting = 0

    def _fill_rows(self, step: Step, width: int, rows: dict[int, int], seats: SlotRange) -> None:
        """Positions and cache rows. A slot without work looks at its first row, so that what it computes is finite, and writes trash."""
        host, kv = step.host, self.kv
        positions, kv_rows = host["positions"], host["kv_rows"]
        for at, slot in enumerate(seats.slots):
            real, part = rows.get(slot, 0), slice(at * width, (at + 1) * width)
            n = self.slots[slot].cursor.committed if real else 0
            if real:
                np.add(self._iota[:width], n, out=positions[part])
            else:
                positions[part] = 0
            kv.rows_for(n, width, real, kv_rows[part])
            if at:
                kv_rows[part] += at * (kv.live + kv.trash)
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

    def _fill_tokens(self, step: Step, width: int, work: Mapping[int, Work], seats: SlotRange) -> None:
        """The ids that the host knows; of one slot that drafts, the first one."""
        host = step.host
        known = host.get("given", host["tokens"])
        if not self.alone:
            known[: width * seats.count] = 0
        for slot, item in work.items():
            at, ids = (slot - seats.first) * width, self._known(slot, item)
            known[at : at + len(ids)] = ids

    def _fill_drafts(self, step: Step, width: int, work: Mapping[int, Work], seats: SlotRange) -> None:
        assert self.drafter is not None and self.draft_kv is not None
        host, total = step.host, width * seats.count
        host["block"][:] = self.drafter.hp.mask_token
        for window in set(self.drafter.hp.window) - {0}:
            host[f"draft_first_{window}"][:] = host["positions"] - window + 1
        if not self.alone:
            host["source"][:] = np.arange(total)
            host["draft_last"][:] = 0
        for at, slot in enumerate(seats.slots):
            item, n, first = work.get(slot), self.slots[slot].cursor.committed, at * width
            real = 0
            if isinstance(item, Draft):
                real, block, last = item.width, host["block"], host["draft_last"]
                block[first] = self.slots[slot].cursor.pending
                if item.masks is not None:
                    block[first + 1 : first + real] = item.masks
                last[first : first + real] = self.drafter.last_seen(n, real)
                last[first + real : first + width] = n + real - 1
            if self.alone:
                return
            rows = host["draft_rows"][first : first + width]
            self.draft_kv.rows_for(n, width, real, rows)
            rows += at * (self.draft_kv.live + self.draft_kv.trash)
            if real:
                host["source"][first + 1 : first + real] = total + at * (width - 1) + self._iota[: real - 1]

    def _count(self, computed: int, rows: dict[int, int]) -> None:
        self.forwards += 1
        self.rows_computed += computed
        self.rows_used += sum(rows.values())

    def expert_counts(self) -> dict[str, int] | None:
        """Choices of routed experts so far, hits among them, and the host's microseconds; None where all experts are on the device."""
        host = self.target.weights.host_experts
        return asdict(host.counts()) if host is not None else None
