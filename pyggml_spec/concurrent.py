"""Many requests at once, from threads or from asyncio: ``submit`` returns a handle at once, and one thread runs the steps.

    with ps.load(...) as session, session.concurrent(slots=4) as server:
        handles = [server.submit(prompt, max_tokens=200) for prompt in prompts]      # from any thread
        for event in handles[0]:                                                    # each handle has one reader, in any thread ...
            print(event.text, end="")
        async for event in handles[1]:                                              # ... or in any event loop
            print(event.text, end="")

Steps do not wait for readers. On a GPU, events are made while it computes the next step. On a CPU, a reader that wakes takes a core from the step and then
the GIL: events are delivered together, after at most MAX_EVENT_DELAY_S, except the first and last of a request. Events that are not read pile up to the token
limit. To stop early, call ``cancel``, leave the handle's ``with`` block, or cancel the task that waits for an event.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from .engine.engine import Engine
from .engine.prompt import pictures_of
from .engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from .engine.sequence import Sequence as SequenceState
from .engine.stats import BatchStats, Stats
from .errors import ContextError, EngineError, PyspecError, SamplingError
from .events import End, StepEvent
from .ggml.device import release_threads
from .ggml.library import versions
from .models.adapters import Chosen
from .sampling.sampler import Sampler, Sampling, TokenLogprob
from .speculation.synthetic import SyntheticAcceptance
from .text.stream import ANY_LINES, LineLimits, TextStream, stop_texts
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import asyncio  # 13 ms to import: only where a caller has it already

MAX_EVENT_DELAY_S = 0.02  # about 12 steps of the embedded pair, whose readers take 100 us each


class _Mailbox:
    """Items from the step thread to one reader, in a thread or an event loop."""

    def __init__(self) -> None:
        self._items: SimpleQueue[StepEvent | End] = SimpleQueue()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def put(self, *items: StepEvent | End) -> None:
        for item in items:
            self._items.put(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with suppress(RuntimeError):  # the loop is closed
                waiter[0].call_soon_threadsafe(_wake, waiter[1])

    def take(self, timeout: float | None = None) -> StepEvent | End:
        """The oldest item; the end stays. Raises TimeoutError."""
        try:
            item = self._items.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if isinstance(item, End):
            self._items.put(item)
        return item

    async def take_async(self) -> StepEvent | End:
        import asyncio

        while self._items.empty():
            loop = asyncio.get_running_loop()
            self._waiter = loop, loop.create_future()
            if self._items.empty():  # an item that comes from here on wakes this
                await self._waiter[1]
        return self.take()


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def request_options(
    engine: Engine, tokenizer: Tokenizer, text: TextStream, max_tokens: int | None, mode: str | None, **more: Any
) -> GenerationOptions:
    """Options of a generation; without a ``mode`` it drafts if anything can."""
    jump_forward, mode = mode in (None, SPECULATIVE), mode or (SPECULATIVE if engine.drafts else PLAIN)
    width = engine.runner.options.width
    return GenerationOptions(max_tokens, mode, width, tokenizer.is_end, completes=text.completes, jump_forward=jump_forward, **more)


class Handle:
    """One request. Iterate it with ``for`` or ``async for``; it gives ``StepEvent``s, the last one with the final statistics.

    Attributes:
        stats: statistics so far; ``stop_reason`` is "end", "length", "context", "stop" or "cancelled" once it has ended.
    """

    def __init__(
        self,
        server: "ConcurrentSession",
        sequence: SequenceState,
        text: TextStream,
        sampler: Sampler | None,
        progress: bool = False,
        sink: Callable[[StepEvent | End], object] | None = None,
    ) -> None:
        self._server, self.text_events, self._sampler, self.sequence = server, text, sampler, sequence
        self.mail = _Mailbox()
        self._sink = sink
        self._pending: list[StepEvent | End] = []  # events to deliver
        self._urgent = True  # without delay
        self._reported = -1 if progress else 1 << 62  # prompt tokens of the last progress event
        self._parts: list[str] = []  # text that ``result`` has taken so far
        self.stats: Stats = self.sequence.stats

    @property
    def slot(self) -> int:
        """Cache slot, -1 while it waits for one."""
        return self.sequence.slot

    @property
    def prompt_read(self) -> int:
        """Prompt tokens in the caches, reused ones included."""
        return self.sequence.computed

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """Of the prompt's tokens but the first, where it is scored; complete with the first event that has tokens."""
        return self._sampler.prompt_logprobs if self._sampler is not None else ()

    def cancel(self) -> None:
        """Ends the request before the next step, from any thread, at any time."""
        self.sequence.cancel()
        self._server._wake()

    def result(self, timeout: float | None = None) -> tuple[str, Stats]:
        """Waits for the end: the text that no iteration has read, and the statistics. May be called again.

        Raises:
            TimeoutError: no event within ``timeout`` seconds; the request goes on, and the next ``result`` has all of the text.
        """
        while not isinstance(item := self.mail.take(timeout), End):
            self._parts.append(item.text)
        return self._whole(item)

    async def result_async(self) -> tuple[str, Stats]:
        """``result`` for event loops. Cancelling the waiting task (as ``asyncio.wait_for`` does) cancels the request; ``asyncio.wait`` cancels nothing."""
        while not isinstance(item := await self._read_async(), End):
            self._parts.append(item.text)
        return self._whole(item)

    def _whole(self, end: End) -> tuple[str, Stats]:
        if end.error is not None:
            raise end.error
        return "".join(self._parts), self.stats

    async def _read_async(self) -> StepEvent | End:
        import asyncio

        try:
            return await self.mail.take_async()
        except asyncio.CancelledError:  # no reader is left
            self.cancel()
            raise

    def __iter__(self) -> Iterator[StepEvent]:
        return self

    def __next__(self) -> StepEvent:
        return self._next(self.mail.take(), StopIteration)

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> StepEvent:
        return self._next(await self._read_async(), StopAsyncIteration)

    def _next(self, item: StepEvent | End, stop: type[Exception]) -> StepEvent:
        if isinstance(item, End):
            raise item.error or stop
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    # -- for the step thread

    def _collect(self) -> bool:
        """Makes events of new tokens; False once the sequence has ended."""
        try:
            if self._reported < self.sequence.computed and self.sequence.slot >= 0:
                self._reported, self._urgent = self.sequence.computed, True
                self._pending.append(StepEvent("", (), self.stats.snapshot(), prompt_read=self._reported))
            while self.sequence.ready:
                block = next(self.sequence)
                logprobs = self._sampler.take_logprobs() if self._sampler is not None else ()
                drafts = tuple(self.sequence.drafts)
                self._pending.append(StepEvent(self.text_events.take(block), tuple(block), self.stats.snapshot(), logprobs, drafts))
            return True
        except StopIteration:
            self._pending.append(StepEvent(self.text_events.finish(), (), self.stats))
            self._end(None)
        except BaseException as error:  # goes to the reader
            self.sequence.cancel()
            self._end(error)
        return False

    @property
    def _due(self) -> bool:
        return self._urgent and bool(self._pending)

    def _deliver(self) -> None:
        if not self._pending:
            return
        held, self._pending, self._urgent = self._pending, [], False
        if self._sink is None:
            self.mail.put(*held)
            return
        try:
            for item in held:
                self._sink(item)
        except BaseException as error:  # goes to the handle's reader
            self.sequence.cancel()
            self._sink = None
            self.mail.put(End(error))

    def _end(self, error: BaseException | None) -> None:
        """Delivers the last events and the end."""
        if self._sampler is not None:
            self._sampler.close()
        self._pending.append(End(error))
        self._deliver()
        self._sink = None  # breaks a reference cycle with the caller


