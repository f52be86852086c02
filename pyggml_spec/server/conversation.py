"""A chat request as task requests for the engine. The other chat dialects are translated to ``bodies.Chat`` first."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from msgspec import structs

from ..cancel import check
from ..constraints.closed_objects import closed as closed_schema
from ..constraints.grammar import Grammar
from ..constraints.lazy import LazyGrammar
from ..errors import ModelError, SamplingError
from ..models.adapters import Chosen
from ..sampling.thinking import THINKING_LIMIT, ThinkingBudget
from ..text.formats import BARE
from ..text.parse import Parser
from ..text.stream import LineLimits
from ..text.template import ChatTemplate
from ..text.values import with_implied_types
from . import sampling
from .bodies import Adapter, Chat, Generation, wrong
from .calls import answer_or_calls, call_schema, calls_grammar
from .errors import ApiError, translated
from .pictures import media_kind, with_bytes
from .served import Prefill, Prompt, Rendering, Served
from .tasks import TaskRequest

_ABOUT_TOOLS = (
    "You can call these functions:\n{tools}\nTo call one, answer with <tool_call>{{\"name\": NAME, \"arguments\": ARGUMENTS}}</tool_call>, where the "
    "arguments are a JSON object."
)  # fmt: skip
MAX_TOOLS = 1024
EFFORTS = {
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.5,
}  # shares of the output that may be thinking, where the template does not know the effort
FURTHER_EFFORTS = ("none", "high", "xhigh", "max")
NO_MESSAGES = 'messages is missing, or no list; send a list like [{"role": "user", "content": "Hello"}]'


def task_requests(
    served: Served, body: Generation, ids: list[int], n_probs: int | None, constraint: sampling.Constraint | None, key: str,
    triggers: tuple[sampling.Trigger, ...] | None = None,
) -> list[TaskRequest]:  # fmt: skip
    """The sequences of one prompt. ``triggers``: None for those of the body. Raises ApiError, SamplingError."""
    triggers = sampling.triggers(body, served.tokenizer, constraint) if triggers is None else triggers
    chosen = sampling.sampling(body, served.limits, served.tokenizer, n_probs, constraint, triggers)
    check()
    if chosen.constraint is not None and triggers:  # compiled before the request waits, and cached for it
        LazyGrammar(*chosen.constraint, triggers, served.tokenizer)
    elif constraint is not None and chosen.constraint is not None:
        Grammar(*chosen.constraint, served.tokenizer)
    if body.ignore_eos and constraint is not None:
        raise ApiError(400, "a constraint ends with an end token, and ignore_eos ignores it; give one of the two", param="ignore_eos")
    stop = tuple(text for text in ([body.stop] if isinstance(body.stop, str) else body.stop) if text)
    lines = LineLimits(body.n_indent, max(0, body.t_max_predict_ms) / 1000)  # 0 of either is no limit
    mode = "plain" if served.drafter and not body.speculative else None
    request = TaskRequest(
        ids, sampling.max_tokens(body, served.limits), chosen, stop, lines, body.ignore_eos, mode, body.cache_prompt,
        adapters=adapters_of(served, body.lora) if body.lora else None, progress=body.return_progress and body.stream, every_step=body.speculation, record=body.record, priority=body.priority, key=key,
    )  # fmt: skip
    if body.choices == 1:
        return [request]
    seeds = [None if chosen.seed is None else (chosen.seed + i) % ((1 << 32) - 1) for i in range(body.choices)]
    return [replace(request, sampling=replace(chosen, seed=seed)) for seed in seeds]


def adapters_of(served: Served, given: Sequence[Adapter]) -> Chosen:
    """Adapters that are not listed have a scale of 0. Raises ApiError: there is none of an id."""
    adapters = served.session.target.weights.adapters
    if adapters is None:
        raise ApiError(400, "this server has no adapters; start it with `lora`", param="lora")
    with suppress(ModelError):
        return adapters.chosen({one.id: one.scale for one in given})
    raise ApiError(400, f"lora names an adapter that is not there; {len(adapters.all)} are loaded, and the first one is 0", param="lora")


def read_chat(served: Served, body: Chat, key: str, names: Mapping[str, str]) -> tuple[list[TaskRequest], Callable[[], Parser | None]]:
    """Renders, encodes and checks; in a thread of the pool. Returns the sequences, one per choice, and what makes the parser of each. ``names``: the
    client's names of fields by those of ``Chat``, where that is a translation. Raises ApiError: a field, a constraint or the conversation is wrong."""
    with translated(names):
        return _read_chat(served, body, key)


