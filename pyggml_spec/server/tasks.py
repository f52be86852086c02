"""The request queue: order, limits, and the end of requests before their time.

    enter -> waiting (round robin over keys or connections, then priority, then age) -> submitted to the engine -> events -> End

The engine gets what starts soon, ``AHEAD`` more than it has slots, so that order, limits and cancellation stay here. All of this runs in the event
loop's thread, but for ``Queue._put`` and ``Queue._submit``.
"""

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from ..concurrent import ConcurrentSession, Handle
from ..engine.stats import Stats
from ..events import End, StepEvent
from ..models.adapters import Chosen
from ..sampling.sampler import Sampling
from ..speculation.synthetic import SyntheticAcceptance
from ..text.stream import ANY_LINES, LineLimits
from .errors import ApiError

log = logging.getLogger("pyspec.serve")
AHEAD = 2
MAX_SEQUENCES = 1024  # of one request, where the queue has no limit
MAX_KEPT, MAX_KEPT_TOTAL = 1 << 20, 1 << 22  # tokens and log probabilities, 12 bytes each, of one request and of all
MAX_UNREAD = 64  # events of one request that are kept apart; further ones of a slow reader are joined to the last
PING_SECONDS = 30.0  # of silence, after which a stream gets a comment
STUCK_SECONDS = 30.0


@dataclass(frozen=True)
class TaskRequest:
    """One sequence to generate, whatever the dialect. ``every_step``: events are not joined for a slow reader; ``scored``: log probabilities of the prompt,
    too."""

    ids: list[int]
    max_tokens: int | None = None
    sampling: Sampling | None = None
    stop: tuple[str, ...] = ()
    lines: LineLimits = ANY_LINES
    ignore_end: bool = False
    mode: str | None = None
    reuse: bool = True
    scored: bool = False
    adapters: Chosen | None = None
    progress: bool = False
    every_step: bool = False
    record: bool = True
    priority: int = 0
    key: str = ""
    client: str = ""  # the connection; the unit of round robin where there is no key


class Task:
    """One sequence in the queue or the engine. ``stats`` is empty until the engine has it."""

    _numbers = itertools.count()

    def __init__(self, request: TaskRequest, index: int, stream: "ResponseStream", client: str = "") -> None:
        self.request, self.index, self.stream, self.client = request, index, stream, client
        self.turn = 0  # of its client, among those that wait
        self.number = next(Task._numbers)
        self.entered = time.perf_counter()
        self.started: float | None = None  # when it was submitted to the engine
        self.progress_from: float | None = None  # when its prefill began, where progress is reported
        self.first: float | None = None  # when its first token came
        self.latest: float | None = None
        self.handle: Handle | None = None
        self.over = self.cancelled = False
        self.early: list[StepEvent | End] = []  # events that came before the handle
        self.timer: asyncio.TimerHandle | None = None
        self._empty = Stats(prompt_tokens=len(request.ids))

    @property
    def stats(self) -> Stats:
        return self.handle.stats if self.handle is not None else self._empty

    @property
    def slot(self) -> int:
        """-1: it has none."""
        return self.handle.slot if self.handle is not None else -1

    @property
    def queued_ms(self) -> float:
        """From its arrival to a slot; until now where it has none."""
        in_engine = self.stats.seconds.get("queued", 0.0)
        return 1000 * ((self.started or time.perf_counter()) - self.entered + in_engine)


