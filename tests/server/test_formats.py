"""Answers of every format against llama-server's reading of the same texts, and through the server: whole, streamed, and in a second turn.

`scripts/compare_formats.py --write` records llama-server's answers anew, and prints ours beside them.
"""

import json
from pathlib import Path
from typing import Self

import pytest
import scripted
from llama_templates import templates  # noqa: F401  (a fixture)
from server.formats import FAMILIES, TOOLS, Case, cases, plain
from server.running import Running, events

from pyggml_spec.text.formats import format_of
from pyggml_spec.text.parse import Parser

RECORDED = json.loads(Path(__file__).with_name("llama_server_formats.json").read_text("utf-8"))
CASES = {case.key: case for case in cases()}
DIFFERENT = {
    "gpt-oss: two calls": "llama-server's grammar ends the answer behind the first one",
    "MiniMax-M2: two calls": "llama-server refuses its own model's answer, with a 500",
    "cut call": "llama-server tells the beginning of its arguments; here it is no call, and its text is content",
    "half of a surrogate pair": "llama-server passes it on, which strict readers of JSON refuse; here it is U+FFFD",
    "null where a text may be": "of some formats llama-server takes null as a text; here it is null for all, as Qwen3-Coder's is there",
}


def parsed(case: Case, source: str) -> dict:
    """What the parser makes of a case, with what the request has begun before it, as llama-server tells it."""
    family, last = FAMILIES[case.family], case.messages[-1]
    begun = (
        {"content": last["content"], "reasoning": last.get("reasoning_content", "")}
        if last["role"] == "assistant"
        else {"content": "", "reasoning": ""}
    )
    inside = "reasoning" if family.open and (case.thinking or family.shut) else ""
    if last["role"] == "assistant":
        inside = "content" if begun["content"] else "reasoning"
    parser = Parser(format_of(source), inside=inside, continued=last["role"] == "assistant", tools=TOOLS if case.tools else ())
    text = case.text[: case.text.index(case.cut) + len(case.cut)] if case.cut else case.text
    out = [*parser.push(text), *parser.finish(cut=bool(case.cut))]
    calls = [[piece.call.name, piece.call.arguments] for piece in out if piece.call is not None]
    told = {kind: begun[kind] + "".join(getattr(piece, kind) for piece in out) for kind in begun}
    return {**told, "calls": calls, "finish": "length" if case.cut else "tool_calls" if calls else "stop"}


def differing(case: Case) -> bool:
    if case.name == "null where a text may be":
        return case.family not in ("Qwen3-Coder", "Qwen 3.5")
    return case.name in DIFFERENT or case.key in DIFFERENT


def test_every_case_was_recorded():
    assert set(RECORDED) == set(CASES)
    assert {key for key, answer in RECORDED.items() if not answer.get("same")} <= set(
        DIFFERENT
    )  # elsewhere its grammar let the same text out


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_an_answer_is_read_as_llama_server_reads_it(templates, key):  # noqa: F811
    case = CASES[key]
    ours = plain(parsed(case, (templates / f"{FAMILIES[case.family].template}.jinja").read_text("utf-8")))
    assert (ours == plain(RECORDED[key])) == (not differing(case)), (ours, RECORDED[key])
    if case.cut:
        assert ours["calls"] == [] and ours["finish"] == RECORDED[key]["finish"] == "length"


# -- through the server

CALLED = {"gpt-oss", "muse-glimmer", "MiniMax-M2", "Kimi K2", "DeepSeek V3.1", "gemma 4", "Qwen 3.5"}


