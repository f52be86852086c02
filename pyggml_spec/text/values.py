"""Tool-call arguments as models write them, converted to JSON by their schemas."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from .formats import GEMMA_QUOTE

KINDS = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MOST_DIGITS = 308  # longer integers exceed a double
_HALVES = re.compile("[\ud800-\udfff]")
_WORD = re.compile(rf'{re.escape(GEMMA_QUOTE)}(.*?){re.escape(GEMMA_QUOTE)}|([^\s:{{}}\[\],"<][^:{{}}\[\],"<]*)(:)?', re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A complete tool call; ``arguments`` is a JSON object."""

    name: str
    arguments: str


def call(name: str, arguments: Any) -> Call | None:
    """None if the arguments are not an object. Lone surrogates become U+FFFD."""
    if not isinstance(arguments, dict):
        return None
    try:
        return Call(name, _HALVES.sub("\ufffd", json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
    except (ValueError, RecursionError):
        return None


def loads(text: str) -> Any:
    """JSON that may contain control characters in strings. Numbers beyond a double, NaN and Infinity stay text. Raises ValueError: invalid
    JSON."""
    try:
        return json.loads(
            text, strict=False, parse_constant=str, parse_float=lambda t: v if math.isfinite(v := float(t)) else t,
            parse_int=lambda t: int(t) if len(t) <= _MOST_DIGITS else t,
        )  # fmt: skip
    except RecursionError:
        raise ValueError("nested too deeply") from None


# -- JSON schemas

SCHEMA_LISTS, SCHEMA_MAPS = ("allOf", "anyOf", "oneOf", "prefixItems"), ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_ONES = ("items", "additionalItems", "additionalProperties")
_TYPE_KEYWORDS = ("type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const", "not")
_OF_OBJECTS, _OF_ARRAYS = ("properties", "required", "additionalProperties", "patternProperties"), ("items", "prefixItems")
DEEPEST = 64
Path = tuple[str, ...]


def subschemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas in the keywords of ``schema``, and their places in it."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if isinstance(value, list) and (key in SCHEMA_LISTS or key == "items"):
            yield from (((key, str(i)), part) for i, part in enumerate(value))
        elif isinstance(value, dict) and key in SCHEMA_MAPS:
            yield from (((key, name), part) for name, part in value.items())
        elif key in SCHEMA_ONES:
            yield (key,), value


def with_subschemas(schema: dict[str, Any], change: Callable[[Path, Any], Any]) -> dict[str, Any]:
    """A copy whose subschemas are what ``change`` returns for their places and themselves."""
    out: dict[str, Any] = {key: value.copy() if isinstance(value, (list, dict)) else value for key, value in schema.items()}
    for (key, *name), part in subschemas(schema):
        changed = change((key, *name), part)
        if not name:
            out[key] = changed
        else:
            out[key][int(name[0]) if isinstance(out[key], list) else name[0]] = changed
    return out


def with_implied_types(schema: Any, depth: int = 0) -> Any:
    """``schema`` with implied types, as in llama.cpp: "properties" implies an object, "items" an array."""
    if not isinstance(schema, dict) or depth >= DEEPEST:
        return schema
    out = with_subschemas(schema, lambda _, part: with_implied_types(part, depth + 1))
    if not any(name in schema for name in _TYPE_KEYWORDS):
        if any(name in schema for name in _OF_OBJECTS):
            out["type"] = "object"
        elif isinstance(schema.get("items"), list):  # tuple syntax of older drafts
            out |= {"type": "array", "prefixItems": out["items"], "items": False, "minItems": len(out["items"])}
        elif any(name in schema for name in _OF_ARRAYS):
            out["type"] = "array"
    return out


def resolve(root: Any, reference: Any) -> Any:
    """The target of a JSON pointer in a URI fragment (RFC 6901), or None."""
    if not isinstance(reference, str) or not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    node = root
    for name in pointer(reference):
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return None
    return node


def pointer(reference: str) -> Path:
    """The names of a JSON pointer."""
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in unquote(reference).split("/")[1:])


def kind_of(value: Any) -> str:
    """JSON type of ``value``."""
    for kind, python in (("boolean", bool), ("integer", int), ("number", float), ("string", str), ("array", list), ("object", dict)):
        if isinstance(value, python):
            return kind
    return "null"


def kinds(schema: Any, root: Any, seen: tuple[int, ...] = ()) -> frozenset[str]:
    """JSON types that ``schema`` allows; references are resolved in ``root``."""
    schema = with_implied_types(schema)
    if not isinstance(schema, dict) or len(seen) > 32:
        return KINDS
    out = KINDS
    if "$ref" in schema:
        target = resolve(root, schema["$ref"])
        out &= frozenset() if id(target) in seen else kinds(target, root, (*seen, id(target)))
    if isinstance(schema.get("enum"), list):
        out &= {kind_of(value) for value in schema["enum"]}
    if "const" in schema:
        out &= {kind_of(schema["const"])}
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        out &= {*named, *(["integer"] if "number" in named else [])}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            out &= frozenset().union(*(kinds(part, root, seen) for part in schema[name]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        out &= kinds(part, root, seen)
    return out


def typed(text: str, schema: Any, root: Any) -> Any:
    """A parameter's text as a value of an allowed type; it stays text if text is allowed and no other type matches."""
    allowed = kinds(schema, root)
    if allowed == {"string"} or (isinstance(schema, dict) and text in (schema.get("enum") or ())):
        return text
    try:
        value = loads(text.strip())
    except ValueError:
        return text
    return text if "string" in allowed and (isinstance(value, str) or kind_of(value) not in allowed) else value


def nested(text: str, mark: str, schema: Any, root: Any, depth: int = 0) -> Any:
    """An argument whose objects and arrays are tags, each after ``mark``: <name>value</name>, and <item>value</item>; as ``typed`` without any."""
    text = text.strip() if mark in text else text
    if "string" in kinds(schema, root) or not text.startswith(f"{mark}<") or depth >= DEEPEST:
        return typed(text, schema, root)
    parts, at = list[tuple[str, str]](), 0
    while text.startswith(f"{mark}<", at):
        name, _, _ = text[at + len(mark) + 1 :].partition(">")
        begin, end = at + len(mark) + len(name) + 2, f"{mark}</{name}>"
        close = _matching(text, begin, f"{mark}<{name}>", end)
        if close < 0:
            return text
        parts.append((name, text[begin:close]))
        at = close + len(end)
        at += len(text[at:]) - len(text[at:].lstrip())
    if at < len(text):
        return text
    described = with_implied_types(schema)
    described = described if isinstance(described, dict) else {}
    if "array" in kinds(schema, root):
        return [nested(part, mark, described.get("items", True), root, depth + 1) for _, part in parts]
    known = described.get("properties") or {}
    return {name: nested(part, mark, known.get(name, True), root, depth + 1) for name, part in parts}


def _matching(text: str, at: int, opening: str, closing: str) -> int:
    """Where the ``closing`` tag of an ``opening`` one before ``at`` begins; -1 for nowhere."""
    depth = 1
    while depth:
        close = text.find(closing, at)
        if close < 0:
            return -1
        other = text.find(opening, at, close)
        depth, at = (depth + 1, other + len(opening)) if other >= 0 else (depth - 1, close + len(closing))
    return at - len(closing)


# -- Gemma 4's notation


def gemma(text: str) -> Any:
    """The object in Gemma 4's notation: names without quotes, texts between <|"|>. Raises ValueError: invalid."""

    def word(match: re.Match[str]) -> str:
        quoted, bare, colon = match.groups()
        return json.dumps(quoted) if bare is None else json.dumps(bare.strip()) + ":" if colon else bare

    return loads(_WORD.sub(word, text))
