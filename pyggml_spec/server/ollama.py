"""Ollama's dialect: /api/chat and /api/generate, whose streams are lines of JSON, and what describes models. Requests are translated to ``bodies`` first."""

import base64
import binascii
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from ..errors import PyspecError
from ..gguf_io import GGUFFile
from ..text.template import DEFAULT, templates
from ..text.values import Call
from .bodies import Chat, Infill, OpenAICompletion, convert, unknown_fields, wrong
from .conversation import NO_MESSAGES
from .errors import ApiError, translated
from .http import VERSION, Request, Response, encode, json_response
from .infill import read_infill
from .native import read_completion
from .output import Delta, Output
from .reading import Context, ResponseEncoder, respond, respond_to_chat

API_VERSION = "0.12.0"  # of Ollama, whose requests these are; clients ask for a least one
NEVER = "9999-12-31T23:59:59Z"
OPTIONS = {"num_predict": "n_predict"}  # by our names; others have the same
FIXED = {  # options that are chosen when a model is loaded, or do nothing here
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock", "low_vram", "vocab_only", "f16_kv", "logits_all",
    "embedding_only", "penalize_newline", "tfs_z",
}  # fmt: skip
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")
_DURATION = re.compile(rf"-?(?:{_PART.pattern})+")
_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_SIGNS = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF8")


class Common(Struct, kw_only=True):
    model: str = ""
    stream: bool = True
    format: Any = None
    options: dict[str, Any] = {}
    think: Any = None
    keep_alive: Any = None  # obeyed by a router
    logprobs: bool = False
    top_logprobs: int = 0


class OllamaChat(Common, kw_only=True):
    messages: Any = None
    tools: list[Any] = []


class Generate(Common, kw_only=True):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    raw: bool = False
    images: list[Any] = []
    context: list[Any] = []


async def chat(context: Context, request: Request) -> Response:
    given = _parsed(request, OllamaChat)
    if not given.messages:
        return _loaded(context, given, message={"role": "assistant", "content": ""})
    if not isinstance(given.messages, list):
        raise ApiError(400, NO_MESSAGES, param="messages")
    fields, names = _fields(request, given)
    fields |= {"messages": [_message(message, i) for i, message in enumerate(given.messages)], "tools": given.tools}
    with translated(names):
        body = convert(fields, Chat)
    return await respond_to_chat(context, request, body, ChatEncoder, names)


async def generate(context: Context, request: Request) -> Response:
    given = _parsed(request, Generate)
    if given.template:
        raise ApiError(501, "template is not supported here; send the text that it would give, with raw: true", param="template")
    if given.context:
        raise ApiError(501, "context is not supported here; send the conversation to /api/chat, whose beginning is reused", param="context")
    if not given.prompt and not given.suffix:
        return _loaded(context, given, response="")
    fields, names = _fields(request, given)
    if not given.raw and not given.suffix:
        user = {"role": "user", "content": given.prompt, **({"images": given.images} if given.images else {})}
        system = [{"role": "system", "content": given.system}] if given.system else []
        with translated(names):
            body = convert({**fields, "messages": [*system, _message(user, 0)]}, Chat)
        return await respond_to_chat(context, request, body, Encoder, names)
    if given.images:
        raise ApiError(400, "images belong to a conversation; leave out raw and suffix", param="images")
    with translated(names):
        if given.suffix:
            infill = convert({**_without_thinking(fields), "input_prefix": given.prompt, "input_suffix": given.suffix}, Infill)
            return await respond(
                context, request, infill, await context.prepared(request, read_infill, context, infill, request.key), Encoder
            )
        text = convert({**_without_thinking(fields), "prompt": given.prompt}, OpenAICompletion)
        return await respond(context, request, text, await context.prepared(request, read_completion, context, text, request.key), Encoder)


def _parsed(request: Request, kind: Any) -> Any:
    sent = request.json_object()
    request.unknown = [name for name in sent if name not in kind.__struct_fields__]
    return convert(sent, kind)


