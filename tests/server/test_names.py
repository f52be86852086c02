"""No field of a request is passed over in silence: it is obeyed, said to have no effect, refused by name, or named in a header."""

import json
import math
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from server.running import request_of
from sessions import fails_with

from pyggml_spec.errors import SamplingError
from pyggml_spec.sampling.sampler import Sampling
from pyggml_spec.server import anthropic, bodies, responses
from pyggml_spec.server.conversation import _allowed, _template_arguments
from pyggml_spec.server.errors import ApiError
from pyggml_spec.server.reading import enter
from pyggml_spec.server.sampling import logit_bias
from pyggml_spec.server.tasks import ResponseStream

LLAMA_SERVER = [
    "verbose", "timings_per_token", "stream", "stream_options", "cache_prompt", "return_tokens", "return_progress", "sse_ping_interval",
    "n_predict", "max_completion_tokens", "max_tokens", "n_indent", "n_keep", "n_discard", "n_cmpl", "n", "n_cache_reuse",
    "t_max_prompt_ms", "t_max_predict_ms", "response_fields", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "temperature", "dynatemp_range", "dynatemp_exponent", "repeat_last_n", "repeat_penalty",
    "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat",
    "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay", "seed", "n_probs", "logprobs", "min_keep", "backend_sampling",
    "post_sampling_probs", "lora", "dry_sequence_breakers", "json_schema", "grammar", "grammar_lazy", "chat_format", "reasoning_format",
    "generation_prompt", "parse_tool_calls", "chat_parser", "continue_final_message", "echo", "preserved_tokens", "grammar_triggers",
    "reasoning_control", "reasoning_budget_tokens", "logit_bias", "ignore_eos", "stop", "samplers", "prompt", "id_slot",
    "response_format", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "reasoning_effort", "chat_template_kwargs",
    "add_generation_prompt", "thinking_budget_tokens",
]  # fmt: skip
BODIES = (bodies.Chat, bodies.Messages, bodies.Responses, bodies.Completion, bodies.Infill, bodies.OpenAICompletion)


def _chat(body):
    return anthropic.to_chat(bodies.convert(body, bodies.Messages))[0]


def _chat_of_responses(body):
    return responses.to_chat(bodies.convert(body, bodies.Responses), body)[0]


def _thinks(**body):
    served = types.SimpleNamespace(options=types.SimpleNamespace(template_arguments={}, thinking=None))
    return _template_arguments(served, bodies.convert(body, bodies.Chat))


