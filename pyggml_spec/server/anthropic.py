"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens. Its requests are translated to ``bodies.Chat`` first."""

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from ..text.values import Call
from .bodies import Chat, Messages, convert, field_names, parse, wrong
from .conversation import NO_MESSAGES
from .errors import ApiError
from .http import PING, Request, Response, event, json_response
from .output import Delta, Output
from .pictures import media_kind
from .reading import Context, ResponseEncoder, count_prompt, respond_to_chat
from .sampling import MISPLACED, SCHEMA_METADATA, check_members

_SHARED = tuple((field_names(Messages) & field_names(Chat)) - {"messages", "tools", "tool_choice"})
_SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_")
_NAMES = {
    "reasoning_effort": "output_config.effort", "the parameters of tools": "the input_schema of tools", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}  # fmt: skip
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*?cch=[0-9a-f]+;\s*")
_PLACE = '{"output_config": {"format": {"type": "json_schema", "schema": {...}}}}'


async def messages(context: Context, request: Request) -> Response:
    given = parse(request, Messages)
    request.unknown += [f"output_config.{name}" for name in given.output_config if name not in ("effort", "format")]
    body, names = to_chat(given)
    return await respond_to_chat(context, request, body, Encoder, names)


async def count_tokens(context: Context, request: Request) -> Response:
    body, names = to_chat(convert(request.json_object(), Messages))
    return json_response({"input_tokens": await count_prompt(context, request, body, names)})


def to_chat(given: Messages) -> tuple[Chat, dict[str, str]]:
    """The request as a chat, and the client's names of fields by those of chats, for ``translated``. Raises ApiError: no messages, or a format or
    a tool that is not supported."""
    if not isinstance(given.messages, list):
        raise ApiError(400, NO_MESSAGES, param="messages")
    system = _system(given.system)
    placed = [] if system is None else [("system", {"role": "system", "content": system})]
    placed += [(f"messages[{i}]", m) for i, message in enumerate(given.messages) for m in _message(message)]
    names = {**_NAMES, **{f"messages[{i}]": place for i, (place, _) in enumerate(placed)}}
    body = Chat(
        **{name: getattr(given, name) for name in _SHARED}, messages=[message for _, message in placed], stop=given.stop_sequences,
        tools=_tools(given.tools),
    )  # fmt: skip
    choice = given.tool_choice
    if not isinstance(disabled := choice.get("disable_parallel_tool_use", False), bool):
        raise wrong("tool_choice.disable_parallel_tool_use", disabled, "true or false")
    body.parallel_tool_calls, body.tool_choice = not disabled, _tool_choice(choice, body.tools)
    config = given.output_config
    if (effort := config.get("effort")) is not None:
        if not isinstance(effort, str):
            raise wrong("output_config.effort", effort, "a text")
        body.reasoning_effort = effort
    check_members({name: config[name] for name in MISPLACED if name in config}, "output_config", (), _PLACE)
    for at, form in (("output_config.format", config.get("format")), ("output_format", given.output_format)):
        if form is None:
            continue
        if not isinstance(form, dict) or form.get("type") != "json_schema" or body.response_format:
            raise wrong(at, form, '{"type": "json_schema", "schema": ...}, alone and without response_format')
        check_members(form, at, ("type", "schema", *SCHEMA_METADATA), _PLACE)
        body.response_format = {"type": "json_schema", "json_schema": {"schema": form.get("schema", {})}}
        names |= {"response_format": at, "response_format.json_schema": at, "response_format.json_schema.schema": f"{at}.schema"}
    return body, names


def _tool_choice(choice: dict[str, Any], tools: list[dict[str, Any]]) -> Any:
    """``tool_choice`` in OpenAI's form. Raises ApiError."""
    kind = choice.get("type")
    if kind not in ("auto", "any", "none", "tool") and choice:
        raise wrong("tool_choice.type", kind, '"auto", "any", "none" or "tool"')
    if kind == "any" and not tools:
        raise ApiError(400, "tool_choice is any, and there are no tools", param="tool_choice")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"any": "required", None: "auto"}.get(kind, kind)


def _system(system: Any) -> str | None:
    """The system prompt, without the line that Claude Code changes with every request: no prefix could be reused."""
    if system is None:
        return None
    texts: list[Any] = (
        [block.get("text") if isinstance(block, dict) else None for block in system] if isinstance(system, list) else [system]
    )
    if not all(isinstance(text, str) for text in texts):
        raise wrong("system", system, "a text or a list of texts")
    return "".join(_BILLING.sub("", text) for text in texts)


