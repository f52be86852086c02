"""Names of a request's fields: what is obeyed, what has no effect here, what is refused, and what nobody here has heard of.

A field that is refused changes what comes out, so that an answer without it would be another one than was asked for. What nobody knows is told: the
header `x-pyspec-ignored` of the response names it, and the log does once.
"""

import logging
from collections.abc import Mapping
from typing import Any

from . import fields
from .anthropic import PASSED
from .errors import ApiError

log = logging.getLogger("pyspec.serve")
HEADER = "x-pyspec-ignored"
MOST_SAID = 256

COMMON = {
    *fields.NUMBERS, *fields.OFF, "model", "stream", "stop", "samplers", "logit_bias", "n_predict", "max_tokens", "max_completion_tokens", "ignore_eos", "n",
    "n_cmpl", "grammar", "regex", "lark", "json_schema", "response_format", "grammar_lazy", "grammar_triggers", "additional_properties", "cache_prompt", "return_progress",
    "timings_per_token", "speculative", "speculation", "priority", "n_probs", "post_sampling_probs", "logprobs", "sse_ping_interval", "verbose",
    "n_indent", "t_max_predict_ms",
}  # fmt: skip
CHAT = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "stream_options", "reasoning_effort", "reasoning_format", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "thinking", "enable_thinking", *fields.BUDGETS,
}  # fmt: skip
TAKEN = {
    "/completion": COMMON | {"prompt", "id_slot", "return_tokens", "response_fields"},
    "/infill": COMMON | {"prompt", "id_slot", "return_tokens", "response_fields", "input_prefix", "input_suffix", "input_extra"},
    "/completions": COMMON | {"prompt", "stream_options"},
    "/chat/completions": COMMON | CHAT,
    "/responses": (COMMON | CHAT | {"input", "instructions", "max_output_tokens", "reasoning", "text", "previous_response_id", "conversation", "background"})
    - {"messages", "n", "n_cmpl"},
    "/messages": {
        *PASSED, "model", "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking", "sse_ping_interval", "output_config",
        "output_format",
    },
}  # fmt: skip
NO_EFFECT = {  # each does nothing to the tokens here; docs/server.md says why
    "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms", "backend_sampling", "preserved_tokens", "id_slot", "return_tokens", "verbose",
    "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "adaptive_decay",
    "dynatemp_exponent", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction", "include",
    "truncation",
}  # fmt: skip
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # name: (values that ask for nothing, what to do)
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "guided_json": ((), "use json_schema or response_format"),
    "guided_regex": ((), "use regex"),
    "guided_grammar": ((), "use grammar"),
    "guided_choice": ((), "use grammar with the choices"),
    "structured_outputs": (({},), "use response_format, regex or grammar"),
    "min_tokens": ((0,), "leave it out"),
    "stop_token_ids": (([],), "use stop"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": ((), "use grammar"),
    "include_stop_str_in_output": ((False,), "leave it out"),
    "use_beam_search": ((False,), "leave it out"),
    "prompt_logprobs": ((), "leave it out"),
    "echo": ((False,), "the prompt is yours already"),
    "suffix": (("",), "fill in at /infill"),
    "best_of": ((1,), "leave it out"),
    "lora": (([],), "merge the adapter into the model file"),
    "reasoning_budget_message": (("",), "leave it out"),
    "reasoning_control": ((False,), "leave it out"),
    "chat_format": ((0,), "leave it out"),
    "chat_template": (("",), "the server is started with its template"),
    "skip_special_tokens": ((True,), "leave it out"),
    "truncate_prompt_tokens": ((-1,), "send the part of the prompt that counts"),
    "output_format": ((), "use json_schema"),
    "chat_parser": (("",), "leave it out"),
    "generation_prompt": (("",), "leave it out"),
    "parse_tool_calls": ((True,), "leave it out"),
    "modalities": ((["text"],), "this server generates text"),
    "audio": ((), "this server generates text"),
    "web_search_options": ((), "this server searches nothing"),
    "mcp_servers": (([],), "this server calls no tools itself"),
}
_said: set[str] = set()


def check(path: str, body: Mapping[str, Any]) -> list[str]:
    """The fields that nobody here knows, and limits of the thinking, which are not enforced.

    Raises:
        ApiError: one that would change the answer, and is not supported.
    """
    short = path.removeprefix("/v1")
    known = TAKEN.get("/completions" if path == "/v1/completions" else "/completion" if short == "/completions" else short)
    if known is None:
        return []
    unknown = []
    for name, value in body.items():
        if name in fields.BUDGETS:  # -1 is no limit, 0 is obeyed where there is thinking; others limit nothing
            if value != -1 and (name not in known or (isinstance(value, (int, float)) and value > 0)):
                unknown.append(name)
        elif name in known:
            continue
        elif name in REFUSED:
            nothing, remedy = REFUSED[name]
            if not any(type(value) is type(n) and value == n for n in nothing):
                raise ApiError(501, f"{name} is not supported here; {remedy}", param=name)
        elif name not in NO_EFFECT:
            unknown.append(name)
    for name in unknown:
        if name not in _said and len(_said) < MOST_SAID:
            _said.add(name)
            log.warning("requests at %s have the field %.80r, which means nothing here; responses name it in %s", path, name, HEADER)
    return unknown


def shown(unknown: list[str]) -> str:
    """The header's value: names that a header can hold, the others by their escapes."""
    return ", ".join(name.encode("unicode_escape").decode()[:80] for name in unknown[:32])
