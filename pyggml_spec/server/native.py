"""llama.cpp's own dialect: /completion, the tokenizer, the template, and the state of the server."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ..cancel import check
from ..ggml.library import lost_reason
from . import http, sampling
from .bodies import Adapter, Chat, Completion, OpenAICompletion, convert, parse, wrong
from .conversation import adapters_of, render_chat, task_requests
from .errors import ApiError
from .http import LongLists, Pauses, Request, Response, Stream, encode, event, event_stream, json_response
from .output import Delta, Output, metrics, progress, speculation, timings
from .reading import Context, ResponseEncoder, respond
from .resumable import HEADER, ResumableStream, key_of
from .served import texts_and_ids
from .tasks import Task, TaskRequest

LIVE_SECONDS, MAX_WATCHERS = 0.2, 16  # between states of the slots; pages that watch them
IDLE = {"tokens_per_step": 0, "predicted_per_second": 0}  # timings of a free slot
MAX_CHARACTERS = 1 << 20  # that /tokenize takes, or 16 for each token of the context
_STOP_TYPES = {"end": "eos", "stop": "word", "length": "limit", "context": "limit"}
_VERBOSE = Completion()


async def completion(context: Context, request: Request) -> Response:
    body = parse(request, Completion)
    requests = await context.prepared(request, read_completion, context, body, request.key)
    return await respond(context, request, body, requests, Encoder)


def read_completion(
    context: Context, body: Completion | OpenAICompletion, key: str, ids_of: Callable[[Sequence[Any]], list[list[int]]] | None = None
) -> list[TaskRequest]:
    """The sequences of one or several prompts. ``ids_of``: their tokens, None for those of their texts. Raises ApiError."""
    served, n_probs = context.served, body.n_probs
    prompt_ids = ids_of or served.text_ids
    if body.prompt is None:
        raise ApiError(400, "prompt is required; send a text or a list of token ids", param="prompt")
    if isinstance(body, Completion):
        check_slot(context, body)
    elif n_probs is None:
        n_probs = int(body.logprobs or 0)
    prompts = served.prompts(body.prompt)
    context.queue.check_count(len(prompts) * body.choices)
    requests = task_requests(served, body, [], n_probs or None, sampling.constraint(body), key)
    return [replace(request, ids=ids) for ids in prompt_ids(prompts) for request in requests]


def check_slot(context: Context, body: Completion) -> None:
    slots = context.served.options.slots
    if not -1 <= body.id_slot < slots:
        raise wrong("id_slot", body.id_slot, f"a whole number from -1 to {slots - 1}")


class Encoder(ResponseEncoder):
    """Results as objects; in a stream chunks of them."""

    async def whole(self) -> Response:
        lists, results, pauses = LongLists(self.request), [], Pauses()
        for output in self.outputs:
            results.append(native_result(self.context, output, lists, self.body))
            await pauses.give_way()
        return lists.response(results[0] if len(results) == 1 else results)

    def delta(self, output: Output, delta: Delta, last: bool) -> bytes:
        out, body = b"", self.body
        if delta.tokens or delta.content or delta.prompt_read is not None:
            chunk: dict[str, Any] = {
                "index": output.task.index, "content": delta.content, "tokens": delta.tokens, "stop": False, "id_slot": output.task.slot,
                "tokens_predicted": output.stats.emitted, "tokens_evaluated": len(output.task.request.ids),
            }  # fmt: skip
            if body.timings_per_token:
                chunk["timings"] = output.timings()
            if delta.logprobs:
                chunk["completion_probabilities"] = [output.probability(p) for p in delta.logprobs]
            if delta.prompt_read is not None:
                chunk["prompt_progress"] = progress(output, delta.prompt_read)
            if body.speculation and delta.tokens:
                chunk["speculation"] = {"tokens": delta.tokens, "drafts": delta.drafts}
            out = event(chunk)
        return out + event(native_result(self.context, output, LongLists(), body)) if last else out


def probabilities(output: Output, lists: LongLists) -> Any:
    """Those of a whole response."""
    return lists.add((encode(output.probability(p)) for p in output.logprobs), sum(1 + len(p.top) for p in output.logprobs))


def native_result(context: Context, output: Output, lists: LongLists, body: Completion = _VERBOSE) -> dict[str, Any]:
    """The whole output of one sequence; in a stream without what came before."""
    served, stats, request = context.served, output.stats, output.task.request
    out = {
        "index": output.task.index,
        "content": "" if body.stream else output.text,
        "tokens": output.tokens if body.return_tokens is True and not body.stream else [],
        "id_slot": output.task.slot,
        "stop": True,
        "model": served.name,
        "tokens_predicted": stats.emitted,
        "tokens_evaluated": len(request.ids),
        "generation_settings": settings(context, request, stats.seed),
        "prompt": served.tokenizer.decode(request.ids, special=True),
        "has_new_line": "\n" in output.text,
        "truncated": False,
        "stop_type": _STOP_TYPES.get(stats.stop_reason, "none"),
        "stopping_word": output.stopping_word,
        "tokens_cached": len(request.ids) + max(0, stats.emitted - 1),
        "timings": output.timings(),
        "speculation": speculation(stats),
        "metrics": metrics(stats),
    }
    if output.logprobs and not body.stream:
        out["completion_probabilities"] = probabilities(output, lists)
    picked: dict[str, Any] = {}
    for path in body.response_fields:  # members named like "a/b", under their last name
        found: Any = out
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            picked[path.rpartition("/")[2]] = found
    return picked if body.response_fields else out


def settings(context: Context, request: TaskRequest, seed: int | None = None) -> dict[str, Any]:
    """Settings by llama.cpp's names. ``seed``: the one that was drawn."""
    s = request.sampling or context.served.limits.sampling
    biases = [*s.logit_bias.items(), *((i, -math.inf) for i in (context.served.ends if request.ignore_end else ()))]
    bias = [{"token": i, "bias": b if b > -1e30 else None} for i, b in biases]
    n = -1 if request.max_tokens is None else request.max_tokens
    return {
        **{name: getattr(s, name) for name in sampling.SETTINGS},
        "seed": seed if seed is not None else s.seed if s.seed is not None else (1 << 32) - 1, "samplers": list(s.samplers),
        "dry_sequence_breakers": list(s.dry_sequence_breakers), "stop": list(request.stop), "max_tokens": n, "n_predict": n, "ignore_eos": request.ignore_end,
        "logit_bias": bias, "n_probs": s.logprobs or 0, "post_sampling_probs": s.logprobs_after,
        "grammar": s.grammar or "", "grammar_lazy": bool(s.triggers),
        "grammar_triggers": [sampling.shown_trigger(t) for t in s.triggers], "json_schema": json.loads(s.json_schema) if s.json_schema else None, "cache_prompt": request.reuse,
        "lora": [{"id": i, "scale": scale} for i, scale in request.adapters or ()],
        "speculative.types": ",".join(context.served.session.methods) or "none" if request.mode is None else "none",
    }  # fmt: skip