class ConcurrentSession:
    """Runs many requests over one session's weights. Made by ``Session.concurrent``; owns its engine and one thread.

    Attributes:
        engine: runs the steps.
        graph_bytes: bytes of host memory of the graphs (``KEEP_ALL`` in engine/graph_cache.py).
    """

    graph_bytes: int

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt_ids: Callable[[str | bytes | Sequence[int], bool], list[int]],
        make_sampler: Callable[[Sampling | None, bool], Sampler | None],
    ) -> None:
        self.engine, self._tokenizer, self._prompt_ids, self._make_sampler = engine, tokenizer, prompt_ids, make_sampler
        self._handles: list[Handle] = []
        self.changed, self._closing = threading.Condition(), False
        self._delays = not engine.runner.prebuilder.overlaps  # the step thread computes: events wait
        self._delivered = self._stepped = 0.0  # times of the last delivery, and of the last step's end
        self._failure: BaseException | None = None  # that ended the session
        self._changes, self._memory = -1, dict[str, int]()  # of the graphs; bytes by purpose
        self._measure()
        self.thread = threading.Thread(target=self._run, name="pyggml_spec steps", daemon=True)
        self.thread.start()

    @property
    def stats(self) -> BatchStats:
        """Counts over all requests."""
        return self.engine.stats

    @property
    def n_ctx(self) -> int:
        """Tokens of context of each slot."""
        return self.engine.runner.options.n_ctx

    @property
    def prefix_bytes(self) -> int:
        """Bytes on the device of the prefix cache."""
        return self.engine.prefixes.used_bytes if self.engine.prefixes is not None else 0

    def memory(self) -> dict[str, int]:
        """Bytes on the device by purpose, without the prefix cache; empty once it is closed."""
        return {} if self.engine.runner.graphs.closed else dict(self._memory)

    def _measure(self) -> None:
        """Reads sizes between steps: while a graph is planned, no other thread may."""
        stores = self.engine.runner.all_graphs
        changes = sum(store.changes for store in stores)
        if self._changes != changes:
            self._changes, self._memory = changes, self.engine.runner.memory()
            self.graph_bytes = sum(store.host_bytes for store in stores)

    @property
    def ended(self) -> bool:
        """Whether it takes no more requests: closed, or ended by an error."""
        return self._closing

    @property
    def closed(self) -> bool:
        """Whether it has been closed and its thread has ended."""
        return self._closing and not self.thread.is_alive()

    def submit(
        self,
        prompt: str | bytes | Sequence[int],
        max_tokens: int | None = None,
        *,
        mode: str | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
        special: bool = False,
        reuse: bool = True,
        scored: bool = False,
        adapters: Chosen | None = None,
        owner: str = "",
        progress: bool = False,
        synthetic: SyntheticAcceptance | None = None,
        lines: LineLimits = ANY_LINES,
        sink: Callable[[StepEvent | End], object] | None = None,
    ) -> Handle:
        """Queues a request, from any thread; it starts when a slot is free. Arguments as of ``Session.steps``, and:

        Args:
            max_tokens: 0 computes the prompt alone, for the prefix cache.
            reuse: False ignores the prefix cache.
            scored: the prompt's log probabilities, too (``Handle.prompt_logprobs``), as many as those of ``sampling``; ignores the prefix cache.
            adapters: LoRA adapters of this request, (index, scale) each; None for those of the session.
            owner: key of the tenant; prefixes and n-grams are never shared between owners.
            progress: also events without text during prefill, with ``prompt_read``.
            synthetic: synthetic acceptance of this request.
            lines: limits of the text's lines, for editors.
            sink: called with the events and then an ``End``, in place of a reader; in the step thread, so it has to return at once.

        Raises:
            ContextError: the prompt is empty or does not fit the context of a slot.
            SamplingError: the sampling names tokens that do not exist, or a wrong grammar.
            EngineError: closed, ended by an error in a step, or speculative mode without a drafter.
        """
        ids, text = self._prompt_ids(prompt, special), TextStream(self._tokenizer.piece, stop_texts(stop), lines)
        if scored and (sampling is None or sampling.logprobs is None or sampling.logprobs_after):
            raise SamplingError(
                "a prompt is scored by the model's log probabilities; give a sampling with logprobs, and without logprobs_after"
            )
        if scored and pictures_of(ids):
            raise ContextError("a prompt with pictures has no log probabilities; leave out `scored`")
        more = {
            "ignore_end": ignore_end,
            "synthetic": synthetic,
            "reuse": reuse and not scored,
            "scored": scored,
            "adapters": adapters,
            "owner": owner,
        }
        options = request_options(self.engine, self._tokenizer, text, max_tokens, mode, **more)
        sampler = self._make_sampler(sampling, ignore_end)
        options = replace(options, sampler=sampler)
        stats = Stats(device=self.engine.runner.backend.device.name, versions=versions())  # complete before the first step
        if sampler is not None:
            stats.seed, stats.sampling = sampler.seed, sampler.sampling.describe()
        try:
            with self.changed:
                if self._closing:
                    why = "is closed" if self._failure is None else f"was ended by {type(self._failure).__name__}: {self._failure}"
                    raise EngineError(f"this concurrent session {why}; it takes no more requests, make another one") from self._failure
                handle = Handle(self, self.engine.submit(ids, options, stats), text, sampler, progress, sink)
                self._handles.append(handle)
                self.changed.notify()
        except BaseException:
            if sampler is not None:
                sampler.close()
            raise
        return handle

    def _wake(self) -> None:
        """The step thread looks for requests that come or go."""
        with self.changed:
            self.changed.notify()

    def _run(self) -> None:
        while True:
            if not self._handles:
                release_threads()  # for other sessions
            with self.changed:
                self.changed.wait_for(lambda: self._handles or self._closing)
                if self._closing and not self._handles:
                    return
            # the first progress event comes before any prompt token is computed
            meanwhile = None if self._delays and not any(handle._reported < 0 for handle in self._handles) else self._deliver
            try:
                if not self.engine.step(meanwhile) or self._delays or self.engine.idle:
                    self._deliver()
            except PyspecError as error:
                # goes to the sequences that it ends; if it ends none, the next step would fail alike
                if not self._deliver():
                    self.fail_all(error)
            except BaseException as error:
                self._deliver()
                self.fail_all(error)

    def _deliver(self) -> bool:
        """Makes events, and delivers them when they are due; whether a request has ended."""
        self._measure()
        with self.changed:
            before = self._handles
            self._handles = [handle for handle in before if handle._collect()]
            if self._due(before):
                for handle in self._handles:
                    handle._deliver()
            return len(self._handles) < len(before)

    def _due(self, handles: list[Handle]) -> bool:
        """Whether events would wait longer than MAX_EVENT_DELAY_S after a next step as long as this one."""
        if not self._delays or self.engine.unsettled:
            return True
        now = time.monotonic()
        took, self._stepped = now - self._stepped, now
        if now + took - self._delivered < MAX_EVENT_DELAY_S and not any(handle._due for handle in handles):
            return False
        self._delivered = now
        return True

    def fail_all(self, error: BaseException) -> None:
        """Ends every request and the session."""
        with self.changed:
            self._closing, self._failure = True, error
            for handle in self._handles:
                handle._end(error)
            self._handles = []

    def stop(self, patience: float | None = None) -> bool:
        """Cancels every request and ends the thread; whether it ended within ``patience`` seconds (a step is not interrupted)."""
        with self.changed:
            self._closing = True
            for handle in self._handles:
                handle.sequence.cancel()
            self.changed.notify()
        self.thread.join(patience)
        return not self.thread.is_alive()

    def close(self) -> None:
        """Cancels every request, ends the thread and frees the slots. Closing twice is fine."""
        self.stop()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