def _read_chat(served: Served, body: Chat, key: str) -> tuple[list[TaskRequest], Callable[[], Parser | None]]:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    n_probs = body.n_probs or None if not body.logprobs else 20 if body.top_logprobs is None else body.top_logprobs
    constraint = sampling.constraint(body)
    body, tools = _allowed(body, read_tools(body))
    choice = _choice(body, tools)
    called = [] if choice == "none" else tools
    if called and constraint is not None and constraint[0] != "json_schema":
        raise ApiError(400, f"{constraint[0]} cannot be combined with tools; leave one of them out", param="tools")
    forced = [t for t in called if choice in ("required", t["function"]["name"])] if choice != "auto" else []
    if forced:
        constraint = "json_schema", call_schema(forced)
    prompt = served.chat_ids(_rendering(served, body, called, closed=constraint is not None and not body.grammar_lazy))
    requests: list[TaskRequest] | None = None
    template = served.template_for(called)
    may_think = template.form.think[1] in template.source and _template_arguments(served, body)[0] is not False
    is_open = served.limits.sampling.additional_properties if body.additional_properties is None else body.additional_properties
    held = called if is_open else [_closed(tool) for tool in called]
    either = bool(called and not forced and constraint)
    if either and constraint is not None:
        schema = constraint[1] if is_open else json.dumps(closed_schema(with_implied_types(_loads(constraint[1]))))
        constraint = "lark", answer_or_calls(prompt.form, held, body.parallel_tool_calls, served.tokenizer.control_tokens(), schema)
    elif called and not forced and not may_think:  # in reasoning the marker of a call means nothing
        with suppress(ApiError, SamplingError):  # a call that no grammar can hold is read from the text
            grammar = calls_grammar(prompt.form, held, body.parallel_tool_calls, served.tokenizer.control_tokens())
            if grammar is not None:
                requests = task_requests(served, body, prompt.ids, n_probs, ("lark", grammar[0]), key, grammar[1])
    if requests is None:
        requests = task_requests(served, body, prompt.ids, n_probs, constraint, key)
    thinking = _thinking(served, body, prompt, template)
    requests = [replace(r, sampling=replace(r.sampling, thinking=thinking)) for r in requests if r.sampling is not None]
    parsed = (body.reasoning_format or served.options.reasoning) != "none"
    reasoning = parsed and (constraint is None or bool(requests[0].sampling and requests[0].sampling.triggers))

    def parser() -> Parser | None:
        if forced:
            return Parser(BARE, tools=forced)
        if either:  # from the first token on
            return Parser(prompt.form, tools=called, reasoning=False)
        if called or reasoning or prompt.inside or prompt.form.channels is not None:
            return Parser(prompt.form, inside=prompt.inside, continued=prompt.goes_on, tools=called, reasoning=reasoning)
        return None

    return requests, parser


def _thinking(served: Served, body: Chat, prompt: Prompt, template: ChatTemplate) -> ThinkingBudget:
    """The markers of reasoning in the output, and its limit: that of the body, of its effort, or of the server."""
    (begin, end), forced, channels = prompt.form.think, template.thinking[1], prompt.form.channels
    if channels is not None:
        begin, end = channels.thinks, channels.ends[0]
        forced = end + channels.start + channels.answers
    limit, effort = body.thinking_budget, body.reasoning_effort if "reasoning_effort" not in template.source else ""
    if effort and effort not in (*EFFORTS, *FURTHER_EFFORTS):  # a template that knows it may know others
        raise wrong("reasoning_effort", effort, f"one of {', '.join((*EFFORTS, *FURTHER_EFFORTS))}")
    if limit < 0 and effort in EFFORTS:
        most = sampling.max_tokens(body, served.limits)
        left = served.n_ctx - len(prompt.ids)
        limit = int(EFFORTS[effort] * (left if most is None else min(most, left)))
    limit = served.options.thinking_budget if limit < 0 else limit
    message = served.options.thinking_message if body.reasoning_budget_message is None else body.reasoning_budget_message
    return ThinkingBudget(begin, end, None if limit < 0 else min(limit, THINKING_LIMIT), message + forced, prompt.inside == "reasoning")


