"""Several models at one address: requests go to the process of the model that they name, which is loaded first where it is not.

Keys, names of hosts, origins and limits of bodies are checked here, once. A stream that waits for a model begins with comments about its loading; an error after that, or
the end of the process, is an event at the end of the stream.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.metrics_core import GaugeMetricFamily

from ..errors import PyspecError
from . import embeddings, ollama, start
from .access import KEY_HEADER, PEER_HEADER, Origins
from .app import ROUTES, Handlers, application
from .errors import ApiError, api_error
from .fleet import Fleet, Model
from .http import ANTHROPIC, FINGERPRINT, STREAM_HEADERS, BodyLimits, Request, Response, Stream, event, json_response, shape
from .metrics import CONTENT_TYPE, Metrics, counter
from .model_process import RETRY, ModelProcess, ModelSpec
from .page import PATHS, page

PATIENCE = 1.0  # seconds of loading after which a stream begins with comments
COMMENT_SECONDS = 1.0
_SENT = ("content-type", "accept", "x-conversation-id", "x-session-id")  # headers of requests
_KEPT = ("content-type", "cache-control", "x-accel-buffering", "retry-after", "x-should-retry", "x-pyspec-ignored")  # and of responses
_STATE = (
    "/props",
    "/slots",
    "/metrics",
    "/lora-adapters",
    "/pyspec/live",
    "/v1/stream",
)  # of a loaded model; asking does not load it


class Router:
    """What handlers have."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet


def _named(request: Request) -> str:
    """The model that a request names: in its body, its query, or behind "::" in the id of its stream."""
    name = request.json_object().get("model", "") if request.method == "POST" else ""
    name = name or request.query_params.get("model", "") or request.query_params.get("conv_id", "").partition("::")[2]
    if not isinstance(name, str):
        raise ApiError(400, f"model is {json.dumps(name)[:60]}, but it has to be a text", param="model")
    return name


async def forward(router: Router, request: Request) -> Response:
    """Of whatever a model answers."""
    fleet = router.fleet
    model = fleet.find(_named(request))
    if request.method == "POST":
        body = request.json_object()
        keep = body.get("keep_alive") if request.path.startswith("/api/") else None
        model.idle_seconds = model.spec.idle_seconds if keep is None else ollama.keep_seconds(keep)  # until the next request
        if (
            keep is not None
            and model.idle_seconds == 0
            and model.ready is None
            and not any(body.get(n) for n in ("messages", "prompt", "input"))
        ):
            return json_response({"model": model.spec.name, "done": True, "done_reason": "unload"})
    fleet.begin(request)
    request.on_end.append(lambda: fleet.end_of(request))
    visit = _Visit(fleet, model, request)
    streams = request.method == "POST" and request.json_object().get("stream") is True and not request.path.startswith("/api/")
    await asyncio.wait({visit.entering}, timeout=PATIENCE if streams else None)
    if not visit.entering.done():
        return Stream(_late(visit), headers=STREAM_HEADERS)
    response = await visit.send()
    kept = {name: response.headers[name] for name in (*_KEPT, "process-start-time-unix") if name in response.headers}
    return _Forwarded(response, _parts(visit, response), kept)


async def state(router: Router, request: Request) -> Response:
    """Of a loaded model's state."""
    model = router.fleet.find(_named(request))
    if model.ready is None:
        if request.path == "/props":
            return json_response({"role": "router", "is_sleeping": True, "build_info": FINGERPRINT, "model_alias": model.spec.name})
        raise ApiError(503, f"{model.spec.name} is {model.state}; a request that generates loads it", headers=RETRY)
    return await forward(router, request)


