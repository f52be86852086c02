"""OpenAI's /v1/responses, without state: every request has its whole conversation. Requests are translated to ``bodies.Chat`` first."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from ..text.values import Call
from .bodies import Chat, Responses, convert, field_names, parse, wrong
from .errors import ApiError
from .http import Request, Response, event, json_response
from .output import Delta, Output, progress, speculation, usage
from .reading import Context, ResponseEncoder, count_prompt, respond_to_chat
from .sampling import MISPLACED, SCHEMA_METADATA, check_members

_SHARED = tuple((field_names(Responses) & field_names(Chat)) - {"tools"})
_STATEFUL = {
    **dict.fromkeys(("previous_response_id", "conversation"), "responses; send the whole conversation"), "background": "responses",
    "prompt": "prompts; send its text as instructions and input",
}  # fmt: skip
_NESTED = {"reasoning": ("effort",), "text": ("format",)}  # members with a meaning
_NAMES = {
    "messages": "input", "the messages": "the input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", "response_format": "text.format",
    "response_format.json_schema": "text.format", "response_format.json_schema.schema": "text.format.schema", "response_format.schema": "text.format.schema",
    '{"type": "function", "function": {"name": ...}}': '{"type": "function", "name": ...}',
}  # fmt: skip
_PLACE = '{"text": {"format": {"type": "json_schema", "name": "...", "schema": {...}}}}'
_TEXTS = ("input_text", "output_text", "text")


async def create(context: Context, request: Request) -> Response:
    given = parse(request, Responses)
    for name, known in _NESTED.items():
        request.unknown += [f"{name}.{inner}" for inner in getattr(given, name) if inner not in known]
    request.unknown += [f"tools: {tool.get('type')}" for tool in given.tools if tool.get("type") != "function"]
    body, names = to_chat(given, request.json_object())
    return await respond_to_chat(context, request, body, Encoder, names)


async def input_tokens(context: Context, request: Request) -> Response:
    sent = request.json_object()
    body, names = to_chat(convert(sent, Responses), sent)
    count = await count_prompt(context, request, body, names)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


def to_chat(given: Responses, sent: Mapping[str, Any]) -> tuple[Chat, dict[str, str]]:
    """The request as a chat, and the client's names of fields by those of chats, for ``translated``. ``sent``: its fields. Raises
    ApiError: no input, or one that needs the state of an earlier response."""
    for name, why in _STATEFUL.items():
        if name in sent and sent[name] not in (None, False):
            raise ApiError(400, f"{name} is not supported: this server keeps no {why}", param=name)
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
        messages, places = [{"role": "system", "content": given.instructions}], ["instructions"]
    if isinstance(given.input, str):
        return [*messages, {"role": "user", "content": given.input}], [*places, "input"]
    if not isinstance(given.input, list):
        raise ApiError(400, "input is missing; send a text or a list of items", param="input")
    for i, item in enumerate(given.input):
        _add(messages, item, i)
        places += [f"input[{i}]"] * (len(messages) - len(places))
    texts: list[str] = []  # instructions and the developer's messages after them are one: most templates take one, at the beginning
    for message in messages:
        content = message["content"] if message["role"] in ("system", "developer") else None
        parts: list[Any] = [part.get("text") for part in content] if isinstance(content, list) else [content]
        if not all(isinstance(part, str) for part in parts):
            break
        texts.append("\n\n".join(parts))
    if len(texts) < 2:
        return messages, places
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :]], places[:1] + places[len(texts) :]


def _set_format(given: Responses, body: Chat) -> None:
    """``text.format`` as ``response_format``. Raises ApiError."""
    check_members({name: given.text[name] for name in MISPLACED if name in given.text}, "text", (), _PLACE)
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


def _add(messages: list[dict[str, Any]], item: Any, i: int) -> None:
    """Adds one item of the input; consecutive items of the assistant are one message."""
    if not isinstance(item, dict):
        raise ApiError(400, f"input[{i}] is no object", param="input")
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last["tool_calls"] = [*last.get("tool_calls", []), {"id": item.get("call_id"), "type": "function", "function": function}]
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _texts(item.get("output", ""), i)})
    elif kind == "reasoning":
        content = item.get("content") or []
        text = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict)) if isinstance(content, list) else ""
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif kind == "message" and isinstance(item.get("role"), str):
        parts = _texts(item.get("content", ""), i)
        if item["role"] == "assistant" and last is not None and not last.get("tool_calls") and not last["content"]:
            last["content"] = parts
        else:
            messages.append({"role": item["role"], "content": parts})
    else:
        sentence = f"input[{i}] is of the type {str(kind)[:60]!r}; messages, reasoning, function calls and their outputs are taken"
        raise ApiError(400, sentence, param="input")


def _texts(content: Any, i: int) -> Any:
    """A list of parts as those of a chat; their text where there is one alone; anything else as it is."""
    out: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            out.append({"type": "image_url", "image_url": part.get("image_url")})
        elif kind in _TEXTS and isinstance(part.get("text"), str):
            out.append({"type": "text", "text": part["text"]})
        elif kind == "refusal":
            out.append({"type": "text", "text": str(part.get("refusal", ""))})
        else:
            raise ApiError(400, f'a part of input[{i}] is no text; send {{"type": "input_text", "text": ...}}', param="input")
    return content if not isinstance(content, list) else out[0]["text"] if len(out) == 1 and "text" in out[0] else out


class Encoder(ResponseEncoder):
    """The response object; in a stream numbered events about its items, of which one is open at a time."""

    def __init__(self, context: Context, request: Request, body: Chat) -> None:
        super().__init__(context, request, body)
        key = secrets.token_hex(16)
        self._ids = {"message": f"msg_{key}", "reasoning": f"rs_{key}"}
        self._begin: dict[str, Any] = {
            "id": f"resp_{key}", "object": "response", "created_at": int(time.time()), "model": context.served.name, "error": None,
            "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": False, "temperature": body.temperature,
            "top_p": body.top_p, "tool_choice": body.tool_choice,
            "tools": [{"type": "function", "strict": False, "parameters": None, **t["function"]} for t in body.tools],
        }  # fmt: skip
        self._number, self._items, self._calls = 0, 0, 0  # of the next event; items that are complete
        self._open, self._text = "", ""  # kind of the open item

    async def whole(self) -> Response:
        return json_response(self._done(self.outputs[0]))

    def begin(self) -> bytes:
        running = self._running()
        return self._event("created", response=running) + self._event("in_progress", response=running)

    def delta(self, output: Output, delta: Delta, last: bool) -> bytes:
        out, more = b"", {"timings": output.timings()} if self.body.timings_per_token else {}
        if delta.prompt_read is not None:
            out = self._event("in_progress", response=self._running(), prompt_progress=progress(output, delta.prompt_read), **more)
        for piece in delta.pieces:
            if piece.reasoning:
                out += self._add("reasoning", piece.reasoning, **more)
            if piece.content:
                out += self._add("message", piece.content, **more)
            if piece.call is not None:
                item = _call(piece.call, output, self._calls)
                self._calls += 1
                out += self._close()
                at, of = {"output_index": self._items}, {"output_index": self._items, "item_id": item["id"]}
                self._items += 1
                out += self._event("output_item.added", **at, item={**item, "arguments": "", "status": "in_progress"})
                out += self._event("function_call_arguments.delta", **of, delta=item["arguments"])
                out += self._event("function_call_arguments.done", **of, name=item["name"], arguments=item["arguments"])
                out += self._event("output_item.done", **at, item=item)
        if last:
            out += self._open_item("message") if not self._items and not self._open else b""
            done = self._done(output)
            out += self._close() + self._event(done["status"], response=done, timings=done["timings"])
        return out

    def error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.kind, message=error.message, param=error.param)

    def _running(self) -> dict[str, Any]:
        return {**self._begin, "status": "in_progress", "output": [], "usage": None}

    def _done(self, output: Output) -> dict[str, Any]:
        cut, total = output.finish_reason == "length", usage([output])
        items = [self._item("reasoning", output.reasoning)] if output.reasoning else []
        if output.content or not (output.calls or output.reasoning):
            items.append(self._item("message", output.content))
        return {
            **self._begin,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": int(time.time()),
            "output": items + [_call(call, output, i) for i, call in enumerate(output.calls)],
            "usage": {
                "input_tokens": total["prompt_tokens"], "input_tokens_details": total["prompt_tokens_details"],
                "output_tokens": total["completion_tokens"], "output_tokens_details": total["completion_tokens_details"], "total_tokens": total["total_tokens"],
            },
            "timings": output.timings(),
            "speculation": speculation(output.stats),
        }  # fmt: skip

    def _item(self, kind: str, text: str, **more: Any) -> dict[str, Any]:
        item = {"id": self._ids[kind], "type": kind, "status": "completed"}
        if kind == "message":
            return {**item, "role": "assistant", "content": [_part(text)], **more}
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}], "encrypted_content": "", **more}

    # -- events of a stream

    def _event(self, name: str, /, **data: Any) -> bytes:
        name = name if name == "error" else f"response.{name}"
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **data}, name)

    def _place(self, kind: str) -> dict[str, Any]:
        return {"output_index": self._items, "content_index": 0, "item_id": self._ids[kind]}

    def _open_item(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        out = self._close()
        self._open, self._text = kind, ""
        out += self._event("output_item.added", output_index=self._items, item=self._item(kind, "", content=[], status="in_progress"))
        return out + self._event("content_part.added", **self._place(kind), part=_part("")) if kind == "message" else out

    def _add(self, kind: str, text: str, **more: Any) -> bytes:
        out = self._open_item(kind)
        self._text += text
        if kind == "reasoning":
            return out + self._event("reasoning_text.delta", **self._place(kind), delta=text, **more)
        return out + self._event("output_text.delta", **self._place(kind), delta=text, logprobs=[], **more)

    def _close(self) -> bytes:
        (kind, self._open), text, out = (self._open, ""), self._text, b""
        if not kind:
            return b""
        if kind == "reasoning":
            out = self._event("reasoning_text.done", **self._place(kind), text=text)
        else:
            out = self._event("output_text.done", **self._place(kind), text=text, logprobs=[])
            out += self._event("content_part.done", **self._place(kind), part=_part(text))
        out += self._event("output_item.done", output_index=self._items, item=self._item(kind, text))
        self._items += 1
        return out


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: Call, output: Output, i: int) -> dict[str, Any]:
    number, kind = f"{output.task.number:x}_{i}", "function_call"
    return {
        "id": f"fc_{number}",
        "type": kind,
        "status": "completed",
        "call_id": f"call_{number}",
        "name": call.name,
        "arguments": call.arguments,
    }
