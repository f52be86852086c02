"""The fields of a request that choose tokens and limits: names, ranges and meanings of llama.cpp's server, where it has them.

A value out of range is refused by name; nothing is clamped in silence.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..cancel import check
from ..constraints.pattern import Pattern
from ..errors import SamplingError
from ..sampling.sampler import KNOWN, Sampling
from ..text.stream import LineLimits
from ..text.tokenizer import Tokenizer
from ..text.values import with_implied_types
from .errors import ApiError

MOST_N = 64
MOST_NUMBER = 1e300  # JSON has whole numbers that no float can hold
MOST_MADE = 64
Trigger = str | int | Pattern
NUMBERS = {  # field: (of Sampling, whole number)
    "temperature": ("temperature", False),
    "top_k": ("top_k", True),
    "top_p": ("top_p", False),
    "min_p": ("min_p", False),
    "typical_p": ("typical_p", False),
    "typ_p": ("typical_p", False),
    "repeat_penalty": ("repeat_penalty", False),
    "repetition_penalty": ("repeat_penalty", False),
    "repeat_last_n": ("repeat_last_n", True),
    "presence_penalty": ("presence_penalty", False),
    "frequency_penalty": ("frequency_penalty", False),
    "min_keep": ("min_keep", True),
    "seed": ("seed", True),
}
OFF = {  # samplers that are not there, and the values that ask for nothing
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1, 0),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "adaptive_target": (-1,),
}
_SAMPLER_NAMES = {"typical_p": "typ_p", "typ-p": "typ_p", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "temp": "temperature"}
_JSON = json.JSONEncoder(default=str)
_SAMPLERS_OFF = ("dry", "top_n_sigma", "xtc", "adaptive_p")


BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")  # of the thinking; the first one counts, as in llama.cpp


@dataclass(frozen=True)
class Limits:
    """What a server's own options say where a request does not; and ``made`` of them and of requests: most of a client's are alike, and one takes 30 us."""

    sampling: Sampling
    max_tokens: int | None
    n_ctx: int
    made: dict[str, Sampling] = field(default_factory=dict, compare=False)


def wrong(name: str, value: Any, right: str) -> ApiError:
    return ApiError(400, f"{name} is {_shown(value)}, but it has to be {right}", param=name)


def _shown(value: Any) -> str:
    """The beginning of its JSON; of what is long only that is made."""
    shown = ""
    for part in _JSON.iterencode(value[:60] if isinstance(value, str) else value):
        shown += part[:60]
        if len(shown) >= 60:
            return shown[:57] + "..."
    return shown if not isinstance(value, str) or len(value) <= 60 else shown[:57] + "..."


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise wrong(name, value, "a text")
    return value


def whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, value, f"a whole number from {low} to {high}")
    return value


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value


def max_tokens(body: Mapping[str, Any], limits: Limits) -> int | None:
    """The first of the three names that is given; -1, or none: what the server's options say."""
    for name in ("n_predict", "max_completion_tokens", "max_tokens"):
        if name in body:
            given = whole(body, name, 0, -1, 1 << 31)
            return given if given >= 0 else limits.max_tokens
    return limits.max_tokens


def answers(body: Mapping[str, Any]) -> int:
    """How many answers to each prompt are asked for."""
    return whole(body, "n_cmpl" if "n_cmpl" in body else "n", 1, 1, MOST_N)


def thinking_budget(body: Mapping[str, Any]) -> int:
    """Tokens of thinking that are asked for; -1: as many as come. More than 0 is not enforced."""
    return next((whole(body, name, -1, -1, (1 << 31) - 1) for name in BUDGETS if name in body), -1)


def stop_texts(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """One text or a list of them; empty ones are left out."""
    value = body.get(name, [])
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(t, str) for t in value) or len(value) > 256:
        raise wrong(name, value, "a text or a list of at most 256 texts")
    return tuple(t for t in value if t)


def line_limits(body: Mapping[str, Any]) -> LineLimits:
    """``n_indent`` and ``t_max_predict_ms``; 0 of either is no limit, and neither are -1 milliseconds."""
    milliseconds = whole(body, "t_max_predict_ms", -1, -1, (1 << 31) - 1)
    return LineLimits(whole(body, "n_indent", 0, 0, 1 << 20), max(0, milliseconds) / 1000)


