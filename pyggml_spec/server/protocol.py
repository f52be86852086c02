"""HTTP connections: uvicorn's protocol, with limits in front of it.

uvicorn has no limit on heads, chunk extensions and trailers, takes a half-closed connection for a lost one, and tells the application nothing about
either. ``Connection`` is the class that `uvicorn.Config(http=...)` takes; it reads along with an httptools parser of its own.
"""

import asyncio
import contextlib
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .http import encode

MAX_HEAD_BYTES = 64 << 10  # without progress of a request: a head, an extension of a chunk, trailers
HEAD_SECONDS = 30.0
STATUS_BEGINNING = b"HTTP/1.1 "
PROBE_SECONDS = (0.02, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # between its bytes, while a half-closed connection waits for its response
UNREAD_SECONDS = 60.0  # in which a client takes no byte of what is buffered for it
log = logging.getLogger("pyspec.serve")


class ResponseWriter:
    """A transport that sends the head of a response with the first part of its body, at the latest in the event loop's next iteration: two packets
    would wake the client twice, and let the engine's thread take Python's lock between them."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head, self._begun, self._probed = b"", False, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def probe(self) -> None:
        """Sends one byte of the coming status line: the write after it fails if the client is gone."""
        if not self._begun and self._probed < len(STATUS_BEGINNING) and not self._transport.is_closing():
            self._transport.write(STATUS_BEGINNING[self._probed : self._probed + 1])
            self._probed += 1

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():  # uvloop's transport raises then, asyncio's does not
            self._head = b""
        elif self._begun:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        elif not data.startswith(b"HTTP/1.1 100 "):
            self._head, self._begun = data[self._probed :], True
            self._loop.call_soon(self.flush)
        elif not self._probed:
            self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            self.write(b"")

    def next_response(self) -> None:
        self.flush()
        self._begun, self._probed = False, 0

    def close(self) -> None:
        self.flush()
        self._transport.close()


class Connection(asyncio.Protocol):
    """One connection; ``protocol``: uvicorn's class. Errors below the application are JSON too."""

    protocol: ClassVar[Callable[..., Any]]

    def __init__(
        self, config: uvicorn.Config, server_state: Any, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._loop, self._connections = _loop or asyncio.get_running_loop(), server_state.connections
        self._inner = self.protocol(config=config, server_state=server_state, app_state={**app_state, "connection": self}, _loop=_loop)
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._url, self._authorities = b"", deque[str | None]()
        self._idle_bytes, self._progress = 0, False
        self._open_requests, self._whole, self._half_closed = 0, False, False
        self._timers: dict[Callable[..., None], asyncio.TimerHandle] = {}

    @property
    def busy(self) -> bool:
        """Whether a response is not complete, or not yet taken by its client."""
        return self._open_requests > 0 or self.transport.get_write_buffer_size() > 0

    def shutdown(self) -> None:
        self._inner.shutdown()

    # -- of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._writer = ResponseWriter(self.transport, self._loop)
        self._connections.add(self)
        self._inner.connection_made(self._writer)
        self._start_timer(HEAD_SECONDS, self._head_too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        for callback in list(self._timers):
            self._stop_timer(callback)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._progress = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # served as an ordinary request
            pass
        except httptools.HttpParserError:
            self._refuse(400, "this is no HTTP request that could be read")
            return
        self._inner.data_received(data)
        self._idle_bytes = 0 if self._progress else self._idle_bytes + len(data)
        if self._idle_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the head of this request is longer than the {MAX_HEAD_BYTES} bytes that this server takes; send less")
        elif not self._open_requests and not self.transport.is_closing():
            self._start_timer(HEAD_SECONDS, self._head_too_late)

    def eof_received(self) -> bool | None:
        """A client that writes no more may still read: whole requests get their responses. TLS has no half-closed connections."""
        if not self._open_requests or not self._whole or self.transport.get_extra_info("sslcontext"):
            return None
        self._half_closed = True
        self._probe()
        return True

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        self._start_timer(UNREAD_SECONDS, self._check_reader, _unread(self.transport))

    def resume_writing(self) -> None:
        self._stop_timer(self._check_reader)
        self._inner.resume_writing()

    # -- of the parser

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_headers_complete(self) -> None:
        self._stop_timer(self._head_too_late)
        url, self._url = self._url, b""
        httptools.parse_url(url).path.decode("ascii")  # raises what it raises in uvicorn
        authority = url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].decode("latin-1")
        self._authorities.append(None if url.startswith(b"/") else authority)  # that of a whole URL counts instead of the header's
        self._open_requests += 1
        self._progress, self._whole = True, False

    def on_body(self, body: bytes) -> None:
        self._progress = True

    def on_message_complete(self) -> None:
        self._progress = self._whole = True

    # -- of the application

    async def respond(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs ``app`` for the next request, and follows its response."""
        if (authority := self._authorities.popleft()) is not None:
            scope["authority"] = authority
        complete = False

        async def follow(message: Message) -> None:
            nonlocal complete
            if self._half_closed and self._open_requests == 1 and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)
            if not complete and message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = True
                self._response_complete()

        try:
            await app(scope, receive, follow)
        finally:
            if not complete:
                self._open_requests -= 1

    def _response_complete(self) -> None:
        self._open_requests -= 1
        self._writer.next_response()
        if self._half_closed and self._open_requests:
            self._probe()
        elif self._half_closed:
            self._writer.close()

    # -- limits

    def _start_timer(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:
        """One timer per callback; a running one is kept."""
        if callback not in self._timers:
            self._timers[callback] = self._loop.call_later(seconds, self._expired, callback, *arguments)

    def _stop_timer(self, callback: Callable[..., None]) -> None:
        if (timer := self._timers.pop(callback, None)) is not None:
            timer.cancel()

    def _expired(self, callback: Callable[..., None], *arguments: Any) -> None:
        del self._timers[callback]
        callback(*arguments)

    def _probe(self, seconds: tuple[float, ...] = PROBE_SECONDS) -> None:
        self._writer.probe()
        self._stop_timer(self._probe)
        if seconds:
            self._start_timer(seconds[0], self._probe, seconds[1:])

    def _head_too_late(self) -> None:
        if self._idle_bytes:
            self._refuse(408, f"the head of this request did not come within {HEAD_SECONDS:g} s; send it again")
        else:
            self.transport.close()

    def _check_reader(self, before: int) -> None:
        if (left := _unread(self.transport)) < before:
            self._start_timer(UNREAD_SECONDS, self._check_reader, left)
            return
        log.warning("a connection was cut off: its client has read nothing of a response for %g s", UNREAD_SECONDS)
        self.transport.abort()

    def _refuse(self, status: int, sentence: str) -> None:
        body = encode(ApiError(status, sentence).openai())
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def guard(config: uvicorn.Config) -> uvicorn.Config:
    """Puts ``Connection`` in front of the protocol of ``config``, and around its application."""
    config.load()
    app = config.loaded_app

    async def followed(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["state"]["connection"].respond(app, scope, receive, send)

    config.loaded_app = followed
    config.http_protocol_class = type("GuardedProtocol", (Connection,), {"protocol": config.http_protocol_class})
    return config


def _unread(transport: asyncio.Transport) -> int:
    """Bytes that the client has not taken: of the transport's buffer and, where the system tells it, of the socket's, which may be megabytes."""
    waiting = array("i", [0])
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import fcntl
        import termios

        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, waiting)
    return transport.get_write_buffer_size() + waiting[0]


class Server(uvicorn.Server):
    """uvicorn's server; signals are handled in ``start``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def read_out(self, seconds: float) -> int:
        """Waits until all responses are taken, ``seconds`` at most, then aborts the connections that are left, and returns their number. uvicorn would
        wait five more seconds for a client that does not read."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := self._busy()) and loop.time() < until and not self.force_exit:  # noqa: ASYNC110 - transports have no event for an empty buffer
            await asyncio.sleep(0.02)
        for connection in left:
            connection.transport.abort()
        return len(left)

    def _busy(self) -> list[Connection]:
        return [c for c in self.server_state.connections if isinstance(c, Connection) and c.busy]
