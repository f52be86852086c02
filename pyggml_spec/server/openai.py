"""OpenAI's dialect: /v1/chat/completions and /v1/completions, streaming and not."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, ClassVar, cast

from msgspec import structs

from ..sampling.sampler import Sampling, TokenLogprob
from ..text.values import Call
from .bodies import Chat, Infill, OpenAICompletion, convert, parse, wrong
from .errors import ApiError
from .http import DONE, FINGERPRINT, LongLists, Request, Response, encode, event, json_response
from .infill import filled_ids
from .native import native_result, probabilities, read_completion
from .output import MIN_LOGPROB, Delta, Output, metrics, progress, speculation, usage
from .reading import Context, ResponseEncoder, count_prompt, respond, respond_to_chat
from .tasks import TaskRequest

_BEGINS = {"role": "assistant", "content": None}


async def chat(context: Context, request: Request) -> Response:
    return await respond_to_chat(context, request, parse(request, Chat), ChatEncoder, {})


async def completions(context: Context, request: Request) -> Response:
    body = parse(request, OpenAICompletion)
    return await respond(context, request, body, await context.prepared(request, _read, context, body, request.key), Encoder)


def _read(context: Context, body: OpenAICompletion, key: str) -> list[TaskRequest]:
    """Raises ApiError."""
    n, asks = body.n_cmpl or body.n or 1, body.n_probs is not None or bool(body.logprobs)
    if body.best_of is not None and body.best_of < n:
        raise wrong("best_of", body.best_of, f"at least {n}, which is n")
    if body.choices > n and body.stream:
        raise ApiError(400, "which of best_of sequences are the best is known at their end; leave out stream, or best_of", param="best_of")
    if body.echo and asks and body.post_sampling_probs:
        raise ApiError(400, "probabilities of a prompt are the model's; leave out post_sampling_probs, or echo", param="echo")
    if body.echo and body.suffix:
        raise ApiError(400, "a text that is filled in has no end to which the prompt would be put; leave out echo, or suffix", param="echo")

    def filled(prompts: Sequence[Any]) -> list[list[int]]:
        named = structs.asdict(body)
        limits = {name: named[name] for name in ("n_predict", "max_completion_tokens", "max_tokens")}
        return [filled_ids(context.served, Infill(input_prefix=p, input_suffix=body.suffix, **limits)) for p in prompts]

    requests = read_completion(context, body, key, filled if body.suffix else None)
    if body.choices > n and not asks:  # to rank them
        requests = [replace(r, sampling=replace(cast(Sampling, r.sampling), logprobs=0)) for r in requests]
    return [replace(r, scored=True) for r in requests] if body.echo and asks else requests


class Encoder(ResponseEncoder):
    """Completions; what chats have in common with them."""

    kinds: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")  # whole, chunk
    prefix = "cmpl-"

    def __init__(self, context: Context, request: Request, body: Any) -> None:
        super().__init__(context, request, body)
        self._calls: dict[int, int] = {}  # of each sequence of a chat; none before its first event
        self._begin = {
            "id": self.prefix + secrets.token_urlsafe(24).replace("-", "x").replace("_", "y"), "object": self.kinds[body.stream],
            "created": int(time.time()), "model": context.served.name, "system_fingerprint": FINGERPRINT,
        }  # fmt: skip

    async def whole(self) -> Response:
        lists = LongLists(self.request)
        choices = [self._choice(output, lists) | {"index": i} for i, output in enumerate(self._best())]
        return lists.response({**self._begin, "choices": choices, **self._summary(lists)})

    def _best(self) -> Sequence[Output]:
        """The outputs that are reported: of best_of sequences of a prompt the n with the highest log probability per token."""
        body = self.body
        if not isinstance(body, OpenAICompletion) or body.choices == (n := body.n_cmpl or body.n or 1):
            return self.outputs
        of = [self.outputs[first : first + body.choices] for first in range(0, len(self.outputs), body.choices)]
        mean = lambda output: sum(p.logprob for p in output.logprobs) / max(1, len(output.logprobs))  # noqa: E731
        return [output for outputs in of for output in sorted(outputs, key=mean, reverse=True)[:n]]

    def end(self) -> bytes:
        return (self._event(**self._summary()) if self.body.stream_options.include_usage else b"") + DONE

    def delta(self, output: Output, delta: Delta, last: bool) -> bytes:
        out, choice = b"", {"index": output.task.index, "text": "", "logprobs": None, "finish_reason": None}
        more = self._members(output, delta)
        if delta.prompt_read is not None:
            more["prompt_progress"] = progress(output, delta.prompt_read)
        if self.body.echo and output.task.index not in self._calls and (delta.tokens or last):
            self._calls[output.task.index] = 0
            out = self._event(
                choice
                | {"text": _echo(output), "logprobs": _legacy_logprobs(output, (), LongLists()) if output.task.request.scored else None}
            )
        if delta.content or delta.logprobs or delta.prompt_read is not None or "speculation" in more:
            logprobs = _legacy_logprobs(output, delta.logprobs, LongLists(), False) if delta.logprobs else None
            out += self._event(choice | {"text": delta.content, "logprobs": logprobs}, **more)
        return out + self._event(choice | {"finish_reason": output.finish_reason}, **self._end_of_one()) if last else out

    def _choice(self, output: Output, lists: LongLists) -> dict[str, Any]:
        asks = output.task.request.scored or (output.logprobs and (self.body.n_probs is not None or self.body.logprobs))
        logprobs = _legacy_logprobs(output, output.logprobs, lists) if asks else None
        text = _echo(output) + output.text if self.body.echo else output.text
        return {"index": output.task.index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _event(self, *choices: dict[str, Any], **more: Any) -> bytes:
        return event({**self._begin, "choices": choices, **more})

    def _summary(self, lists: LongLists | None = None) -> dict[str, Any]:
        """What a whole response, or a stream's last chunk, reports of all of it."""
        first = self.outputs[0]
        out = {
            "usage": usage(self.outputs),
            "timings": first.timings(),
            "speculation": speculation(first.stats),
            "metrics": metrics(first.stats),
        }
        if self.body.verbose or self.context.served.options.verbose:
            out["__verbose"] = native_result(self.context, first, lists or LongLists())
        return out

    def _end_of_one(self) -> dict[str, Any]:
        """The summary in the last chunk of the only sequence, where no further chunk has it."""
        return self._summary() if not self.body.stream_options.include_usage and len(self.outputs) == 1 else {}

    def _members(self, output: Output, delta: Delta) -> dict[str, Any]:
        """Members of a chunk that the request asks for."""
        out: dict[str, Any] = {}
        if self.body.timings_per_token and delta.prompt_read != 0:
            out["timings"] = output.timings()
        if self.body.stream_options.continuous_usage_stats:
            out["usage"] = usage([output])
        if self.body.speculation and delta.tokens:
            tokens, accepted = output.shown(delta.tokens), max(0, len(delta.tokens) - 1) if delta.drafts else 0
            drafts = [*tokens[:accepted], *map(output.token_text, delta.drafts[accepted:])]
            out["speculation"] = {"tokens": tokens, "drafts": drafts, "accepted": accepted}
        return out


