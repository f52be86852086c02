"""Requests and responses over ASGI: bodies within limits, JSON, event streams, and clients that go away."""

import asyncio
import codecs
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from .errors import ApiError
from .heap import LARGE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

encode = msgspec.json.Encoder().encode
PING = b":\n\n"  # a comment, which keeps connections of silent streams open
DONE = b"data: [DONE]\n\n"
BODY_SECONDS = 30.0  # of a body; one more for each BODY_RATE bytes that have come
BODY_RATE = 16 << 10
LONGEST_BODY_SECONDS = 300.0
SMALL_BODY = 64 << 10  # bytes of a body that is neither counted nor looked into before it is decoded
MOST_VALUES, MOST_CONTAINERS, MOST_ESCAPES = (
    1 << 18,
    1 << 15,
    1 << 20,
)  # of one body: each takes 10 to 30 ms to decode, which nothing interrupts
LONGEST_FIELD, LONGEST_SCHEMA = 128 << 10, 1 << 20  # bytes of JSON
LINGER_SECONDS = 2.0  # in which the body of a refused request is thrown away, so that its client reads the answer and no reset
YIELD_SECONDS = 0.002  # of encoding, after which other tasks have a turn
SOON = 0.001  # seconds of an answer's work before anybody looks whether its client is still there
PROMPTS = ("prompt", "messages", "input", "instructions", "system", "content", "tokens", "input_prefix", "input_suffix", "input_extra")
"""Fields that may be as long as a body. Nothing reads them once the prompts are tokens."""
_SCHEMAS = ("tools", "grammar", "regex", "lark", "json_schema", "response_format", "text", "output_config", "output_format")
INLINE_VALUES = 4096
JSON_TYPE = "application/json; charset=utf-8"
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Request:
    """One request.

    Attributes:
        headers: by lower-case name; of several alike the last one counts.
        key: which API key it came with, "" without one.
        unknown: names of fields that mean nothing here.
        client: the address that it came from, with the port.
        has_body: whether a body follows the head; ``length``: its bytes where the head tells them.
    """

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.query = _query(scope.get("query_string", b""))
        self.body = b""
        self.key = ""
        self.unknown: list[str] = []
        self.client = ":".join(map(str, scope.get("client") or ()))
        told = self.headers.get("content-length", "")
        self.length = int(told) if told.isdecimal() and len(told) < 19 else None
        self.has_body = self.length != 0 and (self.length is not None or "transfer-encoding" in self.headers)
        self._json: dict[str, Any] | None = None
        self.large = False  # it, or its answer, takes much memory
        self.counted = 0  # bytes of its body among those of all
        self.read: list[Callable[[], None]] = []  # called when its prompts are tokens
        self.ended: list[Callable[[], None]] = []  # called when the response is out, or nobody waits for it any more

    def check_kind(self) -> None:
        """Looks at the headers alone: a body without a type is taken for JSON, since scripts leave it out and no page of another site comes this far.

        Raises:
            ApiError: its body is said to be something else than JSON in UTF-8, or to be compressed.
        """
        if not self.has_body:
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
                415, f"the body is said to be {kind[:100]}; send JSON, with the header Content-Type: application/json, which curl takes with -H"
            )  # fmt: skip
        charset = _charset(more)
        if charset not in ("", "utf-8", "utf8", "us-ascii"):
            raise ApiError(415, f"the body is said to be in {charset[:60]}; JSON is sent in UTF-8")

    def json(self) -> dict[str, Any]:
        """The body, an object; absent and null are the same everywhere, so that nulls are left out.

        Raises:
            ApiError: it is none, or has a field that is too long.
        """
        if self._json is not None:
            return self._json
        if len(self.body) > LONGEST_FIELD:
            _check_lengths(self.body.removeprefix(codecs.BOM_UTF8))
        try:
            text = self.body.removeprefix(codecs.BOM_UTF8)
            body = msgspec.json.decode(text) if text else {}
        except msgspec.ValidationError:  # of a body of any shape: this alone
            raise ApiError(400, "the body has a number that is out of the range of numbers here; send a smaller one") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {_why_no_json(self.body) or error}; send a JSON object") from None
        if not isinstance(body, dict):
            raise ApiError(400, 'the body is no JSON object; send one, like {"prompt": "text"}')
        self._json = {name: value for name, value in body.items() if value is not None}
        return self._json

    def forget(self, *bodies: MutableMapping[str, Any]) -> None:
        """Frees what was read: the body, and the prompts in it, and in the ``bodies`` that were made of it."""
        self.body = b""
        for end in self.read:
            end()
        self.read.clear()
        for body in (self._json or {}, *bodies):
            for name in PROMPTS:
                body.pop(name, None)


