"""Bodies of requests: their fields with types, ranges and defaults, for every dialect.

No field is passed over in silence: it is obeyed, documented as without effect, refused by name, or named in the response's header `x-pyspec-ignored`.
Null and absent have one meaning. A value out of range is refused by name; nothing is clamped.
"""

import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from .errors import ApiError
from .http import Request

log = logging.getLogger("pyspec.serve")
HEADER = "x-pyspec-ignored"
MAX_LOGGED = 256

Number = Annotated[float, Meta(ge=-1e300, le=1e300)]  # JSON has whole numbers that no float can hold
Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Tokens = Annotated[int, Meta(ge=-1, le=1 << 31)]
Count = Annotated[int, Meta(ge=1, le=64)]
Logprobs = Annotated[int, Meta(ge=0, le=1024)]
Int31 = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Stops = str | Annotated[list[str], Meta(max_length=256)]
_JSON = json.JSONEncoder(default=str)


class Adapter(Struct, frozen=True):
    """A LoRA adapter of a request, or of all."""

    id: Annotated[int, Meta(ge=0, le=1 << 16)]
    scale: Annotated[float, Meta(ge=-1e6, le=1e6)] = 0.0


class Fields(Struct, kw_only=True):
    """What every dialect takes. A sampling field that is not given is the server's."""

    hidden: ClassVar[frozenset[str]] = frozenset()  # inherited fields that this dialect does not take

    model: str = ""  # not compared, as in llama.cpp's server: there is one
    stream: bool = False
    sse_ping_interval: Int31 = 30
    temperature: Number | None = None
    top_k: Whole | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    typ_p: Number | None = None
    repeat_penalty: Number | None = None
    repetition_penalty: Number | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    min_keep: Whole | None = None
    seed: Whole | None = None
    dynatemp_range: Number | None = None
    dynatemp_exponent: Number | None = None
    top_n_sigma: Number | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: Whole | None = None
    dry_penalty_last_n: Whole | None = None
    dry_sequence_breakers: Annotated[list[str], Meta(min_length=1, max_length=64)] | None = None
    mirostat: Whole | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    adaptive_target: Number | None = None
    adaptive_decay: Number | None = None
    samplers: Any = None
    logit_bias: Any = None
    ignore_eos: bool = False
    grammar: str = ""
    regex: str = ""
    lark: str = ""
    json_schema: Any = None
    response_format: dict[str, Any] = {}
    grammar_lazy: bool = False
    grammar_triggers: Any = None
    additional_properties: bool | None = None
    cache_prompt: bool = True
    lora: list[Adapter] = []
    speculative: bool = True
    speculation: bool = False
    record: bool = True
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Fields, kw_only=True):
    """What llama.cpp's and OpenAI's dialects take."""

    stop: Stops = ()  # type: ignore[assignment]
    n_predict: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    n: Count | None = None
    n_cmpl: Count | None = None
    return_progress: bool = False
    timings_per_token: bool = False
    n_probs: Logprobs | None = None
    post_sampling_probs: bool = False
    logprobs: Any = None
    verbose: bool = False
    n_indent: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    t_max_predict_ms: Int31 = -1
    stream_options: StreamOptions = StreamOptions()

    @property
    def choices(self) -> int:
        """Sequences per prompt."""
        return self.n_cmpl or self.n or 1


class Completion(Generation, kw_only=True):
    """/completion. Slots are chosen by the engine: ``id_slot`` is checked, not obeyed."""

    hidden = frozenset({"stream_options"})

    prompt: Any = None
    id_slot: int = -1
    return_tokens: Any = None
    response_fields: Annotated[list[str], Meta(max_length=256)] = []


class Infill(Completion, kw_only=True):
    prompt: str = ""
    input_prefix: Any = None
    input_suffix: Any = None
    input_extra: Any = []


class OpenAICompletion(Generation, kw_only=True):
    prompt: Any = None
    logprobs: bool | Logprobs | None = None
    echo: bool = False
    suffix: str = ""
    best_of: Count | None = None

    @property
    def choices(self) -> int:
        return max(super().choices, self.best_of or 1)


