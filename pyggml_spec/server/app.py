"""The ASGI application: routes, and what all requests have in common.

    accounted > checked(hosts) > CORSMiddleware > checked(origins, keys) > Router > Endpoint > handler

Requests are refused by their heads, before a body is read. Bodies are read by ``Endpoint``, not by Starlette: it has no time limits, no limit on all
bodies together, and does not count values.
"""

import asyncio
import ctypes
import gc
import logging
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import anthropic, infill, native, ollama, openai, responses
from .access import PEER_HEADER, Admission, Admitted, Hosts, Origins
from .bodies import HEADER, shown
from .errors import ApiError, api_error
from .http import MAX_VALUES, BodyLimits, Refusal, Request, read_body, unless_disconnected
from .metrics import CONTENT_TYPE, Metrics
from .page import PATHS, page
from .reading import Context

log = logging.getLogger("pyspec.serve")

Handler = Callable[[Any, Request], Awaitable[Response]]  # of what the application serves: a ``Context``, or a ``Router``
Handlers = dict[str, Handler]  # by method


async def metrics_page(context: Context, request: Request) -> Response:
    if not context.served.options.metrics:
        raise ApiError(501, "this server was started without metrics")
    metrics: Metrics = request.app.state.metrics
    return Response(metrics.text(context.queue), headers={"process-start-time-unix": str(int(metrics.started))}, media_type=CONTENT_TYPE)


def _resumable(handler: Handler) -> Handler:
    """Its streams go on without their readers, where requests ask for that."""

    async def respond(context: Context, request: Request) -> Response:
        response = await handler(context, request)
        native.keep_stream(context, request, response)
        return response

    return respond


GENERATE: dict[str, Handler] = {  # whose fields are checked by name
    "/v1/chat/completions": openai.chat,
    "/chat/completions": openai.chat,
    "/completion": native.completion,
    "/completions": native.completion,
    "/v1/completions": openai.completions,
    "/infill": infill.infill,
    "/v1/messages": anthropic.messages,
    "/messages": anthropic.messages,
    "/v1/responses": responses.create,
    "/responses": responses.create,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
}
WITH_V1: dict[str, Handlers] = {  # also at /v1
    "/models": {"GET": openai.models},
    "/models/{name:path}": {"GET": openai.model},
    "/health": {"GET": native.health},
    "/chat/completions/input_tokens": {"POST": openai.input_tokens},
    "/messages/count_tokens": {"POST": anthropic.count_tokens},
    "/responses/input_tokens": {"POST": responses.input_tokens},
}
ROUTES: dict[str, Handlers] = {
    **{path: {"POST": _resumable(handler)} for path, handler in GENERATE.items()},
    **WITH_V1,
    **{f"/v1{path}": handlers for path, handlers in WITH_V1.items()},
    "/ready": {"GET": native.ready},
    "/props": {"GET": native.props},
    "/slots": {"GET": native.slots},
    "/lora-adapters": {"GET": native.lora_adapters, "POST": native.lora_adapters},
    "/metrics": {"GET": metrics_page},
    "/pyspec/live": {"GET": native.live},
    "/tokenize": {"POST": native.tokenize},
    "/detokenize": {"POST": native.detokenize},
    "/tokenizer_info": {"GET": native.tokenizer_info},
    "/apply-template": {"POST": native.apply_template},
    "/api/tags": {"GET": ollama.tags},
    "/api/ps": {"GET": ollama.ps},
    "/api/show": {"POST": ollama.show},
    "/api/version": {"GET": ollama.version},
    **{f"/api/{name}": {"POST": ollama.not_here} for name in ("pull", "push", "create", "copy")},
    "/api/delete": {"DELETE": ollama.not_here},
    "/v1/stream": {"GET": native.read_stream, "DELETE": native.end_stream},
    "/v1/streams/lookup": {"POST": native.look_up_streams},
}
UNSUPPORTED = {  # what llama.cpp's server and OpenAI have
    **dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings", "/api/embed", "/api/embeddings"), "embeddings"),
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), "reranking"),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/speech", "/v1/audio/translations"), "audio"),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits"), "images"),
    "/v1/moderations": "moderation",
}
PUBLIC = (*PATHS, "/health", "/v1/health", "/ready", "/models", "/v1/models")  # need no key
TRIM_SECONDS = 0.5
_ARENAS, _M_ARENA_MAX = 2, -8  # each arena keeps what its threads have freed; threads come and go here
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def prepare_heap() -> None:
    """Few arenas, and a frozen heap: a full garbage collection takes 50 ms otherwise."""
    if hasattr(libc := _libc(), "mallopt"):
        libc.mallopt(_M_ARENA_MAX, _ARENAS)
    gc.collect()
    gc.freeze()


