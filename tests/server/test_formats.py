"""Answers of every format against llama-server's reading of the same texts, and through the server: whole, streamed, and in a second turn.

`scripts/compare_formats.py --write` records llama-server's answers anew, and prints ours beside them.
"""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Self

import pytest
import scripted
from gguf_io.build import I32, Model
from server.formats import FAMILIES, TOOLS, Case, cases, plain, tools_of
from server.running import Running, events

from pyggml_spec.constraints.grammar import Grammar
from pyggml_spec.constraints.lazy import LazyGrammar
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.loading import DEMO_TARGET
from pyggml_spec.server.calls import calls_grammar
from pyggml_spec.server.errors import ApiError
from pyggml_spec.text.formats import FORMATS, Tags, format_of
from pyggml_spec.text.parse import Parser
from pyggml_spec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
RECORDED = json.loads(Path(__file__).with_name("llama_server_formats.json").read_text("utf-8"))
CASES = {case.key: case for case in cases()}
DIFFERENT = {
    "gpt-oss: two calls": "llama-server's grammar ends the answer behind the first one",
    "MiniMax-M2: two calls": "llama-server refuses its own model's answer, with a 500",
    "Cohere2 MoE: content, call": "llama-server refuses content before a call of its own model, with a 500",
    "Command R7B: content, call": "llama-server refuses content before a call of its own model, with a 500",
    "Command R7B: prefilled content": "llama-server refuses what goes on, with a 500",
    "Command R7B: prefilled reasoning and content": "llama-server refuses what goes on, with a 500",
    **dict.fromkeys(
        (
            f"Apertus: {name}"
            for name in ("reasoning, content", "reasoning, call", "prefilled reasoning", "prefilled reasoning and content")
        ),
        "llama-server does not find the markers of the reasoning",
    ),
    "LFM2: prefilled content": "llama-server puts <think></think> before it, which this template does not know",
    **dict.fromkeys(
        (
            f"Granite 3.3: {name}"
            for name in ("reasoning, call", "call", "call without arguments", "content, call", "two calls", "an end marker in an argument")
        ),
        "llama-server reads no calls of this model",
    ),
    "DeepSeek V4: prefilled content": "llama-server puts </think> before it",
    "GigaChat 3.1: two calls": "llama-server's grammar ends the answer behind the first one",
    **dict.fromkeys(
        (f"Mistral Small 3.2: {name}" for name in ("call without arguments", "content, call", "two calls", "an end marker in an argument")),
        "llama-server refuses its own model's answer, with a 500",
    ),
    "functionary 3.1": "as of Command R+",
    "Command R+": "llama-server looks for the token that ends the answer in its text, where it never is: with tools it answers 500",
    "cut call": "llama-server tells the beginning of its arguments; here it is no call, and its text is content",
    "half of a surrogate pair": "llama-server passes it on, which strict readers of JSON refuse; here it is U+FFFD",
    "null where a text may be": "of some formats llama-server takes null as a text; here it is null for all, as Qwen3-Coder's is there",
}


def parsed(case: Case, source: str) -> dict:
    """What the parser makes of a case, with what the request has begun before it, as llama-server tells it."""
    family, last = FAMILIES[case.family], case.messages[-1]
    begun, inside = {"content": "", "reasoning": ""}, "reasoning" if family.open and (case.thinking or family.shut) else ""
    if last["role"] == "assistant":
        begun = {"content": last["content"], "reasoning": last.get("reasoning_content", "")}
        inside = "content" if begun["content"] else "reasoning"
    parser = Parser(
        format_of(source), inside=inside, continued=last["role"] == "assistant", tools=tools_of(case.family) if case.tools else ()
    )
    text = case.text[: case.text.index(case.cut) + len(case.cut)] if case.cut else case.text
    out = [*parser.push(text), *parser.finish(cut=bool(case.cut))]
    calls = [[piece.call.name, piece.call.arguments] for piece in out if piece.call is not None]
    told = {kind: begun[kind] + "".join(getattr(piece, kind) for piece in out) for kind in begun}
    return {**told, "calls": calls, "finish": "length" if case.cut else "tool_calls" if calls else "stop"}