class Thinking(Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: Int31 | None = None


class Chat(Generation, kw_only=True):
    messages: Any = None
    tools: list[Any] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    reasoning_effort: str = ""
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    thinking: Thinking = Thinking()
    enable_thinking: bool | None = None
    reasoning_budget_tokens: Int31 | None = None
    thinking_budget_tokens: Int31 | None = None
    reasoning_budget_message: str | None = None

    @property
    def thinking_budget(self) -> int:
        """Tokens; -1: no limit."""
        given = self.reasoning_budget_tokens, self.thinking_budget_tokens, self.thinking.budget_tokens
        return next((n for n in given if n is not None), -1)


class Responses(Chat, kw_only=True):
    """OpenAI's /v1/responses."""

    hidden = frozenset({"messages", "n", "n_cmpl"})

    input: Any = None
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    reasoning: dict[str, Any] = {}
    text: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    previous_response_id: Any = None
    conversation: Any = None
    background: bool = False


class Messages(Fields, kw_only=True):
    """Anthropic's /v1/messages."""

    messages: Any = None
    system: Any = None
    max_tokens: Tokens = 4096
    temperature: Number | None = 1.0
    stop_sequences: Stops = ()  # type: ignore[assignment]
    tools: Any = []
    tool_choice: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    thinking: Thinking = Thinking()
    reasoning_budget_tokens: Int31 | None = None
    thinking_budget_tokens: Int31 | None = None
    reasoning_budget_message: str | None = None
    output_config: dict[str, Any] = {}
    output_format: Any = None


BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")
NO_EFFECT = {  # each does nothing to the tokens here; docs/server.md has the reasons
    "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms", "backend_sampling", "preserved_tokens", "id_slot", "return_tokens", "verbose",
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction", "include",
    "truncation",
}  # fmt: skip
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # they would change the tokens; name: (values without a meaning, remedy)
    "functions": (([],), "use tools"), "function_call": (("none", "auto"), "use tool_choice"),
    "guided_json": ((), "use json_schema or response_format"), "guided_regex": ((), "use regex"), "guided_grammar": ((), "use grammar"),
    "guided_choice": ((), "use grammar with the choices"), "structured_outputs": (({},), "use response_format, regex or grammar"),
    "min_tokens": ((0,), "leave it out"), "stop_token_ids": (([],), "use stop"), "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": ((), "use grammar"), "include_stop_str_in_output": ((False,), "leave it out"),
    "use_beam_search": ((False,), "leave it out"), "prompt_logprobs": ((), "leave it out"),
    "echo": ((False,), "the prompt is yours already"), "suffix": (("",), "fill in at /infill, or at /v1/completions"), "best_of": ((1,), "leave it out"),
    "reasoning_control": ((False,), "leave it out"), "chat_format": ((0,), "leave it out"),
    "chat_template": (("",), "the server is started with its template"), "skip_special_tokens": ((True,), "leave it out"),
    "truncate_prompt_tokens": ((-1,), "send the part of the prompt that counts"), "output_format": ((), "use json_schema"),
    "chat_parser": (("",), "leave it out"), "generation_prompt": (("",), "leave it out"), "parse_tool_calls": ((True,), "leave it out"),
    "modalities": ((["text"],), "this server generates text"), "audio": ((), "this server generates text"),
    "web_search_options": ((), "this server searches nothing"), "mcp_servers": (([],), "this server calls no tools itself"),
}  # fmt: skip
_logged: set[str] = set()
F = TypeVar("F", bound=Struct)


def parse(request: Request, kind: type[F]) -> F:
    """The body of a request that generates; fields without a meaning are in ``request.unknown``. Raises ApiError."""
    body = request.json_object()
    request.unknown = unknown_fields(body, kind)
    for name in request.unknown:
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            sentence = "requests at %s have the field %.80r, which means nothing here; responses name it in %s"
            log.warning(sentence, request.path, name, HEADER)
    return convert(body, kind)


def unknown_fields(body: Mapping[str, Any], kind: type[F]) -> list[str]:
    """Fields without a meaning. Raises ApiError: one that would change the response, and is not supported."""
    known, unknown = field_names(kind), []
    for name, value in body.items():
        if name in known or (name in BUDGETS and value == -1):  # no limit
            continue
        if name in REFUSED:
            without_meaning, remedy = REFUSED[name]
            if not any(type(value) is type(v) and value == v for v in without_meaning):
                raise ApiError(501, f"{name} is not supported here; {remedy}", param=name)
        elif name not in NO_EFFECT:
            unknown.append(name)
    return unknown


def shown(unknown: list[str]) -> str:
    """The value of the header: names that a header can hold, the others by their escapes."""
    return ", ".join(name.encode("unicode_escape").decode()[:80] for name in unknown[:32])


@cache
def field_names(kind: type[Fields]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__) - getattr(kind, "hidden", frozenset())


def convert(body: Mapping[str, Any], kind: type[F]) -> F:
    """The fields of ``body``. Raises ApiError: one has a wrong type or value, which is named."""
    types, hidden = _types(kind), getattr(kind, "hidden", ())
    whole = {  # 8.0 is a whole number of JSON
        name: int(value) if type(value) is float and value.is_integer() and any(isinstance(t, inspect.IntType) for t in types.get(name, ())) else value
        for name, value in body.items()
        if name not in hidden
    }  # fmt: skip
    try:
        return msgspec.convert(whole, kind)
    except msgspec.ValidationError as error:
        path = re.split(r"[`\[]", str(error).partition("`$.")[2])[0]
        value: Any = body
        wanted: list[Any] = []
        for name in path.split("."):
            value, wanted = value[name], types[name]
            types = next((_types(t.cls) for t in wanted if isinstance(t, inspect.StructType)), {})
        raise wrong(path, value, " or ".join(map(_described, wanted))) from None


def wrong(name: str, value: Any, right: str) -> ApiError:
    return ApiError(400, f"{name} is {_shown(value)}, but it has to be {right}", param=name)


def _shown(value: Any) -> str:
    """The beginning of its JSON; of what is long only that is encoded."""
    shown = ""
    for part in _JSON.iterencode(value[:60] if isinstance(value, str) else value):
        shown += part[:60]
        if len(shown) >= 60:
            return shown[:57] + "..."
    return shown if not isinstance(value, str) or len(value) <= 60 else shown[:57] + "..."


@cache
def _types(kind: type[Struct]) -> dict[str, list[Any]]:
    """The types that its fields take, without None."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    either = {f.name: f.type.types if isinstance(f.type, inspect.UnionType) else (f.type,) for f in info.fields}
    return {name: [t for t in types if not isinstance(t, inspect.NoneType)] for name, types in either.items()}


def _described(kind: Any) -> str:
    """What a value has to be, as an error message ends."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=int(low), le=int(high)) if high < 1 << 62:
            return f"a whole number from {low} to {high}"
        case inspect.IntType():
            return "a whole number"
        case inspect.FloatType():
            return "a number"
        case inspect.StrType():
            return "a text"
        case inspect.LiteralType(values=values):
            return " or ".join(json.dumps(value) for value in values)
        case inspect.ListType(item_type=item, max_length=most):
            items = {"StrType": "texts", "DictType": "objects"}.get(type(item).__name__, "values")
            return f"a list of {items}" if most is None else f"a list of at most {most} {items}"
    return "an object"