class Heap:
    """Gives memory back, at most once in ``TRIM_SECONDS``, in a thread."""

    def __init__(self) -> None:
        self._trim, self._due = getattr(_libc(), "malloc_trim", None), 0.0

    def shrink(self) -> None:
        loop = asyncio.get_running_loop()
        if self._trim is not None and self._due <= loop.time():
            self._due = loop.time() + TRIM_SECONDS
            loop.call_at(self._due, loop.run_in_executor, None, self._trim, 0)


def accounted(app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> ASGIApp:
    """Counts responses, and adds the headers that all of them have."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        given, path = Headers(scope=scope), scope["path"]
        identifier = given.get("x-request-id", "")[:200] or f"req_{secrets.token_hex(12)}"
        added = [(b"x-request-id", identifier.encode("latin-1")), (b"server", b"pyspec")]
        if session := given.get("x-session-id"):
            added.append((b"x-session-id", session[:200].encode("latin-1")))

        async def account(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.requests[path if path in paths else "other", message["status"]] += 1
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await app(scope, receive, account)

    return respond


def checked(app: ASGIApp, check: Callable[[Scope], None]) -> ASGIApp:
    """Refuses what ``check`` refuses."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check(scope)
        except ApiError as error:
            await Refusal(scope, error)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return respond


class Endpoint:
    """Reads a body, runs the handler of a method, and sends its response, as long as the client is connected."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = {**handlers, "HEAD": handlers["GET"]} if "GET" in handlers else handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        context, limits = state.context, state.body_limits
        request = Request(scope, receive, send)
        try:
            if request.method == "POST":
                request.check_type()
                request.data = await read_body(request, receive, limits)
            if not await unless_disconnected(receive, self._respond(context, request, receive, send)):
                state.metrics.disconnected += 1
        except OSError:
            state.metrics.disconnected += 1
        finally:
            request.end()
            if request.large:
                state.heap.shrink()

    async def _respond(self, context: Context, request: Request, receive: Receive, send: Send) -> None:
        try:
            response = await self._handlers[request.method](context, request)
        except ApiError:
            raise
        except Exception as error:
            refusal = api_error(error)
            if refusal.status >= 500:
                log.exception("%s %s", request.method, request.path)
            raise refusal from None
        if request.unknown:
            response.headers[HEADER] = shown(request.unknown)
        await response(request.scope, receive, send)


async def _refused(request: StarletteRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of Starlette's router
        if request.method == "OPTIONS":  # outside of CORS too, as llama-server
            return Response()
        path = request.scope["path"]
        error = ApiError(404, f"there is nothing at {path[:200]}; docs/server.md lists what there is")
        if path in UNSUPPORTED:
            error = ApiError(
                501,
                f"{UNSUPPORTED[path]} are not supported: this server generates text (embeddings and rankings: `pyspec serve --embeddings`)",
            )
        if "route" in request.scope:
            allowed = [method for method in METHODS if method in request.scope["route"].methods]
            sentence = f"{path} takes {' and '.join(allowed)}, not {request.method}"
            error = ApiError(405, sentence, headers={"allow": ", ".join(allowed)})
    assert isinstance(error, ApiError)
    return Refusal(request.scope, error)


def create_app(
    context: Context,
    metrics: Metrics,
    keys: Admission,
    origins: Origins,
    hosts: Hosts,
    max_body: int,
    given: Mapping[str, Handlers] = ROUTES,
) -> Starlette:
    """Of one model. ``max_body``: bytes; ``given``: routes."""
    table: dict[str, Handlers] = {**given, **{path: {"GET": page} for path in PATHS if context.served.options.page}}
    limits = BodyLimits(max_body, max_values=max(MAX_VALUES, 2 * context.served.n_ctx))
    return application(context, table, metrics, keys, origins, hosts, limits)


def application(
    context: Any, table: Mapping[str, Handlers], metrics: Metrics, keys: Admission, origins: Origins, hosts: Hosts, limits: BodyLimits
) -> Starlette:
    """``table``: handlers by path and method, which are called with ``context``."""

    def admit(scope: Scope) -> None:
        origins.check(scope)
        if scope["method"] != "OPTIONS" and (scope["path"] not in PUBLIC or scope["method"] not in ("GET", "HEAD")):
            headers = Headers(scope=scope)
            scope["api_key"] = keys.check(headers)
            if isinstance(keys, Admitted):
                scope["client"] = (headers.get(PEER_HEADER, ""),)

    routes = [Route(path, Endpoint(handlers), methods=list(handlers)) for path, handlers in table.items()]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(accounted, metrics=metrics, paths=frozenset({*table, *UNSUPPORTED})),
            Middleware(checked, check=hosts.check),
            Middleware(CORSMiddleware, **origins.cors()),
            Middleware(checked, check=admit),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _refused},
    )
    app.router.redirect_slashes = False
    app.state.context, app.state.metrics, app.state.heap, app.state.body_limits = context, metrics, Heap(), limits
    return app
