"""llama.cpp's own dialect: /completion, the tokenizer, the template, and what the server says of itself."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..cancel import check
from ..ggml.library import lost_reason
from . import fields
from .answer import Answer, Delta, job_prompt, metrics, speculation
from .conversation import read_chat, render_chat, sequence_asks
from .errors import ApiError, api_error
from .http import JSON_TYPE, PING, LongLists, Pauses, Request, Response, Stream, encode, event, event_stream, json_response
from .jobs import Ask, Job
from .reading import Context, Reader
from .resumable import HEADER, ResumableStream, key_of
from .version import FINGERPRINT, VERSION

MOST_PICKED = 256  # fields of an answer that are asked for by name
AT_ONCE = 4096  # tokens whose JSON is made without a turn of other tasks
MOST_TEXT = 1 << 20  # characters that /tokenize takes, or 16 for each token of the context
_STOP_TYPES = {"end": "eos", "stop": "word", "length": "limit", "context": "limit"}


# -- /completion


async def completion(context: Context, request: Request) -> Response:
    asks, n_probs = await context.prepared(request, _read, context, request.json_object(), request.key)
    return await answered(context, request, asks, lambda job: Answer(job, context.served.tokenizer, None, n_probs is not None))


async def answered(context: Context, request: Request, asks: list[Ask], make: Callable[[Job], Answer]) -> Response:
    """The sequences' answers in this dialect, as they come or whole."""
    body = request.json_object()
    stream = fields.flag(body, "stream")
    reader = Reader(context, request, asks, make)
    if stream:
        await reader.begin()
        return event_stream(_chunks(context, reader, body))
    parts = LongLists(request)
    results, pauses = [], Pauses()
    for answer in await reader.whole():
        results.append(native_result(context, answer, body, parts))
        await pauses.give_way()
    return parts.response(results[0] if len(results) == 1 else results)


def _read(context: Context, body: Mapping[str, Any], key: str) -> tuple[list[Ask], int | None]:
    served = context.served
    served.check_model(body)
    if "prompt" not in body:
        raise ApiError(400, "prompt is required; send a text or a list of token ids", param="prompt")
    fields.whole(body, "id_slot", -1, -1, served.options.slots - 1)  # slots are given by the engine: the number is checked, not obeyed
    n_probs, constraint, progress = read_options(body)
    every_step = fields.flag(body, "speculation")
    response_fields(body)
    prompts = served.prompts(body["prompt"])
    context.queue.check_count(len(prompts) * fields.answers(body))
    asks = sequence_asks(served, body, [], n_probs, constraint, key, progress, every_step)
    return [replace(ask, ids=ids) for ids in served.text_ids(prompts) for ask in asks], n_probs


def read_options(body: Mapping[str, Any]) -> tuple[int | None, tuple[str, str] | None, bool]:
    """How many log probabilities of each token are told, None for none; the constraint; whether the progress of the prompt is told."""
    told = fields.flag(body, "return_progress") and fields.flag(body, "stream")
    return fields.whole(body, "n_probs", 0, 0, 1024) or None, fields.constraint(body), told


