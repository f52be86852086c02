"""/v1/embeddings, /v1/rerank and llama-server's /embedding: a server that embeds or ranks texts, and generates none.

Texts of all requests wait in one queue; one thread computes as many of them at a time as share a step.
"""

import asyncio
import base64
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct

from ..embedding import Embedder, normalised
from . import native, ollama, openai
from .bodies import parse, wrong
from .errors import ApiError
from .http import Request, Response, json_response
from .reading import Context
from .served import ServeOptions, texts_and_ids

MOST_INPUTS = 2048  # texts of one request, as OpenAI's
MOST_WAITING = 4 * MOST_INPUTS  # texts of all requests
Text = tuple[list[int], asyncio.Future[np.ndarray]]


class ServedEmbedder:
    """What handlers know of the model. ``options``: as of a server that generates."""

    def __init__(self, embedder: Embedder, options: ServeOptions) -> None:
        self.embedder, self.options, self.tokenizer, self.n_ctx = embedder, options, embedder.tokenizer, embedder.n_ctx
        self.path, self.media = str(embedder.file.path), ()
        self.names = options.names or (embedder.file.path.name,)
        self.name = self.names[0]

    def model_entry(self) -> dict[str, Any]:
        meta = {"n_vocab": self.tokenizer.n_vocab, "n_ctx": self.n_ctx, "n_embd": self.embedder.n_embd, "architecture": self.embedder.arch}
        meta |= {"pooling": self.embedder.pooling, "size": Path(self.path).stat().st_size}
        return {
            "id": self.name,
            "object": "model",
            "owned_by": "pyspec",
            "aliases": list(self.names),
            "tags": list(self.options.tags),
            "status": {"value": "loaded"},
            "meta": meta,
        }


