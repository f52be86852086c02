"""The HTTP protocol: uvicorn's, with errors below the application as JSON too."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .http import encode


class JsonProtocol(HttpToolsProtocol):
    """What is no HTTP is told so in JSON."""

    def send_400_response(self, msg: str) -> None:
        body = encode(ApiError(400, "this is no HTTP request that could be read").openai())
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's, whose signals are handled elsewhere."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed, None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
