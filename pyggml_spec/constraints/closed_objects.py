"""JSON schema objects without ``additionalProperties`` allow the keys they describe only, as in llama.cpp.

Objects without ``properties`` stay open. Parts combined by ``allOf``, ``anyOf``, ``oneOf`` and ``$ref`` are one object: each allows the
keys of the others.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ..text.values import DEEPEST, Path, resolve, with_subschemas

_CHOICES = ("anyOf", "oneOf")
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
        target = resolve(self._root, node.get("$ref"))
        combined = given or opened or len(self._groups(node)) > 1 or self._own(node)
        if target is not None and reference not in self._inside and combined and self._names(target):
            rest = {key: value for key, value in node.items() if key != "$ref"}
            self._inside.append(reference)
            made = self.close({**rest, "allOf": [target, *as_list(rest, "allOf")]}, given, opened, depth + 1)
            self._inside.pop()
            return made
        groups = self._groups(node)

        def close(path: Path, part: Any) -> Any:
            key = path[0]
            if key not in ("allOf", *_CHOICES):
                return self.close(part, {}, False, depth + 1)
            others = [other for place, other in groups if place != path and not (key in _CHOICES and place[0] == key)]
            names = _joined(given, self._own(node), *map(self._names, others))
            return self.close(part, names, opened or _opens(node) or any(map(self._opens, others)), depth + 1)

        out = with_subschemas(node, close)
        if isinstance(node.get("properties"), dict) and "additionalProperties" not in node and not opened and not self._opens(node):
            known = _joined(node["properties"], given, self._names(node))
            if not isinstance(least := node.get("minProperties", 0), int) or least <= len(known):
                out |= {"properties": {name: out["properties"].get(name, True) for name in known}, "additionalProperties": False}
        return out

    def _groups(self, node: dict) -> list[tuple[Path, Any]]:
        """The schemas combined in ``node``, and their places."""
        out: list[tuple[Path, Any]] = [((key, str(i)), part) for key in ("allOf", *_CHOICES) for i, part in enumerate(as_list(node, key))]
        target = resolve(self._root, node.get("$ref"))
        return out + ([(("$ref",), target)] if target is not None else [])

    @staticmethod
    def _own(node: dict) -> Names:
        known = node.get("properties")
        return _joined(known if isinstance(known, dict) else (), (name for name in as_list(node, "required") if isinstance(name, str)))

    def _parts(self, node: Any) -> list[dict]:
        """``node`` and all schemas combined in it, transitively."""
        out: list[dict] = []
        todo = [node]
        while todo:
            part = todo.pop(0)
            if isinstance(part, dict) and not any(part is other for other in out) and len(out) < DEEPEST:
                out.append(part)
                todo += [inner for _, inner in self._groups(part)]
        return out

    def _names(self, node: Any) -> Names:
        return _joined(*map(self._own, self._parts(node)))

    def _opens(self, node: Any) -> bool:
        return any(map(_opens, self._parts(node)))


def _opens(node: dict) -> bool:
    """Whether additional keys are allowed explicitly."""
    return node.get("additionalProperties", False) is not False


def as_list(node: dict, key: str) -> list:
    """The list at ``key``; [] where there is none."""
    return node[key] if isinstance(node.get(key), list) else []


def _joined(*names: Iterable[str]) -> Names:
    return {name: None for some in names for name in some}