def differing(case: Case) -> bool:
    if case.name == "null where a text may be":
        return case.family not in ("Qwen3-Coder", "Qwen 3.5")
    return bool({case.name, case.key, case.family} & DIFFERENT.keys())


def test_cases_and_tags():
    assert set(RECORDED) == set(CASES)
    other = {key for key, answer in RECORDED.items() if not answer.get("same")}  # elsewhere its grammar lets the text out
    assert {key for key in other if not {key, *key.split(": ", 1)} & set(DIFFERENT)} == {"Mistral Small 3.2: call"}  # with another id
    # They are read from the text then.
    strings = {"type": "string", "pattern": "a+"}, {"type": ["string", "null"], "minLength": 2}
    for schema in (*strings, {"anyOf": [{"enum": ["x"]}, {"type": "integer"}]}):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}}
        with pytest.raises(ApiError):
            calls_grammar(FORM["Qwen3-Coder"], [tool], True, {})


@pytest.mark.parametrize("key", CASES)
def test_an_answer_is_read_as_llama_server_reads_it(templates, key):
    case = CASES[key]
    ours = plain(parsed(case, (templates / f"{FAMILIES[case.family].template}.jinja").read_text("utf-8")))
    assert (ours == plain(RECORDED[key])) == (not differing(case)), (ours, RECORDED[key])
    if case.cut:
        assert ours["calls"] == [] and ours["finish"] == RECORDED[key].get("finish", "length") == "length"


@pytest.mark.parametrize("family", ["Granite 3.3", "Command R+", "Mistral Small 3.2", "functionary 3.1"])
def test_calls_that_llama_server_does_not_read(templates, family):
    source, first = (templates / f"{FAMILIES[family].template}.jinja").read_text("utf-8"), ["look_up", {"word": "ab cd", "n": 3}]
    for name, content, calls in (
        ("call", "", [first]),
        ("content, call", "I look it up.", [first]),
        ("two calls", "", [first, ["look_up", {"word": "other"}]]),
    ):
        told = plain(parsed(CASES[f"{family}: {name}"], source))
        assert (told["content"], told["calls"], told["finish"]) == (content, calls, "tool_calls")
    assert plain(parsed(CASES[f"{family}: content"], source))["content"] == "Hello there."


CALLED = {
    "DeepSeek V4",
    "GigaChat 3.1",
    "Devstral",
    "LFM2",
    "LFM2.5",
    "Kimi K3",
    "MiniMax-M3",
    "Cohere2 MoE",
    "Apertus",
    "Hy3",
    "gpt-oss",
    "muse-glimmer",
    "MiniMax-M2",
    "Kimi K2",
    "DeepSeek V3.1",
    "gemma 4",
    "Qwen 3.5",
}