def sampling(
    body: Mapping[str, Any], limits: Limits, tokenizer: Tokenizer, n_probs: int | None, constraint: tuple[str, str] | None,
    triggers: tuple[Trigger, ...] = (),
) -> Sampling:  # fmt: skip
    """How this request's tokens are chosen.

    Args:
        n_probs: how many log probabilities are told of each token; None: none.
        constraint: a kind and its text; ``triggers``: at which it begins.

    Raises:
        ApiError: a value out of range, or a sampler that is not there.
    """
    values: dict[str, Any] = {}
    for name, (means, is_whole) in NUMBERS.items():
        if name in body:
            values[means] = _number(name, body[name], is_whole)
    if "seed" in values and values["seed"] in (-1, (1 << 32) - 1):
        values["seed"] = None
    if values.get("repeat_last_n") == -1:
        values["repeat_last_n"] = limits.n_ctx
    if values.get("top_k", 0) < 0:
        values["top_k"] = 0
    for name, nothing in OFF.items():
        if name in body and body[name] not in nothing:
            raise ApiError(501, f"{name} is not supported here; leave it out", param=name)
    if "samplers" in body:
        values["samplers"] = _samplers(body["samplers"])
    if "logit_bias" in body:
        values["logit_bias"] = logit_bias(body["logit_bias"], tokenizer)
    after = flag(body, "post_sampling_probs")
    if n_probs is not None:
        values |= {"logprobs": n_probs, "logprobs_after": after}
    if constraint is not None:
        values |= dict.fromkeys(("grammar", "json_schema", "regex", "lark")) | {constraint[0]: constraint[1], "triggers": triggers}
    if "additional_properties" in body:
        values["additional_properties"] = flag(body, "additional_properties")
    alike = repr(values) if constraint is None and "logit_bias" not in values else ""
    if (known := limits.made.get(alike)) is not None:
        return known
    try:
        made = replace(limits.sampling, **values)
    except SamplingError as error:
        given = next((n for n in NUMBERS if n in body and str(error).startswith(f"{NUMBERS[n][0]} is ")), None)
        said = str(error) if given is None else given + str(error).removeprefix(NUMBERS[given][0])
        raise ApiError(400, said, param=given) from None
    if alike:
        if len(limits.made) >= MOST_MADE:
            limits.made.clear()
        limits.made[alike] = made
    return made


def _number(name: str, value: Any, is_whole: bool) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > MOST_NUMBER:
        raise wrong(name, value, "a whole number" if is_whole else "a number")
    if is_whole and isinstance(value, float):
        if not value.is_integer():
            raise wrong(name, value, "a whole number")
        return int(value)
    return value


