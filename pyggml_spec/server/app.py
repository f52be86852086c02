"""The application that an ASGI server runs: which path is whose, and what every request has in common."""

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping

from . import anthropic, infill, live, names, native, openai, responses
from .access import Hosts, Keys, Origins
from .errors import ApiError, api_error
from .heap import Heap
from .http import (
    MOST_VALUES,
    Bodies,
    Receive,
    Request,
    Response,
    Scope,
    Send,
    json_response,
    read_body,
    send_refusal,
    send_response,
    unless_gone,
)
from .metrics import Metrics
from .page import page
from .reading import Context

log = logging.getLogger("pyspec.serve")

Handler = Callable[[Context, Request], Awaitable[Response]]


def _both(path: str, handler: Handler) -> dict[str, Handler]:
    return {path: handler, f"/v1{path}": handler}


GET: dict[str, Handler] = {
    **_both("/models", openai.models),
    **_both("/health", native.health),
    "/ready": native.ready,
    "/props": native.props,
    "/slots": native.slots,
    "/lora-adapters": native.lora_adapters,
    "/pyspec/live": live.live,
    "/v1/stream": native.read_stream,
}
POST: dict[str, Handler] = {
    **_both("/chat/completions", openai.chat),
    "/v1/completions": openai.completions,
    "/completion": native.completion,
    "/completions": native.completion,
    "/infill": infill.infill,
    **_both("/responses", responses.create),
    **_both("/responses/input_tokens", responses.input_tokens),
    **_both("/messages", anthropic.messages),
    **_both("/messages/count_tokens", anthropic.count_tokens),
    **_both("/chat/completions/input_tokens", openai.input_tokens),
    "/tokenize": native.tokenize,
    "/detokenize": native.detokenize,
    "/apply-template": native.apply_template,
    "/lora-adapters": native.lora_adapters,
    "/v1/streams/lookup": native.look_up_streams,
}
DELETE: dict[str, Handler] = {"/v1/stream": native.end_stream}
NAMED = [
    path for path in POST if path.endswith(("completion", "completions", "/responses", "/messages", "/infill"))
]  # whose fields are looked at by name
ELSEWHERE = {  # what llama.cpp's server and OpenAI have and this server has not
    **dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings"), "embeddings"),
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), "reranking"),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/speech", "/v1/audio/translations"), "audio"),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits"), "images"),
    "/v1/moderations": "moderation",
}
OPEN = ("/health", "/v1/health", "/ready", "/", "/index.html", "/page.js", "/page.css", "/models", "/v1/models")  # without a key
ANTHROPIC = ("/v1/messages", "/messages")


async def _ready(response: Response) -> Response:
    return response


class App:
    """One per server. ``most_body``: bytes."""

    def __init__(self, context: Context, metrics: Metrics, keys: Keys, origins: Origins, hosts: Hosts, most_body: int) -> None:
        self.context, self.metrics, self.keys, self.origins, self.hosts, self.most_body = context, metrics, keys, origins, hosts, most_body
        self.heap = Heap()
        self.bodies = Bodies(most_body, values=max(MOST_VALUES, 2 * context.served.n_ctx))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
            return
        request = Request(scope)
        identifier = request.headers.get("x-request-id", "")[:200] or f"req_{secrets.token_hex(12)}"
        more = [("x-request-id", identifier), ("server", "pyspec"), *self.origins.headers(request.headers.get("origin"))]
        if session := request.headers.get("x-session-id"):
            more.append(("x-session-id", session[:200]))

        try:
            self.hosts.check(scope)
            self.origins.check(scope)
            handler = self._handler(request)
        except ApiError as error:  # before the body, which nobody may have a right to send
            self.metrics.requests[self._known(request.path), error.status] += 1
            await send_refusal(request, receive, send, self._refusal(request, error), more)
            return

        async def answer() -> None:
            response = await self._answer(request, handler)
            if request.path in NAMED:
                native.keep_stream(self.context, request, response)
            if request.unknown:
                more.append((names.HEADER, names.shown(request.unknown)))
            self.metrics.requests[self._known(request.path), response.status] += 1
            await send_response(send, response, more)

        try:
            try:
                if request.method == "POST":
                    request.read.append(lambda: self.bodies.give_back(request))
                    request.body = await read_body(request, receive, self.bodies)
            except ApiError as error:
                request.forget()
                self.metrics.requests[self._known(request.path), error.status] += 1
                await send_refusal(request, receive, send, self._refusal(request, error), more, begun=True)
                return
            if not await unless_gone(receive, answer()):
                self.context.queue.counts.disconnected += 1
        except OSError:
            self.context.queue.counts.disconnected += 1
        finally:
            request.forget()
            for end in request.ended:
                end()
            if request.large:
                self.heap.shrink()

    def _known(self, path: str) -> str:
        return path if path in GET or path in POST or path in ELSEWHERE or path in ("/", "/metrics") else "other"

    async def _answer(self, request: Request, handler: Handler) -> Response:
        try:
            if request.path in NAMED and request.method == "POST":
                request.unknown = names.check(request.path, request.json())
            return await handler(self.context, request)
        except ApiError as error:
            return self._refusal(request, error)
        except Exception as error:
            told = api_error(error)
            if told.status >= 500:
                log.exception("%s %s", request.method, request.path)
            return self._refusal(request, told)

    def _refusal(self, request: Request, error: ApiError) -> Response:
        spoken = error.anthropic() if request.path.startswith(ANTHROPIC) else error.openai()
        return json_response(spoken, error.status, error.headers)

    def _handler(self, request: Request) -> Handler:
        """Who answers, by the head alone. Raises ApiError: nobody, or not this client."""
        path, method = request.path, request.method
        if method == "OPTIONS":
            return self._preflight
        if path not in OPEN or method not in ("GET", "HEAD"):
            request.key = self.keys.check(request.headers)
        if path in ELSEWHERE:
            raise ApiError(501, f"{ELSEWHERE[path]} are not supported: this server generates text")
        if method in ("GET", "HEAD"):
            return self._getter(request)
        if method == "POST" and path in POST:
            request.check_kind()
            return POST[path]
        if method == "DELETE" and path in DELETE:
            return DELETE[path]
        raise self._no_route(request)

    def _getter(self, request: Request) -> Handler:
        path = request.path
        if path == "/metrics" and request.method == "GET":
            return self._metrics
        if path.startswith(("/v1/models/", "/models/")):
            return openai.model
        if path in GET:
            return GET[path]
        if self.context.served.options.page and (found := page(path)) is not None:
            return lambda context, request: _ready(found)
        raise self._no_route(request)

    async def _preflight(self, context: Context, request: Request) -> Response:
        return Response(headers=self.origins.preflight(request.headers.get("origin")))

    def _no_route(self, request: Request) -> ApiError:
        tables: tuple[tuple[str, Mapping[str, Handler]], ...] = (("GET", GET), ("POST", POST), ("DELETE", DELETE))
        allowed = [name for name, table in tables if request.path in table]
        if allowed:
            return ApiError(
                405, f"{request.path} takes {' and '.join(allowed)}, not {request.method}", headers={"allow": ", ".join(allowed)}
            )
        return ApiError(404, f"there is nothing at {request.path[:200]}; docs/server.md lists what there is")

    async def _metrics(self, context: Context, request: Request) -> Response:
        if not self.context.served.options.metrics:
            raise ApiError(501, "this server was started without metrics")
        headers = {"content-type": "text/plain; version=0.0.4; charset=utf-8", "process-start-time-unix": str(int(self.metrics.started))}
        return Response(self.metrics.text(self.context.queue).encode(), headers=headers)