def _message(message: Any) -> list[dict[str, Any]]:
    """One message as chat messages. Results of tools are messages of their own, before the text: they answer the turn before."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thought = ""
    for block in message["content"]:
        if not isinstance(block, dict):
            raise ApiError(400, "a block of a message's content is no object", param="messages")
        match block.get("type"):
            case "thinking":
                thought += str(block.get("thinking", ""))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                result = block.get("content", "")
                if isinstance(result, list):  # pictures that a tool gives stand in the user's message
                    content += [c for c in result if media_kind(c)]
                    result = [c for c in result if not media_kind(c)]
                if isinstance(result, list) and all(isinstance(c, dict) and c.get("type") == "text" for c in result):
                    result = "".join(str(c.get("text", "")) for c in result)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            case _:
                content.append({name: value for name, value in block.items() if name in ("type", "text", "source")})
    if not (content or calls or thought):
        return results
    turn: dict[str, Any] = {"role": message.get("role"), "content": content or ""}
    return [*results, {**turn, **({"tool_calls": calls} if calls else {}), **({"reasoning_content": thought} if thought else {})}]


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in tools):
        raise wrong("tools", tools, "a list of tools with names")
    # others with a type of their own, bash for instance, are run by the client, and known to the model by their name alone
    if other := next((t for t in tools if str(t.get("type") or "custom").startswith(_SERVER_TOOLS)), None):
        what = f"the tool {other['name']!r} is of the type {str(other['type'])[:60]!r}"
        raise ApiError(501, f"{what}, which Anthropic's own servers run; give tools of yours", param="tools")
    functions = ({"name": t["name"], "description": t.get("description") or "", "parameters": t.get("input_schema") or {}} for t in tools)
    return [{"type": "function", "function": function} for function in functions]


class Encoder(ResponseEncoder):
    """Content blocks. In a stream one is open at a time, and they are numbered in the order in which they begin."""

    def __init__(self, context: Context, request: Request, body: Chat) -> None:
        super().__init__(context, request, body)
        self._head = {"id": "msg_cmpl_" + secrets.token_hex(12), "type": "message", "role": "assistant", "model": context.served.name}
        self._calls, self._index, self._kind = 0, -1, ""  # the block that is open

    async def whole(self) -> Response:
        (output,) = self.outputs
        content: list[dict[str, Any]] = []
        if output.reasoning:
            content.append({"type": "thinking", "thinking": output.reasoning, "signature": ""})
        if output.content or not (output.calls or output.reasoning):
            content.append({"type": "text", "text": output.content})
        content += [{**_tool_use(call, output, i), "input": msgspec.Raw(call.arguments.encode())} for i, call in enumerate(output.calls)]
        return json_response({**self._head, "content": content, **_stop(output), "usage": _usage(output)})

    def delta(self, output: Output, delta: Delta, last: bool) -> bytes:
        out = b""
        if self.ping == PING:  # the first one
            self.ping = _event("ping")
            empty: dict[str, Any] = {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_usage(output), "output_tokens": 0},
            }
            out = _event("message_start", message={**self._head, **empty})
        for piece in delta.pieces:
            if piece.reasoning:
                start: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
                out += self._block("thinking", start, {"type": "thinking_delta", "thinking": piece.reasoning})
            if piece.content:
                out += self._block("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": piece.content})
            if piece.call is not None:
                start = {**_tool_use(piece.call, output, self._calls), "input": {}}
                self._calls += 1
                out += self._block("tool_use", start, {"type": "input_json_delta", "partial_json": piece.call.arguments})
        if last:
            out += self._close() + _event("message_delta", delta=_stop(output), usage=_usage(output)) + _event("message_stop")
        return out

    def error(self, error: ApiError) -> bytes:
        return event(error.anthropic(), "error")

    def _block(self, kind: str, start: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        out = b""
        if kind != self._kind or kind == "tool_use":
            out = self._close()
            self._index, self._kind = self._index + 1, kind
            out += _event("content_block_start", index=self._index, content_block=start)
        return out + _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        kind, self._kind = self._kind, ""
        signature = {"type": "signature_delta", "signature": ""}
        signed = _event("content_block_delta", index=self._index, delta=signature) if kind == "thinking" else b""
        return signed + _event("content_block_stop", index=self._index) if kind else b""


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _usage(output: Output) -> dict[str, int]:
    reused = output.stats.reused_tokens
    return {
        "cache_read_input_tokens": reused, "cache_creation_input_tokens": 0, "input_tokens": len(output.task.request.ids) - reused,
        "output_tokens": output.stats.emitted,
    }  # fmt: skip


def _stop(output: Output) -> dict[str, str | None]:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[output.finish_reason]
    word = output.stopping_word or None
    return {"stop_reason": "stop_sequence" if reason == "end_turn" and word else reason, "stop_sequence": word}


def _tool_use(call: Call, output: Output, i: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{output.task.number:x}_{i}", "name": call.name}
