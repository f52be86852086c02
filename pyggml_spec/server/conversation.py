"""A chat request, in OpenAI's words, as what the engine is asked. The other chat dialects are put into these words first."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..constraints.closed_objects import closed
from ..errors import SamplingError
from ..text.formats import BARE
from ..text.parse import Parser
from ..text.values import meant
from . import fields
from .answer import Answer
from .calls import call_schema, calls_grammar
from .errors import ApiError
from .jobs import Ask, Job
from .served import Prefill, Prompt, Served

_ABOUT_TOOLS = (
    "You can call these functions:\n{tools}\nTo call one, answer with <tool_call>{{\"name\": NAME, \"arguments\": ARGUMENTS}}</tool_call>, where the "
    "arguments are a JSON object."
)  # fmt: skip


MOST_TOOLS = 1024


@dataclass(frozen=True)
class Chat:
    """What a chat request comes to.

    Attributes:
        asks: one per choice.
        n_probs: log probabilities that are told of each token, None for none.
        called: tools that may be called.
        forced: whether the answer has to be a call.
    """

    asks: list[Ask]
    prompt: Prompt
    n_probs: int | None
    called: list[dict[str, Any]]
    forced: bool
    reasoning: bool

    def answer(self, job: Job, served: Served) -> Answer:
        prompt, parser = self.prompt, None
        if self.forced:
            parser = Parser(BARE, tools=self.called)
        elif self.called or self.reasoning or prompt.inside or prompt.form.channels is not None:
            parser = Parser(prompt.form, inside=prompt.inside, goes_on=prompt.goes_on, tools=self.called, reasoning=self.reasoning)
        return Answer(job, served.tokenizer, parser, self.n_probs is not None)


def sequence_asks(served: Served, body: Mapping[str, Any], ids: list[int], n_probs: int | None, constraint: tuple[str, str] | None,
                  key: str, progress: bool, every_step: bool, triggers: tuple[fields.Trigger, ...] | None = None) -> list[Ask]:  # fmt: skip
    """What every dialect asks of each sequence; ``n`` of them; ``triggers``: None for those of the request. Raises ApiError, SamplingError."""
    triggers = fields.triggers(body, served.tokenizer, constraint) if triggers is None else triggers
    n = fields.answers(body)
    sampling = fields.sampling(body, served.limits, served.tokenizer, n_probs, constraint, triggers)
    served.check_constraint(sampling.constraint if constraint is not None else None, triggers)
    ignore_end = fields.flag(body, "ignore_eos")
    if ignore_end and constraint is not None:
        raise ApiError(400, "a constraint ends with an end token, and ignore_eos ignores it; give one of the two", param="ignore_eos")
    ask = Ask(
        ids, fields.max_tokens(body, served.limits), sampling, fields.stop_texts(body), fields.line_limits(body), ignore_end, fields.mode(body, served.drafter),
        fields.flag(body, "cache_prompt", True), progress, every_step, fields.whole(body, "priority", 0, -1000, 1000), key,
    )  # fmt: skip
    if n == 1:
        return [ask]
    seeds = [sampling.seed] * n if sampling.seed is None else [(sampling.seed + i) % ((1 << 32) - 1) for i in range(n)]
    return [replace(ask, sampling=replace(sampling, seed=seed)) for seed in seeds]


def read_chat(served: Served, body: Mapping[str, Any], key: str) -> Chat:
    """Renders, encodes and checks; in a thread of the pool.

    Raises:
        ApiError: a field is wrong.
        TemplateError: the template refuses the conversation.
        SamplingError: a constraint is wrong.
    """
    served.check_model(body)
    n_probs = _probabilities(body)
    constraint = fields.constraint(body)
    body, tools = _allowed(body, read_tools(body))
    choice = _choice(body, tools)
    called = [] if choice == "none" else tools
    if called and constraint is not None:
        raise ApiError(400, "a grammar or a response format cannot be combined with tools; leave one of them out", param="tools")
    forced = [t for t in called if choice in ("required", t["function"]["name"])] if choice != "auto" else []
    if forced:
        constraint = "json_schema", call_schema(forced)
    held = (
        called
        if fields.flag(body, "additional_properties", served.limits.sampling.additional_properties)
        else [_closed(tool) for tool in called]
    )
    prompt = read_prompt(served, body, called, closed=constraint is not None and not fields.flag(body, "grammar_lazy"))
    progress = fields.flag(body, "return_progress") and fields.flag(body, "stream")
    common = progress, fields.flag(body, "speculation")
    asks: list[Ask] | None = None
    if called and not forced and not _may_think(served, body, called):
        several = fields.flag(body, "parallel_tool_calls", True)
        with suppress(ApiError, SamplingError):  # what cannot be promised of a call that may come is read from the text
            grammar = calls_grammar(prompt.form, held, several, served.tokenizer.control_tokens())
            if grammar is not None:
                asks = sequence_asks(served, body, prompt.ids, n_probs, ("lark", grammar[0]), key, *common, grammar[1])
    if asks is None:
        asks = sequence_asks(served, body, prompt.ids, n_probs, constraint, key, *common)
    reasoning = _reasoning(served, body) and (constraint is None or bool(asks[0].sampling and asks[0].sampling.triggers))
    return Chat(asks, prompt, n_probs, forced or called, bool(forced), reasoning)


def _closed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose arguments are those that its schema describes, and no others."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": closed(meant(function["parameters"]))}} if function.get("parameters") else tool


def _probabilities(body: Mapping[str, Any]) -> int | None:
    """``logprobs`` with ``top_logprobs``, or ``n_probs``."""
    asked = body.get("logprobs", False)
    if not isinstance(asked, bool):
        raise fields.wrong("logprobs", asked, "true or false")
    if body.get("top_logprobs", 0) != 0 and not asked:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if asked:
        return fields.whole(body, "top_logprobs", 20, 0, 1024)
    return fields.whole(body, "n_probs", 0, 0, 1024) or None


def _reasoning(served: Served, body: Mapping[str, Any]) -> bool:
    form = fields.text(body, "reasoning_format", served.options.reasoning)
    if form not in ("none", "auto", "deepseek", "deepseek-legacy"):
        raise fields.wrong("reasoning_format", form, '"none", "auto" or "deepseek"')
    return form != "none"


def read_prompt(served: Served, body: Mapping[str, Any], tools: Sequence[dict[str, Any]], closed: bool = False) -> Prompt:
    """The conversation's tokens; ``closed``: the answer must not begin inside of the reasoning."""
    messages, options = _template_options(served, body, tools, closed)
    return served.chat_ids(messages, **options)


