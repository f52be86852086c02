"""Grammars of tool calls, from the format in which the model writes them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..text.formats import BARE, GEMMA, IN_JSON, JSON, NAMED, PYTHON, Calls, Format, Tags
from ..text.values import kinds, resolve, with_implied_types
from .errors import ApiError

Control = Mapping[str, int]
"""Texts of control tokens, and the tokens."""
_OF_TAGGED = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema", "$defs", "definitions"}
_OF_TEXTS = {"type", "description", "title", "default", "examples"}


def calls_grammar(
    form: Format, tools: Sequence[dict[str, Any]], several: bool, control: Control
) -> tuple[str, tuple[str | int, ...]] | None:
    """Lark text of one call between its markers, or of ``several``, and the triggers at which it begins; None for formats that are only parsed.
    Raises ApiError: the grammar cannot hold what the tools' schemas ask for."""
    if form.channels is not None or not form.calls or form.calls[0].arguments in (GEMMA, PYTHON):
        return None
    if form.calls[0].head or (isinstance(tags := form.calls[0].arguments, Tags) and (tags.nested or tags.attributes)):
        return None
    call, more = form.calls[0], "(SPACE call)*" if several else ""
    whole = f"call {more}"
    if call.sectioned:
        whole = f"{_mark(call.section[0], control)} SPACE {whole} SPACE {_mark(call.section[1], control)}"
    elif call.section:
        whole += f" (SPACE {_mark(call.section[1], control)})?"
    if call.listed:
        more, whole = "", "call"
    inside = f"inside: %json {call_schema(tools, call, several)}\n" if call.arguments == NAMED else _named_calls(tools, call, control)
    end = f" SPACE {_mark(call.end, control)}" if call.end else ""
    begin = call.section[0] if call.sectioned else call.begin
    text = f"start: {whole}\ncall: {_mark(call.begin, control)} SPACE inside{end}\nSPACE: /[ \\n]{{0,4}}/\n{inside}"
    return text, (control.get(begin, begin),)


def answer_or_calls(form: Format, tools: Sequence[dict[str, Any]], several: bool, control: Control, schema: str) -> str:
    """Lark text of an answer of this JSON schema, or of calls. Raises ApiError: no grammar holds calls of this format, or of these tools."""
    if form is BARE:
        either = (f"%json {call_schema(tools, replace(IN_JSON, keys=('name', key)))}" for key in ("parameters", "arguments"))
        text = f"start: call\ncall: {' | '.join(either)}\n"
    elif (grammar := calls_grammar(form, tools, several, control)) is not None:
        text = grammar[0]
    else:
        raise _refused(f"calls as {form.name} models write them cannot be combined with a response format; leave one of them out")
    call = form.calls[0]
    section = f"({_mark(call.section[0], control)} SPACE)? " if call.section and not call.sectioned else ""
    return f"{text.replace('start: ', f'start: answer | {section}', 1)}\nanswer: %json {schema}\n"


def _refused(sentence: str) -> ApiError:
    return ApiError(400, sentence, param="tools")


def _mark(marker: str, control: Control) -> str:
    """A marker in Lark: a control token matches no text."""
    return f"<[{control[marker]}]>" if marker in control else json.dumps(marker, ensure_ascii=False)


def _named_calls(tools: Sequence[dict[str, Any]], call: Calls, control: Control) -> str:
    """Rules for one call of one of ``tools`` whose name is before its arguments."""
    rules: list[str] = []
    names = []
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if set('<>"\n') & set(name):
            raise _refused(f"{name!r} is a name that cannot stand in tags")
        head = [json.dumps(call.name[0] + call.prefix + name)] + ([f"/{call.index}/"] if call.index else [])
        head += [_mark(call.name[1], control)] if call.name[1] else []
        if call.arguments == JSON:
            schema = with_implied_types(tool["function"].get("parameters") or {"type": "object"})
            body = f"SPACE %json {json.dumps(schema)}"
        else:
            assert isinstance(call.arguments, Tags)
            body = _tagged(rules, i, tool["function"], call.arguments)
        close = f"SPACE {_mark(call.close, control)}" if call.close else ""
        rules.append(f"tool_{i}: {' '.join(head)} {body} {close}")
        names.append(f"tool_{i}")
    if isinstance(call.arguments, Tags):
        ends = call.arguments.end.replace("/", "\\/")
        rules.append(f"TEXT: (/(?s:.*)/ & ~/(?s:.*({ends}).*)/) {json.dumps(call.arguments.end)}")
    return "\n".join([f"inside: {' | '.join(names)}", *rules, ""])


