"""Reasoning and tool-call formats of chat models, used by prompts, parser, stream and grammar.
The template's source selects a format. To add one, add an entry to FORMATS and its texts to `tests/server/formats.py`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

NAMED, JSON, GEMMA, PYTHON = "named", "json", "gemma", "python"
"""Arguments without tags: one JSON object with name and arguments, a JSON object after the name, Gemma 4's notation after the name, a list of calls in Python."""
TAIL = 32  # tokens at the end of a prompt in which reasoning may be opened
GEMMA_QUOTE = '<|"|>'


@dataclass(frozen=True)
class Tags:
    """Tagged arguments.

    Attributes:
        name: texts before and after an argument's name. ``value``: start of its value, if any.
        end: end of its value.
        lines: whether the value is on lines of its own.
        attributes: whether further text may stand before ``value``.
        nested: before the tags of parts of objects and arrays, which are named like the argument's; ``end`` holds the name at {}.
    """

    name: tuple[str, str]
    end: str
    value: str = ""
    lines: bool = False
    attributes: bool = False
    nested: str = ""


@dataclass(frozen=True)
class Calls:
    """A notation of calls: ``begin`` NAME ARGUMENTS ``close`` ``end``, separated by whitespace.

    Attributes:
        name: texts before and after the tool's name; unused with NAMED.
        prefix, index: optional text before and after the name, ``index`` as a regular expression.
        close: end of the arguments, before ``end``.
        section: around all calls. ``sectioned``: calls exist inside it only.
        loose: ``end`` may be missing although text follows.
        unopened: a known tool's name may start a call without ``begin``.
        keys: with NAMED, the keys of name and arguments; without any, the only key is the name. ``listed``: a JSON array of such calls.
        number: with NAMED, a key that models write before the others.
        head: end of the tag with the name, before which further attributes may stand.
    """

    begin: str
    end: str
    arguments: Tags | str
    name: tuple[str, str] = ("", "")
    prefix: str = ""
    index: str = ""
    close: str = ""
    section: tuple[str, ...] = ()
    sectioned: bool = False
    loose: bool = False
    unopened: bool = False
    keys: tuple[str, ...] = ("name", "arguments")
    listed: bool = False
    number: str = ""
    head: str = ""


@dataclass(frozen=True)
class Channels:
    """Answers as several messages with headers: ``start`` HEADER ``message`` TEXT one of ``ends``.

    Attributes:
        reasoning, content: recipients of each; others are tools.
        thinks, answers: headers as a prompt writes them.
    """

    start: str
    message: str
    ends: tuple[str, ...]
    reasoning: tuple[str, ...]
    content: tuple[str, ...]
    thinks: str
    answers: str

    def address(self, header: str) -> str:
        """Recipient of a message, or else its channel. The assistant as recipient is an error of gpt-oss and is ignored."""
        if to := re.search(r"\bto=(?!assistant\b)([^\s<]+)", header):
            return to[1]
        channels = re.findall(r"<\|channel\|>(\w+)", header)
        return channels[-1] if channels else ""


@dataclass(frozen=True)
class Format:
    """How a family of models writes.

    Attributes:
        signs: texts that the template's source contains, all of them.
        think: around reasoning, as searched in the text.
        thinking: the same as prompts write it, with line breaks.
        interleaved: reasoning may follow content. ``strays``: markers without meaning alone. ``frame``: markers around content.
        calls: notations; grammars use the first.
        calls_think: a call ends open reasoning.
        bare: marker before an answer that is one JSON call; None if there is no such answer.
    """

    name: str
    signs: tuple[str, ...]
    think: tuple[str, str] = ("<think>", "</think>")
    thinking: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    interleaved: bool = False
    strays: tuple[str, ...] = ()
    frame: tuple[str, ...] = ()
    calls: tuple[Calls, ...] = ()
    calls_think: bool = False
    bare: str | None = None
    channels: Channels | None = None

    @cache  # noqa: B019  (there are a dozen)
    def markers(self) -> frozenset[str]:
        """Texts that are control tokens where the vocabulary has them, and that the parser needs."""
        texts = _texts((self.think, self.strays, self.frame, self.calls, self.channels, self.bare))
        return frozenset(marker for text in texts for marker in re.findall(r"<[^<>]+>|\[/?[A-Z_]+\]", text))

    def closes(self, text: str) -> bool:
        """Whether ``text`` is a marker that ends a call, which clients may pass as a stop string."""
        return any(text in (call.end, call.close, *call.section[1:]) for call in self.calls) and bool(text)

    def opened(self, prompt: str) -> bool:
        """Whether the end of ``prompt`` opens reasoning."""
        begin, end = self.think
        at = prompt.rfind(begin)
        return self.channels is None and at > prompt.rfind(end) and not prompt[at + len(begin) :].strip()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, (Calls, Tags, Channels)):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))
        if isinstance(value, Calls) and value.arguments == GEMMA:
            yield GEMMA_QUOTE


