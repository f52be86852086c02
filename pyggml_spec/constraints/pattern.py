"""Regular expressions as triggers: ECMAScript syntax on bytes, as in llama.cpp, matched in linear time (Pike's VM).

Back-references, look-ahead and word boundaries are refused by name. A dot or a class is one byte.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import EngineError, SamplingError

MOST_TEXT, MOST_PARTS, MOST_REPEATS, DEEPEST = 1024, 512, 255, 32
_ALL = (1 << 256) - 1
_DIGIT = sum(1 << c for c in b"0123456789")
_WORD = _DIGIT | sum(1 << c for c in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_SPACE = sum(1 << c for c in b" \t\n\r\f\v")
_SETS = {"d": _DIGIT, "D": _ALL ^ _DIGIT, "w": _WORD, "W": _ALL ^ _WORD, "s": _SPACE, "S": _ALL ^ _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
MARKS = 8
BYTE, CHOICE, MARK, BEGIN, END, MATCH = range(6)
_COUNTS = re.compile(r"([0-9]+)(,?)([0-9]*)\}")
Captures = tuple[int, ...]  # position per capture, -1 where unset
Thread = tuple[int, Captures]  # place in the program


@dataclass(frozen=True)
class Pattern:
    """A trigger: a regular expression searched in all text so far; ``full``: it must match all of it."""

    text: str
    full: bool = False

    @property
    def anchored(self) -> str:
        """The expression as searched."""
        return self.text if not self.full else f"{'' if self.text[:1] == '^' else '^'}{self.text}{'' if self.text[-1:] == '$' else '$'}"


@dataclass
class _Node:
    """A node: "set" (one byte of ``bits``), "all" (sequence), "either", "group", "repeat", "begin" or "end"."""

    kind: str
    parts: list["_Node"] = field(default_factory=list)
    bits: int = 0
    number: int = 0  # of a group
    low: int = 0
    high: int | None = None
    lazy: bool = False

    @property
    def least(self) -> int:
        """Least number of bytes matched."""
        if self.kind == "set":
            return 1
        if self.kind == "either":
            return min(part.least for part in self.parts)
        return sum(part.least for part in self.parts) * (self.low if self.kind == "repeat" else 1)


class _Reader:
    """Recursive-descent parser."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.groups = text, 0, 0

    def wrong(self, why: str) -> SamplingError:
        return SamplingError(f"the pattern {self.text[:80]!r} is refused at character {self.at}: {why}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        self.at += 1
        return self.text[self.at - 1 : self.at]

    def either(self, depth: int = 0) -> _Node:
        if depth > DEEPEST:
            raise self.wrong(f"groups lie in each other more than {DEEPEST} deep")
        rows = [_Node("all")]
        while (c := self.peek()) and c != ")":
            if c == "|":
                self.take()
                rows.append(_Node("all"))
            else:
                rows[-1].parts.append(self.repeated(self.one(depth)))
        return rows[0] if len(rows) == 1 else _Node("either", rows)

    def one(self, depth: int) -> _Node:
        c = self.take()
        if c in "^$":
            return _Node("begin" if c == "^" else "end")
        if c == ".":
            return _Node("set", bits=_ALL ^ (1 << 10) ^ (1 << 13))
        if c == "(":
            number = 0
            if self.peek() != "?":
                self.groups += 1
                number = self.groups
            elif self.text[self.at : self.at + 2] != "?:":
                raise self.wrong("look-ahead and named groups are not supported; use ( ) or (?: )")
            else:
                self.at += 2
            inside = self.either(depth + 1)
            if self.take() != ")":
                raise self.wrong("a group has no end; add a )")
            return _Node("group", [inside], number=number)
        if c == "[":
            return _Node("set", bits=self.members())
        if c == "\\" and (kind := self.peek()) and kind in _SETS:
            self.take()
            return _Node("set", bits=_SETS[kind])
        if c == "\\":
            return _literal(self.character())
        if c in "*+?{":
            raise self.wrong(f"there is nothing that {c!r} could repeat; write \\{c} for the character")
        return _literal(c)

    def character(self) -> str:
        """The character after a backslash."""
        c = self.take()
        if c in ("x", "u"):
            count = 2 if c == "x" else 4
            digits = self.text[self.at : self.at + count]
            if len(digits) != count or any(d not in "0123456789abcdefABCDEF" for d in digits):
                raise self.wrong(f"\\{c} takes {count} hexadecimal digits")
            self.at += count
            if 0xD800 <= int(digits, 16) < 0xE000:
                raise self.wrong("halves of a surrogate pair are no characters; write the character itself")
            return chr(int(digits, 16))
        if c in _CONTROLS and c:
            return chr(_CONTROLS[c])
        if not c or c.isalnum():
            what = "back-references are" if c.isdecimal() else "word boundaries are" if c in ("b", "B") else f"\\{c} is"
            raise self.wrong(f"{what} not supported; leave it out" if c else "a backslash is at the end")
        return c

    def members(self) -> int:
        """The set of a class after its "["."""
        turned, bits = self.peek() == "^", 0
        self.at += turned
        while (c := self.take()) != "]":
            if not c:
                raise self.wrong("a class has no end; add a ]")
            if c == "[" and self.peek() in (":", ".", "="):
                raise self.wrong("named classes are not supported; write their characters")
            if c == "\\" and (e := self.peek()) in _SETS and e:
                self.take()
                bits |= _SETS[e]
                continue
            low = self.small(c)
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.take()
                high = self.small(self.take())
                if high < low:
                    raise self.wrong("a range of a class ends before it begins")
                bits |= (1 << high + 1) - (1 << low)
            else:
                bits |= 1 << low
        return _ALL ^ bits if turned else bits

    def small(self, c: str) -> int:
        if c == "\\":
            c = "\b" if self.peek() == "b" and self.take() else self.character()
        if ord(c) > 127:
            raise self.wrong(f"{c!r} is not one byte, as a class needs; write (?:a|b) for characters beyond ASCII")
        return ord(c)

    def repeated(self, node: _Node) -> _Node:
        c = self.peek()
        if not c or c not in "*+?{":
            return node
        if node.kind in ("begin", "end"):
            raise self.wrong("^ and $ cannot be repeated")
        self.take()
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1), "{": (0, 0)}[c]
        if c == "{":
            low, high = self.counts()
        lazy = self.peek() == "?"
        self.at += lazy
        if self.peek() and self.peek() in "*+?{":
            raise self.wrong("what repeats cannot be repeated; put it into a group")
        return _Node("repeat", [node], low=low, high=high, lazy=lazy)

    def counts(self) -> tuple[int, int | None]:
        """The counts after a "{"."""
        if (found := _COUNTS.match(self.text, self.at)) is None:
            raise self.wrong("{ begins a count, like {2} or {1,3}; write \\{ for the character")
        low, comma, high = found.groups()
        least, last = (int(digits.lstrip("0")[:4] or "0") for digits in (low, high))  # a longer one is too large all the same
        most = last if high else None if comma else least
        if least > MOST_REPEATS or (most or 0) > MOST_REPEATS or (most is not None and most < least):
            raise self.wrong(f"counts go up from 0 to {MOST_REPEATS}")
        self.at = found.end()
        return least, most


