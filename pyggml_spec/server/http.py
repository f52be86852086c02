"""Requests and responses: bodies within limits, JSON, event streams, and clients that disconnect."""

import asyncio
import codecs
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import ApiError

encode = msgspec.json.Encoder().encode
PING = b":\n\n"  # a comment, which keeps connections of silent streams open
DONE = b"data: [DONE]\n\n"
BODY_SECONDS = 30.0  # for a body; one more for each BODY_RATE bytes that have come
BODY_RATE = 16 << 10
MAX_BODY_SECONDS = 300.0
SMALL_BODY = 64 << 10  # bytes of a body that is neither counted nor scanned before it is decoded
MAX_VALUES, MAX_CONTAINERS, MAX_ESCAPES = 1 << 18, 1 << 15, 1 << 20  # of one body: each takes 10 to 30 ms to decode, without interruption
MAX_FIELD, MAX_SCHEMA = 128 << 10, 1 << 20  # bytes of JSON
LINGER_SECONDS = 2.0  # in which the body of a refused request is discarded, so that its client reads the response and no reset
YIELD_SECONDS = 0.002  # of encoding, after which other tasks run
WATCH_AFTER = 0.001  # seconds of work before disconnection is watched
PROMPTS = ("prompt", "messages", "input", "instructions", "system", "content", "tokens", "input_prefix", "input_suffix", "input_extra")
"""Fields that may be as long as a body, and are freed once their tokens are known."""
_SCHEMAS = ("tools", "grammar", "regex", "lark", "json_schema", "response_format", "text", "output_config", "output_format")
INLINE_VALUES, CHUNK = 4096, 16 << 10  # values of a list that is encoded at once; bytes of a longer one that are sent at a time
VERSION = version("pyggml_spec")
FINGERPRINT = f"b0-pyspec-{VERSION}"
JSON_TYPE = "application/json; charset=utf-8"
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
LARGE = 256 << 10  # bytes of a request, or of its response, after which memory is given back
ANTHROPIC = ("/v1/messages", "/messages")


class Request(StarletteRequest):
    """One request.

    Attributes:
        key: name of the API key that it came with, "" without one.
        data: its body, until ``forget``.
        unknown: names of fields without a meaning here.
        peer: address and port of the client.
        has_body: whether a body follows the head; ``length``: its bytes where the head has them.
        large: whether it, or its response, takes much memory.
        limits: which its body counts in.
        on_end: called when its response is complete or abandoned.
    """

    def __init__(self, scope: Scope, *channels: Any) -> None:
        super().__init__(scope, *channels)
        self.path: str = scope["path"]
        self.key: str = scope.get("api_key", "")
        self.peer = ":".join(map(str, scope.get("client") or ()))
        self.length = content_length(scope)
        self.has_body = has_body(scope)
        self.data = b""
        self.unknown: list[str] = []
        self.large = False
        self.counted = 0  # bytes of its body among those of all
        self.limits: BodyLimits | None = None
        self.on_end: list[Callable[[], None]] = []
        self._object: dict[str, Any] | None = None

    def check_type(self) -> None:
        """Checks the headers alone. A body without a type is taken for JSON: scripts leave it out, and pages of other sites are refused before.
        Raises ApiError: the type or the charset of its body is not that of JSON, or it is compressed."""
        if not self.has_body:
            return
        coding = self.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            sentence = f"the body is compressed ({coding[:60]}), which is not supported; send it as it is"
            raise ApiError(415, sentence, headers={"accept-encoding": "identity"})
        kind, _, parameters = self.headers.get("content-type", "").lower().partition(";")
        kind = kind.strip()
        if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            remedy = "send JSON, with the header Content-Type: application/json, which curl takes with -H"
            raise ApiError(415, f"the body has the type {kind[:100]}; {remedy}")
        charset = dict(part.strip().partition("=")[::2] for part in parameters.split(";")).get("charset", "").strip("\"' ")
        if charset not in ("", "utf-8", "utf8", "us-ascii"):
            raise ApiError(415, f"the body is in {charset[:60]}; JSON is sent in UTF-8")

    def json_object(self) -> dict[str, Any]:
        """The body, without members that are null: absent and null have one meaning everywhere. Raises ApiError: it is no object, or has a field
        that is too long."""
        if self._object is not None:
            return self._object
        text = self.data.removeprefix(codecs.BOM_UTF8)
        if len(text) > MAX_FIELD:
            _check_lengths(text)
        try:
            body = msgspec.json.decode(text) if text else {}
        except msgspec.ValidationError:  # of a body of any shape: this alone
            raise ApiError(400, "the body has a number that is out of the range of numbers here; send a smaller one") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {_why_no_json(self.data) or error}; send a JSON object") from None
        if not isinstance(body, dict):
            raise ApiError(400, 'the body is no JSON object; send one, like {"prompt": "text"}')
        self._object = {name: value for name, value in body.items() if value is not None}
        return self._object

    def forget(self, *bodies: msgspec.Struct) -> None:
        """Frees the body, and the prompts in ``bodies`` that were made of it."""
        self.data, self._object = b"", {}
        if self.limits is not None:
            self.limits.held, self.counted = self.limits.held - self.counted, 0
        for body in bodies:
            for name in body.__struct_fields__:
                if name in PROMPTS:
                    setattr(body, name, None)

    def end(self) -> None:
        """Calls ``on_end``."""
        self.forget()
        for call in self.on_end:
            call()
        self.on_end.clear()


