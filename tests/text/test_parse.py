"""Reasoning, content and calls come out of a text alike however it is cut: a step brings several tokens, and a token half a marker."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyggml_spec.text.formats import BARE, FORMATS
from pyggml_spec.text.parse import Parser
from pyggml_spec.text.values import Call

FORM = {form.name: form for form in (*FORMATS, BARE)}
WORDS = {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"function": {"name": "look_up", "parameters": WORDS}}, {"function": {"name": "stop"}}]
WANTED = {"word": 'sp<a>m "x"', "n": 3}
AS_JSON = json.dumps(WANTED)
HERMES = f'<tool_call>\n{{"name": "look_up", "arguments": {AS_JSON}}}\n</tool_call>'
CALLS = {
    "Hermes": HERMES,
    "Qwen3-Coder": '<tool_call>\n<function=look_up>\n<parameter=word>\nsp<a>m "x"\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>',
    "GLM": '<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>sp<a>m "x"</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>',
    "gemma 4": '<|tool_call>call:look_up{word:<|"|>sp<a>m "x"<|"|>,n:3}<tool_call|>',
    "Kimi K2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{AS_JSON}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "DeepSeek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{AS_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "MiniMax-M2": '<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="word">sp<a>m "x"</parameter>\n<parameter name="n">3</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}  # fmt: skip
THOUGHT = {"gemma 4": "<|channel>thought\nlet me see<channel|>"}
HARMONY = {
    "in the channel": f"<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{AS_JSON}",
    "in the role": f" to=functions.look_up<|channel|>analysis<|message|>{AS_JSON}",
    "in the role, of a type": f" to=functions.look_up<|channel|>commentary json<|message|>{AS_JSON}<|call|>",
}
ATEM = (
    ' to=look_up<|message|><atem:function_calls>\n<atem:invoke name="look_up">\n<atem:parameter name="word">sp<a>m "x"</atem:parameter>\n'
    '<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
BARE_CALL = f'{{"name": "look_up", "parameters": {AS_JSON}}}'


def parsed(text, form="Hermes", cuts=(), *, cut=False, **options):
    """(content, reasoning, calls) of ``text``, pushed in pieces that end at ``cuts``."""
    parser, out = Parser(FORM[form], **{"tools": TOOLS, **options}), []
    for a, b in zip([0, *cuts], [*cuts, len(text)]):
        out += parser.push(text[a:b])
    out += parser.finish(cut)
    assert all(bool(p.content) + bool(p.reasoning) + (p.call is not None) == 1 for p in out)
    return "".join(p.content for p in out), "".join(p.reasoning for p in out), [p.call for p in out if p.call is not None]


def whole(text, form="Hermes", **options):
    """The same, as dictionaries, after every cut was tried."""
    content, reasoning, calls = parsed(text, form, **options)
    for cuts in (range(len(text) + 1), range(0, len(text), 3), range(0, len(text), 7)):
        assert parsed(text, form, cuts, **options) == (content, reasoning, calls)
    return content, reasoning, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("form", CALLS)
def test_every_way_to_write_a_call(form):
    text, thought = CALLS[form], THOUGHT.get(form, "<think>\nlet me see\n</think>\n\n")
    for said in (text, f"{thought}I look it up.\n\n{text}", f"{text}\n{text}"):
        content, reasoning, calls = whole(said, form)
        assert calls == [("look_up", WANTED)] * said.count(text)
        assert (content, reasoning) == (("I look it up.", "let me see") if "see" in said else ("", ""))


def test_calls_reasoning_and_markers():
    ends = {"Kimi K2": "<|tool_calls_section_end|>", "DeepSeek": "<｜tool▁calls▁end｜>", "MiniMax-M2": "</minimax:tool_call>"}
    for form, behind in ends.items():
        text = CALLS[form]
        before = text.index({"Kimi K2": "<|tool_call_begin|>", "DeepSeek": "<｜tool▁call▁begin｜>", "MiniMax-M2": "<invoke"}[form])
        inside = text[before : -len(behind)]
        assert whole(text[:before] + inside * 3 + behind + " So.", form) == ("So.", "", [("look_up", WANTED)] * 3)
    assert len(parsed(HERMES + HERMES[:-30], cut=True)[2]) == 1 and parsed(HERMES)[2] == [Call("look_up", json.dumps(WANTED))]
    assert len(parsed(HERMES.replace("3}", "9" * 5000 + "}"))[2]) == 1
    text = CALLS["Qwen3-Coder"].removeprefix("<tool_call>\n")
    assert whole(f"Let me call it.\n{text}", "Qwen3-Coder") == ("Let me call it.", "", [("look_up", WANTED)])
    assert whole(f"{text}\n{CALLS['Qwen3-Coder']}", "Qwen3-Coder")[2] == [("look_up", WANTED)] * 2
    assert whole(text.removesuffix("\n</tool_call>"), "Qwen3-Coder")[2] == [("look_up", WANTED)]
    assert whole(f"See <tool_call>{{oh}} {HERMES}") == ("See <tool_call>{oh}", "", [("look_up", WANTED)])
    assert parsed(HERMES, tools=()) == (HERMES, "", [])
    assert parsed(" <think>a</think> b", tools=(), reasoning=False) == (" <think>a</think> b", "", [])
    assert whole("\n why \n</think>\n\nso", inside="reasoning") == ("so", "why", [])
    assert whole("never ends", inside="reasoning") == ("", "never ends", [])
    assert whole("never ends ", inside="reasoning") == ("", "never ends", []) and whole("\n<think></think>x") == ("x", "", [])
    assert whole("a <think>b</think>") == ("a <think>b</think>", "", [])  # only at the beginning
    assert whole("why</think>so", inside="reasoning", reasoning=False, tools=()) == ("<think>\nwhy</think>so", "", [])
    empty = "<|channel>thought\n<channel|>"
    for text in (f"{empty}Hi<channel|>", f"{empty}Hi{empty}", f"{empty}Hi{empty}<channel|>", f"<|channel>{empty}Hi"):
        assert whole(text, "gemma 4", tools=()) == ("Hi", "", [])
    assert whole("<|channel>thought\nhm<channel|>yes", "gemma 4") == ("yes", "hm", [])


@pytest.mark.parametrize("call", HARMONY.values(), ids=HARMONY)
def test_messages_of_gpt_oss(call):
    said = "<|channel|>final<|message|>Hello there."
    thought = "<|channel|>analysis<|message|>Hm,\nwell.<|end|><|start|>assistant"
    assert whole(said, "gpt-oss") == ("Hello there.", "", [])
    assert whole(thought + said + "<|return|>", "gpt-oss", tools=()) == ("Hello there.", "Hm,\nwell.", [])
    assert whole(thought + call, "gpt-oss") == ("", "Hm,\nwell.", [("look_up", WANTED)])
    told = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    assert whole(thought + told + call, "gpt-oss") == ("I look it up.", "Hm,\nwell.", [("look_up", WANTED)])
    assert whole(f"{call.removesuffix('<|call|>')}<|call|><|start|>assistant{call}", "gpt-oss")[2] == [("look_up", WANTED)] * 2


def test_slips_and_bare_calls():
    said = "<|channel|>final<|message|>Hello."
    assert whole("<|channel|>commentary to=assistant" + said, "gpt-oss") == ("Hello.", "", [])
    assert whole("<|channel|>commentary to=python <|constrain|>code<|message|>print(1)", "gpt-oss", tools=()) == ("", "", [])
    assert whole("No channel at all.", "gpt-oss") == ("No channel at all.", "", [])
    assert whole("<|channel|>ana", "gpt-oss", cut=True) == ("", "", [])
    content, _, calls = whole("<|channel|>commentary to=functions.other<|message|>{}", "gpt-oss")
    assert not calls and content.endswith("to=functions.other<|message|>{}")
    raw = "<|channel|>analysis<|message|>Hm<|end|>"
    assert whole(f"{raw}<|start|>assistant{said}<|return|>", "gpt-oss", reasoning=False, tools=()) == (raw + "Hello.", "", [])
    assert whole(f"{raw[:-7]}<|return|>", "gpt-oss", reasoning=False, tools=()) == (raw[:-7], "", [])
    end, thought = "<|eom|><|start|>assistant", " to=self<|message|>Hm,\nwell."
    assert whole(" to=user<|message|>Hello.<|eot|>", "muse-glimmer") == ("Hello.", "", [])
    assert whole(f"{thought}{end} to=user<|message|>Hello.", "muse-glimmer", tools=()) == ("Hello.", "Hm,\nwell.", [])
    assert whole(thought + end + ATEM + end + ATEM, "muse-glimmer") == ("", "Hm,\nwell.", [("look_up", WANTED)] * 2)
    assert whole(f" to=user<|message|>Wait.{end}{ATEM}", "muse-glimmer") == ("Wait.", "", [("look_up", WANTED)])
    markup = ATEM.partition("<|message|>")[2]  # quoted in another message it calls nothing
    assert whole(f" to=user<|message|>Write\n{markup}", "muse-glimmer") == (f"Write\n{markup}", "", [])
    assert whole(f" to=self<|message|>{markup}{end} to=user<|message|>Yes", "muse-glimmer") == ("Yes", markup, [])
    for said in (BARE_CALL, f"<|python_tag|>{BARE_CALL}", f"{BARE_CALL}; {BARE_CALL}"):
        assert whole(said, "JSON") == ("", "", [("look_up", WANTED)] * said.count("name"))
    for other in ('{"name": "other", "parameters": {}}', '{"a": 1}', "{ no JSON", BARE_CALL + " and more", BARE_CALL[:-1]):
        assert whole(other, "JSON") == (other, "", [])
    assert whole(BARE_CALL, "JSON", tools=()) == whole(BARE_CALL, "Hermes") == (BARE_CALL, "", [])
    assert whole(BARE_CALL, "JSON", cut=True) == (BARE_CALL, "", [])


@pytest.mark.parametrize("form, text", [
    ("Hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> more'), ("Hermes", "<tool_call>{</tool_call>"), ("Hermes", "a <tool_call> b"),
    ("Hermes", "<tool_call>"), ("Hermes", "x </tool_call>"), ("Qwen3-Coder", "<tool_call><function=nobody></function></tool_call>"),
    ("gemma 4", "<|tool_call>call:look_up{word:}<tool_call|>"), ("gemma 4", "<|tool_call>call:look_up{a:1 b<tool_call|>"),
    ("Qwen3-Coder", "#include <function=> and <function=other>"), ("MiniMax-M2", "<minimax:tool_call> is a marker </minimax:tool_call>"),
    ("MiniMax-M2", '<invoke name="look_up"></invoke>'), ("Kimi K2", "<|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{}"),
    ("Hermes", '<tool_call>{"name": "stop", "arguments": [1]}</tool_call>'), ("DeepSeek", "<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{]<｜tool▁call▁end｜>"),
])  # fmt: skip
def test_what_calls_nothing_is_content(form, text):
    assert whole(text, form) == (text, "", [])


def test_calls_of_kimi_deepseek_and_begun_prompts():
    assert whole(" world", inside="content", continued=True) == (" world", "", [])
    assert whole(" so</think>\n\nHi", inside="reasoning", continued=True) == ("Hi", " so", [])
    assert whole("<think>x</think>", inside="content", continued=True) == ("<think>x</think>", "", [])
    for form, end in (
        ("gpt-oss", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("muse-glimmer", "<|eom|><|start|>assistant to=user<|message|>"),
    ):
        assert whole(" world", form, inside="content", continued=True) == (" world", "", [])
        assert whole(f" so{end}Hi", form, inside="reasoning", continued=True) == ("Hi", " so", [])
    assert whole(f"{HERMES}</think>So", inside="reasoning") == ("So", HERMES, [])
    inside = f"<|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{AS_JSON}"
    assert whole(inside, "Kimi K2")[2] == [("look_up", WANTED)]
    both = whole(f"Two of them{inside}{inside.replace(':0<', ':1<')}", "Kimi K2", inside="reasoning")
    assert both == ("", "Two of them", [("look_up", WANTED)] * 2)
    text = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{AS_JSON}```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert whole(text, "DeepSeek") == ("", "", [("look_up", WANTED)])
    texts = {"GLM": "<tool_call>stop</tool_call>", "Qwen3-Coder": "<tool_call>\n<function=stop>\n</function>\n</tool_call>", "Hermes": '<tool_call>{"name": "stop"}</tool_call>',
             "MiniMax-M2": '<minimax:tool_call>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>', "gemma 4": "<|tool_call>call:stop{}<tool_call|>"}  # fmt: skip
    for form, text in texts.items():
        assert whole(text, form) == ("", "", [("stop", {})]), form


@pytest.mark.parametrize("form", [*CALLS, "gpt-oss", "muse-glimmer"])
def test_a_call_that_was_cut_is_none(form):
    """At every place, the last one of its own too: what a limit has ended may not be executed."""
    text = CALLS.get(form) or {"gpt-oss": HARMONY["in the role, of a type"], "muse-glimmer": ATEM}[form]
    ends = {"Qwen3-Coder": "</function>", "MiniMax-M2": "</invoke>", "muse-glimmer": "</atem:invoke>", "gpt-oss": "<|call|>", "Kimi K2": "<|tool_call_end|>",
            "DeepSeek": "<｜tool▁call▁end｜>", "gemma 4": "<tool_call|>"}  # fmt: skip
    end = ends.get(form, "</tool_call>")
    before = text.index(end)
    for n in range(before + len(end)):
        assert not parsed(text[:n], form, cut=True)[2], text[:n]
    assert len(parsed(text[:before], form)[2]) == 1  # the model has ended it there itself
    content, _, calls = parsed("<tool_call>\n<function=look_up>\n<parameter=word>\nhel", "Qwen3-Coder", cut=True)
    assert (content, calls) == ("<tool_call>\n<function=look_up>\n<parameter=word>\nhel", [])


@pytest.mark.parametrize("value", ["see </tool_call> here", "<tool_call>", "</parameter> x </function>", "</arg_value>x", "<|tool_call_end|>", "}", '"{', "\\", "\n",
                                   "<｜tool▁call▁end｜>", "<|call|>", "<|end|>", "</invoke>", "</atem:parameter>.", "<tool_call|>", "{}", " a "])  # fmt: skip
@pytest.mark.parametrize("form", [*CALLS, "gpt-oss", "muse-glimmer"])
def test_an_end_marker_within_an_argument_ends_nothing(form, value):
    text = CALLS.get(form) or {"gpt-oss": HARMONY["in the channel"], "muse-glimmer": ATEM}[form]
    inside = json.dumps('sp<a>m "x"')
    text = text.replace(inside, json.dumps(value)) if inside in text else text.replace('sp<a>m "x"', value)
    assert whole(text, form)[2] == [("look_up", {"word": value, "n": 3})]


EITHER = [{"type": "string"}, {"type": "null"}]


@pytest.mark.parametrize("schema, text, value", [
    ({"type": "string"}, "123", "123"), ({"anyOf": EITHER}, "123", "123"), ({"oneOf": EITHER}, "true", "true"), ({"type": ["string", "null"]}, "123", "123"),
    ({"anyOf": EITHER}, "null", None), ({"type": ["null", "string"]}, "{}", "{}"), ({"$ref": "#/$defs/text"}, "1.5", "1.5"), ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "7"}, "7", "7"), ({"enum": ["1", 1]}, "1", "1"), ({"allOf": [{"type": "string"}]}, "[1]", "[1]"), ({"type": ["string", "integer"]}, "42", 42),
    ({"type": ["string", "integer"]}, "42 cm", "42 cm"), ({"type": ["string", "integer"]}, "4.5", "4.5"), ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
    ({"type": ["string", "object"]}, "{no", "{no"), ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "12", "12"), ({"type": "integer"}, "3", 3),
    ({"type": "number"}, "3", 3), ({}, "3", 3), (True, '"3"', '"3"'), ({"type": "string"}, '"3"', '"3"'), ({"anyOf": EITHER}, '"3"', '"3"'),
    ({"properties": {"a": {}}}, '{"a": 2}', {"a": 2}), ({"$ref": "#/$defs/loop"}, "5", 5), ({"$ref": "#/$defs/none"}, "5", 5), ({"type": "string", "pattern": "1"}, "1", "1"),
    ({"type": "boolean"}, "true", True), ({"type": "string", "format": "date"}, "2020", "2020"), ({"type": "array"}, "[1]", [1]), ({"type": "integer"}, "x", "x"),
])  # fmt: skip
@pytest.mark.parametrize("form", ["Qwen3-Coder", "GLM", "MiniMax-M2", "muse-glimmer"])
def test_arguments_in_tags_are_of_the_type_that_their_schema_allows(form, schema, text, value):
    parameters = {"type": "object", "properties": {"word": schema}, "$defs": {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    said = (CALLS.get(form) or ATEM).replace('sp<a>m "x"', text)
    (call,) = parsed(said, form, tools=[{"function": {"name": "look_up", "parameters": parameters}}])[2]
    assert json.loads(call.arguments)["word"] == value and type(json.loads(call.arguments)["word"]) is type(value)


def strict(text):
    """JSON as strict readers take it: UTF-8, without NaN, numbers within a double."""

    def refuse(token):
        raise ValueError(token)

    return json.loads(text.encode("utf-8").decode("utf-8"), parse_constant=refuse)


@pytest.mark.parametrize("written, value", [
    ("1e400", "1e400"), ("-1e999", "-1e999"), ("NaN", "NaN"), ("Infinity", "Infinity"), ("-Infinity", "-Infinity"), ('"\\ud83d"', "\ufffd"), ('"a\\ude00b"', "a\ufffdb"),
    ('"\\ud83d\\ude00"', "😀"), ('"a\nb\tc\x01"', "a\nb\tc\x01"), ('"\ufffd"', "\ufffd"), ("1" * 400, "1" * 400), ("12345678901234567890123", 12345678901234567890123),
    ("[1, NaN]", [1, "NaN"]), ('{"x": 1e999}', {"x": "1e999"}), ('"\\u0000"', "\0"),
])  # fmt: skip
def test_arguments_are_always_json(written, value):
    tools = [{"function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {}, "n": {}}}}}]
    as_json = f'{{"word": {written}, "n": 3}}'
    texts = {"Hermes": f'<tool_call>{{"name": "look_up", "arguments": {as_json}}}</tool_call>', "Kimi K2": CALLS["Kimi K2"].replace(AS_JSON, as_json),
             "gpt-oss": HARMONY["in the channel"].replace(AS_JSON, as_json)}  # fmt: skip
    if not written.startswith(('"', "{")):
        texts |= {
            "Qwen3-Coder": CALLS["Qwen3-Coder"].replace('sp<a>m "x"', written),
            "gemma 4": f"<|tool_call>call:look_up{{word:{written},n:3}}<tool_call|>",
        }
    for form, text in texts.items():
        (call,) = parsed(text, form, tools=tools)[2]
        assert strict(call.arguments) == {"word": value, "n": 3}, form


@pytest.mark.parametrize("form", ["Qwen3-Coder", "Kimi K2"])
def test_a_call_within_open_reasoning_ends_it(form):
    for text in (CALLS[form], f"Need to look.\n{CALLS[form]}"):
        assert whole(text, form, inside="reasoning") == ("", "Need to look." if "Need" in text else "", [("look_up", WANTED)])
    other = CALLS[form].replace("look_up", "other")
    assert whole(f"{other} is none</think>So", form, inside="reasoning") == ("So", f"{other} is none", [])


MARKS = [*CALLS.values(), *HARMONY.values(), ATEM, BARE_CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel>", "<|channel>thought", "<channel|>",
         "<|channel|>", "<|message|>", "final", "<|end|>", "<|start|>assistant", " to=self", "<function=look_up>", " ", "\n\n", "word", "é", "<", "{", "call:"]  # fmt: skip
PARTS, BEGUN = st.lists(st.sampled_from(MARKS), max_size=7).map("".join), st.sampled_from(["", "reasoning", "content"])


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(PARTS, st.sampled_from(list(FORM)), BEGUN, st.booleans(), st.booleans(), st.lists(st.integers(0, 400)))
@example("<think> a </think> b", "Hermes", "", True, True, list(range(21)))
@example("<|channel><|channel>thought", "gemma 4", "", True, True, list(range(28)))
def test_no_cut_changes_what_comes_out(text, form, inside, with_tools, reasoning, cuts):
    options = {"inside": inside, "tools": TOOLS if with_tools else (), "reasoning": reasoning}
    expected = parsed(text, form, **options)
    assert parsed(text, form, sorted(c for c in cuts if c <= len(text)), **options) == expected
    assert parsed(text, form, range(len(text) + 1), **options) == expected


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='<|"{}[]:,call_up word\n=/>', max_size=60), st.sampled_from(list(FORM)), st.booleans())
def test_nothing_that_a_model_writes_ends_the_parser(text, form, cut):
    begins = ["", "<tool_call>", "<tool_call><function=look_up>", "<|tool_call>call:look_up{", '{"name": "look_up", "arguments": {']
    for begin in begins:
        content, reasoning, calls = parsed(begin + text, form, cut=cut)
        assert set(content + reasoning) <= set(begin + text + "<think>\n")
        assert all(strict(call.arguments) is not None for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize("form", [*CALLS, "gpt-oss", "muse-glimmer", "JSON"])
def test_long_arguments_take_time_that_grows_with_them_alone(form):
    """Pushed in small pieces, markers in them: 200 KB in two seconds, where looking at all of it each time takes minutes."""
    text = CALLS.get(form) or {"gpt-oss": HARMONY["in the channel"], "muse-glimmer": ATEM, "JSON": BARE_CALL}[form]
    value = "</tool_call> </parameter> </arg_value> }{ <|end|> x" * 4000
    text = text.replace(json.dumps('sp<a>m "x"')[1:-1] if AS_JSON in text or ("name" in text and "{" in text) else 'sp<a>m "x"', value)
    parser, began = Parser(FORM[form], tools=TOOLS), time.process_time()
    out = [piece for at in range(0, len(text), 8) for piece in parser.push(text[at : at + 8])]
    out += parser.finish()
    assert [json.loads(p.call.arguments)["word"] == value for p in out if p.call is not None] == [True]
    assert time.process_time() - began < 4