def render_chat(served: Served, body: Mapping[str, Any]) -> str:
    """The conversation's text, for /apply-template, with the tools that may be called."""
    body, tools = _allowed(body, read_tools(body))
    messages, options = _template_options(served, body, [] if _choice(body, tools) == "none" else tools, False)
    return served.rendered(messages, **options)


def _template_options(
    served: Served, body: Mapping[str, Any], tools: Sequence[dict[str, Any]], closed: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    messages = read_messages(body)
    served.check_count(len(messages), "messages")
    thinking, variables = _template_arguments(served, body)
    open_turn = fields.flag(body, "add_generation_prompt", True)
    goes_on = body.get("continue_final_message", None)
    if goes_on not in (None, True, False, "content", "reasoning_content"):
        raise fields.wrong("continue_final_message", goes_on, "true or false")
    if goes_on and open_turn and "add_generation_prompt" in body:
        raise ApiError(400, "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message")
    last = messages[-1] if messages else {}
    if goes_on is None:
        goes_on = served.options.prefill_assistant and last.get("role") == "assistant" and not last.get("tool_calls") and open_turn
    prefill = Prefill() if closed and open_turn else None
    if goes_on:
        prefill, open_turn = _prefill(messages, goes_on, closed), True
        messages = messages[:-1]
        if prefill.reasoning:
            thinking = True
    if tools and "tools" not in served.template_for(tools).source:
        about = _ABOUT_TOOLS.format(tools="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools))
        if messages and messages[0].get("role") == "system":
            messages = [{**messages[0], "content": f"{_joined_text(messages[0].get('content'))}\n\n{about}"}, *messages[1:]]
        else:
            messages = [{"role": "system", "content": about}, *messages]
    return messages, {
        "tools": tools, "thinking": False if closed else thinking, "variables": variables, "open_turn": open_turn, "prefill": prefill,
    }  # fmt: skip


def _prefill(messages: list[dict[str, Any]], goes_on: bool | str, closed: bool) -> Prefill:
    """The last message as what the answer goes on with. Raises ApiError: it cannot be continued."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        raise ApiError(400, "continue_final_message needs a last message of the assistant; send one", param="continue_final_message")
    if last.get("tool_calls"):
        raise ApiError(400, "an assistant's message that calls tools cannot be continued; send the tools' results", param="messages")
    if len(messages) > 1 and messages[-2].get("role") == "assistant":
        raise ApiError(400, "two messages of the assistant stand at the end of the list; join them", param="messages")
    reasoning, content = last.get("reasoning_content") or "", _joined_text(last.get("content"))
    if goes_on == "reasoning_content" and content:
        raise ApiError(
            400, "continue_final_message is reasoning_content, but the last message has content behind it; leave it out", param="continue_final_message"
        )  # fmt: skip
    thinks = goes_on == "reasoning_content" or (goes_on is True and reasoning and not content)
    return Prefill(reasoning, None if thinks and not closed else content)


def _joined_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(part["text"] for part in content or [] if isinstance(part.get("text"), str))


def _template_arguments(served: Served, body: Mapping[str, Any]) -> tuple[bool | None, dict[str, Any]]:
    variables = {**served.options.template_arguments, **fields.mapping(body, "chat_template_kwargs")}
    thinking = served.options.thinking
    if "enable_thinking" in variables:
        thinking = variables.pop("enable_thinking")
        if not isinstance(thinking, bool):
            raise fields.wrong("chat_template_kwargs.enable_thinking", thinking, "true or false")
    if "enable_thinking" in body:
        thinking = fields.flag(body, "enable_thinking")
    kind = fields.mapping(body, "thinking").get("type")
    if kind not in (None, "enabled", "disabled", "adaptive", "auto"):
        raise fields.wrong("thinking.type", kind, '"enabled", "disabled", "adaptive" or "auto"')
    if kind in ("enabled", "disabled"):
        thinking = kind == "enabled"
    effort = fields.text(body, "reasoning_effort")
    if effort == "none" or fields.thinking_budget(body) == 0:
        thinking = False
        variables.pop("reasoning_effort", None)
    elif effort:
        variables["reasoning_effort"] = effort
    return thinking, variables


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raises ApiError: no list of messages that a template could take."""
    messages = body.get("messages")
    if not isinstance(messages, list):  # an empty one is the template's business, as in llama-server
        raise ApiError(400, 'messages is missing, or no list; send a list like [{"role": "user", "content": "Hello"}]', param="messages")
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"{at} is no object with a role", param="messages")
        content = message.get("content")
        if content is None and not (message["role"] == "assistant" and {"content", "tool_calls", "reasoning_content"} & set(message)):
            raise ApiError(400, f"{at} has no content", param="messages")
        if not isinstance(message.get("reasoning_content"), (str, type(None))):
            raise ApiError(400, f"the reasoning_content of {at} is no text", param="messages")
        if isinstance(content, list):
            _check_parts(content, at)
        elif not isinstance(content, (str, type(None))):
            raise ApiError(400, f"the content of {at} is neither a text nor a list of parts", param="messages")
        calls = message.get("tool_calls")
        if calls is not None and not (
            isinstance(calls, list) and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
        ):
            raise ApiError(400, f"the tool_calls of {at} are no list of calls with a function each", param="messages")
    return messages


def _check_parts(parts: list[Any], at: str) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "image", "input_audio", "input_video", "video_url"):
            what = "audio" if "audio" in str(kind) else "video" if "video" in str(kind) else "image"
            raise ApiError(400, f"{what} input is not supported: this server runs text models; send text alone", param="messages")
        if kind == "refusal" and isinstance(part.get("refusal"), str):  # what an assistant's message may hold
            part |= {"type": "text", "text": part["refusal"]}
        elif kind not in ("text", "thinking", "reasoning") or not isinstance(part.get("text", part.get("thinking")), str):
            raise ApiError(400, f'a part of {at} is no text; send {{"type": "text", "text": ...}}', param="messages")


