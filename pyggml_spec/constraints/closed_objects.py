"""JSON schema objects without ``additionalProperties`` allow the keys they describe only, as in llama.cpp.

Objects without ``properties`` stay open. Parts combined by ``allOf``, ``anyOf``, ``oneOf`` and ``$ref`` are one object: each allows the
keys of the others.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

DEEPEST = 64
_CHOICES, _MAPS, _ONES = (
    ("anyOf", "oneOf"),
    ("properties", "patternProperties", "$defs", "definitions"),
    ("items", "additionalItems", "additionalProperties"),
)
Names = dict[str, None]  # ordered


@lru_cache(64)
def closed_text(text: str) -> str:
    """The schema in ``text`` with its objects closed; unchanged if it is not a JSON schema."""
    try:
        schema = json.loads(text)
        made = closed(schema)
        return text if made == schema else json.dumps(made)
    except (ValueError, RecursionError):
        return text


def closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` where properties are described and additional ones are not mentioned."""
    return _Closing(schema).close(schema, {}, False, 0)


class _Closing:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._inside: list[str] = []  # references being expanded

    def close(self, node: Any, given: Names, opened: bool, depth: int) -> Any:
        """``given``: keys of the parts this one is combined with; ``opened``: one of them allows any key."""
        if not isinstance(node, dict) or depth >= DEEPEST:
            return node
        reference = str(node.get("$ref"))
        target = self._target(node)
        if (
            target is not None
            and reference not in self._inside
            and (given or opened or len(self._groups(node)) > 1 or self._own(node))
            and self._names(target)
        ):
            rest = {key: value for key, value in node.items() if key != "$ref"}
            self._inside.append(reference)
            made = self.close({**rest, "allOf": [target, *_list(rest, "allOf")]}, given, opened, depth + 1)
            self._inside.pop()
            return made
        out = dict(node)
        groups = self._groups(node)
        for i, (key, at, part) in enumerate(groups):
            others = [other for j, (other_key, _, other) in enumerate(groups) if j != i and not (key in _CHOICES and other_key == key)]
            if key != "$ref":
                if out[key] is node[key]:
                    out[key] = list(node[key])
                names = _joined(given, self._own(node), *map(self._names, others))
                out[key][at] = self.close(part, names, opened or _opens(node) or any(map(self._opens, others)), depth + 1)
        for key in (*_MAPS, *_ONES, "prefixItems"):
            value = node.get(key)
            if key in _MAPS and isinstance(value, dict):
                out[key] = {name: self.close(part, {}, False, depth + 1) for name, part in value.items()}
            elif isinstance(value, list) and key in ("items", "prefixItems"):
                out[key] = [self.close(part, {}, False, depth + 1) for part in value]
            elif key in _ONES and isinstance(value, dict):
                out[key] = self.close(value, {}, False, depth + 1)
        if isinstance(node.get("properties"), dict) and "additionalProperties" not in node and not opened and not self._opens(node):
            known = _joined(node["properties"], given, self._names(node))
            if not isinstance(least := node.get("minProperties", 0), int) or least <= len(known):
                out |= {"properties": {name: out["properties"].get(name, True) for name in known}, "additionalProperties": False}
        return out

    def _target(self, node: dict) -> Any:
        """What the node's ``$ref`` points to, or None."""
        return resolve(self._root, node["$ref"]) if isinstance(node.get("$ref"), str) else None

    def _groups(self, node: dict) -> list[tuple[str, int, Any]]:
        """The schemas combined in ``node``."""
        out = [(key, i, part) for key in ("allOf", *_CHOICES) for i, part in enumerate(_list(node, key))]
        return out + ([("$ref", 0, target)] if (target := self._target(node)) is not None else [])

    @staticmethod
    def _own(node: dict) -> Names:
        known = node.get("properties")
        return _joined(known if isinstance(known, dict) else (), (name for name in _list(node, "required") if isinstance(name, str)))

    def _parts(self, node: Any) -> list[dict]:
        """``node`` and all schemas combined in it, transitively."""
        out: list[dict] = []
        todo = [node]
        while todo:
            part = todo.pop(0)
            if isinstance(part, dict) and not any(part is other for other in out) and len(out) < DEEPEST:
                out.append(part)
                todo += [inner for _, _, inner in self._groups(part)]
        return out

    def _names(self, node: Any) -> Names:
        return _joined(*map(self._own, self._parts(node)))

    def _opens(self, node: Any) -> bool:
        return any(map(_opens, self._parts(node)))


def resolve(root: Any, reference: str) -> Any:
    """The target of a JSON pointer in a URI fragment (RFC 6901), or None."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
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


def pointer(reference: str) -> tuple[str, ...]:
    """The names of a JSON pointer."""
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in unquote(reference).split("/")[1:])


def _opens(node: dict) -> bool:
    """Whether additional keys are allowed explicitly."""
    return node.get("additionalProperties", False) is not False


def _list(node: dict, key: str) -> list:
    return node[key] if isinstance(node.get(key), list) else []


def _joined(*names: Iterable[str]) -> Names:
    return {name: None for some in names for name in some}