class Scripted:
    """A server whose model says one of ``texts``, by their names."""

    def __init__(self, path: Path, texts: dict[str, str], template: str, *options: object, control=(), end="<|im_end|>", more=None):
        begins = scripted.write(path, list(texts.values()), template, control, end, more)
        self.begins = dict(zip(texts, begins))
        self.server = Running("-m", path, "-c", 8192, *options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.__exit__(*error)

    def body(self, name: str, messages: list[dict] | str = "Hi", **more: object) -> dict:
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return {"messages": messages, "logit_bias": [[self.begins[name], 50]], "temperature": 0, "max_tokens": 300, **more}

    def post(self, name: str, messages: list[dict] | str = "Hi", **more: object):
        return self.server.post("/v1/chat/completions", **self.body(name, messages, **more))

    def message(self, name: str, messages: list[dict] | str = "Hi", **more: object) -> dict:
        response = self.post(name, messages, **more)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    def streamed(self, name: str, messages: list[dict] | str = "Hi", **more: object) -> dict:
        """The message that a stream's pieces come to."""
        out = {"content": "", "reasoning_content": "", "tool_calls": []}
        for line in events(self.post(name, messages, stream=True, **more))[:-1]:
            for choice in json.loads(line)["choices"]:
                for kind, value in choice["delta"].items():
                    if kind in out and value:
                        out[kind] += value
        return out


def templated(folder: Path, family: str) -> str:
    return (folder / f"{FAMILIES[family].template}.jinja").read_text("utf-8")


@pytest.mark.parametrize("name", sorted(CALLED))
def test_a_conversation_with_a_tool(templates, tmp_path, name):
    """Reasoning and a call from control tokens, whole and streamed; the tool's result; the answer; and another question: no template refuses a turn."""
    family = FAMILIES[name]
    thinking = {"chat_template_kwargs": {"enable_thinking": bool(family.thought or family.open)}}
    call = family.call("look_up", {"word": '"ab cd"' if family.in_json or name == "gemma 4" else "ab cd", "n": "3"})
    texts = {"call": (family.thought or family.open) + family.calls(call), "answer": family.shut + family.answer("It is there.")}
    with Scripted(tmp_path / "model.gguf", texts, templated(templates, name), control=family.control, end=family.end) as model:
        message = model.message("call", tools=TOOLS, **thinking)
        (called,) = message["tool_calls"]
        assert called["function"]["name"] == "look_up" and json.loads(called["function"]["arguments"]) == {"word": "ab cd", "n": 3}
        assert message["content"] is None
        assert message.get("reasoning_content", "") == ("Hm, well." if thinking["chat_template_kwargs"]["enable_thinking"] else "")
        streamed = model.streamed("call", tools=TOOLS, **thinking)
        assert [c["function"] for c in streamed["tool_calls"]] == [called["function"]] and not streamed["content"]
        assert streamed["reasoning_content"] == message.get("reasoning_content", "")
        turns = [{"role": "user", "content": "Hi"}, message, {"role": "tool", "tool_call_id": called["id"], "content": "found"}]
        off = {"chat_template_kwargs": {"enable_thinking": name == "gemma 4"}}  # whose prompt would end with a token of the script
        answer = model.message("answer", turns, tools=TOOLS, **off)
        assert (answer["content"], answer.get("tool_calls")) == ("It is there.", None)
        again = [*turns, answer, {"role": "user", "content": "And?"}]
        assert model.message("answer", again, tools=TOOLS, **off)["content"] == "It is there."
        told = [*again[:1], {**message, "content": "I look."}, *again[2:]]  # content, reasoning and a call in one message
        assert model.message("answer", told, tools=TOOLS, **off)["content"] == "It is there."
        assert model.post("call", tools=TOOLS, tool_choice="none", **off).status_code == 200
        body = {**model.body("call"), "tools": [{"name": "look_up", "input_schema": TOOLS[0]["function"]["parameters"]}]}
        used = model.server.ok("/v1/messages", **body)["content"][-1]
        assert (used["type"], used["name"], used["input"]) == ("tool_use", "look_up", {"word": "ab cd", "n": 3})


WRITTEN = {  # what the model writes, and what clients get
    "surrogate": ('"\\ud83d"', "\ufffd"), "large": ("1e400", "1e400"), "many": (str(7**480), str(7**480)), "nan": ("NaN", "NaN"),
    "marker": ('"see </tool_call> here"', "see </tool_call> here"), "whole": ('"ab cd"', "ab cd"), "control": ('"a\x01b\n"', "a\x01b\n"),
}  # fmt: skip


@pytest.fixture(scope="module")
def hermes(templates, tmp_path_factory):
    family = FAMILIES["Hermes"]
    texts = {name: family.call("look_up", {"word": value}) for name, (value, _) in WRITTEN.items()}
    with Scripted(tmp_path_factory.mktemp("hermes") / "model.gguf", texts, templated(templates, "Hermes")) as model:
        yield model


@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_are_json_in_every_dialect(hermes, name):
    word = WRITTEN[name][1]
    assert json.loads(hermes.message(name, tools=TOOLS)["tool_calls"][0]["function"]["arguments"]) == {"word": word}
    assert json.loads(hermes.streamed(name, tools=TOOLS)["tool_calls"][0]["function"]["arguments"]) == {"word": word}
    tools = [{"name": "look_up", "input_schema": {"type": "object"}}]
    answer = hermes.server.ok("/v1/messages", **{**hermes.body(name), "tools": tools})
    assert answer["content"][0]["input"] == {"word": word} and answer["stop_reason"] == "tool_use"
    body = {"input": "Hi", "tools": [{"type": "function", "name": "look_up"}], "logit_bias": hermes.body(name)["logit_bias"]}
    (item,) = hermes.server.ok("/v1/responses", **body, temperature=0)["output"]
    assert json.loads(item["arguments"]) == {"word": word}


def test_a_cut_call_is_told_as_cut(hermes):
    tools, seen = [{"name": "look_up", "input_schema": {"type": "object"}}], set()
    for n in range(1, 20):
        choice = hermes.post("whole", tools=TOOLS, max_tokens=n).json()["choices"][0]
        answer = hermes.server.ok("/v1/messages", **{**hermes.body("whole", max_tokens=n), "tools": tools})
        whole = "</tool_call>" in hermes.message("whole", max_tokens=n)["content"]
        calls = [json.loads(call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])]
        assert calls == [{"word": "ab cd"}] * whole and (whole or choice["finish_reason"] == "length")
        assert [part["input"] for part in answer["content"] if part["type"] == "tool_use"] == calls
        assert whole or answer["stop_reason"] == "max_tokens"
        seen.add(whole)
    assert seen == {True, False}