def _check_lengths(data: bytes) -> None:
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # whoever decodes all of it says what is wrong
    for name, part in parts.items():
        most = LONGEST_SCHEMA if name in _SCHEMAS else LONGEST_FIELD
        if name not in PROMPTS and (size := memoryview(part).nbytes) > most:
            raise ApiError(400, f"{name[:60]} has {size} bytes, and {most} are taken; send less", param=name[:60])


class Bodies:
    """What the bodies of a server may have. ``most``: bytes of one; ``together``: of all that are being read; ``values``: of JSON in one."""

    def __init__(self, most: int, together: int | None = None, values: int = MOST_VALUES) -> None:
        self.most, self.together, self.values = most, 2 * most if together is None else together, values
        self.held = 0

    def take(self, request: Request, size: int) -> None:
        """Counts ``size`` bytes of a request. Raises ApiError: there are too many of all."""
        request.counted += size
        request.large |= request.counted > LARGE
        self.held += size
        if self.held > self.together:
            raise ApiError(
                503,
                f"the bodies that are being read have {self.together} bytes together; send this one again",
                headers={"retry-after": "5"},
            )

    def give_back(self, request: Request) -> None:
        self.held -= request.counted
        request.counted = 0


class _Structure:
    """Counts the values of JSON, piece by piece: what would take long to decode is refused before it is whole."""

    def __init__(self, values: int) -> None:
        self._most = self._values = values
        self._containers, self._escapes = MOST_CONTAINERS, MOST_ESCAPES
        self._inside, self._cut = 0, b""

    def push(self, data: bytes) -> None:
        """Raises ApiError: too many of them."""
        data = self._cut + data
        if b"\\" in data:
            self._escapes -= data.count(b"\\")
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of a run of backslashes escapes what follows it
            self._cut = b"\\" if data.endswith(b"\\") else b""  # which is in the next piece
            self._escapes += len(self._cut)
        else:
            self._cut = b""
        parts = data.split(b'"')
        outside = b"".join(parts[self._inside :: 2])
        self._inside ^= len(parts) - 1 & 1
        opened = outside.count(b"[") + outside.count(b"{")
        self._containers -= opened
        self._values -= opened + outside.count(b",")
        for left, most, what in (
            (self._values, self._most, "values"),
            (self._containers, MOST_CONTAINERS, "lists and objects"),
            (self._escapes, MOST_ESCAPES, "escaped characters"),
        ):
            if left < 0:
                raise ApiError(400, f"the body has more than {most} {what}; send less")


def _charset(parameters: str) -> str:
    """Of the part of a header Content-Type that is behind its type."""
    given = dict(part.strip().partition("=")[::2] for part in parameters.split(";"))
    return given.get("charset", "").strip("\"' ")


def _why_no_json(body: bytes) -> str:
    """What it is instead, of what clients send by mistake; empty where that is not known."""
    if body.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return "it is compressed"
    if found := re.search(rb"[:\[,]\s*(-?(?:NaN|Infinity))", body[:SMALL_BODY]):
        return f"{found[1].decode()} is none of its numbers"
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
    return Response(encode(value), status, {"content-type": JSON_TYPE, **(headers or {})})


def stream_response(chunks: AsyncIterator[bytes]) -> Response:
    return Response(headers=dict(STREAM_HEADERS), chunks=chunks)