class ChatEncoder(Encoder):
    kinds = ("chat.completion", "chat.completion.chunk")
    prefix = "chatcmpl-"

    def delta(self, output: Output, delta: Delta, last: bool) -> bytes:
        index = output.task.index
        if delta.prompt_read is not None:
            timings = {"timings": output.timings()} if self.body.timings_per_token else {}
            return self._change(index, _BEGINS, more={"prompt_progress": progress(output, delta.prompt_read), **timings})
        out = self._change(index, _BEGINS) if index not in self._calls else b""
        self._calls.setdefault(index, 0)
        changes: list[dict[str, Any]] = []
        for piece in delta.pieces:
            changes += [{"reasoning_content": piece.reasoning}] if piece.reasoning else []
            changes += [{"content": piece.content}] if piece.content else []
            if piece.call is not None:
                changes.append({"tool_calls": [{"index": self._calls[index], **_tool_call(piece.call, output, self._calls[index])}]})
                self._calls[index] += 1
        if not changes and (delta.logprobs or (self.body.speculation and delta.tokens)):
            changes = [{"content": ""}]
        for change in changes[:-1]:
            out += self._change(index, change)
        if changes:
            out += self._change(index, changes[-1], None, [output.probability(p) for p in delta.logprobs], self._members(output, delta))
        if last:
            summary = self._end_of_one()
            summary.pop("usage", None)
            out += self._change(index, {}, output.finish_reason, more=summary)
        return out

    def _change(
        self, index: int, change: dict[str, Any], finish: str | None = None, logprobs: Sequence[Any] = (), more: Mapping[str, Any] = {}
    ) -> bytes:
        choice = {"index": index, "delta": change, "finish_reason": finish}
        return self._event(choice | {"logprobs": {"content": logprobs}} if logprobs else choice, **more)

    def _choice(self, output: Output, lists: LongLists) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.content}
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["content"] = output.content or None
            message["tool_calls"] = [_tool_call(call, output, i) for i, call in enumerate(output.calls)]
        out = {"index": output.task.index, "message": message, "finish_reason": output.finish_reason}
        return out | {"logprobs": {"content": probabilities(output, lists)}} if output.logprobs else out


