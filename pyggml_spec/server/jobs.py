"""The queue: what waits, what runs, who is next, and how a request ends before its time.

    enter -> waiting (order: round robin over keys or connections, then priority, then age) -> given to the engine -> events -> End

The engine gets what starts soon, ``AHEAD`` more than it has slots, so that order, limits and cancellation stay here. Everything in this file
but ``_Wakeup.put`` runs in the event loop's thread.
"""

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from ..concurrent import ConcurrentSession, Handle
from ..engine.stats import Stats
from ..events import End, StepEvent
from ..sampling.sampler import Sampling
from ..speculation.synthetic import SyntheticAcceptance
from ..text.stream import ANY_LINES, LineLimits
from .errors import ApiError

log = logging.getLogger("pyspec.serve")
AHEAD = 2
MOST_SEQUENCES = 1024  # of one request, where the queue has no limit
MOST_KEPT, MOST_KEPT_TOGETHER = 1 << 20, 1 << 22  # tokens and log probabilities, 12 bytes each, of one request and of all
UNREAD = 64  # events of one request that are kept apart; further ones of a reader that is slow are joined to the last
SILENCE = 30.0  # seconds after which a silent stream gets a comment
STUCK_SECONDS = 30.0


@dataclass(frozen=True)
class Ask:
    """What one sequence is asked for, whatever dialect it came in. ``every_step``: events are kept apart, however slowly they are read."""

    ids: list[int]
    max_tokens: int | None = None
    sampling: Sampling | None = None
    stop: tuple[str, ...] = ()
    lines: LineLimits = ANY_LINES
    ignore_end: bool = False
    mode: str | None = None
    reuse: bool = True
    progress: bool = False
    every_step: bool = False
    priority: int = 0
    key: str = ""
    client: str = ""  # the connection, which takes turns with others where there is no key


class Job:
    """One sequence on its way. ``stats`` is empty until the engine has it."""

    _numbers = itertools.count()

    def __init__(self, ask: Ask, index: int, answers: "Answers", client: str = "") -> None:
        self.ask, self.index, self.answers, self.client = ask, index, answers, client
        self.number = next(Job._numbers)
        self.entered = time.perf_counter()
        self.started: float | None = None  # when the engine was given it
        self.progress_from: float | None = None  # when its prompt was begun, where its progress is told
        self.first: float | None = None  # when its first token came
        self.latest: float | None = None
        self.handle: Handle | None = None
        self.over = self.cancelled = False
        self.early: list[StepEvent | End] = []  # what came before the handle that it belongs to
        self.timer: asyncio.TimerHandle | None = None
        self._empty = Stats(prompt_tokens=len(ask.ids))

    @property
    def stats(self) -> Stats:
        return self.handle.stats if self.handle is not None else self._empty

    @property
    def queued_ms(self) -> float:
        """From its arrival to a slot; still running where it has none."""
        in_engine = self.stats.seconds.get("queued", 0.0)
        return 1000 * ((self.started or time.perf_counter()) - self.entered + in_engine)