@pytest.fixture(scope="module")
def thinking(templates, tmp_path_factory):
    call = "Hm.\n</think>\n\n" + FAMILIES["Qwen 3.5"].call("look_up", {"word": "ab", "n": "3"})
    texts = {"call": call, "goes on": " again there.", "thinks on": " well.\n</think>\n\nHi.", "json": '{"a": 1}'}
    with Scripted(tmp_path_factory.mktemp("thinking") / "model.gguf", texts, templated(templates, "Qwen 3.5")) as model:
        yield model


USER = {"role": "user", "content": "Hi"}


def test_a_stop_text_cuts_a_call_unless_it_ends_it(thinking):
    for stop, calls in (("<parameter=n>", 0), ("</parameter>\n<p", 0), ("3", 0), ("</function>", 1), ("</tool_call>", 1)):
        choice = thinking.post("call", tools=TOOLS, stop=[stop]).json()["choices"][0]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        told = [json.loads(call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])]
        assert told == [{"word": "ab", "n": 3}] * calls


def prompt(model: Scripted, *messages: dict, **more: object) -> str:
    return model.server.ok("/apply-template", messages=[USER, *messages], **more)["prompt"].rpartition("<|im_start|>assistant\n")[2]


def test_prefilled_messages_are_continued(thinking):
    for message, begun in (
        ({"content": "Hello"}, "<think>\n\n</think>\n\nHello"),
        ({"content": "Hello", "reasoning_content": "So"}, "<think>\nSo\n</think>\n\nHello"),
    ):
        last = {"role": "assistant", **message}
        assert prompt(thinking, last) == begun and thinking.message("goes on", [USER, last])["content"] == " again there."
        assert thinking.streamed("goes on", [USER, last])["content"] == " again there."
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(thinking, {"role": "assistant", "content": "Hello"}, **off) == "<think>\n\n</think>\n\nHello"
    for last, more in (({"content": "", "reasoning_content": "Hm,"}, {}), ({"reasoning_content": "Hm,"}, {"continue_final_message": True, "add_generation_prompt": False}),
                       ({"content": None, "reasoning_content": "Hm,"}, {"continue_final_message": "reasoning_content"})):  # fmt: skip
        last = {"role": "assistant", **last}
        assert prompt(thinking, last, **more) == "<think>\nHm,"
        for answer in (thinking.message("thinks on", [USER, last], **more), thinking.streamed("thinks on", [USER, last], **more)):
            assert (answer["reasoning_content"], answer["content"]) == (" well.", "Hi.")