def _loads(schema: str) -> Any:
    try:
        return json.loads(schema)
    except ValueError as error:
        raise ApiError(400, f"the JSON schema is no JSON: {error}", param="response_format") from None


def _closed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose arguments are those that its schema describes, and no others."""
    function = tool["function"]
    if not function.get("parameters"):
        return tool
    return {**tool, "function": {**function, "parameters": closed_schema(with_implied_types(function["parameters"]))}}


def render_chat(served: Served, body: Chat) -> str:
    """The conversation's text, for /apply-template, with the tools that may be called."""
    body, tools = _allowed(body, read_tools(body))
    return served.rendered(_rendering(served, body, [] if _choice(body, tools) == "none" else tools, False))


def _rendering(served: Served, body: Chat, tools: Sequence[dict[str, Any]], closed: bool) -> Rendering:
    messages = read_messages(body, served.media)
    served.check_count(len(messages), "messages")
    thinking, variables = _template_arguments(served, body)
    open_turn = body.add_generation_prompt is not False
    continues = body.continue_final_message
    if continues and body.add_generation_prompt:
        raise _cannot_continue("add_generation_prompt and continue_final_message cannot both be true")
    last = messages[-1] if messages else {}
    if continues is None:
        continues = served.options.prefill_assistant and last.get("role") == "assistant" and not last.get("tool_calls") and open_turn
    prefill = Prefill() if closed and open_turn else None
    if continues:
        prefill, open_turn = _prefill(messages, continues, closed), True
        messages = messages[:-1]
        if prefill.reasoning:
            thinking = True
    if tools and "tools" not in served.template_for(tools).source:
        about = _ABOUT_TOOLS.format(tools="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools))
        if messages and messages[0].get("role") == "system":
            messages = [{**messages[0], "content": f"{_joined_text(messages[0].get('content'))}\n\n{about}"}, *messages[1:]]
        else:
            messages = [{"role": "system", "content": about}, *messages]
    thinking = False if closed else thinking
    messages = with_bytes(messages, served.options.pictures) if served.media else messages
    options = {"add_generation_prompt": open_turn, "thinking": thinking, "tools": tools or None, "variables": variables}
    return Rendering(messages, options, prefill)


def _prefill(messages: list[dict[str, Any]], continues: bool | str, closed: bool) -> Prefill:
    """The last message as the beginning of the response. Raises ApiError: it cannot be continued."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        raise _cannot_continue("continue_final_message needs a last message of the assistant; send one")
    if last.get("tool_calls"):
        raise ApiError(400, "an assistant's message that calls tools cannot be continued; send the tools' results", param="messages")
    if len(messages) > 1 and messages[-2].get("role") == "assistant":
        raise ApiError(400, "two messages of the assistant stand at the end of the list; join them", param="messages")
    reasoning, content = last.get("reasoning_content") or "", _joined_text(last.get("content"))
    if continues == "reasoning_content" and content:
        raise _cannot_continue("continue_final_message is reasoning_content, but the last message has content after it; leave it out")
    thinks = continues == "reasoning_content" or (continues is True and reasoning and not content)
    return Prefill(reasoning, None if thinks and not closed else content)


def _cannot_continue(sentence: str) -> ApiError:
    return ApiError(400, sentence, param="continue_final_message")


def _joined_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(part["text"] for part in content or [] if isinstance(part.get("text"), str))


def _template_arguments(served: Served, body: Chat) -> tuple[bool | None, dict[str, Any]]:
    """Whether the model is to think, None where the template decides; and further names for the template."""
    variables = {**served.options.template_arguments, **body.chat_template_kwargs}
    thinking = served.options.thinking
    if "enable_thinking" in variables:
        thinking = variables.pop("enable_thinking")
        if not isinstance(thinking, bool):
            raise wrong("chat_template_kwargs.enable_thinking", thinking, "true or false")
    if body.enable_thinking is not None:
        thinking = body.enable_thinking
    if body.thinking.type in ("enabled", "disabled"):
        thinking = body.thinking.type == "enabled"
    if body.reasoning_effort == "none" or body.thinking_budget == 0:
        thinking = False
        variables.pop("reasoning_effort", None)
    elif body.reasoning_effort:
        variables["reasoning_effort"] = body.reasoning_effort
    return thinking, variables


def read_messages(body: Chat, media: Collection[str] = ()) -> list[dict[str, Any]]:
    """Raises ApiError: no list of messages that a template could take. ``media``: what they may have besides text, "image" and "audio"."""
    if not isinstance(body.messages, list):  # an empty one is up to the template, as in llama-server
        raise ApiError(400, NO_MESSAGES, param="messages")
    for i, message in enumerate(body.messages):
        if fault := next(_faults(message, f"messages[{i}]", media), None):
            raise ApiError(400, fault, param="messages")
    return body.messages


def _faults(message: Any, at: str, media: Collection[str]) -> Iterator[str]:
    """What is wrong with a message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        yield f"{at} is no object with a role"
        return
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not (message["role"] == "assistant" and {"content", "tool_calls", "reasoning_content"} & set(message)):
        yield f"{at} has no content"
    if not isinstance(message.get("reasoning_content"), (str, type(None))):
        yield f"the reasoning_content of {at} is no text"
    if not isinstance(content, (list, str, type(None))):
        yield f"the content of {at} is neither a text nor a list of parts"
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if media_kind(part) in media:
            continue
        if kind in ("image_url", "image", "input_audio", "input_video", "video_url"):
            what = "audio" if "audio" in str(kind) else "video" if "video" in str(kind) else "image"
            runs = f"takes text and {' and '.join(media)}" if media else "was started without an encoder of it"
            yield f"{what} input is not supported: this server {runs}; send text alone"
        if kind == "refusal" and isinstance(part.get("refusal"), str):  # of an assistant's message
            part |= {"type": "text", "text": part["refusal"]}
        elif kind not in ("text", "thinking", "reasoning") or not isinstance(part.get("text", part.get("thinking")), str):
            yield f'a part of {at} is no text; send {{"type": "text", "text": ...}}'
    if not isinstance(calls, (list, type(None))) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls or ()
    ):
        yield f"the tool_calls of {at} are no list of calls with a function each"


