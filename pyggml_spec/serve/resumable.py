"""Streams that go on without their reader: a request with the header `X-Conversation-Id` is computed to its end whoever reads it, and read again from any byte.

As in llama.cpp's server: ``GET /v1/stream?conv_id=..&from=..`` replays and follows, ``DELETE`` ends, ``POST /v1/streams/lookup`` tells. An id belongs to the key that it
came with, and means its latest stream.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from .errors import ApiError
from .http import event

HEADER = "x-conversation-id"
MOST_BYTES = 4 << 20  # of one stream: what came first goes first
MOST_ENDED_BYTES = 32 << 20  # of all that are kept behind their end
KEPT_SECONDS = 300.0  # so long at most
LONGEST_ID = 400

Key = tuple[str, str]


class Stream:
    """One answer: its bytes as they come, for any number of readers."""

    def __init__(self, chunks: AsyncIterator[bytes], ended: Sequence[Callable[[], None]]) -> None:
        self.first = 0  # which byte of the stream the kept ones begin with
        self.began, self.over = time.time(), 0.0  # seconds since 1970; 0 while it goes on
        self._kept, self._ended = bytearray(), ended
        self._more = asyncio.Event()
        self._task = asyncio.ensure_future(self._take(chunks))

    @property
    def size(self) -> int:
        return self.first + len(self._kept)

    @property
    def held(self) -> int:
        """Bytes of memory, about."""
        return len(self._kept) + 1024

    async def _take(self, chunks: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in chunks:
                self._kept += chunk
                if (beyond := len(self._kept) - MOST_BYTES) > 0:
                    del self._kept[:beyond]
                    self.first += beyond
                self._wake()
        finally:
            for end in self._ended:
                end()
            self.over = time.time()
            self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, at: int) -> AsyncIterator[bytes]:
        """What came from byte ``at`` on, and what comes until its end."""
        while True:
            if at < self.first:
                yield event(ApiError(400, f"the stream is read too slowly: its first {self.first} bytes are gone").openai())
                return
            if part := bytes(self._kept[at - self.first :]):
                at += len(part)
                yield part
            elif self.over:
                return
            else:
                await self._more.wait()

    def cancel(self) -> None:
        self._task.cancel()


class Streams:
    """All of a server's."""

    def __init__(self) -> None:
        self._streams: dict[Key, Stream] = {}

    def begin(self, key: Key, chunks: AsyncIterator[bytes], ended: Sequence[Callable[[], None]]) -> Stream:
        """In the place of the one of this id before, which ends."""
        self.end(key)
        self._forget()
        self._streams[key] = stream = Stream(chunks, ended)
        return stream

    def get(self, key: Key) -> Stream | None:
        self._forget()
        return self._streams.get(key)

    def end(self, key: Key) -> None:
        if (stream := self._streams.pop(key, None)) is not None:
            stream.cancel()

    def named(self, key: str, name: str) -> list[tuple[str, Stream]]:
        """Of this id, or of an id that goes on with a model's name."""
        self._forget()
        return [(n, s) for (k, n), s in self._streams.items() if k == key and (n == name or n.startswith(f"{name}::"))]

    def _forget(self) -> None:
        late, held = time.time() - KEPT_SECONDS, 0
        for since, key in sorted(((s.over, key) for key, s in self._streams.items() if s.over), reverse=True):
            held += self._streams[key].held
            if since < late or held > MOST_ENDED_BYTES:
                del self._streams[key]