@pytest.mark.parametrize("last, more, says", [
    ({"role": "user", "content": "x"}, {"continue_final_message": True}, "needs a last message of the assistant"),
    ({"role": "assistant", "content": "x", "reasoning_content": "y"}, {"continue_final_message": "reasoning_content"}, "has content after it"),
    ({"role": "assistant", "content": "x"}, {"continue_final_message": True, "add_generation_prompt": True}, "cannot both be true"),
    ({"role": "assistant", "content": "x"}, {"continue_final_message": "no"}, "continue_final_message is"),
    ({"role": "assistant", "content": "x", "reasoning_content": ["y"]}, {}, "reasoning_content"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, {"continue_final_message": True}, "calls tools cannot be continued"),
])  # fmt: skip
def test_what_cannot_be_continued_is_refused_by_name(thinking, last, more, says):
    response = thinking.post("goes on", [USER, last], **more)
    assert response.status_code == 400 and says in response.json()["error"]["message"]


def test_files_and_servers_with_templates_for_tools(tmp_path):
    body = "{% for m in messages %}{{ m.content }}{% endfor %}"
    more = {
        "tokenizer.chat_template.tool_use": "with{% if tools %} tools: {% endif %}" + body,
        "tokenizer.chat_template.rag": "rag: " + body,
        "tokenizer.chat_templates": ["tool_use", "rag"],
    }
    with Scripted(tmp_path / "model.gguf", {"one": "some words"}, "without: " + body, more=more) as model:
        assert model.server.ok("/apply-template", messages=[USER])["prompt"] == "without: Hi"
        assert model.server.ok("/apply-template", messages=[USER], tools=TOOLS)["prompt"] == "with tools: Hi"
        assert model.server.ok("/apply-template", messages=[USER], tools=TOOLS, tool_choice="none")["prompt"] == "without: Hi"
        assert model.message("one", tools=TOOLS)["content"] == "some words"
        props = model.server.http.get("/props").json()
        assert (props["chat_template"], props["chat_template_tool_use"]) == ("without: " + body, more["tokenizer.chat_template.tool_use"])
    for template, more, says in (
        (" ", {}, "has an empty chat template: ChatML is used; --chat-template gives it one"),
        (None, {"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
    ):
        with Scripted(tmp_path / "model.gguf", {"one": "some words"}, template, more=more) as model:
            assert model.message("one")["content"] == "some words"
            assert any(says in line for line in model.server.lines), model.server.lines
    scripted.write(tmp_path / "list.gguf", ["some words"], None, more={"tokenizer.chat_template": ["one", "two"]})
    refused = "which is no text .tokenizer.chat_template.; convert it again, or give one as --chat-template"
    with pytest.raises(AssertionError, match=refused):
        Running("-m", tmp_path / "list.gguf", "-c", 256)


ANSWER = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"], "additionalProperties": False}


@pytest.mark.parametrize("name", ["Hermes", "Llama 3", "Qwen3-Coder", "Kimi K2"])
def test_an_answer_of_a_schema_or_a_call(templates, tmp_path, name):
    """As agents ask for it that have tools and an output type."""
    family = FAMILIES[name]
    call = family.calls(family.call("look_up", {"word": '"ab cd"' if family.in_json else "ab cd"}))
    texts = {"call": call, "json": '{"answer": "no"}', "prose": "Hello there."}
    asked = {"tools": TOOLS[:1], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}}
    with Scripted(tmp_path / "model.gguf", texts, templated(templates, name), control=family.control, end=family.end) as model:
        for message in (model.message("call", **asked), model.streamed("call", **asked)):
            (called,) = message["tool_calls"]
            assert called["function"] == {"name": "look_up", "arguments": '{"word": "ab cd"}'} and not message["content"]
        for say in (model.message, model.streamed):
            assert json.loads(say("json", **asked)["content"]) == {"answer": "no"}
        message = model.message("prose", **asked)
        assert message.get("tool_calls") or json.loads(message["content"])["answer"] in ("yes", "no")
        assert model.message("json", **asked, tool_choice="required")["tool_calls"]
        refused = model.post("call", tools=TOOLS[:1], regex="a+")
        assert refused.status_code == 400 and "regex cannot be combined with tools" in refused.json()["error"]["message"]
        refused = model.post("call", **{**asked, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}})
        assert refused.status_code == 400 and "'not'" in refused.json()["error"]["message"]


