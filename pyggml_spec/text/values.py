"""Tool-call arguments as models write them, converted to JSON."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .formats import GEMMA_QUOTE

KINDS = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MOST_DIGITS = 308  # longer integers exceed a double
_HALVES = re.compile("[\ud800-\udfff]")


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
        return json.loads(text, strict=False, parse_constant=str, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _float(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else text


def _int(text: str) -> int | str:
    return int(text) if len(text) <= _MOST_DIGITS else text


# -- types allowed by a schema

_TYPE_KEYWORDS = ("type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const", "not")
_OF_OBJECTS, _OF_ARRAYS = ("properties", "required", "additionalProperties", "patternProperties"), ("items", "prefixItems")
_DEEPEST = 64


def with_implied_types(schema: Any, depth: int = 0) -> Any:
    """``schema`` with implied types, as in llama.cpp: "properties" implies an object, "items" an array."""
    if isinstance(schema, list) and depth < _DEEPEST:
        return [with_implied_types(part, depth + 1) for part in schema]
    if not isinstance(schema, dict) or depth >= _DEEPEST:
        return schema
    out = dict(schema)
    if not any(name in schema for name in _TYPE_KEYWORDS):
        if any(name in schema for name in _OF_OBJECTS):
            out["type"] = "object"
        elif isinstance(schema.get("items"), list):  # tuple syntax of older drafts
            out |= {"type": "array", "prefixItems": schema["items"], "items": False, "minItems": len(schema["items"])}
        elif any(name in schema for name in _OF_ARRAYS):
            out["type"] = "array"
    for name in ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties"):
        if name in out:
            out[name] = with_implied_types(out[name], depth + 1)
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(out.get(name), dict):
            out[name] = {key: with_implied_types(part, depth + 1) for key, part in out[name].items()}
    return out


def resolved(schema: Any, root: Any) -> Any:
    """The target of a ``$ref`` within ``root``; True (any value) if there is none."""
    ref = schema["$ref"]
    if not isinstance(ref, str) or not ref.startswith("#"):
        return True
    at = root
    for part in ref[1:].strip("/").split("/") if ref != "#" else ():
        part = part.replace("~1", "/").replace("~0", "~")
        at = at.get(part, True) if isinstance(at, Mapping) else True
    return at


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
        target = resolved(schema, root)
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


# -- Gemma 4's notation

_WORD = re.compile(rf'{re.escape(GEMMA_QUOTE)}(.*?){re.escape(GEMMA_QUOTE)}|([^\s:{{}}\[\],"<][^:{{}}\[\],"<]*)(:)?', re.DOTALL)


def gemma(text: str) -> Any:
    """The object in Gemma 4's notation: names without quotes, texts between <|"|>. Raises ValueError: invalid."""

    def word(match: re.Match[str]) -> str:
        quoted, bare, colon = match.groups()
        return json.dumps(quoted) if bare is None else json.dumps(bare.strip()) + ":" if colon else bare

    return loads(_WORD.sub(word, text))
