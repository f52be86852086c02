"""OpenAI's /v1/responses, without state: every request has its whole conversation. Requests are translated to ``bodies.Chat`` first."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

from ..text.values import Call
from .bodies import Chat, Responses, convert, field_names, parse, wrong
from .conversation import read_chat
from .errors import ApiError, api_error, translated
from .http import PING, Request, Response, event, event_stream, json_response
from .output import Output, progress, speculation, usage
from .reading import Context, Reader
from .sampling import SCHEMA_METADATA, check_members

_SHARED = tuple((field_names(Responses) & field_names(Chat)) - {"tools"})
_STATEFUL = ("previous_response_id", "conversation")
_NESTED = {"reasoning": ("effort",), "text": ("format",)}  # members with a meaning
_NAMES = {
    "messages": "input", "the messages": "the input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", "response_format": "text.format",
    "response_format.json_schema": "text.format", "response_format.json_schema.schema": "text.format.schema", "response_format.schema": "text.format.schema",
    '{"type": "function", "function": {"name": ...}}': '{"type": "function", "name": ...}',
}  # fmt: skip
_PLACE = '{"text": {"format": {"type": "json_schema", "name": "...", "schema": {...}}}}'
_TEXTS = ("input_text", "output_text", "text")


async def create(context: Context, request: Request) -> Response:
    body, names = _parsed(request)
    with translated(names):
        plan = await context.prepared(request, read_chat, context.served, body, request.key)
    reader = Reader(context, request, body, plan.requests, lambda task: plan.output(task, context.served))
    shown = _Shown(context, body)
    if body.stream:
        await reader.begin()
        return event_stream(_events(reader, shown, body.timings_per_token))
    (output,) = await reader.whole()
    return json_response(shown.done(output))


async def input_tokens(context: Context, request: Request) -> Response:
    sent = request.json_object()
    body, names = to_chat(convert(sent, Responses), frozenset(sent))
    with translated(names):
        plan = await context.in_pool(request, read_chat, context.served, body, request.key)
    return json_response({"object": "response.input_tokens", "input_tokens": len(plan.prompt.ids)})


# -- requests


def _parsed(request: Request) -> tuple[Chat, dict[str, str]]:
    given = parse(request, Responses)
    for name, known in _NESTED.items():
        request.unknown += [f"{name}.{inner}" for inner in getattr(given, name) if inner not in known]
    request.unknown += [f"tools: {tool.get('type')}" for tool in given.tools if tool.get("type") != "function"]
    return to_chat(given, frozenset(request.json_object()))


def to_chat(given: Responses, sent: Collection[str]) -> tuple[Chat, dict[str, str]]:
    """The request as a chat, and the client's names of fields by those of chats, for ``translated``. ``sent``: names of its fields.

    Raises:
        ApiError: no input, or one that needs the state of an earlier response.
    """
    for name in _STATEFUL:
        if getattr(given, name) is not None:
            raise ApiError(400, f"{name} is not supported: this server keeps no responses; send the whole conversation", param=name)
    if "prompt" in sent:
        sentence = "prompt is not supported: this server keeps no prompts; send its text as instructions and input"
        raise ApiError(400, sentence, param="prompt")
    if given.background:
        raise ApiError(400, "background is not supported: this server keeps no responses", param="background")
    body = Chat(**{name: getattr(given, name) for name in _SHARED})
    body.messages, places = _messages(given)
    if given.max_output_tokens is not None:
        body.max_tokens = given.max_output_tokens
    effort = given.reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise wrong("reasoning.effort", effort, "a text")
    body.reasoning_effort = body.reasoning_effort if effort is None else effort
    _set_format(given, body)
    functions = [(i, tool) for i, tool in enumerate(given.tools) if tool.get("type") == "function"]
    unnamed = next((i for i, tool in functions if not isinstance(tool.get("name"), str) or not tool["name"]), None)
    if unnamed is not None:
        raise ApiError(400, f'tools[{unnamed}] has no name; send {{"type": "function", "name": ...}}', param="tools")
    body.tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for _, tool in functions]
    names = {name: own for name, own in _NAMES.items() if name.partition(".")[0] not in sent}
    names |= {f"messages[{i}]": place for i, place in enumerate(places)}
    names |= {f"tools[{i}]": f"tools[{at}]" for i, (at, _) in enumerate(functions)}
    return body, names


def _messages(given: Responses) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of a chat, and where each comes from."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if given.instructions is not None:
        messages.append({"role": "system", "content": given.instructions})
        places.append("instructions")
    if isinstance(given.input, str):
        messages.append({"role": "user", "content": given.input})
        places.append("input")
    elif isinstance(given.input, list):
        for i, item in enumerate(given.input):
            _add(messages, item, i)
            places += [f"input[{i}]"] * (len(messages) - len(places))
    else:
        raise ApiError(400, "input is missing; send a text or a list of items", param="input")
    joined = _one_system(messages)
    del places[1 : 1 + len(messages) - len(joined)]
    return joined, places


def _set_format(given: Responses, body: Chat) -> None:
    """``text.format`` as ``response_format``. Raises ApiError."""
    if misplaced := next((name for name in ("type", "schema", "json_schema") if name in given.text), None):
        raise ApiError(400, f"text has no {json.dumps(misplaced)}; a schema goes there like this: {_PLACE}", param="text")
    form = given.text.get("format") or {}
    if not isinstance(form, dict):
        raise wrong("text.format", form, "an object")
    if form and given.response_format:
        raise ApiError(400, "there are text.format and response_format; give one of them", param="text.format")
    known = ("type",) if form.get("type") in ("text", "json_object") else ("type", "schema", *SCHEMA_METADATA)
    check_members(form, "text.format", known, _PLACE)
    if form.get("type") == "json_schema":
        body.response_format = {"type": "json_schema", "json_schema": {"schema": form.get("schema", {})}}
    elif form:
        body.response_format = form


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and the developer's messages after them as one message: most templates take one, at the beginning."""
    texts: list[str] = []
    for message in messages:
        if (text := _instruction(message)) is None:
            break
        texts.append(text)
    if len(texts) < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :]]


