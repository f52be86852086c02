"""Calls in Python's notation, and what is none."""

import pytest

from pyggml_spec.text.formats import format_of
from pyggml_spec.text.parse import Parser
from pyggml_spec.text.python_calls import python_calls

TOOLS = [{"function": {"name": name}} for name in ("look_up", "Calendar.add")]
BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"


def test_values_of_python_and_of_json():
    text = """[look_up(word="a\\n\\"b\\" \\d\\u00e9", n=-3, x=1.5e2, many=[1, 'two', None, {"a": True, "b": false,}]), Calendar.add()]"""
    want = {"word": 'a\n"b" \\dé', "n": -3, "x": 150.0, "many": [1, "two", None, {"a": True, "b": False}]}
    assert python_calls(text) == [("look_up", want), ("Calendar.add", {})]
    assert python_calls('[f(a=1e999, b="\\U99999999")]') == [("f", {"a": "1e999", "b": "\ufffd"})]


@pytest.mark.parametrize("text", [
    "", "[", "look_up()", "[look_up(1)]", "[look_up(a=)]", "[look_up(a=b)]", "[look_up(a=1)] x", "[look_up(a=1 b=2)]", '[f(a={1: "b"})]', '[f(a="b]',
    f"[f(a={'[' * 1000}{']' * 1000})]", "[f(a=__import__('os'))]",
])  # fmt: skip
def test_what_is_no_call(text):
    with pytest.raises(ValueError, match="no |missing|behind"):
        python_calls(text)


@pytest.mark.parametrize("text, content, calls", [
    (f'Hi{BEGIN}[look_up(word="see {END} here")]{END}', "Hi", ['{"word": "see <|tool_call_end|> here"}']),
    (f'{BEGIN}[look_up(word="x"), Calendar.add()]', "", ['{"word": "x"}', "{}"]),  # the end token is not always in the text
    (f"{BEGIN}[unknown()]{END} x", f"{BEGIN}[unknown()]{END} x", []),
    (f"{BEGIN}{END * 3000}", f"{BEGIN}{END * 3000}", []),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_answers_in_pieces(text, content, calls, size):
    parser = Parser(format_of("<|tool_list_start|>"), tools=TOOLS)
    out = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])] + parser.finish()
    assert ("".join(piece.content for piece in out), [piece.call.arguments for piece in out if piece.call]) == (content, calls)
