"""OpenAI's dialect: /v1/chat/completions and /v1/completions, streaming and not."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ..sampling.sampler import TokenLogprob
from ..text.values import Call
from . import sampling
from .bodies import Chat, Generation, OpenAICompletion, convert, parse
from .conversation import read_chat, task_requests
from .errors import ApiError, api_error
from .http import DONE, PING, LongLists, Request, Response, encode, event, event_stream, json_response
from .native import native_result, probabilities
from .output import MIN_LOGPROB, Delta, Output, metrics, progress, speculation, usage
from .reading import Context, Reader
from .tasks import TaskRequest
from .version import FINGERPRINT


def _identifier(kind: str = "chatcmpl-") -> str:
    return kind + secrets.token_urlsafe(24).replace("-", "x").replace("_", "y")


class _Frame:
    """The members with which every object of one response begins."""

    def __init__(self, context: Context, kind: str, identifier: str) -> None:
        self.begin = {
            "id": identifier, "object": kind, "created": int(time.time()), "model": context.served.name, "system_fingerprint": FINGERPRINT,
        }  # fmt: skip

    def delta(
        self,
        index: int,
        change: dict[str, Any],
        finish: str | None = None,
        logprobs: Sequence[Any] = (),
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        """One change of one choice, as an event."""
        choice: dict[str, Any] = {"index": index, "delta": change, "finish_reason": finish}
        if logprobs:
            choice["logprobs"] = {"content": logprobs}
        return event({**self.begin, "choices": [choice], **(more or {})})

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.begin, "choices": choices, **more}


def _chunk_members(body: Generation, output: Output, delta: Delta) -> dict[str, Any]:
    """Members of a chunk that the request asks for."""
    out: dict[str, Any] = {}
    if body.timings_per_token and delta.prompt_read != 0:
        out["timings"] = output.timings()
    if body.stream_options.continuous_usage_stats:
        out["usage"] = usage([output])
    if body.speculation and delta.tokens:
        tokens, accepted = output.shown(delta.tokens), max(0, len(delta.tokens) - 1) if delta.drafts else 0
        out["speculation"] = {"tokens": tokens, "drafts": output.shown_drafts(delta.drafts, accepted, tokens), "accepted": accepted}
    return out


# -- chat


async def chat(context: Context, request: Request) -> Response:
    body = parse(request, Chat)
    plan = await context.prepared(request, read_chat, context.served, body, request.key)
    reader = Reader(context, request, body, plan.requests, lambda task: plan.output(task, context.served))
    frame = _Frame(context, "chat.completion.chunk" if body.stream else "chat.completion", _identifier())
    if body.stream:
        await reader.begin()
        return event_stream(_chat_chunks(context, reader, frame, body))
    outputs = await reader.whole()
    lists = LongLists(request)
    choices = [_chat_choice(output, lists) for output in outputs]
    return lists.response(frame.chunk(choices, **_summary(context, outputs, body.verbose, lists)))


def _summary(context: Context, outputs: Sequence[Output], verbose: bool, lists: LongLists | None = None) -> dict[str, Any]:
    """What a whole response, or a stream's last chunk, reports of all of it."""
    first = outputs[0]
    out = {"usage": usage(outputs), "timings": first.timings(), "speculation": speculation(first.stats), "metrics": metrics(first.stats)}
    if verbose or context.served.options.verbose:
        out["__verbose"] = native_result(context, first, lists or LongLists())
    return out


def message(output: Output) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": output.content}
    if output.reasoning:
        out["reasoning_content"] = output.reasoning
    if output.calls:
        out["content"] = output.content or None
        out["tool_calls"] = [tool_call(call, output, i) for i, call in enumerate(output.calls)]
    return out