class EmbeddingQueue:
    """Texts that wait, and the thread that computes them. Made in the event loop; has what ``start`` and ``app`` need of ``tasks.Queue``."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder, self._loop = embedder, asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "pyggml_spec embeddings")
        self._waiting: list[Text] = []
        self._working: asyncio.Task[None] | None = None
        self.running: set[Any] = set()
        self.draining, self.stuck = False, False
        self.engine = self

    async def embed(self, texts: Sequence[list[int]]) -> list[np.ndarray]:
        """As of ``Embedder.embed``. Raises ApiError: too many texts wait, or the server ends."""
        if self.draining:
            raise ApiError(503, "the server is ending and takes no more requests; send this one to another", headers={"retry-after": "5"})
        if len(self._waiting) + len(texts) > MOST_WAITING:
            raise ApiError(429, f"{len(self._waiting)} texts wait already; try again in about 1 s", headers={"retry-after": "1"})
        items: list[Text] = [(ids, self._loop.create_future()) for ids in texts]
        self._waiting += items
        if self._working is None:
            self._working = self._loop.create_task(self._work())
        try:
            return list(await asyncio.gather(*(future for _, future in items)))
        finally:
            for _, future in items:  # the client is gone: what has not begun is left out
                future.cancel()

    async def _work(self) -> None:
        while self._waiting:
            self._waiting = waiting = [item for item in self._waiting if not item[1].done()]
            count = next(self._embedder.batches([len(ids) for ids, _ in waiting]), 0)
            batch, self._waiting = waiting[:count], waiting[count:]
            self.running = {id(future) for _, future in batch}
            try:
                done: Sequence[Any] = await self._loop.run_in_executor(self._thread, self._embedder.embed, [ids for ids, _ in batch])
            except Exception as error:
                done = [error] * count
            for (_, future), value in zip(batch, done):
                if not future.done():
                    future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
        self.running, self._working = set(), None

    # -- as of ``Queue``

    def step_age(self) -> float:
        return 0.0

    async def watch(self) -> None:
        """Nothing to watch."""

    async def drain(self, seconds: float) -> bool:
        """Waits until all texts are computed."""
        self.draining = True
        with suppress(TimeoutError):
            if self._working is not None:
                await asyncio.wait_for(asyncio.shield(self._working), seconds)
            return True
        self.cancel_all("the server ends")
        return False

    def cancel_all(self, why: str) -> None:
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(ApiError(503, f"{why}: this request was cut off", headers={"retry-after": "5"}))

    def stop(self, seconds: float) -> bool:
        self._thread.shutdown(wait=True, cancel_futures=True)
        return True

    def close(self) -> None:
        self._embedder.close()


class Embeddings(Struct, kw_only=True):
    """Of OpenAI's /v1/embeddings and llama.cpp's /embedding."""

    model: str = ""
    input: Any = None
    content: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    embd_normalize: Annotated[int, Meta(ge=-1, le=1000)] = 2
    user: str = ""
    dimensions: int | None = None


class Rerank(Struct, kw_only=True):
    model: str = ""
    query: str = ""
    documents: Annotated[list[str], Meta(max_length=MOST_INPUTS)] = []
    texts: Annotated[list[str], Meta(max_length=MOST_INPUTS)] = []
    top_n: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    return_text: bool = False
    return_documents: bool = False


def _inputs(served: ServedEmbedder, value: Any, name: str) -> list[list[int]]:
    """A text, tokens, both mixed, or a list of such. Raises ApiError."""
    if value is None:
        raise ApiError(400, "input is missing; send a text, or a list of texts", param="input")
    many = isinstance(value, list) and not any(isinstance(part, int) for part in value)
    if many and not 0 < len(value) <= MOST_INPUTS:
        raise wrong(name, value, f"a list of 1 to {MOST_INPUTS} texts")
    out = []
    for one in value if many else [value]:
        if (parts := texts_and_ids(one)) is None:
            raise wrong(name, one, "a text, a list of token ids, or a list of such")
        encode = served.embedder.encode
        whole = encode(parts[0]) if len(parts) == 1 and isinstance(parts[0], str) else None
        ids = whole or [
            i for part in parts for i in ([part] if isinstance(part, int) else served.tokenizer.encode(part, special=True, bos=False))
        ]
        out.append(_checked(served, ids, name))
    return out


def _checked(served: ServedEmbedder, ids: list[int], name: str) -> list[int]:
    if not ids:
        raise ApiError(400, f"the {name} is empty; give some text", param=name)
    if len(ids) > served.n_ctx:
        what = f"the {name} has {len(ids)} tokens, and this model embeds {served.n_ctx} at most; shorten it"
        raise ApiError(400, what, kind="exceed_context_size_error", param=name, n_prompt_tokens=len(ids), n_ctx=served.n_ctx)
    if (outside := next((i for i in ids if not 0 <= i < served.tokenizer.n_vocab), None)) is not None:
        raise ApiError(400, f"the {name} has the token {str(outside)[:30]}, and the vocabulary has {served.tokenizer.n_vocab}", param=name)
    return ids


def _of(context: Context) -> tuple[ServedEmbedder, EmbeddingQueue]:
    assert isinstance(context.served, ServedEmbedder) and isinstance(context.queue, EmbeddingQueue)
    return context.served, context.queue


async def embeddings(context: Context, request: Request) -> Response:
    """OpenAI's; with ``content`` llama.cpp's."""
    body = parse(request, Embeddings)
    if body.content is not None and body.input is None:
        return await _native(context, request, body)
    served, queue = _of(context)
    if served.embedder.pooling == "none":
        raise ApiError(400, "without pooling there is an embedding per token, which /embedding returns; or start the server with `pooling`")
    if body.dimensions not in (None, served.embedder.n_embd):
        raise wrong("dimensions", body.dimensions, f"{served.embedder.n_embd}, which this model's embeddings have")
    texts = await context.in_pool(request, _inputs, served, body.input, "input")
    data = []
    for i, values in enumerate(await queue.embed(texts)):
        vector = normalised(values, body.embd_normalize)
        shown: Any = vector.tolist() if body.encoding_format == "float" else base64.b64encode(vector.tobytes()).decode()
        data.append({"object": "embedding", "index": i, "embedding": shown})
    return json_response({"object": "list", "model": served.name, "data": data, "usage": _usage(texts)})


def _usage(texts: Sequence[list[int]]) -> dict[str, int]:
    return dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, texts)))


async def embedding(context: Context, request: Request) -> Response:
    return await _native(context, request, parse(request, Embeddings))


async def _native(context: Context, request: Request, body: Embeddings) -> Response:
    """llama.cpp's: a list, with an embedding per token where there is no pooling."""
    served, queue = _of(context)
    value = body.content if body.content is not None else body.input
    texts = await context.in_pool(request, _inputs, served, value, "content")
    found = [v if v.ndim > 1 else normalised(v, body.embd_normalize)[None] for v in await queue.embed(texts)]
    return json_response([{"index": i, "embedding": v.tolist()} for i, v in enumerate(found)])