def _literal(c: str) -> _Node:
    parts = [_Node("set", bits=1 << byte) for byte in c.encode("utf-8", "surrogatepass")]
    return parts[0] if len(parts) == 1 else _Node("all", parts)


class Budget:
    """Budget of one call for all its patterns: instructions executed, where copying MARKS captures counts as one. ``spent``: so far."""

    def __init__(self, most: int | None = None) -> None:
        self.spent, self._most = 0, most

    def spend(self, parts: int) -> None:
        """Raises EngineError: the budget is exceeded."""
        self.spent += parts
        if self._most is not None and self.spent > self._most:
            raise EngineError(f"the patterns of the triggers take more than {self._most} steps at a time; make them simpler")


class Program:
    """A compiled expression; immutable. ``code``: (op, a, b): a byte set and the next instruction, two alternatives by preference, a capture and
    the next instruction, ..."""

    def __init__(self, pattern: Pattern) -> None:
        """Raises SamplingError: invalid, unsupported or too large, or it matches the empty text."""
        text = pattern.anchored
        if len(text) > MOST_TEXT:
            raise SamplingError(f"a pattern has {len(text)} characters, but at most {MOST_TEXT} are allowed; make it smaller")
        reader = _Reader(text)
        node = reader.either()
        if reader.peek():
            raise reader.wrong("a ) has no (")
        self.text, self._n_nodes = text, 0
        certain = _certain(node)
        self.marks = [0] if certain is None else []  # start of the match, unless a group always captures
        self._groups = range(1, (certain or reader.groups) + 1)
        self.marks += [mark for i in self._groups for mark in (2 * i, 2 * i + 1)]
        self._slot = {mark: i for i, mark in enumerate(self.marks)}
        self.code: list[tuple[int, int, int]] = [(MATCH, 0, 0)]
        self.first = self._mark(0, self._emit(node, 0))
        self.none: Captures = (-1,) * len(self.marks)
        begin: list[Thread] = []
        budget = Budget()  # MOST_PARTS at most
        if self.follow(begin, set(), self.first, self.none, 0, budget, BEGIN) is not None or self.at_end(begin, 0, budget) is not None:
            why = "matches the empty text, so nothing would be unconstrained; leave out grammar_lazy"
            raise SamplingError(f"the pattern {text[:80]!r} {why}")
        self.begin = tuple(begin)

    def _emit(self, node: _Node, following: int) -> int:
        """Index of the code of ``node``, followed by ``following``."""
        self._n_nodes += 1
        if self._n_nodes > 4 * MOST_PARTS or len(self.code) > MOST_PARTS:
            why = f"has more than {MOST_PARTS} parts once its counts are written out; make it smaller"
            raise SamplingError(f"the pattern {self.text[:80]!r} {why}")
        if node.kind == "set":
            return self._add(BYTE, node.bits, following)
        if node.kind in ("begin", "end"):
            return self._add(BEGIN if node.kind == "begin" else END, following, 0)
        if node.kind == "either":
            threads = [self._emit(part, following) for part in node.parts]
            at = threads[-1]
            for way in reversed(threads[:-1]):
                at = self._add(CHOICE, way, at)
            return at
        if node.kind == "repeat":
            return self._repeat(node, following)
        if node.kind == "group" and node.number:
            following = self._mark(2 * node.number + 1, following)
        for part in reversed(node.parts):
            following = self._emit(part, following)
        return self._mark(2 * node.number, following) if node.kind == "group" and node.number else following

    def _repeat(self, node: _Node, following: int) -> int:
        (body,), at = node.parts, following
        if node.high is None:
            loop = self._add(CHOICE, 0, 0)
            inside = self._emit(body, loop)
            self.code[loop] = (CHOICE, following, inside) if node.lazy else (CHOICE, inside, following)
            at = loop
        for _ in range((node.high or node.low) - node.low):
            inside = self._emit(body, at)
            at = self._add(CHOICE, following, inside) if node.lazy else self._add(CHOICE, inside, following)
        for _ in range(node.low):
            at = self._emit(body, at)
        return at

    def _mark(self, mark: int, following: int) -> int:
        return self._add(MARK, self._slot[mark], following) if mark in self._slot else following

    def _add(self, what: int, a: int, b: int) -> int:
        self.code.append((what, a, b))
        return len(self.code) - 1

    def follow(
        self, out: list[Thread], seen: set[int], at: int, captures: Captures, place: int, budget: Budget, edge: int | None = None
    ) -> Captures | None:
        """Epsilon closure of ``at`` in order of preference; returns the captures of a match, which cuts off lower preferences. ``edge``: BEGIN or END,
        where ``place`` is one."""
        stack, parts, matched = [(at, captures)], 0, None
        while stack:
            at, captures = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            parts += 1
            what, a, b = self.code[at]
            if what == MATCH:
                matched = captures
                break
            if what == CHOICE:
                stack += [(b, captures), (a, captures)]
            elif what == MARK:
                parts += len(captures) // MARKS
                stack.append((b, (*captures[:a], place, *captures[a + 1 :])))
            elif what == edge:
                stack.append((a, captures))
            elif what != BEGIN:
                out.append((at, captures))
        budget.spend(parts)
        return matched

    def step(
        self, threads: Sequence[Thread], byte: int, place: int, matched: Captures | None, budget: Budget
    ) -> tuple[list[Thread], Captures | None]:
        """Advances all threads by ``byte``; starts a new match at ``place`` while none is found."""
        out: list[Thread] = []
        seen: set[int] = set()
        budget.spend(len(threads))
        for at, captures in threads:
            what, a, b = self.code[at]
            if what == BYTE and a >> byte & 1 and (found := self.follow(out, seen, b, captures, place, budget)) is not None:
                return out, found
        if matched is None:
            matched = self.follow(out, seen, self.first, self.none, place, budget)
        return out, matched

    def at_end(self, threads: Sequence[Thread], place: int, budget: Budget) -> Captures | None:
        """Captures of the first thread that matches at the end of the text."""
        seen: set[int] = set()
        budget.spend(len(threads))
        for at, captures in threads:
            if self.code[at][0] == END:
                found = self.follow([], seen, at, captures, place, budget, END)
                if found is not None:
                    return found
        return None

    def start(self, captures: Captures) -> int:
        """Where the constraint starts: at the first non-empty group, or at the match."""
        for i in self._groups:
            low, high = captures[self._slot[2 * i]], captures[self._slot[2 * i + 1]]
            if 0 <= low < high:
                return low
        return captures[self._slot[0]]


def _certain(node: _Node) -> int | None:
    """The first group that is non-empty in every match."""
    if node.kind == "group" and node.number and node.least:
        return node.number
    if node.kind in ("all", "group"):
        return next((found for part in node.parts if (found := _certain(part)) is not None), None)
    return None
