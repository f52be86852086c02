"""Reader of GBNF, llama.cpp's grammar notation (``grammars/README.md``), with error positions and limits.

libllama's own parser writes errors to stderr, overflows stack or memory on hostile input, and treats counts above 2,000 as unbounded.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import SamplingError
from .productive import productive

MAX_TEXT = 1 << 17  # characters
MAX_DEPTH = 1000  # of parentheses
MAX_REPEATS = 2000  # llama.cpp's own limit
MOST_EXPANDED = 200_000  # nodes of a regular expression after inlining references
MOST_COUNTED = 1000  # the matcher keeps a state per repetition
MOST_NESTED = 8  # nested groups in llguidance's notation
LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)  # not valid in text
_SPACE, _SPACE_OR_LINE = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME, _NUMBER, _LINE_END = re.compile(r"[a-zA-Z0-9-]+"), re.compile(r"[0-9]+"), re.compile(r"\r\n|\r|\n|\Z")
_TOKEN = re.compile(r"<\[([0-9]+)\]>|(<[^>]*>)")
_HEX = {"x": re.compile(r"[0-9a-fA-F]{2}"), "u": re.compile(r"[0-9a-fA-F]{4}"), "U": re.compile(r"[0-9a-fA-F]{8}")}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}


@dataclass(frozen=True)
class Characters:
    """One character of these ranges: (first, last) code points, sorted and disjoint."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Token:
    """One token, or any other if ``negated``; by id or by a text like ``<think>``."""

    name: str | int
    negated: bool


@dataclass(frozen=True)
class Reference:
    """A rule's name; ``at``: its offset in the text."""

    name: str
    at: int