FORM = {form.name: form for form in FORMATS}
WORD = "<tool_call>"


@pytest.fixture(scope="module")
def tokenizer():
    with GGUFFile(DEMO_TARGET) as file, closing(Tokenizer(file)) as tokenizer:
        yield tokenizer


def test_calls_of_tools_where_the_model_may_choose(tokenizer):
    """What `tool_choice` "auto" comes to: the grammar of calls takes right calls, several of them, and no wrong ones."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    right = WORD + "\n" + json.dumps({"name": "weather", "arguments": {"city": "Rome"}}) + "\n</tool_call>"
    for several, texts in ((True, {right: True, right + "\n" + right: True}), (False, {right: True, right + "\n" + right: False})):
        wrong = right.replace("weather", "whether")
        for text, fits in {**texts, wrong: False}.items():
            grammar, triggers = calls_grammar(FORM["Hermes"], [tool], several, {})
            assert triggers == (WORD,)
            lazy = LazyGrammar("lark", grammar, triggers, tokenizer)
            tokens = tokenizer.encode("Let me see. " + text, bos=False)
            assert (lazy.fits(tokens) == len(tokens)) == fits, text
            plain, tokens = Grammar("lark", grammar, tokenizer), tokenizer.encode(text, bos=False)
            assert (plain.fits(tokens) == len(tokens)) == fits


@pytest.mark.parametrize("form, call", [
    ("Cohere2 MoE", '{{"tool_call_id": "0", "tool_name": "{}", "parameters": {{"city": "Rome"}}}}'), ("Apertus", '{{"{}": {{"city": "Rome"}}}}'),
    ("Command R7B", '{{"tool_call_id": "0", "tool_name": "{}", "parameters": {{"city": "Rome"}}}}'),
    *((form, '{{"name": "{}", "arguments": {{"city": "Rome"}}}}') for form in ("Nemotron Nano 2", "Mistral Nemo")),
])  # fmt: skip
def test_lists_of_calls(tokenizer, form, call):
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    begin, end = FORM[form].calls[0].begin, FORM[form].calls[0].end
    for names, several, fits in (
        (("weather",), False, True),
        (("weather",) * 2, True, True),
        (("weather",) * 2, False, False),
        (("whether",), True, False),
    ):
        text = begin + "[" + ", ".join(map(call.format, names)) + "]" + end
        grammar, triggers = calls_grammar(FORM[form], [tool], several, {})
        tokens = tokenizer.encode(text, bos=False)
        assert (LazyGrammar("lark", grammar, triggers, tokenizer).fits(tokens) == len(tokens)) == fits, (names, several)
        parser = Parser(FORM[form], tools=[tool])
        out = [*parser.push(text), *parser.finish()]
        called = [piece.call for piece in out if piece.call is not None]
        assert [one.name for one in called] == [name for name in names if name == "weather"]
        assert called or "".join(piece.content for piece in out) == text


def test_parts_of_arguments_that_are_tags(tokenizer):
    """MiniMax-M3's objects and arrays, whose tags are their names; one that a value repeats; and the same text in pieces of any size."""
    inner = {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "integer"}}, "at": {"type": "string"}, "in": {"type": "object"}},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"in": inner, "text": {"type": "string"}}}},
    }
    text = '<tool_call><invoke name="f"><in><tags><item>1</item><item>2</item></tags><at>a < b</at><in><x>y</x></in></in><text><in>3</in></text></invoke></tool_call>'
    text = re.sub(r"<(?=[/\w])", "]<]minimax[>[<", text)
    want = {"in": {"tags": [1, 2], "at": "a < b", "in": {"x": "y"}}, "text": "]<]minimax[>[<in>3]<]minimax[>[</in>"}
    for size in (1, 5, len(text)):
        parser = Parser(FORM["MiniMax-M3"], tools=[tool])
        out = [piece for i in range(0, len(text), size) for piece in parser.push(text[i : i + size])] + parser.finish()
        assert [json.loads(piece.call.arguments) for piece in out if piece.call is not None] == [want] and len(out) == 1
    assert calls_grammar(FORM["MiniMax-M3"], [tool], True, {}) is calls_grammar(FORM["Kimi K3"], [tool], True, {}) is None


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