# -- tools


def read_tools(body: Chat) -> list[dict[str, Any]]:
    """Raises ApiError: no list of functions."""
    if len(body.tools) > MAX_TOOLS:
        raise ApiError(400, f"there are {len(body.tools)} tools, and {MAX_TOOLS} are taken; send fewer", param="tools")
    for i, tool in enumerate(body.tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(400, f'tools[{i}] is no {{"type": "function", "function": {{"name": ...}}}}', param="tools")
        if not isinstance(function.get("parameters", {}), (dict, bool, type(None))):
            raise ApiError(400, f"the parameters of tools[{i}] are no JSON schema", param="tools")
    return body.tools


def _allowed(body: Chat, tools: list[dict[str, Any]]) -> tuple[Chat, list[dict[str, Any]]]:
    """The request and its tools, reduced to what ``tool_choice`` allows. Raises ApiError."""
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body, tools
    inner = choice.get("allowed_tools", choice)
    inner = inner if isinstance(inner, dict) else {}
    given, mode = inner.get("tools"), inner.get("mode", "auto")
    functions = [t.get("function", t) if isinstance(t, dict) else None for t in (given if isinstance(given, list) else [])]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    known = [tool["function"]["name"] for tool in tools]
    if not isinstance(given, list) or mode not in ("auto", "required") or not all(name in known for name in names):
        raise wrong("tool_choice", choice, 'allowed_tools with the mode "auto" or "required" and a list of tools that are given')
    return structs.replace(body, tool_choice=mode), [tool for tool in tools if tool["function"]["name"] in names]


def _choice(body: Chat, tools: Sequence[dict[str, Any]]) -> str:
    """ "none", "auto", "required", or the name of the one tool that has to be called."""
    choice = body.tool_choice
    if choice in ("none", "auto"):
        return choice
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, dict) else None
        if not isinstance(choice, str) or choice not in [t["function"]["name"] for t in tools]:
            raise ApiError(400, f"tool_choice names {choice!r}, which is none of the tools", param="tool_choice")
        return choice
    if choice != "required":
        raise wrong("tool_choice", choice, '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}')
    if not tools:
        raise ApiError(400, "tool_choice is required, and there are no tools", param="tool_choice")
    return choice
