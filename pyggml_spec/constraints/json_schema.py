"""JSON schemas: keywords that cannot be guaranteed are refused by name, because llguidance ignores unknown ones."""

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn

from llguidance import LLMatcher

from ..errors import SamplingError
from .closed_objects import resolve
from .json_productive import dead_end, without_dead_ends

MAX_TEXT = 1 << 17  # characters
MOST_PATTERNS = 100  # 300 take five seconds
MOST_MULTIPLE = 1000  # multiples of n need n states; 10,000 take a second
_ONE = ("items", "additionalItems", "additionalProperties")  # keywords whose value is a schema
_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAP = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OTHER = (
    "type", "$ref", "required", "minItems", "maxItems",
    "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format",
)  # fmt: skip
_ANNOTATIONS = (
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
)  # fmt: skip
KEYWORDS = {*_ONE, *_LIST, *_MAP, *_VALUES, *_OTHER, *_ANNOTATIONS}
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


def grammar(text: str) -> str:
    """llguidance's grammar of the documents that a JSON schema allows. Raises SamplingError: invalid JSON, or a keyword, format or value
    that cannot be guaranteed; with its place."""
    return LLMatcher.grammar_from_json_schema(checked(text))


def checked(text: str) -> str:
    """The schema for llguidance, with whitespace options. Raises as ``grammar``."""
    if len(text) > MAX_TEXT:
        raise SamplingError(f"the JSON schema has {len(text)} characters, but at most {MAX_TEXT} are allowed; make it smaller")
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"the JSON schema is no JSON: {error}") from None
    _check(schema)
    try:
        if (kept := without_dead_ends(schema)) is False and schema is not False:
            raise SamplingError(
                "the JSON schema has no finite document: each contains another one by $ref; make one of them optional, or give it an "
                "alternative in anyOf"
            )
        schema = kept
        if isinstance(schema, bool):
            schema = {} if schema else {"anyOf": [False]}
        made = json.dumps({**schema, "x-guidance": _OPTIONS})
        if begun := dead_end(made):
            raise SamplingError(
                f"the JSON schema has a dead end after {begun[:60]!r}; put properties and patternProperties that belong together into one object"
            )
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
            raise SamplingError(
                "a JSON schema in the Lark grammar has $schema, deprecated, uniqueItems, a format of times or names, or a part that no document matches; leave that "
                "out there"
            )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _check(schema: Any) -> None:
    """Refuses what cannot be guaranteed; removes annotations that llguidance does not know."""
    if not isinstance(schema, (dict, bool)):
        raise SamplingError(f'the JSON schema is {json.dumps(schema)[:60]}, but it has to be an object like {{"type": "object"}}')
    known: dict[int, str] = {}  # subschemas and their places
    references: list[tuple[str, str]] = []
    anchors: set[str] = set()
    multiples: list[Any] = []
    todo: list[tuple[Any, str]] = [(schema, "#")]
    while todo:
        node, at = todo.pop()
        known[id(node)] = at
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            _refuse(at, f"is {json.dumps(node)[:60]}, which is no schema")
        inside = list(_inside(node, at))
        multiples.append(node.get("multipleOf", 1))
        _check_keywords(node, at)
        if isinstance(node.get("$ref"), str):
            references.append((node["$ref"], at))
        if isinstance(node.get("$anchor"), str):
            anchors.add("#" + node["$anchor"])
        todo += inside
    _check_multiples(multiples)
    for reference, at in references:
        if not reference.startswith("#"):
            _refuse(at, f"refers to {reference[:100]!r}; only references into the schema itself (#/...) are followed")
        if reference not in anchors and id(resolve(schema, reference)) not in known:
            _refuse(at, f"refers to {reference[:100]!r}, where there is no schema")


def _inside(node: dict, at: str) -> Iterator[tuple[Any, str]]:
    for key, value in node.items():
        if key in _LIST or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                _refuse(at, f"has a {key} that is no list of schemas")
            yield from ((part, f"{at}/{key}/{i}") for i, part in enumerate(value))
        elif key in _MAP:
            if not isinstance(value, dict):
                _refuse(at, f"has {key} that are no object")
            yield from ((part, f"{at}/{key}/{name}") for name, part in value.items())
        elif key in _ONE:
            yield value, f"{at}/{key}"


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
        _refuse(
            at, f"has {len(node['patternProperties'])} patternProperties, but at most {MOST_PATTERNS} are possible; every two are compared"
        )
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