@pytest.mark.parametrize("form", ["Qwen3-Coder", "GLM", "MiniMax-M2", "Kimi K2", "DeepSeek", "Hy3", "Seed-OSS", "Ministral"])
@pytest.mark.parametrize("arguments, fits", [
    ({"city": "Rome <b>\n\n</b> </tool_call>"}, True), ({"city": "Rome", "days": "3", "unit": "F"}, True),
    ({"city": "Rome", "days": "0"}, False), ({"city": "Rome", "unit": "K"}, False), ({"days": "3"}, False),
])  # fmt: skip
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


@pytest.mark.parametrize("schema, right, wrong", [
    ({"type": ["string", "null"]}, "any <text>", None), ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12 cm", None), ({"$ref": "#/$defs/text"}, "a", None),
    ({"oneOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "null", None), ({"const": "x"}, "x", "y"), ({"enum": ["x", None]}, "null", "nil"),
    ({"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]}, "y", "z"), ({"type": ["integer", "null"]}, "12", "x"), (True, "any", None), ({}, "any", None),
])  # fmt: skip
def test_texts_among_other_types_keep_the_grammar(tokenizer, schema, right, wrong):
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"text": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar, triggers = calls_grammar(FORM["Qwen3-Coder"], [tool], True, {})
    for value, fits in ((right, True), (wrong, False)):
        if value is not None:
            tokens = tokenizer.encode(written(FORM["Qwen3-Coder"].calls[0], "f", {"x": value}), bos=False)
            assert (LazyGrammar("lark", grammar, triggers, tokenizer).fits(tokens) == len(tokens)) == fits


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


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["list", "dict"]}}, "required": ["kind"]}
SAID = [{"role": "user", "content": "make one"}]
CHAT_PLACE, TEXT_PLACE = '"json_schema": {"name": "...", "schema": {...}}', '"format": {"type": "json_schema", "name"'
WRONG = [
    (CHAT, {"response_format": {"type": "json_schema", "schema": SCHEMA}}, '"schema"', CHAT_PLACE),
    (CHAT, {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, '"json_schema"', CHAT_PLACE),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema_": SCHEMA}}}, '"schema_"', CHAT_PLACE),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, '"type"', CHAT_PLACE),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": [SCHEMA]}}, "an object", CHAT_PLACE),
    (CHAT, {"response_format": {"type": "text", "schema": SCHEMA}}, '"schema"', CHAT_PLACE),
    (CHAT, {"response_format": {"schema": SCHEMA}}, '"schema"', CHAT_PLACE),
    (CHAT, {"response_format": SCHEMA}, "object", "json_schema"),
    (CHAT, {"response_format": {"type": "json_object", "strict": True}}, '"strict"', CHAT_PLACE),
    ("/v1/completions", {"response_format": {"type": "json_schema", "schema": SCHEMA}}, '"schema"', CHAT_PLACE),
    ("/completion", {"json_schema": {"name": "x", "schema": SCHEMA}}, "'schema'|'name'", "keyword"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}}, '"json_schema"', TEXT_PLACE),
    (RESPONSES, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, '"schema"', TEXT_PLACE),
    (RESPONSES, {"text": {"type": "json_schema", "schema": SCHEMA}}, '"type"', TEXT_PLACE),
    (RESPONSES, {"text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}}, "text.format", "one of them"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}}, '"json_schema"', '"schema": {...}'),
    (MESSAGES, {"output_config": {"type": "json_schema", "schema": SCHEMA}}, '"type"', '"schema": {...}'),
    (MESSAGES, {"output_format": {"type": "json_object", "schema": SCHEMA}}, "output_format", '"schema": ...'),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_format", "alone"),
]  # fmt: skip
RIGHT = [
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "description": "y", "schema": SCHEMA}}},
    ),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA, "json_schema": None}}),
    (CHAT, {"json_schema": SCHEMA}),
    (CHAT, {"response_format": {"type": "json_object"}, "json_schema": SCHEMA}),
    ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/completion", {"json_schema": SCHEMA}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
]