async def rerank(context: Context, request: Request) -> Response:
    """Jina's and Cohere's; with ``texts`` that of text-embeddings-inference."""
    body, (served, queue) = parse(request, Rerank), _of(context)
    if served.embedder.pooling != "rank":
        raise ApiError(501, "this model ranks nothing; load a reranker, and start the server with `pooling` rank")
    documents = body.documents or body.texts
    if not documents or not body.query:
        raise ApiError(
            400, "query and documents are required; send a text, and a list of texts", param="documents" if body.query else "query"
        )

    def pairs() -> list[list[int]]:
        return [_checked(served, served.embedder.encode_pair(body.query, d), f"documents[{i}]") for i, d in enumerate(documents)]

    texts = await context.in_pool(request, pairs)
    scores = [float(values[0]) for values in await queue.embed(texts)]
    name = "score" if body.texts and not body.documents else "relevance_score"
    ranked = [{"index": i, name: scores[i]} for i in sorted(range(len(scores)), key=lambda i: -scores[i])]
    ranked = list(itertools.islice(ranked, len(ranked) if body.top_n is None else body.top_n))
    if name == "score":
        return json_response([{**r, **({"text": documents[int(r["index"])]} if body.return_text else {})} for r in ranked])
    shown = [{**r, **({"document": {"text": documents[int(r["index"])]}} if body.return_documents else {})} for r in ranked]
    return json_response({"model": served.name, "object": "list", "usage": _usage(texts), "results": shown})


class OllamaEmbeddings(Struct, kw_only=True):
    """Of Ollama's /api/embed, and of its older /api/embeddings with ``prompt``."""

    model: str = ""
    input: Any = None
    prompt: Any = None
    options: dict[str, Any] = {}
    truncate: bool = True
    dimensions: int | None = None
    keep_alive: Any = None


async def ollama_embed(context: Context, request: Request) -> Response:
    """As of Ollama: texts alone, normalised; those that are too long are refused, not cut."""
    body, (served, queue) = parse(request, OllamaEmbeddings), _of(context)
    old = request.path == "/api/embeddings"
    value = body.prompt if old and body.prompt is not None else body.input
    if served.embedder.pooling == "none":
        raise ApiError(400, "without pooling there is an embedding per token, which /embedding returns; or start the server with `pooling`")
    if body.dimensions not in (None, served.embedder.n_embd):
        raise wrong("dimensions", body.dimensions, f"{served.embedder.n_embd}, which this model's embeddings have")
    texts = await context.in_pool(request, _inputs, served, value, "input")
    found = [normalised(values, 2).tolist() for values in await queue.embed(texts)]
    if old:
        return json_response({"embedding": found[0]})
    return json_response({"model": body.model or served.name, "embeddings": found, "prompt_eval_count": sum(map(len, texts))})


async def health(context: Context, request: Request) -> Response:
    return json_response({"status": "ok"})


ROUTES: dict[str, Any] = {
    **{path: {"POST": embeddings} for path in ("/v1/embeddings", "/embeddings")},
    "/embedding": {"POST": embedding},
    **{path: {"POST": rerank} for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")},
    **{f"{v}/models": {"GET": openai.models} for v in ("", "/v1")},
    **{f"{v}/models/{{name:path}}": {"GET": openai.model} for v in ("", "/v1")},
    **{f"{v}/health": {"GET": health} for v in ("", "/v1")},
    **{path: {"POST": ollama_embed} for path in ("/api/embed", "/api/embeddings")},
    "/api/tags": {"GET": ollama.tags},
    "/api/version": {"GET": ollama.version},
    "/ready": {"GET": native.ready},
    "/tokenize": {"POST": native.tokenize},
    "/detokenize": {"POST": native.detokenize},
}  # fmt: skip
