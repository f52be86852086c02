"""From a request to its response: preparing it, reading its sequences, and encoding them in a dialect, whole or as they come."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, ParamSpec, TypeVar

from msgspec import Struct

from ..events import End
from ..text.parse import Parser
from ..text.renderer import RENDERER, WouldBlock
from .bodies import Chat, Fields
from .conversation import read_chat
from .errors import ApiError, api_error
from .http import PING, STREAM_HEADERS, Request, Response, Stream, event
from .output import Delta, Output
from .pool import Pool
from .resumable import HEADER, Streams, key_of
from .served import Served
from .tasks import MAX_KEPT, Queue, ResponseStream, TaskRequest

P = ParamSpec("P")
R = TypeVar("R")
SMALL = 1024  # bytes of a request that is prepared in the event loop: encoding takes 0.2 ms, a thread's switches two times 0.1 to 0.2 ms
RENDER_SECONDS = 0.003  # that the event loop waits for a template, which takes 0.1 ms as a rule; then a thread renders it
COMPILED = {"grammar", "regex", "lark", "json_schema", "response_format", "grammar_lazy", "tools", "text", "output_config", "output_format"}
"""Fields whose compilation may take a second."""
LONG = 16 << 10  # bytes of a request for the long lane of the pool
Names = Mapping[str, str]
Item = tuple[Output, Delta, bool] | None


class Context:
    """What handlers have."""

    def __init__(self, served: Served, queue: Queue, pool: Pool) -> None:
        self.served, self.queue, self._pool = served, queue, pool
        self.streams = Streams()
        self.watchers = 0  # of the slots

    async def in_pool(self, request: Request, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``function`` in a thread: the event loop goes on with other streams. It is cancelled when the client disconnects."""
        work = self._pool.start(lambda: function(*args, **kwargs), request.key or request.peer, len(request.data) > LONG)
        return await asyncio.wrap_future(work)

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
    headers: ClassVar[Mapping[str, str]] = STREAM_HEADERS

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
    events, made = enter(context, request, body, requests), encoder(context, request, body)
    made.outputs = [Output(task, context.served.tokenizer, parser()) for task in events.tasks]
    deltas = _deltas(events, made.outputs)
    if body.stream:  # the first delta is waited for: a request that fails at once gets an ordinary error
        return Stream(_encoded(await anext(deltas, None), deltas, made), headers=made.headers)
    async for _ in deltas:
        pass
    return await made.whole()


def enter(context: Context, request: Request, body: Fields, requests: Sequence[TaskRequest]) -> ResponseStream:
    """Queues a request; its ``on_end`` cancels what is left. Raises ApiError: the queue is full, or the id of its stream too long."""
    key = key_of(request, request.headers.get(HEADER, "")) if body.stream else None
    reported = (
        [(r.max_tokens, r.sampling.logprobs, len(r.ids) * r.scored) for r in requests if r.sampling is not None] if not body.stream else []
    )
    total = sum((min(most, context.served.n_ctx) + prompt) * (1 + n) for most, n, prompt in reported if most is not None and n is not None)
    if total > MAX_KEPT:
        sentence = f"the response could have {total} log probabilities, and {MAX_KEPT} are the most; request fewer, for fewer tokens, or for a stream"
        raise ApiError(400, sentence)
    events = context.queue.enter([replace(r, client=request.peer) for r in requests])
    events.streams = body.stream
    if key is not None:  # at once: this request may wait for the slot of the stream before
        context.streams.end(key)
    events.ping_seconds = float(body.sse_ping_interval) if body.sse_ping_interval > 0 else math.inf
    request.on_end.append(events.cancel)
    return events


async def _deltas(events: ResponseStream, outputs: Sequence[Output]) -> AsyncGenerator[Item, None]:
    """Each output with its next delta and whether that was the last; None after a long silence. Raises ApiError."""
    left = len(outputs)
    while left:
        if (item := await events.read()) is None:
            yield None
            continue
        output, step = outputs[item[0].index], item[1]
        if isinstance(step, End):
            left -= 1
            if step.error is not None:
                raise api_error(step.error)
        elif step.prompt_read is not None:
            output.stats, output.prompt_read = step.stats, step.prompt_read
            yield output, Delta(prompt_read=step.prompt_read), False
        elif not step.tokens:
            yield output, output.finish(step), True
        else:
            for delta in output.take(step):
                yield output, delta, False


async def _encoded(first: Item, deltas: AsyncGenerator[Item, None], encoder: ResponseEncoder) -> AsyncIterator[bytes]:
    encoded = lambda item: encoder.ping if item is None else encoder.delta(*item)  # noqa: E731
    try:
        yield encoder.begin()
        yield encoded(first)
        async for item in deltas:
            yield encoded(item)
        yield encoder.end()
    except Exception as error:
        yield encoder.error(api_error(error))
