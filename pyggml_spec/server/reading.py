"""From a request's sequences to its response: reading them to the end, or as they come."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ParamSpec, TypeVar

from msgspec import Struct

from ..events import End
from ..text.renderer import RENDERER, WouldBlock
from .bodies import Fields
from .errors import ApiError, api_error
from .http import Request
from .output import Delta, Output
from .pool import Pool
from .resumable import HEADER, Streams, key_of
from .served import Served
from .tasks import MAX_KEPT, Queue, Task, TaskRequest

P = ParamSpec("P")
R = TypeVar("R")
SMALL = 1024  # bytes of a request that is prepared in the event loop: encoding takes 0.2 ms, a thread's switches two times 0.1 to 0.2 ms
RENDER_SECONDS = 0.003  # that the event loop waits for a template, which takes 0.1 ms as a rule; then a thread renders it
COMPILED = {"grammar", "regex", "lark", "json_schema", "response_format", "grammar_lazy", "tools", "text", "output_config", "output_format"}
"""Fields whose compilation may take a second."""
LONG = 16 << 10  # bytes of a request for the long lane of the pool


class Context:
    """What handlers have."""

    def __init__(self, served: Served, queue: Queue, pool: Pool) -> None:
        self.served, self.queue, self._pool = served, queue, pool
        self.streams = Streams()
        self.watchers = 0  # of the slots

    async def in_pool(self, request: Request, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``function`` in a thread: the event loop goes on with other streams. It is cancelled when the client disconnects."""
        work = self._pool.start(lambda: function(*args, **kwargs), request.key or request.peer, len(request.data) > LONG)
        try:
            return await asyncio.wrap_future(work.future)
        except asyncio.CancelledError:
            work.cancel()
            raise

    async def prepared(self, request: Request, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``function``, which prepares a request: in a thread if that could take long, else here, where the first token comes sooner."""
        if len(request.data) <= SMALL and not COMPILED & request.json_object().keys():
            with suppress(WouldBlock), RENDERER.nonblocking(RENDER_SECONDS):
                return function(*args, **kwargs)
        done = await self.in_pool(request, function, *args, **kwargs)
        request.forget(*(body for body in args if isinstance(body, Struct)))
        return done


def _check_logprobs(requests: Sequence[TaskRequest], n_ctx: int) -> None:
    """Raises ApiError: a whole response could not hold so many log probabilities."""
    total = sum(
        min(request.max_tokens, n_ctx) * (1 + request.sampling.logprobs)
        for request in requests
        if request.max_tokens is not None and request.sampling is not None and request.sampling.logprobs is not None
    )
    if total > MAX_KEPT:
        sentence = f"the response could have {total} log probabilities, and {MAX_KEPT} are the most; request fewer, for fewer tokens, or for a stream"
        raise ApiError(400, sentence)


class Reader:
    """The outputs of one request. Making it enters the queue; the request's ``on_end`` cancels what is left."""

    def __init__(
        self, context: Context, request: Request, body: Fields, requests: Sequence[TaskRequest], make: Callable[[Task], Output]
    ) -> None:
        """Raises ApiError: the queue is full, or the id of its stream too long."""
        key = key_of(request, request.headers.get(HEADER, "")) if body.stream else None
        if not body.stream and any(r.sampling is not None and r.sampling.logprobs is not None for r in requests):
            _check_logprobs(requests, context.served.n_ctx)
        self._events = context.queue.enter([replace(r, client=request.peer) for r in requests])
        self._events.streams = body.stream
        if key is not None:  # at once: this request may wait for the slot of the stream before
            context.streams.end(key)
        self._events.ping_seconds = float(body.sse_ping_interval) if body.sse_ping_interval > 0 else math.inf
        request.on_end.append(self._events.cancel)
        self.outputs = [make(task) for task in self._events.tasks]
        for output in self.outputs:
            output.keeps_logprobs = not body.stream
        self._left = len(self.outputs)
        self._first: list[tuple[Output, Delta, bool] | None] = []

    async def whole(self) -> list[Output]:
        """All of them, ended. Raises ApiError."""
        async for _ in self.deltas():
            pass
        return self.outputs

    async def begin(self) -> None:
        """Waits for the first event, so that a request that fails at once gets an ordinary error. Raises ApiError."""
        self._first = await self._next()

    async def deltas(self) -> AsyncIterator[tuple[Output, Delta, bool] | None]:
        """Each output with its next delta and whether that was the last; None after a long silence. Raises ApiError."""
        while True:
            items, self._first = self._first or await self._next(), []
            for item in items:
                yield item
            if not self._left:
                return

    async def _next(self) -> list[tuple[Output, Delta, bool] | None]:
        item = await self._events.read()
        if item is None:
            return [None]
        task, event = item
        output = self.outputs[task.index]
        if isinstance(event, End):
            self._left -= 1
            if event.error is not None:
                raise api_error(event.error)
            return []
        if event.prompt_read is not None:
            output.stats, output.prompt_read = event.stats, event.prompt_read
            return [(output, Delta(prompt_read=event.prompt_read), False)]
        if not event.tokens:
            return [(output, output.finish(event), True)]
        return [(output, delta, False) for delta in output.take(event)]
