"""From a request to its response: preparing it, reading its sequences, and encoding them in a dialect, whole or as they come."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct

from ..events import End
from ..text.parse import Parser
from ..text.renderer import RENDERER, WouldBlock
from .bodies import Chat, Fields
from .conversation import read_chat
from .errors import ApiError, api_error
from .http import PING, Request, Response, event, event_stream
from .output import Delta, Output
from .pool import Pool
from .resumable import HEADER, Streams, key_of
from .served import Served
from .tasks import MAX_KEPT, Queue, TaskRequest

P = ParamSpec("P")
R = TypeVar("R")
SMALL = 1024  # bytes of a request that is prepared in the event loop: encoding takes 0.2 ms, a thread's switches two times 0.1 to 0.2 ms
RENDER_SECONDS = 0.003  # that the event loop waits for a template, which takes 0.1 ms as a rule; then a thread renders it
COMPILED = {"grammar", "regex", "lark", "json_schema", "response_format", "grammar_lazy", "tools", "text", "output_config", "output_format"}
"""Fields whose compilation may take a second."""
LONG = 16 << 10  # bytes of a request for the long lane of the pool
Names = Mapping[str, str]


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


class ResponseEncoder:
    """The response to one request in one dialect. ``outputs``: of all its sequences; ``ping``: sent after a long silence of a stream."""

    ping = PING

    def __init__(self, context: Context, request: Request, body: Any) -> None:
        self.context, self.request, self.body = context, request, body
        self.outputs: Sequence[Output] = ()

    async def whole(self) -> Response:
        """The response of outputs that have ended."""
        raise NotImplementedError

    def delta(self, output: Output, delta: Delta, last: bool) -> bytes:
        """The events of one delta."""
        raise NotImplementedError

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return event(error.openai())


async def respond_to_chat(context: Context, request: Request, body: Chat, encoder: type[ResponseEncoder], names: Names) -> Response:
    """``names``: as of ``read_chat``. Raises ApiError."""
    requests, parser = await context.prepared(request, read_chat, context.served, body, request.key, names)
    return await respond(context, request, body, requests, encoder, parser)


async def count_prompt(context: Context, request: Request, body: Chat, names: Names) -> int:
    """Tokens of a chat's prompt. Raises ApiError."""
    requests, _ = await context.in_pool(request, read_chat, context.served, body, request.key, names)
    return len(requests[0].ids)


async def respond(
    context: Context, request: Request, body: Fields, requests: Sequence[TaskRequest], encoder: type[ResponseEncoder],
    parser: Callable[[], Parser | None] = lambda: None,
) -> Response:  # fmt: skip
    """The response, whole or as a stream. ``parser``: makes one for each sequence. Raises ApiError."""
    made, reader = encoder(context, request, body), Reader(context, request, body, requests, parser)
    made.outputs = reader.outputs
    if body.stream:
        await reader.begin()
        return event_stream(_events(reader, made))
    async for _ in reader.deltas():
        pass
    return await made.whole()


async def _events(reader: "Reader", encoder: ResponseEncoder) -> AsyncIterator[bytes]:
    try:
        yield encoder.begin()
        async for item in reader.deltas():
            yield encoder.ping if item is None else encoder.delta(*item)
        yield encoder.end()
    except Exception as error:
        yield encoder.error(api_error(error))


class Reader:
    """The outputs of one request. Making it enters the queue; the request's ``on_end`` cancels what is left."""

    def __init__(
        self, context: Context, request: Request, body: Fields, requests: Sequence[TaskRequest], parser: Callable[[], Parser | None]
    ) -> None:
        """Raises ApiError: the queue is full, or the id of its stream too long."""
        key = key_of(request, request.headers.get(HEADER, "")) if body.stream else None
        reported = [(r.max_tokens, r.sampling.logprobs) for r in requests if r.sampling is not None] if not body.stream else []
        total = sum(min(most, context.served.n_ctx) * (1 + n) for most, n in reported if most is not None and n is not None)
        if total > MAX_KEPT:
            sentence = f"the response could have {total} log probabilities, and {MAX_KEPT} are the most; request fewer, for fewer tokens, or for a stream"
            raise ApiError(400, sentence)
        self._events = context.queue.enter([replace(r, client=request.peer) for r in requests])
        self._events.streams = body.stream
        if key is not None:  # at once: this request may wait for the slot of the stream before
            context.streams.end(key)
        self._events.ping_seconds = float(body.sse_ping_interval) if body.sse_ping_interval > 0 else math.inf
        request.on_end.append(self._events.cancel)
        self.outputs = [Output(task, context.served.tokenizer, parser()) for task in self._events.tasks]
        for output in self.outputs:
            output.keeps_logprobs = not body.stream
        self._left = len(self.outputs)
        self._first: list[tuple[Output, Delta, bool] | None] = []

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
        task, step = item
        output = self.outputs[task.index]
        if isinstance(step, End):
            self._left -= 1
            if step.error is not None:
                raise api_error(step.error)
            return []
        if step.prompt_read is not None:
            output.stats, output.prompt_read = step.stats, step.prompt_read
            return [(output, Delta(prompt_read=step.prompt_read), False)]
        if not step.tokens:
            return [(output, output.finish(step), True)]
        return [(output, delta, False) for delta in output.take(step)]
