"""Requests and responses over ASGI: bodies within a limit, JSON, event streams, and clients that go away."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from .errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

encode = msgspec.json.Encoder().encode
PING = b":\n\n"  # a comment, which keeps connections of silent streams open
DONE = b"data: [DONE]\n\n"
BODY_SECONDS = 60.0  # between two pieces of a body
SOON = 0.001  # seconds of an answer's work before anybody looks whether its client is still there
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Request:
    """One request.

    Attributes:
        headers: by lower-case name; of several alike the last one counts.
        key: which API key it came with, "" without one.
        unknown: names of fields that mean nothing here.
    """

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.query = _query(scope.get("query_string", b""))
        self.body = b""
        self.key = ""
        self.unknown: list[str] = []
        self._json: dict[str, Any] | None = None
        self.ended: list[Callable[[], None]] = []  # called when the response is out, or nobody waits for it any more

    def check_kind(self) -> None:
        """Looks at the headers alone: a body without a type is taken for JSON, since scripts leave it out and no page of another site comes this far.

        Raises:
            ApiError: its body is said to be something else than JSON in UTF-8, or to be compressed.
        """
        if self.headers.get("content-length", "0") == "0" and "transfer-encoding" not in self.headers:
            return
        coding = self.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            raise ApiError(
                415,
                f"the body is compressed ({coding[:60]}), which is not supported; send it as it is",
                headers={"accept-encoding": "identity"},
            )
        kind, _, more = self.headers.get("content-type", "").lower().partition(";")
        kind = kind.strip()
        if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(
                415, f"the body is said to be {kind[:100]}; send JSON, with the header Content-Type: application/json (curl: --json, or -H and the header)"
            )  # fmt: skip
        charset = _charset(more)
        if charset not in ("", "utf-8", "utf8", "us-ascii"):
            raise ApiError(415, f"the body is said to be in {charset[:60]}; JSON is sent in UTF-8")

    def json(self) -> dict[str, Any]:
        """The body, an object; absent and null are the same everywhere, so that nulls are left out.

        Raises:
            ApiError: it is none.
        """
        if self._json is not None:
            return self._json
        try:
            text = self.body.removeprefix(codecs.BOM_UTF8)
            body = msgspec.json.decode(text) if text else {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {_why_no_json(self.body) or error}; send a JSON object") from None
        if not isinstance(body, dict):
            raise ApiError(400, 'the body is no JSON object; send one, like {"prompt": "text"}')
        self._json = {name: value for name, value in body.items() if value is not None}
        return self._json


def _charset(parameters: str) -> str:
    """Of the part of a header Content-Type that is behind its type."""
    given = dict(part.strip().partition("=")[::2] for part in parameters.split(";"))
    return given.get("charset", "").strip("\"' ")


def _why_no_json(body: bytes) -> str:
    """What it is instead, of what clients send by mistake; empty where that is not known."""
    if body.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return "it is compressed"
    utf16 = body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in body[:4]
    return "it is in UTF-16 or UTF-32, and JSON is sent in UTF-8" if utf16 else ""


def _query(text: bytes) -> dict[str, str]:
    parts = (part.partition("=") for part in text.decode("latin-1").split("&") if part)
    return {unquote_plus(name): unquote_plus(value) for name, _, value in parts}


@dataclass
class Response:
    """``body`` is sent whole; or ``chunks`` as they come."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    chunks: AsyncIterator[bytes] | None = None


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, {"content-type": "application/json; charset=utf-8", **(headers or {})})


def stream_response(chunks: AsyncIterator[bytes]) -> Response:
    return Response(headers=dict(STREAM_HEADERS), chunks=chunks)


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    return b"%bdata: %b\n\n" % (f"event: {name}\n".encode() if name else b"", encode(value))


async def read_body(request: Request, receive: Receive, most: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: longer than ``most`` bytes, or nothing more of it came for ``BODY_SECONDS``.
        ConnectionResetError: the client has gone.
    """
    too_long = ApiError(413, f"the body is longer than the {most} bytes that this server takes; send less")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_long
    parts: list[bytes] = []
    taken = 0
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"nothing more of the body came for {BODY_SECONDS:g} s; send the request again") from None
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        parts.append(message.get("body", b""))
        taken += len(parts[-1])
        if taken > most:
            raise too_long
        if not message.get("more_body"):
            return b"".join(parts)


async def send_response(send: Send, response: Response, more_headers: Iterable[tuple[str, str]] = ()) -> None:
    """Sends it; a client that reads slowly is waited for."""
    headers = {**response.headers, **dict(more_headers)}
    if response.chunks is None and response.status != 204:
        headers["content-length"] = str(len(response.body))
    listed = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": response.status, "headers": listed})
    if response.chunks is None:
        await send({"type": "http.response.body", "body": response.body})
        return
    async for chunk in response.chunks:
        if chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Awaitable[None]) -> bool:
    """Does ``work``, which is cancelled when the client goes away; whether it came to its end. In the task that calls it: one more would make the first
    token wait for its turn. The client is looked after ``SOON``: that task would run between a prompt's entering the engine and its first step."""
    task, gone = asyncio.current_task(), False
    watching: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if task is not None:
            task.cancel()

    def begin() -> None:
        nonlocal watching
        watching = asyncio.ensure_future(watch())

    beginning = asyncio.get_running_loop().call_later(SOON, begin)
    try:
        await work
    except asyncio.CancelledError:
        if not gone:
            raise
        if task is not None:
            task.uncancel()
    finally:
        beginning.cancel()
        if watching is not None:
            watching.cancel()
    return not gone