def _instruction(message: dict[str, Any]) -> str | None:
    """The text of a message of the system or the developer; None of others, and where it is not all text."""
    content = message["content"] if message["role"] in ("system", "developer") else None
    parts: list[Any] = [part.get("text") for part in content] if isinstance(content, list) else [content]
    return "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else None


def _add(messages: list[dict[str, Any]], item: Any, i: int) -> None:
    """Adds one item of the input; consecutive items of the assistant are one message."""
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
        parts = _texts(content, i) if isinstance(content, list) else content
        if item["role"] == "assistant" and last is not None and not last.get("tool_calls") and not last["content"]:
            last["content"] = parts
        else:
            messages.append({"role": item["role"], "content": parts})
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
    """The response object of one request."""

    def __init__(self, context: Context, body: Chat) -> None:
        key = secrets.token_hex(16)
        self.message, self.reasoning = f"msg_{key}", f"rs_{key}"
        self.begin: dict[str, Any] = {
            "id": f"resp_{key}", "object": "response", "created_at": int(time.time()), "model": context.served.name, "error": None,
            "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": False, "temperature": body.temperature,
            "top_p": body.top_p, "tool_choice": body.tool_choice,
            "tools": [{"type": "function", "strict": False, "parameters": None, **t["function"]} for t in body.tools],
        }  # fmt: skip

    def running(self) -> dict[str, Any]:
        return {**self.begin, "status": "in_progress", "output": [], "usage": None}

    def done(self, output: Output) -> dict[str, Any]:
        cut = output.finish_reason == "length"
        total = usage([output])
        return {
            **self.begin,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": int(time.time()),
            "output": self._items(output),
            "usage": {
                "input_tokens": total["prompt_tokens"], "input_tokens_details": total["prompt_tokens_details"],
                "output_tokens": total["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": total["total_tokens"],
            },
            "timings": output.timings(),
            "speculation": speculation(output.stats),
        }  # fmt: skip

    def _items(self, output: Output) -> list[dict[str, Any]]:
        out = [self.item("reasoning", output.reasoning)] if output.reasoning else []
        if output.content or not (output.calls or output.reasoning):
            out.append(self.item("message", output.content))
        return out + [self.call(call, output, i) for i, call in enumerate(output.calls)]

    def item(self, kind: str, text: str, **more: Any) -> dict[str, Any]:
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            item = {"id": self.reasoning, "type": kind, "summary": [], "content": content, "encrypted_content": "", "status": "completed"}
        else:
            item = {"id": self.message, "type": kind, "role": "assistant", "status": "completed", "content": [self.part(text)]}
        return {**item, **more}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def call(self, call: Call, output: Output, i: int) -> dict[str, Any]:
        number = f"{output.task.number:x}_{i}"
        return {
            "id": f"fc_{number}", "type": "function_call", "status": "completed", "call_id": f"call_{number}", "name": call.name,
            "arguments": call.arguments,
        }  # fmt: skip


class _EventWriter:
    """Numbered events of one stream. ``items``: output items that are complete; ``open``: kind of the one that has begun."""

    def __init__(self, shown: _Shown) -> None:
        self._shown, self._number, self.items, self.open, self._text = shown, 0, 0, "", ""

    def event(self, name: str, /, **data: Any) -> bytes:
        name = name if name == "error" else f"response.{name}"
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **data}, name)

    def begin(self, kind: str) -> bytes:
        if self.open == kind:
            return b""
        out = self.close()
        self.open, self._text, shown = kind, "", self._shown
        out += self.event("output_item.added", output_index=self.items, item=shown.item(kind, "", content=[], status="in_progress"))
        if kind == "message":
            out += self.event("content_part.added", output_index=self.items, content_index=0, item_id=shown.message, part=shown.part(""))
        return out

    def delta(self, kind: str, text: str, **more: Any) -> bytes:
        out = self.begin(kind)
        self._text += text
        at: dict[str, Any] = {"output_index": self.items, "content_index": 0, "delta": text}
        if kind == "reasoning":
            return out + self.event("reasoning_text.delta", item_id=self._shown.reasoning, **at, **more)
        return out + self.event("output_text.delta", item_id=self._shown.message, **at, logprobs=[], **more)

    def call(self, item: dict[str, Any]) -> bytes:
        out = self.close()
        at = {"output_index": self.items}
        self.items += 1
        return (
            out
            + self.event("output_item.added", **at, item={**item, "arguments": "", "status": "in_progress"})
            + self.event("function_call_arguments.delta", **at, item_id=item["id"], delta=item["arguments"])
            + self.event("function_call_arguments.done", **at, item_id=item["id"], name=item["name"], arguments=item["arguments"])
            + self.event("output_item.done", **at, item=item)
        )

    def close(self) -> bytes:
        kind, self.open = self.open, ""
        if not kind:
            return b""
        shown, text = self._shown, self._text
        at: dict[str, Any] = {"output_index": self.items, "content_index": 0}
        if kind == "reasoning":
            out = self.event("reasoning_text.done", **at, item_id=shown.reasoning, text=text)
        else:
            out = self.event("output_text.done", **at, item_id=shown.message, text=text, logprobs=[])
            out += self.event("content_part.done", **at, item_id=shown.message, part=shown.part(text))
        out += self.event("output_item.done", output_index=self.items, item=shown.item(kind, text))
        self.items += 1
        return out


async def _events(reader: Reader, shown: _Shown, with_timings: bool) -> AsyncIterator[bytes]:
    stream, called = _EventWriter(shown), 0
    try:
        yield stream.event("created", response=shown.running()) + stream.event("in_progress", response=shown.running())
        async for item in reader.deltas():
            if item is None:
                yield PING
                continue
            output, delta, last = item
            more = {"timings": output.timings()} if with_timings else {}
            if delta.prompt_read is not None:
                yield stream.event("in_progress", response=shown.running(), prompt_progress=progress(output, delta.prompt_read), **more)
            for piece in delta.pieces:
                if piece.reasoning:
                    yield stream.delta("reasoning", piece.reasoning, **more)
                if piece.content:
                    yield stream.delta("message", piece.content, **more)
                if piece.call is not None:
                    yield stream.call(shown.call(piece.call, output, called))
                    called += 1
            if last:
                out = stream.begin("message") if not stream.items and not stream.open else b""
                done = shown.done(output)
                yield out + stream.close() + stream.event(done["status"], response=done, timings=done["timings"])
    except Exception as error:
        converted = api_error(error)
        yield stream.event("error", code=converted.kind, message=converted.message, param=converted.param)