@dataclass(frozen=True)
class Repeat:
    """``part``, ``least`` to ``most`` times; None: unbounded."""

    part: "Part"
    least: int
    most: int | None


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other."""

    parts: tuple["Part", ...]


@dataclass(frozen=True)
class Choice:
    """One of the parts."""

    parts: tuple["Part", ...]


Part = Characters | Token | Reference | Repeat | Sequence | Choice


@dataclass
class _Open:
    """An alternative being read, of a rule or a group."""

    begins: int
    done: list[Part] = field(default_factory=list)
    items: list[Part] = field(default_factory=list)
    repeatable: bool = False  # whether * + ? {} may follow

    def end_alternative(self) -> None:
        self.done.append(self.items[0] if len(self.items) == 1 else Sequence(tuple(self.items)))
        self.items, self.repeatable = [], False


def parse(text: str) -> dict[str, Part]:
    """The rules of a grammar by name; the last definition of a name counts, as in llama.cpp. Raises SamplingError: invalid grammar, with
    line, column and what is expected."""
    check_text(text, "grammar")
    return _Reader(text).rules()


def check_text(text: str, what: str) -> None:
    """Raises SamplingError: too long, empty, or with a NUL."""
    if len(text) > MAX_TEXT:
        raise SamplingError(f"the {what} has {len(text)} characters, but at most {MAX_TEXT} are allowed; make it smaller")
    if not text.strip() or "\0" in text:
        raise SamplingError(f"the {what} {'holds a NUL character; remove it' if text.strip() else 'is empty'}")


class _Reader:
    def __init__(self, text: str):
        self.text, self.at = text, 0

    def rules(self) -> dict[str, Part]:
        rules: dict[str, Part] = {}
        self._skip(_SPACE_OR_LINE)
        while self.at < len(self.text):
            name = self._take(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            if not self._took("::="):
                self._fail("expecting ::= after the name of a rule")
            self._skip(_SPACE_OR_LINE)
            rules[name] = self._alternatives()
            self._take(_LINE_END, "a new line, or one of the parts that a rule is made of")
            self._skip(_SPACE_OR_LINE)
        if "root" not in rules:
            raise SamplingError("the grammar is wrong: it has no rule named root, which is where it begins; add one")
        for part in (part for rule in rules.values() for part in _parts(rule)):
            if isinstance(part, Reference) and part.name not in rules:
                self._fail(f"there is no rule named {part.name[:100]!r}", part.at)
        return _that_end(rules)

    def _alternatives(self) -> Part:
        """Reads to the end of a rule."""
        stack = [_Open(self.at)]
        while True:
            here, nested = stack[-1], len(stack) > 1
            c = self.text[self.at : self.at + 1]
            if c == "(" and len(stack) > MAX_DEPTH:
                self._fail(f"more than {MAX_DEPTH} parentheses are open, name parts of it as rules")
            elif c == "(":
                stack.append(_Open(self.at))
                self.at += 1
            elif c and c in "*+?{":
                self._repeat(here, _SPACE_OR_LINE if nested else _SPACE)
            elif (items := self._item(c)) is not None:
                here.items += items
                here.repeatable = bool(items)
            elif nested and c not in ("|", ")"):
                self._fail(
                    "expecting ')' or a part of a rule" if c else "this parenthesis is never closed, expecting ')'",
                    None if c else here.begins,
                )
            else:
                here.end_alternative()
                if c != "|" and not nested:
                    return _choice(here.done)
                self.at += 1
                if c == ")":
                    stack.pop()
                    stack[-1].items.append(_choice(here.done))
                    stack[-1].repeatable = True
            self._skip(_SPACE_OR_LINE if len(stack) > 1 or c == "|" else _SPACE)

    def _item(self, c: str) -> list[Part] | None:
        """The item that starts with ``c``; [] for an empty literal or class; None if no item starts so."""
        begins = self.at
        if self._took('"'):
            literal: list[Part] = []
            while self._peek(begins, "literal") != '"':
                code = self._character()
                literal.append(Characters(((code, code),)))
            self.at += 1
            return [Sequence(tuple(literal))] if len(literal) > 1 else literal
        if self._took("["):
            return self._class(begins)
        if self._took("."):
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
            here = self.at
            first = last = self._character()
            if not self.text.startswith("-]", self.at) and self._took("-"):
                self._peek(begins, "class")
                last = self._character()
            if last < first:
                self._fail("this range of characters runs backwards, swap its ends", here)
            ranges.append((first, last))
        self.at += 1
        if not ranges:
            return []  # as in llama.cpp, an empty class is empty text
        kept = _complement(_complement(ranges)) if not negated else _complement(ranges)
        if not kept:
            self._fail("no character is in this class", begins)
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
        if self._took(","):
            self._skip(space)
            most = self._count() if _NUMBER.match(self.text, self.at) else None
            self._skip(space)
        if not self._took("}"):
            self._fail("expecting '}' after the number of repetitions")
        if most is not None and most < least:
            self._fail(f"repeat counts {{{least},{most}}}, and the second number is smaller, swap them", begins)
        return least, most

    def _count(self) -> int:
        begins = self.at
        digits = self._take(_NUMBER, "a number of repetitions")[0].lstrip("0")
        if len(digits) > 9 or int(digits or "0") > MAX_REPEATS:
            self._fail(f"more than {MAX_REPEATS} repetitions, use * or +", begins)
        return int(digits or "0")

    def _character(self) -> int:
        """Code point of one character of a literal or class, escaped or not."""
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

    def _took(self, sign: str) -> bool:
        """Whether ``sign`` is next; it is passed."""
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) * found
        return found

    def _skip(self, pattern: re.Pattern) -> None:
        self._take(pattern, "")

    def _take(self, pattern: re.Pattern, what: str) -> re.Match:
        match = pattern.match(self.text, self.at)
        if match is None:
            self._fail(f"expecting {what}")
        self.at = match.end()
        return match

    def _peek(self, begins: int, what: str) -> str:
        if self.at >= len(self.text):
            self._fail(f"unexpected end of input, this {what} is never closed", begins)
        return self.text[self.at]

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        line, column = self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)
        found = self.text[at : at + 20]
        where = f"in line {line}, column {column}, {f'at {found!r}' if found else 'at its end'}"
        raise SamplingError(f"the grammar is wrong {where}: {what}; see llama.cpp's grammars/README.md for the notation")


def _that_end(rules: dict[str, Part]) -> dict[str, Part]:
    """The rules without unproductive alternatives; the language is the same. Raises SamplingError: the start rule is unproductive."""
    needs: dict[str | int, tuple[int, tuple[str | int, ...]]] = {name: (1, (id(part),)) for name, part in rules.items()}
    for part in (part for rule in rules.values() for part in _parts(rule)):
        inside: tuple[str | int, ...] = (part.name,) if isinstance(part, Reference) else tuple(map(id, children(part)))
        optional = isinstance(part, Repeat) and part.least == 0
        needs[id(part)] = 0 if optional else 1 if isinstance(part, Choice) else len(inside), inside
    ends = productive(needs)
    if "root" not in ends:
        why = 'rule root recurses without end, like root ::= "a" root; give one of its rules an alternative that does not refer to itself'
        raise SamplingError(f"the grammar derives no finite text: {why}")
    return {name: _pruned(rule, ends) for name, rule in rules.items() if name in ends} if len(ends) < len(needs) else rules


def _pruned(rule: Part, ends: set[str | int]) -> Part:
    """A productive rule without its unproductive parts."""
    made: dict[int, Part] = {}
    for part in reversed(list(_parts(rule))):  # children first
        if id(part) not in ends:
            continue
        new: Part = part
        if isinstance(part, Choice):
            new = _choice([made[id(inner)] for inner in part.parts if id(inner) in ends])
        elif isinstance(part, Sequence):
            new = Sequence(tuple(made[id(inner)] for inner in part.parts))
        elif isinstance(part, Repeat):
            new = Repeat(made[id(part.part)], part.least, part.most) if id(part.part) in ends else Sequence(())
        made[id(part)] = new
    return made[id(rule)]


def children(part: Part) -> tuple[Part, ...]:
    """Direct children of ``part``."""
    if isinstance(part, (Sequence, Choice)):
        return part.parts
    return (part.part,) if isinstance(part, Repeat) else ()


def _choice(parts: list[Part]) -> Part:
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def _complement(ranges: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """All characters outside ``ranges``, without surrogates."""
    out, first = [], 0
    for low, high in (*sorted((*ranges, _SURROGATES)), (LAST_CHARACTER + 1, LAST_CHARACTER + 1)):
        if low > first:
            out.append((first, low - 1))
        first = max(first, high + 1)
    return tuple(out)


# -- translation to llguidance: terminals are single characters, because its lexer is greedy and does not backtrack


def lark(rules: dict[str, Part], token_id: Callable[[str], int | None]) -> str:
    """The same language in llguidance's notation.

    A grammar without recursion becomes one regular expression. Otherwise terminals are single characters, and right recursion becomes a
    repetition, because llguidance keeps one item per level of recursion. Raises SamplingError: a token that is not in the vocabulary.
    """
    letter = "R" if _expanded(rules) <= MOST_EXPANDED else "r"  # upper case: part of a terminal
    if letter == "r" and (times := _most_counted(rules)) > MOST_COUNTED:
        most = f"at most {MOST_COUNTED} are possible in a recursive grammar"
        raise SamplingError(f"the grammar is refused: nested repetitions multiply to {times}, but {most}; use * or +")
    writer = _Writer(letter, {name: f"{letter}{i}" for i, name in enumerate(rules)}, token_id)
    for name, part in rules.items():
        writer.add(writer.names[name], part if letter == "R" else _looped(name, part))
    return "\n".join((f"start: {writer.names['root']}", *writer.lines)) + "\n"


class _Writer:
    """Writes rules; groups nested too deeply for llguidance become rules."""

    def __init__(self, letter: str, names: dict[str, str], token_id: Callable[[str], int | None]):
        self.letter, self.names, self.token_id = letter, names, token_id
        self.lines: list[str] = []
        self._apart: list[tuple[str, Part]] = []
        self._count = 0

    def add(self, name: str, part: Part) -> None:
        self._apart.append((name, part))
        while self._apart:
            name, part = self._apart.pop()
            self.lines.append(f"{name}: {self._text(part)}")

    def _text(self, part: Part) -> str:
        out: list[str] = []
        todo: list[tuple[Part | str, int]] = [(part, 0)]  # iterative: groups nest deeper than Python's stack
        while todo:
            item, depth = todo.pop()
            if isinstance(item, str):
                out.append(item)
            elif not isinstance(item, (Sequence, Choice, Repeat)):
                out.append(self._leaf(item))
            elif depth < MOST_NESTED:
                todo += [(piece, depth + 1) for piece in reversed(self._inner(item))]
            else:
                self._count += 1
                out.append(f"{self.letter}{'x' if self.letter == 'r' else 'X'}{self._count}")
                self._apart.append((out[-1], item))
        return "".join(out)

    def _inner(self, item: Sequence | Choice | Repeat) -> list[Part | str]:
        if isinstance(item, Repeat):
            most = "" if item.most is None else str(item.most)
            sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((item.least, item.most), f"{{{item.least},{most}}}")
            return ["(", item.part, ")" + sign]
        between = " " if isinstance(item, Sequence) else " | "
        inner: list[Part | str] = []
        for part in item.parts:
            inner += [between, part]
        return ["(", *inner[1:], ")"] if inner else ['""']

    def _leaf(self, item: Characters | Token | Reference) -> str:
        if isinstance(item, Reference):
            return self.names[item.name]
        if isinstance(item, Characters):
            inside = "".join(f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in item.ranges)
            return f"/[{inside}]/" if "-" in inside or len(item.ranges) > 1 else f"/{inside}/"
        number = item.name if isinstance(item.name, int) else self.token_id(item.name)
        if number is None:
            raise SamplingError(f"the grammar is wrong: {str(item.name)[:60]!r} is no token of this vocabulary")
        return f"<[^{number}]>" if item.negated else f"<[{number}]>"


def _expanded(rules: dict[str, Part]) -> int:
    """Nodes of ``root`` with its references inlined; more than MOST_EXPANDED also where there is recursion or a token."""
    sizes: dict[str, int] = {}  # 0 while in progress
    todo = [("root", False)]
    while todo:
        name, left = todo.pop()
        parts = list(_parts(rules[name])) if left or name not in sizes else []
        if left:
            sizes[name] = min(MOST_EXPANDED + 1, sum(sizes[part.name] if isinstance(part, Reference) else 1 for part in parts))
        elif name not in sizes:
            sizes[name] = 0
            todo.append((name, True))
            if any(isinstance(part, Token) or (isinstance(part, Reference) and sizes.get(part.name) == 0) for part in parts):
                return MOST_EXPANDED + 1
            todo += [(part.name, False) for part in parts if isinstance(part, Reference)]
    return sizes["root"]


def _parts(part: Part) -> Iterator[Part]:
    """``part`` and all its descendants."""
    todo = [part]
    while todo:
        part = todo.pop()
        yield part
        todo += children(part)


def _most_counted(rules: dict[str, Part]) -> int:
    """The largest product of nested repetition counts, across three levels of references."""
    counts = dict.fromkeys(rules, 1)
    for name, rule in [*rules.items()] * 3:
        todo = [(rule, 1)]
        while todo:
            part, times = todo.pop()
            if isinstance(part, Repeat):
                times *= max(1, part.least, part.most or 0)
            elif isinstance(part, Reference) and times > 1:
                times *= counts[part.name]
            counts[name] = max(counts[name], min(times, 1 << 40))
            todo += [(inner, times) for inner in children(part)]
    return max(counts.values())


def _looped(name: str, part: Part) -> Part:
    """``name ::= a name | b`` as ``a* b``."""
    options = part.parts if isinstance(part, Choice) else (part,)
    last = [option.parts[-1] if isinstance(option, Sequence) and len(option.parts) > 1 else None for option in options]
    again = [isinstance(end, Reference) and end.name == name for end in last]
    loops = tuple(Sequence(option.parts[:-1]) for option, yes in zip(options, again) if yes and isinstance(option, Sequence))
    ends = tuple(option for option, yes in zip(options, again) if not yes)
    if not loops or not ends:
        return part
    return Sequence((Repeat(_choice(list(loops)), 0, None), _choice(list(ends))))