class Answers:
    """What the sequences of one request bring, in the order in which it comes; one reader."""

    def __init__(self, asks: Sequence[Ask], queue: "Queue", client: str = "") -> None:
        self.jobs = [Job(ask, i, self, client) for i, ask in enumerate(asks)]
        self._queue = queue
        self._items: deque[tuple[Job, StepEvent | End]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._latest = self._loop.time()  # when an item came
        self._timer: asyncio.TimerHandle | None = None
        self.silence = SILENCE
        self.streams = False  # what was read is kept no more
        self._kept, self._closed = 0, False

    async def read(self) -> tuple[Job, StepEvent | End] | None:
        """The next item; None where there was none for ``silence`` seconds."""
        if not self._items:
            if self._timer is None and self.silence < math.inf:
                self._timer = self._loop.call_later(self.silence, self._quiet)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._items:
                return None
        job, item = self._items.popleft()
        if self.streams:
            self._keep(-_size(item))
        return job, item

    def _keep(self, size: int) -> None:
        self._kept += size
        self._queue.kept += size

    def _quiet(self) -> None:
        """One timer per request, looked at when it is over: one per event would cost more than the event (asyncio.wait: 70 us)."""
        due = self._latest + self.silence - self._loop.time()
        if due > 0:
            self._timer = self._loop.call_later(due, self._quiet)
            return
        self._latest, self._timer = self._loop.time(), None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put(self, job: Job, item: StepEvent | End) -> None:
        if isinstance(item, StepEvent):
            if self._closed:
                return
            self._keep(_size(item))
            if self._kept > MOST_KEPT or self._queue.kept > MOST_KEPT_TOGETHER:
                self._too_much()
                return
        joins = len(self._items) >= UNREAD and not job.ask.every_step and self._items[-1][0] is job
        if joins and isinstance(item, StepEvent) and item.tokens:
            before = self._items[-1][1]
            if isinstance(before, StepEvent) and before.tokens:
                self._items[-1] = job, _joined(before, item)
                return
        self._items.append((job, item))
        self._latest = self._loop.time()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _too_much(self) -> None:
        """Ends all of it; what was not read is dropped."""
        if self._kept <= MOST_KEPT:
            error = ApiError(
                503, "the answers of all requests have too many log probabilities together; try again", headers={"retry-after": "5"}
            )
        elif self.streams:
            error = ApiError(
                400, f"more than {MOST_KEPT} tokens and log probabilities of this stream were not read; read faster, or ask for fewer"
            )
        else:
            error = ApiError(
                400, f"the answer has more than {MOST_KEPT} log probabilities; ask for fewer, for fewer tokens, or for a stream"
            )
        log.warning("a request was ended: %s", error.message)
        self._items.clear()
        self._closed = True
        job = self.jobs[0]
        self.put(job, End(error))
        for job in self.jobs:
            self._queue.cancel(job)

    def cancel(self) -> None:
        """Nobody reads any more: what waits leaves at once, what runs ends before the next step."""
        self._keep(-self._kept)
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for job in self.jobs:
            self._queue.cancel(job)


def _size(item: StepEvent | End) -> int:
    """Tokens and log probabilities of it."""
    if isinstance(item, End):
        return 0
    return len(item.tokens) + (sum(1 + len(p.top) for p in item.logprobs) if item.logprobs else 0)


def _joined(a: StepEvent, b: StepEvent) -> StepEvent:
    return replace(b, text=a.text + b.text, tokens=a.tokens + b.tokens, logprobs=a.logprobs + b.logprobs, drafts=())


class _Wakeup:
    """Brings what the stepping thread gives to the event loop: one call per step, whatever the number of slots."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Job, StepEvent | End], None]) -> None:
        self._loop, self._take, self._lock = loop, take, threading.Lock()
        self._items: list[tuple[Job, StepEvent | End]] = []

    def put(self, job: Job, item: StepEvent | End) -> None:
        with self._lock:
            self._items.append((job, item))
            if len(self._items) > 1:
                return
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop is closed: the server has ended
            pass

    def _drain(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        for job, item in items:
            self._take(job, item)


@dataclass
class QueueLimits:
    """``requests``, ``tokens``: at most so many sequences, and tokens of their prompts, wait; None: no limit. ``seconds``: so long at most."""

    requests: int | None = None
    tokens: int | None = None
    seconds: float | None = None


@dataclass
class Counts:
    """What the queue has seen, for /metrics."""

    rejected: dict[str, int] = field(default_factory=lambda: {"requests": 0, "tokens": 0, "time": 0, "draining": 0})
    disconnected: int = 0


class Queue:
    """Made in the event loop. ``ended`` is called with every job that is over, for the statistics."""

    def __init__(
        self, concurrent: ConcurrentSession, slots: int, limits: QueueLimits, pool: Executor, ended: Callable[[Job], None],
        broken: Callable[[BaseException], ConcurrentSession | None], synthetic: Callable[[int], SyntheticAcceptance] | None = None,
        shares: bool = False,
    ) -> None:  # fmt: skip
        """``broken``: makes another concurrent session after an error that has ended this one; None gives up. Called in the pool.
        ``synthetic``: makes the acceptance of a job by its seed, or its number where it has none, for benchmarks. ``shares``: whether
        what one key's requests left is used for another's."""
        self._concurrent, self.slots, self.limits, self._pool, self._ended, self._broken = concurrent, slots, limits, pool, ended, broken
        self._synthetic, self._shares = synthetic, shares
        self._ahead = AHEAD if limits.requests is None else min(AHEAD, limits.requests)
        self._loop = asyncio.get_running_loop()
        self._wakeup = _Wakeup(self._loop, self._take)
        self._waiting: OrderedDict[str, list[Job]] = OrderedDict()  # by key, in the order of their turns
        self.running: set[Job] = set()
        self.counts = Counts()
        self.kept = 0  # tokens and log probabilities that answers hold
        self.draining = False
        self._seconds = 1.0  # a sequence's time in the engine: a mean that forgets
        self._idle = asyncio.Event()
        self._idle.set()
        self._repairing: asyncio.Task[None] | None = None
        self._said: deque[str] = deque(maxlen=256)  # notes that are in the log
        self._moved = (-1, time.monotonic())  # the engine's steps when it was last looked at, and since when

    # -- what is there

    @property
    def engine(self) -> ConcurrentSession:
        return self._concurrent

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return sum(map(len, self._waiting.values())) + sum(job.handle is None or job.handle.slot < 0 for job in self.running)

    @property
    def processing(self) -> list[Job]:
        """Sequences that have a slot."""
        return [job for job in self.running if job.handle is not None and job.handle.slot >= 0]

    @property
    def waiting_tokens(self) -> int:
        return sum(len(job.ask.ids) for jobs in self._waiting.values() for job in jobs)

    def step_age(self) -> float:
        """Seconds since a step ended, while there is work; 0 where there is none."""
        steps, since = self._moved
        now = time.monotonic()
        if self._concurrent.stats.steps != steps or not self.running:
            self._moved, since = (self._concurrent.stats.steps, now), now
        return now - since

    @property
    def stuck(self) -> bool:
        return self.step_age() > STUCK_SECONDS

    async def watch(self) -> None:
        """Looks at the engine once a second, for ``step_age``."""
        while True:
            self.step_age()
            await asyncio.sleep(1)

    @property
    def retry_after(self) -> int:
        """Whole seconds until a place is likely free, from what sequences took of late."""
        ahead = sum(map(len, self._waiting.values())) + len(self.running)
        return min(60, max(1, math.ceil(self._seconds * ahead / self.slots)))

    # -- entering and leaving

    def enter(self, asks: Sequence[Ask], client: str | None = None) -> Answers:
        """Queues the sequences of one request. ``client``: who takes turns with others, its key or its connection.

        Raises:
            ApiError: they do not fit the queue, or the server ends.
        """
        if self.draining:
            self.counts.rejected["draining"] += 1
            raise ApiError(503, "the server is ending and takes no more requests; ask another one", headers={"retry-after": "5"})
        self.check_count(len(asks))
        if client is None:
            client = asks[0].key or asks[0].client if asks else ""
        free = max(0, self.slots + self._ahead - len(self.running))
        waiting, beyond = sum(map(len, self._waiting.values())), max(0, len(asks) - free)
        if (
            self.limits.requests is not None
            and beyond
            and waiting + beyond > self.limits.requests
            and not self._has_a_turn(client, len(asks), waiting)
        ):
            full = f"{waiting} requests wait already, and this server's queue holds {self.limits.requests}"
            self._reject("requests", full if self.limits.requests else "every slot is taken, and nothing waits at this server")
        tokens = sum(len(ask.ids) for ask in asks)
        if self.limits.tokens is not None and waiting and self.waiting_tokens + tokens > self.limits.tokens:
            self._reject("tokens", f"the prompts that wait have {self.waiting_tokens} tokens, and the queue holds {self.limits.tokens}")
        answers = Answers(asks, self, client)
        for job in answers.jobs:
            self._waiting.setdefault(client, []).append(job)
            if self.limits.seconds is not None:
                job.timer = self._loop.call_later(self.limits.seconds, self._too_late, job)
        if asks:
            self._waiting[client].sort(key=lambda j: (-j.ask.priority, j.number))
        self._idle.clear()
        self._pump()
        return answers

    def _has_a_turn(self, client: str, count: int, waiting: int) -> bool:
        """Whether one sequence of a client that has none waiting comes into a full queue, because others have several in it. As many again as it holds, at most."""
        several = any(len(jobs) > 1 for jobs in self._waiting.values())
        return (
            count == 1
            and several
            and client not in self._waiting
            and self.limits.requests is not None
            and waiting < 2 * self.limits.requests
        )

    def check_count(self, count: int) -> None:
        """Before they are made. Raises ApiError: so many sequences of one request never have a place."""
        most = MOST_SEQUENCES if self.limits.requests is None else self.slots + self._ahead + self.limits.requests
        if count > most:
            raise ApiError(
                400, f"the request asks for {count} answers, and this server has {most} at once, those that wait among them; ask for fewer, or "
                "start it with a larger `queue`",
            )  # fmt: skip

    def _reject(self, why: str, sentence: str) -> None:
        self.counts.rejected[why] += 1
        raise self._full(sentence)

    def _full(self, sentence: str) -> ApiError:
        wait = self.retry_after
        return ApiError(429, f"{sentence}; try again in about {wait} s", headers={"retry-after": str(wait)})

    def _too_late(self, job: Job) -> None:
        waits = job in self.running and job.handle is not None and job.handle.slot < 0
        if waits and job.handle is not None:
            job.handle.cancel()
        if self._forget_waiting(job) or waits:
            self.counts.rejected["time"] += 1
            self._finish(job, End(self._full(f"the request waited for {self.limits.seconds:g} s and no slot became free")))

    def cancel(self, job: Job) -> None:
        if job.over or job.cancelled:
            return
        job.cancelled = True
        if self._forget_waiting(job):
            self._finish(job, End(None))
        elif job.handle is not None:
            job.handle.cancel()

    def _forget_waiting(self, job: Job) -> bool:
        jobs = self._waiting.get(job.client, [])
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.client]
        return True

    async def drain(self, seconds: float) -> bool:
        """Takes nothing more and waits until all have ended; those that have not after ``seconds`` are cancelled, which a step that is under way does
        not hold up. Whether none was."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.cancel_all("the server ends")
            return False
        return True

    def cancel_all(self, why: str) -> None:
        """Ends everything; readers get an error that says ``why``."""
        for job in [*self.running, *(job for jobs in self._waiting.values() for job in jobs)]:
            if not job.over and not job.cancelled:
                job.answers.put(job, End(ApiError(503, f"{why}: this answer was cut off", headers={"retry-after": "5"})))
                self.cancel(job)

    # -- running

    def _pump(self) -> None:
        while self._waiting and len(self.running) < self.slots + self._ahead and self._repairing is None:
            # of keys the one whose turn it is; connections without a key have theirs among those of the highest priority
            client, jobs = max(self._waiting.items(), key=lambda item: 0 if item[1][0].ask.key else item[1][0].ask.priority)
            job = jobs.pop(0)
            del self._waiting[client]
            if jobs:
                self._waiting[client] = jobs  # its next turn is after those of the others
            self.running.add(job)
            job.started = time.perf_counter()
            if job.ask.sampling is None or job.ask.sampling.is_greedy:  # which draws nothing: it is given to the engine at once
                if (handle := self._handle(job)) is not None:
                    self._submitted(job, handle)
            else:
                self._loop.run_in_executor(self._pool, self._submit, job)

    def _submit(self, job: Job) -> None:
        """In a thread of the pool: to make a sampler may take milliseconds."""
        if job.cancelled:
            self._call(self._finish, job, End(None))
            return
        if (handle := self._handle(job)) is not None:
            self._call(self._submitted, job, handle)

    def _handle(self, job: Job) -> Handle | None:
        """Gives it to the engine; what the engine refuses ends with the event loop's next turn."""
        ask, concurrent = job.ask, self._concurrent
        seed = ask.sampling.seed if ask.sampling is not None else None
        try:
            return concurrent.submit(
                ask.ids, ask.max_tokens, mode=ask.mode, sampling=ask.sampling, stop=ask.stop, lines=ask.lines, ignore_end=ask.ignore_end, reuse=ask.reuse, owner="" if self._shares else ask.key,
                progress=ask.progress, synthetic=self._synthetic(job.number if seed is None else seed) if self._synthetic is not None else None, sink=lambda item: self._wakeup.put(job, item),
            )  # fmt: skip
        except BaseException as error:
            self._call(self._finish, job, End(error))
            return None

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the server has ended
            pass

    def _submitted(self, job: Job, handle: Handle) -> None:
        job.handle = handle
        if job.cancelled:
            handle.cancel()
        early, job.early = job.early, []
        for item in early:
            self._take(job, item)

    def _take(self, job: Job, item: StepEvent | End) -> None:
        if job.handle is None:
            job.early.append(item)
            return
        if isinstance(item, End):
            self._finish(job, item)
            return
        job.latest = time.perf_counter()
        if item.prompt_read is not None and job.progress_from is None:
            job.progress_from = job.latest
        if item.tokens and job.first is None:
            job.first = job.latest
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        job.answers.put(job, item)

    def _finish(self, job: Job, end: End) -> None:
        if job.over:
            return
        job.over = True
        if job.timer is not None:
            job.timer.cancel()
        if job in self.running:
            self.running.remove(job)
            self._seconds += 0.2 * (time.perf_counter() - (job.started or job.entered) - self._seconds)
        if (
            end.error is not None and self._concurrent.ended and self._repairing is None
        ):  # whatever it was: no job is given to what has ended
            self._repairing = self._loop.create_task(self._repair(end.error))
        for note in job.stats.notes:
            if note not in self._said:
                self._said.append(note)
                log.warning("%s", note)
        job.answers.put(job, end)
        self._ended(job)
        self._pump()
        if not self.running and not self._waiting:
            self._idle.set()

    async def _repair(self, error: BaseException) -> None:
        made = await self._loop.run_in_executor(self._pool, self._broken, error)
        self._repairing = None
        if made is None:
            self.draining = True
            self.cancel_all("the engine has failed")
            return
        self._concurrent = made
        self._pump()
