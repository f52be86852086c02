"""Many requests at once, from threads or from asyncio: ``submit`` returns a handle at once, a thread of its own runs the steps.

    with ps.load(...) as session, session.concurrent(slots=4) as server:
        handles = [server.submit(prompt, max_tokens=200) for prompt in prompts]      # from any thread
        for event in handles[0]:                                                    # each handle has one reader, in any thread ...
            print(event.text, end="")
        async for event in handles[1]:                                              # ... or in any event loop
            print(event.text, end="")

The steps do not wait for readers. On a GPU events are made while it computes the next step. On a CPU a reader that wakes takes the core from
a thread that computes, and then Python's lock from the one that steps: events wait there to be handed over together, HOLD_S at most, but
for the first one, the last one, and those beside prompts. Events of a handle that nobody reads pile up, at most to its token limit. A reader that goes away calls ``cancel``, or holds the handle in a ``with`` block; a task that is cancelled
while it waits for an event has cancelled its request.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from .engine.engine import Engine
from .engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from .engine.sequence import Sequence as SequenceState
from .engine.stats import BatchStats, Stats
from .errors import EngineError, PyspecError
from .events import End, StepEvent
from .ggml.device import release_threads
from .ggml.library import versions
from .sampling.sampler import Sampler, Sampling
from .speculation.synthetic import SyntheticAcceptance
from .text.stream import ANY_LINES, BlockText, LineLimits, stop_texts
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import asyncio  # takes 13 ms of processor time: who waits in an event loop has it already, everybody else goes without

HOLD_S = 0.02  # a step of the embedded pair takes 1.5 ms: 12 readers' turns, of some 100 us each, become one


class _Mailbox:
    """Items from the stepping thread to one reader, who waits in a thread or in an event loop."""

    def __init__(self) -> None:
        self._items: deque[StepEvent | End] = deque()
        self._filled = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def put(self, *items: StepEvent | End) -> None:
        with self._filled:
            self._items.extend(items)
            waiter, self._waiter = self._waiter, None
            self._filled.notify_all()
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # the loop is closed: its reader is gone
                pass

    def take(self, timeout: float | None = None) -> StepEvent | End:
        """The oldest item; the end stays, for whoever asks again. Raises TimeoutError."""
        with self._filled:
            if not self._filled.wait_for(lambda: self._items, timeout):
                raise TimeoutError
            return self._take()

    async def take_async(self) -> StepEvent | End:
        import asyncio

        while True:
            with self._filled:
                if self._items:
                    return self._take()
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = loop, future
            await future

    def _take(self) -> StepEvent | End:
        return self._items[0] if isinstance(self._items[0], End) else self._items.popleft()


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Handle:
    """One request. Iterate it with ``for`` or ``async for``; it gives ``StepEvent``s, the last one with the final statistics.

    Attributes:
        stats: statistics so far; ``stop_reason`` is "end", "length", "context", "stop" or "cancelled" when it has ended.
    """

    def __init__(
        self,
        server: "ConcurrentSession",
        stream: SequenceState,
        text: BlockText,
        sampler: Sampler | None,
        progress: bool = False,
        sink: Callable[[StepEvent | End], object] | None = None,
    ) -> None:
        self._server, self._text, self._sampler, self._stream = server, text, sampler, stream
        self._mail = _Mailbox()
        self._sink = sink
        self._held: list[StepEvent | End] = []  # events that are still to be handed over
        self._urgent = True  # somebody waits for one of them
        self._told = -1 if progress else 1 << 62  # tokens of the prompt that the last event about it told of
        self._unread: list[str] = []  # what result has taken so far
        self.stats: Stats = self._stream.stats

    @property
    def slot(self) -> int:
        """Which slot it has or had; -1 while it waits for one."""
        return self._stream.slot

    @property
    def prompt_read(self) -> int:
        """Tokens of the prompt that are in the caches, reused ones among them."""
        return self._stream.computed

    def cancel(self) -> None:
        """Ends the request before the next step, from any thread, at any time."""
        self._stream.cancel()
        self._server._look()

    def result(self, timeout: float | None = None) -> tuple[str, Stats]:
        """Waits for the end: the text that no iteration has read, and the statistics. Asked again, the same.

        Raises:
            TimeoutError: no event within ``timeout`` seconds; the request goes on, and the next ``result`` has all of the text.
        """
        while not isinstance(item := self._mail.take(timeout), End):
            self._unread.append(item.text)
        return self._whole(item)

    async def result_async(self) -> tuple[str, Stats]:
        """``result`` for event loops. A task that is cancelled while it waits here cancels the request: ``asyncio.wait`` waits for a time and
        cancels nothing, ``asyncio.wait_for`` cancels."""
        while not isinstance(item := await self._read_async(), End):
            self._unread.append(item.text)
        return self._whole(item)

    def _whole(self, end: End) -> tuple[str, Stats]:
        self._check(end)
        return "".join(self._unread), self.stats

    async def _read_async(self) -> StepEvent | End:
        import asyncio

        try:
            return await self._mail.take_async()
        except asyncio.CancelledError:  # nobody is left to read what would still come
            self.cancel()
            raise

    def __iter__(self) -> Iterator[StepEvent]:
        return self

    def __next__(self) -> StepEvent:
        return self._next(self._mail.take(), StopIteration)

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> StepEvent:
        return self._next(await self._read_async(), StopAsyncIteration)

    def _next(self, item: StepEvent | End, stop: type[Exception]) -> StepEvent:
        if isinstance(item, End):
            self._check(item)
            raise stop
        return item

    def _check(self, end: End) -> None:
        if end.error is not None:
            raise end.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    # -- for the stepping thread

    def _collect(self) -> bool:
        """Turns what the stream has brought into events; False when it has ended."""
        try:
            if self._told < self._stream.computed and self._stream.slot >= 0:
                self._told = self._stream.computed
                self._urgent = True
                self._held.append(StepEvent("", (), self.stats.snapshot(), prompt_read=self._told))
            while self._stream.ready:
                self._put(next(self._stream))
            return True
        except StopIteration:
            self._held.append(StepEvent(self._text.finish(), (), self.stats))
            self._close(None)
        except BaseException as error:  # whatever it is, the reader has to hear of it
            self._stream.cancel()
            self._close(error)
        return False

    @property
    def _pressing(self) -> bool:
        return self._urgent and bool(self._held)

    def _hand_over(self) -> None:
        if not self._held:
            return
        held, self._held, self._urgent = self._held, [], False
        if self._sink is None:
            self._mail.put(*held)
            return
        try:
            for item in held:
                self._sink(item)
        except BaseException as error:  # nothing is left to call: whoever asks the handle hears of it
            self._stream.cancel()
            self._sink = None
            self._mail.put(End(error))

    def _put(self, block: list[int]) -> None:
        logprobs = self._sampler.take_logprobs() if self._sampler is not None else ()
        self._held.append(StepEvent(self._text.take(block), tuple(block), self.stats.snapshot(), logprobs, tuple(self._stream.drafts)))

    def _close(self, error: BaseException | None) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._held.append(End(error))
        self._hand_over()
        self._sink = None  # it knows who asked, who knows this: a circle would keep a request until the collector finds it


class ConcurrentSession:
    """Runs the requests of many readers over one session's weights. Made by ``Session.concurrent``; owns the scheduler and one thread."""

    def __init__(
        self,
        scheduler: Engine,
        tokenizer: Tokenizer,
        prompt_ids: Callable[[str | bytes | Sequence[int], bool], list[int]],
        make_sampler: Callable[[Sampling | None, bool], Sampler | None],
    ) -> None:
        self._scheduler, self._tokenizer, self._prompt_ids, self._make_sampler = scheduler, tokenizer, prompt_ids, make_sampler
        self._handles: list[Handle] = []
        self._changed, self._closing = threading.Condition(), False
        self._holds = not scheduler.runner.ahead.overlaps  # the thread of the steps computes, and events come after it
        self._handed_over = self._stepped = 0.0  # when events were, and when the last step had ended
        self._failure: BaseException | None = None  # what ended everything
        self._sizes: tuple[int, dict[str, int], int] = (
            -1,
            {},
            0,
        )  # of graphs and caches, as of so many changes of the graphs; written by the thread of the steps
        self._measure()
        self._thread = threading.Thread(target=self._run, name="pyggml_spec steps", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> BatchStats:
        """Counts over all requests."""
        return self._scheduler.stats

    @property
    def n_ctx(self) -> int:
        """Tokens of context of each slot."""
        return self._scheduler.runner.options.n_ctx

    @property
    def prefix_bytes(self) -> int:
        """Bytes on the device that the beginnings of prompts take."""
        return self._scheduler.prefixes.used_bytes if self._scheduler.prefixes is not None else 0

    def memory(self) -> dict[str, int]:
        """Bytes on the device by purpose, without what the beginnings of prompts take; nothing once it is closed."""
        return {} if self._scheduler.runner.graphs.closed else dict(self._sizes[1])

    @property
    def graph_bytes(self) -> int:
        """Bytes of host memory that the graphs of its steps take, of which the ones used last are kept (``KEEP_ALL`` in engine/graph_cache.py)."""
        return self._sizes[2]

    def _measure(self) -> None:
        """Between steps: while one is planned, the sizes of its role's buffer are nobody else's to read."""
        engine = self._scheduler.runner
        stores = [engine.graphs, *(lane.graphs for lane in engine.resources.lanes)]
        changes = sum(store.changes for store in stores)
        if self._sizes[0] != changes:
            self._sizes = changes, engine.memory(), sum(store.host_bytes for store in stores)

    @property
    def ended(self) -> bool:
        """Whether it takes no more requests: it is closed, or an error has ended it."""
        return self._closing

    @property
    def closed(self) -> bool:
        """Whether it has been closed and its thread has ended."""
        return self._closing and not self._thread.is_alive()

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
        owner: str = "",
        progress: bool = False,
        synthetic: SyntheticAcceptance | None = None,
        lines: LineLimits = ANY_LINES,
        sink: Callable[[StepEvent | End], object] | None = None,
    ) -> Handle:
        """Queues a request, from any thread; it starts when a slot is free. Arguments as of ``Session.steps``, and:

        Args:
            max_tokens: 0 computes the prompt alone, so that later ones that begin like it start sooner.
            reuse: False computes all of the prompt, whatever others have left.
            owner: whose request it is, by any name: prompts and texts of others are not reused for it, so that nothing tells of them.
            progress: also events without text while the prompt is read, whose ``prompt_read`` says how far it is.
            synthetic: of this request alone.
            lines: limits of the text's lines, for editors.
            sink: gets the events and then an ``End``, in the place of a reader of the handle. It is called in the thread of the steps, so it has
                to return at once.

        Raises:
            ContextError: the prompt is empty or does not fit the context of a slot.
            SamplingError: the sampling names tokens that do not exist, or a wrong grammar.
            EngineError: closed, ended by an error in a step, or speculative mode without a drafter.
        """
        engine = self._scheduler.runner
        ids, stop = self._prompt_ids(prompt, special), stop_texts(stop)
        jump_forward, mode = mode in (None, SPECULATIVE), mode or (SPECULATIVE if self._scheduler.drafts else PLAIN)
        text = BlockText(self._tokenizer.piece, stop, lines)
        options = GenerationOptions(
            max_tokens,
            mode,
            engine.options.width,
            self._tokenizer.is_end,
            ignore_end,
            synthetic,
            completes=text.completes,
            jump_forward=jump_forward,
            reuse=reuse,
            owner=owner,
        )
        sampler = self._make_sampler(sampling, ignore_end)
        options = replace(options, sampler=sampler)
        stats = Stats(device=engine.backend.device.name, versions=versions())  # whole before the first step can count in it
        if sampler is not None:
            stats.seed, stats.sampling = sampler.seed, sampler.sampling.describe()
        try:
            with self._changed:
                if self._closing:
                    why = "is closed" if self._failure is None else f"was ended by {type(self._failure).__name__}: {self._failure}"
                    raise EngineError(f"this concurrent session {why}; it takes no more requests, make another one") from self._failure
                handle = Handle(self, self._scheduler.submit(ids, options, stats), text, sampler, progress, sink)
                self._handles.append(handle)
                self._changed.notify()
        except BaseException:
            if sampler is not None:
                sampler.close()
            raise
        return handle

    def _look(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            if not self._handles:
                release_threads()  # another session may be going to compute
            with self._changed:
                self._changed.wait_for(lambda: self._handles or self._closing)
                if self._closing and not self._handles:
                    return
            # the first word about a prompt's progress comes before any of it is computed
            meanwhile = None if self._holds and not any(handle._told < 0 for handle in self._handles) else self._deliver
            try:
                if not self._scheduler.step(meanwhile) or self._holds or self._scheduler.idle:
                    self._deliver()
            except PyspecError as error:
                # the scheduler has handed it to every stream that it concerns; if it concerns none, the next step would fail alike
                if not self._deliver():
                    self._give_up(error)
            except BaseException as error:
                self._deliver()
                self._give_up(error)

    def _deliver(self) -> bool:
        """Makes events of what there is, and brings them to their readers when it is time; whether a request has ended."""
        self._measure()
        with self._changed:
            before = self._handles
            self._handles = [handle for handle in before if handle._collect()]
            if self._due(before):
                for handle in self._handles:
                    handle._hand_over()
            return len(self._handles) < len(before)

    def _due(self, handles: list[Handle]) -> bool:
        """Whether events would wait too long: until behind the next step, if that takes as long as this one did."""
        if not self._holds or self._scheduler.unsettled:
            return True
        now = time.monotonic()
        took, self._stepped = now - self._stepped, now
        if now + took - self._handed_over < HOLD_S and not any(handle._pressing for handle in handles):
            return False
        self._handed_over = now
        return True

    def _give_up(self, error: BaseException) -> None:
        """Ends everything: nobody may wait for ever."""
        with self._changed:
            self._closing, self._failure = True, error
            for handle in self._handles:
                handle._close(error)
            self._handles = []

    def stop(self, patience: float | None = None) -> bool:
        """Cancels every request and ends the thread; whether that had ended within ``patience`` seconds, for a step that is under way ends by itself alone.
        Where it has not, ``close`` would wait for it."""
        with self._changed:
            self._closing = True
            for handle in self._handles:
                handle._stream.cancel()
            self._changed.notify()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Cancels every request, ends the thread and frees the slots. Closing twice is fine."""
        self.stop()
        self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