class ResponseStream:
    """Events of all sequences of one request, in the order in which they come; one reader."""

    def __init__(self, requests: Sequence[TaskRequest], queue: "Queue", client: str = "") -> None:
        self.tasks = [Task(request, i, self, client) for i, request in enumerate(requests)]
        self._queue = queue
        self._items: deque[tuple[Task, StepEvent | End]] = deque()
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._latest = self._loop.time()  # when an item came
        self._timer: asyncio.TimerHandle | None = None
        self.ping_seconds = PING_SECONDS
        self.streams = False  # what was read is not kept
        self._kept, self._closed = 0, False

    async def read(self) -> tuple[Task, StepEvent | End] | None:
        """The next item; None where there was none for ``ping_seconds``."""
        if not self._items:
            if self._timer is None and self.ping_seconds < math.inf:
                self._timer = self._loop.call_later(self.ping_seconds, self._check_silence)
            self._more.clear()
            await self._more.wait()
            if not self._items:
                return None
        task, item = self._items.popleft()
        if self.streams:
            self._keep(-_size(item))
        return task, item

    def _keep(self, size: int) -> None:
        self._kept += size
        self._queue.kept += size

    def _check_silence(self) -> None:
        """One timer per request: one per event would cost more than the event (asyncio.wait: 70 us)."""
        due = self._latest + self.ping_seconds - self._loop.time()
        if due > 0:
            self._timer = self._loop.call_later(due, self._check_silence)
            return
        self._latest, self._timer = self._loop.time(), None
        self._more.set()

    def put(self, task: Task, item: StepEvent | End) -> None:
        if isinstance(item, StepEvent):
            if self._closed:
                return
            self._keep(_size(item))
            if self._kept > MAX_KEPT or self._queue.kept > MAX_KEPT_TOTAL:
                self._end_too_large()
                return
            last, a = self._items[-1] if len(self._items) >= MAX_UNREAD and not task.request.every_step else (None, None)
            if last is task and isinstance(a, StepEvent) and a.tokens and item.tokens:
                joined = replace(
                    item, text=a.text + item.text, tokens=a.tokens + item.tokens, logprobs=a.logprobs + item.logprobs, drafts=()
                )
                self._items[-1] = task, joined
                return
        self._items.append((task, item))
        self._latest = self._loop.time()
        self._more.set()

    def _end_too_large(self) -> None:
        """Ends all of it; what was not read is dropped."""
        error = ApiError(400, f"the response has more than {MAX_KEPT} log probabilities; request fewer, for fewer tokens, or for a stream")
        if self._kept <= MAX_KEPT:
            sentence = "the responses of all requests have too many log probabilities together; try again"
            error = ApiError(503, sentence, headers={"retry-after": "5"})
        elif self.streams:
            sentence = f"more than {MAX_KEPT} tokens and log probabilities of this stream were not read; read faster, or request fewer"
            error = ApiError(400, sentence)
        log.warning("a request was ended: %s", error.message)
        self._items.clear()
        self._closed = True
        self.put(self.tasks[0], End(error))
        for task in self.tasks:
            self._queue.cancel(task)

    def cancel(self) -> None:
        """Its reader is gone: tasks that wait are removed at once, those that run end before the next step."""
        self._keep(-self._kept)
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self.tasks:
            self._queue.cancel(task)


def _size(item: StepEvent | End) -> int:
    """Tokens and log probabilities of it."""
    if isinstance(item, End):
        return 0
    return len(item.tokens) + (sum(1 + len(p.top) for p in item.logprobs) if item.logprobs else 0)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # the loop is closed: the server has ended
        pass


@dataclass
class QueueLimits:
    """Of sequences that wait: ``requests``, ``tokens`` of their prompts, ``seconds`` each; None: no limit."""

    requests: int | None = None
    tokens: int | None = None
    seconds: float | None = None