IN_JSON = Calls("<tool_call>", "</tool_call>", NAMED)
IN_XML = Calls(
    "<tool_call>", "</tool_call>", Tags(("<parameter=", ">"), "</parameter>", lines=True),
    name=("<function=", ">"), close="</function>", unopened=True,
)  # fmt: skip
IN_KEYS = Calls("<tool_call>", "</tool_call>", Tags(("<arg_key>", "</arg_key>"), "</arg_value>", value="<arg_value>"))
IN_PYTHON = Calls("<|tool_call_start|>", "<|tool_call_end|>", PYTHON)

HARMONY = Channels(
    "<|start|>assistant", "<|message|>", ("<|end|>", "<|call|>", "<|return|>"), reasoning=("analysis",), content=("final", "commentary", ""),
    thinks="<|channel|>analysis<|message|>", answers="<|channel|>final<|message|>",
)  # fmt: skip
RECIPIENTS = Channels(
    "<|start|>assistant", "<|message|>", ("<|eom|>", "<|eot|>"), reasoning=("self",), content=("user", ""),
    thinks=" to=self<|message|>", answers=" to=user<|message|>",
)  # fmt: skip
_TIGHT = ("<think>", "</think>")
_SPACE = "]<]minimax[>["  # before every tag of MiniMax-M3