def _fields(request: Request, given: Common) -> tuple[dict[str, Any], dict[str, str]]:
    """What all translations have, and the client's names of fields by ours. Raises ApiError: an option that is refused."""
    options = {OPTIONS.get(name, name): value for name, value in given.options.items() if name not in FIXED and value is not None}
    if options.get("n_predict") == -2:  # as long as the context
        options["n_predict"] = -1
    names = {name: f"options.{name}" for name in options} | {ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()}
    with translated(names):
        unknown = unknown_fields(options, Chat)
    request.unknown += [f"options.{name}" for name in unknown]
    fields = {name: value for name, value in options.items() if name not in unknown} | {"stream": given.stream, "model": given.model}
    if given.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(given.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": given.format}}
        names |= {"response_format.json_schema.schema": "format", "response_format": "format"}
    elif given.format not in (None, ""):
        raise wrong("format", given.format, '"json" or a JSON schema')
    if given.think is not None:
        if not isinstance(given.think, (bool, str)):
            raise wrong("think", given.think, 'true, false, "low", "medium" or "high"')
        fields |= {"enable_thinking": given.think} if isinstance(given.think, bool) else {"reasoning_effort": given.think}
    if given.logprobs:
        fields |= {"logprobs": True, "top_logprobs": given.top_logprobs}
    return fields, names


def _without_thinking(fields: Mapping[str, Any]) -> dict[str, Any]:
    """For texts, whose log probabilities are a number."""
    out = {name: value for name, value in fields.items() if name not in ("enable_thinking", "reasoning_effort", "logprobs", "top_logprobs")}
    return out | ({"n_probs": max(1, fields["top_logprobs"])} if fields.get("logprobs") else {})


def _message(message: Any, i: int) -> Any:
    """One message in OpenAI's form. Raises ApiError: a call or an image in it is none."""
    if not isinstance(message, dict):
        return message
    out = {name: message[name] for name in ("role", "content", "tool_call_id") if message.get(name) is not None}
    if thought := message.get("thinking"):
        out["reasoning_content"] = thought
    if message.get("tool_name"):
        out |= {"name": message["tool_name"], "tool_call_id": out.get("tool_call_id", message["tool_name"])}
    if calls := message.get("tool_calls"):
        functions = [call.get("function") if isinstance(call, dict) else None for call in calls] if isinstance(calls, list) else [None]
        if not all(isinstance(function, dict) for function in functions):
            raise wrong(f"messages[{i}].tool_calls", calls, 'a list of {"function": {"name": ..., "arguments": {...}}}')
        out["tool_calls"] = [
            {"id": f"call_{i}_{n}", "type": "function", "function": {**function, "arguments": json.dumps(function.get("arguments") or {})}}
            for n, function in enumerate(functions) if function is not None
        ]  # fmt: skip
    if images := message.get("images"):
        if not isinstance(images, list):
            raise wrong(f"messages[{i}].images", images, "a list of images in base64")
        out["content"] = [{"type": "text", "text": out.get("content", "")}, *(_image(image, i) for image in images)]
    return out


def _image(image: Any, i: int) -> dict[str, Any]:
    try:
        head = base64.b64decode(image[:16], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise wrong(f"messages[{i}].images", image, "images in base64") from None
    kind = next((kind for sign, kind in zip(_SIGNS, _TYPES) if head.startswith(sign)), _TYPES[0])
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{image}"}}


def _loaded(context: Context, given: Common, **empty: Any) -> Response:
    """A request without a prompt loads the model, or unloads it: it is loaded here."""
    reason = "unload" if given.keep_alive in (0, "0", "0s") else "load"
    return json_response({"model": given.model or context.served.name, "created_at": _now(), **empty, "done": True, "done_reason": reason})


class Encoder(ResponseEncoder):
    """Of /api/generate. Streams are lines of JSON, which have no comments: a silent one stays silent."""

    ping = b""
    headers: ClassVar[Mapping[str, str]] = {"content-type": "application/x-ndjson", "cache-control": "no-cache", "x-accel-buffering": "no"}

    def __init__(self, context: Context, request: Request, body: Any) -> None:
        super().__init__(context, request, body)
        self._began = time.perf_counter()
        self._model = body.model or context.served.name  # of the request's body nothing may be left

    async def whole(self) -> Response:
        (output,) = self.outputs
        answer = self._answer(output.content, output.reasoning, output.calls)
        logprobs = {"logprobs": [output.probability(p) for p in output.logprobs]} if output.logprobs else {}
        return json_response({**self._head(), **answer, **logprobs, **self._end_of(output)})

    def delta(self, output: Output, delta: Delta, last: bool) -> bytes:
        out = b""
        content, reasoning = delta.content, "".join(piece.reasoning for piece in delta.pieces)
        calls = [piece.call for piece in delta.pieces if piece.call is not None]
        if content or reasoning or calls or delta.logprobs:
            logprobs = {"logprobs": [output.probability(p) for p in delta.logprobs]} if delta.logprobs else {}
            out = self._line(**self._answer(content, reasoning, calls), **logprobs, done=False)
        return out + self._line(**self._answer("", "", []), **self._end_of(output)) if last else out

    def error(self, error: ApiError) -> bytes:
        return encode({"error": error.message}) + b"\n"

    def _line(self, **more: Any) -> bytes:
        return encode({**self._head(), **more}) + b"\n"

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": _now()}

    def _answer(self, content: str, reasoning: str, calls: Sequence[Call]) -> dict[str, Any]:
        return {"response": content, **({"thinking": reasoning} if reasoning else {})}

    def _end_of(self, output: Output) -> dict[str, Any]:
        stats, ns = output.stats, 1e9
        return {
            "done": True, "done_reason": "length" if output.finish_reason == "length" else "stop",
            "total_duration": int(ns * (time.perf_counter() - self._began)), "load_duration": 0,
            "prompt_eval_count": len(output.task.request.ids), "prompt_eval_duration": int(ns * stats.seconds.get("prefill", 0.0)),
            "eval_count": stats.emitted, "eval_duration": int(ns * stats.seconds.get("decode", 0.0)),
        }  # fmt: skip


class ChatEncoder(Encoder):
    """Of /api/chat."""

    def _answer(self, content: str, reasoning: str, calls: Sequence[Call]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = [{"function": {"name": c.name, "arguments": msgspec.Raw(c.arguments.encode())}} for c in calls]
        return {"message": message}


def _now() -> str:
    return at(time.time())


def at(seconds: float) -> str:
    """A time since 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# -- descriptions of models


def listed(name: str, path: Path | None) -> dict[str, Any]:
    """An entry of /api/tags; of a file that is not here yet only the name is known."""
    if path is None or not path.is_file():
        return {"name": name, "model": name, "modified_at": at(0), "size": 0, "digest": "0" * 64, "details": _details({}, 0)}
    stat = path.stat()
    digest = sha256(
        f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode()
    ).hexdigest()  # of what tells files apart: contents take minutes
    about = _about(path, stat.st_mtime_ns)
    return {
        "name": name,
        "model": name,
        "modified_at": at(stat.st_mtime),
        "size": stat.st_size,
        "digest": digest,
        "details": about["details"],
    }


def running(name: str, path: Path | None, n_ctx: int, nbytes: int, expires: str = NEVER) -> dict[str, Any]:
    """An entry of /api/ps. ``nbytes``: of memory."""
    entry = listed(name, path)
    del entry["modified_at"]
    return {**entry, "expires_at": expires, "size_vram": nbytes, "context_length": n_ctx}


def shown(name: str, path: Path | None, parameters: str = "") -> dict[str, Any]:
    """The answer of /api/show. Raises ApiError: the file is not here yet, or cannot be read."""
    if path is None or not path.is_file():
        raise ApiError(404, f"{name} is fetched by the first request that it answers, and is not here yet", param="model")
    stat = path.stat()
    about = _about(path, stat.st_mtime_ns)
    return {"modelfile": f"FROM {path}\n", "parameters": parameters, "modified_at": at(stat.st_mtime), **about}


@lru_cache(256)
def _about(path: Path, modified: int) -> dict[str, Any]:
    """From the metadata of a GGUF, until it changes."""
    try:
        with GGUFFile(path) as file:
            metadata = {name: value for name, value in file.metadata.items() if isinstance(value, (str, int, float, bool))}
            template = templates(file).get(DEFAULT, "")
            count = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    except PyspecError as error:
        return {"details": _details({}, 0), "template": "", "model_info": {}, "capabilities": [], "error": str(error)}
    info = {name: value for name, value in metadata.items() if not name.startswith("tokenizer.chat_template")}
    signs = {"tools": "tools", "thinking": "think"}
    capabilities = ["completion", *(name for name, sign in signs.items() if sign in template)]
    capabilities += ["insert"] if any(name.startswith("tokenizer.ggml.fim_") for name in metadata) else []
    return {
        "details": _details(metadata, count), "template": template, "model_info": {**info, "general.parameter_count": count}, "capabilities": capabilities,
    }  # fmt: skip


def _details(metadata: Mapping[str, Any], count: int) -> dict[str, Any]:
    import gguf  # a tenth of what `serve` imports, for this name

    family = str(metadata.get("general.architecture", ""))
    try:
        quantisation = gguf.LlamaFileType(metadata["general.file_type"]).name.removeprefix("MOSTLY_")
    except (KeyError, ValueError):
        quantisation = "unknown"
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    return {
        "parent_model": "", "format": "gguf", "family": family, "families": [family], "parameter_size": size, "quantization_level": quantisation,
    }  # fmt: skip


def keep_seconds(value: Any) -> float | None:
    """``keep_alive``: seconds, or a text like "1h30m"; None: for ever, which is below 0. Raises ApiError."""
    seconds = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if isinstance(value, str) and _DURATION.fullmatch(value):
        seconds = sum(float(n) * _UNITS[unit or "s"] for n, unit in _PART.findall(value)) * (-1 if value.startswith("-") else 1)
    if seconds is None:
        raise wrong("keep_alive", value, 'seconds, or a text like "5m"')
    return None if seconds < 0 else seconds


# -- of a server with one model


def _path(context: Context) -> Path:
    return Path(context.served.path)


async def tags(context: Context, request: Request) -> Response:
    return json_response({"models": [listed(context.served.name, _path(context))]})


async def ps(context: Context, request: Request) -> Response:
    memory = sum(context.queue.engine.memory().values()) + _path(context).stat().st_size
    return json_response({"models": [running(context.served.name, _path(context), context.served.n_ctx, memory)]})


async def show(context: Context, request: Request) -> Response:
    name = named(request) or context.served.name
    parameters = "\n".join(f"{name} {value}" for name, value in _defaults(context).items())
    return json_response({**shown(name, _path(context), parameters), "template": context.served.template.source})


def named(request: Request) -> str:
    """The model of a request; "name" is what it was called before."""
    sent = request.json_object()
    name = sent.get("model") or sent.get("name") or ""
    if not isinstance(name, str):
        raise wrong("model", name, "a text")
    return name


def _defaults(context: Context) -> dict[str, Any]:
    s = context.served.limits.sampling
    return {"num_ctx": context.served.n_ctx, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p}


async def version(context: Any, request: Request) -> Response:
    return json_response({"version": API_VERSION, "server": f"pyspec {VERSION}"})


async def not_here(context: Any, request: Request) -> Response:
    remedy = (
        "use `pyspec pull`, `pyspec list` and `pyspec rm` where it runs"
        if "pull" in request.path or "delete" in request.path
        else "put GGUF files there"
    )
    raise ApiError(501, f"models are not changed through this server; {remedy}".replace("`", ""))