def asked(path: str, body: dict) -> dict:
    what = {"input": "make one"} if path == RESPONSES else {"messages": SAID} if path in (CHAT, MESSAGES) else {"prompt": "make one"}
    most = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}.get(path, "n_predict")
    return {**what, most: 60, "temperature": 0, **body}


def told(path: str, answer: dict) -> str:
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    if path == MESSAGES:
        return answer["content"][0]["text"]
    if path == RESPONSES:
        return answer["output"][-1]["content"][0]["text"]
    return answer["choices"][0]["text"] if path == "/v1/completions" else answer["content"]


@pytest.mark.parametrize("path, body, name, place", WRONG, ids=[f"{path} {json.dumps(body)[:60]}" for path, body, *_ in WRONG])
def test_a_schema_in_the_wrong_place_is_refused_with_the_right_one(server, path, body, name, place):
    response = server.post(path, **asked(path, body))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert any(part in message for part in name.split("|")) and place in message


@pytest.mark.parametrize("path, body", RIGHT, ids=[f"{path} {json.dumps(body)[:60]}" for path, body in RIGHT])
def test_a_schema_in_its_place_is_held_to_and_brings_no_further_keys(server, path, body):
    assert list(json.loads(told(path, server.ok(path, **asked(path, body))))) == ["kind"]


def test_further_keys_and_endless_schemas(server):
    comma = {"logit_bias": [[",", 100]], "json_schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}
    assert json.loads(server.ok("/completion", **asked("/completion", comma))["content"]) == {"a": 1}
    further = server.ok("/completion", **asked("/completion", {**comma, "additional_properties": True}))["content"]
    assert further.replace(" ", "").replace("\n", "").startswith('{"a":1,')
    parameters = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = asked(CHAT, {"tools": [tool], "tool_choice": "required", "logit_bias": [[",", 100]]})
    (call,) = server.ok(CHAT, **body)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    keys = {"properties": {"a": {"const": 1}}, "patternProperties": {"^a$": {}}}
    ends = {"type": "object", **keys, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": ends}}
    assert json.loads(told(CHAT, server.ok(CHAT, **asked(CHAT, {"response_format": form})))) == {"a": 1}
    for stream in (False, True):
        loop = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}, "$ref": "#/$defs/n"}
        response = server.post(CHAT, **asked(CHAT, {"json_schema": loop, "stream": stream}))
        assert response.status_code == 400 and "no finite document" in response.json()["error"]["message"]
