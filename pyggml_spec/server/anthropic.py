"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens. Its requests are put into OpenAI's words first."""

import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from ..text.values import Call
from . import fields
from .answer import Answer
from .conversation import read_chat
from .errors import ApiError, api_error, spoken
from .http import PING, Request, Response, event, event_stream, json_response
from .reading import Context, Reader

PASSED = {
    *fields.NUMBERS, *fields.OFF, "stream", "chat_template_kwargs", "samplers", "logit_bias", "ignore_eos", "speculative", "speculation", "cache_prompt",
    "priority", "grammar", "regex", "lark", "json_schema", "response_format", "grammar_lazy", "grammar_triggers", "additional_properties", *fields.BUDGETS,
}  # fmt: skip
MAX_TOKENS, TEMPERATURE = 4096, 1.0
_SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_")
_WORDS = {
    "reasoning_effort": "output_config.effort", "the parameters of tools": "the input_schema of tools", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}  # fmt: skip
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*?cch=[0-9a-f]+;\s*")


async def messages(context: Context, request: Request) -> Response:
    body, words = to_openai(request.json_object())
    known = ("effort", "format")
    request.unknown += [f"output_config.{name}" for name in fields.mapping(request.json_object(), "output_config") if name not in known]
    with spoken(words):
        plan = await context.prepared(request, read_chat, context.served, body, request.key)
    reader = Reader(context, request, plan.asks, lambda job: plan.answer(job, context.served))
    identifier = "msg_cmpl_" + secrets.token_hex(12)
    if fields.flag(body, "stream"):
        await reader.begin()
        return event_stream(_events(context, reader, identifier))
    (answer,) = await reader.whole()
    content = _content(answer)
    head = _head(context, answer, identifier)
    return json_response(
        {**head, "content": content, "stop_reason": _reason(answer), "stop_sequence": answer.stopping_word or None, "usage": _usage(answer)}
    )


async def count_tokens(context: Context, request: Request) -> Response:
    body, words = to_openai(request.json_object())
    with spoken(words):
        plan = await context.in_pool(request, read_chat, context.served, body, request.key)
    return json_response({"input_tokens": len(plan.prompt.ids)})


# -- requests


def to_openai(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The request in OpenAI's words, and its own words by those: for ``spoken``.

    Raises ApiError: no messages, or a format that is not here."""
    given = body.get("messages")
    if not isinstance(given, list):
        raise ApiError(400, 'messages is missing, or no list; send a list like [{"role": "user", "content": "Hello"}]', param="messages")
    out: dict[str, Any] = {name: body[name] for name in PASSED if name in body}
    system = _system(body.get("system"))
    put = [] if system is None else [("system", {"role": "system", "content": system})]
    put += [(f"messages[{i}]", m) for i, message in enumerate(given) for m in _message(message)]
    out["messages"] = [message for _, message in put]
    out.setdefault("temperature", TEMPERATURE)
    out["max_tokens"] = body.get("max_tokens", MAX_TOKENS)
    if "stop_sequences" in body:
        out["stop"] = list(fields.stop_texts(body, "stop_sequences"))
    if "tools" in body:
        out["tools"] = _tools(body["tools"])
    choice = fields.mapping(body, "tool_choice")
    kind = choice.get("type")
    if kind not in ("auto", "any", "none", "tool") and choice:
        raise fields.wrong("tool_choice.type", kind, '"auto", "any", "none" or "tool"')
    if kind == "any" and not out.get("tools"):
        raise ApiError(400, "tool_choice is any, and there are no tools", param="tool_choice")
    if kind == "tool":
        out["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind is not None:
        out["tool_choice"] = {"any": "required"}.get(kind, kind)
    out["parallel_tool_calls"] = not fields.flag(choice, "disable_parallel_tool_use")
    config = fields.mapping(body, "output_config")
    if config.get("effort") is not None:
        if not isinstance(config["effort"], str):
            raise fields.wrong("output_config.effort", config["effort"], "a text")
        out["reasoning_effort"] = config["effort"]
    place = '{"output_config": {"format": {"type": "json_schema", "schema": {...}}}}'
    if misplaced := next((name for name in ("type", "schema", "json_schema") if name in config), None):
        raise ApiError(400, f"output_config has no {json.dumps(misplaced)}; a schema goes there like this: {place}", param="output_config")
    forms = {
        at: form
        for at, form in (("output_config.format", config.get("format")), ("output_format", body.get("output_format")))
        if form is not None
    }
    for at, form in forms.items():
        if not isinstance(form, dict) or form.get("type") != "json_schema" or "response_format" in out:
            raise fields.wrong(at, form, '{"type": "json_schema", "schema": ...}, alone and with no response_format beside it')
        fields.only(form, at, ("type", "schema", *fields.ABOUT_SCHEMAS), place)
        out["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema", {})}}
    if "thinking" in body:
        out["thinking"] = body["thinking"]
    words = {f"messages[{i}]": place for i, (place, _) in enumerate(put)}
    if not forms:
        return out, {**_WORDS, **words}
    where = next(iter(forms))
    formats = {"response_format": where, "response_format.json_schema": where, "response_format.json_schema.schema": f"{where}.schema"}
    return out, {**_WORDS, **words, **formats}


def _system(system: Any) -> str | None:
    """The system prompt, without the line that Claude Code changes with every request: nothing behind it could be reused."""
    if system is None:
        return None
    if isinstance(system, str):
        return _BILLING.sub("", system)
    if not isinstance(system, list) or not all(isinstance(b, dict) and isinstance(b.get("text"), str) for b in system):
        raise fields.wrong("system", system, "a text or a list of texts")
    return "".join(_BILLING.sub("", block["text"]) for block in system)


def _message(message: Any) -> list[dict[str, Any]]:
    """One message as those that it comes to: results of tools are messages of their own, before the text, because they answer the turn before."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thought = ""
    for block in message["content"]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thought += str(block.get("thinking", ""))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = block.get("content", "")
            if isinstance(result, list) and all(isinstance(c, dict) and c.get("type") == "text" for c in result):
                result = "".join(str(c.get("text", "")) for c in result)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif isinstance(block, dict):
            content.append({name: value for name, value in block.items() if name in ("type", "text")})
        else:
            raise ApiError(400, "a block of a message's content is no object", param="messages")
    out = []
    if content or calls or thought:
        turn: dict[str, Any] = {"role": message.get("role"), "content": content or ""}
        out.append({**turn, **({"tool_calls": calls} if calls else {}), **({"reasoning_content": thought} if thought else {})})
    return results + out


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in tools):
        raise fields.wrong("tools", tools, "a list of tools with names")
    # others with a type of their own, bash for instance, are run by the client, and known to the model by their name alone
    if other := next((t for t in tools if str(t.get("type") or "custom").startswith(_SERVER_TOOLS)), None):
        raise ApiError(
            501, f"the tool {other['name']!r} is of the type {str(other['type'])[:60]!r}, which Anthropic's own servers run; give tools of yours", param="tools"
        )  # fmt: skip
    return [
        {
            "type": "function",
            "function": {"name": t["name"], "description": t.get("description") or "", "parameters": t.get("input_schema") or {}},
        }
        for t in tools
    ]