def content_length(scope: Scope) -> int | None:
    sent = Headers(scope=scope).get("content-length", "")
    return int(sent) if sent.isdecimal() and len(sent) < 19 else None


def has_body(scope: Scope) -> bool:
    length = content_length(scope)
    return length != 0 and (length is not None or "transfer-encoding" in Headers(scope=scope))


def _check_lengths(data: bytes) -> None:
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # decoding all of it raises the error with its reason
    for name, part in parts.items():
        most = MAX_SCHEMA if name in _SCHEMAS else MAX_FIELD
        if name not in PROMPTS and (size := memoryview(part).nbytes) > most:
            raise ApiError(400, f"{name[:60]} has {size} bytes, and {most} are taken; send less", param=name[:60])


def _why_no_json(body: bytes) -> str:
    """What it is instead, of what clients send by mistake; "" where that is not known."""
    if body.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return "it is compressed"
    if found := re.search(rb"[:\[,]\s*(-?(?:NaN|Infinity))", body[:SMALL_BODY]):
        return f"{found[1].decode()} is none of its numbers"
    utf16 = body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in body[:4]
    return "it is in UTF-16 or UTF-32, and JSON is sent in UTF-8" if utf16 else ""


# -- reading bodies


class BodyLimits:
    """``max_bytes``: of one body; ``max_total``: of all that are being read; ``max_values``: JSON values of one."""

    def __init__(self, max_bytes: int, max_total: int | None = None, max_values: int = MAX_VALUES) -> None:
        self.max_bytes, self.max_total, self.max_values = max_bytes, 2 * max_bytes if max_total is None else max_total, max_values
        self.held = 0

    def take(self, request: Request, size: int) -> None:
        """Counts ``size`` bytes of a request until it forgets them. Raises ApiError: there are too many of all."""
        request.limits = self
        request.counted += size
        request.large |= request.counted > LARGE
        self.held += size
        if self.held > self.max_total:
            sentence = f"the bodies that are being read have {self.max_total} bytes together; send this one again"
            raise ApiError(503, sentence, headers={"retry-after": "5"})


class _ValueCounter:
    """Counts JSON values as their bytes come: what would take long to decode is refused before it is whole."""

    def __init__(self, values: int) -> None:
        self._most = self._values = values
        self._containers, self._escapes = MAX_CONTAINERS, MAX_ESCAPES
        self._inside, self._cut = 0, b""

    def push(self, data: bytes) -> None:
        """Raises ApiError: too many of them."""
        data = self._cut + data
        if b"\\" in data:
            self._escapes -= data.count(b"\\")
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of a run of backslashes escapes the next byte
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
            (self._containers, MAX_CONTAINERS, "lists and objects"),
            (self._escapes, MAX_ESCAPES, "escaped characters"),
        ):
            if left < 0:
                raise ApiError(400, f"the body has more than {most} {what}; send less")


async def read_body(request: Request, receive: Receive, limits: BodyLimits) -> bytes:
    """The whole body. It counts in ``limits`` until the caller gives it back. Raises ApiError: too long, too late, with too many values, or there
    are too many of others; ConnectionResetError: the client has disconnected."""
    request.scope["body_state"] = "reading"
    too_long = ApiError(413, f"the body is longer than the {limits.max_bytes} bytes that this server takes; send less")
    if request.length is not None and request.length > limits.max_bytes:
        raise too_long
    parts: list[bytes] = []
    taken, began, values = 0, asyncio.get_running_loop().time(), _ValueCounter(limits.max_values)
    while True:
        seconds = min(MAX_BODY_SECONDS, BODY_SECONDS + taken / BODY_RATE)
        try:
            async with asyncio.timeout_at(began + seconds):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {seconds:g} s; send the request again") from None
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        parts.append(message.get("body", b""))
        taken += len(parts[-1])
        if taken > limits.max_bytes:
            raise too_long
        if taken > SMALL_BODY or message.get("more_body"):
            limits.take(request, len(parts[-1]))
            values.push(parts[-1])
        if not message.get("more_body"):
            request.scope["body_state"] = "read"
            return b"".join(parts)


