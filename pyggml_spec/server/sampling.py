"""How the tokens of a request are chosen: sampling, limits, stop texts and constraints, from the fields of its body."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..cancel import check
from ..constraints.pattern import Pattern
from ..errors import SamplingError
from ..sampling.sampler import KNOWN, Sampling
from ..text.tokenizer import Tokenizer
from ..text.values import with_implied_types
from .bodies import Fields, Generation, wrong
from .errors import ApiError

MAX_NUMBER = 1e300
Constraint = tuple[str, str]  # kind, text
Trigger = str | int | Pattern
Triggers = tuple[Trigger, ...]
SETTINGS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "min_keep", "seed",
    "dynatemp_range", "dynatemp_exponent", "top_n_sigma", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
)  # fmt: skip
FIELDS = {  # field: of Sampling
    **{name: name for name in SETTINGS},
    "typ_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
}
_SAMPLER_NAMES = {
    "typical_p": "typ_p",
    "typ-p": "typ_p",
    "temp": "temperature",
    **{name.replace("_", "-"): name for name in KNOWN if "_" in name},
}
PLACE = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
MISPLACED = ("type", "schema", "json_schema")  # members that clients put one level too high
SCHEMA_METADATA = ("name", "description", "strict")  # they constrain nothing
_TRIGGER = '{"type": "word", "token", "pattern" or "pattern_full", "value": ...}'


@dataclass(frozen=True)
class Limits:
    """Defaults of requests: the server's own options."""

    sampling: Sampling
    max_tokens: int | None
    n_ctx: int


def max_tokens(body: Generation, limits: Limits) -> int | None:
    """The first of the three fields that is given; -1, or none: the server's."""
    given = next((n for n in (body.n_predict, body.max_completion_tokens, body.max_tokens) if n is not None), -1)
    return given if given >= 0 else limits.max_tokens