# -- tokenizer and template


class Tokenize(Struct):
    content: Any = None
    prompt: Any = None
    with_pieces: bool = False
    parse_special: bool = True
    add_special: bool = False


async def tokenize(context: Context, request: Request) -> Response:
    body, lists, piece = convert(request.json_object(), Tokenize), LongLists(request), context.served.tokenizer.piece
    ids = await context.in_pool(request, _tokens, context, body)
    items = (_token_json(i, piece(i, special=True)) for i in ids) if body.with_pieces else map(b"%d".__mod__, ids)
    return lists.response({"tokens": lists.add(items, len(ids))})


def _tokens(context: Context, body: Tokenize) -> list[int]:
    content = body.content if body.content is not None else body.prompt if body.prompt is not None else ""
    if (parts := texts_and_ids(content)) is None:
        raise wrong("content", content, "a text, or a list of texts and token ids")
    most = max(MAX_CHARACTERS, 16 * context.served.n_ctx)
    if (size := sum(len(part) for part in parts if isinstance(part, str))) > most:
        raise ApiError(400, f"content has {size} characters, and {most} are encoded at once; send parts of it", param="content")
    ids: list[int] = []
    for i, part in enumerate(parts):
        check()
        ids += [part] if isinstance(part, int) else context.served.tokenizer.encode(part, body.parse_special, body.add_special and i == 0)
    return ids


