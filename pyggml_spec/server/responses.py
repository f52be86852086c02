"""OpenAI's /v1/responses, without state: every request brings its whole conversation. Requests are put into the words of chats first."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ..text.values import Call
from . import fields
from .answer import Answer, speculation, usage
from .conversation import read_chat
from .errors import ApiError, api_error, spoken
from .http import PING, Request, Response, event, event_stream, json_response
from .openai import progress
from .reading import Context, Reader

_STATEFUL = ("previous_response_id", "conversation")
_NESTED = {"reasoning": ("effort",), "text": ("format",)}  # members that mean something
_WORDS = {
    "messages": "input", "the messages": "the input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", "response_format": "text.format",
    "response_format.json_schema": "text.format", "response_format.json_schema.schema": "text.format.schema", "response_format.schema": "text.format.schema",
    '{"type": "function", "function": {"name": ...}}': '{"type": "function", "name": ...}',
}  # fmt: skip
_PLACE = '{"text": {"format": {"type": "json_schema", "name": "...", "schema": {...}}}}'
_TEXTS = ("input_text", "output_text", "text")


async def create(context: Context, request: Request) -> Response:
    body, words = to_chat(request.json_object())
    for name, known in _NESTED.items():
        request.unknown += [f"{name}.{inner}" for inner in fields.mapping(request.json_object(), name) if inner not in known]
    request.unknown += [f"tools: {tool.get('type')}" for tool in request.json_object().get("tools", []) if tool.get("type") != "function"]
    with spoken(words):
        plan = await context.prepared(request, read_chat, context.served, body, request.key)
    reader = Reader(context, request, plan.asks, lambda job: plan.answer(job, context.served))
    shown = _Shown(context, body)
    if fields.flag(body, "stream"):
        await reader.begin()
        return event_stream(_events(reader, shown, body))
    (answer,) = await reader.whole()
    return json_response(shown.done(answer))


async def input_tokens(context: Context, request: Request) -> Response:
    body, words = to_chat(request.json_object())
    with spoken(words):
        plan = await context.in_pool(request, read_chat, context.served, body, request.key)
    return json_response({"object": "response.input_tokens", "input_tokens": len(plan.prompt.ids)})


# -- requests


def to_chat(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The request in the words of chats, and its own words by those: for ``spoken``.

    Raises ApiError: no input, or one that needs what an earlier response left."""
    for name in _STATEFUL:
        if name in body:
            raise ApiError(400, f"{name} is not supported: this server keeps no responses; send the whole conversation", param=name)
    if "prompt" in body:
        raise ApiError(
            400, "prompt is not supported: this server keeps no prompts; send its text as instructions and input", param="prompt"
        )
    if fields.flag(body, "background"):
        raise ApiError(400, "background is not supported: this server keeps no responses", param="background")
    out = {
        k: v
        for k, v in body.items()
        if k not in ("input", "instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice", "n", "n_cmpl")
    }
    messages: list[dict[str, Any]] = []
    places: list[str] = []  # where each message came from
    if "instructions" in body:
        messages.append({"role": "system", "content": fields.text(body, "instructions")})
        places.append("instructions")
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        places.append("input")
    elif isinstance(given, list):
        for i, item in enumerate(given):
            _take(messages, item, i)
            places += [f"input[{i}]"] * (len(messages) - len(places))
    else:
        raise ApiError(400, "input is missing; send a text or a list of items", param="input")
    out["messages"] = _one_system(messages)
    del places[1 : 1 + len(messages) - len(out["messages"])]
    if "max_output_tokens" in body:
        out["max_tokens"] = body["max_output_tokens"]
    effort = fields.mapping(body, "reasoning").get("effort")
    if effort is not None and not isinstance(effort, str):
        raise fields.wrong("reasoning.effort", effort, "a text")
    if effort is not None:
        out["reasoning_effort"] = effort
    said = fields.mapping(body, "text")
    if misplaced := next((name for name in ("type", "schema", "json_schema") if name in said), None):
        raise ApiError(400, f"text has no {json.dumps(misplaced)}; a schema goes there like this: {_PLACE}", param="text")
    form = said.get("format") or {}
    if not isinstance(form, dict):
        raise fields.wrong("text.format", form, "an object")
    if form and "response_format" in body:
        raise ApiError(400, "there are text.format and response_format; give one of them", param="text.format")
    known = ("type",) if form.get("type") in ("text", "json_object") else ("type", "schema", *fields.ABOUT_SCHEMAS)
    fields.only(form, "text.format", known, _PLACE)
    if form.get("type") == "json_schema":
        out["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema", {})}}
    elif form:
        out["response_format"] = form
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fields.wrong("tools", tools, "a list of tools")
    functions = [(i, tool) for i, tool in enumerate(tools) if tool.get("type") == "function"]
    unnamed = next((i for i, tool in functions if not isinstance(tool.get("name"), str) or not tool["name"]), None)
    if unnamed is not None:
        raise ApiError(400, f'tools[{unnamed}] has no name; send {{"type": "function", "name": ...}}', param="tools")
    out["tools"] = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for _, tool in functions]
    if "tool_choice" in body:
        out["tool_choice"] = body["tool_choice"]
    words = {f"messages[{i}]": place for i, place in enumerate(places)} | {
        f"tools[{i}]": f"tools[{at}]" for i, (at, _) in enumerate(functions)
    }
    return out, {**{name: own for name, own in _WORDS.items() if name.partition(".")[0] not in body}, **words}


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and what the developer says behind them as one message: most templates take one, at the beginning."""
    said: list[str] = []
    for message in messages:
        if (text := _instruction(message)) is None:
            break
        said.append(text)
    if len(said) < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(said)}, *messages[len(said) :]]


def _instruction(message: dict[str, Any]) -> str | None:
    """What a message of the system or the developer says; None of others, and where it is not all text."""
    content = message["content"] if message["role"] in ("system", "developer") else None
    parts: list[Any] = [part.get("text") for part in content] if isinstance(content, list) else [content]
    return "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else None


def _take(messages: list[dict[str, Any]], item: Any, i: int) -> None:
    """Adds one item of the input; what the assistant did in a row is one message."""
    if not isinstance(item, dict):
        raise ApiError(400, f"input[{i}] is no object", param="input")
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
        }
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last["tool_calls"] = [*last.get("tool_calls", []), call]
    elif kind == "function_call_output":
        output = item.get("output", "")
        messages.append(
            {"role": "tool", "tool_call_id": item.get("call_id"), "content": _texts(output, i) if isinstance(output, list) else output}
        )
    elif kind == "reasoning":
        content = item.get("content") or []
        text = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict)) if isinstance(content, list) else ""
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif kind == "message" and isinstance(item.get("role"), str):
        content = item.get("content", "")
        told = _texts(content, i) if isinstance(content, list) else content
        if item["role"] == "assistant" and last is not None and not last.get("tool_calls") and not last["content"]:
            last["content"] = told
        else:
            messages.append({"role": item["role"], "content": told})
    else:
        raise ApiError(
            400,
            f"input[{i}] is of the type {str(kind)[:60]!r}; messages, reasoning, function calls and their outputs are taken",
            param="input",
        )


def _texts(parts: list[Any], i: int) -> list[dict[str, Any]] | str:
    out = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            out.append({"type": "image_url"})
        elif kind in _TEXTS and isinstance(part.get("text"), str):
            out.append({"type": "text", "text": part["text"]})
        elif kind == "refusal":
            out.append({"type": "text", "text": str(part.get("refusal", ""))})
        else:
            raise ApiError(400, f'a part of input[{i}] is no text; send {{"type": "input_text", "text": ...}}', param="input")
    return out[0]["text"] if len(out) == 1 and "text" in out[0] else out


# -- responses


class _Shown:
    """The response object of one request, as it is at any time."""

    def __init__(self, context: Context, body: Mapping[str, Any]) -> None:
        self.key = secrets.token_hex(16)
        self.message, self.reasoning = f"msg_{self.key}", f"rs_{self.key}"
        self.begin: dict[str, Any] = {
            "id": f"resp_{self.key}", "object": "response", "created_at": int(time.time()), "model": context.served.name, "error": None,
            "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": False, "temperature": body.get("temperature"),
            "top_p": body.get("top_p"), "tool_choice": body.get("tool_choice", "auto"),
            "tools": [{"type": "function", "strict": False, "parameters": None, **t["function"]} for t in body["tools"]],
        }  # fmt: skip

    def running(self) -> dict[str, Any]:
        return {**self.begin, "status": "in_progress", "output": [], "usage": None}

    def done(self, answer: Answer) -> dict[str, Any]:
        cut = answer.finish_reason == "length"
        total = usage([answer])
        return {
            **self.begin,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": int(time.time()),
            "output": self.output(answer),
            "usage": {
                "input_tokens": total["prompt_tokens"], "input_tokens_details": total["prompt_tokens_details"],
                "output_tokens": total["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": total["total_tokens"],
            },
            "timings": answer.timings(),
            "speculation": speculation(answer.stats),
        }  # fmt: skip

    def output(self, answer: Answer) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        if answer.reasoning:
            out.append(self.thought(answer.reasoning))
        if answer.content or not (answer.calls or answer.reasoning):
            out.append(self.said(answer.content))
        return out + [self.called(call, answer, i) for i, call in enumerate(answer.calls)]

    def thought(self, text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {
            "id": self.reasoning,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": "",
            "status": "completed",
        }

    def said(self, text: str) -> dict[str, Any]:
        return {"id": self.message, "type": "message", "role": "assistant", "status": "completed", "content": [self.part(text)]}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def called(self, call: Call, answer: Answer, i: int) -> dict[str, Any]:
        number = f"{answer.job.number:x}_{i}"
        return {
            "id": f"fc_{number}", "type": "function_call", "status": "completed", "call_id": f"call_{number}", "name": call.name,
            "arguments": call.arguments,
        }  # fmt: skip


class _Numbered:
    """Events of one stream, numbered; the output items that have begun."""

    def __init__(self, shown: _Shown) -> None:
        self._shown, self._number, self.items, self.open = shown, 0, 0, ""
        self.text = ""

    def event(self, name: str, /, **data: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **data}, name)

    def begin(self, kind: str) -> list[bytes]:
        if self.open == kind:
            return []
        out = self.close()
        self.open, self.text = kind, ""
        at, shown = {"output_index": self.items}, self._shown
        if kind == "reasoning":
            return [
                *out,
                self.event("response.output_item.added", **at, item={**shown.thought(""), "content": [], "status": "in_progress"}),
            ]
        item = {**shown.said(""), "content": [], "status": "in_progress"}
        added = self.event("response.output_item.added", **at, item=item)
        return [*out, added, self.event("response.content_part.added", **at, content_index=0, item_id=shown.message, part=shown.part(""))]

    def delta(self, kind: str, text: str, **more: Any) -> list[bytes]:
        out = self.begin(kind)
        self.text += text
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        identifier = self._shown.reasoning if kind == "reasoning" else self._shown.message
        extra: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return [*out, self.event(name, item_id=identifier, output_index=self.items, content_index=0, delta=text, **extra, **more)]

    def call(self, item: dict[str, Any]) -> list[bytes]:
        out = self.close()
        at = {"output_index": self.items}
        self.items += 1
        return [
            *out,
            self.event("response.output_item.added", **at, item={**item, "arguments": "", "status": "in_progress"}),
            self.event("response.function_call_arguments.delta", **at, item_id=item["id"], delta=item["arguments"]),
            self.event("response.function_call_arguments.done", **at, item_id=item["id"], name=item["name"], arguments=item["arguments"]),
            self.event("response.output_item.done", **at, item=item),
        ]

    def close(self) -> list[bytes]:
        kind, self.open = self.open, ""
        if not kind:
            return []
        at, shown, text = {"output_index": self.items}, self._shown, self.text
        self.items += 1
        if kind == "reasoning":
            done = self.event("response.reasoning_text.done", **at, content_index=0, item_id=shown.reasoning, text=text)
            return [done, self.event("response.output_item.done", **at, item=shown.thought(text))]
        return [
            self.event("response.output_text.done", **at, content_index=0, item_id=shown.message, text=text, logprobs=[]),
            self.event("response.content_part.done", **at, content_index=0, item_id=shown.message, part=shown.part(text)),
            self.event("response.output_item.done", **at, item=shown.said(text)),
        ]


async def _events(reader: Reader, shown: _Shown, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    stream, with_timings = _Numbered(shown), fields.flag(body, "timings_per_token")
    called = 0
    try:
        yield stream.event("response.created", response=shown.running())
        yield stream.event("response.in_progress", response=shown.running())
        async for item in reader.deltas():
            if item is None:
                yield PING
                continue
            answer, delta, last = item
            more = {"timings": answer.timings()} if with_timings else {}
            if delta.prompt_read is not None:
                yield stream.event(
                    "response.in_progress", response=shown.running(), prompt_progress=progress(answer, delta.prompt_read), **more
                )
            for piece in delta.pieces:
                parts: list[bytes] = []
                if piece.reasoning:
                    parts = stream.delta("reasoning", piece.reasoning, **more)
                if piece.content:
                    parts += stream.delta("message", piece.content, **more)
                if piece.call is not None:
                    parts += stream.call(shown.called(piece.call, answer, called))
                    called += 1
                for part in parts:
                    yield part
            if last:
                if not stream.items and not stream.open:
                    for part in stream.begin("message"):
                        yield part
                for part in stream.close():
                    yield part
                done = shown.done(answer)
                name = "response.completed" if done["status"] == "completed" else "response.incomplete"
                yield stream.event(name, response=done, timings=done["timings"])
    except Exception as error:
        told = api_error(error)
        yield stream.event("error", code=told.kind, message=told.message, param=told.param)