class Queue:
    """Made in the event loop."""

    def __init__(
        self, concurrent: ConcurrentSession, slots: int, limits: QueueLimits, pool: Executor, ended: Callable[[Task], None],
        broken: Callable[[BaseException], ConcurrentSession | None], synthetic: Callable[[int], SyntheticAcceptance] | None = None,
        shares: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            ended: called with every task that is over, for the metrics.
            broken: makes another concurrent session after an error that has ended this one, in the pool; None gives up.
            synthetic: makes the acceptance of a task from its seed, or its number where it has none, for benchmarks.
            shares: whether prefixes that one key's requests left are used for another's.
        """
        self.engine, self.slots, self.limits, self._pool, self._ended, self._broken = concurrent, slots, limits, pool, ended, broken
        self._synthetic, self._shares = synthetic, shares
        self._ahead = AHEAD if limits.requests is None else min(AHEAD, limits.requests)
        self._loop = asyncio.get_running_loop()
        self._arrived: list[tuple[Task, StepEvent | End]] = []  # from the engine's thread
        self._lock = threading.Lock()
        self._queued: list[Task] = []  # which the engine has not got
        self._turns = itertools.count()
        self.running: set[Task] = set()
        self.rejected = {"requests": 0, "tokens": 0, "time": 0, "draining": 0}  # for /metrics
        self.kept = 0  # tokens and log probabilities that response streams hold
        self.draining = False
        self._seconds = 1.0  # moving average of a sequence's time in the engine
        self._idle = asyncio.Event()
        self._idle.set()
        self._repairing: asyncio.Task[None] | None = None
        self._logged: deque[str] = deque(maxlen=256)  # notes that are in the log
        self._last_step = (-1, time.monotonic())  # the engine's steps when it was last checked, and since when

    # -- state

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._queued) + sum(task.slot < 0 for task in self.running)

    @property
    def processing(self) -> list[Task]:
        """Sequences that have a slot."""
        return [task for task in self.running if task.slot >= 0]

    @property
    def waiting_tokens(self) -> int:
        return sum(len(task.request.ids) for task in self._queued)

    def step_age(self) -> float:
        """Seconds since a step ended, while there is work; 0 where there is none."""
        now = time.monotonic()
        if self.engine.stats.steps != self._last_step[0] or not self.running:
            self._last_step = self.engine.stats.steps, now
        return now - self._last_step[1]

    @property
    def stuck(self) -> bool:
        return self.step_age() > STUCK_SECONDS

    async def watch(self) -> None:
        """Checks the engine once a second, for ``step_age``."""
        while True:
            self.step_age()
            await asyncio.sleep(1)

    @property
    def retry_after(self) -> int:
        """Whole seconds until a place is likely free, from the time of recent sequences."""
        return min(60, max(1, math.ceil(self._seconds * (len(self._queued) + len(self.running)) / self.slots)))

    # -- entering and leaving

    def enter(self, requests: Sequence[TaskRequest], client: str | None = None) -> ResponseStream:
        """Queues the sequences of one request. ``client``: the unit of round robin; None: its key or its connection. Raises ApiError: they do not
        fit the queue, or the server ends."""
        if self.draining:
            self.rejected["draining"] += 1
            raise ApiError(503, "the server is ending and takes no more requests; send this one to another", headers={"retry-after": "5"})
        self.check_count(len(requests))
        if client is None:
            client = requests[0].key or requests[0].client if requests else ""
        free = max(0, self.slots + self._ahead - len(self.running))
        waiting, beyond = len(self._queued), max(0, len(requests) - free)
        most = self.limits.requests
        if most is not None and beyond and waiting + beyond > most and not self._may_overfill(client, len(requests), waiting):
            full = f"{waiting} requests wait already, and this server's queue holds {most}"
            raise self._full("requests", full if most else "every slot is taken, and nothing waits at this server")
        tokens = sum(len(request.ids) for request in requests)
        if self.limits.tokens is not None and waiting and self.waiting_tokens + tokens > self.limits.tokens:
            raise self._full("tokens", f"the prompts that wait have {self.waiting_tokens} tokens, and the queue holds {self.limits.tokens}")
        stream = ResponseStream(requests, self, client)
        turn = next((task.turn for task in self._queued if task.client == client), next(self._turns))
        for task in stream.tasks:
            task.turn = turn
            self._queued.append(task)
            if self.limits.seconds is not None:
                task.timer = self._loop.call_later(self.limits.seconds, self._too_late, task)
        self._idle.clear()
        self._pump()
        return stream

    def _may_overfill(self, client: str, count: int, waiting: int) -> bool:
        """Whether one sequence of a client that has none waiting comes into a full queue, because others have several in it: one client must not fill
        it for others. It holds twice its limit then, at most."""
        clients = {task.client for task in self._queued}
        return count == 1 and len(clients) < waiting and client not in clients and waiting < 2 * (self.limits.requests or 0)

    def check_count(self, count: int) -> None:
        """Before tasks are made. Raises ApiError: so many sequences of one request never have a place."""
        most = MAX_SEQUENCES if self.limits.requests is None else self.slots + self._ahead + self.limits.requests
        if count > most:
            sentence = f"the request has {count} sequences, and this server takes {most} at once, those that wait included"
            raise ApiError(400, f"{sentence}; request fewer, or start it with a larger `queue`")

    def _full(self, why: str, sentence: str) -> ApiError:
        self.rejected[why] += 1
        wait = self.retry_after
        return ApiError(429, f"{sentence}; try again in about {wait} s", headers={"retry-after": str(wait)})

    def _too_late(self, task: Task) -> None:
        if waits := task in self.running and task.handle is not None and task.slot < 0:
            task.handle.cancel()
        if task in self._queued or waits:
            self._finish(task, End(self._full("time", f"the request waited for {self.limits.seconds:g} s and no slot became free")))

    def cancel(self, task: Task) -> None:
        if task.over or task.cancelled:
            return
        task.cancelled = True
        if task in self._queued:
            self._finish(task, End(None))
        elif task.handle is not None:
            task.handle.cancel()

    async def drain(self, seconds: float) -> bool:
        """Takes no more requests and waits until all have ended; after ``seconds`` the rest is cancelled, without waiting for a step. Whether all
        ended by themselves."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.cancel_all("the server ends")
            return False
        return True

    def cancel_all(self, why: str) -> None:
        """Ends everything; readers get an error with ``why``."""
        for task in [*self.running, *self._queued]:
            if not task.over and not task.cancelled:
                task.stream.put(task, End(ApiError(503, f"{why}: this response was cut off", headers={"retry-after": "5"})))
                self.cancel(task)

    # -- running

    def _pump(self) -> None:
        def order(task: Task) -> tuple[int, int, int, int]:
            """Keys by their turns; connections without a key go by priority first."""
            request = task.request
            return 0 if request.key else -request.priority, task.turn, -request.priority, task.number

        while self._queued and len(self.running) < self.slots + self._ahead and self._repairing is None:
            task = min(self._queued, key=order)
            self._queued.remove(task)
            turn = next(self._turns)
            for other in self._queued:
                if other.client == task.client:
                    other.turn = turn
            self.running.add(task)
            task.started = time.perf_counter()
            if task.request.sampling is None or task.request.sampling.is_greedy:
                self._submit(task)
            else:  # making a sampler may take milliseconds
                self._loop.run_in_executor(self._pool, self._submit, task)

    def _submit(self, task: Task) -> None:
        """Gives it to the engine; what comes of that is taken in the event loop's next iteration."""
        request, concurrent = task.request, self.engine
        seed = request.sampling.seed if request.sampling is not None else None
        if task.cancelled:
            _call_in(self._loop, self._finish, task, End(None))
            return
        try:
            synthetic = self._synthetic(task.number if seed is None else seed) if self._synthetic is not None else None
            handle = concurrent.submit(
                request.ids, request.max_tokens, mode=request.mode, sampling=request.sampling, stop=request.stop, lines=request.lines,
                ignore_end=request.ignore_end, reuse=request.reuse, scored=request.scored, adapters=request.adapters,
                owner="" if self._shares else request.key, progress=request.progress,
                synthetic=synthetic, sink=lambda item: self._put(task, item),
            )  # fmt: skip
        except BaseException as error:
            _call_in(self._loop, self._finish, task, End(error))
        else:
            _call_in(self._loop, self._submitted, task, handle)

    def _submitted(self, task: Task, handle: Handle) -> None:
        task.handle = handle
        if task.cancelled:
            handle.cancel()
        early, task.early = task.early, []
        for item in early:
            self._take(task, item)

    def _put(self, task: Task, item: StepEvent | End) -> None:
        """In the engine's thread: one call of the event loop per step, whatever the number of slots."""
        with self._lock:
            self._arrived.append((task, item))
            if len(self._arrived) > 1:
                return
        _call_in(self._loop, self._take_arrived)

    def _take_arrived(self) -> None:
        with self._lock:
            items, self._arrived = self._arrived, []
        for task, item in items:
            self._take(task, item)

    def _take(self, task: Task, item: StepEvent | End) -> None:
        if task.handle is None:
            task.early.append(item)
            return
        if isinstance(item, End):
            self._finish(task, item)
            return
        task.latest = time.perf_counter()
        if item.prompt_read is not None and task.progress_from is None:
            task.progress_from = task.latest
        if item.tokens and task.first is None:
            task.first = task.latest
        if task.timer is not None:
            task.timer.cancel()
            task.timer = None
        task.stream.put(task, item)

    def _finish(self, task: Task, end: End) -> None:
        if task.over:
            return
        task.over = True
        if task.timer is not None:
            task.timer.cancel()
        if task in self._queued:
            self._queued.remove(task)
        if task in self.running:
            self.running.remove(task)
            self._seconds += 0.2 * (time.perf_counter() - (task.started or task.entered) - self._seconds)
        if end.error is not None and self.engine.ended and self._repairing is None:  # whatever the error: it takes no task any more
            self._repairing = self._loop.create_task(self._repair(end.error))
        for note in task.stats.notes:
            if note not in self._logged:
                self._logged.append(note)
                log.warning("%s", note)
        task.stream.put(task, end)
        self._ended(task)
        self._pump()
        if not self.running and not self._queued:
            self._idle.set()

    async def _repair(self, error: BaseException) -> None:
        made = await self._loop.run_in_executor(self._pool, self._broken, error)
        self._repairing = None
        if made is None:
            self.draining = True
            self.cancel_all("the engine has failed")
            return
        self.engine = made
        self._pump()
