"""Admission and batching: which sequences have slots, and which of them compute prompt tokens or decode in the next step.

    submit --> waiting --> (lowest free slot) --> prefill, chunk by chunk --> decoding --> ended
                  |                                     |                       |
                  +----------- cancel, close, interrupt, error -----------------+--> ended

All decoding sequences share every decode step. While some decode and others prefill, steps of both kinds alternate, with prompt chunks of at most
MAX_PREFILL_TOKENS_WITH_DECODE tokens, on a GPU MAX_ON_GPU. Prompts take turns chunk by chunk; short ones that fit into one step share it, and a prompt's tail that is no longer
than the verify length joins the decode step. With a prefix cache, a prompt waits while another one computes tokens that both share.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from ..cache.prefix import PrefixCache
from ..cache.slots import covering
from ..errors import DeviceError
from ..models.adapters import Chosen
from ..speculation.plan import Planner, skip_drafter_rows
from .batch import Batch, BatchItem, Prefill, StepOutput
from .runner import ModelRunner
from .sequence import CONSTRAINT, Sequence
from .stats import WARMUP_STEPS, BatchStats

MAX_PREFILL_TOKENS_WITH_DECODE, MAX_ON_GPU = 128, 512
STEPS_PER_ADAPTERS = 8  # until sequences with other adapters have their turn: a step has one graph for all of its rows
MASK_TIMEOUT_S, LONE_MASK_TIMEOUT_S = 0.002, 0.02  # wait for a late mask where other sequences can step meanwhile, and where none can
STATE_BEFORE_END = 4  # a recurrent state is kept so many tokens before a prompt's end, for prompts that continue or repeat it
MIN_SHARED_TOKENS = 32  # identical prompts up to this length are computed again: that costs no more than a copy


class Scheduler:
    """Attributes:
    stats: counts over all sequences.
    changed: sequences come or go, so that the next step regroups.
    active: sequences with slots.
    """

    def __init__(self, runner: ModelRunner, planner: Planner, prefixes: PrefixCache | None) -> None:
        self._runner, self._planner, self.prefixes = runner, planner, prefixes
        self._most_with_decode = MAX_PREFILL_TOKENS_WITH_DECODE if runner.backend.device.kind == "cpu" else MAX_ON_GPU
        self.stats = BatchStats()
        self.changed = False
        self.active: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._lock = threading.Lock()  # of the waiting queue
        self._by_slot: dict[int, Sequence] = {}
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._constrained: list[Sequence] = []  # past their prompts, under a constraint
        self._late: list[Sequence] = []  # of these, those that wait for their masks
        self._masks: list[Sequence] = []  # of the decoding ones, those under a constraint
        self._interruptible: list[Sequence] = []
        self._batch = Batch({})  # of the steps that decode the same sequences, without prompts
        self._prefill_next = True
        self._adapters: Chosen | None = None  # of the sequences whose turn it is
        self._turn, self._several = 0, False  # steps of theirs; whether others wait
        self._counts: list[dict] = []  # counters of the runner when the sequence of an only slot began, and after its first steps

    # -- from any thread

    def add(self, seq: Sequence) -> None:
        with self._lock:
            self._waiting.append(seq)
        self.changed = True

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.active

    @property
    def unsettled(self) -> bool:
        """Whether the next step may be of another kind than the last."""
        return self.changed or bool(self._prefilling)

    @property
    def undisturbed(self) -> bool:
        """Whether only decode steps are due, of sequences that the host need not look at before each step."""
        return not (self._prefilling or self._constrained or self._interruptible)

    def cancel_all(self) -> None:
        with self._lock:
            sequences = (*self._waiting, *self.active)
        for seq in sequences:
            seq.cancel()

    # -- a step

    def next_batch(self) -> Batch:
        """The sequences of the next step: those that decode, and those with prompt tokens to compute."""
        self._turn += 1
        if self._several and self._turn > STEPS_PER_ADAPTERS:
            self.changed = True
        if self.changed or self._prefilling:
            self._regroup()
        if self._constrained:
            self._wait_for_masks()
        for seq in [s for s in self._interruptible if s.interrupted is not None and s.interrupted()] if self._interruptible else ():
            self.end(seq, "interrupt")
        if self.changed:
            self._regroup()
        prefilling = self._reuse_prefixes() if self._prefilling else []
        if prefilling:
            batch = Batch({}, None, self._decoding, prefilling, self._by_slot, self._masks)
        else:
            self._prefill_next, batch = True, self._batch
        batch.plan, batch.began = None, time.perf_counter_ns()
        return batch

    def add_prefill(self, batch: Batch) -> None:
        """Adds prompt tails to a decode step, or makes the step a prefill step where it is the prompts' turn."""
        items, n_slots = batch.items, len(self._runner.slots)
        if batch.decoding:
            if any(item.rows > 1 for item in items.values()):
                width = min(batch.plan.verify_len, self._runner.options.chunk)
                slots = 2 * covering(items, n_slots).count  # twice the rows cost less than another step
                for s in batch.prefilling:
                    if s.remaining <= width and not s.rows_of_pictures(s.remaining) and covering((*items, s.slot), n_slots).count <= slots:
                        items[s.slot] = Prefill(s.prompt[s.computed :], scored=s.options.scored)
            if not self._prefill_next or all(s.slot in items for s in batch.prefilling):
                self._prefill_next = True
                return
        batch.items, batch.constrained = self._chunks(batch.prefilling, bool(batch.decoding)), []
        batch.decoding, self._prefill_next = [], False

    def finish(self, batch: Batch, accepted: Mapping[int, list[int]], output: Mapping[int, StepOutput]) -> None:
        """Hands each sequence its tokens, counts, and ends those that are done."""
        now = time.perf_counter_ns()
        spent, stats, threads = now - batch.began, self.stats, self._runner.threads
        batch.ms = 1e-6 * spent
        stats.steps += 1
        stats.seconds += spent * 1e-9
        stats.decoding[len(batch.decoding)] += 1
        stats.prompt_steps += not batch.decoding
        rows, longest = 1, 0
        for slot, item in batch.items.items():
            seq, out = self._by_slot[slot], output[slot]
            try:
                if slot in batch.errors:
                    raise batch.errors[slot]
                tokens = accepted[slot]
                if isinstance(item, Prefill):
                    self._finish_chunk(seq, item, tokens)
                else:
                    wait, seq.last_step = now - seq.last_step, now
                    seq.rows = seq.planned_rows or out.tokens.size
                    if seq.rows > rows:  # noqa: PLR1730  (in every step)
                        rows = seq.rows
                    if wait > longest:  # noqa: PLR1730
                        longest = wait
                    timing = seq.rows, wait, threads.now, threads.calm, 1e-9 * (now - seq.since), spent // 1000, out.times
                    self._add_tokens(seq, tokens, out.tokens.size, timing)
                    if not out.draft_finite:  # no more drafts
                        self.changed = True
                    if self._counts and seq.stats.steps == WARMUP_STEPS:
                        self._counts.append(self._runner.counts())
                if tokens:
                    stats.emitted += len(tokens)
                    seq.outputs.append((tokens, seq.offered))
                if seq.limits.reason and not seq.remaining:
                    self.end(seq, seq.limits.reason)
            except Exception as error:  # of this sequence alone
                if isinstance(item, Prefill) and self.prefixes is not None and not out.target_finite:
                    self.prefixes.discard(slot)
                self.fail(seq, error)
        if batch.decoding:
            batch.graph_rows = self._planner.graph_rows[rows]
            stats.widths[batch.graph_rows] += 1
            stats.longest_wait = max(stats.longest_wait, 1e-9 * longest)

    @staticmethod
    def _add_tokens(seq: Sequence, tokens: list[int], rows: int, timing: tuple) -> None:
        """A decode step that verified ``rows`` rows of ``seq`` emitted ``tokens``."""
        seq.history += tokens
        seq.tokens += tokens
        seq.matched, drafts = len(tokens) - 1, len(seq.offered)
        seq.stats.add_step(rows, seq.matched, seq.by_drafter, drafts, seq.source, timing)
        if seq.ngram is not None:
            seq.ngram.extend(tokens)
        if (jump := seq.jump_forward) is not None:
            if seq.source == CONSTRAINT:
                jump.observe(drafts, seq.matched)
                seq.stats.forced, seq.stats.forced_matched = jump.drafted, jump.matched
            elif seq.by_drafter or rows > 1:
                jump.observe_drafter(seq.matched)

    def fail_all(self, error: BaseException) -> None:
        """An error of the step itself ends every sequence with a slot."""
        for seq in list(self.active):
            self.fail(seq, error)

    # -- who takes part

    def _regroup(self) -> None:
        self.changed = False  # first: later changes count for the next step
        self.drop_cancelled()
        self._admit()
        active = self._on_turn()
        self._by_slot = {s.slot: s for s in active}
        self._interruptible = [s for s in active if s.interrupted is not None]
        self._prefilling = [s for s in active if s.remaining]
        self._constrained = [s for s in active if not s.remaining and s.constraint is not None]
        self._decoding = [s for s in active if not s.remaining and s not in self._late]
        self._masks = [s for s in self._decoding if s.constraint is not None]
        self._batch = Batch({}, None, self._decoding, [], self._by_slot, self._masks)
        slots = [s.slot for s in self._decoding]
        self._planner.regroup(self._decoding, covering(slots, len(self._runner.slots)).count if slots else 0)
        for seq in self._decoding:
            if not seq.decoding:
                self._planner.prepare(seq)
                seq.begin_decoding()

    def _on_turn(self) -> list[Sequence]:
        """The active sequences with the same adapters whose turn it is; the others wait."""
        choices = list(dict.fromkeys(s.options.adapters for s in self.active))
        self._several = len(choices) > 1
        if not self._several:
            return self.active
        if self._turn > STEPS_PER_ADAPTERS or self._adapters not in choices:
            after = choices.index(self._adapters) + 1 if self._adapters in choices else 0
            self._adapters, self._turn = choices[after % len(choices)], 1
        return [s for s in self.active if s.options.adapters == self._adapters]

    def _wait_for_masks(self) -> None:
        """Leaves out sequences whose masks are late, and takes them in again."""
        slow = [s for s in self._constrained if s.constraint is not None and s.constraint.slow]
        if not slow and not self._late:
            return
        late = [s for s in slow if self._mask_late(s, 0.0)]
        alone = len(late) == len(self.active)
        until = time.perf_counter() + (LONE_MASK_TIMEOUT_S if alone else MASK_TIMEOUT_S)
        late = [s for s in late if self._mask_late(s, until - time.perf_counter() if alone or s not in self._late else 0.0)]
        if late != self._late:
            self._late, self.changed = late, True

    def _mask_late(self, seq: Sequence, timeout: float) -> bool:
        try:
            return seq.constraint is not None and seq.constraint.mask_late(max(0.0, timeout))
        except Exception as error:  # of this sequence alone: the deadline has passed
            self.fail(seq, error)
            return False

    # -- admission

    def _admit(self) -> None:
        runner = self._runner
        with self._lock:
            while self._waiting:
                seq = self._waiting[0]
                options = seq.options
                if seq.keeps_slot:
                    if any(other.slot == seq.slot for other in self.active):
                        return
                    runner.read_candidates(options.candidates, seq.slot, options.constrained)
                else:
                    speculating = seq.speculating and self._planner.width > 1
                    slot = runner.admit(speculating and not self._skips_drafter_rows(seq), options.candidates, options.constrained)
                    if slot is None:
                        return
                    seq.slot, seq.speculating = slot, speculating
                    seq.end_phase("queued")
                if seq.constraint is not None and runner.unmasked:
                    seq.stats.notes.append(runner.unmasked)
                runner.slots[seq.slot].lag = seq.prompt.lag if seq.prompt.pictures else None
                runner.slots[seq.slot].adapters = options.adapters or ()
                runner.slots[seq.slot].draft_options = options.sampler.draft_options if options.sampler is not None else None
                self.active.append(self._waiting.popleft())  # first: an error from now on ends it and frees its slot
                try:
                    if len(runner.slots) == 1:
                        self._counts = [runner.counts()]
                    self._planner.admit(seq)
                    if self.prefixes is not None:
                        self._share_prefix(seq, self.prefixes)
                except Exception as error:
                    self.fail(seq, error)

    def _skips_drafter_rows(self, seq: Sequence) -> bool:
        if len(self._runner.slots) > 1 or self._runner.slots[0].used:  # costs of one slot say nothing of several
            return False
        prefixes, options = self.prefixes, seq.options
        if prefixes is None or not options.reuse:
            return skip_drafter_rows(self._planner.policy, lambda drafting: 0)
        return skip_drafter_rows(self._planner.policy, lambda drafting: prefixes.known(seq.prompt, drafting, options.owner))

    def _share_prefix(self, seq: Sequence, prefixes: PrefixCache) -> None:
        """Finds where the prompt parts from cached and active ones, and which active ones compute what it shares."""
        grain, prompt = prefixes.grain, seq.prompt if seq.options.reuse else []
        place = prefixes.enter(seq.slot, prompt, self._runner.slots[seq.slot].drafting, seq.options.owner)
        seq.prefix_keys = [chunk.key for chunk in place.chunks]
        seq.split_points.add(grain * min(place.known, place.usable))
        if self._runner.sequence.stateful and len(prompt) > MIN_SHARED_TOKENS:
            seq.split_points.add(len(prompt) - STATE_BEFORE_END)
        if any(_identical(seq, other) for other in self._waiting):
            seq.split_points.add(len(seq.prompt) - 1)
        for other in self.active:
            if other is seq:
                continue
            pairs = list(zip(seq.prefix_keys[: place.usable], other.prefix_keys))
            shared = grain * next((i for i, (mine, its) in enumerate(pairs) if mine != its), len(pairs))
            if _identical(seq, other):
                shared = max(shared, len(seq.prompt) - 1)
            if other.will_compute(shared):
                other.split_points.add(shared)
                seq.shares.append((other, shared))

    # -- prompts

    def _reuse_prefixes(self) -> list[Sequence]:
        """Sequences with prompt tokens to compute, after what the prefix cache has by now."""
        ready = [s for s in self._prefilling if not s.waits_for_prefix]
        if (prefixes := self.prefixes) is None:
            return ready
        for s in ready:
            reuse = prefixes.restore(s.slot)
            had, s.computed = s.computed, reuse.tokens
            if s.computed > had:
                s.stats.reused_tokens += s.computed - had
                self.stats.reused_tokens += s.computed - had
                before = s.stats.reused_from
                s.stats.reused_from = {where: before.get(where, 0) + (n if where != "in place" else 0) for where, n in reuse.chunks.items()}
                if (beyond := s.computed % prefixes.grain) and s.remaining > self._runner.options.chunk:
                    s.split_points.add(s.computed - beyond + prefixes.grain)  # states are kept at multiples of the grain
            s.stats.notes += prefixes.take_notes()
        return ready

    def _chunks(self, ready: list[Sequence], with_decode: bool) -> dict[int, BatchItem]:
        """The first prompt's next chunk, and those of other prompts that fit into the same step."""
        runner, chosen = self._runner, list[Sequence]()
        rows = min(runner.options.chunk, self._most_with_decode) if with_decode else runner.options.chunk
        scored = bool(ready) and ready[0].options.scored  # in blocks, whose graphs have the logits of all rows
        rows = min(rows, runner.options.width) if scored else rows
        pictures = {s for s in ready if s.rows_of_pictures(len(s.chunk(rows)))}  # such a step computes one slot
        for seq in ready:
            together = (*chosen, seq)
            if chosen:
                if seq.options.scored != scored or pictures & set(together):
                    continue
                width = runner.chunk_width(max(len(s.chunk(rows)) for s in together))
                if width * covering([s.slot for s in together], len(runner.slots)).count > rows:
                    continue
            chosen.append(seq)
        for seq in chosen:  # the other prompts come first in the next step
            self.active.remove(seq)
            self.active.append(seq)
        chunks = {s: s.chunk(rows) for s in chosen}
        more = not with_decode and not scored and all(len(chunk) < s.remaining for s, chunk in chunks.items())
        return {s.slot: Prefill(chunk, more, scored, s.rows_of_pictures(len(chunk))) for s, chunk in chunks.items()}

    def _finish_chunk(self, seq: Sequence, item: Prefill, tokens: list[int]) -> None:
        """Keeps the chunk in the prefix cache; at the prompt's end, decoding begins with the first of ``tokens``."""
        seq.computed += len(item.tokens)
        self.stats.prompt_tokens += len(item.tokens)
        if (prefixes := self.prefixes) is not None:
            last, split = seq.remaining <= len(item.tokens), seq.computed in seq.split_points  # before the last pass, too
            if split and seq.computed % prefixes.grain:
                prefixes.store_end(seq.slot, seq.prompt)
            else:
                prefixes.computed(seq.slot, last or split)
        if seq.on_progress is not None:
            seq.on_progress(seq.computed - seq.cached, len(seq.prompt) - seq.cached)
        seq.stats.target_forwards += bool(seq.remaining or tokens)
        if seq.remaining:
            return
        seq.end_phase("prefill")
        self.changed = True
        if tokens:
            seq.stats.emitted = 1
            seq.history += tokens
            seq.tokens += tokens
            self._planner.prefilled(seq)

    # -- ends

    def drop_cancelled(self) -> None:
        """Ends cancelled sequences."""
        with self._lock:
            gone = [s for s in self._waiting if s.cancelled]
        for seq in gone + [s for s in self.active if s.cancelled]:
            try:
                self.end(seq, "cancelled")
            except BaseException as error:
                self.fail(seq, error)
                if not isinstance(error, Exception):
                    raise
            finally:  # one by one: after an interrupt the others are still there
                with self._lock:
                    if seq in self._waiting:
                        self._waiting.remove(seq)

    def end(self, seq: Sequence, reason: str) -> None:
        seq.stats.stop_reason = reason
        if self.prefixes is not None and seq in self.active and not seq.remaining and seq.options.reuse:
            self.prefixes.store_end(seq.slot, seq.history, write=True)
            seq.stats.notes += self.prefixes.take_notes()
        self.stats.finished[reason] += 1
        self._leave(seq)
        seq.ended = True

    def fail(self, seq: Sequence, error: BaseException) -> None:
        self.stats.finished["error"] += 1
        seq.error = error
        with suppress(DeviceError):  # a lost worker: its slots are not used again
            self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        self.changed = True
        self._planner.end(seq)
        active = seq in self.active
        if active:
            self.active.remove(seq)
            if self._runner.graphs.closed:
                return
            seq.stats.width_reason = self._planner.reason(seq) or seq.stats.width_reason
        seq.finish()
        self._planner.learn(seq)
        if active:
            if self._counts:
                now, self._counts = [*self._counts, self._runner.counts()], []
                seq.stats.add_counts(now[0], now[1], now[-1])
                seq.stats.memory = self._runner.memory()
            self._runner.slots[seq.slot].draft_options = None
            self._runner.read_candidates(0, seq.slot) if seq.keeps_slot else self._runner.release(seq.slot)


def _identical(a: Sequence, b: Sequence) -> bool:
    """Whether two sequences have the same prompt, long enough to share it: the second one then computes its last token alone."""
    one, other = a.options, b.options
    alike = len(a.prompt) == len(b.prompt) > MIN_SHARED_TOKENS and one.reuse and other.reuse
    return alike and one.owner == other.owner and a.speculating == b.speculating and a.prompt == b.prompt
