"""JSON schemas: keywords that cannot be guaranteed are refused by name, because llguidance ignores unknown ones; parts that no finite document matches
are removed.

llguidance detects most contradictions. It misses infinite recursion by ``$ref``, and pattern keys of which only named ones remain.
"""

import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from llguidance import LLMatcher

from ..errors import SamplingError
from ..text.values import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMA_ONES, Path, pointer, resolve, subschemas, with_subschemas
from .closed_objects import as_list
from .productive import byte_matcher, productive

MAX_TEXT = 1 << 17  # characters
MOST_PATTERNS = 100  # 300 take five seconds
MOST_MULTIPLE = 1000  # multiples of n need n states; 10,000 take a second
TRIES, MOST_BYTES = 16, 300  # random documents per schema, bytes of each
Part = tuple[Path, str]  # a schema, or one of the requirements of it
ROOT: Path = ()
# names against patterns; schemas compiled alone. Beyond that a part counts as productive
MOST_MATCHED, MOST_TRIED = 2000, 64
_VALUES = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OTHER = (
    "type", "$ref", "required", "minItems", "maxItems",
    "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format",
)  # fmt: skip
_ANNOTATIONS = (
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
)  # fmt: skip
KEYWORDS = {*SCHEMA_ONES, *SCHEMA_LISTS, *SCHEMA_MAPS, *_VALUES, *_OTHER, *_ANNOTATIONS}
_DATE = (
    r"(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9]+(?:-[a-zA-Z0-9]+)*"  # two hyphens would start an internationalised name
_STRICTER: dict[str, list[dict]] = {  # llguidance's formats allow 29 February of any year, leap seconds and any xn-- name
    "date": [{"pattern": f"^{_DATE}$"}],
    "time": [{"pattern": f"^{_TIME}$"}],
    "date-time": [{"pattern": f"^{_DATE}T{_TIME}$"}],
    "hostname": [{"format": "hostname", "maxLength": 253}, {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$"}],
}
FORMATS = (*_STRICTER, "duration", "email", "ipv4", "ipv6", "uuid", "uri")
_WHITESPACE = r"[ ]|\n{1,2}[ \t]{0,20}"  # bounded, so that a document cannot end in endless whitespace
_OPTIONS = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
_EMBEDDED = re.compile(r"%json\s*(?=[{\[\"]|true|false)")


def checked(text: str) -> str:
    """The schema for llguidance, with whitespace options. Raises SamplingError: invalid JSON, or a keyword, format or value that cannot be
    guaranteed; with its place."""
    if len(text) > MAX_TEXT:
        raise SamplingError(f"the JSON schema has {len(text)} characters, but at most {MAX_TEXT} are allowed; make it smaller")
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"the JSON schema is no JSON: {error}") from None
    _check(schema)
    try:
        if (kept := without_dead_ends(schema)) is False and schema is not False:
            what = "make one of them optional, or give it an alternative in anyOf"
            raise SamplingError(f"the JSON schema has no finite document: each contains another one by $ref; {what}")
        schema = kept
        if isinstance(schema, bool):
            schema = {} if schema else {"anyOf": [False]}
        made = json.dumps({**schema, "x-guidance": _OPTIONS})
        if begun := dead_end(made):
            what = "put properties and patternProperties that belong together into one object"
            raise SamplingError(f"the JSON schema has a dead end after {begun[:60]!r}; {what}")
        return made
    except RecursionError:
        raise SamplingError("the JSON schema is nested too deeply; give its parts names under $defs") from None


def check_embedded(lark: str) -> None:
    """Checks the schemas embedded in a Lark grammar (``%json {...}``)."""
    for match in _EMBEDDED.finditer(lark):
        try:
            schema, _ = json.JSONDecoder(parse_constant=_no_constant).raw_decode(lark, match.end())
        except (ValueError, RecursionError) as error:
            raise SamplingError(f"a JSON schema in the Lark grammar is no JSON: {error}") from None
        before = json.dumps(schema)
        _check(schema)
        if json.dumps(without_dead_ends(schema)) != before:
            what = "$schema, deprecated, uniqueItems, a format of times or names, or a part that no document matches"
            raise SamplingError(f"a JSON schema in the Lark grammar has {what}; leave that out there")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _check(schema: Any) -> None:
    """Refuses what cannot be guaranteed; removes annotations that llguidance does not know."""
    if not isinstance(schema, (dict, bool)):
        raise SamplingError(f'the JSON schema is {json.dumps(schema)[:60]}, but it has to be an object like {{"type": "object"}}')
    known: set[int] = set()  # subschemas
    references: list[tuple[str, str]] = []
    anchors: set[str] = set()
    multiples: list[Any] = []
    for path, node in _schemas(schema):
        at = "/".join(("#", *path))
        known.add(id(node))
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            _refuse(at, f"is {json.dumps(node)[:60]}, which is no schema")
        for key, value in node.items():
            if key in SCHEMA_LISTS and not isinstance(value, list):
                _refuse(at, f"has a {key} that is no list of schemas")
            if key in SCHEMA_MAPS and not isinstance(value, dict):
                _refuse(at, f"has {key} that are no object")
        multiples.append(node.get("multipleOf", 1))
        _check_keywords(node, at)
        if isinstance(node.get("$ref"), str):
            references.append((node["$ref"], at))
        if isinstance(node.get("$anchor"), str):
            anchors.add("#" + node["$anchor"])
    _check_multiples(multiples)
    for reference, at in references:
        if not reference.startswith("#"):
            _refuse(at, f"refers to {reference[:100]!r}; only references into the schema itself (#/...) are followed")
        if reference not in anchors and id(resolve(schema, reference)) not in known:
            _refuse(at, f"refers to {reference[:100]!r}, where there is no schema")


def _check_keywords(node: dict, at: str) -> None:
    if node.get("uniqueItems") is False:  # no constraint
        del node["uniqueItems"]
    for note in ("$schema", "deprecated"):
        node.pop(note, None)
    for key, value in list(node.items()):
        if key not in KEYWORDS:
            _refuse(at, f"has the keyword {key[:60]!r}, which cannot be guaranteed; leave it out, or use other keywords")
        if key in ("$id", "id") and at != "#":
            _refuse(at, f"has an {key} of its own; give the parts of a schema names under $defs")
        if key == "format" and value not in FORMATS:
            _refuse(at, f"has the format {json.dumps(value)[:60]}; these can be guaranteed: {', '.join(FORMATS)}")
        if key in _VALUES:
            _check_numbers(value, key, at)
    if len(node.get("patternProperties", ())) > MOST_PATTERNS:
        count = len(node["patternProperties"])
        _refuse(at, f"has {count} patternProperties, but at most {MOST_PATTERNS} are possible; every two are compared")
    if "additionalItems" in node and not isinstance(node.get("items"), list):
        _refuse(at, "has additionalItems without a list of items, where they mean nothing; use items")
    if "prefixItems" in node and ("additionalItems" in node or isinstance(node.get("items"), list)):
        _refuse(at, "mixes prefixItems with an older draft's items or additionalItems; use prefixItems and items")
    if node.get("format") in _STRICTER and isinstance(node.get("allOf", []), list):
        node["allOf"] = [*node.get("allOf", ()), *_STRICTER[node.pop("format")]]
    least, required = node.get("minProperties", 0), node.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > 1 + len({name for name in required if isinstance(name, str)}):
        _refuse(at, f"has minProperties of {least} with fewer required names: names could repeat, which counts once; name them in required")


def _check_numbers(value: Any, key: str, at: str) -> None:
    """llguidance computes with doubles."""
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, (list, dict)):
            todo += part.values() if isinstance(part, dict) else part
        elif (isinstance(part, float) and not math.isfinite(part)) or (isinstance(part, int) and abs(part) > 1 << 53):
            _refuse(at, f"has a number in {key} that a double does not hold exactly ({str(part)[:30]}); use smaller ones")


def _check_multiples(values: list[Any]) -> None:
    """llguidance combines several by their least common multiple."""
    exact = [Fraction(str(value)) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if (common := math.lcm(*(abs(value.numerator) for value in exact))) > MOST_MULTIPLE:
        raise SamplingError(
            f"the JSON schema has multipleOf of {' and '.join(str(v) for v in values if v != 1)[:100]}, that is {common} in all, but at most "
            f"{MOST_MULTIPLE} is possible; leave it out"
        )


def _refuse(at: str, what: str) -> NoReturn:
    raise SamplingError(f"the JSON schema {'' if at == '#' else f'at {at[:200]} '}{what}")


# -- unproductive parts


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
    plain = {path: text for path, node in schemas.items() if isinstance(node, dict) and '"$ref"' not in (text := json.dumps(node))}
    tops = [path for path in plain if path and path[:-1] not in plain and (len(path) < 2 or path[:-2] not in plain)]
    return [path for path in tops[:MOST_TRIED] if "Unsatisfiable schema" in _matcher(plain[path]).get_error()]


def _name_keys(node: dict) -> None:
    """Replaces ``patternProperties`` by names where the patterns match no other key; llguidance would search for others."""
    patterns, known = node["patternProperties"], node.get("properties", {})
    names = dict.fromkeys([*known, *(name for name in as_list(node, "required") if isinstance(name, str))])
    none, every = dict.fromkeys(names, False), dict.fromkeys(patterns, True)
    matcher = _matcher(json.dumps({"type": "object", "properties": none, "patternProperties": every, "additionalProperties": False}))
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

    def accepts(m: LLMatcher) -> bool:
        return not m.is_error() and m.validate_tokens(text) == len(text) and m.consume_tokens(text) and m.is_accepting()

    return [pattern for pattern in patterns if accepts(_matcher(json.dumps({"type": "string", "pattern": pattern})))]


def _matcher(schema: str) -> LLMatcher:
    return byte_matcher(LLMatcher.grammar_from_json_schema(schema))


def _schemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    todo: list[tuple[Path, Any]] = [(ROOT, schema)]
    while todo:
        path, node = todo.pop()
        todo += [((*path, *at), part) for at, part in subschemas(node)]  # before the node is changed
        yield path, node


def _needs(node: Any, path: Path, at: dict[str, Path]) -> dict[Part, tuple[int, Sequence[Part]]]:
    """What must be productive for a schema and for its alternatives."""
    if node is False:
        return {(path, ""): (1, ())}
    if not isinstance(node, dict):
        return {(path, ""): (0, ())}
    out: dict[Part, tuple[int, Sequence[Part]]] = {}
    all_of: list[Part] = [((*path, "allOf", str(i)), "") for i in range(len(as_list(node, "allOf")))]
    if node.get("$ref") in at:
        all_of.append((at[node["$ref"]], ""))
    for key in ("anyOf", "oneOf"):
        if key in node:
            all_of.append((path, key))
            out[path, key] = 1, [((*path, key, str(i)), "") for i in range(len(as_list(node, key)))]
    kinds = node.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds and set(kinds) <= {"object", "array"}:  # other types have no parts
        all_of.append((path, "kinds"))
        out[path, "kinds"] = 1, [(path, kind) for kind in kinds]
        members, items = _members(node, path), _items(node, path)
        out |= {(path, "object"): (len(members), members), (path, "array"): (len(items), items)}
    out[path, ""] = len(all_of), all_of
    return out


def _members(node: dict, path: Path) -> list[Part]:
    """Schemas of the required properties."""
    known, patterns = node.get("properties", {}), node.get("patternProperties", {})
    required = dict.fromkeys(name for name in as_list(node, "required") if isinstance(name, str))
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
    out: list[Part] = [((*path, first, str(i)), "") for i in range(min(least, len(as_list(node, first))))]
    if least > len(as_list(node, first)) and rest in node:
        out.append(((*path, rest), ""))
    return out


def _without(node: Any, path: Path, ends: set[Path]) -> Any:
    if path not in ends:
        return False
    return with_subschemas(node, lambda at, part: _without(part, (*path, *at), ends)) if isinstance(node, dict) else node
