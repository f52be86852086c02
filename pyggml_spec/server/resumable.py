"""Resumable streams: a request with the header `X-Conversation-Id` is computed to its end without a reader, and can be read again from any byte.

As in llama.cpp's server: ``GET /v1/stream?conv_id=..&from=..`` replays and follows, ``DELETE`` ends, ``POST /v1/streams/lookup`` lists. An id belongs to
the API key of its request, and means its latest stream.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence

from .errors import ApiError
from .http import Request, event

HEADER = "x-conversation-id"
MAX_BYTES = 4 << 20  # of one stream: the oldest are dropped
MAX_ENDED_BYTES = 32 << 20  # of all that have ended
KEPT_SECONDS = 300.0  # after their end
MAX_ID = 400  # characters
PIECE = 64 << 10  # bytes that a reader gets at once: what waits for a slow network is a copy

Key = tuple[str, str]


def key_of(request: Request, name: str) -> Key | None:
    """The key of a stream, None without a name. Raises ApiError: the name is too long."""
    if len(name) > MAX_ID:
        raise ApiError(400, f"the id of the stream has {len(name)} characters; {MAX_ID} are the most", param="conv_id")
    return (request.key, name) if name else None


class ResumableStream:
    """One response: its bytes as they come, for any number of readers."""

    def __init__(self, chunks: AsyncIterator[bytes], ended: Sequence[Callable[[], None]]) -> None:
        self.first = 0  # which byte of the stream the kept ones begin with
        self.began, self.over = time.time(), 0.0  # seconds since 1970; 0 while it goes on
        self._kept = bytearray()
        self._more = asyncio.Event()
        self.task = asyncio.ensure_future(self._take(chunks))
        self.task.add_done_callback(lambda _: self._end(ended))  # a task that is cancelled before it began runs no line of its own

    @property
    def size(self) -> int:
        return self.first + len(self._kept)

    @property
    def held(self) -> int:
        """Bytes of memory, about."""
        return len(self._kept) + 1024

    async def _take(self, chunks: AsyncIterator[bytes]) -> None:
        async for chunk in chunks:
            self._kept += chunk
            if (beyond := len(self._kept) - MAX_BYTES) > 0:
                del self._kept[:beyond]
                self.first += beyond
            self._wake()

    def _end(self, ended: Sequence[Callable[[], None]]) -> None:
        for end in ended:
            end()
        self.over = time.time()
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, at: int) -> AsyncIterator[bytes]:
        """All bytes from ``at`` to the end of the stream."""
        while True:
            if at < self.first:
                yield event(ApiError(400, f"the stream is read too slowly: its first {self.first} bytes are gone").openai())
                return
            if part := bytes(self._kept[at - self.first : at - self.first + PIECE]):
                at += len(part)
                yield part
            elif self.over:
                return
            else:
                await self._more.wait()

    def cancel(self) -> None:
        self.task.cancel()


class Streams:
    """All of a server's."""

    def __init__(self) -> None:
        self.streams: dict[Key, ResumableStream] = {}
        self._ended: dict[Key, ResumableStream] = {}  # those of them that are over, in the order of their ends
        self.held = 0  # bytes of these
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, key: Key, chunks: AsyncIterator[bytes], ended: Sequence[Callable[[], None]]) -> ResumableStream:
        """Replaces the stream of this id, which ends."""
        self.end(key)
        self.streams[key] = stream = ResumableStream(chunks, ended)
        stream.task.add_done_callback(lambda _: self._keep(key, stream))
        return stream

    def get(self, key: Key) -> ResumableStream | None:
        self.expire()
        return self.streams.get(key)

    def end(self, key: Key) -> None:
        if (stream := self.streams.pop(key, None)) is not None:
            stream.cancel()
        if self._ended.pop(key, None) is not None and stream is not None:
            self.held -= stream.held

    def named(self, key: str, names: Collection[str]) -> list[tuple[str, ResumableStream]]:
        """Of these ids, or of ids that are followed by "::" and a model's name."""
        self.expire()
        return [(n, s) for (k, n), s in self.streams.items() if k == key and any(part in names for part in _before_models(n))]

    def _keep(self, key: Key, stream: ResumableStream) -> None:
        """``stream`` is over."""
        if self.streams.get(key) is stream:
            self._ended[key] = stream
            self.held += stream.held
            self.expire()

    def expire(self) -> None:
        """Drops streams that ended too long ago, or hold too much; again when the next one is due."""
        now = time.time()
        while self._ended:
            key, stream = next(iter(self._ended.items()))
            if stream.over > now - KEPT_SECONDS and self.held <= MAX_ENDED_BYTES:
                if self.timer is None:
                    self.timer = asyncio.get_running_loop().call_later(
                        min(KEPT_SECONDS, stream.over + KEPT_SECONDS - now) + 1, self._forget_later
                    )
                return
            self.end(key)

    def _forget_later(self) -> None:
        self.timer = None
        self.expire()


def _before_models(name: str) -> Iterator[str]:
    yield name
    at = name.find("::")
    while at >= 0:
        yield name[:at]
        at = name.find("::", at + 1)
