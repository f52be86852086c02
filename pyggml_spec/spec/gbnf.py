"""GBNF, llama.cpp's notation of grammars: read here, so that what is wrong is said with its place and nothing else hears of it.

libllama's own parser writes its reasons to the process's standard error, overflows the stack or the memory on absurd texts, and takes
counts above 2,000 for "any number". The notation is that of its ``grammars/README.md``.
"""

import re
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import SamplingError

MAX_TEXT = 1 << 17  # characters
MAX_DEPTH = 1000  # of parentheses
MAX_REPEATS = 2000  # llama.cpp's own limit
LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)  # no text holds them
_SPACE, _SPACE_OR_LINE = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME, _NUMBER, _LINE_END = re.compile(r"[a-zA-Z0-9-]+"), re.compile(r"[0-9]+"), re.compile(r"\r\n|\r|\n|\Z")
_TOKEN = re.compile(r"<\[([0-9]+)\]>|(<[^>]*>)")
_HEX = {"x": re.compile(r"[0-9a-fA-F]{2}"), "u": re.compile(r"[0-9a-fA-F]{4}"), "U": re.compile(r"[0-9a-fA-F]{8}")}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}


@dataclass(frozen=True)
class Characters:
    """One character of these ranges, (first, last) code points in order and apart from each other."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Token:
    """One token, or with ``negated`` any other: by its id, or by a text like ``<think>``."""

    name: str | int
    negated: bool


@dataclass(frozen=True)
class Reference:
    """What the rule of this name matches. ``at``: where it stands in the text."""

    name: str
    at: int


@dataclass(frozen=True)
class Repeat:
    """``part`` from ``least`` to ``most`` times; None: any number."""

    part: "Part"
    least: int
    most: int | None


@dataclass(frozen=True)
class Sequence:
    """One part after the other."""

    parts: tuple["Part", ...]


@dataclass(frozen=True)
class Choice:
    """One of these."""

    parts: tuple["Part", ...]


Part = Characters | Token | Reference | Repeat | Sequence | Choice


@dataclass
class _Open:
    """An alternative that is being read: of a rule, or of a pair of parentheses."""

    begins: int
    done: list[Part] = field(default_factory=list)
    items: list[Part] = field(default_factory=list)
    repeatable: bool = False  # whether the last item is one that * + ? {} may follow

    def end_alternative(self) -> None:
        self.done.append(self.items[0] if len(self.items) == 1 else Sequence(tuple(self.items)))
        self.items, self.repeatable = [], False


def parse(text: str) -> dict[str, Part]:
    """The rules of a grammar by name. Of two rules of one name the later one counts, as in llama.cpp.

    Raises:
        SamplingError: the text is no grammar: which line and column, and what is expected there.
    """
    if len(text) > MAX_TEXT:
        raise SamplingError(f"the grammar has {len(text)} characters, but at most {MAX_TEXT} are allowed; make it smaller")
    if not text.strip() or "\0" in text:
        raise SamplingError("the grammar is empty" if not text.strip() else "the grammar holds a NUL character; remove it")
    return _Reader(text).rules()


class _Reader:
    def __init__(self, text: str):
        self.text, self.at = text, 0

    def rules(self) -> dict[str, Part]:
        rules: dict[str, Part] = {}
        self._skip(_SPACE_OR_LINE)
        while self.at < len(self.text):
            name = self._take(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            if not self.text.startswith("::=", self.at):
                self._fail("expecting ::= after the name of a rule")
            self.at += 3
            self._skip(_SPACE_OR_LINE)
            rules[name] = self._alternatives()
            self._take(_LINE_END, "a new line, or one of the parts that a rule is made of")
            self._skip(_SPACE_OR_LINE)
        if "root" not in rules:
            raise SamplingError("the grammar is wrong: it has no rule named root, which is where it begins; add one")
        self._check_references(rules)
        return rules

    def _alternatives(self) -> Part:
        """Reads to the end of a rule."""
        stack = [_Open(self.at)]
        while True:
            here, nested = stack[-1], len(stack) > 1
            space = _SPACE_OR_LINE if nested else _SPACE
            c = self.text[self.at : self.at + 1]
            if c == "|":
                here.end_alternative()
                self.at += 1
                space = _SPACE_OR_LINE
            elif c == "(":
                if len(stack) > MAX_DEPTH:
                    self._fail(f"more than {MAX_DEPTH} parentheses are open, name parts of it as rules")
                stack.append(_Open(self.at))
                self.at += 1
                space = _SPACE_OR_LINE
            elif c == ")" and nested:
                here.end_alternative()
                self.at += 1
                stack.pop()
                space = _SPACE_OR_LINE if len(stack) > 1 else _SPACE
                stack[-1].items.append(_choice(here.done))
                stack[-1].repeatable = True
            elif c and c in "*+?{":
                self._repeat(here, space)
            elif (items := self._item(c)) is not None:
                here.items += items
                here.repeatable = bool(items)
            elif nested:
                self.at = here.begins if not c else self.at
                self._fail("this parenthesis is never closed, expecting ')'" if not c else "expecting ')' or a part of a rule")
            else:
                here.end_alternative()
                return _choice(here.done)
            self._skip(space)

    def _item(self, c: str) -> list[Part] | None:
        """What begins with ``c``; nothing for an empty literal or class; None: no part of a rule begins so."""
        begins = self.at
        if c == '"':
            self.at += 1
            literal: list[Part] = []
            while self._peek(begins, "literal") != '"':
                code = self._character()
                literal.append(Characters(((code, code),)))
            self.at += 1
            return [Sequence(tuple(literal))] if len(literal) > 1 else literal
        if c == "[":
            self.at += 1
            return self._class(begins)
        if c == ".":
            self.at += 1
            return [Characters(_complement([]))]
        if c and c in "<!":
            self.at += c == "!"
            match = self._take(_TOKEN, "a token like <[42]> or <think>")
            return [Token(int(match[1][:10]) if match[1] else match[2], c == "!")]
        if name := _NAME.match(self.text, self.at):
            self.at = name.end()
            return [Reference(name[0], begins)]
        return None

    def _class(self, begins: int) -> list[Part]:
        negated = self._peek(begins, "class") == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek(begins, "class") != "]":
            here, first = self.at, self._character()
            last = first
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                self._peek(begins, "class")
                last = self._character()
            if last < first:
                self.at = here
                self._fail("this range of characters runs backwards, swap its ends")
            ranges.append((first, last))
        self.at += 1
        if not ranges:
            return []  # llama.cpp takes an empty class for nothing at all
        kept = _complement(_complement(ranges)) if not negated else _complement(ranges)
        if not kept:
            self.at = begins
            self._fail("no character is in this class")
        return [Characters(kept)]

    def _repeat(self, here: _Open, space: re.Pattern) -> None:
        begins, c = self.at, self.text[self.at]
        if not here.repeatable:
            self._fail(f"expecting something before {c} that it repeats")
        self.at += 1
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(c) or self._counts(begins, space)
        part = here.items.pop()
        here.repeatable = most != 0
        if most != 0:
            here.items.append(Repeat(part, least, most))

    def _counts(self, begins: int, space: re.Pattern) -> tuple[int, int | None]:
        self._skip(space)
        least = self._count()
        most: int | None = least
        self._skip(space)
        if self.text.startswith(",", self.at):
            self.at += 1
            self._skip(space)
            most = self._count() if _NUMBER.match(self.text, self.at) else None
            self._skip(space)
        if not self.text.startswith("}", self.at):
            self._fail("expecting '}' after the number of repetitions")
        self.at += 1
        if most is not None and most < least:
            self.at = begins
            self._fail(f"this repeats something {{{least},{most}}}, and the second number is the smaller one, swap them")
        return least, most

    def _count(self) -> int:
        begins = self.at
        digits = self._take(_NUMBER, "a number of repetitions")[0].lstrip("0")
        if len(digits) > 9 or int(digits or "0") > MAX_REPEATS:
            self.at = begins
            self._fail(f"more than {MAX_REPEATS} repetitions, use * or +")
        return int(digits or "0")

    def _character(self) -> int:
        """One character of a literal or a class, perhaps escaped, as its code point."""
        c = self.text[self.at]
        self.at += 1
        if c != "\\":
            if _SURROGATES[0] <= ord(c) <= _SURROGATES[1]:
                self._fail("this is half a character")
            return ord(c)
        kind = self.text[self.at : self.at + 1]
        if kind in _HEX:
            self.at += 1
            code = int(self._take(_HEX[kind], f"{ {'x': 2, 'u': 4, 'U': 8}[kind] } hexadecimal digits")[0], 16)
            if code > LAST_CHARACTER:
                self._fail("the last character is \\U0010FFFF")
            return code
        if kind not in _ESCAPES:
            self._fail("this escape is unknown, use \\\\ for a backslash")
        self.at += 1
        return ord(_ESCAPES[kind])

    def _check_references(self, rules: dict[str, Part]) -> None:
        todo = list(rules.values())
        while todo:
            part = todo.pop()
            if isinstance(part, Reference) and part.name not in rules:
                self.at = part.at
                self._fail(f"there is no rule named {part.name[:100]!r}")
            todo += children(part)

    def _skip(self, pattern: re.Pattern) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _take(self, pattern: re.Pattern, what: str) -> re.Match:
        match = pattern.match(self.text, self.at)
        if match is None:
            self._fail(f"expecting {what}")
        self.at = match.end()
        return match

    def _peek(self, begins: int, what: str) -> str:
        if self.at >= len(self.text):
            self.at = begins
            self._fail(f"unexpected end of input, this {what} is never closed")
        return self.text[self.at]

    def _fail(self, what: str) -> NoReturn:
        before = self.text[: self.at]
        line, column = before.count("\n") + 1, self.at - (before.rfind("\n") + 1) + 1
        found = self.text[self.at : self.at + 20]
        shown = f"at {found!r}" if found else "at its end"
        raise SamplingError(
            f"the grammar is wrong in line {line}, column {column}, {shown}: {what}; see llama.cpp's grammars/README.md for the notation"
        )


def children(part: Part) -> tuple[Part, ...]:
    """The parts that a part is made of."""
    if isinstance(part, (Sequence, Choice)):
        return part.parts
    return (part.part,) if isinstance(part, Repeat) else ()


def _choice(parts: list[Part]) -> Part:
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def _complement(ranges: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """All characters that are in none of ``ranges``, surrogates aside."""
    out, first = [], 0
    for low, high in (*sorted((*ranges, _SURROGATES)), (LAST_CHARACTER + 1, LAST_CHARACTER + 1)):
        if low > first:
            out.append((first, low - 1))
        first = max(first, high + 1)
    return tuple(out)