def _tagged(rules: list[str], i: int, function: dict[str, Any], tags: Tags) -> str:
    """The part after the name: arguments in the order of their schema; those that are not required may be left out. A text goes on to its end tag,
    other values are JSON. Rules for them are added to ``rules``."""
    schema = with_implied_types(function.get("parameters") or {"type": "object"})
    if not isinstance(schema, dict) or not set(schema) <= _OF_TAGGED or schema.get("type") != "object":
        raise _refused(f"the parameters of {function['name']!r} are more than the arguments of a call in tags can be held to")
    known, required = schema.get("properties", {}), schema.get("required", [])
    if not set(required) <= set(known) or any(set('<>"\n') & set(name) for name in known):
        raise _refused(f"{function['name']!r} has names that cannot stand in tags, or requires what it does not describe")
    parts = []
    for j, (name, wanted) in enumerate(known.items()):
        value = f"SPACE {json.dumps(tags.value)} " if tags.value else ""
        rules.append(f"argument_{i}_{j}: SPACE {json.dumps(name.join(tags.name))} {value}{_value(wanted, schema, tags, name)}")
        parts.append(f"argument_{i}_{j}" + ("" if name in required else "?"))
    return " ".join(parts)


def _value(wanted: Any, root: dict[str, Any], tags: Tags, name: str) -> str:
    """An argument's value and its end."""
    if "string" not in kinds(wanted, root):
        shared = {place: root[place] for place in ("$defs", "definitions") if place in root}
        return f"SPACE %json {json.dumps({**wanted, **shared})} SPACE {json.dumps(tags.end)}"
    choices = _choices(wanted, root)
    if choices is None:
        return "TEXT"
    if choices and all(text.strip() == text and "<" not in text for text in choices):
        return f"SPACE ({' | '.join(map(json.dumps, choices))}) SPACE {json.dumps(tags.end)}"
    raise _refused(f"the argument {name!r} is a text that a call in tags cannot be held to; give it as any text or as an enum")


def _choices(wanted: Any, root: dict[str, Any], depth: int = 0) -> list[str] | None:
    """The values that a schema with texts lists, as they are written; None for any text, none where no grammar can hold it."""
    if not isinstance(wanted, dict) or not wanted:
        return None
    listed = [wanted["const"]] if "const" in wanted else wanted.get("enum")
    if isinstance(listed, list):
        return [value if isinstance(value, str) else json.dumps(value) for value in listed]
    if "$ref" in wanted and depth < 32:
        return _choices(resolve(root, wanted["$ref"]), root, depth + 1)
    either = next((wanted[place] for place in ("anyOf", "oneOf") if isinstance(wanted.get(place), list)), None)
    if either is None and isinstance(wanted.get("type"), list):
        either = [{**wanted, "type": kind} for kind in wanted["type"]]
    if either is not None and depth < 32:
        parts = [_choices(part, root, depth + 1) for part in either]
        return None if None in parts else [text for part in parts for text in part or []] if all(parts) else []
    kind = wanted.get("type")
    if kind == "string" or kind is None:
        return None if set(wanted) <= _OF_TEXTS else []
    return {"null": ["null"], "boolean": ["true", "false"]}.get(kind, [])


def call_schema(tools: Sequence[dict[str, Any]], notation: Calls = IN_JSON, several: bool = False) -> str:
    """The JSON schema of a call of one of ``tools``, as {"name": .., "arguments": ..} or as the ``notation`` has it, of ``several`` in its list if it has
    one. Definitions of their parameters move to its root. Raises ApiError: two tools define different things under one name."""
    shared: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    either = []
    for tool in tools:
        parameters = with_implied_types(tool["function"].get("parameters") or {"type": "object"})
        if isinstance(parameters, dict):
            parameters = dict(parameters)
            for place, known in shared.items():
                for name, schema in (parameters.pop(place, None) or {}).items():
                    if known.setdefault(name, schema) != schema:
                        raise _refused(f"two tools define {name!r} differently in their parameters; rename one")
        name, call = tool["function"]["name"], dict[str, Any]()
        if notation.number:
            call[notation.number] = {"type": "string"}
        call |= dict(zip(notation.keys, ({"const": name}, parameters))) if notation.keys else {name: parameters}
        either.append({"type": "object", "properties": call, "required": list(call), "additionalProperties": False})
    one: dict[str, Any] = {"anyOf": either}
    whole = {"type": "array", "items": one, "minItems": 1, **({} if several else {"maxItems": 1})} if notation.listed else one
    return json.dumps({**whole, **{place: known for place, known in shared.items() if known}})