def sampling(
    body: Generation, limits: Limits, tokenizer: Tokenizer, n_probs: int | None, constraint: Constraint | None, triggers: Triggers = ()
) -> Sampling:
    """How this request's tokens are chosen. ``n_probs``: log probabilities that are reported of each token; ``triggers``: at which the constraint
    begins. Raises ApiError: a value out of range, or a sampler that is not supported."""
    values: dict[str, Any] = {means: value for name, means in FIELDS.items() if (value := getattr(body, name)) is not None}
    if values.get("seed") in (-1, (1 << 32) - 1):
        values["seed"] = None
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        if values.get(name) == -1:
            values[name] = limits.n_ctx
    if values.get("top_k", 0) < 0:
        values["top_k"] = 0
    if body.dry_sequence_breakers is not None:
        values["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    if body.samplers is not None:
        values["samplers"] = _samplers(body.samplers)
    if body.logit_bias is not None:
        values["logit_bias"] = logit_bias(body.logit_bias, tokenizer)
    if n_probs is not None:
        values |= {"logprobs": n_probs, "logprobs_after": body.post_sampling_probs}
    if constraint is not None:
        values |= dict.fromkeys(("grammar", "json_schema", "regex", "lark")) | {constraint[0]: constraint[1], "triggers": triggers}
    if body.additional_properties is not None:
        values["additional_properties"] = body.additional_properties
    try:
        return replace(limits.sampling, **values)
    except SamplingError as error:
        given = next((n for n, means in FIELDS.items() if getattr(body, n) is not None and str(error).startswith(f"{means} is ")), None)
        message = str(error) if given is None else given + str(error).removeprefix(FIELDS[given])
        raise ApiError(400, message, param=given) from None


def _samplers(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(";") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong("samplers", value, "a list of names")
    names = [_SAMPLER_NAMES.get(name.strip(), name.strip()) for name in value]
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise wrong("samplers", unknown[0], f"among {', '.join(KNOWN)}")
    return tuple(names)


def logit_bias(value: Any, tokenizer: Tokenizer) -> dict[int, float]:
    """``{"id or text": number}`` or ``[[id or text, number or false], ...]``; a text means each of its tokens."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs) or len(pairs) > 4096:
        raise wrong("logit_bias", value, 'an object like {"42": -1.5}, or a list of at most 4096 pairs')
    out: dict[int, float] = {}
    for token, bias in pairs:
        if bias is False:
            bias = -math.inf
        finite = isinstance(bias, (int, float)) and not isinstance(bias, bool) and abs(bias) <= MAX_NUMBER
        if not finite and bias != -math.inf:
            raise wrong("logit_bias", bias, "a number or false for each token")
        if isinstance(token, bool) or not isinstance(token, (int, str)):
            raise wrong("logit_bias", token, "token ids or texts with a number each")
        if isinstance(token, str) and isinstance(value, dict) and token.isdecimal() and len(token) < 20:
            token = int(token)
        if isinstance(token, int) and not 0 <= token < tokenizer.n_vocab:
            raise wrong("logit_bias", token, f"ids of the model's {tokenizer.n_vocab} tokens; those of another tokenizer mean others")
        check()
        ids = [token] if isinstance(token, int) else tokenizer.encode(token, special=True, bos=False)
        out |= dict.fromkeys(ids, float(bias))
    return out


def check_members(form: Mapping[str, Any], at: str, known: Sequence[str], place: str) -> None:
    """Raises ApiError: ``form`` has a member that is not read, a schema in the wrong place for instance; ``place``: where that belongs."""
    other = next((name for name, value in form.items() if name not in known and value is not None), None)
    if other is not None:
        kind = f" of the type {json.dumps(form['type'], default=str)[:60]}" if "type" in known and "type" in form else ""
        raise ApiError(400, f"{at}{kind} has no {json.dumps(other)[:80]}; a schema goes there like this: {place}", param=at)


def constraint(body: Fields) -> Constraint | None:
    """The constraint on the output, from ``response_format``, ``json_schema``, ``grammar``, ``regex`` or ``lark``; one of them at most."""
    given = [(name, name, text) for name in ("grammar", "regex", "lark") if (text := getattr(body, name))]
    if body.json_schema is not None:
        given.append(("json_schema", "json_schema", _schema(body.json_schema, "json_schema")))
    form = {name: value for name, value in body.response_format.items() if value is not None}
    kind = form.get("type", "text")
    if kind not in ("text", "", "json_object", "json_schema"):
        raise wrong("response_format.type", kind, 'one of "text", "json_object" and "json_schema"')
    members = {"json_object": ("schema",), "json_schema": ("json_schema",)}
    check_members(form, "response_format", ("type", *members.get(kind, ())), PLACE)
    if kind == "json_object" and ("schema" in form or body.json_schema is None):
        given.append(("response_format", "json_schema", _schema(form.get("schema", {}), "response_format.schema")))
    elif kind == "json_schema":
        inside = form.get("json_schema", {})
        if not isinstance(inside, dict):
            raise wrong("response_format.json_schema", inside, f"an object, as in {PLACE}")
        check_members(inside, "response_format.json_schema", ("schema", *SCHEMA_METADATA), PLACE)
        given.append(("response_format", "json_schema", _schema(inside.get("schema", {}), "response_format.json_schema.schema")))
    if len(given) > 1:
        raise ApiError(400, f"there are {' and '.join(name for name, *_ in given)}; give one of them", param=given[1][0])
    return given[0][1:] if given else None


def _schema(value: Any, name: str) -> str:
    if isinstance(value, str):  # JSON text
        return value
    if not isinstance(value, (dict, bool)):
        raise wrong(name, value, 'a JSON schema, like {"type": "object"}')
    return json.dumps(with_implied_types(value) if value != {} else {"type": "object"})


def triggers(body: Fields, tokenizer: Tokenizer, constraint: Constraint | None) -> Triggers:
    """Of ``grammar_lazy``: the words, tokens or patterns at which the constraint begins; none without it. Raises ApiError: there are none, or one
    is no trigger."""
    if not body.grammar_lazy:
        return ()
    given = body.grammar_triggers if body.grammar_triggers is not None else []
    if not isinstance(given, list) or not given or not all(isinstance(t, (dict, str)) for t in given):
        raise wrong("grammar_triggers", given, f"a list of words, or of {_TRIGGER}")
    if constraint is None:
        raise ApiError(400, "grammar_lazy needs a grammar that begins at the trigger; give one", param="grammar_lazy")
    return tuple(_trigger(trigger, tokenizer) for trigger in given)


def _trigger(trigger: dict[str, Any] | str, tokenizer: Tokenizer) -> Trigger:
    kind, value = ("word", trigger) if isinstance(trigger, str) else (trigger.get("type"), trigger.get("value"))
    if kind in ("pattern", "pattern_full", 2, 3) and isinstance(value, str):
        return Pattern(value, full=kind in ("pattern_full", 3))
    if kind in ("token", 0) and isinstance(trigger, dict):
        token = trigger.get("token", value)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < tokenizer.n_vocab:
            raise wrong("grammar_triggers.token", token, "the id of a token")
        return token
    if kind in ("word", 1) and isinstance(value, str):
        return value
    raise wrong("grammar_triggers", trigger, f"a word, or {_TRIGGER}")


def shown_trigger(trigger: Trigger) -> dict[str, Any]:
    """A trigger as llama.cpp's server shows it."""
    if isinstance(trigger, int):
        return {"type": 0, "token": trigger, "value": ""}
    return {"type": 1, "value": trigger} if isinstance(trigger, str) else {"type": 3 if trigger.full else 2, "value": trigger.text}