def test_fields_of_llama_server_and_thinking():
    """Those of its server-schema.cpp and of its chats; and what has no effect, or is refused, is in the guide."""
    known = bodies.NO_EFFECT | set(bodies.REFUSED).union(*map(bodies.field_names, BODIES))
    assert not [name for name in LLAMA_SERVER if name not in known]
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    assert not [name for name in (*bodies.NO_EFFECT, *bodies.REFUSED) if f"`{name}`" not in page]
    body = {name: nothing[0] for name, (nothing, _) in bodies.REFUSED.items() if nothing}
    assert bodies.unknown_fields(body, bodies.Chat) == []
    for name in bodies.REFUSED:
        with pytest.raises(ApiError) as raised:
            bodies.unknown_fields({name: "something else"}, bodies.Chat)
        assert raised.value.status == 501 and raised.value.param == name and name in raised.value.message
    with pytest.raises(ApiError):  # 0 is a number, and False none
        bodies.unknown_fields({"min_tokens": False}, bodies.Completion)
    off: list[dict] = [
        {"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"},
        {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
    ]  # fmt: skip
    for body in off:
        assert _thinks(**body) == (False, {}), body
        assert bodies.unknown_fields(body, bodies.Chat) == []
    assert _thinks(thinking={"type": "enabled", "budget_tokens": 9})[0] is True and _thinks(enable_thinking=True)[0] is True
    assert _thinks(thinking={"type": "adaptive"})[0] is None
    for wrong in ({"enable_thinking": 1}, {"thinking": {"type": "off"}}, {"thinking": True}):
        fails_with(ApiError, "thinking", _thinks, **wrong)


@pytest.mark.parametrize("name", ["reasoning_budget_tokens", "thinking_budget_tokens"])
def test_a_thinking_budget_of_nothing_is_obeyed(name):
    """0 is no thinking, -1 no limit. Where nothing thinks, a limit has no meaning, and the header says so."""
    for kind in (bodies.Chat, bodies.Messages, bodies.Responses):
        assert [bodies.unknown_fields({name: n}, kind) for n in (0, 0.0, -1, -1.0, 512)] == [[], [], [], [], []]
    assert [bodies.unknown_fields({name: n}, bodies.Completion) for n in (-1, -1.0, 0, 512)] == [[], [], [name], [name]]
    asked = {"reasoning_effort": "high"}
    assert _thinks(**asked, **{name: 0}) == (False, {})
    assert _thinks(**asked, **{name: -1.0}) == _thinks(**asked, **{name: 9}) == (None, asked)
    fails_with(ApiError, name, _thinks, **{name: "0"})
    assert getattr(_chat({"messages": [], name: 0}), name) == 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_what_means_nothing_is_named(server, path, stream):
    asked = {"max_tokens": 1, "stream": stream} | (
        {"messages": [{"role": "user", "content": "x"}]} if "chat" in path or "messages" in path else {"input" if "responses" in path else "prompt": "x"}
    )  # fmt: skip
    if "responses" in path:
        asked["max_output_tokens"] = asked.pop("max_tokens")
    assert bodies.HEADER not in server.post(path, **asked).headers
    response = server.post(path, **asked, temprature=0.5, **{"a\nb: ü": 1})
    assert response.status_code == 200 and response.headers[bodies.HEADER] == r"temprature, a\nb: \xfc"
    refused = server.post(path, **asked, guided_json={"type": "object"})
    assert refused.status_code == 501 and "response_format" in refused.text


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_tools_that_others_run_are_refused(server, path):
    def post(*tools):
        return server.post(path, messages=[{"role": "user", "content": "x"}], max_tokens=1, tools=list(tools))

    for kind in ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825"):
        response = post({"type": None, "name": "f", "input_schema": {"type": "object"}}, {"type": kind, "name": kind[:-9]})
        assert response.status_code == 501 and f"the type '{kind}'" in response.json()["error"]["message"]
    taken = post(
        {"type": None, "name": "f", "description": None, "input_schema": {"type": "object"}},
        *({"type": kind, "name": kind[:-9]} for kind in ("bash_20250124", "text_editor_20250728", "computer_20250124", "memory_20250818")),
    )
    assert taken.status_code == 200, taken.text


def test_what_anthropics_clients_send_and_one_system_message():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    said: dict = {"messages": [], "thinking": {"type": "adaptive"}}
    form = {"type": "json_schema", "schema": schema}
    for more in ({"output_format": form}, {"output_config": {"format": form, "effort": "high"}}):
        assert _chat(said | more).response_format == {"type": "json_schema", "json_schema": {"schema": schema}}
    assert _chat(said | more).reasoning_effort == "high" and _chat(said).thinking.type == "adaptive"
    for wrong in ({"output_format": {"type": "text"}}, {"output_format": form, "response_format": {"type": "text"}}, {"output_format": 3}):
        fails_with(ApiError, "output_(config.)?format is .*json_schema", _chat, said | wrong)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert _chat(said | {"tool_choice": choice}).parallel_tool_calls is False and _chat(said).parallel_tool_calls is True
    for name, value in {"regex": "a+", "logit_bias": {"3": -1}, "repeat_penalty": 1.1, "ignore_eos": True, "samplers": ["top_k"]}.items():
        assert getattr(_chat(said | {name: value}), name) == value and bodies.unknown_fields({name: value}, bodies.Messages) == []
    assert bodies.unknown_fields({"n_probs": 3, "timings_per_token": True}, bodies.Messages) == ["n_probs", "timings_per_token"]
    # What stands in it beside, and means nothing, is named; a prompt that others keep is refused.
    said = [{"role": "developer", "content": [{"type": "input_text", "text": "b"}]}]
    said += [{"role": "user", "content": "c"}, {"role": "system", "content": "d"}]
    told = _chat_of_responses({"instructions": "a", "input": said}).messages
    assert [(m["role"], m["content"]) for m in told] == [("system", "a\n\nb"), ("user", "c"), ("system", "d")]
    assert _chat_of_responses({"input": said}).messages[0]["role"] == "developer"
    several = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text} for text in "xy"]}, *said]
    told = _chat_of_responses({"instructions": "a", "input": several}).messages
    assert [(m["role"], m["content"]) for m in told[:2]] == [("system", "a\n\nx\n\ny\n\nb"), ("user", "c")]
    image = {"role": "developer", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u"}]}
    told = _chat_of_responses({"instructions": "a", "input": [said[0], image]}).messages
    assert [m["role"] for m in told] == ["system", "developer"] and told[1]["content"][1] == {"type": "image_url", "image_url": "u"}
    fails_with(ApiError, "prompt is not supported", _chat_of_responses, {"input": "x", "prompt": {"id": "pmpt_1"}})


def test_tools_and_their_results():
    blocks = [{"type": "text", "text": "go on"}, {"type": "tool_result", "tool_use_id": "t", "content": "eggs"}]
    for content in (blocks, blocks[::-1]):
        told = _chat({"messages": [{"role": "user", "content": content}]}).messages
        assert [m["role"] for m in told] == ["tool", "user"] and told[1]["content"] == [{"type": "text", "text": "go on"}]
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]
    allowed = [{"type": "function", "function": {"name": "c"}}, {"type": "function", "name": "a"}]
    for choice in ({"mode": "required", "tools": allowed}, {"allowed_tools": {"mode": "required", "tools": allowed}}):
        body, kept = _allowed(bodies.Chat(top_k=1, tool_choice={"type": "allowed_tools", **choice}), tools)
        assert body == bodies.Chat(top_k=1, tool_choice="required") and kept == [tools[0], tools[2]]
    assert _allowed(bodies.Chat(tool_choice={"type": "allowed_tools", "tools": allowed}), tools)[0].tool_choice == "auto"
    for choice in ("auto", {"type": "function", "function": {"name": "a"}}):
        body = bodies.Chat(tool_choice=choice)
        assert _allowed(body, tools) == (body, tools)
    for wrong in ({}, {"tools": 3}, {"tools": [3]}, {"tools": [{"name": "d"}]}, {"tools": allowed, "mode": "none"}, {"allowed_tools": 3}):
        with pytest.raises(ApiError, match="allowed_tools"):
            _allowed(bodies.Chat(tool_choice={"type": "allowed_tools", **wrong}), tools)