def _samplers(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(";") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong("samplers", value, "a list of names")
    names = [_SAMPLER_NAMES.get(name.strip(), name.strip()) for name in value]
    unknown = [name for name in names if name not in (*KNOWN, *_SAMPLERS_OFF)]
    if unknown:
        raise wrong("samplers", unknown[0], f"among {', '.join(KNOWN)}")
    return tuple(name for name in names if name in KNOWN)


def logit_bias(value: Any, tokenizer: Tokenizer) -> dict[int, float]:
    """``{"id or text": number}`` or ``[[id or text, number or false], ...]``; a text means each of its tokens, ids out of range are dropped."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs) or len(pairs) > 4096:
        raise wrong("logit_bias", value, 'an object like {"42": -1.5}, or a list of at most 4096 pairs')
    out: dict[int, float] = {}
    for token, bias in pairs:
        if bias is False:
            bias = -math.inf
        finite = isinstance(bias, (int, float)) and not isinstance(bias, bool) and abs(bias) <= MOST_NUMBER
        if not finite and bias != -math.inf:
            raise wrong("logit_bias", bias, "a number or false for each token")
        if isinstance(token, bool) or not isinstance(token, (int, str)):
            raise wrong("logit_bias", token, "token ids or texts with a number each")
        if isinstance(token, str) and isinstance(value, dict) and token.isdecimal() and len(token) < 10:
            token = int(token)
        check()
        ids = [token] if isinstance(token, int) else tokenizer.encode(token, special=True, bos=False)
        out |= {i: float(bias) for i in ids if 0 <= i < tokenizer.n_vocab}
    return out


PLACE = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
ABOUT_SCHEMAS = ("name", "description", "strict")  # which say nothing of what may come


def only(form: Mapping[str, Any], at: str, known: Sequence[str], place: str) -> None:
    """Raises ApiError: ``form`` holds something that nobody would read, a schema in the wrong place for instance; ``place``: where that belongs."""
    other = next((name for name, value in form.items() if name not in known and value is not None), None)
    if other is not None:
        kind = f" of the type {json.dumps(form['type'], default=str)[:60]}" if "type" in known and "type" in form else ""
        raise ApiError(400, f"{at}{kind} has no {json.dumps(other)[:80]}; a schema goes there like this: {place}", param=at)


def constraint(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the output has to match, from ``response_format``, ``json_schema``, ``grammar``, ``regex`` or ``lark``; one of them at most."""
    given: list[tuple[str, str, str]] = []
    for name in ("grammar", "regex", "lark"):
        if body.get(name, "") != "":
            given.append((name, name, text(body, name)))
    if "json_schema" in body:
        given.append(("json_schema", "json_schema", _schema(body["json_schema"], "json_schema")))
    form = {name: value for name, value in mapping(body, "response_format").items() if value is not None}
    kind = form.get("type", "text")
    if kind not in ("text", "", "json_object", "json_schema"):
        raise wrong("response_format.type", kind, 'one of "text", "json_object" and "json_schema"')
    only(form, "response_format", ("type", *{"json_object": ("schema",), "json_schema": ("json_schema",)}.get(kind, ())), PLACE)
    if kind == "json_object":
        if "schema" in form or "json_schema" not in body:
            given.append(("response_format", "json_schema", _schema(form.get("schema", {}), "response_format.schema")))
    elif kind == "json_schema":
        inside = form.get("json_schema", {})
        if not isinstance(inside, dict):
            raise wrong("response_format.json_schema", inside, f"an object, as in {PLACE}")
        only(inside, "response_format.json_schema", ("schema", *ABOUT_SCHEMAS), PLACE)
        given.append(("response_format", "json_schema", _schema(inside.get("schema", {}), "response_format.json_schema.schema")))
    if len(given) > 1:
        raise ApiError(400, f"there are {' and '.join(name for name, *_ in given)}; give one of them", param=given[1][0])
    return given[0][1:] if given else None


def triggers(body: Mapping[str, Any], tokenizer: Tokenizer, constraint: tuple[str, str] | None) -> tuple[Trigger, ...]:
    """Of ``grammar_lazy``: the words, tokens or patterns in ``grammar_triggers`` at which the constraint begins; none without it.

    Raises:
        ApiError: there are none, or what is there is no trigger.
    """
    if not flag(body, "grammar_lazy"):
        return ()
    given = body.get("grammar_triggers", [])
    if not isinstance(given, list) or not given or not all(isinstance(t, (dict, str)) for t in given):
        raise wrong(
            "grammar_triggers", given, 'a list of words, or of {"type": "word", "token", "pattern" or "pattern_full", "value": ...}'
        )
    if constraint is None:
        raise ApiError(400, "grammar_lazy needs a grammar that begins at the trigger; give one", param="grammar_lazy")
    out: list[Trigger] = []
    for trigger in given:
        kind, value = ("word", trigger) if isinstance(trigger, str) else (trigger.get("type"), trigger.get("value"))
        if kind in ("pattern", "pattern_full", 2, 3) and isinstance(value, str):
            out.append(Pattern(value, full=kind in ("pattern_full", 3)))
        elif kind in ("token", 0):
            token = trigger.get("token", value)
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < tokenizer.n_vocab:
                raise wrong("grammar_triggers.token", token, "the id of a token")
            out.append(token)
        elif kind in ("word", 1) and isinstance(value, str):
            out.append(value)
        else:
            raise wrong("grammar_triggers", trigger, 'a word, or {"type": "word", "token", "pattern" or "pattern_full", "value": ...}')
    return tuple(out)


def _schema(value: Any, name: str) -> str:
    if isinstance(value, str):  # a schema in its text
        return value
    if not isinstance(value, (dict, bool)):
        raise wrong(name, value, 'a JSON schema, like {"type": "object"}')
    return json.dumps(with_implied_types(value) if value != {} else {"type": "object"})


def mode(body: Mapping[str, Any], drafter: bool) -> str | None:
    """``speculative: false`` decodes plainly; true asks for what is there."""
    if flag(body, "speculative", True):
        return None
    return "plain" if drafter else None
