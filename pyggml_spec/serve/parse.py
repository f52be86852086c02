"""A model's text, as it comes, told apart: reasoning, content and calls of tools. What comes out never depends on how the text was cut.

    reasoning --</think>--> content <--> call
    a template that opens <think> itself begins in "reasoning"; a text that begins with <think> goes there

Calls are written in five ways, which are told apart by what is between the markers: JSON (Qwen 3, Hermes), <function=..><parameter=..>
(Qwen 3.5), name and <arg_key>..<arg_value> (Laguna), Gemma 4's notation between its own markers, and Llama 3's bare JSON.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
GEMMA_CALL, GEMMA_END_CALL = "<|tool_call>", "<tool_call|>"
GEMMA_THINK, GEMMA_END_THINK = "<|channel>", "<channel|>"
GEMMA_QUOTE = '<|"|>'
PYTHON_TAG = "<|python_tag|>"
KEPT = (CALL, END_CALL, GEMMA_CALL, GEMMA_END_CALL, GEMMA_THINK, GEMMA_END_THINK, GEMMA_QUOTE, PYTHON_TAG, THINK, END_THINK)
"""Texts of control tokens that are kept in a chat's text, where the vocabulary has such tokens: the parser needs them."""
_PAIRS = {CALL: END_CALL, GEMMA_CALL: GEMMA_END_CALL}


@dataclass(frozen=True)
class Call:
    """A whole call of a tool; ``arguments`` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """What is new: some content, some reasoning, or a call."""

    content: str = ""
    reasoning: str = ""
    call: Call | None = None


class Parser:
    """``push`` text, then ``finish``. ``thinks``: whether it begins inside of the reasoning; ``tools``: the tools that may be called, with
    their descriptions; ``reasoning``: False leaves the reasoning where it is."""

    def __init__(
        self, *, thinks: bool = False, tools: Sequence[dict[str, Any]] = (), reasoning: bool = True, bare_json: bool = False
    ) -> None:
        self._tools = {t["function"]["name"]: t["function"] for t in tools}
        self._reasoning, self._bare = reasoning, bare_json and bool(tools)
        self._state = "reasoning" if thinks and reasoning else "start"
        self._held = ""
        self._opener, self._end = "", END_THINK
        self._lead = self._state == "reasoning"  # whether whitespace that comes next is dropped
        self._blank = ""  # whitespace that comes out if text follows it

    def push(self, text: str) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        while self._step(out, final=False):
            pass
        return out

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        while self._step(out, final=True):
            pass
        if self._blank and self._state == "content":
            out.append(Piece(content=self._blank))
        return out

    # -- one move; whether there may be another

    def _step(self, out: list[Piece], final: bool) -> bool:
        return {"start": self._start, "reasoning": self._think, "content": self._content, "call": self._call}[self._state](out, final)

    def _start(self, out: list[Piece], final: bool) -> bool:
        """Before anything that is no whitespace: it may be reasoning, or a bare call."""
        text = self._held.lstrip()
        openers = {THINK: END_THINK, GEMMA_THINK: GEMMA_END_THINK} if self._reasoning else {}
        for opener, end in openers.items():
            if text.startswith(opener):
                self._held, self._end, self._state, self._lead = text[len(opener) :], end, "reasoning", True
                return True
        if self._bare and text and (text.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(text)):
            if not final:
                return False
            call = _named(_json(text.removeprefix(PYTHON_TAG).strip()), self._tools)
            if call is not None:
                out.append(Piece(call=call))
                self._held, self._state = "", "content"
                return False
        if not final and (not text or any(opener.startswith(text) for opener in openers)):
            return False
        self._state = "content"
        return True

    def _think(self, out: list[Piece], final: bool) -> bool:
        found = self._to(out, "reasoning", (self._end,), final)
        if found:
            self._state, self._lead, self._blank = "content", True, ""
        return bool(found)

    def _content(self, out: list[Piece], final: bool) -> bool:
        found = self._to(out, "content", tuple(_PAIRS) if self._tools else (), final)
        if found:
            self._opener, self._end, self._state = found, _PAIRS[found], "call"
        return bool(found)

    def _call(self, out: list[Piece], final: bool) -> bool:
        at = self._held.find(self._end)
        if at < 0 and not final:
            return False
        inside, closed = (self._held, "") if at < 0 else (self._held[:at], self._end)
        self._held, self._state = self._held[len(inside) + len(closed) :], "content"
        call = parse_call(inside, self._tools)
        if call is None:  # it is what the model wrote
            self._emit(out, "content", self._opener + inside + closed)
        else:
            out.append(Piece(call=call))
            self._lead, self._blank = True, ""
        return True

    def _to(self, out: list[Piece], kind: str, markers: Sequence[str], final: bool) -> str:
        """Gives out what is held up to the first of ``markers``, which is returned, or up to what could begin one."""
        found = min(((at, m) for m in markers if (at := self._held.find(m)) >= 0), default=None)
        if found is None:
            keep = 0 if final else _beginning(self._held, markers)
            self._emit(out, kind, self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return ""
        at, marker = found
        self._emit(out, kind, self._held[:at])
        self._held = self._held[at + len(marker) :]
        return marker

    def _emit(self, out: list[Piece], kind: str, text: str) -> None:
        """Holds back whitespace at the end where a marker may follow, before which it is dropped."""
        text = self._blank + text
        if self._lead:
            text = text.lstrip()
        body = text.rstrip() if kind == "reasoning" or self._tools else text
        self._lead, self._blank = self._lead and not text, text[len(body) :]
        if body:
            out.append(Piece(reasoning=body) if kind == "reasoning" else Piece(content=body))


def _beginning(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a marker."""
    for n in range(min(max(map(len, markers), default=1) - 1, len(text)), 0, -1):
        if any(m.startswith(text[-n:]) for m in markers):
            return n
    return 0