FORMATS = (
    Format("gpt-oss", ("<|channel|>", "<|message|>"), calls=(Calls("", "", JSON, prefix="functions."),), channels=HARMONY, strays=("<|constrain|>",)),
    Format(
        "muse-glimmer", ("<atem:function_calls>", "<|eom|>"), channels=RECIPIENTS,
        calls=(Calls('<atem:invoke name="', "", Tags(('<atem:parameter name="', '">'), "</atem:parameter>"), name=("", '">'),
                     close="</atem:invoke>", section=("<atem:function_calls>", "</atem:function_calls>"), sectioned=True),),
    ),
    Format(
        "gemma 4", ("<|tool_call>",), think=("<|channel>thought", "<channel|>"), thinking=("<|channel>thought\n", "<channel|>"), interleaved=True,
        strays=("<|channel>", "<channel|>"), calls=(Calls("<|tool_call>", "<tool_call|>", GEMMA, name=("call:", "")),),
    ),
    Format(
        "Kimi K2", ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), thinking=_TIGHT, calls_think=True,
        calls=(Calls("<|tool_call_begin|>", "<|tool_call_end|>", JSON, name=("", "<|tool_call_argument_begin|>"), prefix="functions.", index=r":\d+",
                     section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), loose=True),),
    ),
    Format(
        "DeepSeek", ("<｜tool▁call▁begin｜>",), thinking=_TIGHT,
        calls=(Calls("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", JSON, name=("", "<｜tool▁sep｜>"),
                     section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
               Calls("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", JSON, name=("function<｜tool▁sep｜>", "\n```json"), close="```",
                     section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"))),
    ),
    Format(
        "MiniMax-M2", ("<minimax:tool_call>", "<invoke name="),
        calls=(Calls('<invoke name="', "", Tags(('<parameter name="', '">'), "</parameter>"), name=("", '">'), close="</invoke>",
                     section=("<minimax:tool_call>", "</minimax:tool_call>"), sectioned=True),),
    ),
    Format(
        "MiniMax-M3", ("]<]minimax[>[", "<invoke name="), think=("<mm:think>", "</mm:think>"), thinking=("<mm:think>", "</mm:think>"),
        calls=(Calls(f'{_SPACE}<invoke name="', "", Tags((f"{_SPACE}<", ">"), f"{_SPACE}</{{}}>", nested=_SPACE), name=("", '">'),
                     close=f"{_SPACE}</invoke>", section=(f"{_SPACE}<tool_call>", f"{_SPACE}</tool_call>"), sectioned=True),),
    ),
    Format(
        "Kimi K3", ("<|open|>", "<|close|>", "<|end_of_msg|>"), think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
        frame=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        calls=(Calls('<|open|>call tool="', "<|close|>call<|sep|>",
                     Tags(('<|open|>argument key="', '"'), "<|close|>argument<|sep|>", value="<|sep|>", attributes=True), name=("", '"'), head="<|sep|>",
                     section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"), sectioned=True),),
    ),
    Format(
        "Cohere2 MoE", ("<|START_TEXT|>", "<|START_ACTION|>"), think=("<|START_THINKING|>", "<|END_THINKING|>"),
        thinking=("<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>"), frame=("<|START_TEXT|>", "<|END_TEXT|>"),
        calls=(Calls("<|START_ACTION|>", "<|END_ACTION|>", NAMED, keys=("tool_name", "parameters"), listed=True, number="tool_call_id"),),
    ),
    Format(
        "Apertus", ("<|tools_prefix|>", "<|inner_prefix|>"), think=("<|inner_prefix|>", "<|inner_suffix|>"),
        thinking=("<|inner_prefix|>", "<|inner_suffix|>"), calls=(Calls("<|tools_prefix|>", "<|tools_suffix|>", NAMED, keys=(), listed=True),),
    ),
    Format(
        "Command R7B", ("<|START_RESPONSE|>", "<|START_ACTION|>"), think=("<|START_THINKING|>", "<|END_THINKING|>"),
        thinking=("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"), frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        calls=(Calls("<|START_ACTION|>", "<|END_ACTION|>", NAMED, keys=("tool_name", "parameters"), listed=True, number="tool_call_id"),),
    ),
    Format("Nemotron Nano 2", ("<TOOLCALL>",), thinking=_TIGHT, calls=(Calls("<TOOLCALL>", "</TOOLCALL>", NAMED, listed=True),)),
    Format(
        "Seed-OSS", ("<seed:tool_call>",), think=("<seed:think>", "</seed:think>"), thinking=("<seed:think>", "</seed:think>"),
        calls=(Calls("<seed:tool_call>", "</seed:tool_call>", Tags(("<parameter=", ">"), "</parameter>"), name=("<function=", ">"), close="</function>"),),
    ),
    Format(
        "DeepSeek V3.2", ("｜DSML｜", "function_calls"), thinking=_TIGHT,
        calls=(Calls('<｜DSML｜invoke name="', "", Tags(('<｜DSML｜parameter name="', '"'), "</｜DSML｜parameter>", value=">", attributes=True),
                     name=("", '">'), close="</｜DSML｜invoke>", section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), sectioned=True),),
    ),
    Format(
        "DeepSeek V4", ("｜DSML｜", "'tool_calls>"), thinking=_TIGHT,
        calls=(Calls('<｜DSML｜invoke name="', "", Tags(('<｜DSML｜parameter name="', '"'), "</｜DSML｜parameter>", value=">", attributes=True),
                     name=("", '">'), close="</｜DSML｜invoke>", section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"), sectioned=True),),
    ),
    Format("Mistral Small 3.2", ("[TOOL_CALLS]", "[CALL_ID]"), calls=(Calls("[TOOL_CALLS]", "", JSON, name=("", "[CALL_ID]"), head="[ARGS]"),)),
    Format("GigaChat 3.1", ("<|function_call|>", "<|role_sep|>"), calls=(Calls("<|function_call|>", "", NAMED),)),
    Format(
        "Ministral", ("[TOOL_CALLS]", "[ARGS]", "[THINK]"), think=("[THINK]", "[/THINK]"), thinking=("[THINK]", "[/THINK]"),
        calls=(Calls("[TOOL_CALLS]", "", JSON, name=("", "[ARGS]")),),
    ),
    Format("Devstral", ("[TOOL_CALLS]", "[ARGS]"), calls=(Calls("[TOOL_CALLS]", "", JSON, name=("", "[ARGS]")),)),
    Format("Mistral Nemo", ("[TOOL_CALLS][",), calls=(Calls("[TOOL_CALLS]", "", NAMED, listed=True),)),
    Format(
        "Hy3", ("<tool_sep{}>", ":opensource"), think=("<think:opensource>", "</think:opensource>"), thinking=("<think:opensource>", "</think:opensource>"),
        calls=(Calls("<tool_call:opensource>", "</tool_call:opensource>",
                     Tags(("<arg_key:opensource>", "</arg_key:opensource>"), "</arg_value:opensource>", value="<arg_value:opensource>"),
                     name=("", "<tool_sep:opensource>"), section=("<tool_calls:opensource>", "</tool_calls:opensource>")),),
    ),
    Format("LFM2", ("<|tool_list_start|>",), calls=(IN_PYTHON,)),
    Format("LFM2.5", ("List of tools: [",), thinking=_TIGHT, calls=(IN_PYTHON,)),
    Format(
        "Granite 3.3", ("<|tool_call|>", "<response>"), thinking=_TIGHT, frame=("<response>", "</response>"),
        calls=(Calls("<|tool_call|>", "", NAMED, listed=True),),
    ),
    Format(
        "Command R+", ("Action:", '"tool_name"', "```json"),
        calls=(Calls("Action:\n```json", "```", NAMED, keys=("tool_name", "parameters"), listed=True),),
    ),
    Format("Qwen3-Coder", ("<tool_call>", "<function="), calls=(IN_XML, IN_JSON, IN_KEYS), calls_think=True),
    Format("GLM", ("<tool_call>", "<arg_key>"), thinking=_TIGHT, calls=(IN_KEYS, IN_JSON, IN_XML)),
    Format("Hermes", ("<tool_call>", "arguments"), calls=(IN_JSON, IN_XML, IN_KEYS)),
    Format("functionary 3.1", ("<function=example_function_name>",), calls=(Calls("<function=", "</function>", JSON, name=("", ">")),)),
)  # fmt: skip
BARE = Format("JSON", (), calls=(IN_JSON, IN_XML, IN_KEYS), bare="<|python_tag|>")
"""For templates of unknown formats: Llama 3's, and those without tools."""


def format_of(source: str) -> Format:
    """The format of a template's answers."""
    return next((form for form in FORMATS if all(sign in source for sign in form.signs)), BARE)