class Scripted:
    """A server whose model says one of ``texts``, by their names."""

    def __init__(self, path: Path, texts: dict[str, str], template: str, *options: object, control=(), end="<|im_end|>", more=None):
        begins = scripted.write(path, list(texts.values()), template, control, end, more)
        self.begins = dict(zip(texts, begins))
        self.server = Running("-m", path, "-c", 4096, *options)

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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CALLED))
def test_a_conversation_with_a_tool(templates, tmp_path, name):  # noqa: F811
    """Reasoning and a call from control tokens, whole and streamed; the tool's result; the answer; and another question: no template refuses a turn."""
    family = FAMILIES[name]
    thinking = {"chat_template_kwargs": {"enable_thinking": bool(family.thought or family.open)}}
    call = family.call("look_up", {"word": '"ab cd"' if family.in_json or name == "gemma 4" else "ab cd", "n": "3"})
    texts = {"call": (family.thought or family.open) + family.calls(call), "answer": family.shut + family.answer("It is there.")}
    with Scripted(tmp_path / "model.gguf", texts, templated(templates, name), control=family.control, end=family.end) as model:
        message = model.message("call", tools=TOOLS, **thinking)
        (called,) = message["tool_calls"]
        assert called["function"]["name"] == "look_up" and json.loads(called["function"]["arguments"]) == {"word": "ab cd", "n": 3}
        assert message["content"] is None and message.get("reasoning_content", "") == (
            "Hm, well." if thinking["chat_template_kwargs"]["enable_thinking"] else ""
        )
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


@pytest.fixture(scope="module")
def hermes(templates, tmp_path_factory):  # noqa: F811
    family = FAMILIES["Hermes"]
    values = {
        "surrogate": '"\\ud83d"',
        "large": "1e400",
        "many": str(7**480),
        "nan": "NaN",
        "marker": '"see </tool_call> here"',
        "whole": '"ab cd"',
        "control": '"a\x01b\n"',
    }
    texts = {name: family.call("look_up", {"word": value}) for name, value in values.items()}
    with Scripted(tmp_path_factory.mktemp("hermes") / "model.gguf", texts, templated(templates, "Hermes")) as model:
        yield model


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, word",
    [
        ("surrogate", "\ufffd"),
        ("large", "1e400"),
        ("many", str(7**480)),
        ("nan", "NaN"),
        ("marker", "see </tool_call> here"),
        ("control", "a\x01b\n"),
    ],
)
def test_arguments_are_json_in_every_dialect(hermes, name, word):
    """With reasoning on, so that no grammar holds the text."""
    assert json.loads(hermes.message(name, tools=TOOLS)["tool_calls"][0]["function"]["arguments"]) == {"word": word}
    assert json.loads(hermes.streamed(name, tools=TOOLS)["tool_calls"][0]["function"]["arguments"]) == {"word": word}
    tools = [{"name": "look_up", "input_schema": {"type": "object"}}]
    answer = hermes.server.ok("/v1/messages", **{**hermes.body(name), "tools": tools})
    assert answer["content"][0]["input"] == {"word": word} and answer["stop_reason"] == "tool_use"
    body = {
        "input": "Hi",
        "tools": [{"type": "function", "name": "look_up"}],
        "logit_bias": hermes.body(name)["logit_bias"],
        "temperature": 0,
    }
    (item,) = hermes.server.ok("/v1/responses", **body)["output"]
    assert json.loads(item["arguments"]) == {"word": word}


def test_a_cut_call_is_told_as_cut(hermes):
    """However few tokens it may take: there is no call, or the whole one."""
    tools, seen = [{"name": "look_up", "input_schema": {"type": "object"}}], set()
    for n in range(1, 20):
        choice = hermes.post("whole", tools=TOOLS, max_tokens=n).json()["choices"][0]
        answer = hermes.server.ok("/v1/messages", **{**hermes.body("whole", max_tokens=n), "tools": tools})
        whole = "</tool_call>" in hermes.message("whole", max_tokens=n)["content"]
        calls = [json.loads(call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])]
        assert calls == [{"word": "ab cd"}] * whole and (whole or choice["finish_reason"] == "length")
        assert [part["input"] for part in answer["content"] if part["type"] == "tool_use"] == calls and (
            whole or answer["stop_reason"] == "max_tokens"
        )
        seen.add(whole)
    assert seen == {True, False}


@pytest.fixture(scope="module")
def thinking(templates, tmp_path_factory):  # noqa: F811
    call = "Hm.\n</think>\n\n" + FAMILIES["Qwen 3.5"].call("look_up", {"word": "ab", "n": "3"})
    texts = {"call": call, "goes on": " again there.", "thinks on": " well.\n</think>\n\nHi.", "json": '{"a": 1}'}
    with Scripted(tmp_path_factory.mktemp("thinking") / "model.gguf", texts, templated(templates, "Qwen 3.5")) as model:
        yield model


