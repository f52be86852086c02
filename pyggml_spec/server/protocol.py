"""The HTTP protocol: uvicorn's, with errors below the application as JSON too, and limits to what is no request yet."""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .http import encode

MOST_HEAD = 64 << 10  # bytes in which nothing of a request comes to its end: a head, an extension of a chunk, trailers
HEAD_SECONDS = 30.0
BEGINNING = b"HTTP/1.1 "  # of every answer
GAPS = (0.02, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between its bytes, where they say whether anybody still reads
UNREAD_SECONDS = 60.0  # in which a client reads nothing of what waits for it
log = logging.getLogger("pyspec.serve")


class _HeadWithBody:
    """A transport for one response: its head waits for the first piece of its body, until the event loop's next turn at most. Apart they would be two
    packets, two wakes of the client, and a turn of the thread of the steps between them, which takes Python's lock when the first one is sent."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""
        self._begun = False
        self._probed = 0  # bytes of BEGINNING that are out
        self.is_closing = transport.is_closing

    def probe(self) -> bool:
        """Sends the next byte of BEGINNING, which a client that is gone refuses: the one after that fails. False where the answer has begun."""
        if self._begun or self._probed == len(BEGINNING) or self._transport.is_closing():
            return False
        self._probed += 1
        self._transport.write(BEGINNING[self._probed - 1 : self._probed])
        return True

    def write(self, data: bytes) -> None:
        if self._probed and not self._begun:
            if data.startswith(b"HTTP/1.1 100 "):
                return
            data = data[self._probed :]
        if self._transport.is_closing():  # whoever asked has gone: asyncio's transport takes what is written then, uvloop's raises
            self._head = b""
        elif self._begun:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        elif data.startswith(b"HTTP/1.1 100 "):  # the client waits for it
            self._transport.write(data)
        else:
            self._head, self._begun = data, True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self._flush()
        self._transport.close()


class JsonProtocol(HttpToolsProtocol):
    """What is no HTTP is told so in JSON; so is whoever takes too long for a head, or never comes to its end: neither the parser nor uvicorn has limits."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._idle_bytes, self._moved = 0, False
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether some of an answer is still to be made, or to be taken by its reader."""
        return (self.cycle is not None and not self.cycle.response_complete) or self.transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        self._is_read()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client writes no more, and may still read: a whole request is answered until something says that the client is gone. TLS has no such half."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.transport.get_extra_info("sslcontext"):
            return None
        self.cycle.keep_alive = False
        self._probe(GAPS)
        return True

    def _probe(self, gaps: tuple[float, ...]) -> None:
        if self.pipeline:  # the answers before have not ended, and would fail
            self.loop.call_later(GAPS[-1], self._probe, gaps)
        elif isinstance(self.cycle.transport, _HeadWithBody) and self.cycle.transport.probe() and gaps:
            self.loop.call_later(gaps[0], self._probe, gaps[1:])

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._await_reader()

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._unread = self.loop.call_later(UNREAD_SECONDS, self._look_at_reader, _unread(self.transport))

    def _look_at_reader(self, before: int) -> None:
        if _unread(self.transport) < before:
            self._await_reader()
            return
        log.warning("a connection was cut off: its client has read nothing of an answer for %g s", UNREAD_SECONDS)
        self.transport.abort()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        self._moved = False
        super().data_received(data)
        self._idle_bytes = 0 if self._moved else self._idle_bytes + len(data)
        if self.transport.is_closing():
            return
        if self._idle_bytes > MOST_HEAD:
            self._refuse(ApiError(431, f"the head of this request is longer than the {MOST_HEAD} bytes that this server takes; send less"))
        elif self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        self._moved = True
        before = self.cycle
        if not self.url.startswith(b"/"):  # a whole URL, whose host counts instead of the header's
            self.scope["authority"] = self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].decode("latin-1")  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = _HeadWithBody(self.transport, self.loop)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved = True
        super().on_message_complete()

    def _await_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self._idle_bytes:
            self._refuse(ApiError(408, f"the head of this request did not come within {HEAD_SECONDS:g} s; send it again"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is no HTTP request that could be read"))

    def _refuse(self, error: ApiError) -> None:
        body = encode(error.openai())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def _unread(transport: asyncio.Transport) -> int:
    """Bytes that the other end has not taken: the transport's, and, where the system tells them, those of the socket, which may be megabytes."""
    waiting = array("i", [0])
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import fcntl
        import termios

        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, waiting)
    return transport.get_write_buffer_size() + waiting[0]


class Server(uvicorn.Server):
    """uvicorn's, whose signals are handled elsewhere."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def read_out(self, seconds: float) -> int:
        """Waits until every answer has been taken, so long at most; connections of those who have not are cut off, and counted. uvicorn would wait five
        seconds more for a reader that does not read, after whatever time it was given."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := self._busy()) and loop.time() < until and not self.force_exit:  # noqa: ASYNC110 - bytes leave a transport's buffer without an event
            await asyncio.sleep(0.02)
        for connection in left:
            connection.transport.abort()
        return len(left)

    def _busy(self) -> list[JsonProtocol]:
        return [c for c in self.server_state.connections if isinstance(c, JsonProtocol) and c.busy]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed, None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
