"""What models of every format may answer, case by case; `llama_server_formats.json` has what llama-server makes of each."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

WORDS = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "n": {"type": "integer"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    "required": ["word"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "Looks a word up.", "parameters": WORDS}},
    {"type": "function", "function": {"name": "stop", "description": "Stops.", "parameters": {"type": "object", "properties": {}}}},
]


def tools_of(family: str) -> list[dict]:
    """``TOOLS``; of a template that adds texts to each argument's `type`, without the argument that has none."""
    if family != "Seed-OSS":
        return TOOLS
    tools = copy.deepcopy(TOOLS)
    del tools[0]["function"]["parameters"]["properties"]["note"]
    return tools


@dataclass(frozen=True)
class Family:
    """A format: the template of llama.cpp's `models/templates` that stands for it, its control tokens, and what it writes.

    Attributes:
        call: a call of a tool from (name, {argument: how its value is written}).
        thought: reasoning that has its own beginning; ``open``: behind a prompt that has begun it, "" where no template does.
        shut: what answers begin with where the template opens the reasoning although there shall be none.
        answer: content, as it is written behind reasoning; ``preamble``: the same before a call, where that is another way.
        between, around: what stands between two calls, and around all of them.
        control, end: control tokens, and the one that ends answers. ``in_json``: whether arguments are JSON. ``marker``: one that may stand in them.
        always: whether requests ask for thinking even where the answer has none.
    """

    template: str
    call: Callable[[str, dict[str, str]], str]
    thought: str
    open: str = ""
    shut: str = ""
    answer: Callable[[str], str] = lambda text: text
    preamble: Callable[[str], str] | None = None
    between: str = "\n"
    around: tuple[str, str] = ("", "")
    control: tuple[str, ...] = ()
    end: str = "<|im_end|>"
    in_json: bool = True
    marker: str = "</tool_call>"
    always: bool = False

    def calls(self, *made: str) -> str:
        return self.around[0] + self.between.join(made) + self.around[1]


def _json(arguments: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in arguments.items()) + "}"


def _tags(open_tag: str, close_tag: str, line: str) -> Callable[[dict[str, str]], str]:
    return lambda arguments: "".join(f"{open_tag.format(name)}{line}{value}{line}{close_tag}\n" for name, value in arguments.items())


def _xml(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n<function={name}>\n{_tags('<parameter={}>', '</parameter>', chr(10))(arguments)}</function>\n</tool_call>"


def _keys(name: str, arguments: dict[str, str]) -> str:
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{inside}</tool_call>"


def _gemma(name: str, arguments: dict[str, str]) -> str:
    quote = '<|"|>'
    values = {key: value if value[0] in "0123456789-" else quote + value[1:-1] + quote for key, value in arguments.items()}
    inside = ",".join(f"{key}:{value}" for key, value in values.items())
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


def _minimax(name: str, arguments: dict[str, str]) -> str:
    return f'<invoke name="{name}">\n{_tags(chr(60) + "parameter name=" + chr(34) + "{}" + chr(34) + ">", "</parameter>", "")(arguments)}</invoke>'


def _atem(name: str, arguments: dict[str, str]) -> str:
    inside = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in arguments.items())
    return f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{inside}</atem:invoke>\n</atem:function_calls>'


def _k3(name: str, arguments: dict[str, str]) -> str:
    inside = "".join(
        f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>' for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'


def _dsml(name: str, arguments: dict[str, str]) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(key != "n").lower()}">{value}</｜DSML｜parameter>\n'
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>'


_M3 = "]<]minimax[>["


def _m3(name: str, arguments: dict[str, str]) -> str:
    inside = "".join(f"{_M3}<{key}>{value}{_M3}</{key}>" for key, value in arguments.items())
    return f'{_M3}<invoke name="{name}">{inside}{_M3}</invoke>'


