"""Reasoning, content and calls come out of a text alike however it is cut: a step brings several tokens, and a token half a marker."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyggml_spec.serve.parse import Call, Parser, parse_call

TOOLS = [
    {
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "integer"}}},
        }
    },
    {"function": {"name": "stop"}},
]
WANTED = {"word": 'sp<a>m "x"', "n": 3}
HERMES = '<tool_call>\n{"name": "look_up", "arguments": {"word": "sp<a>m \\"x\\"", "n": 3}}\n</tool_call>'
CALLS = [
    HERMES,
    '<tool_call>\n<function=look_up>\n<parameter=word>\nsp<a>m "x"\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>',
    '<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>sp<a>m "x"</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>',
    '<|tool_call>call:look_up{word:<|"|>sp<a>m "x"<|"|>,n:3}<tool_call|>',
]
BARE = '{"name": "look_up", "parameters": {"word": "sp<a>m \\"x\\"", "n": 3}}'


def parsed(text, cuts=(), **options):
    """(content, reasoning, calls) of ``text``, pushed in pieces that end at ``cuts``."""
    parser, out = Parser(**options), []
    for a, b in zip([0, *cuts], [*cuts, len(text)]):
        out += parser.push(text[a:b])
    out += parser.finish()
    assert all(bool(p.content) + bool(p.reasoning) + (p.call is not None) == 1 for p in out)
    return "".join(p.content for p in out), "".join(p.reasoning for p in out), [p.call for p in out if p.call is not None]


@pytest.mark.parametrize("text", CALLS)
def test_the_five_ways_to_write_a_call(text):
    for said in (text, f"<think>\nlet me see\n</think>\n\nI look it up.\n\n{text}", f"{text}\n{text}"):
        content, reasoning, calls = parsed(said, tools=TOOLS)
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [("look_up", WANTED)] * said.count(text)
        assert (content, reasoning) == (("I look it up.", "let me see") if "think" in said else ("", ""))


def test_a_bare_call():
    assert parsed(BARE, tools=TOOLS, bare_json=True)[2] == [Call("look_up", json.dumps(WANTED))]
    assert parsed(f"<|python_tag|>{BARE}", tools=TOOLS, bare_json=True)[2] == [Call("look_up", json.dumps(WANTED))]
    for other in ('{"name": "other", "parameters": {}}', '{"a": 1}', "{ no JSON", BARE + " and more"):
        assert parsed(other, tools=TOOLS, bare_json=True) == (other, "", [])
    assert parsed(BARE, tools=TOOLS) == (BARE, "", [])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> more', "<tool_call>{</tool_call>", "a <tool_call> b", "<tool_call>", "x </tool_call>",
        "<tool_call><function=nobody></function></tool_call>", "<|tool_call>call:look_up{word:}<tool_call|>", "<|tool_call>call:look_up{a:1 b<tool_call|>",
    ],
)  # fmt: skip
def test_what_calls_nothing_is_content(text):
    assert parsed(text, tools=TOOLS) == (text, "", [])


def test_without_tools_markers_are_text():
    assert parsed(HERMES) == (HERMES, "", [])
    assert parsed(" <think>a</think> b", reasoning=False) == (" <think>a</think> b", "", [])


def test_reasoning():
    assert parsed("\n why \n</think>\n\nso", thinks=True) == ("so", "why", [])
    assert parsed("never ends", thinks=True) == ("", "never ends", [])
    assert parsed("\n<think></think>x") == ("x", "", [])
    assert parsed("a <think>b</think>") == ("a <think>b</think>", "", [])  # only at the beginning
    assert parsed("<|channel>thought\nhm<channel|>yes") == ("yes", "thought\nhm", [])


PARTS = st.lists(
    st.sampled_from([*CALLS, BARE, "<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel>", "<channel|>", " ", "\n\n", "word", "é", "<", "{", "call:"]),
    max_size=7,
).map("".join)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(PARTS, st.booleans(), st.booleans(), st.booleans(), st.lists(st.integers(0, 400)))
@example("<think> a </think> b", False, True, True, list(range(21)))
def test_no_cut_changes_what_comes_out(text, thinks, with_tools, bare, cuts):
    options = {"thinks": thinks, "tools": TOOLS if with_tools else (), "bare_json": bare}
    whole = parsed(text, **options)
    assert parsed(text, sorted(c for c in cuts if c <= len(text)), **options) == whole
    assert parsed(text, range(len(text) + 1), **options) == whole


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='<|"{}[]:,call_up word\n=/>', max_size=60))
def test_nothing_that_a_model_writes_ends_the_parser(text):
    parse_call(text, {"look_up": {}})
    parse_call("call:look_up{" + text, {"look_up": {}})
    parse_call("<function=look_up>" + text, {"look_up": {"parameters": True}})
    content, reasoning, _ = parsed(text, tools=TOOLS)
    assert set(content + reasoning) <= set(text)