def test_fields_of_other_dialects(server):
    asked = {"input": "x", "max_output_tokens": 1, "reasoning": {"effort": "none", "summary": "auto"}, "text": {"verbosity": "low"}}
    response = server.post("/v1/responses", **asked)
    assert response.status_code == 200 and response.headers[bodies.HEADER] == "reasoning.summary, text.verbosity"
    asked = {"prompt": "x", "max_tokens": 1}
    assert server.post("/v1/completions", **asked, echo=False, best_of=1, suffix="").status_code == 200
    for name, value in {"echo": True, "best_of": 2, "suffix": "y"}.items():
        refused = server.post("/completion", **asked, **{name: value})
        assert refused.status_code == 501 and refused.json()["error"]["param"] == name
    got = server.ok("/completion", prompt="x", n_predict=1, n_cmpl=3)
    assert [g["index"] for g in got] == [0, 1, 2]
    response = server.post("/v1/responses", input="x", max_output_tokens=1, n_cmpl=2, n=2)  # a response is one answer
    assert response.status_code == 200 and response.headers[bodies.HEADER] == "n_cmpl, n"
    response = server.post(
        "/v1/responses", input="x", max_output_tokens=1, tools=[{"type": "web_search"}, {"type": "function", "name": "f"}]
    )
    assert response.status_code == 200 and response.headers[bodies.HEADER] == "tools: web_search"


async def test_silence_is_as_long_as_it_was_asked_for(server):
    """In seconds; -1 for ever."""

    class Queue:
        def enter(self, requests):
            return types.SimpleNamespace(tasks=[], cancel=None, ping_seconds=None)

    for body, want in (({}, 30.0), ({"sse_ping_interval": 5}, 5.0), ({"sse_ping_interval": -1}, math.inf)):
        entered = enter(types.SimpleNamespace(queue=Queue()), request_of(), bodies.convert(body, bodies.Completion), [])
        assert entered.ping_seconds == want
    assert server.post("/completion", prompt="x", n_predict=1, sse_ping_interval="5").json()["error"]["param"] == "sse_ping_interval"
    assert server.ok("/completion", prompt="x", n_predict=1, sse_ping_interval=-1)["stop"]

    stream = ResponseStream([], None)
    stream.ping_seconds = 0.001
    assert await stream.read() is None