@lru_cache(1 << 14)
def _token_json(token: int, data: bytes) -> bytes:
    try:
        return encode({"id": token, "piece": data.decode()})
    except UnicodeDecodeError:
        return encode({"id": token, "piece": list(data)})


async def detokenize(context: Context, request: Request) -> Response:
    text = await context.in_pool(request, _text, context, request.json_object().get("tokens", []))
    return json_response({"content": text, "prompt": text})  # llama.cpp's name and vLLM's


async def tokenizer_info(context: Context, request: Request) -> Response:
    """vLLM's, for lm-eval's remote tokenizer."""
    served = context.served
    ends = {"bos_token": _token_text(context, served.tokenizer.bos) or None, "eos_token": _token_text(context, served.eos) or None}
    return json_response({**ends, "chat_template": served.template.source})


def _text(context: Context, ids: Any) -> str:
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise wrong("tokens", ids, "a list of token ids")
    n = context.served.tokenizer.n_vocab
    outside = next((i for i in ids if not 0 <= i < n), None)
    if outside is not None:
        raise wrong("tokens", outside, f"ids below {n}")
    return context.served.tokenizer.decode(ids, special=True)


async def apply_template(context: Context, request: Request) -> Response:
    return json_response({"prompt": await context.in_pool(request, render_chat, context.served, convert(request.json_object(), Chat))})


# -- state of the server


