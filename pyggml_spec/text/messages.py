"""Adapts messages of the chat APIs to what a template supports, as llama.cpp does. Support is probed by rendering short messages."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeGuard

from ..cancel import check
from ..errors import TemplateError
from ..gguf_io.reader import brief

MAX_DEPTH = 100  # of lists and mappings in a message
_MARK, _THOUGHT = "words to be found again", "thoughts before them"
_PARAMETERS = {"type": "object", "properties": {"arg": {"type": "string", "description": "x"}}}
_TOOL = {"name": "known", "description": "x", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _TOOL}]
_USER, _RESULT = {"role": "user", "content": "x"}, {"role": "tool", "content": "x", "tool_call_id": "call00001", "name": "known"}

Probe = Callable[[list[dict], list[dict]], tuple[str, bool]]
"""Renders messages with tools; returns the text, "" on failure, and whether the template refused."""


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """``value`` as plain lists, dictionaries, strings and numbers: templates get no objects with methods. Raises TemplateError: other
    types, or nested too deeply."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # lone surrogates
    if not depth:
        raise TemplateError(f"a message is nested more than {MAX_DEPTH} times; use the fields of the chat APIs")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TemplateError(f"the message {brief(value)} has keys that are no strings; use the fields of the chat APIs")
        return {plain(key): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        check()
        return [plain(item, depth - 1) for item in value]
    raise TemplateError(f"a message holds {brief(value)}, which is neither text, number, list nor mapping; convert it first")


class TemplateSupport:
    """What a template supports, probed on first use. If a probe fails for unrelated reasons, the most common answer is assumed."""

    def __init__(self, probe: Probe):
        self._probe = probe

    def _shown(self, *messages: dict, tools: Sequence[dict] = (), unless: Sequence[str] = ()) -> bool | None:
        """Whether _MARK is rendered and none of ``unless``; None if the template failed without refusing."""
        text, refused = self._probe(list(messages), list(tools))
        return None if not text and not refused else _MARK in text and not any(sign in text for sign in unless)

    @cached_property
    def strings(self) -> bool:
        """Content as text."""
        return self._shown({"role": "user", "content": _MARK}) is not False

    @cached_property
    def parts(self) -> bool:
        """Content as a list of typed parts."""
        return bool(self._shown({"role": "user", "content": [{"type": "text", "text": _MARK}]}, unless=("'text'", '"text"')))

    @cached_property
    def system(self) -> bool:
        """System messages."""
        return self._shown({"role": "system", "content": _MARK}, _USER) is not False

    @cached_property
    def objects(self) -> bool:
        """Arguments of tool calls as objects, not JSON text."""
        talk = (_USER, _calling(_MARK), _RESULT, {"role": "assistant", "content": "x"}, _USER)
        return bool(self._shown(*talk, tools=_TOOLS, unless=(str({"arg": _MARK}),)))

    @cached_property
    def tool_responses(self) -> bool:
        """Tool results inside the message with the calls, not as messages of their own: any role renders like "tool"."""
        inside = _calling("x") | {"tool_responses": [{"name": "known", "response": {"found": _MARK}}]}
        as_tool, as_other = (self._probe([_USER, _calling("x"), _RESULT | {"role": role}], _TOOLS)[0] for role in ("tool", "other"))
        return as_tool == as_other.replace("other", "tool") and bool(self._shown(_USER, inside, tools=_TOOLS, unless=("found'",)))

    @cached_property
    def between(self) -> str | None:
        """Text between reasoning and content; None if the template drops reasoning."""
        answer = {"role": "assistant", "content": _MARK, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        _, found, rest = self._probe([_USER, answer], [])[0].partition(_THOUGHT)
        between, again, _ = rest.partition(_MARK)
        return between if found and again else None

    @cached_property
    def content_with_reasoning(self) -> bool:
        """Reasoning together with content in a message with tool calls."""
        thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        refused = [self._probe([_USER, _calling("x") | thought | {"content": text}, _RESULT], _TOOLS)[1] for text in (_MARK, "")]
        return refused != [True, False]

    @cached_property
    def thinking_parts(self) -> bool:
        """Reasoning as a part of the content."""
        parts = [{"type": "thinking", "thinking": _MARK}, {"type": "text", "text": "x"}]
        return bool(self._shown(_USER, {"role": "assistant", "content": parts}, _USER, unless=("thinking'", 'thinking"')))


def _calling(argument: str) -> dict:
    call = {"name": "known", "arguments": {"arg": argument}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": call}]}


def adapt(messages: Any, supports: TemplateSupport, developer: bool) -> Any:
    """``messages`` for a template that supports ``supports``; ``developer``: whether it knows that role.
    Messages not in the form of the chat APIs are unchanged: some templates expect other forms."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    out = [_turn(dict(message), supports, developer) for message in messages]
    if any(message.get("role") == "tool" for message in out) and supports.tool_responses:
        out = _folded(out)
    if len(out) > 1 and out[0].get("role") == "system" and not supports.system:
        first, then, *others = out
        out = [then | {"content": _joined(first.get("content"), then.get("content"))}, *others]
    return out


def _folded(messages: list[dict]) -> list[dict]:
    """Moves tool results, and the answer after them, into the message with the calls."""
    out: list[dict] = []
    for message in messages:
        last = out[-1] if out else {}
        results = found if isinstance(found := last.get("tool_responses"), list) else []
        if message.get("role") == "tool" and _are_calls(calls := last.get("tool_calls")):
            called = calls[len(results)].get("function", {}) if len(results) < len(calls) else {}
            name = called.get("name") or message.get("name") or message.get("tool_call_id")
            last["tool_responses"] = [*results, {"name": name, "response": _value(message.get("content"))}]
        elif message.get("role") == "assistant" and results and not last.get("content") and not message.get("tool_calls"):
            last["content"] = message.get("content")
        else:
            out.append(message)
    return out


def _value(text: Any) -> Any:
    """The JSON value of ``text``, or ``text`` itself."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _turn(message: dict, supports: TemplateSupport, developer: bool) -> dict:
    if message.get("role") == "developer" and not developer:
        message["role"] = "system"
    if _are_calls(message.get("tool_calls")):
        message["tool_calls"] = [_call(call, supports) for call in message["tool_calls"]]
    if message.get("role") == "assistant" and message.get("content") is None:
        message["content"] = ""
    content = message.get("content")
    if isinstance(content, list) and not supports.parts and supports.strings:
        message["content"] = "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    elif isinstance(content, str) and not supports.strings and supports.parts:
        message["content"] = _parts(content)
    if isinstance(thought := message.get("reasoning_content"), str):
        message.setdefault("thinking", thought)
        if thought and content and message.get("tool_calls") and not supports.content_with_reasoning:
            message["content"] = ""
        if supports.thinking_parts:
            message["content"] = [{"type": "thinking", "thinking": thought}, *_parts(message.get("content"))]
    return message


def _are_calls(value: Any) -> TypeGuard[list[dict]]:
    return isinstance(value, list) and all(isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in value)


def _call(call: dict, supports: TemplateSupport) -> dict:
    function = call.get("function", {})
    if "arguments" not in function:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str) and supports.objects:
        arguments = _value(arguments)
    elif not isinstance(arguments, str) and not supports.objects:
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return call | {"function": function | {"arguments": arguments}}


def _parts(content: Any) -> list:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _joined(first: Any, then: Any) -> Any:
    return f"{first}\n{then}" if isinstance(first, str) and isinstance(then, str) else [*_parts(first), *_parts(then)]