def parse_call(text: str, tools: dict[str, Any]) -> Call | None:
    """What is between the markers of a call; None if it calls none of ``tools``."""
    text = text.strip()
    if text.startswith("<function="):
        return _tagged(text, tools)
    if text.startswith("call:"):
        return _gemma(text, tools)
    if text.startswith(("{", "[")):
        return _named(_json(text), tools)
    return _laguna(text, tools)


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _named(value: Any, tools: dict[str, Any]) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in tools:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return _made(value["name"], arguments)


def _made(name: str, arguments: Any) -> Call | None:
    return Call(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _tagged(text: str, tools: dict[str, Any]) -> Call | None:
    name, _, inside = text.removeprefix("<function=").partition(">")
    name = name.strip()
    if name not in tools:
        return None
    return _made(name, {key.strip(): _typed(value, key.strip(), tools[name]) for key, value in _PARAMETER.findall(inside)})


_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _laguna(text: str, tools: dict[str, Any]) -> Call | None:
    name = text.partition("<arg_key>")[0].strip()
    if name not in tools:
        return None
    return _made(name, {key.strip(): _typed(value, key.strip(), tools[name]) for key, value in _ARGUMENT.findall(text)})


def _typed(text: str, key: str, tool: dict[str, Any]) -> Any:
    """A parameter's text as the value that the tool's description asks for; text where it asks for text, or the text is no JSON."""
    parameters = tool.get("parameters") or {}
    wanted = (parameters.get("properties") or {}).get(key, {}) if isinstance(parameters, dict) else {}
    if isinstance(wanted, dict) and wanted.get("type") == "string":
        return text
    value = _json(text.strip())
    return text if value is None and text.strip() != "null" else value


def _gemma(text: str, tools: dict[str, Any]) -> Call | None:
    match = re.match(r"call:([^{\s]+)\s*", text)
    if match is None or match[1] not in tools:
        return None
    try:
        value, rest = _gemma_value(text[match.end() :])
    except (ValueError, RecursionError):
        return None
    return _made(match[1], value) if not rest.strip() else None


def _gemma_value(text: str) -> tuple[Any, str]:
    """One value of Gemma 4's notation (names without quotes, texts between <|"|>), and what follows it."""
    text = text.lstrip()
    if text.startswith(GEMMA_QUOTE):
        inside, found, rest = text[len(GEMMA_QUOTE) :].partition(GEMMA_QUOTE)
        if not found:
            raise ValueError
        return inside, rest
    if text.startswith("{"):
        return _gemma_list(text[1:], "}")
    if text.startswith("["):
        return _gemma_list(text[1:], "]")
    match = re.match(r"[^,}\]]+", text)
    if match is None:
        raise ValueError
    return json.loads(match[0]), text[match.end() :]


def _gemma_list(text: str, end: str) -> tuple[Any, str]:
    named: dict[str, Any] = {}
    listed: list[Any] = []
    text = text.lstrip()
    while not text.startswith(end):
        if end == "}":
            match = re.match(r"([^:]+):", text)
            if match is None:
                raise ValueError
            value, text = _gemma_value(text[match.end() :])
            named[match[1].strip().replace(GEMMA_QUOTE, "")] = value
        else:
            value, text = _gemma_value(text)
            listed.append(value)
        text = text.lstrip()
        if text.startswith(","):
            text = text[1:].lstrip()
        elif not text.startswith(end):
            raise ValueError
    return (named if end == "}" else listed), text[1:]