def _hy3(name: str, arguments: dict[str, str]) -> str:
    key, value, call, sep = (f"{tag}:opensource>" for tag in ("arg_key", "arg_value", "tool_call", "tool_sep"))
    inside = "".join(f"<{key}{one}</{key}\n<{value}{text}</{value}\n" for one, text in arguments.items())
    return f"<{call}{name}<{sep}\n{inside}</{call}"


def _python(name: str, arguments: dict[str, str]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"


_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_KIMI = tuple(f"<|tool_{name}|>" for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end"))
_DEEP = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_THINK = "<think>\nHm, well.\n</think>\n\n"
FAMILIES = {
    "Hermes": Family(
        "Qwen-Qwen3-0.6B", lambda name, a: f'<tool_call>\n{{"name": "{name}", "arguments": {_json(a)}}}\n</tool_call>', _THINK,
    ),
    "Qwen3-Coder": Family("Qwen3-Coder", _xml, "", in_json=False, marker="</function>"),
    "Qwen 3.5": Family("Qwen3.5-4B", _xml, "", open="Hm, well.\n</think>\n\n", in_json=False, marker="</function>"),
    "GLM": Family("GLM-4.7-Flash", lambda name, a: _keys(name, a).replace("\n", ""), "", open="Hm, well.</think>", between="", in_json=False, marker="</tool_call>"),
    "Laguna": Family(
        "poolside-Laguna-S-2.1",
        lambda name, a: _keys(name, a).replace("\n", ""),
        "",
        open="Hm, well.</think>",
        between="",
        in_json=False,
    ),
    "Llama 3": Family("meta-llama-Llama-3.1-8B-Instruct", lambda name, a: f'{{"name": "{name}", "parameters": {_json(a)}}}', "", end="<|eot_id|>", marker="}"),
    "gemma 4": Family(
        "google-gemma-4-31B-it", _gemma, "<|channel>thought\nHm, well.<channel|>", always=True, between="", end="<turn|>", marker="<tool_call|>",
        control=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"), in_json=False,
    ),
    "gpt-oss": Family(
        "openai-gpt-oss-120b", lambda name, a: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(a)}",
        "<|channel|>analysis<|message|>Hm, well.<|end|><|start|>assistant", answer=lambda text: f"<|channel|>final<|message|>{text}",
        preamble=lambda text: f"<|channel|>commentary<|message|>{text}",
        between="<|end|><|start|>assistant", control=("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"), end="<|return|>", marker="<|channel|>",
    ),
    "muse-glimmer": Family(
        "muse-glimmer", _atem, " to=self<|message|>Hm, well.<|eom|><|start|>assistant", answer=lambda text: f" to=user<|message|>{text}",
        between="<|eom|><|start|>assistant", control=("<|start|>", "<|message|>", "<|eom|>"), end="<|eot|>", in_json=False, marker="</atem:invoke>",
    ),
    "MiniMax-M2": Family(
        "MiniMax-M2", _minimax, "", open="Hm, well.\n</think>\n\n", shut="\n</think>\n\n", around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"), end="[e~[", in_json=False, marker="</invoke>",
        control=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "Kimi K2": Family(
        "Kimi-K2-Instruct", lambda name, a: f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>", "", between="",
        around=(_KIMI[0], _KIMI[4]), control=_KIMI, end="<|im_end|>", marker=_KIMI[3],
    ),
    "Kimi K2 Thinking": Family(
        "Kimi-K2-Thinking", lambda name, a: f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>", "<think>Hm, well.</think>",
        between="", around=(_KIMI[0], _KIMI[4]), control=_KIMI, end="<|im_end|>", marker=_KIMI[3],
    ),
    "Kimi K3": Family(
        "Kimi-K3", _k3, "", open="Hm, well.<|close|>think<|sep|>", shut="<|close|>think<|sep|>", between="", end="<|end_of_msg|>", in_json=False,
        answer=lambda text: f"<|open|>response<|sep|>{text}<|close|>response<|sep|>", around=("<|open|>tools<|sep|>", "<|close|>tools<|sep|><|close|>message<|sep|>"),
        control=("<|open|>", "<|close|>"), marker="<|close|>call<|sep|>",
    ),
    "MiniMax-M3": Family(
        "MiniMax-M3", _m3, "<mm:think>Hm, well.</mm:think>", around=(f"{_M3}<tool_call>\n", f"\n{_M3}</tool_call>"), end="[e~[", in_json=False, marker=f"{_M3}</invoke>",
        control=("<mm:think>", "</mm:think>"), always=True,
    ),
    "Cohere2 MoE": Family(
        "Cohere2MoE", lambda name, a: f'{{"tool_call_id": "{int(name != "look_up" or "other" in str(a))}", "tool_name": "{name}", "parameters": {_json(a)}}}', "",
        open="Hm, well.<|END_THINKING|>", shut="<|END_THINKING|>", between=", ", around=("<|START_ACTION|>[", "]<|END_ACTION|>"), end="<|END_OF_TURN_TOKEN|>",
        answer=lambda text: f"<|START_TEXT|>{text}<|END_TEXT|>", marker="<|END_ACTION|>",
        control=("<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "Apertus": Family(
        "Apertus-8B-Instruct", lambda name, a: f'{{"{name}": {_json(a)}}}', "<|inner_prefix|>Hm, well.<|inner_suffix|>", between=", ",
        around=("<|tools_prefix|>[", "]<|tools_suffix|>"), control=("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
        end="<|assistant_end|>", marker="<|tools_suffix|>", always=True,
    ),
    "Hy3": Family(
        "tencent-Hy3", _hy3, "", around=("<tool_calls:opensource>\n", "\n</tool_calls:opensource>"), end="<｜hy_eos:opensource｜>", in_json=False,
        marker="</tool_call:opensource>",
    ),
    "Command R7B": Family(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        lambda name, a: f'{{"tool_call_id": "{int(name != "look_up" or "other" in str(a))}", "tool_name": "{name}", "parameters": {_json(a)}}}', "<|START_THINKING|>Hm, well.<|END_THINKING|>",
        between=", ", around=("<|START_ACTION|>[", "]<|END_ACTION|>"), end="<|END_OF_TURN_TOKEN|>", answer=lambda text: f"<|START_RESPONSE|>{text}<|END_RESPONSE|>", marker="<|END_ACTION|>",
        control=("<|START_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "Nemotron Nano 2": Family(
        "NVIDIA-Nemotron-Nano-v2", lambda name, a: f'{{"name": "{name}", "arguments": {_json(a)}}}', "", open="Hm, well.\n</think>\n", shut="</think>\n", between=", ",
        around=("<TOOLCALL>[", "]</TOOLCALL>"), end="<SPECIAL_12>", marker="</TOOLCALL>",
    ),
    "Seed-OSS": Family(
        "ByteDance-Seed-OSS", lambda name, a: f"<seed:tool_call>\n<function={name}>\n{_tags('<parameter={}>', '</parameter>', '')(a)}</function>\n</seed:tool_call>",
        "<seed:think>Hm, well.</seed:think>", end="<seed:eos>", in_json=False, marker="</function>", always=True,
    ),
    "DeepSeek V3.2": Family(
        "deepseek-ai-DeepSeek-V3.2", _dsml, "", open="Hm, well.</think>", around=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"), end="<｜end▁of▁sentence｜>", in_json=False,
        marker="</｜DSML｜invoke>",
    ),
    "Ministral": Family(
        "mistralai-Ministral-3-14B-Reasoning-2512", lambda name, a: f"[TOOL_CALLS]{name}[ARGS]{_json(a)}", "[THINK]Hm, well.[/THINK]", between="", control=("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
        end="</s>", marker="[ARGS]", always=True,
    ),
    "Devstral": Family(
        "unsloth-mistral-Devstral-Small-2507", lambda name, a: f"[TOOL_CALLS]{name}[ARGS]{_json(a)}", "", between="", control=("[TOOL_CALLS]", "[ARGS]"), end="</s>",
        marker="[ARGS]",
    ),
    "LFM2": Family("LFM2-8B-A1B", _python, "", between=", ", around=("<|tool_call_start|>[", "]<|tool_call_end|>"), control=_LFM2, marker=_LFM2[1]),
    "LFM2.5": Family(
        "LFM2.5-8B-A1B", _python, "<think>Hm, well.</think>", between=", ", around=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        control=(*_LFM2, "<think>", "</think>"), marker=_LFM2[1], always=True,
    ),
    "Granite 3.3": Family(
        "ibm-granite-granite-3.3-2B-Instruct", lambda name, a: f'{{"name": "{name}", "arguments": {_json(a)}}}', "<think>Hm, well.</think>", between=", ",
        around=("<|tool_call|>[", "]"), end="<|end_of_text|>", control=("<|tool_call|>",), marker="]", always=True,
    ),
    "Command R+": Family(
        "CohereForAI-c4ai-command-r-plus-tool_use", lambda name, a: f'{{"tool_name": "{name}", "parameters": {_json(a)}}}', "", between=", ",
        around=("Action:\n```json\n[", "]\n```"), end="<|END_OF_TURN_TOKEN|>", marker="```",
    ),
    "DeepSeek V4": Family(
        "deepseek-ai-DeepSeek-V4", _dsml, "", open="Hm, well.</think>", around=("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"), end="<｜end▁of▁sentence｜>", in_json=False,
        marker="</｜DSML｜invoke>",
    ),
    "Mistral Small 3.2": Family(
        "Mistral-Small-3.2-24B-Instruct-2506", lambda name, a: f"[TOOL_CALLS]{name}[CALL_ID]12345678{int('other' in str(a))}[ARGS]{_json(a)}", "", between="",
        control=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), end="</s>", marker="[ARGS]",
    ),
    "GigaChat 3.1": Family(
        "GigaChat3.1-10B-A1.8B", lambda name, a: f'<|function_call|>{{"name": "{name}", "arguments": {_json(a)}}}', "", between="", control=("<|function_call|>",),
        end="<|message_sep|>", marker="}",
    ),
    "functionary 3.1": Family(
        "meetkai-functionary-medium-v3.1", lambda name, a: f"<function={name}>{_json(a)}</function>", "", end="<|eot_id|>", marker="</function>",
    ),
    "Mistral Nemo": Family(
        "mistralai-Mistral-Nemo-Instruct-2407", lambda name, a: f'{{"name": "{name}", "arguments": {_json(a)}, "id": "{"12345678" + str(int("other" in str(a)))}"}}', "", between=", ",
        around=("[TOOL_CALLS][", "]"), control=("[TOOL_CALLS]",), end="</s>", marker="]",
    ),
    "DeepSeek V3.1": Family(
        "deepseek-ai-DeepSeek-V3.1", lambda name, a: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>", "", open="Hm, well.</think>", between="",
        around=(_DEEP[0], _DEEP[4]), control=_DEEP, end="<｜end▁of▁sentence｜>", marker=_DEEP[3],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One answer. ``cut``: it is ended by `max_tokens` behind this text. ``messages``: what is said before it."""

    family: str
    name: str
    text: str
    tools: bool = True
    thinking: bool = False
    cut: str = ""
    parallel: bool = False
    messages: tuple[dict, ...] = ({"role": "user", "content": "Hi"},)

    @property
    def key(self) -> str:
        return f"{self.family}: {self.name}"


def cases() -> Iterator[Case]:
    for name, family in FAMILIES.items():
        for case in _of(name, family):
            yield replace(case, thinking=True) if family.always else case


def _of(name: str, f: Family) -> Iterator[Case]:
    def quoted(text: str) -> str:
        return f'"{text}"' if f.in_json or f.marker == "<tool_call|>" else text

    word, n = quoted("ab cd"), "3"
    one, two = f.call("look_up", {"word": word, "n": n}), f.call("look_up", {"word": quoted("other")})
    said, user = f.answer("Hello there."), {"role": "user", "content": "Hi"}

    def calls(*made: str) -> str:
        return f.shut + f.calls(*made)

    yield Case(name, "content", f.shut + said, tools=False)
    yield Case(name, "content beside tools", f.shut + said)
    if f.thought or f.open:
        yield Case(name, "reasoning, content", (f.thought or f.open) + said, tools=False, thinking=True)
        yield Case(name, "reasoning, call", (f.thought or f.open) + f.calls(one), thinking=True)
    yield Case(name, "call", calls(one))
    yield Case(name, "call without arguments", calls(f.call("stop", {})))
    if name != "Llama 3":
        between = f.between if f.answer("") else "\n"
        yield Case(name, "content, call", f.shut + (f.preamble or f.answer)("I look it up.") + between + f.calls(one))
        yield Case(name, "two calls", calls(one, two), parallel=True)
    yield Case(name, "cut call", calls(one), cut="ab c")
    if not f.in_json and name not in ("gemma 4", "Seed-OSS"):
        yield Case(name, "a text of digits where null may be", calls(f.call("look_up", {"word": "x", "note": "123"})))
        yield Case(name, "null where a text may be", calls(f.call("look_up", {"word": "x", "note": "null"})))
    yield Case(name, "an end marker in an argument", calls(f.call("look_up", {"word": quoted(f"see {f.marker} here")})))
    if f.in_json:
        yield Case(name, "half of a surrogate pair", calls(f.call("look_up", {"word": '"\\ud83d"'})))
    if name == "Qwen3-Coder":
        yield Case(name, "no opening tag", one.removeprefix("<tool_call>\n"))
        yield Case(name, "content, no opening tag", "I look it up.\n" + one.removeprefix("<tool_call>\n"))
    if name in ("Qwen 3.5", "Kimi K2 Thinking"):
        yield Case(name, "call in open reasoning", ("<think>" if "Kimi" in name else "") + "Hm, well.\n" + f.calls(one), thinking=True)
    if name == "gpt-oss":
        yield Case(name, "recipient in the role", ' to=functions.look_up<|channel|>commentary <|constrain|>json<|message|>{"word": "x"}')
        yield Case(name, "stray commentary", "<|channel|>commentary to=assistant" + said, tools=False)
    if name == "Kimi K2":
        yield Case(name, "no section", one)
    prefill, closing = {"role": "assistant", "content": "Hello"}, f.answer(".").partition(".")[2]
    goes_on = {"tools": False, "thinking": bool(f.open or f.thought)}
    yield Case(name, "prefilled content", f" again there.{closing}", messages=(user, prefill), **goes_on)
    if f.thought or f.open:
        answer = (f.thought or f.open).partition("Hm, well.")[2]
        both, thought = {**prefill, "reasoning_content": "So"}, {**prefill, "content": "", "reasoning_content": "Hm,"}
        yield Case(name, "prefilled reasoning and content", f" again there.{closing}", messages=(user, both), **goes_on)
        yield Case(name, "prefilled reasoning", f" well.{answer}{said}", messages=(user, thought), **goes_on)


def told(choice: dict) -> dict:
    """A choice of /v1/chat/completions as it is recorded."""
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or []]
    texts = {"content": message.get("content") or "", "reasoning": message.get("reasoning_content") or ""}
    return {**texts, "calls": calls, "finish": choice["finish_reason"]}


def plain(answer: dict) -> dict:
    """Without whitespace at the ends, of which llama-server keeps some; arguments as values."""
    if "refused" in answer:
        return answer
    calls = [[name, value(arguments)] for name, arguments in answer["calls"]]
    return {"content": answer["content"].strip(), "reasoning": answer["reasoning"].strip(), "calls": calls, "finish": answer["finish"]}


def value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