# -- tools


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raises ApiError: no list of functions."""
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise fields.wrong("tools", tools, "a list of functions")
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"there are {len(tools)} tools, and {MOST_TOOLS} are taken; send fewer", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(400, f'tools[{i}] is no {{"type": "function", "function": {{"name": ...}}}}', param="tools")
        if not isinstance(function.get("parameters", {}), (dict, bool, type(None))):
            raise ApiError(400, f"the parameters of tools[{i}] are no JSON schema", param="tools")
    return tools


def _allowed(body: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The request and its tools as if those alone that ``tool_choice`` allows had been given. Raises ApiError."""
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body, tools
    inner = choice.get("allowed_tools", choice)
    inner = inner if isinstance(inner, dict) else {}
    given, mode = inner.get("tools"), inner.get("mode", "auto")
    names = [
        t.get("function", t).get("name") if isinstance(t, dict) and isinstance(t.get("function", t), dict) else None
        for t in (given if isinstance(given, list) else [])
    ]
    known = [tool["function"]["name"] for tool in tools]
    if not isinstance(given, list) or mode not in ("auto", "required") or not all(name in known for name in names):
        raise fields.wrong("tool_choice", choice, 'allowed_tools with the mode "auto" or "required" and a list of tools that are given')
    return {**body, "tool_choice": mode}, [tool for tool in tools if tool["function"]["name"] in names]


def _choice(body: Mapping[str, Any], tools: Sequence[dict[str, Any]]) -> str:
    """ "none", "auto", "required", or the name of the one tool that has to be called."""
    choice = body.get("tool_choice", "auto")
    if choice in ("none", "auto"):
        return choice
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, dict) else None
        if not isinstance(choice, str) or choice not in [t["function"]["name"] for t in tools]:
            raise ApiError(400, f"tool_choice names {choice!r}, which is none of the tools", param="tool_choice")
        return choice
    if choice != "required":
        raise fields.wrong("tool_choice", choice, '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}')
    if not tools:
        raise ApiError(400, "tool_choice is required, and there are no tools", param="tool_choice")
    return choice


def _may_think(served: Served, body: Mapping[str, Any], tools: Sequence[dict[str, Any]]) -> bool:
    """Whether the answer may hold reasoning, in which the marker of a call means nothing."""
    template = served.template_for(tools)
    return template.form.think[1] in template.source and _template_arguments(served, body)[0] is not False