HUGE = 10**400
SAID = [{"role": "user", "content": "x"}]
FUNCTION = {"type": "function", "name": "f"}


def _names(value):
    """Names of the members of a JSON value, however deep."""
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set().union(*map(_names, value)) if isinstance(value, list) else set()


FOREIGN = {
    *[
        "messages", "max_tokens", "response_format", "reasoning_effort", "tool_calls", "stop", "parameters", "function", "n_predict",
        "input", "json_schema",
    ]
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path, body, param, words", [
    ("responses", {"input": [], "max_output_tokens": 1}, None, ""),
    ("responses", {"input": "x", "max_output_tokens": -5}, "max_output_tokens", "max_output_tokens is -5"),
    ("responses", {"input": "x", "max_output_tokens": "a"}, "max_output_tokens", "max_output_tokens is"),
    ("responses", {"input": "x", "text": {"format": {"type": "xml"}}}, None, "text.format.type is"),
    ("responses", {"input": "x", "text": {"format": 3}}, "text.format", "text.format is 3"),
    ("responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema", "text.format.schema is 3"),
    ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}, "grammar": 'root ::= "a"'}, None, "grammar and text.format"),
    ("responses", {"input": "x", "reasoning": {"effort": 3}}, "reasoning.effort", "reasoning.effort is 3"),
    ("responses", {"instructions": "a", "input": [*SAID, {"role": "user", "content": 3}]}, "input", "input[1]"),
    ("responses", {"instructions": "a", "input": [{"role": "developer", "content": "b"}, {"role": "user", "content": None}]}, "input", "input[1]"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "image"),
    ("responses", {"input": "x " * 9000}, "input", "context"),
    ("responses", {"input": "x", "tools": [{"type": "web_search"}, {"type": "function"}]}, "tools", "tools[1] has no name"),
    ("responses", {"input": "x", "tools": [{"type": "web_search"}, {**FUNCTION, "parameters": 3}]}, "tools", "tools[1]"),
    ("responses", {"input": "x", "tool_choice": 3}, "tool_choice", '{"type": "function", "name": ...}'),
    ("messages", {"messages": SAID, "max_tokens": -5}, None, "max_tokens is -5"),
    ("messages", {"system": "s", "messages": [*SAID, {"role": "user", "content": 3}]}, None, "messages[1]"),
    ("messages", {"messages": SAID, "stop_sequences": 3}, None, "stop_sequences is 3"),
    ("messages", {"messages": SAID, "tools": [{"name": "f", "input_schema": 3}]}, None, "input_schema of tools[0]"),
    ("messages", {"messages": SAID, "tool_choice": {"type": "x"}}, None, "tool_choice.type"),
    ("messages", {"messages": SAID, "tool_choice": {"type": "any"}}, None, "tool_choice is any"),
    ("messages", {"messages": SAID, "output_config": {"effort": 3}}, None, "output_config.effort is 3"),
    ("messages", {"messages": SAID, "output_config": {"format": {"type": "json_schema", "schema": 3}}}, None, "output_config.format.schema is 3"),
    ("messages", {"messages": SAID, "output_format": {"type": "json_schema", "schema": 3}}, None, "output_format.schema is 3"),
    ("completions", {"prompt": "x", "typ_p": -1}, "typ_p", "typ_p is -1"),
    ("completions", {"prompt": "x", "repetition_penalty": 1e9}, "repetition_penalty", "repetition_penalty is"),
    ("completions", {"prompt": "x", "max_completion_tokens": -9}, "max_completion_tokens", "max_completion_tokens is -9"),
])  # fmt: skip
def test_errors_name_what_the_client_sent(server, path, body, param, words):
    response = server.post(f"/v1/{path}", **body)
    error = response.json().get("error") or {}
    if not words:
        return
    assert response.status_code == 400 and words in error["message"], response.text
    assert path == "messages" or param is None or error["param"] == param
    said = {name.strip(".,:;()[]") for word in error["message"].split(" but ")[0].split() for name in word.split(".")}
    assert not (FOREIGN - _names(body)) & said, error["message"]