class Parts:
    """Long lists in a JSON response, which are made while it is sent."""

    def __init__(self, request: Request | None = None) -> None:
        self._request = request
        self._mark = b'"%b"' % secrets.token_hex(16).encode()
        self._lists: list[Iterable[bytes]] = []

    def add(self, items: Iterable[bytes], size: int) -> msgspec.Raw:
        """``items``: JSON of each; ``size``: how many values all have. To be called in the order in which the lists stand in the response."""
        if size <= INLINE_VALUES:
            return msgspec.Raw(b"[%b]" % b",".join(items))
        self._lists.append(items)
        if self._request is not None:
            self._request.large = True
        return msgspec.Raw(self._mark)

    def response(self, value: Any) -> Response:
        if not self._lists:
            return json_response(value)
        return Response(headers={"content-type": JSON_TYPE}, chunks=self._chunks(encode(value).split(self._mark)))

    async def _chunks(self, around: list[bytes]) -> AsyncIterator[bytes]:
        yield around[0]
        for items, behind in zip(self._lists, around[1:], strict=True):
            before = b"["
            for item in items:
                yield before + item
                before = b","
            yield b"]" + behind


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    return b"%bdata: %b\n\n" % (f"event: {name}\n".encode() if name else b"", encode(value))


async def read_body(request: Request, receive: Receive, bodies: Bodies) -> bytes:
    """The whole body. It counts among the ``bodies`` until the caller gives it back.

    Raises:
        ApiError: too long, too late, with too many values, or there are too many of others.
        ConnectionResetError: the client has gone.
    """
    too_long = ApiError(413, f"the body is longer than the {bodies.most} bytes that this server takes; send less")
    if request.length is not None and request.length > bodies.most:
        raise too_long
    parts: list[bytes] = []
    taken, began, structure = 0, asyncio.get_running_loop().time(), _Structure(bodies.values)
    while True:
        seconds = min(LONGEST_BODY_SECONDS, BODY_SECONDS + taken / BODY_RATE)
        try:
            async with asyncio.timeout_at(began + seconds):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {seconds:g} s; send the request again") from None
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        parts.append(message.get("body", b""))
        taken += len(parts[-1])
        if taken > bodies.most:
            raise too_long
        if taken > SMALL_BODY or message.get("more_body"):
            bodies.take(request, len(parts[-1]))
            structure.push(parts[-1])
        if not message.get("more_body"):
            return b"".join(parts)


async def send_refusal(
    request: Request, receive: Receive, send: Send, response: Response, more_headers: Iterable[tuple[str, str]] = (), begun: bool = False
) -> None:
    """Answers before the body is there: the answer is sent whole, the body is thrown away, and the connection ends. A short body does not end it,
    unless reading has ``begun``."""
    if not begun and (not request.has_body or (request.length is not None and request.length <= SMALL_BODY)):
        await send_response(send, response, more_headers)
        return
    headers = [*more_headers, ("connection", "close")]

    async def body() -> None:
        while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
            pass

    await send_response(send, response, headers, more=True)
    with suppress(TimeoutError):
        await asyncio.wait_for(body(), LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b""})


async def send_response(send: Send, response: Response, more_headers: Iterable[tuple[str, str]] = (), more: bool = False) -> None:
    """Sends it; a client that reads slowly is waited for. ``more``: the caller sends the end."""
    headers = {**response.headers, **dict(more_headers)}
    if response.chunks is None and response.status != 204:
        headers["content-length"] = str(len(response.body))
    listed = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": response.status, "headers": listed})
    if response.chunks is None:
        await send({"type": "http.response.body", "body": response.body, "more_body": more})
        return
    turns = Turns()
    async for chunk in response.chunks:
        if chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await turns.share()
    await send({"type": "http.response.body", "body": b""})


class Turns:
    """Shares the event loop between a long piece of work and everything else."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began, self._turned = time.perf_counter(), True

    def _turn(self) -> None:
        self._turned = True

    async def share(self) -> None:
        """Lets other tasks run, if none has for ``YIELD_SECONDS``."""
        if not self._turned and time.perf_counter() - self._began > YIELD_SECONDS:
            await asyncio.sleep(0)
        if self._turned:
            self._began, self._turned = time.perf_counter(), False
            self._loop.call_soon(self._turn)


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
