"""Who does what in the next step: admission, prompts in chunks, decoding, limits, cancellation. For one sequence or for 64.

    submit --> waiting --> (lowest free slot) --> prompt, chunk by chunk --> decoding --> ended
                  |                                     |                       |
                  +----------- cancel, close, interrupted, an error ------------+--> ended

One step, ``_step``: who is there (``_arrange``, only when that has changed), what each of them does (``_decode_work``, ``_prompt_work``), one
forward pass (``engine.step``), what it brought each of them (``_take``), and what is counted (``_count``).

Sequences that decode share every step. While some decode and others still read their prompts, steps of both kinds take turns, and a chunk is
then at most BESIDE tokens: no decoding sequence waits longer than that chunk. Prompts take turns among each other, chunk by chunk; short ones
that fit into one step together share it, and a prompt's end that is no longer than the block rides along with the decoding step.
Where the target is split over devices, two groups of them may decode beside each other (``rounds.py``): one group's step is waited for while the
other one's is under way. Whoever comes, goes or reads its prompt waits until both have landed.
With a prefix cache, a prompt that begins like another one waits until that one has computed what they share, and goes on behind it; what a
sequence leaves at its end is kept, for the next turn of its conversation.

Whoever waits for tokens drives: iterating a stream runs steps, for all sequences, until it has something. From several threads one drives
and the others wait for it. A single generation is a stream of a scheduler with one slot, driven by its reader.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Self

import numpy as np

from ..cache.prefix import PrefixCache
from ..cache.prefix_files import PrefixFiles
from ..cache.slots import covering
from ..checks import token_ids
from ..errors import ContextError, DeviceError, EngineError
from ..ggml.cores import CORE_MONITOR
from ..multi_device.pipeline import Rounds
from ..multi_device.pipeline_policy import control_of
from ..speculation.confidence import Confidence
from ..speculation.ngram import NgramDrafts
from ..speculation.ngram_policy import NOTHING, PLAINLY, Choice, NgramPolicy
from ..speculation.policy import PLAIN_STEP, SpeculationPolicy, SpeculationState, StepPlan
from .batch import BatchItem, Draft, Prefill, StepOutput, Verify
from .constrained import Guide, run_step
from .counters import WARMUP_STEPS, Counters
from .options import candidate_widths
from .request import PLAIN, REFERENCE, SPECULATIVE, LoopOptions, Request
from .runner import ModelRunner
from .stats import BatchStats, Stats
from .stream import Stream

BESIDE = 128  # prompt tokens per step while others decode
UNHEARD = 32  # steps without news after which width control is asked again: 20 us that a step of what came before need not take
PLAINS, ASKED = 16, 8  # plain steps in a row behind which it is asked every so many steps: 5 us of the others
PATIENCE_S, ALONE_S = 0.002, 0.02  # for a mask that is late, where others could go on without it, and where there are none
TAIL = 4  # a state is kept so many tokens before a prompt's end: the same prompt, and one whose answer begins otherwise, go on there
LEAST_SHARED = 32  # tokens of a prompt that several sequences have: computing fewer costs no more than copying what they leave


def generate(
    engine: ModelRunner,
    prompt: Sequence[int],
    options: LoopOptions,
    stats: Stats | None = None,
    prefill_progress: Callable[[int, int], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    widths: SpeculationPolicy | None = None,
    known: int = 0,
) -> Generator[list[int], None, None]:
    """One generation in the sequence that the only slot of ``engine`` holds: a block per step, first the token that the prompt leads to.

    The other arguments are those of ``Scheduler.submit``; ``options.width`` pins the width where there are no ``widths``. Close the generator
    to stop earlier.
    """
    scheduler = Scheduler(engine, options.width)
    scheduler.policy = widths
    stream = scheduler.submit(prompt, options, stats, slot=0, known=known, progress=prefill_progress, interrupted=interrupted)
    try:
        yield from stream
    finally:
        stream.close()


class Scheduler:
    """Runs the sequences of one engine, which it owns. ``width`` pins the rows per block; None learns what pays.

    ``prefix_memory``: bytes on the device for the beginnings of prompts; 0: every prompt is computed as a whole. ``files``: where they outlive
    this process. ``lookup``: verifies what came before, where that wins more than what would run instead. ``kinds``: of steps that are tried
    beside each drafter's widths. ``groups``: of sequences that decode beside each other on several devices, 1 or 2; None measures what pays.
    """

    def __init__(
        self, engine: ModelRunner, width: int | None = None, prefix_memory: int = 0, lookup: NgramPolicy | None = None,
        files: PrefixFiles | None = None, kinds: Iterable[StepPlan] = (), groups: int | None = None,
    ) -> None:  # fmt: skip
        self.engine, self._stats, self.lookup = engine, BatchStats(), lookup
        self.prefixes = PrefixCache(engine, prefix_memory, files, shared=True) if prefix_memory else None
        self.policy: SpeculationPolicy | None = None
        if width is None and engine.drafter is not None:
            self.policy = SpeculationPolicy(
                {m.method: [w for w in candidate_widths(engine.options.width) if w <= m.block_size] for m in engine.drafter.methods},
                more=kinds,
            )
        self._kind = PLAIN_STEP  # of the last decoding step, or what would have been but for what came before
        self._unheard = 0  # steps since width control was last told of one: as long as it knows nothing new, it would choose the same
        self._plains = 0  # plain steps in a row that it chose
        self._otherwise: tuple[list[float], float] | None = (
            None  # tokens of each sequence that such a step is expected to bring, and milliseconds
        )
        self._catch_up_us = 0  # of the engine, before the last step
        self._waited_us = 0  # the same
        self._sequences: list[SpeculationState | None] = []  # those that decode, as width control sees them
        self._drafting = False  # whether any of them drafts
        self._lookups: list[NgramDrafts | None] = []  # what they look drafts up in; empty where nobody does
        self._tokens_each: list[float] = []  # of plain steps
        self.width, self._width_reason = width or engine.options.width, ""
        self._waiting: deque[Stream] = deque()
        self._active: list[Stream] = []  # these have slots; they are the ones that read their prompts, and those that decode
        self._seated: dict[int, Stream] = {}  # the same by slot
        self._reading: list[Stream] = []
        self._decoding: list[Stream] = []
        self._guides: dict[int, Guide] = {}  # of those that decode under constraints, by slot
        self._guided: list[Stream] = []  # the same, and those that sit out steps
        self._late: list[Stream] = []  # because it is still being worked out what may come next
        self._forcing: list[Stream] = []  # with a constraint that may leave no choice about tokens
        self._asking: list[Stream] = []  # whose owners may interrupt them
        self._changed = False  # somebody came, goes, or has read its prompt
        self._longest_wait = 0  # nanoseconds
        self._looked: Choice | None = None  # what was found for the step
        # of blocks whose drafter had said something of them, drafts that were verified and right ones; and milliseconds of verifying them
        self._weighed: dict[int, tuple[int, int]] = {}
        self._verifying = 0.0
        self._prompts_turn, self._covered = True, 1  # slots that the decoding step covers
        self._padded = [
            next((w for w in (1, *candidate_widths(engine.options.width)) if n <= w), n) for n in range(engine.options.width + 1)
        ]
        self._rounds = Rounds(self, control_of(engine, groups))
        self._driving, self._queue = threading.Lock(), threading.Lock()

    # -- for everybody

    def submit(
        self,
        prompt: Sequence[int],
        options: LoopOptions = LoopOptions(),
        stats: Stats | None = None,
        *,
        slot: int | None = None,
        known: int = 0,
        progress: Callable[[int, int], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Stream:
        """Queues a sequence; it starts as soon as a slot is free. ``options.width`` is not used: widths are the scheduler's.

        Args:
            stats: filled in as it goes, also if it is closed early or fails.
            slot: goes on in the sequence that this slot holds, which stays there in the end: exactly the tokens that were committed.
            known: leading tokens of ``prompt`` that this sequence has already.
            progress: called with (done, total) tokens of the others after each chunk.
            interrupted: asked before each chunk and each step; True ends the sequence with the stop reason "interrupt".

        Raises:
            ContextError: the prompt is empty, does not fit the context, or has ids outside the vocabulary.
            EngineError: speculative mode without a drafter.
        """
        engine = self.engine
        ids = token_ids(prompt, engine.target.n_vocab).tolist()
        if len(ids) > engine.options.n_ctx:
            each = " per slot" if engine.options.slots > 1 else ""
            need = len(ids) + (256 if options.max_tokens is None else max(1, min(options.max_tokens, 256)))  # and an answer
            raise ContextError(
                f"a prompt of {len(ids)} tokens does not fit the context of {engine.options.n_ctx}{each}; raise `n_ctx` to {need} or more"
            )
        options.check(engine.drafter or self.lookup)
        stats = stats if stats is not None else Stats()
        width = engine.options.width if options.mode == REFERENCE and self.width == 1 else self.width
        stats.mode, stats.width, stats.prompt_tokens = options.mode, 1 if options.mode == PLAIN else width, len(ids)
        stats.width_reason = self._width_reason if options.mode == SPECULATIVE else ""
        stats.most_threads, stats.threads_follow = engine.threads.most, engine.threads.follow
        stream = Stream(self, Request(ids, options, stats, width, engine.target.n_vocab), stats)
        stream._known = stream._filled = known
        stream._progress, stream._interrupted = progress, interrupted
        if engine.drafter is None and options.drafts is None:
            stream._request.speculating = False
        if slot is not None:
            stream.slot, stream._stays = slot, True
        with self._queue:
            self._waiting.append(stream)
        self._changed = True
        return stream

    def look(self) -> None:
        """Something has changed: the next step looks at every sequence."""
        self._changed = True

    def drive(self, stream: Stream) -> None:
        """Runs one step, unless another thread's step has brought ``stream`` news meanwhile."""
        with self._driving:
            if not (stream._blocks or stream.ended or self._step() or stream.has_news):  # a cancelled one may be the last one
                raise EngineError("this stream's scheduler has forgotten it")

    def end(self, stream: Stream) -> None:
        """Ends one sequence now."""
        with self._driving:
            stream._cancelled = True
            self._rounds.land_all()
            self._drop_cancelled()

    def step(self, meanwhile: Callable[[], object] | None = None) -> bool:
        """One forward pass for whoever needs it; False if nobody does. ``meanwhile`` is called while it is under way."""
        with self._driving:
            return self._step(meanwhile)

    def run(self) -> None:
        """Steps until every sequence has ended."""
        while self.step():
            pass

    def pin_width(self, width: int, reason: str = "") -> None:
        """Every block has ``width`` rows from now on, 1 for plain decoding; ``reason`` goes into the statistics of what is submitted then."""
        self.width, self.policy, self._width_reason, self._unheard = width, None, reason, 0

    def learn_widths(self) -> None:
        """Steps until the cost of every width is known for the sequences that are decoding now, or one of them has ended."""
        before = len(self._active)
        while self.policy is not None and not self.policy.calibrated(self._covered) and len(self._active) == before and self.step():
            pass

    def close(self) -> None:
        """Ends every sequence and closes the engine. Closing twice is fine."""
        with self._driving:  # to the end: another thread may be about to step, or to close as well
            if not self.engine.graphs.closed:
                try:
                    self._cancel_all()
                finally:
                    try:
                        if self.prefixes is not None:
                            self.prefixes.close()
                    finally:
                        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def stats(self) -> BatchStats:
        """Counts over all sequences."""
        stats, engine = self._stats, self.engine
        stats.rows_computed, stats.rows_used, stats.longest_wait = engine.rows_computed, engine.rows_used, 1e-9 * self._longest_wait
        return stats

    @property
    def drafts(self) -> bool:
        """Whether anybody drafts here: a model, or what came before."""
        return self.engine.drafter is not None or self.lookup is not None

    @property
    def unsettled(self) -> bool:
        """Whether the next step may be another one than the last: somebody came, goes, or reads its prompt."""
        return self._changed or bool(self._reading)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._active

    def cancel_all(self) -> None:
        """Ends every sequence and frees every slot."""
        with self._driving:
            self._cancel_all()

    # -- one step

    def _step(self, meanwhile: Callable[[], object] | None = None) -> bool:
        if self._rounds.flying and self._changed:
            self._rounds.land(meanwhile)
            return True
        try:
            if self._changed or self._reading:
                self._arrange()
            if self._guided and self._sit_out():
                self._arrange()
            if self._asking and self._interrupts():
                self._arrange()
        except BaseException as error:
            self._fail_all(error)
            raise
        if not self._active:
            return False
        if not self._decoding and not self._reading:  # all that are there wait for their masks
            return True
        if self._rounds.step(meanwhile):
            return True
        decoding, began = self._decoding, time.perf_counter_ns()
        filling: list[Stream] = []
        try:
            if self._reading:
                filling = self._filling()
                began = time.perf_counter_ns()
            self._catch_up_us = self.engine.catch_up_us  # prompts, copies of what is computed, and groups catch up beside decoding steps
            self._waited_us = self.engine.waited_us
            work = self._decode_work(decoding, filling) if decoding else {}
            prompts = not decoding or bool(filling and self._prompts_turn and not all(s.slot in work for s in filling))
            if prompts:
                work = self._prompt_work(filling, bool(decoding))
            self._prompts_turn = not prompts
            results = run_step(self.engine, self._guides, work, meanwhile) if self._guides else self.engine.step(work, meanwhile)
            self._bring(work, results)
        except BaseException as error:
            self._fail_all(error)
            raise
        width, milliseconds = self._count(work, results, () if prompts else decoding, began)
        if not prompts and decoding:
            self._teach(work, decoding, width, milliseconds)
        else:
            self._rounds.broken()
        return True

    def _bring(self, work: Mapping[int, BatchItem], results: Mapping[int, StepOutput]) -> None:
        """Gives each sequence what a step brought it."""
        for slot, item in work.items():
            stream = self._seated[slot]
            try:
                self._take(stream, item, results[slot])
            except Exception as error:  # one sequence's own: its grammar, its logits, what its caller asks of tokens
                self._fail(stream, error)

    def _fail_all(self, error: BaseException) -> None:
        self._rounds.flying.clear()
        with suppress(DeviceError):  # whose error this one is
            self.engine.abandon()
        for stream in list(self._active):
            self._fail(stream, error)

    def _arrange(self) -> None:
        """Who leaves, who comes, who reads its prompt and who decodes."""
        self._changed = False  # first: what changes from now on is looked at by the next step
        self._unheard = self._plains = 0
        self._drop_cancelled()
        self._admit()
        self._seated = {s.slot: s for s in self._active}
        self._asking = [s for s in self._active if s._interrupted is not None]
        self._reading = [s for s in self._active if s._left]
        self._guided = [s for s in self._active if not s._left and s._request.guide is not None]
        self._decoding = [s for s in self._active if not s._left and s not in self._late]
        self._guides = {s.slot: s._request.guide for s in self._decoding if s._request.guide is not None}
        self._forcing = [s for s in self._decoding if s._request.may_force]
        self._sequences = [s._drafted if s._request.speculating else None for s in self._decoding]
        self._drafting = any(s._request.speculating for s in self._decoding)
        self._lookups = [s._suffix for s in self._decoding] if any(s._suffix is not None for s in self._decoding) else []
        self._tokens_each = [1.0] * len(self._decoding)
        self._covered = len(self._decoding) and covering([s.slot for s in self._decoding], len(self.engine.slots)).count
        self._rounds.arrange(not (self._reading or self._guided or self._forcing or self._asking))
        for stream in self._decoding:
            if not stream._decoding:
                self._begin_decoding(stream)

    def _sit_out(self) -> bool:
        """Leaves out those whose constraint still works out what may come next, and lets them in again when it has; whether that changes who decodes."""
        slow = [s for s in self._guided if s._request.guide is not None and s._request.guide.slow]
        if not slow and not self._late:
            return False
        late = [s for s in slow if self._lacks_mask(s, 0.0)]
        alone = len(late) == len(self._active)
        until = time.perf_counter() + (ALONE_S if alone else PATIENCE_S)
        late = [s for s in late if self._lacks_mask(s, until - time.perf_counter() if alone or s not in self._late else 0.0)]
        if late != self._late:
            self._late, self._changed = late, True
        return self._changed

    def _lacks_mask(self, stream: Stream, patience: float) -> bool:
        """Whether it is not known in ``patience`` seconds what may come next of a sequence; one that has waited too long has ended."""
        try:
            return stream._request.guide is not None and stream._request.guide.late(max(0.0, patience))
        except Exception as error:  # its own
            self._fail(stream, error)
            return False

    def _interrupts(self) -> bool:
        """Whether an owner has interrupted a sequence, which has ended then."""
        interrupted = False
        for stream in self._asking:
            if stream._interrupted is not None and stream._interrupted():
                self._end(stream, "interrupt")
                interrupted = True
        return interrupted

    def _begin_decoding(self, stream: Stream) -> None:
        """Builds every graph that the coming tokens of a sequence alone can need, so that no step waits for one."""
        if self.policy is None and not self.engine.rows_alike:
            stream._request.keep_width(self.width)
        if len(self.engine.slots) == 1:
            request = stream._request
            kinds: list[tuple] = self._kinds_of(request)
            if request.may_force or stream._suffix is not None:
                every = (self.engine.given_role(w) for w in candidate_widths(request.options.width) if w > 1)
                kinds += [kind for kind in every if kind not in kinds]
            self.engine.prepare_transitions(sorted({width for role, width, *_ in kinds}))
            self.engine.prepare(kinds, request.limits.left)
        stream._begin_decoding()

    def _kinds_of(self, request: Request) -> list[tuple]:
        """(role, width, ...) of the steps that a sequence alone may take."""
        if request.options.mode == REFERENCE:
            return [self.engine.given_role(request.width)]
        if not request.speculating or (request.options.drafts is None and not self.engine.slots[0].drafting):
            return [("plain", 1)]
        kinds = [StepPlan.of("", self.width)] if self.policy is None else self.policy.kinds
        if request.options.drafts is not None:
            return [self.engine.given_role(width) for width in sorted({kind.tokens for kind in kinds})]
        engine, drafting = self.engine, [kind for kind in kinds if kind.tokens > 1]
        plain: list[tuple] = [("plain", 1)] if len(drafting) < len(kinds) else []
        looked = [kind for kind in drafting if request.guide is not None or self._confidence(kind) is not None]
        fused = [engine.drafting_role("fused", kind.method, kind.tokens, kind.verify_len) for kind in drafting if kind not in looked]
        if not looked:
            return [*plain, *fused]
        # drafts are looked at before they are verified
        if request.guide is not None and self.policy is not None:
            request.guide.widths = self.policy.useful
        rows = [(kind.method, engine.graphs.width_for(kind.tokens)) for kind in looked]
        alone = dict.fromkeys(engine.drafting_role("draft", drafter, width, width) for drafter, width in rows)
        verified = {min(width, kind.tokens) for kind in looked for width in candidate_widths(request.options.width)}
        return [
            ("plain", 1),
            *fused,
            *alone,
            *(("verify", width) for width in sorted(verified) if width > 1),
        ]

    def _cancel_all(self) -> None:
        with self._queue:
            streams = (*self._waiting, *self._active)
        for stream in streams:
            stream.cancel()
        with suppress(DeviceError, EngineError):  # which have ended all of them, then
            self._rounds.land_all()
        self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        with self._queue:
            gone = [s for s in self._waiting if s._cancelled]
        for stream in gone + [s for s in self._active if s._cancelled]:
            try:
                self._end(stream, "cancelled")
            except BaseException as error:
                self._fail(stream, error)
                if not isinstance(error, Exception):
                    raise
            finally:  # one after the other: what an interruption comes before is still there
                with self._queue:
                    if stream in self._waiting:
                        self._waiting.remove(stream)

    def _admit(self) -> None:
        engine = self.engine
        with self._queue:
            while self._waiting:
                stream = self._waiting[0]
                request = stream._request
                if stream._stays:
                    if any(other.slot == stream.slot for other in self._active):
                        return
                    engine.read_candidates(request.options.candidates, stream.slot, request.options.masked)
                else:
                    drafting = request.speculating and self.width > 1  # or else its rows are for nothing
                    rests = drafting and self._rests(stream)
                    slot = engine.admit(drafting and not rests, request.options.candidates, request.options.masked)
                    if slot is None:
                        return
                    stream.slot, request.speculating = slot, drafting
                    stream._phase("queued")
                if request.guide is not None and engine.unmasked:
                    stream.stats.notes.append(engine.unmasked)
                self._active.append(self._waiting.popleft())  # first: what fails from now on ends it, and frees its slot
                try:
                    if len(engine.slots) == 1:
                        stream._counters = Counters(engine)
                    if request.speculating and self.policy is not None:
                        stream._drafted = self.policy.begin(not engine.slots[stream.slot].drafting, request.options.max_tokens)
                    self._enter(stream)
                except Exception as error:
                    self._fail(stream, error)

    def _rests(self, stream: Stream) -> bool:
        """Whether a text alone gets no rows that drafters read."""
        if (
            len(self.engine.slots) > 1 or self.engine.slots[0].used
        ):  # what one slot's blocks cost says nothing of theirs; it is asked when there is room
            return False
        prefixes, options = self.prefixes, stream._request.options
        if prefixes is None or not options.reuse:
            return rests(self.policy, lambda drafting: 0)
        return rests(self.policy, lambda drafting: prefixes.known(stream._prompt, drafting, options.owner))

    def _enter(self, stream: Stream) -> None:
        """Finds out what the prompt shares with others, and whom it waits for."""
        if self.prefixes is None:
            return
        grain, prompt = self.prefixes.grain, stream._prompt if stream._request.options.reuse else ()
        place = self.prefixes.enter(stream.slot, prompt, self.engine.slots[stream.slot].drafting, stream._request.options.owner)
        stream._keys = place.keys
        stream._partings.add(grain * min(place.known, place.usable))
        if self.engine.sequence.stateful and len(prompt) > LEAST_SHARED:
            stream._partings.add(len(prompt) - TAIL)
        if any(self._twins(stream, other) for other in self._waiting):
            stream._partings.add(len(stream._prompt) - 1)
        for other in self._active:
            if other is stream:
                continue
            shared = grain * _alike(stream._keys[: place.usable], other._keys)
            if self._twins(stream, other):
                shared = max(shared, len(stream._prompt) - 1)
            if other._goes_on_to(shared):
                other._partings.add(shared)
                stream._leaders.append((other, shared))

    def _twins(self, a: Stream, b: Stream) -> bool:
        """Whether two sequences have the same prompt, one worth a copy: the second one computes its last token alone."""
        one, other = a._request, b._request
        alike = len(a._prompt) == len(b._prompt) > LEAST_SHARED and one.options.reuse and other.options.reuse
        return alike and one.options.owner == other.options.owner and one.speculating == other.speculating and a._prompt == b._prompt

    def _filling(self) -> list[Stream]:
        """Those with a prompt to compute, each as far as the prefix cache brings it."""
        filling = [s for s in self._reading if not s._waits]
        for s in filling:
            if self.prefixes is None:
                break
            reuse = self.prefixes.restore(s.slot)
            had, s._filled = s._filled, reuse.tokens
            if s._filled > had:
                s.stats.reused_tokens += s._filled - had
                self._stats.reused_tokens += s._filled - had
                before = s.stats.reused_from
                s.stats.reused_from = {where: before.get(where, 0) + (n if where != "in place" else 0) for where, n in reuse.chunks.items()}
                if (beyond := s._filled % self.prefixes.grain) and s._left > self.engine.options.chunk:
                    s._partings.add(s._filled - beyond + self.prefixes.grain)  # where states can be kept again
            s.stats.notes += self.prefixes.take_notes()
        return filling

    def _prompt_work(self, filling: list[Stream], others_decode: bool) -> dict[int, BatchItem]:
        """A chunk of the prompt whose turn it is, and of those that fit into the same step as a whole."""
        rows = min(self.engine.options.chunk, BESIDE) if others_decode else self.engine.options.chunk
        chosen: list[Stream] = []
        for stream in filling:
            together = (*chosen, stream)
            if chosen:
                width = self.engine.chunk_width(max(len(s._part(rows)) for s in together))
                if width * covering([s.slot for s in together], len(self.engine.slots)).count > rows:
                    continue
            chosen.append(stream)
        for stream in chosen:  # the others come first in the next step
            self._active.remove(stream)
            self._active.append(stream)
        parts = {s: s._part(rows) for s in chosen}
        more = not others_decode and all(s._filled + len(part) < len(s._prompt) for s, part in parts.items())
        return {s.slot: Prefill(part, more) for s, part in parts.items()}

    def _decode_work(self, decoding: list[Stream], filling: list[Stream]) -> dict[int, BatchItem]:
        """A block or a plain token of each; tokens that a constraint leaves no choice about come before what a drafter could say, and what came
        before where it wins more."""
        work: dict[int, BatchItem] = {}
        for s in self._forcing:
            if (item := s._request.forced_work()) is not None:
                work[s.slot] = item
        self._looked, rounds = None, self._rounds
        if len(work) < len(decoding):
            if rounds.next is not None or not self._unheard % UNHEARD:
                self._kind, self._otherwise = rounds.next or self._choose(), None
            kind = self._kind
        else:  # all are forced: nobody drafts, and no kind is chosen
            kind = StepPlan.of("", self.width)
        rounds.next = None
        if self._lookups and len(work) < len(decoding) and self._look_up(decoding, kind.tokens, work) == 1:
            kind = PLAIN_STEP
        width, weigh = kind.verify_len, self._weigher(kind)
        for s in decoding:
            if s.slot not in work:
                work[s.slot] = s._request.work(kind, weigh)
        if filling and any(item.rows > 1 for item in work.values()):
            for s in filling:  # twice the rows are still less than a step of its own
                if s._left <= width and covering((*work, s.slot), len(self.engine.slots)).count <= 2 * self._covered:
                    work[s.slot] = Prefill(s._prompt[s._filled :])
        return work

    def _choose(self) -> StepPlan:
        """The kind of the next step of those that decode."""
        return StepPlan.of("", self.width) if self.policy is None else self.policy.choose(self._covered, self._sequences)

    def _weigher(self, kind: StepPlan) -> Callable[[Mapping[int, np.ndarray]], int] | None:
        """Says how many drafts of blocks of this kind are to be verified, where its drafter says what they are worth."""
        self._weighed = {}
        if self.policy is None or not self.policy.confidence:
            return None
        confidence = self._confidence(kind)
        if confidence is None or not self.policy.calibrated(self._covered):  # whole blocks teach what they cost
            return None
        pace, covered = self.policy.tokens_per_ms(self._covered, kind, self._sequences), self._covered
        return lambda said: confidence.worth({slot: of.tolist() for slot, of in said.items()}, pace, covered)

    def _confidence(self, kind: StepPlan) -> Confidence | None:
        """Of a step of this kind, what its drafter's words are worth; None where it says nothing."""
        return self.policy.confidence.get(kind.method) if self.policy is not None and kind.tokens > 1 else None

    def _look_up(self, decoding: list[Stream], width: int, work: dict[int, BatchItem]) -> int:
        """Adds those that verify what came before, if that wins more than a step of this ``width``; returns the width of the others."""
        lookup = self.lookup
        assert lookup is not None
        if width == 1 and len(decoding) == 1 and self._lookups[0] is not None and lookup.finds_nothing(self._covered, self._lookups[0]):
            self._looked = NOTHING[1]
            return 1
        rows, tokens, milliseconds = width, self._tokens_each, None
        if width == 1 or not self._drafting:
            rows, milliseconds = 1, lookup.cost(self._covered, 1)
        elif self._otherwise is not None:
            tokens, milliseconds = self._otherwise
        elif self.policy is None:
            tokens = [s.stats.tokens_per_draft if s._request.speculating else 1.0 for s in decoding]
        else:
            if (self._covered, self._kind) not in self.policy.costs:  # the costs of drafting are being learnt
                return width
            milliseconds = self.policy.cost(self._covered, self._kind)
            tokens = self.policy.expected_tokens_each(self._covered, self._kind, self._sequences)
            self._otherwise = tokens, milliseconds
        self._looked = choice = lookup.choose(self._covered, self._lookups, tokens, milliseconds, rows)
        if choice is not NOTHING[len(decoding)] and choice is not PLAINLY[len(decoding)]:
            for s, drafts in zip(decoding, choice.drafts):
                if drafts and s.slot not in work:
                    work[s.slot] = s._request.found_work(drafts, (1, *lookup.widths))
        if choice is PLAINLY[len(decoding)] and self.policy is not None and self.policy.fall_back(self._covered, self._sequences):
            self._kind, self._looked = PLAIN_STEP, NOTHING[len(decoding)]  # as width control had it now
        return width if choice.otherwise else 1

    def _take(self, stream: Stream, item: BatchItem, result: StepOutput) -> None:
        """What a step brought one sequence."""
        request = stream._request
        if isinstance(item, Prefill):
            block = self._take_prompt(stream, item, result)
        else:
            block = request.take(item, result, self.engine, stream.slot)
            if not result.draft_finite:  # nobody drafts for it any more
                self._changed = True
            if stream._suffix is not None:
                stream._suffix.extend(block)
            stream._rows = item.verified or item.width if isinstance(item, Draft) else item.rows
            if isinstance(item, Draft) and item.weigh is not None:
                self._weighed[stream.slot], self._verifying = (
                    (len(result.tokens) - 1, len(block) - 1),
                    1e-3 * (result.times.upload + result.times.compute + result.times.read),
                )
                stream._rows = len(result.tokens)  # a block that was cut says nothing of what whole ones take
            stream._matched = len(block) - 1  # forbidden drafts are rejected ones, of blocks that cost less
        if block:
            stream.tokens += block
            self._stats.emitted += len(block)
            stream._blocks.append((block, request.drafts))
        if request.limits.reason and not stream._left:
            self._end(stream, request.limits.reason)

    def _take_prompt(self, stream: Stream, item: Prefill, result: StepOutput) -> list[int]:
        """A part of its prompt has been computed; the token behind it, if that was the last part."""
        if not result.target_finite:
            if self.prefixes is not None:
                self.prefixes.discard(stream.slot)
            raise EngineError(self.engine.not_finite(stream.slot))
        stream._filled += len(item.tokens)
        self._stats.prompt_tokens += len(item.tokens)
        if self.prefixes is not None:
            last, parting = stream._left <= len(item.tokens), stream._filled in stream._partings
            if parting and stream._filled % self.prefixes.grain:
                self.prefixes.store_end(stream.slot, stream._prompt)
            else:
                self.prefixes.computed(stream.slot, last or parting)
        if stream._progress is not None:
            stream._progress(stream._filled - stream._known, len(stream._prompt) - stream._known)
        if stream._left:
            stream.stats.target_forwards += 1
            return []
        stream._phase("prefill")
        self._changed = True
        if stream._request.limits.reason:  # no tokens were asked for: others may begin with this prompt
            return []
        first = stream._request.first(int(result.ids[0]), self.engine, stream.slot)
        options = stream._request.options
        if self.lookup is not None and options.mode == SPECULATIVE and options.drafts is None and options.synthetic is None:
            stream._suffix, stream._request.method = (
                self.lookup.begin(stream._request.history, stream._request.options.owner),
                self.lookup.method,
            )
        return [first]

    def _end(self, stream: Stream, reason: str) -> None:
        stream.stats.stop_reason = reason
        if self.prefixes is not None and stream in self._active and not stream._left and stream._request.options.reuse:
            self.prefixes.store_end(stream.slot, stream._request.history, write=True)
            stream.stats.notes += self.prefixes.take_notes()
        self._stats.finished[reason] += 1
        self._leave(stream)
        stream.ended = True

    def _fail(self, stream: Stream, error: BaseException) -> None:
        self._stats.finished["error"] += 1
        stream.error = error
        with suppress(DeviceError):  # a worker is lost: its slots are not asked any more
            self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        self._changed = True
        if stream._suffix is not None:
            stream._suffix.end()
            stream._suffix = None
        if stream in self._active:
            self._active.remove(stream)
            if not self.engine.graphs.closed:
                if stream._drafted is not None and self.policy is not None and len(self.engine.slots) == 1 and self.policy.calibrated(1):
                    stream.stats.width_reason = self.policy.reason(stream._drafted)
                stream._finish()
                self.engine.read_candidates(0, stream.slot) if stream._stays else self.engine.release(stream.slot)
        else:
            stream._finish()

    def _count(
        self, work: Mapping[int, BatchItem], results: Mapping[int, StepOutput], decoding: Sequence[Stream], began: int
    ) -> tuple[int, float]:
        """``decoding``: whom the step brought a block; ``began``: by the clock of nanoseconds. Returns rows per sequence, and milliseconds."""
        now = time.perf_counter_ns()
        spent, stats = now - began, self._stats
        stats.steps += 1
        stats.seconds += spent * 1e-9
        stats.decoding[len(decoding)] += 1
        if not decoding:
            stats.prompt_steps += 1
            return 0, 1e-6 * spent
        times, rows = results[decoding[0].slot].times, 1
        threads, calm = self.engine.threads.now, self.engine.threads.calm
        upload, compute, read = times.upload, times.compute, times.read
        rest = max(0, spent // 1000 - upload - compute - read)
        for stream in decoding:
            own = stream.stats
            host = own.host_us
            host["upload"] += upload
            host["compute"] += compute
            host["read"] += read
            host["host"] += rest
            own.seconds["decode"] = 1e-9 * (now - stream._since)
            if (wait := now - stream._last_step) > self._longest_wait:
                self._longest_wait = wait
            stream._last_step = now
            own.count_step(stream._rows, wait, threads, calm)
            if own.steps == WARMUP_STEPS and stream._counters is not None:
                stream._counters.warm()
            rows = max(rows, stream._rows)
        width = self._padded[rows]
        stats.widths[width] += 1
        return width, 1e-6 * spent

    def _teach(self, work: Mapping[int, BatchItem], decoding: Sequence[Stream], width: int, milliseconds: float) -> None:
        """Tells whoever chooses what the step of ``width`` rows brought those that decode, and what it took but for building its graph."""
        milliseconds -= 1e-3 * (self.engine.waited_us - self._waited_us)
        others = self._others_came()
        if self.lookup is not None and self._lookups and len(work) == len(decoding):
            if len(work) == 1:
                given, tokens = isinstance(work[decoding[0].slot], Verify), decoding[0]._matched + 1
            else:
                given, tokens = all(isinstance(item, Verify) for item in work.values()), sum([s._matched + 1 for s in decoding])
            self.lookup.observe(self._covered, width if given and not others else None, milliseconds, tokens)
        if self._weighed and (confidence := self._confidence(self._kind)) is not None:
            confidence.observe(self._weighed, self._covered, self._verifying if len(work) == len(decoding) == len(self._weighed) else None)
        if self._rounds.control is not None:
            self._rounds.whole()
        late = 1e-3 * (self.engine.catch_up_us - self._catch_up_us)
        if self.policy is not None and (self._looked is None or self._looked.otherwise):
            self._observe(decoding, width, milliseconds, len(work) == len(decoding) and not others, late)
            self._plains = self._plains + 1 if self._kind == PLAIN_STEP else 0
            self._unheard = 1 if self._plains > PLAINS and self._plains % ASKED else 0
        else:
            self._unheard += 1

    def _others_came(self) -> bool:
        """Whether other work came or went, so that the step says nothing of what steps cost."""
        condition, looks = self.engine.threads.condition, CORE_MONITOR.polls
        changed = self.lookup is not None and self.lookup.under(condition, looks)
        if self.policy is not None and self.policy.condition_changed(condition, looks, self._sequences):
            self._unheard, changed = 0, True
        return changed

    def _observe(self, decoding: Sequence[Stream], width: int, milliseconds: float, alone: bool, late: float) -> None:
        """Tells width control what the step of ``width`` rows brought. ``alone``: no prompt rode along; ``late``: milliseconds of catching up."""
        assert self.policy is not None
        sequences = self._sequences
        # what was looked up came instead of drafts only where something was found
        found = self._looked is not None and self._looked is not NOTHING[len(decoding)]
        if (found or self._forcing) and any(s._request.forced or s._request.found for s in decoding):
            sequences, alone = [None if s._request.forced or s._request.found else s._drafted for s in decoding], False
            if not any(sequences):
                return
        matched = [s._matched for s in decoding]
        self.policy.observe(
            self._covered, self._kind, milliseconds, sequences, matched, alone and width == self._padded[self._kind.verify_len], late
        )


def rests(widths: SpeculationPolicy | None, known: Callable[[bool], int]) -> bool:
    """Whether a text alone gets no rows that drafters read: nobody will draft. ``known``: how much of its prompt is there with these rows, and without:
    to compute that anew would take longer than they do."""
    if widths is None:
        return False
    return widths.never_pays or (widths.should_disable() and known(True) <= known(False))


def _alike(a: list[bytes], b: list[bytes]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