NUMBERS = [
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "min_keep", "seed",
    "n_predict", "n", "n_probs", "id_slot", "priority", "n_indent", "t_max_predict_ms", "sse_ping_interval", "mirostat", "xtc_probability", "dry_multiplier",
    "thinking_budget_tokens", "logit_bias", "prompt", "top_logprobs", "max_tokens", "stop", "n_keep",
]  # fmt: skip
LITERALS = (
    f"{HUGE} {-HUGE} {'1' + '0' * 5000} 1e400 -1e400 1e308 NaN Infinity -Infinity 18446744073709551616 -9223372036854775809 1.5".split()
)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_numbers_that_nothing_can_hold(server, path):
    """`logit_bias` of 10^400 was an error of the server's."""
    for name in NUMBERS:
        for literal in LITERALS:
            base = {"prompt": "a", "messages": SAID, "input": "a", "max_tokens": 1, "n_predict": 1, "max_output_tokens": 1}
            base.pop(name, None)
            text = json.dumps(base)[:-1] + f', "{name}": {literal}}}'
            response = server.http.post(path, content=text)
            assert response.status_code in (200, 400, 501), (name, literal[:30], response.text[:300])
            assert response.status_code == 200 or 10 < len(response.json()["error"]["message"]) < 900, response.text[:300]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bias",
    [f'{{"5": {HUGE}}}', f'{{"5": {-HUGE}}}', '{"5": 1e400}', '{"5": NaN}', '{"5": Infinity}', '{"5": true}', '{"5": "1"}', f"[[{HUGE}, 1]]", "[[5.0, 1]]", "[[5.5, 1]]",
     "[[1e400, 1]]", "[[true, 1]]", "[[5]]", "[5]", "5", "[[5, [1]]]", '[[{"a": 1}, 1]]', f'{{"{HUGE}": 1}}', '{"-1": 1}', '{"\u0665": 1}'],
)  # fmt: skip
def test_logit_biases_that_are_none(server, bias):
    for path in ("/completion", "/v1/chat/completions"):
        response = server.http.post(
            path, content=json.dumps({"prompt": "a", "messages": SAID, "max_tokens": 1})[:-1] + f', "logit_bias": {bias}}}'
        )
        assert response.status_code in (200, 400), response.text
        assert response.status_code == 400 or bias in (f"[[{HUGE}, 1]]", f'{{"{HUGE}": 1}}', '{"-1": 1}', '{"\u0665": 1}'), (
            response.text
        )  # ids out of range, and texts


def test_numbers_that_no_field_can_hold(server):
    for path, text in (
        ("/completion", '{"prompt": [%s]}'), ("/completion", '{"prompt": ["a", %s]}'), ("/tokenize", '{"content": [%s], "with_pieces": true}'),
        ("/tokenize", '{"content": [%s]}'), ("/detokenize", '{"tokens": [%s]}'), ("/infill", '{"input_prefix": [%s], "input_suffix": "a"}'),
        ("/completion", '{"prompt": "a", "grammar": "root ::= \\"a\\"", "grammar_lazy": true, "grammar_triggers": [{"type": "token", "token": %s}]}'),
        ("/completion", '{"prompt": "a", "n_predict": 1, "json_schema": {"type": "integer", "minimum": %s}}'),
        ("/completion", '{"prompt": "a", "n_predict": 1, "json_schema": {"type": "string", "maxLength": %s}}'),
        ("/completion", '{"prompt": "a", "n_predict": 1, "json_schema": {"const": %s}}'),
        ("/completion", '{"prompt": "a", "n_predict": 1, "json_schema": {"multipleOf": %s}}'),
    ):  # fmt: skip
        for literal in (str(HUGE), str(-HUGE), "1e300", "5.5", "-1", "999999999"):
            response = server.http.post(path, content=text % literal)
            assert response.status_code in (200, 400, 501), (path, text, literal[:20], response.text[:300])
            assert response.status_code == 200 or len(response.json()["error"]["message"]) < 900
    for bias in (HUGE, -HUGE, float("nan"), float("inf")):
        with pytest.raises(SamplingError):
            Sampling(logit_bias={5: bias})
    assert logit_bias({"5": False}, SimpleNamespace(n_vocab=9)) == {5: -float("inf")}
    for ids in ({"9": 1}, [[-1, 1]], {str(1 << 40): 1}):  # of another tokenizer
        fails_with(ApiError, "logit_bias is", logit_bias, ids, SimpleNamespace(n_vocab=9, encode=lambda text, **_: [3]))
