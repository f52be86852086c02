"""Grammars of tool calls: what they let out is a call for the parser, and nothing else is let out."""

import json
from contextlib import closing

import pytest
from gguf_io.build import I32, Model

from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.constraints.lazy import LazyGrammar
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.server.calls import calls_grammar
from pyggml_spec.server.errors import ApiError
from pyggml_spec.text.formats import FORMATS, Tags
from pyggml_spec.text.parse import Parser
from pyggml_spec.text.tokenizer import Tokenizer

FORM = {form.name: form for form in FORMATS}
WORD = "<tool_call>"


@pytest.fixture(scope="module")
def tokenizer():
    with GGUFFile(DEMO_TARGET) as file, closing(Tokenizer(file)) as tokenizer:
        yield tokenizer


def test_calls_of_tools_where_the_model_may_choose(tokenizer):
    """What `tool_choice` "auto" comes to: the grammar of calls takes right calls, several of them, and no wrong ones."""
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
    }
    right = WORD + "\n" + json.dumps({"name": "weather", "arguments": {"city": "Rome"}}) + "\n</tool_call>"
    for several, texts in ((True, {right: True, right + "\n" + right: True}), (False, {right: True, right + "\n" + right: False})):
        wrong = right.replace("weather", "whether")
        for text, fits in {**texts, wrong: False}.items():
            grammar, triggers = calls_grammar(FORM["Hermes"], [tool], several, {})
            assert triggers == (WORD,)
            lazy = LazyGrammar("lark", grammar, triggers, tokenizer)
            tokens = tokenizer.encode("Let me see. " + text, bos=False)
            assert (lazy.fits(tokens) == len(tokens)) == fits, text
            plain = Grammar("lark", grammar, tokenizer)
            tokens = tokenizer.encode(text, bos=False)
            assert (plain.fits(tokens) == len(tokens)) == fits


CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}, "unit": {"type": "string", "enum": ["C", "F"]}},
        "required": ["city"]}  # fmt: skip


def written(call, name, arguments):
    """A call as its format has it; values of ``arguments`` are what is written in tags, JSON elsewhere."""
    if isinstance(call.arguments, Tags):
        tags = call.arguments
        line = "\n" if tags.lines else ""
        inside = "".join(
            f"{key.join(tags.name)}{tags.value and chr(10)}{tags.value}{line}{value}{line}{tags.end}\n" for key, value in arguments.items()
        )
    else:
        inside = json.dumps({key: int(value) if value.isdigit() else value for key, value in arguments.items()})
    text = f"{call.begin}{call.name[0]}{call.prefix}{name}{':0' if call.index else ''}{call.name[1]}{inside}{call.close}{call.end}"
    return f"{call.section[0]}\n{text}\n{call.section[1]}" if call.section else text


@pytest.mark.parametrize("form", ["Qwen3-Coder", "GLM", "MiniMax-M2", "Kimi K2", "DeepSeek"])
@pytest.mark.parametrize(
    "arguments, fits",
    [
        ({"city": "Rome <b>\n\n</b> </tool_call>"}, True),
        ({"city": "Rome", "days": "3", "unit": "F"}, True),
        ({"city": "Rome", "days": "0"}, False),
        ({"city": "Rome", "unit": "K"}, False),
        ({"days": "3"}, False),
    ],
)
def test_calls_whose_name_stands_before_the_arguments(tokenizer, form, arguments, fits):
    """What the grammar lets out is a call for the parser, with the arguments that were written."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    grammar, triggers = calls_grammar(FORM[form], [tool], True, {})
    text = f"So. {written(FORM[form].calls[0], 'weather', arguments)}"
    tokens = tokenizer.encode(text, bos=False)
    assert (LazyGrammar("lark", grammar, triggers, tokenizer).fits(tokens) == len(tokens)) == fits
    parser = Parser(FORM[form], tools=[tool])
    (call,) = [piece.call for piece in (*parser.push(text), *parser.finish()) if piece.call is not None]
    assert {name: str(value) for name, value in json.loads(call.arguments).items()} == arguments


@pytest.mark.parametrize(
    "schema, right, wrong",
    [
        ({"type": ["string", "null"]}, "any <text>", None), ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12 cm", None), ({"$ref": "#/$defs/text"}, "a", None),
        ({"oneOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "null", None), ({"const": "x"}, "x", "y"), ({"enum": ["x", None]}, "null", "nil"),
        ({"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]}, "y", "z"), ({"type": ["integer", "null"]}, "12", "x"), (True, "any", None), ({}, "any", None),
    ],
)  # fmt: skip
def test_texts_among_other_types_keep_the_grammar(tokenizer, schema, right, wrong):
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"text": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar, triggers = calls_grammar(FORM["Qwen3-Coder"], [tool], True, {})
    for value, fits in ((right, True), (wrong, False)):
        if value is not None:
            tokens = tokenizer.encode(written(FORM["Qwen3-Coder"].calls[0], "f", {"x": value}), bos=False)
            assert (LazyGrammar("lark", grammar, triggers, tokenizer).fits(tokens) == len(tokens)) == fits


def test_arguments_that_tags_cannot_be_held_to_are_refused():
    """They are read from the text then."""
    for schema in (
        {"type": "string", "pattern": "a+"},
        {"type": ["string", "null"], "minLength": 2},
        {"anyOf": [{"enum": ["x"]}, {"type": "integer"}]},
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}}
        with pytest.raises(ApiError):
            calls_grammar(FORM["Qwen3-Coder"], [tool], True, {})


def test_markers_that_are_control_tokens_are_tokens_of_the_grammar(tmp_path, pair):
    """A control token matches no text: without this a call could not end where the vocabulary has its markers."""
    names = {"<|tool_call_begin|>": 300, "<|tool_call_argument_begin|>": 301, "<|tool_call_end|>": 302, "<|tool_calls_section_end|>": 303}
    model = Model(pair[0])
    tokens, types = (model.keys[f"tokenizer.ggml.{name}"][1][1] for name in ("tokens", "token_type"))
    for name, i in names.items():
        tokens[i], types[i] = name.encode(), 3
    model.keys["tokenizer.ggml.token_type"] = (9, (I32, types))
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    with GGUFFile(model.write(tmp_path / "control.gguf")) as file, closing(Tokenizer(file)) as tokenizer:
        grammar, triggers = calls_grammar(FORM["Kimi K2"], [tool], True, tokenizer.control_tokens())
        assert triggers == (300,)
        for city, fits in (('"Rome"', True), ("3", False)):
            text = f'<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{{"city": {city}}}<|tool_call_end|>'
            ids = tokenizer.encode("So. " + text, special=True, bos=False)
            assert set(ids) > {300, 301, 302}
            assert (LazyGrammar("lark", grammar, triggers, tokenizer).fits(ids) == len(ids)) == fits