def _tool_call(call: Call, output: Output, i: int) -> dict[str, Any]:
    return {"id": f"call_{output.task.number:x}_{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _echo(output: Output) -> str:
    """The prompt's text."""
    return output.decoded(output.task.request.ids)


def _legacy_logprobs(output: Output, logprobs: Sequence[TokenLogprob], lists: LongLists, prompt: bool = True) -> dict[str, Any]:
    """OpenAI's form of log probabilities of completions, and llama.cpp's in ``content``. ``prompt``: those of a scored prompt come first, with null for its
    first token."""
    request, handle, first = output.task.request, output.task.handle, list[int]()
    if prompt and request.scored and handle is not None:
        first, logprobs = request.ids[:1], [*handle.prompt_logprobs, *logprobs]
    size = sum(1 + len(p.top) for p in logprobs)
    tokens = [output.token_text(token) for token in (*first, *(p.token for p in logprobs))]
    tops = (encode({output.token_text(t): max(p, MIN_LOGPROB) for t, p in each.top}) for each in logprobs)
    return {
        "content": lists.add((encode(output.probability(p)) for p in logprobs), size),
        "tokens": tokens,
        "token_logprobs": [*(None for _ in first), *(max(p.logprob, MIN_LOGPROB) for p in logprobs)],
        "top_logprobs": lists.add(chain((b"null" for _ in first), tops), size),
        "text_offset": [0, *accumulate(map(len, tokens[:-1]))] if tokens else [],
    }


async def models(context: Context, request: Request) -> Response:
    entry = context.served.model_entry()
    listed = {
        "name": entry["id"], "model": entry["id"], "type": "model", "tags": [], "capabilities": ["completion", "multimodal"] if context.served.media else ["completion"], "details": {"format": "gguf"},
    }  # fmt: skip
    return json_response({"object": "list", "data": [entry], "models": [listed]})


async def model(context: Context, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in context.served.names:
        raise ApiError(404, f"there is no model {json.dumps(name[:100])}; this server has {', '.join(context.served.names)}", param="model")
    return json_response(context.served.model_entry())


async def input_tokens(context: Context, request: Request) -> Response:
    """Tokens of a chat request's prompt."""
    count = await count_prompt(context, request, convert(request.json_object(), Chat), {})
    return json_response({"object": "response.input_tokens", "input_tokens": count})
