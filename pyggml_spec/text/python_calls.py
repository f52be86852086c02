"""Calls as LFM2 writes them, `[look_up(word="ab", n=3), stop()]`: Python's literals, and JSON's."""

import math
import re
import sys
from typing import Any

_PART = re.compile(
    r"""\s*(?:("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|([^\W\d][\w.-]*)|([][(){},:=]))""", re.DOTALL
)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "\n": "", **{c: c for c in "\\'\"/"}}
_DEEPEST = 64
_MOST_DIGITS = 308


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments. Raises ValueError: it is no list of calls with keywords."""
    reader = _Reader(text)
    reader.take("[")
    made = reader.several("]", reader.call)
    if reader.text[reader.at :].strip():
        raise ValueError("text behind the list")
    return made


def _unescaped(match: re.Match[str]) -> str:
    what = match[1]
    if len(what) == 1:
        return _ESCAPES.get(what, match[0])
    code = int(what[1:], 16)
    return chr(code) if code <= sys.maxunicode else "\ufffd"


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def next(self) -> tuple[str, str]:
        """The kind of the next part (text, number, word or mark), and the part."""
        match = _PART.match(self.text, self.at)
        if match is None:
            raise ValueError("no part of a call")
        self.at = match.end()
        return ("text", "number", "word", "mark")[match.lastindex - 1], match[match.lastindex]  # type: ignore[operator, index]

    def take(self, mark: str) -> None:
        if self.next() != ("mark", mark):
            raise ValueError(f"{mark} is missing")

    def several(self, end: str, one: Any) -> list[Any]:
        """Up to ``end``, with commas between them."""
        out: list[Any] = []
        while True:
            before = self.at
            if self.next() == ("mark", end):
                return out
            self.at = before
            out.append(one())
            kind, part = self.next()
            if (kind, part) == ("mark", end):
                return out
            if (kind, part) != ("mark", ","):
                raise ValueError("a comma is missing")

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self.word()
        self.take("(")
        return name, dict(self.several(")", lambda: self.pair(self.word, "=")))

    def word(self) -> str:
        kind, part = self.next()
        if kind != "word":
            raise ValueError("no name")
        return part

    def pair(self, key: Any, mark: str) -> tuple[Any, Any]:
        name = key()
        self.take(mark)
        return name, self.value()

    def key(self) -> str:
        kind, part = self.next()
        if kind != "text":
            raise ValueError("a key that is no text")
        return _ESCAPE.sub(_unescaped, part[1:-1])

    def value(self) -> Any:
        kind, part = self.next()
        if kind == "text":
            return _ESCAPE.sub(_unescaped, part[1:-1])
        if kind == "number":  # what no double holds stays text
            number: Any = part if len(part) > _MOST_DIGITS else int(part) if part.lstrip("-").isdecimal() else float(part)
            return number if not isinstance(number, float) or math.isfinite(number) else part
        if kind == "word" and part in _WORDS:
            return _WORDS[part]
        if part not in ("[", "{") or self.depth >= _DEEPEST:
            raise ValueError("no value")
        self.depth += 1
        out: Any = self.several("]", self.value) if part == "[" else dict(self.several("}", lambda: self.pair(self.key, ":")))
        self.depth -= 1
        return out
