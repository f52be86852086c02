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
from . import fields
from .answer import LEAST_LOGPROB, Answer, Delta, metrics, speculation, usage
from .conversation import read_chat, sequence_asks
from .errors import ApiError, api_error
from .http import DONE, PING, LongLists, Request, Response, encode, event, event_stream, json_response
from .native import native_result, probabilities
from .reading import Context, Reader
from .version import FINGERPRINT


def _identifier(kind: str = "chatcmpl-") -> str:
    return kind + secrets.token_urlsafe(24).replace("-", "x").replace("_", "y")


class _Frame:
    """What every object of one response begins with."""

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


class _Stream:
    """Options of a stream that several dialects have."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        options = fields.mapping(body, "stream_options")
        self.usage = fields.flag(options, "include_usage")
        self.usage_always = fields.flag(options, "continuous_usage_stats")
        self.timings = fields.flag(body, "timings_per_token")
        self.speculation = fields.flag(body, "speculation")
        self.verbose = fields.flag(body, "verbose")

    def more(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        """What a chunk says beside its choices."""
        out: dict[str, Any] = {}
        if self.timings and delta.prompt_read != 0:
            out["timings"] = answer.timings()
        if self.usage_always:
            out["usage"] = usage([answer])
        if self.speculation and delta.tokens:
            tokens, accepted = answer.shown(delta.tokens), max(0, len(delta.tokens) - 1) if delta.drafts else 0
            drafts = answer.shown_drafts(delta.drafts, accepted, tokens)
            out["speculation"] = {"tokens": tokens, "drafts": drafts, "accepted": accepted}
        return out


def progress(answer: Answer, read: int) -> dict[str, Any]:
    """How far a prompt is, as llama.cpp's server says it."""
    from .answer import job_prompt

    return {
        "total": len(answer.job.ask.ids),
        "cache": answer.stats.reused_tokens,
        "processed": read,
        "time_ms": round(job_prompt(answer.stats, answer.job, answer.prompt_read)[1]),
    }


# -- chat


async def chat(context: Context, request: Request) -> Response:
    body = request.json_object()
    stream, options = fields.flag(body, "stream"), _Stream(body)
    plan = await context.prepared(request, read_chat, context.served, body, request.key)
    reader = Reader(context, request, plan.asks, lambda job: plan.answer(job, context.served))
    frame = _Frame(context, "chat.completion.chunk" if stream else "chat.completion", _identifier())
    if stream:
        await reader.begin()
        return event_stream(_chat_chunks(context, reader, frame, options))
    answers = await reader.whole()
    parts = LongLists(request)
    choices = [_chat_choice(answer, parts) for answer in answers]
    return parts.response(frame.chunk(choices, **_summary(context, answers, options.verbose, parts)))


def _summary(context: Context, answers: Sequence[Answer], verbose: bool, parts: LongLists | None = None) -> dict[str, Any]:
    """What a whole response, or a stream's last chunk, says about all of it."""
    first = answers[0]
    out = {"usage": usage(answers), "timings": first.timings(), "speculation": speculation(first.stats), "metrics": metrics(first.stats)}
    if verbose or context.served.options.verbose:
        out["__verbose"] = native_result(context, first, {}, parts or LongLists())
    return out


def message(answer: Answer) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        out["reasoning_content"] = answer.reasoning
    if answer.calls:
        out["content"] = answer.content or None
        out["tool_calls"] = [tool_call(call, answer, i) for i, call in enumerate(answer.calls)]
    return out


