"""From a request's sequences to its response: reading them to the end, or as they come."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ParamSpec, TypeVar

from ..events import End
from ..text.renderer import RENDERER, WouldBlock
from . import fields
from .answer import Answer, Delta
from .errors import ApiError, api_error
from .http import Request
from .jobs import MOST_KEPT, SILENCE, Ask, Job, Queue
from .pool import Pool
from .resumable import HEADER, Streams, key_of
from .served import Served

P = ParamSpec("P")
R = TypeVar("R")


SMALL = 1024  # bytes of a request that is read at once: encoding takes 0.2 ms of the event loop, a thread's turn two times 0.1 to 0.2 ms
RENDERING = (
    0.003  # seconds that the event loop waits for a template, which takes 0.1 ms as a rule; what takes longer is asked again by a thread
)
SLOW = {"grammar", "regex", "lark", "json_schema", "response_format", "grammar_lazy", "tools", "text", "output_config", "output_format"}
"""Fields of what is compiled, which may take a second."""
LONG = 16 << 10  # bytes of a request that is read beside short ones, and never before them


class Context:
    """What handlers have."""

    def __init__(self, served: Served, queue: Queue, pool: Pool) -> None:
        self.served, self.queue, self._pool = served, queue, pool
        self.streams = Streams()
        self.watchers = 0  # of what its slots do

    async def in_pool(self, request: Request, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``function`` in a thread: the event loop goes on with other streams. It is cancelled when the client goes away."""
        work = self._pool.start(lambda: function(*args, **kwargs), request.key or request.peer, len(request.data) > LONG)
        try:
            return await asyncio.wrap_future(work.future)
        except asyncio.CancelledError:
            work.cancel()
            raise

    async def prepared(self, request: Request, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``function``, which reads a request and changes nothing: in a thread if that could take long, or else here, where the first token waits less."""
        if len(request.data) <= SMALL and not SLOW & request.json_object().keys():
            with suppress(WouldBlock), RENDERER.nonblocking(RENDERING):
                return function(*args, **kwargs)
        done = await self.in_pool(request, function, *args, **kwargs)
        request.forget(*(body for body in args if isinstance(body, dict)))
        return done


def _check_told(asks: Sequence[Ask], n_ctx: int) -> None:
    """Raises ApiError: so many log probabilities would be asked for that a whole answer could not hold them."""
    told = sum(
        min(ask.max_tokens, n_ctx) * (1 + ask.sampling.logprobs)
        for ask in asks
        if ask.max_tokens is not None and ask.sampling is not None and ask.sampling.logprobs is not None
    )
    if told > MOST_KEPT:
        raise ApiError(
            400,
            f"the answer could have {told} log probabilities, and {MOST_KEPT} are the most; ask for fewer, for fewer tokens, or for a stream",
        )


class Reader:
    """The answers of one request. Entering the queue is its beginning; the request's ``ended`` cancels what is left."""

    def __init__(self, context: Context, request: Request, asks: Sequence[Ask], make: Callable[[Job], Answer]) -> None:
        """Raises ApiError: the queue is full, or the id of its stream too long."""
        silence = fields.whole(request.json_object(), "sse_ping_interval", int(SILENCE), -1, (1 << 31) - 1)
        key = key_of(request, request.headers.get(HEADER, "")) if request.json_object().get("stream") is True else None
        streams = request.json_object().get("stream") is True
        if not streams and any(ask.sampling is not None and ask.sampling.logprobs is not None for ask in asks):
            _check_told(asks, context.served.n_ctx)
        self._answers = context.queue.enter([replace(ask, client=request.peer) for ask in asks])
        self._answers.streams = streams
        if key is not None:  # now, not when this one's first token is there: it may wait for the slot of the one before
            context.streams.end(key)
        self._answers.silence = float(silence) if silence > 0 else math.inf
        request.on_end.append(self._answers.cancel)
        self.answers = [make(job) for job in self._answers.jobs]
        for answer in self.answers:
            answer.keeps_logprobs = not streams
        self._left = len(self.answers)
        self._first: list[tuple[Answer, Delta, bool] | None] = []

    async def whole(self) -> list[Answer]:
        """All of them, ended. Raises ApiError."""
        async for _ in self.deltas():
            pass
        return self.answers

    async def begin(self) -> None:
        """Waits for the first sign of life, so that a request that fails at once is answered with an ordinary error. Raises ApiError."""
        self._first = await self._next()

    async def deltas(self) -> AsyncIterator[tuple[Answer, Delta, bool] | None]:
        """Each answer with what is new of it and whether that was the last; None after a long silence. Raises ApiError."""
        while True:
            items, self._first = self._first or await self._next(), []
            for item in items:
                yield item
            if not self._left:
                return

    async def _next(self) -> list[tuple[Answer, Delta, bool] | None]:
        item = await self._answers.read()
        if item is None:
            return [None]
        job, event = item
        answer = self.answers[job.index]
        if isinstance(event, End):
            self._left -= 1
            if event.error is not None:
                raise api_error(event.error)
            return []
        if event.prompt_read is not None:
            answer.stats, answer.prompt_read = event.stats, event.prompt_read
            return [(answer, Delta(prompt_read=event.prompt_read), False)]
        if not event.tokens:
            return [(answer, answer.finish(event), True)]
        return [(answer, delta, False) for delta in answer.take(event)]
