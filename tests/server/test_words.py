"""What is wrong is named as the client named it, in every dialect, and no number is too large to be told so."""

import json
from types import SimpleNamespace

import pytest

from pyggml_spec.errors import SamplingError
from pyggml_spec.sampling.sampler import Sampling
from pyggml_spec.server.sampling import logit_bias

HUGE = 10**400
SAID = [{"role": "user", "content": "x"}]
FUNCTION = {"type": "function", "name": "f"}


def _names(value):
    """Names of the members of a JSON value, however deep."""
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set().union(*map(_names, value)) if isinstance(value, list) else set()


FOREIGN = {
    "messages",
    "max_tokens",
    "response_format",
    "reasoning_effort",
    "tool_calls",
    "stop",
    "parameters",
    "function",
    "n_predict",
    "input",
    "json_schema",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, body, param, words",
    [
        ("responses", {"input": []}, None, ""),
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
    ],
)  # fmt: skip
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
LITERALS = [
    str(HUGE),
    str(-HUGE),
    "1" + "0" * 5000,
    "1e400",
    "-1e400",
    "1e308",
    "NaN",
    "Infinity",
    "-Infinity",
    "18446744073709551616",
    "-9223372036854775809",
    "1.5",
]


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


def test_ids_that_nothing_can_hold(server):
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


def test_of_the_library_too():
    for bias in (HUGE, -HUGE, float("nan"), float("inf")):
        with pytest.raises(SamplingError):
            Sampling(logit_bias={5: bias})
    tokenizer = SimpleNamespace(n_vocab=9)
    assert logit_bias({"5": False}, tokenizer) == {5: -float("inf")}