async def health(context: Context, request: Request) -> Response:
    """503 where a worker is lost, or there is work and no step has ended for a while."""
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
    defaults = TaskRequest([], served.limits.max_tokens, served.limits.sampling)
    return json_response({
        "default_generation_settings": {"n_ctx": served.n_ctx, "params": settings(context, defaults)},
        "total_slots": served.options.slots,
        "model_alias": served.name, "model_path": served.path, "modalities": {"vision": "image" in served.media, "audio": "audio" in served.media},
        **({"chat_template_tool_use": served.tool_template.source} if served.tool_template is not None else {}),
        "chat_template": served.template.source, "bos_token": _token_text(context, served.tokenizer.bos), "eos_token": _token_text(context, served.eos),
        "build_info": http.FINGERPRINT, "is_sleeping": False,
        "pyspec": {
            "version": http.VERSION, "drafter": configuration.drafter, "device": configuration.device, "threads": configuration.threads, "width": configuration.width,
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
    """The state of every slot."""
    served, out = context.served, []
    by_slot: dict[int, Task] = {task.slot: task for task in context.queue.processing}
    for i in range(served.options.slots):
        entry: dict[str, Any] = {
            "id": i, "n_ctx": served.n_ctx, "speculative": served.drafter, "is_processing": i in by_slot,
            "next_token": [{"has_next_token": False, "n_remain": -1, "n_decoded": 0}],
        }  # fmt: skip
        if (task := by_slot.get(i)) is not None and task.handle is not None:
            stats, most = task.stats, task.request.max_tokens
            entry |= {
                "id_task": task.number, "n_prompt_tokens": len(task.request.ids), "n_prompt_tokens_cache": stats.reused_tokens,
                "n_prompt_tokens_processed": task.handle.prompt_read, "phase": "decode" if stats.emitted else "prompt",
                "next_token": [{"has_next_token": True, "n_remain": -1 if most is None else most - stats.emitted, "n_decoded": stats.emitted}],
                "timings": timings(stats, task),
            }  # fmt: skip
        out.append(entry)
    return out


async def live(context: Context, request: Request) -> Response:
    """/pyspec/live: the state of every slot, five times a second, for the page."""
    if request.method == "HEAD":  # the states have no end
        return Response(headers=http.STREAM_HEADERS)
    if context.watchers >= MAX_WATCHERS:
        raise ApiError(429, f"{MAX_WATCHERS} pages watch this server already; close one of them", headers={"retry-after": "30"})
    context.watchers += 1
    request.on_end.append(lambda: setattr(context, "watchers", context.watchers - 1))
    return event_stream(_states(context))


async def _states(context: Context) -> AsyncIterator[bytes]:
    """Until the server drains, which waits for all readers."""
    queue, emitted, at = context.queue, context.queue.engine.stats.emitted, time.perf_counter()
    while not queue.draining:
        batch, now, before = queue.engine.stats, time.perf_counter(), emitted
        emitted = batch.emitted
        slots = [
            {
                "id": slot["id"], "phase": slot.get("phase", "idle"), "prompt_tokens": slot.get("n_prompt_tokens", 0),
                "prompt_read": slot.get("n_prompt_tokens_processed", 0), "reused": slot.get("n_prompt_tokens_cache", 0),
                "emitted": slot["next_token"][0]["n_decoded"], "tokens_per_step": slot.get("timings", IDLE)["tokens_per_step"],
                "tokens_per_second": slot.get("timings", IDLE)["predicted_per_second"],
            }
            for slot in slot_list(context)
        ]  # fmt: skip
        yield event({
            "slots": slots, "waiting": queue.waiting, "tokens_per_second": (emitted - before) / max(1e-6, now - at), "steps": batch.steps,
            "longest_wait_ms": 1000 * batch.longest_wait, "prefix_bytes": queue.engine.prefix_bytes,
        })  # fmt: skip
        at = now
        await asyncio.sleep(LIVE_SECONDS)


async def lora_adapters(context: Context, request: Request) -> Response:
    """The adapters with the scales of requests that choose none; POST sets these, 0 for those that it does not list."""
    served, adapters = context.served, context.served.session.target.weights.adapters
    if request.method == "POST":
        try:
            given = msgspec.convert(msgspec.json.decode(request.data), list[Adapter])
        except (msgspec.DecodeError, msgspec.ValidationError):
            raise ApiError(400, 'the body is no list of adapters; send a list like [{"id": 0, "scale": 0.5}]') from None
        chosen = adapters_of(served, given)
        if adapters is not None:
            adapters.default = chosen
        return json_response({"success": True})
    scales = dict(adapters.default) if adapters is not None else {}
    listed = adapters.all if adapters is not None else ()
    return json_response(
        [{"id": i, "path": str(a.path), "scale": scales.get(i, 0.0), "task_name": "", "prompt_prefix": ""} for i, a in enumerate(listed)]
    )


# -- resumable streams


def keep_stream(context: Context, request: Request, response: Response) -> None:
    """Makes ``response`` a resumable stream, if its request has the header."""
    if not isinstance(response, Stream) or (key := key_of(request, request.headers.get(HEADER, ""))) is None:
        return
    ended, request.on_end = request.on_end, []
    response.body_iterator = context.streams.begin(key, response.body_iterator, ended).follow(0)


def _stream_of(context: Context, request: Request) -> tuple[tuple[str, str], ResumableStream | None]:
    """The key and the stream that a request names."""
    key = key_of(request, request.query_params.get("conv_id", ""))
    if key is None:
        raise ApiError(400, "conv_id is missing: send the X-Conversation-Id that the stream began with", param="conv_id")
    return key, context.streams.get(key)


async def read_stream(context: Context, request: Request) -> Response:
    _, stream = _stream_of(context, request)
    if stream is None:
        raise ApiError(404, "there is no stream of this conv_id, or it has ended too long ago", param="conv_id")
    at = request.query_params.get("from", "0")
    if not at.isdecimal() or len(at) > 18 or not stream.first <= int(at) <= stream.size:
        raise ApiError(400, f"from is {at[:40]!r}; bytes {stream.first} to {stream.size} of this stream are here", param="from")
    return event_stream(stream.follow(int(at)))


async def end_stream(context: Context, request: Request) -> Response:
    key, _ = _stream_of(context, request)
    context.streams.end(key)
    return Response(status_code=204)


class StreamLookup(Struct):
    conversation_ids: Annotated[list[str], Meta(max_length=1024)] = []


async def look_up_streams(context: Context, request: Request) -> Response:
    """State of the streams whose ids the client knows."""
    names = convert(request.json_object(), StreamLookup).conversation_ids
    return json_response([
        {"conversation_id": n, "is_done": bool(s.over), "total_bytes": s.size, "started_at": int(s.began), "completed_at": int(s.over)}
        for n, s in context.streams.named(request.key, {name for name in names if name})
    ])  # fmt: skip
