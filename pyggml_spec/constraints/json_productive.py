"""Removes unproductive parts of JSON schemas: those that no finite document matches.

llguidance detects most contradictions. It misses infinite recursion by ``$ref``, and pattern keys of which only named ones remain.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

from .closed_objects import pointer
from .productive import byte_matcher, productive

TRIES, MOST_BYTES = 16, 300  # random documents per schema, bytes of each
Path = tuple[str, ...]
Part = tuple[Path, str]  # a schema, or one of the requirements of it
ROOT: Path = ()
# names against patterns; schemas compiled alone. Beyond that a part counts as productive
MOST_MATCHED, MOST_TRIED = 2000, 64
_LISTS, _MAPS = ("allOf", "anyOf", "oneOf", "prefixItems"), ("properties", "patternProperties", "$defs", "definitions")
_ONES = ("items", "additionalItems", "additionalProperties")


def without_dead_ends(schema: Any) -> Any:
    """``schema`` without unproductive parts; False if nothing is left."""
    if isinstance(schema, bool):
        return schema
    schemas = dict(_schemas(schema))
    for path, node in schemas.items():
        if isinstance(node, dict) and node.get("additionalProperties") is False and node.get("patternProperties"):
            _name_keys(node)
            schemas[path] = node
    references = {node["$ref"] for node in schemas.values() if isinstance(node, dict) and isinstance(node.get("$ref"), str)}
    if not references:  # no recursion
        return schema
    schemas = dict(_schemas(schema))
    anchors = {f"#{node['$anchor']}": path for path, node in schemas.items() if isinstance(node, dict) and "$anchor" in node}
    at = {reference: anchors.get(reference, pointer(reference)) for reference in references}
    needs: dict[Part, tuple[int, Sequence[Part]]] = {}
    impossible = _impossible(schemas)
    for path, node in schemas.items():
        needs |= _needs(False if path in impossible else node, path, at)
    return _without(schema, ROOT, {path for path, what in productive(needs) if not what})


def _impossible(schemas: dict[Path, Any]) -> list[Path]:
    """Schemas without references that llguidance reports as unsatisfiable."""
    plain = [(path, text) for path, node in schemas.items() if isinstance(node, dict) and '"$ref"' not in (text := json.dumps(node))]
    tops = [
        (path, text)
        for path, text in plain
        if path and not any(path[:n] == other for other, _ in plain for n in (len(path) - 1, len(path) - 2))
    ]
    return [path for path, text in tops[:MOST_TRIED] if "Unsatisfiable schema" in _matcher(text).get_error()]


# -- keys of objects


def _name_keys(node: dict) -> None:
    """Replaces ``patternProperties`` by names where the patterns match no other key; llguidance would search for others."""
    patterns, known = node["patternProperties"], node.get("properties", {})
    names = dict.fromkeys([*known, *(name for name in _list(node, "required") if isinstance(name, str))])
    others = {
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "patternProperties": dict.fromkeys(patterns, True),
        "additionalProperties": False,
    }
    matcher = _matcher(json.dumps(others))
    if matcher.is_error() or (matcher.consume_tokens(list(b'{"')) and any(matcher.compute_bitmask()) and not matcher.is_error()):
        return
    node["properties"] = {}
    for name in names:
        parts = [part for part in (known.get(name), *(patterns[p] for p in _matching(patterns, name))) if part is not None]
        if name in known or parts:
            node["properties"][name] = parts[0] if len(parts) == 1 else {"allOf": parts}
    del node["patternProperties"]


def dead_end(schema: str) -> str:
    """The start of a document after which nothing is allowed, found by random tries; "" if none. Tried only where ``patternProperties`` are
    combined with the keys of other parts, which llguidance merges into one object."""
    if '"patternProperties"' not in schema or not any(f'"{key}"' in schema for key in ("allOf", "anyOf", "oneOf", "$ref")):
        return ""
    begin = _matcher(schema)
    if begin.is_error():  # reported elsewhere
        return ""
    for seed in range(TRIES):
        choices, matcher, text = random.Random(seed), begin.deep_copy(), bytearray()
        while len(text) < MOST_BYTES and not matcher.is_accepting():
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), count=256, bitorder="little").nonzero()[0].tolist()
            if matcher.is_error() or not mask:
                return text.decode(errors="replace")
            ends = [byte for byte in b'"}],' if byte in mask]
            byte = choices.choice(ends if ends and choices.random() < 0.8 else mask)
            matcher.consume_token(byte)
            text.append(byte)
    return ""


def _matching(patterns: Iterable[str], name: str) -> list[str]:
    """The patterns that match ``name``."""
    text = list(json.dumps(name, ensure_ascii=False).encode("utf-8", "replace"))
    return [pattern for pattern in patterns if _accepts(_matcher(json.dumps({"type": "string", "pattern": pattern})), text)]


def _accepts(matcher: LLMatcher, text: list[int]) -> bool:
    return not matcher.is_error() and matcher.validate_tokens(text) == len(text) and matcher.consume_tokens(text) and matcher.is_accepting()


def _matcher(schema: str) -> LLMatcher:
    return byte_matcher(LLMatcher.grammar_from_json_schema(schema))


# -- subschemas


def _schemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    todo: list[tuple[Path, Any]] = [(ROOT, schema)]
    while todo:
        path, node = todo.pop()
        yield path, node
        todo += _inside(node, path)


def _inside(node: Any, path: Path) -> list[tuple[Path, Any]]:
    if not isinstance(node, dict):
        return []
    out: list[tuple[Path, Any]] = []
    for key, value in node.items():
        if isinstance(value, list) and (key in _LISTS or key == "items"):
            out += [((*path, key, str(i)), part) for i, part in enumerate(value)]
        elif key in _MAPS and isinstance(value, dict):
            out += [((*path, key, name), part) for name, part in value.items()]
        elif key in _ONES and not isinstance(value, list):
            out.append(((*path, key), value))
    return out


def _needs(node: Any, path: Path, at: dict[str, Path]) -> dict[Part, tuple[int, Sequence[Part]]]:
    """What must be productive for a schema and for its alternatives."""
    if node is False:
        return {(path, ""): (1, ())}
    if not isinstance(node, dict):
        return {(path, ""): (0, ())}
    out: dict[Part, tuple[int, Sequence[Part]]] = {}
    all_of: list[Part] = [((*path, "allOf", str(i)), "") for i in range(len(_list(node, "allOf")))]
    if node.get("$ref") in at:
        all_of.append((at[node["$ref"]], ""))
    for key in ("anyOf", "oneOf"):
        if key in node:
            all_of.append((path, key))
            out[path, key] = 1, [((*path, key, str(i)), "") for i in range(len(_list(node, key)))]
    kinds = node.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds and set(kinds) <= {"object", "array"}:  # other types have no parts
        all_of.append((path, "kinds"))
        out[path, "kinds"] = 1, [(path, kind) for kind in kinds]
        members, items = _members(node, path), _items(node, path)
        out |= {(path, "object"): (len(members), members), (path, "array"): (len(items), items)}
    out[path, ""] = len(all_of), all_of
    return out


def _list(node: dict, key: str) -> list:
    return node[key] if isinstance(node.get(key), list) else []


def _members(node: dict, path: Path) -> list[Part]:
    """Schemas of the required properties."""
    known, patterns = node.get("properties", {}), node.get("patternProperties", {})
    required = dict.fromkeys(name for name in _list(node, "required") if isinstance(name, str))
    few = len(required) * len(patterns) <= MOST_MATCHED
    out: list[Part] = []
    for name in required:
        matching = _matching(patterns, name) if few else []
        out += [((*path, "patternProperties", pattern), "") for pattern in matching]
        if name in known:
            out.append(((*path, "properties", name), ""))
        elif not matching and "additionalProperties" in node:
            out.append(((*path, "additionalProperties"), ""))
    return out


def _items(node: dict, path: Path) -> list[Part]:
    """Schemas of the required items."""
    least = node.get("minItems", 0)
    least = least if isinstance(least, int) else 0
    first = "items" if isinstance(node.get("items"), list) else "prefixItems"
    rest = "additionalItems" if first == "items" else "items"
    out: list[Part] = [((*path, first, str(i)), "") for i in range(min(least, len(_list(node, first))))]
    if least > len(_list(node, first)) and rest in node:
        out.append(((*path, rest), ""))
    return out


def _without(node: Any, path: Path, ends: set[Path]) -> Any:
    if path not in ends:
        return False
    if not isinstance(node, dict):
        return node
    out = dict(node)
    for inner, part in _inside(node, path):
        key, *names = inner[len(path) :]
        if not names:  # a keyword whose value is a schema
            out[key] = _without(part, inner, ends)
            continue
        (name,) = names
        if out[key] is node[key]:
            out[key] = list(node[key]) if isinstance(node[key], list) else dict(node[key])
        out[key][int(name) if isinstance(out[key], list) else name] = _without(part, inner, ends)
    return out