class _Visit:
    """A request at the process of its model, which it leaves when it is over."""

    def __init__(self, fleet: Fleet, model: Model, request: Request) -> None:
        self.fleet, self.model, self.request, self.path = fleet, model, request, str(request.scope["path"])
        self.entering = asyncio.ensure_future(fleet.enter(model))
        request.on_end.append(self.leave)

    def leave(self) -> None:
        if not self.entering.cancel() and not self.entering.cancelled() and self.entering.exception() is None:
            self.fleet.leave(self.model, self.entering.result())

    async def send(self) -> httpx.Response:
        """The head of the response. A process that has ended before it took the request is started again. Raises ApiError: it has ended later."""
        while True:
            process = await self.entering
            try:
                response = await process.http.send(self._made(process), stream=True)
            except httpx.ConnectError:
                if not await process.gone():
                    sentence = f"the process of {self.model.spec.name} takes no connection; send the request again"
                    raise ApiError(503, sentence, headers=RETRY) from None
                self.leave()
                self.entering = asyncio.ensure_future(self.fleet.enter(self.model))
            except httpx.HTTPError:
                raise await self.lost() from None
            else:
                self.request.forget()
                return response

    def _made(self, process: ModelProcess) -> httpx.Request:
        request = self.request
        headers = {name: request.headers[name] for name in _SENT if name in request.headers}
        headers |= {KEY_HEADER: request.key, PEER_HEADER: request.peer, "accept-encoding": "identity"}
        url = httpx.URL(path=self.path, query=request.scope["query_string"])
        return process.http.build_request(request.method, url, headers=headers, content=request.data or None)

    async def lost(self) -> ApiError:
        """Made when the process is known to have ended: the request that follows must not be sent to it."""
        await self.entering.result().gone()
        sentence = f"the process of {self.model.spec.name} has ended while it answered; send the request again"
        return ApiError(503, sentence, headers=RETRY)


async def _parts(visit: _Visit, response: httpx.Response) -> AsyncIterator[bytes]:
    """The body, as it comes. Raises ConnectionResetError: it ends before its end, and is no stream that could hold an error."""
    try:
        async for part in response.aiter_raw():
            yield part
    except httpx.HTTPError:
        if not response.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson")):
            raise ConnectionResetError from None
        yield _error_event(visit.path, await visit.lost())


def _error_event(path: str, error: ApiError) -> bytes:
    shaped = shape(path, error)
    if path.startswith("/api/"):
        return json.dumps(shaped).encode() + b"\n"
    return event(shaped, "error" if path.startswith(ANTHROPIC) else "")


async def _late(visit: _Visit) -> AsyncIterator[bytes]:
    """A stream that waits for its model first."""
    began, model = time.monotonic(), visit.model
    try:
        while not visit.entering.done():
            yield f": {model.spec.name}: {model.progress}, {time.monotonic() - began:.0f} s\n\n".encode()
            await asyncio.wait({visit.entering}, timeout=COMMENT_SECONDS)
        response = await visit.send()
        try:
            if response.status_code == 200:
                async for part in _parts(visit, response):
                    yield part
            else:  # the stream has begun, so that its status cannot say it
                kind = b"event: error\n" if visit.path.startswith(ANTHROPIC) else b""
                yield b"%bdata: %b\n\n" % (kind, (await response.aread()).strip())
        finally:
            await response.aclose()
    except Exception as error:
        yield _error_event(visit.path, api_error(error))