# -- responses


def _head(context: Context, answer: Answer, identifier: str) -> dict[str, Any]:
    return {"id": identifier, "type": "message", "role": "assistant", "model": context.served.name}


def _usage(answer: Answer) -> dict[str, int]:
    reused = answer.stats.reused_tokens
    return {
        "cache_read_input_tokens": reused, "cache_creation_input_tokens": 0, "input_tokens": len(answer.job.ask.ids) - reused,
        "output_tokens": answer.stats.emitted,
    }  # fmt: skip


def _reason(answer: Answer) -> str:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]
    return "stop_sequence" if reason == "end_turn" and answer.stopping_word else reason


def _content(answer: Answer) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if answer.reasoning:
        out.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not (answer.calls or answer.reasoning):
        out.append({"type": "text", "text": answer.content})
    return out + [{**_called(call, answer, i), "input": msgspec.Raw(call.arguments.encode())} for i, call in enumerate(answer.calls)]


def _called(call: Call, answer: Answer, i: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{answer.job.number:x}_{i}", "name": call.name}


class _Blocks:
    """The content blocks of a stream: one is open at a time, and they are numbered in the order in which they begin."""

    def __init__(self) -> None:
        self.index, self.kind = -1, ""

    def delta(self, kind: str, start: dict[str, Any], delta: dict[str, Any]) -> list[bytes]:
        out = []
        if kind != self.kind or kind == "tool_use":
            out += self.close()
            self.index, self.kind = self.index + 1, kind
            out.append(_event("content_block_start", index=self.index, content_block=start))
        return [*out, _event("content_block_delta", index=self.index, delta=delta)]

    def close(self) -> list[bytes]:
        if not self.kind:
            return []
        signed = (
            [_event("content_block_delta", index=self.index, delta={"type": "signature_delta", "signature": ""})]
            if self.kind == "thinking"
            else []
        )
        self.kind = ""
        return [*signed, _event("content_block_stop", index=self.index)]


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


async def _events(context: Context, reader: Reader, identifier: str) -> AsyncIterator[bytes]:
    blocks, begun, called = _Blocks(), False, 0
    try:
        async for item in reader.deltas():
            if item is None:
                yield PING if not begun else _event("ping")
                continue
            answer, delta, last = item
            if not begun:
                begun = True
                usage = {**_usage(answer), "output_tokens": 0}
                yield _event(
                    "message_start",
                    message={
                        **_head(context, answer, identifier),
                        "content": [],
                        "stop_reason": None,
                        "stop_sequence": None,
                        "usage": usage,
                    },
                )
            for piece in delta.pieces:
                parts: list[bytes] = []
                if piece.reasoning:
                    parts = blocks.delta(
                        "thinking",
                        {"type": "thinking", "thinking": "", "signature": ""},
                        {"type": "thinking_delta", "thinking": piece.reasoning},
                    )
                if piece.content:
                    parts += blocks.delta("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": piece.content})
                if piece.call is not None:
                    start = {**_called(piece.call, answer, called), "input": {}}
                    called += 1
                    parts += blocks.delta("tool_use", start, {"type": "input_json_delta", "partial_json": piece.call.arguments})
                for part in parts:
                    yield part
            if last:
                for part in blocks.close():
                    yield part
                ended = {"stop_reason": _reason(answer), "stop_sequence": answer.stopping_word or None}
                yield _event("message_delta", delta=ended, usage=_usage(answer))
                yield _event("message_stop")
    except Exception as error:
        yield event(api_error(error).anthropic(), "error")
