"""Lark grammars: refuses unproductive rules and empty terminals by name. Notation unknown here is left to llguidance."""

import json
import re
from collections.abc import Sequence

from ..errors import SamplingError
from .productive import byte_matcher, productive

_TOKEN = re.compile(
    r"(?P<space>(?:\s|//[^\n]*|#[^\n]*)+)|(?P<text>\"(?:\\.|[^\"\\\n])*\"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\s]+>)|(?P<json>%json\s*)|(?P<name>[?!]*[A-Za-z_]\w*)"
    r"|(?P<count>\{\s*(\d+)?\s*,?\s*\d*\s*\}|~\s*(\d+)(?:\s*\.\.\s*\d+)?)|(?P<attributes>\[[^\]\n|]*\]\s*(?=:))|(?P<range>\.\.)|(?P<alias>->\s*\w+)|(?P<sign>[|()\[\]?*+:&~])"
)
_NO_RULE = re.compile(r"(?m)^[ \t]*%(?:import|ignore|llguidance|declare)\b.*$")
MOST_TERMINALS = 64  # compiled alone
Part = int | str  # a number, or the name of a rule


class _Unknown(Exception):
    """Notation unknown here."""


def check(text: str) -> None:
    """Raises SamplingError: a reachable rule is unproductive, or a reachable terminal is empty."""
    try:
        reader = _Reader(_tokens(_NO_RULE.sub("", text)))
        reader.read()
    except (_Unknown, RecursionError):
        return
    ends, reached, todo = productive(reader.needs), {"start"}, ["start"]
    while todo:
        for name in reader.named.get(todo.pop(), ()):
            if name in reader.named and name not in reached:
                reached.add(name)
                todo.append(name)
    endless = next((name for name in reader.named if name in reached and name not in ends), None)
    if endless is not None:
        why = f"the rule {endless[:100]!r} derives no finite text, because it always refers to itself"
        raise SamplingError(f"the Lark grammar is refused: {why}; give it an alternative that does not, or leave it out")
    if not any(sign in reader.signs for sign in "&~"):
        return
    # intersections and complements may be empty; llguidance would enter a rule before it notices
    rest = re.sub(r"(?m)^([?!]*)start(?=\s*(?:\[[^\]\n]*\])?\s*:)", r"\1start_of_all", text)
    for name in [name for name in reader.named if name in reached and name.isupper()][:MOST_TERMINALS]:
        if "NoExtensionBias" in byte_matcher(f"{rest}\nstart: {name}\n").get_error():
            why = f"the terminal {name[:100]!r} matches nothing; leave it out, or let it match something"
            raise SamplingError(f"the Lark grammar is refused: {why}")


def _tokens(text: str) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise _Unknown
        kind, at = next(name for name, value in match.groupdict().items() if value is not None), match.end()
        if kind == "json":
            try:
                _, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                raise _Unknown from None
            kind = "text"
        if kind not in ("space", "alias"):
            out.append((kind, match[0]))
    return [*out, ("end", "")]


class _Reader:
    """``needs``: the input of ``productive``; ``named``: the names in each rule."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._at, self._rule = tokens, 0, ""
        self.needs: dict[Part, tuple[int, Sequence[Part]]] = {}
        self.named: dict[str, list[str]] = {}
        self.signs = {token for kind, token in tokens if kind == "sign"}

    def read(self) -> None:
        while self._tokens[self._at][0] != "end":
            if not self._at_rule():
                raise _Unknown
            name = self._tokens[self._at][1].lstrip("?!")
            self._at += 2 if self._tokens[self._at + 1][1] == ":" else 3
            if name in self.named:
                raise _Unknown
            self._rule, self.named[name] = name, []
            self.needs[name] = 1, (self._choice(),)

    def _at_rule(self) -> bool:
        (kind, _), (more, sign) = self._tokens[self._at], self._tokens[min(self._at + 1, len(self._tokens) - 1)]
        return kind == "name" and (sign == ":" or more == "attributes")

    def _part(self, need: int, parts: Sequence[Part]) -> Part:
        self.needs[len(self.needs)] = need, parts
        return len(self.needs) - 1

    def _choice(self) -> Part:
        options = [self._sequence()]
        while self._tokens[self._at][1] == "|":
            self._at += 1
            options.append(self._sequence())
        return self._part(1, options)

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while True:
            kind, token = self._tokens[self._at]
            if kind == "end" or token in ("|", ")", "]") or self._at_rule():
                return self._part(len(parts), parts)
            self._at += 1
            if token in ("(", "["):
                part = self._choice()
                if self._tokens[self._at][1] != (")" if token == "(" else "]"):
                    raise _Unknown
                self._at += 1
                part = self._part(0, (part,)) if token == "[" else part
            elif kind == "text":
                part = self._part(0, ())
            elif kind == "name":
                self.named[self._rule].append(token)
                part = token if token.islower() or not token.isupper() else self._part(0, ())
            elif kind == "range" or token in ("&", "~"):
                continue
            else:
                raise _Unknown
            parts.append(self._counted(part))

    def _counted(self, part: Part) -> Part:
        kind, token = self._tokens[self._at]
        if kind != "count" and token not in ("?", "*", "+"):
            return part
        self._at += 1
        digits = re.search(r"\d+", token.split(",")[0])
        return self._part(0, (part,)) if token in ("?", "*") or (kind == "count" and (digits is None or int(digits[0]) == 0)) else part