class _Forwarded(Stream):
    """A response of a process; its connection is closed with it, so that the process sees a client that disconnects."""

    def __init__(self, response: httpx.Response, parts: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(parts, response.status_code, headers)
        self._response = response

    async def __call__(self, *channels: Any) -> None:
        try:
            await super().__call__(*channels)
        finally:
            await self._response.aclose()


# -- the list of models


def entry(model: Model) -> dict[str, Any]:
    """A model as /v1/models lists it."""
    about = model.process.about if model.process is not None else {}
    meta = about.get("meta", {"size": model.file_bytes, "drafter": model.spec.drafter})
    return {
        "id": model.spec.name, "object": "model", "created": model.created, "owned_by": "pyspec", "aliases": [model.spec.name, *model.spec.aliases],
        "tags": about.get("tags", []), "status": {"value": model.state}, "meta": meta,
        "pyspec": {
            "pinned": model.spec.pinned, "idle_seconds": model.idle_seconds, "planned_bytes": model.process.need if model.process is not None else None,
            "running": model.process.running if model.process is not None else 0,
            "pid": model.process.pid if model.process is not None else None, "loads": model.loads, "load_seconds": round(model.load_seconds, 3),
        },
    }  # fmt: skip


async def models(router: Router, request: Request) -> Response:
    return json_response({"object": "list", "data": [entry(model) for model in router.fleet.models()]})


async def model(router: Router, request: Request) -> Response:
    return json_response(entry(router.fleet.find(request.path_params["name"])))


async def tags(router: Router, request: Request) -> Response:
    return json_response({"models": [ollama.listed(one.spec.name, one.spec.path) for one in router.fleet.models()]})


async def ps(router: Router, request: Request) -> Response:
    out = []
    for one in router.fleet.models():
        if (process := one.ready) is not None:
            seconds = None if one.spec.pinned or process.running else one.idle_seconds
            expires = ollama.NEVER if seconds is None else ollama.at(time.time() + one.used + seconds - time.monotonic())
            out.append(ollama.running(one.spec.name, one.spec.path, process.about["meta"]["n_ctx"], process.need, expires))
    return json_response({"models": out})


async def show(router: Router, request: Request) -> Response:
    one = router.fleet.find(ollama.named(request))
    return json_response(ollama.shown(one.spec.name, one.spec.path))


async def load(router: Router, request: Request) -> Response:
    await router.fleet.load(router.fleet.find(_named(request)))
    return json_response({"success": True})


async def unload(router: Router, request: Request) -> Response:
    await router.fleet.unload(router.fleet.find(_named(request)))
    return json_response({"success": True})


async def health(router: Router, request: Request) -> Response:
    return json_response({"status": "ok", "loaded": [one.spec.name for one in router.fleet.models() if one.ready is not None]})


async def ready(router: Router, request: Request) -> Response:
    if router.fleet.draining:
        raise ApiError(503, "the server is ending and takes no more requests", headers={"retry-after": "5"})
    return json_response({"status": "ready"})


async def metrics(router: Router, request: Request) -> Response:
    """The router's own; with ?model=NAME those of a loaded model."""
    if _named(request):
        return await state(router, request)
    all_models, own = router.fleet.models(), request.app.state.metrics
    loads = counter("pyspec:model_loads", "Times that a model was loaded", ("model",), {one.spec.name: one.loads for one in all_models})
    loaded = GaugeMetricFamily("pyspec:model_loaded", "Whether a model is loaded.", labels=("model",))
    for one in all_models:
        loaded.add_metric([one.spec.name], float(one.ready is not None))
    return Response(own.text(None, (loads, loaded)), headers={"process-start-time-unix": str(int(own.started))}, media_type=CONTENT_TYPE)


def _routes(with_page: bool) -> dict[str, Handlers]:
    """The routes of a model, forwarded, but for what the router answers itself."""
    own: dict[str, Handlers] = {
        "/models": {"GET": models}, "/models/load": {"POST": load}, "/models/unload": {"POST": unload}, "/models/{name:path}": {"GET": model},
        "/health": {"GET": health},
    }  # fmt: skip
    own |= {f"/v1{path}": handlers for path, handlers in own.items()} | {"/ready": {"GET": ready}, "/metrics": {"GET": metrics}}
    own |= {"/api/tags": {"GET": tags}, "/api/ps": {"GET": ps}, "/api/show": {"POST": show}}
    own |= {
        path: handlers for path, handlers in ROUTES.items() if ollama.version in handlers.values() or ollama.not_here in handlers.values()
    }
    pages: dict[str, Handlers] = {path: {"GET": page} for path in PATHS if with_page}
    forwarded: dict[str, Handlers] = {
        path: dict.fromkeys(handlers, state if path in _STATE else forward)
        for path, handlers in {**embeddings.ROUTES, **ROUTES}.items()
        if path not in own
    }
    return {**own, **forwarded, **pages}


# -- starting


@dataclass(frozen=True)
class RouterOptions:
    """``models``: lists them; ``memory``: bytes for all that are loaded, None for what devices have free; ``most``: how many."""

    models: Callable[[], Sequence[ModelSpec]]
    memory: int | None = None
    most: int | None = None
    page: bool = True


def serve(settings: start.Settings, options: RouterOptions) -> int:
    """Serves until a signal ends it; the exit status. Raises PyspecError: an address cannot be had, or this system has no unix sockets."""
    if not hasattr(socket, "AF_UNIX"):
        raise PyspecError("several models need unix sockets, which this system does not have; serve one model by each `pyspec serve`")
    return start.run(_RouterService(settings, options))


class _RouterService(start.Service):
    def __init__(self, settings: start.Settings, options: RouterOptions) -> None:
        super().__init__(settings)
        self.options = options

    async def run(self, sockets: list[socket.socket]) -> int:
        settings, options, self.loop = self.settings, self.options, asyncio.get_running_loop()
        self.work = fleet = Fleet(options.models, options.memory, options.most, settings.drain, self.report)
        limits = BodyLimits(settings.max_body)
        app = application(
            Router(fleet), _routes(options.page), Metrics(), settings.keys, Origins(settings.origins), self.hosts(sockets), limits
        )  # fmt: skip
        watching, count = self.loop.create_task(fleet.watch()), len(fleet.models())
        what = f"{count} model{'s' * (count != 1)}"
        try:
            await self.serve(app, sockets, lambda at: f"serving {what} at {at} with a process for each that is loaded")
        finally:
            watching.cancel()
            await fleet.close()
        return self.exit_status