def tool_call(call: Call, output: Output, i: int) -> dict[str, Any]:
    return {"id": f"call_{output.task.number:x}_{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_choice(output: Output, lists: LongLists) -> dict[str, Any]:
    out = {"index": output.task.index, "message": message(output), "finish_reason": output.finish_reason}
    if output.logprobs:
        out["logprobs"] = {"content": probabilities(output, lists)}
    return out


async def _chat_chunks(context: Context, reader: Reader, frame: _Frame, body: Chat) -> AsyncIterator[bytes]:
    begun: set[int] = set()
    called: dict[int, int] = {}
    begins = {"role": "assistant", "content": None}
    try:
        async for item in reader.deltas():
            if item is None:
                yield PING
                continue
            output, delta, last = item
            index = output.task.index
            if delta.prompt_read is not None:
                more = {"prompt_progress": progress(output, delta.prompt_read)} | (
                    {"timings": output.timings()} if body.timings_per_token else {}
                )
                yield frame.delta(index, begins, more=more)
                continue
            out = b""
            if index not in begun:
                begun.add(index)
                out = frame.delta(index, begins)
            changes = _changes(output, delta, called)
            if delta.logprobs or (body.speculation and delta.tokens):
                changes = changes or [{"content": ""}]
            for change in changes[:-1]:
                out += frame.delta(index, change)
            if changes:
                logprobs = [output.probability(p) for p in delta.logprobs]
                out += frame.delta(index, changes[-1], None, logprobs, _chunk_members(body, output, delta))
            if out:
                yield out
            if last:
                alone = not body.stream_options.include_usage and len(reader.outputs) == 1
                summary = {k: v for k, v in _summary(context, reader.outputs, body.verbose).items() if k != "usage"} if alone else {}
                yield frame.delta(index, {}, output.finish_reason, more=summary)
        if body.stream_options.include_usage:
            yield event(frame.chunk([], **_summary(context, reader.outputs, body.verbose)))
        yield DONE
    except Exception as error:
        yield event(api_error(error).openai())


def _changes(output: Output, delta: Delta, called: dict[int, int]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for piece in delta.pieces:
        if piece.reasoning:
            out.append({"reasoning_content": piece.reasoning})
        if piece.content:
            out.append({"content": piece.content})
        if piece.call is not None:
            i = called[output.task.index] = called.get(output.task.index, -1) + 1
            out.append({"tool_calls": [{"index": i, **tool_call(piece.call, output, i)}]})
    return out


# -- completions


async def completions(context: Context, request: Request) -> Response:
    body = parse(request, OpenAICompletion)
    requests, n_probs = await context.prepared(request, _read_completions, context, body, request.key)
    reader = Reader(context, request, body, requests, lambda task: Output(task, context.served.tokenizer, None, n_probs is not None))
    frame = _Frame(context, "text_completion", _identifier("cmpl-"))
    if body.stream:
        await reader.begin()
        return event_stream(_completion_chunks(context, reader, frame, body))
    outputs, lists = await reader.whole(), LongLists(request)
    choices = [
        {
            "index": o.task.index, "text": o.text, "logprobs": _legacy_logprobs(o, o.logprobs, lists) if o.logprobs else None,
            "finish_reason": o.finish_reason,
        }
        for o in outputs
    ]  # fmt: skip
    return lists.response(frame.chunk(choices, **_summary(context, outputs, body.verbose, lists)))


def _read_completions(context: Context, body: OpenAICompletion, key: str) -> tuple[list[TaskRequest], int | None]:
    served = context.served
    if body.prompt is None:
        raise ApiError(400, "prompt is required; send a text or a list of token ids", param="prompt")
    n_probs = int(body.logprobs or 0) if body.n_probs is None else body.n_probs
    prompts = served.prompts(body.prompt)
    context.queue.check_count(len(prompts) * body.choices)
    requests = task_requests(served, body, [], n_probs or None, sampling.constraint(body), key)
    return [replace(request, ids=ids) for ids in served.text_ids(prompts) for request in requests], n_probs or None


def _legacy_logprobs(output: Output, logprobs: Sequence[TokenLogprob], lists: LongLists) -> dict[str, Any]:
    """OpenAI's form of log probabilities of completions, and llama.cpp's in ``content``."""
    size = sum(1 + len(p.top) for p in logprobs)
    tokens = [output.token_text(p.token) for p in logprobs]
    return {
        "content": lists.add((encode(output.probability(p)) for p in logprobs), size),
        "tokens": tokens,
        "token_logprobs": [max(p.logprob, MIN_LOGPROB) for p in logprobs],
        "top_logprobs": lists.add((encode({output.token_text(t): max(p, MIN_LOGPROB) for t, p in each.top}) for each in logprobs), size),
        "text_offset": [0, *accumulate(map(len, tokens[:-1]))] if tokens else [],
    }


async def _completion_chunks(context: Context, reader: Reader, frame: _Frame, body: OpenAICompletion) -> AsyncIterator[bytes]:
    try:
        async for item in reader.deltas():
            if item is None:
                yield PING
                continue
            output, delta, last = item
            text = delta.content
            logprobs = _legacy_logprobs(output, delta.logprobs, LongLists()) if delta.logprobs else None
            choice = {"index": output.task.index, "text": text, "logprobs": logprobs, "finish_reason": None}
            more = _chunk_members(body, output, delta)
            if delta.prompt_read is not None:
                more["prompt_progress"] = progress(output, delta.prompt_read)
            if text or delta.logprobs or delta.prompt_read is not None or "speculation" in more:
                yield event(frame.chunk([choice], **more))
            if last:
                end = {**choice, "text": "", "logprobs": None, "finish_reason": output.finish_reason}
                alone = not body.stream_options.include_usage and len(reader.outputs) == 1
                yield event(frame.chunk([end], **(_summary(context, reader.outputs, body.verbose) if alone else {})))
        if body.stream_options.include_usage:
            yield event(frame.chunk([], **_summary(context, reader.outputs, body.verbose)))
        yield DONE
    except Exception as error:
        yield event(api_error(error).openai())


# -- models, counts


async def models(context: Context, request: Request) -> Response:
    entry = context.served.model_entry()
    listed = {
        "name": entry["id"], "model": entry["id"], "type": "model", "tags": [], "capabilities": ["completion"], "details": {"format": "gguf"},
    }  # fmt: skip
    return json_response({"object": "list", "data": [entry], "models": [listed]})


async def model(context: Context, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in context.served.names:
        raise ApiError(404, f"there is no model {json.dumps(name[:100])}; this server has {', '.join(context.served.names)}", param="model")
    return json_response(context.served.model_entry())


async def input_tokens(context: Context, request: Request) -> Response:
    """Tokens of a chat request's prompt."""
    plan = await context.in_pool(request, read_chat, context.served, convert(request.json_object(), Chat), request.key)
    return json_response({"object": "response.input_tokens", "input_tokens": len(plan.prompt.ids)})