# -- responses


def shape(path: str, error: ApiError) -> dict[str, Any]:
    """An error in the dialect of a path."""
    return error.anthropic() if path.startswith(ANTHROPIC) else {"error": error.message} if path.startswith("/api/") else error.openai()


class Refusal(Response):
    """An error in the client's dialect. Where its body is still coming, that is discarded, and the connection closed; a short one that was not begun
    does not close it."""

    def __init__(self, scope: Scope, error: ApiError) -> None:
        super().__init__(encode(shape(scope["path"], error)), error.status, error.headers, JSON_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, length = scope.get("body_state"), content_length(scope)
        if state == "read" or (state is None and (not has_body(scope) or (length is not None and length <= SMALL_BODY))):
            await super().__call__(scope, receive, send)
            return

        async def discard() -> None:
            while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
                pass

        await send({"type": "http.response.start", "status": self.status_code, "headers": [*self.raw_headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            await asyncio.wait_for(discard(), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b""})


class Stream(StreamingResponse):
    """A response whose parts are sent as they come. The endpoint watches the client; Starlette would start two more tasks for that."""

    body_iterator: AsyncIterator[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pauses = Pauses()
        async for chunk in self.body_iterator:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await pauses.give_way()
        await send({"type": "http.response.body", "body": b""})


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, JSON_TYPE)


def event_stream(chunks: AsyncIterator[bytes]) -> Stream:
    return Stream(chunks, headers=STREAM_HEADERS)


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    return b"%bdata: %b\n\n" % (f"event: {name}\n".encode() if name else b"", encode(value))


class LongLists:
    """Long lists in a JSON response, which are encoded while it is sent."""

    def __init__(self, request: Request | None = None) -> None:
        self._request = request
        self._mark = b'"%b"' % secrets.token_hex(16).encode()
        self._lists: list[Iterable[bytes]] = []

    def add(self, items: Iterable[bytes], size: int) -> msgspec.Raw:
        """``items``: JSON of each; ``size``: values of all. Called in the order in which the lists stand in the response."""
        if size <= INLINE_VALUES:
            return msgspec.Raw(b"[%b]" % b",".join(items))
        self._lists.append(items)
        if self._request is not None:
            self._request.large = True
        return msgspec.Raw(self._mark)

    def response(self, value: Any) -> Response:
        return Stream(self._chunks(encode(value).split(self._mark)), media_type=JSON_TYPE) if self._lists else json_response(value)

    async def _chunks(self, around: list[bytes]) -> AsyncIterator[bytes]:
        yield around[0]
        for items, following in zip(self._lists, around[1:], strict=True):
            part, before = bytearray(), b"["
            for item in items:
                part += before + item
                before = b","
                if len(part) > CHUNK:
                    yield bytes(part)
                    part.clear()
            yield bytes(part) + b"]" + following


class Pauses:
    """Lets other tasks run during a long piece of work."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began, self._ran = time.perf_counter(), True

    async def give_way(self) -> None:
        """Lets other tasks run, if none has for ``YIELD_SECONDS``."""
        if not self._ran and time.perf_counter() - self._began > YIELD_SECONDS:
            await asyncio.sleep(0)
        if self._ran:
            self._began, self._ran = time.perf_counter(), False
            self._loop.call_soon(setattr, self, "_ran", True)


async def unless_disconnected(receive: Receive, work: Awaitable[None]) -> bool:
    """Does ``work``, which is cancelled when the client disconnects; whether it was completed. It runs in the caller's task, and disconnection is watched
    ``WATCH_AFTER`` seconds later: another task would run before the first token."""
    task, gone = asyncio.current_task(), False
    watching: list[asyncio.Task[None]] = []
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER, lambda: watching.append(asyncio.ensure_future(watch())))
    try:
        await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
    finally:
        timer.cancel()
        for watcher in watching:
            watcher.cancel()
    return not gone