def response_fields(body: Mapping[str, Any]) -> list[str]:
    value = body.get("response_fields", [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(value) > MOST_PICKED:
        raise fields.wrong("response_fields", value, f"a list of at most {MOST_PICKED} names")
    return value


def probabilities(answer: Answer, parts: LongLists) -> Any:
    """Those of a whole answer."""
    return parts.add((encode(answer.probability(p)) for p in answer.logprobs), sum(1 + len(p.top) for p in answer.logprobs))


def native_result(context: Context, answer: Answer, body: Mapping[str, Any], parts: LongLists) -> dict[str, Any]:
    """The whole answer of one sequence."""
    served, stats, ask = context.served, answer.stats, answer.job.ask
    streams, wanted = body.get("stream") is True, response_fields(body)
    out = {
        "index": answer.job.index,
        "content": "" if streams else answer.text,
        "tokens": answer.tokens if body.get("return_tokens") is True and not streams else [],
        "id_slot": answer.job.handle.slot if answer.job.handle is not None else -1,
        "stop": True,
        "model": served.name,
        "tokens_predicted": stats.emitted,
        "tokens_evaluated": len(ask.ids),
        "generation_settings": settings(context, ask, stats.seed),
        "prompt": served.tokenizer.decode(ask.ids, special=True),
        "has_new_line": "\n" in answer.text,
        "truncated": False,
        "stop_type": _STOP_TYPES.get(stats.stop_reason, "none"),
        "stopping_word": answer.stopping_word,
        "tokens_cached": len(ask.ids) + max(0, stats.emitted - 1),
        "timings": answer.timings(),
        "speculation": speculation(stats),
        "metrics": metrics(stats),
    }
    if answer.logprobs and not streams:
        out["completion_probabilities"] = probabilities(answer, parts)
    return _picked(out, wanted) if wanted else out


def _picked(value: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """The members named like "a/b", under their last name."""
    out: dict[str, Any] = {}
    for path in wanted:
        found: Any = value
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            out[path.rpartition("/")[2]] = found
    return out


def settings(context: Context, ask: Ask, seed: int | None = None) -> dict[str, Any]:
    """What decides about the tokens, by llama.cpp's names; samplers that are not here say so by their neutral values.
    ``seed``: the one that was drawn."""
    s = ask.sampling or context.served.limits.sampling
    bias = [{"token": i, "bias": b if b > -1e30 else None} for i, b in s.logit_bias.items()]
    n = -1 if ask.max_tokens is None else ask.max_tokens
    return {
        "seed": seed if seed is not None else s.seed if s.seed is not None else (1 << 32) - 1,
        "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p, "typical_p": s.typical_p,
        "repeat_last_n": s.repeat_last_n, "repeat_penalty": s.repeat_penalty, "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty, "min_keep": s.min_keep, "samplers": list(s.samplers),
        "dynatemp_range": 0.0, "xtc_probability": 0.0, "top_n_sigma": -1.0, "dry_multiplier": 0.0, "mirostat": 0, "adaptive_target": -1.0,
        "adaptive_decay": 0.0, "stop": list(ask.stop), "max_tokens": n, "n_predict": n, "ignore_eos": ask.ignore_end,
        "logit_bias": bias + (context.served.end_bias() if ask.ignore_end else []), "n_probs": s.logprobs or 0, "post_sampling_probs": s.logprobs_after,
        "grammar": s.grammar or "", "grammar_lazy": bool(s.triggers),
        "grammar_triggers": [_trigger(t) for t in s.triggers], "json_schema": json.loads(s.json_schema) if s.json_schema else None, "cache_prompt": ask.reuse,
        "speculative.types": ",".join(context.served.session.methods) or "none" if ask.mode is None else "none",
    }  # fmt: skip


def _trigger(trigger: fields.Trigger) -> dict[str, Any]:
    if isinstance(trigger, int):
        return {"type": 0, "token": trigger, "value": ""}
    return {"type": 1, "value": trigger} if isinstance(trigger, str) else {"type": 3 if trigger.full else 2, "value": trigger.text}


async def _chunks(context: Context, reader: Reader, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    with_timings = body.get("timings_per_token") is True
    try:
        async for item in reader.deltas():
            if item is None:
                yield PING
                continue
            answer, delta, last = item
            text = "".join(piece.content for piece in delta.pieces)
            if delta.tokens or text or delta.prompt_read is not None:
                yield event(_chunk(context, answer, delta, text, with_timings, body.get("speculation") is True))
            if last:
                yield event(native_result(context, answer, body, LongLists()))
    except Exception as error:
        yield event(api_error(error).openai())


def _chunk(context: Context, answer: Answer, delta: Delta, text: str, with_timings: bool, with_drafts: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "index": answer.job.index,
        "content": text,
        "tokens": delta.tokens,
        "stop": False,
        "id_slot": answer.job.handle.slot if answer.job.handle is not None else -1,
        "tokens_predicted": answer.stats.emitted,
        "tokens_evaluated": len(answer.job.ask.ids),
    }
    if with_timings:
        out["timings"] = answer.timings()
    if delta.logprobs:
        out["completion_probabilities"] = [answer.probability(p) for p in delta.logprobs]
    if delta.prompt_read is not None:
        out["prompt_progress"] = {
            "total": len(answer.job.ask.ids), "cache": answer.stats.reused_tokens, "processed": delta.prompt_read,
            "time_ms": round(job_prompt(answer.stats, answer.job, answer.prompt_read)[1]),
        }  # fmt: skip
    if with_drafts and delta.tokens:
        out["speculation"] = {"tokens": delta.tokens, "drafts": delta.drafts}
    return out


# -- tokenizer and template


async def tokenize(context: Context, request: Request) -> Response:
    body = request.json_object()
    pieces = fields.flag(body, "with_pieces")
    ids = await context.in_pool(request, _tokens, context, body)
    if len(ids) <= AT_ONCE:
        return Response(b'{"tokens":[%b]}' % _token_list(context, ids, pieces), media_type=JSON_TYPE)
    request.large = True
    return Stream(_token_chunks(context, ids, pieces), media_type=JSON_TYPE)


def _tokens(context: Context, body: Mapping[str, Any]) -> list[int]:
    content = body.get("content", body.get("prompt", ""))
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, (str, int)) and not isinstance(part, bool) for part in parts):
        raise fields.wrong("content", content, "a text, or a list of texts and token ids")
    most = max(MOST_TEXT, 16 * context.served.n_ctx)
    if (size := sum(len(part) for part in parts if isinstance(part, str))) > most:
        raise ApiError(400, f"content has {size} characters, and {most} are encoded at once; send parts of it", param="content")
    special, bos = fields.flag(body, "parse_special", True), fields.flag(body, "add_special")
    ids: list[int] = []
    for i, part in enumerate(parts):
        check()
        ids += [part] if isinstance(part, int) else context.served.tokenizer.encode(part, special, bos and i == 0)
    return ids


async def _token_chunks(context: Context, ids: list[int], pieces: bool) -> AsyncIterator[bytes]:
    yield b'{"tokens":['
    for at in range(0, len(ids), AT_ONCE):
        yield (b"," if at else b"") + _token_list(context, ids[at : at + AT_ONCE], pieces)
    yield b"]}"


def _token_list(context: Context, ids: list[int], pieces: bool) -> bytes:
    """Their JSON, without brackets."""
    if not pieces:
        return encode(ids)[1:-1]
    piece = context.served.tokenizer.piece
    return b",".join([_token_json(i, piece(i, special=True)) for i in ids])


@lru_cache(1 << 14)
def _token_json(token: int, data: bytes) -> bytes:
    try:
        return encode({"id": token, "piece": data.decode()})
    except UnicodeDecodeError:
        return encode({"id": token, "piece": list(data)})


async def detokenize(context: Context, request: Request) -> Response:
    return json_response({"content": await context.in_pool(request, _text, context, request.json_object())})


def _text(context: Context, body: Mapping[str, Any]) -> str:
    ids = body.get("tokens", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise fields.wrong("tokens", ids, "a list of token ids")
    n = context.served.tokenizer.n_vocab
    outside = next((i for i in ids if not 0 <= i < n), None)
    if outside is not None:
        raise fields.wrong("tokens", outside, f"ids below {n}")
    return context.served.tokenizer.decode(ids, special=True)


async def apply_template(context: Context, request: Request) -> Response:
    return json_response({"prompt": await context.in_pool(request, render_chat, context.served, request.json_object())})


async def count_chat_tokens(context: Context, request: Request) -> Response:
    plan = await context.in_pool(request, read_chat, context.served, request.json_object(), request.key)
    return json_response({"input_tokens": len(plan.prompt.ids)})


# -- about the server


async def health(context: Context, request: Request) -> Response:
    """Whether it works: 503 where a worker that it computes on is lost, or there is work and no step has ended for a while."""
    age = context.queue.step_age()
    if (why := lost_reason([name for b in context.served.session.backends for name in b.workers])) is not None:
        raise ApiError(503, why)
    if context.queue.stuck:
        raise ApiError(503, f"no step has ended for {age:.0f} s although there is work", headers={"retry-after": "30"})
    return json_response({"status": "ok", "last_step_seconds": round(age, 3)})


async def ready(context: Context, request: Request) -> Response:
    """Whether it takes requests."""
    if context.queue.draining:
        raise ApiError(503, "the server is ending and takes no more requests", headers={"retry-after": "5"})
    return json_response({"status": "ready"})


async def props(context: Context, request: Request) -> Response:
    served, queue = context.served, context.queue
    configuration = served.session.configuration()
    ask = Ask([], served.limits.max_tokens, served.limits.sampling)
    return json_response({
        "default_generation_settings": {"n_ctx": served.n_ctx, "params": settings(context, ask)},
        "total_slots": served.options.slots,
        "model_alias": served.name, "model_path": served.path, "modalities": {"vision": False, "audio": False},
        **({"chat_template_tool_use": served.tool_template.source} if served.tool_template is not None else {}),
        "chat_template": served.template.source, "bos_token": _token_text(context, served.tokenizer.bos), "eos_token": _token_text(context, served.eos),
        "build_info": FINGERPRINT, "is_sleeping": False,
        "pyspec": {
            "version": VERSION, "drafter": configuration.drafter, "device": configuration.device, "threads": configuration.threads, "width": configuration.width,
            "widths": configuration.widths, "kv_type": configuration.kv_type, "kernels": configuration.kernels, "memory": queue.engine.memory(), "notes": configuration.notes,
            "prefix_bytes": queue.engine.prefix_bytes, "graph_bytes": queue.engine.graph_bytes, "queue": {"requests": queue.limits.requests, "tokens": queue.limits.tokens},
        },
    })  # fmt: skip


def _token_text(context: Context, token: int | None) -> str:
    return context.served.tokenizer.piece(token, special=True).decode("utf-8", "replace") if token is not None else ""


async def slots(context: Context, request: Request) -> Response:
    if not context.served.options.show_slots:
        raise ApiError(501, "this server does not show its slots")
    if request.query_params.get("fail_on_no_slot") and len(context.queue.processing) >= context.served.options.slots:
        raise ApiError(503, "no slot is free", headers={"retry-after": str(context.queue.retry_after)})
    return json_response(slot_list(context))


def slot_list(context: Context) -> list[dict[str, Any]]:
    """What every slot does."""
    by_slot: dict[int, Job] = {job.handle.slot: job for job in context.queue.processing if job.handle is not None}
    out = []
    for i in range(context.served.options.slots):
        job = by_slot.get(i)
        entry: dict[str, Any] = {
            "id": i, "n_ctx": context.served.n_ctx, "speculative": context.served.drafter, "is_processing": job is not None,
            "next_token": [{"has_next_token": False, "n_remain": -1, "n_decoded": 0}],
        }  # fmt: skip
        if job is not None:
            stats = job.stats
            remain = -1 if job.ask.max_tokens is None else job.ask.max_tokens - stats.emitted
            entry |= {
                "id_task": job.number, "n_prompt_tokens": len(job.ask.ids), "n_prompt_tokens_cache": stats.reused_tokens,
                "n_prompt_tokens_processed": job.handle.prompt_read if job.handle is not None else 0,
                "next_token": [{"has_next_token": True, "n_remain": remain, "n_decoded": stats.emitted}],
                "phase": "decode" if stats.emitted else "prompt", "timings": Answer(job, context.served.tokenizer).timings(),
            }  # fmt: skip
        out.append(entry)
    return out


async def lora_adapters(context: Context, request: Request) -> Response:
    if request.method == "POST":
        raise ApiError(501, "adapters are not supported here; merge the adapter into the model file")
    return json_response([])


# -- streams that go on without their reader


def keep_stream(context: Context, request: Request, response: Response) -> None:
    """Makes ``response`` one that goes on without its reader, if that was asked for."""
    if not isinstance(response, Stream) or (key := key_of(request, request.headers.get(HEADER, ""))) is None:
        return
    ended, request.on_end = request.on_end, []
    response.body_iterator = context.streams.begin(key, response.body_iterator, ended).follow(0)


def _stream_asked(context: Context, request: Request) -> tuple[tuple[str, str], ResumableStream | None]:
    key = key_of(request, request.query_params.get("conv_id", ""))
    if key is None:
        raise ApiError(400, "conv_id is missing: send the X-Conversation-Id that the stream began with", param="conv_id")
    return key, context.streams.get(key)


async def read_stream(context: Context, request: Request) -> Response:
    _, stream = _stream_asked(context, request)
    if stream is None:
        raise ApiError(404, "there is no stream of this conv_id, or it has ended too long ago", param="conv_id")
    at = request.query_params.get("from", "0")
    if not at.isdecimal() or len(at) > 18 or not stream.first <= int(at) <= stream.size:
        raise ApiError(400, f"from is {at[:40]!r}; bytes {stream.first} to {stream.size} of this stream are here", param="from")
    return event_stream(stream.follow(int(at)))


async def end_stream(context: Context, request: Request) -> Response:
    key, _ = _stream_asked(context, request)
    context.streams.end(key)
    return Response(status_code=204)


async def look_up_streams(context: Context, request: Request) -> Response:
    """What is known of the ids that the client knows."""
    names = request.json_object().get("conversation_ids", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > 1024:
        raise fields.wrong("conversation_ids", names, "a list of at most 1024 ids")
    told: list[dict[str, Any]] = [
        {"conversation_id": n, "is_done": bool(s.over), "total_bytes": s.size, "started_at": int(s.began), "completed_at": int(s.over)}
        for n, s in context.streams.named(request.key, {name for name in names if name})
    ]
    return json_response(told)