def tool_call(call: Call, answer: Answer, i: int) -> dict[str, Any]:
    return {"id": f"call_{answer.job.number:x}_{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_choice(answer: Answer, parts: LongLists) -> dict[str, Any]:
    out = {"index": answer.job.index, "message": message(answer), "finish_reason": answer.finish_reason}
    if answer.logprobs:
        out["logprobs"] = {"content": probabilities(answer, parts)}
    return out


async def _chat_chunks(context: Context, reader: Reader, frame: _Frame, options: _Stream) -> AsyncIterator[bytes]:
    begun: set[int] = set()
    called: dict[int, int] = {}
    try:
        async for item in reader.deltas():
            if item is None:
                yield PING
                continue
            answer, delta, last = item
            index = answer.job.index

            if delta.prompt_read is not None:
                told = {"prompt_progress": progress(answer, delta.prompt_read)} | ({"timings": answer.timings()} if options.timings else {})
                yield frame.delta(index, {"role": "assistant", "content": None}, more=told)
                continue
            out = b""
            if index not in begun:
                begun.add(index)
                out = frame.delta(index, {"role": "assistant", "content": None})
            changes = _changes(answer, delta, called)
            if delta.logprobs or (options.speculation and delta.tokens):
                changes = changes or [{"content": ""}]
            more = options.more(answer, delta) if changes else {}
            for i, change in enumerate(changes):
                end = i == len(changes) - 1
                probabilities = [answer.probability(p) for p in delta.logprobs] if end else []
                out += frame.delta(index, change, None, probabilities, more if end else {})
            if out:
                yield out
            if last:
                alone = not options.usage and len(reader.answers) == 1
                summary = {k: v for k, v in _summary(context, reader.answers, options.verbose).items() if k != "usage"} if alone else {}
                yield frame.delta(index, {}, answer.finish_reason, more=summary)
        if options.usage:
            yield event(frame.chunk([], **_summary(context, reader.answers, options.verbose)))
        yield DONE
    except Exception as error:
        yield event(api_error(error).openai())


def _changes(answer: Answer, delta: Delta, called: dict[int, int]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for piece in delta.pieces:
        if piece.reasoning:
            out.append({"reasoning_content": piece.reasoning})
        if piece.content:
            out.append({"content": piece.content})
        if piece.call is not None:
            i = called[answer.job.index] = called.get(answer.job.index, -1) + 1
            out.append({"tool_calls": [{"index": i, **tool_call(piece.call, answer, i)}]})
    return out


# -- completions


async def completions(context: Context, request: Request) -> Response:
    body = request.json_object()
    stream, options = fields.flag(body, "stream"), _Stream(body)
    asks, n_probs = await context.prepared(request, _read_completions, context, body, request.key)
    reader = Reader(context, request, asks, lambda job: Answer(job, context.served.tokenizer, None, n_probs is not None))
    frame = _Frame(context, "text_completion", _identifier("cmpl-"))
    if stream:
        await reader.begin()
        return event_stream(_completion_chunks(context, reader, frame, options))
    answers, parts = await reader.whole(), LongLists(request)
    choices = [
        {
            "index": a.job.index,
            "text": a.text,
            "logprobs": _legacy(a, a.logprobs, parts) if a.logprobs else None,
            "finish_reason": a.finish_reason,
        }
        for a in answers
    ]
    return parts.response(frame.chunk(choices, **_summary(context, answers, options.verbose, parts)))


def _read_completions(context: Context, body: Mapping[str, Any], key: str) -> tuple[list[Any], int | None]:
    served = context.served
    served.check_model(body)
    if "prompt" not in body:
        raise ApiError(400, "prompt is required; send a text or a list of token ids", param="prompt")
    asked = "n_probs" if "n_probs" in body else "logprobs"
    n_probs = fields.whole({**body, asked: int(v) if isinstance(v := body.get(asked, 0), bool) else v}, asked, 0, 0, 1024) or None
    prompts = served.prompts(body["prompt"])
    context.queue.check_count(len(prompts) * fields.answers(body))
    constraint = fields.constraint(body)
    progress_asked = fields.flag(body, "return_progress") and fields.flag(body, "stream")
    every_step = fields.flag(body, "speculation")
    asks = sequence_asks(served, body, [], n_probs, constraint, key, progress_asked, every_step)
    return [replace(ask, ids=ids) for ids in served.text_ids(prompts) for ask in asks], n_probs


def _legacy(answer: Answer, told: Sequence[TokenLogprob], parts: LongLists) -> dict[str, Any]:
    """OpenAI's form of log probabilities of completions, and llama.cpp's beside it."""
    size = sum(1 + len(p.top) for p in told)
    tokens = [answer.token_text(p.token) for p in told]
    return {
        "content": parts.add((encode(answer.probability(p)) for p in told), size),
        "tokens": tokens,
        "token_logprobs": [max(p.logprob, LEAST_LOGPROB) for p in told],
        "top_logprobs": parts.add((encode({answer.token_text(t): max(p, LEAST_LOGPROB) for t, p in each.top}) for each in told), size),
        "text_offset": [0, *accumulate(map(len, tokens[:-1]))] if tokens else [],
    }


async def _completion_chunks(context: Context, reader: Reader, frame: _Frame, options: _Stream) -> AsyncIterator[bytes]:
    try:
        async for item in reader.deltas():
            if item is None:
                yield PING
                continue
            answer, delta, last = item
            text = "".join(piece.content for piece in delta.pieces)
            logprobs = _legacy(answer, delta.logprobs, LongLists()) if delta.logprobs else None
            choice = {"index": answer.job.index, "text": text, "logprobs": logprobs, "finish_reason": None}
            more = options.more(answer, delta)
            if delta.prompt_read is not None:
                more["prompt_progress"] = progress(answer, delta.prompt_read)
            if text or delta.logprobs or delta.prompt_read is not None or "speculation" in more:
                yield event(frame.chunk([choice], **more))
            if last:
                end = {**choice, "text": "", "logprobs": None, "finish_reason": answer.finish_reason}
                summary = _summary(context, reader.answers, options.verbose) if len(reader.answers) == 1 and not options.usage else {}
                yield event(frame.chunk([end], **summary))
        if options.usage:
            yield event(frame.chunk([], **_summary(context, reader.answers, options.verbose)))
        yield DONE
    except Exception as error:
        yield event(api_error(error).openai())


# -- the rest


async def models(context: Context, request: Request) -> Response:
    entry = context.served.model_entry()
    listed = {
        "name": entry["id"],
        "model": entry["id"],
        "type": "model",
        "tags": [],
        "capabilities": ["completion"],
        "details": {"format": "gguf"},
    }
    return json_response({"object": "list", "data": [entry], "models": [listed]})


async def model(context: Context, request: Request) -> Response:
    name = request.path.rpartition("/models/")[2]
    if name not in context.served.names:
        raise ApiError(404, f"there is no model {json.dumps(name[:100])}; this server has {', '.join(context.served.names)}", param="model")
    return json_response(context.served.model_entry())


async def input_tokens(context: Context, request: Request) -> Response:
    """How many tokens a chat request's prompt has."""
    plan = await context.in_pool(request, read_chat, context.served, request.json_object(), request.key)
    return json_response({"object": "response.input_tokens", "input_tokens": len(plan.prompt.ids)})