USER = {"role": "user", "content": "Hi"}


@pytest.mark.slow
def test_a_stop_text_cuts_a_call_unless_it_ends_it(thinking):
    for stop, calls in (("<parameter=n>", 0), ("</parameter>\n<p", 0), ("3", 0), ("</function>", 1), ("</tool_call>", 1)):
        choice = thinking.post("call", tools=TOOLS, stop=[stop]).json()["choices"][0]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        told = [json.loads(call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])]
        assert told == [{"word": "ab", "n": 3}] * calls


def prompt(model: Scripted, *messages: dict, **more: object) -> str:
    return model.server.ok("/apply-template", messages=[USER, *messages], **more)["prompt"].rpartition("<|im_start|>assistant\n")[2]


def test_prefilled_content_follows_the_reasoning(thinking):
    for message, begun in (
        ({"content": "Hello"}, "<think>\n\n</think>\n\nHello"),
        ({"content": "Hello", "reasoning_content": "So"}, "<think>\nSo\n</think>\n\nHello"),
    ):
        last = {"role": "assistant", **message}
        assert prompt(thinking, last) == begun
        assert thinking.message("goes on", [USER, last])["content"] == " again there."
        assert thinking.streamed("goes on", [USER, last])["content"] == " again there."
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(thinking, {"role": "assistant", "content": "Hello"}, **off) == "<think>\n\n</think>\n\nHello"


def test_prefilled_reasoning_goes_on_as_reasoning(thinking):
    for last, more in (({"content": "", "reasoning_content": "Hm,"}, {}), ({"reasoning_content": "Hm,"}, {"continue_final_message": True, "add_generation_prompt": False}),
                       ({"content": None, "reasoning_content": "Hm,"}, {"continue_final_message": "reasoning_content"})):  # fmt: skip
        last = {"role": "assistant", **last}
        assert prompt(thinking, last, **more) == "<think>\nHm,"
        for answer in (thinking.message("thinks on", [USER, last], **more), thinking.streamed("thinks on", [USER, last], **more)):
            assert (answer["reasoning_content"], answer["content"]) == (" well.", "Hi.")


@pytest.mark.parametrize(
    "last, more, says",
    [
        ({"role": "user", "content": "x"}, {"continue_final_message": True}, "needs a last message of the assistant"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, {"continue_final_message": "reasoning_content"}, "has content after it"),
        ({"role": "assistant", "content": "x"}, {"continue_final_message": True, "add_generation_prompt": True}, "cannot both be true"),
        ({"role": "assistant", "content": "x"}, {"continue_final_message": "no"}, "continue_final_message is"),
        ({"role": "assistant", "content": "x", "reasoning_content": ["y"]}, {}, "reasoning_content"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, {"continue_final_message": True}, "calls tools cannot be continued"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused_by_name(thinking, last, more, says):
    response = thinking.post("goes on", [USER, last], **more)
    assert response.status_code == 400 and says in response.json()["error"]["message"]


@pytest.mark.slow
def test_a_file_may_have_a_template_for_tools(tmp_path):
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


@pytest.mark.slow
def test_a_server_says_what_is_wrong_with_a_template(tmp_path):
    for template, more, says in (
        (" ", {}, "has an empty chat template: it is spoken to in ChatML; --chat-template gives it one"),
        (None, {"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
    ):
        with Scripted(tmp_path / "model.gguf", {"one": "some words"}, template, more=more) as model:
            assert model.message("one")["content"] == "some words"
            assert any(says in line for line in model.server.lines), model.server.lines
    scripted.write(tmp_path / "list.gguf", ["some words"], None, more={"tokenizer.chat_template": ["one", "two"]})
    with pytest.raises(
        AssertionError, match="which is no text .tokenizer.chat_template.; convert it again, or give one as --chat-template"
    ):
        Running("-m", tmp_path / "list.gguf", "-c", 256)
