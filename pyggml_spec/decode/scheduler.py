"""Who does what in the next step: admission, prompts in chunks, decoding, limits, cancellation.

    submit -> waiting -> (lowest free slot) -> prompt, chunk by chunk -> decoding -> ended

Sequences that decode share every step. While some decode and others still read their prompts, steps of both kinds take turns, and a chunk is
then at most BESIDE tokens: no decoding sequence waits longer than that chunk. Prompts take turns among each other, chunk by chunk; short ones
that fit into one step together share it, and a prompt's end that is no longer than the block rides along with the decoding step.
With a prefix cache, a prompt that begins like another one waits until that one has computed what they share, and goes on behind it.

Whoever waits for tokens drives: iterating a stream runs steps, for all sequences, until it has something. From several threads one drives
and the others wait for it.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from ..checks import token_ids
from ..engine.engine import Engine
from ..engine.options import candidate_widths
from ..engine.slot import Prompt, StepResult, Work
from ..errors import ContextError, EngineError
from ..memory.prefix_slots import SlotPrefixes
from ..memory.slots import covering
from .batch_width import BatchWidths
from .request import REFERENCE, SPECULATIVE, LoopOptions, Request
from .stats import Stats
from .width import Acceptance

BESIDE = 128  # prompt tokens per step while others decode


@dataclass
class BatchStats:
    """Counts of an engine with several slots, over all sequences.

    Attributes:
        steps: forward passes; ``prompt_steps`` of them computed prompts only.
        prompt_tokens, reused_tokens: tokens of prompts that were computed, and those that were not because another prompt began alike.
        emitted: tokens that came out.
        finished: sequences by why they ended.
        rows_computed, rows_used: rows of the target's graphs, and those that a sequence had work for.
        decoding: how many steps ran with n sequences decoding.
        widths: how many steps with drafts ran at each width.
        longest_wait: most seconds that a decoding sequence had between two of its steps.
        seconds: spent in steps.
    """

    steps: int = 0
    prompt_steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    emitted: int = 0
    finished: Counter = field(default_factory=Counter)
    rows_computed: int = 0
    rows_used: int = 0
    decoding: Counter = field(default_factory=Counter)
    widths: Counter = field(default_factory=Counter)
    longest_wait: float = 0.0
    seconds: float = 0.0

    def as_dict(self) -> dict:
        """Plain values, JSON-ready."""
        counters = {k: {str(n): c for n, c in sorted(v.items())} for k, v in self.__dict__.items() if isinstance(v, Counter)}
        return {**self.__dict__, **counters}


class Stream:
    """One sequence as its owner sees it. Iterating gives the tokens of each step, the first one alone; ``cancel`` ends it at any time.

    Attributes:
        tokens: everything that came out so far.
        drafts: what the step verified that gave the tokens which the iteration returned last: the accepted drafts, then the rejected ones.
        stats: statistics of this sequence; ``stats.stop_reason`` says why it ended: "end", "length", "context", "stop" or "cancelled".
    """

    def __init__(self, scheduler: "Scheduler", prompt: list[int], options: LoopOptions, widest: int) -> None:
        self._scheduler, self._prompt = scheduler, prompt
        self.tokens: list[int] = []
        self.stats = Stats(mode=options.mode, width=options.width, prompt_tokens=len(prompt))
        self._request = Request(prompt, options, self.stats)
        self.slot = -1  # from its admission on
        self.ended = False
        self.error: BaseException | None = None
        self.drafts: list[int] = []
        self._blocks: deque[tuple[list[int], list[int]]] = deque()
        self._cancelled = False
        self._filled = 0  # tokens of the prompt that are committed
        self._keys: list[bytes] = []  # of the prompt's chunks, for the prefix cache
        self._partings: set[int] = set()  # lengths at which another prompt goes on otherwise
        self._leaders: list[tuple[Stream, int]] = []  # older ones that compute what this prompt begins with, and how much of it
        self._acceptance = Acceptance(widest - 1) if self._request.speculating else None
        self._since = time.perf_counter()
        self._last_step = 0.0

    def cancel(self) -> None:
        """Ends the sequence before the next step. May be called from any thread, and when it has ended."""
        self._cancelled = True

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        while True:
            over = self.ended or self.error is not None  # read first: the thread that drives appends the last block before it says so
            if self._blocks:
                block, self.drafts = self._blocks.popleft()
                return block
            if self.error is not None:
                raise self.error
            if over:
                raise StopIteration
            self._scheduler.drive(self)

    def result(self) -> list[int]:
        """Waits for the end and returns all tokens."""
        for _ in self:
            pass
        return self.tokens

    @property
    def filled(self) -> int:
        """Tokens of the prompt that are in the caches."""
        return self._filled

    @property
    def has_news(self) -> bool:
        """Whether the next iteration returns, or ends, without a step."""
        return bool(self._blocks) or self.ended or self.error is not None

    # -- for the scheduler

    @property
    def _left(self) -> int:
        return len(self._prompt) - self._filled

    @property
    def _waits(self) -> bool:
        """Whether somebody else is about to compute what this prompt begins with."""
        self._leaders = [(other, n) for other, n in self._leaders if n > self._filled and other._goes_on_to(n)]
        return bool(self._leaders)

    def _goes_on_to(self, n: int) -> bool:
        return not self.ended and self.error is None and self._filled < n

    def _part(self, rows: int) -> list[int]:
        """What a pass computes of the prompt: ``rows`` tokens at most, and never beyond a parting."""
        end = min([self._filled + rows, *(n for n in self._partings if n > self._filled)])
        return self._prompt[self._filled : end]

    def _phase(self, name: str) -> None:
        now = time.perf_counter()
        self.stats.seconds[name] = self.stats.seconds.get(name, 0.0) + now - self._since
        self._since = now


class Scheduler:
    """Runs the sequences of one batch engine, which it owns. ``width`` pins the rows per block; None learns what pays.

    ``prefix_memory``: bytes on the device for the beginnings of prompts; 0: every prompt is computed as a whole.
    """

    def __init__(self, engine: Engine, width: int | None = None, prefix_memory: int = 0) -> None:
        self.engine, self.stats = engine, BatchStats()
        self.prefixes = SlotPrefixes(engine, prefix_memory) if prefix_memory else None
        self.widths = BatchWidths(candidate_widths(engine.options.width)) if width is None and engine.drafter is not None else None
        self.width, self._width_reason = width or engine.options.width, ""
        self._waiting: deque[Stream] = deque()
        self._active: list[Stream] = []
        self._prompts_turn, self._covered = True, 1  # slots that the last decoding step covered
        self._driving, self._queue = threading.Lock(), threading.Lock()

    # -- for everybody

    def submit(self, prompt: Sequence[int], options: LoopOptions = LoopOptions()) -> Stream:
        """Queues a sequence; it starts as soon as a slot is free. ``options.width`` is not used: widths are the scheduler's.

        Raises:
            ContextError: the prompt is empty, does not fit the context, or has ids outside the vocabulary.
            EngineError: a mode that several sequences cannot have.
        """
        ids = token_ids(prompt, self.engine.target.n_vocab)
        if options.mode == REFERENCE and (len(self.engine.slots) > 1 or self.widths is not None):
            raise EngineError("reference mode is for one sequence at one width: use one slot, and pin the width")
        if ids.size > self.engine.options.n_ctx:
            raise ContextError(
                f"a prompt of {ids.size} tokens does not fit the context of {self.engine.options.n_ctx} per slot; raise `n_ctx`"
            )
        options.check(self.engine.drafter)
        stream = Stream(self, ids.tolist(), options, self.engine.options.width)
        stream.stats.width_reason = self._width_reason if options.mode == SPECULATIVE else ""
        with self._queue:
            self._waiting.append(stream)
        return stream

    def drive(self, stream: Stream) -> None:
        """Runs one step, unless another thread's step has brought ``stream`` news meanwhile."""
        with self._driving:
            if not (stream.has_news or self._step() or stream.has_news):  # a cancelled one may be the last one
                raise EngineError("this stream's scheduler has forgotten it")

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
        self.width, self.widths, self._width_reason = width, None, reason

    def learn_widths(self) -> None:
        """Steps until the cost of every width is known for the sequences that are decoding now, or one of them has ended."""
        before = len(self._active)
        while self.widths is not None and not self.widths.settled(self._covered) and len(self._active) == before and self.step():
            pass

    def close(self) -> None:
        """Ends every sequence and closes the engine. Closing twice is fine."""
        with self._driving:  # to the end: another thread may be about to step, or to close as well
            if not self.engine.graphs.closed:
                self._cancel_all()
                if self.prefixes is not None:
                    self.prefixes.close()
                self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._active

    def cancel_all(self) -> None:
        """Ends every sequence and frees every slot."""
        with self._driving:
            self._cancel_all()

    # -- one step

    def _step(self, meanwhile: Callable[[], object] | None = None) -> bool:
        self._drop_cancelled()
        self._admit()
        if not self._active:
            return False
        filling, decoding = self._filling(), [s for s in self._active if not s._left]
        work = self._decode_work(decoding, filling) if decoding else {}
        prompts = not decoding or (self._prompts_turn and not all(s in work for s in filling))
        if prompts:
            work = self._prompt_work(filling, bool(decoding))
        self._prompts_turn = not prompts
        began = time.perf_counter()
        try:
            results = self.engine.step({stream.slot: item for stream, item in work.items()}, meanwhile)
            for stream, item in work.items():
                try:
                    self._take(stream, item, results[stream.slot])
                except Exception as error:  # one sequence's own: its grammar, its logits, what its caller asks of tokens
                    self._fail([stream], error)
        except BaseException as error:
            self._fail(list(self._active), error)
            raise
        spent = time.perf_counter() - began
        self._count(work, decoding, prompts, spent)
        return True

    def _cancel_all(self) -> None:
        with self._queue:
            streams = (*self._waiting, *self._active)
        for stream in streams:
            stream.cancel()
        self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        with self._queue:
            gone = [s for s in self._waiting if s._cancelled]
            self._waiting = deque(s for s in self._waiting if not s._cancelled)
        for stream in gone + [s for s in self._active if s._cancelled]:
            self._end(stream, "cancelled")

    def _admit(self) -> None:
        with self._queue:
            while self._waiting:
                stream = self._waiting[0]
                request = stream._request
                drafting = request.speculating and self.width > 1  # or else its rows are for nothing
                slot = self.engine.admit(drafting, request.options.candidates)
                if slot is None:
                    return
                self._waiting.popleft()
                stream.slot, request.speculating = slot, drafting
                stream._phase("queued")
                self._enter(stream)
                self._active.append(stream)

    def _enter(self, stream: Stream) -> None:
        """Finds out what the prompt shares with others, and whom it waits for."""
        if self.prefixes is None or not stream._request.options.reuse:
            return
        grain = self.prefixes.grain
        usable = (len(stream._prompt) - 1) // grain  # a token has to be left to compute
        stream._keys = self.prefixes.keys(stream._prompt, self.engine.slots[stream.slot].drafting)
        stream._partings.add(min(self.prefixes.enter(stream._keys), usable * grain))
        for other in self._active:
            shared = grain * _alike(stream._keys[:usable], other._keys)
            if other._goes_on_to(shared):
                other._partings.add(shared)
                stream._leaders.append((other, shared))

    def _filling(self) -> list[Stream]:
        """Those with a prompt to compute, each as far as the prefix cache brings it."""
        filling = [s for s in self._active if s._left and not s._waits]
        for s in filling:
            if self.prefixes is None:
                break
            had, s._filled = s._filled, self.prefixes.bring_back(s.slot, s._keys, len(s._prompt))
            if s._filled > had:
                s.stats.reused_tokens += s._filled - had
                self.stats.reused_tokens += s._filled - had
                s.stats.reused_from = {"in place": 0, "memory": s.stats.reused_tokens // self.prefixes.grain, "disk": 0}
        return filling

    def _prompt_work(self, filling: list[Stream], others_decode: bool) -> dict[Stream, Work]:
        """A chunk of the prompt whose turn it is, and of those that fit into the same step as a whole."""
        rows = min(self.engine.options.chunk, BESIDE) if others_decode else self.engine.options.chunk
        chosen: list[Stream] = []
        for stream in filling:
            widest = max(len(s._part(rows)) for s in (*chosen, stream))
            width = self.engine.chunk_width(widest)
            if not chosen or width * covering([s.slot for s in (*chosen, stream)], len(self.engine.slots)).count <= rows:
                chosen.append(stream)
        for stream in chosen:  # the others come first in the next step
            self._active.remove(stream)
            self._active.append(stream)
        return {s: Prompt(s._part(rows)) for s in chosen}

    def _decode_work(self, decoding: list[Stream], filling: list[Stream]) -> dict[Stream, Work]:
        width = self.width
        self._covered = covering([s.slot for s in decoding], len(self.engine.slots)).count
        if self.widths is not None:
            width = self.widths.choose(self._covered, [s._acceptance if s._request.speculating else None for s in decoding])
        work: dict[Stream, Work] = {s: s._request.forced_work() or s._request.work(width) for s in decoding}
        if any(item.rows > 1 for item in work.values()):
            for s in filling:  # twice the rows are still less than a step of its own
                if s._left <= width and covering([other.slot for other in (*work, s)], len(self.engine.slots)).count <= 2 * self._covered:
                    work[s] = Prompt(s._prompt[s._filled :])
        return work

    def _take(self, stream: Stream, item: Work, result: StepResult) -> None:
        """What a step brought one sequence."""
        request = stream._request
        if not isinstance(item, Prompt):
            block = request.take(item, result, self.engine, stream.slot)
            if item.rows > 1 and stream._acceptance is not None and not request.forced:
                stream._acceptance.observe(item.rows, len(block) - 1)
            self._emit(stream, block)
            return
        if not result.target_finite:
            raise EngineError(self.engine.not_finite(stream.slot))
        stream._filled += len(item.tokens)
        self.stats.prompt_tokens += len(item.tokens)
        if self.prefixes is not None:
            last = stream._left <= len(item.tokens)
            self.prefixes.computed(stream.slot, stream._keys, last or stream._filled in stream._partings)
        if not stream._left:
            stream._phase("prefill")
            if stream._request.limits.reason:  # no tokens were asked for: others may begin with this prompt
                self._end(stream, stream._request.limits.reason)
                return
            self._emit(stream, [request.first(int(result.ids[0]), self.engine, stream.slot)])
        else:
            stream.stats.target_forwards += 1

    def _emit(self, stream: Stream, block: list[int]) -> None:
        stream.tokens += block
        self.stats.emitted += len(block)
        stream._blocks.append((block, stream._request.drafts))
        if stream._request.limits.reason:
            self._end(stream, stream._request.limits.reason)

    def _end(self, stream: Stream, reason: str) -> None:
        stream.stats.stop_reason = reason
        stream._request.ended()
        self.stats.finished[reason] += 1
        self._leave(stream)
        stream.ended = True

    def _fail(self, streams: list[Stream], error: BaseException) -> None:
        for stream in streams:
            stream.error = error
            self.stats.finished["error"] += 1
            self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        stream._leaders = []
        stream._phase("queued" if stream.slot < 0 else "decode" if not stream._left else "prefill")
        if stream in self._active:
            self._active.remove(stream)
            self.engine.release(stream.slot)

    def _count(self, work: dict[Stream, Work], decoding: list[Stream], prompts: bool, spent: float) -> None:
        stats, now = self.stats, time.perf_counter()
        stats.steps += 1
        stats.prompt_steps += prompts
        stats.decoding[0 if prompts else len(decoding)] += 1
        stats.rows_computed, stats.rows_used, stats.seconds = self.engine.rows_computed, self.engine.rows_used, stats.seconds + spent
        if prompts:
            return
        rows = max(item.rows for item in work.values() if not isinstance(item, Prompt))
        width = next(w for w in (1, *candidate_widths(self.engine.options.width)) if rows <= w)
        stats.widths[width] += 1
        if self.widths is not None and len(work) == len(decoding) and not any(s._request.forced for s in decoding):
            self.widths.observe(self._covered, width, 1000 * spent)
        for stream in decoding:
            if stream._last_step:
                stats.longest_wait = max(stats.longest_wait, now - stream._last_step)
            stream._last_step = now


def _alike(a: list[bytes], b: list[bytes]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
