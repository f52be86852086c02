"""OpenAI's own client against every endpoint that it has for text: what it parses is what clients get."""

import contextlib
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from server.running import events, serving, wait_for
from server.test_queue import ask, sent

PROMPT = "def quicksort(items):\n"
CHAT = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "import os"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["spam", "eggs"]}}, "required": ["word"], "additionalProperties": False},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server, openai):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.slow
def test_models(client, server, openai):
    (entry,) = client.models.list().data
    assert entry.id == "target.gguf" and client.models.retrieve(entry.id).id == entry.id
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("gpt-9")


def test_streams_and_log_probabilities(client):
    """The same text, finish reason and usage, and a chunk is never empty."""
    asked = {"model": "any", "messages": CHAT, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant" and deltas[0].content is None and all(d.content for d in deltas[1:-1])
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    details = {"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(update=details)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 40 and whole.id.startswith("chatcmpl-") and whole.system_fingerprint.startswith("b")
    asked = {"model": "x", "messages": CHAT, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    whole = client.chat.completions.create(**asked)
    told = whole.choices[0].logprobs.content
    assert "".join(t.token for t in told) == whole.choices[0].message.content and len(told) == 12
    assert all(len(t.top_logprobs) == 4 and t.logprob == max(p.logprob for p in t.top_logprobs) <= 0 for t in told)
    chunks = [c for c in client.chat.completions.create(**asked, stream=True) if c.choices and c.choices[0].delta.role is None]
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == told and max(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == 1
    legacy = client.completions.create(model="x", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.token_logprobs) == 5 and all(len(top) == 3 for top in legacy.top_logprobs)


def test_drafts_are_told_and_can_be_left_out(server):
    speculative = server.ok("/v1/completions", prompt=PROMPT, max_tokens=48, temperature=0)
    plain = server.ok("/v1/completions", prompt=PROMPT, max_tokens=48, temperature=0, speculative=False)
    assert speculative["choices"][0]["text"] == plain["choices"][0]["text"]
    assert speculative["timings"]["draft_n"] >= speculative["timings"]["draft_n_accepted"] > 0
    assert plain["timings"]["draft_n"] == plain["timings"]["draft_n_accepted"] == 0 and "off" in plain["speculation"]["reason"]
    told = speculative["speculation"]
    assert sum(told["accepted_at"]) == speculative["timings"]["draft_n_accepted"]
    assert sum(n * int(size) for size, n in told["steps_by_tokens"].items()) == 47
    asked = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "stream": True, "speculation": True}
    chunks = [json.loads(e) for e in events(server.post("/v1/completions", **asked)) if e != b"[DONE]"]
    steps, end = [c["speculation"] for c in chunks if "accepted" in c.get("speculation", {})], chunks[-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "".join("".join(s["tokens"]) for s in steps)
    assert sum(s["accepted"] for s in steps) == end["timings"]["draft_n_accepted"] > 0
    assert sum(len(s["drafts"]) for s in steps) == end["timings"]["draft_n"]
    for step in steps:
        assert step["drafts"][: step["accepted"]] == step["tokens"][: step["accepted"]]


def test_several_choices_and_prompts(client):
    got = client.chat.completions.create(model="x", messages=CHAT, max_tokens=8, n=3, seed=5, temperature=1)
    assert [c.index for c in got.choices] == [0, 1, 2] and len({c.message.content for c in got.choices}) > 1
    assert got.usage.completion_tokens == 24 and got.usage.prompt_tokens < 60
    again = client.chat.completions.create(model="x", messages=CHAT, max_tokens=8, n=3, seed=5, temperature=1)
    assert [c.message.content for c in again.choices] == [c.message.content for c in got.choices]
    texts = client.completions.create(model="x", prompt=["import os\n", "class A:\n"], max_tokens=6, temperature=0)
    assert [c.index for c in texts.choices] == [0, 1] and texts.choices[0].text != texts.choices[1].text
    stream = list(client.chat.completions.create(model="x", messages=CHAT, max_tokens=8, n=2, seed=5, temperature=1, stream=True))
    for i in range(2):
        text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices[0].index == i)
        assert text == got.choices[i].message.content


def test_structured_output(client):
    schema = {"type": "object", "properties": {"name": {"const": "x"}}, "required": ["name"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    got = client.chat.completions.create(model="x", messages=CHAT, max_tokens=60, response_format=form, temperature=1, seed=1)
    assert json.loads(got.choices[0].message.content) == {"name": "x"} and got.choices[0].finish_reason == "stop"
    got = client.completions.create(model="x", prompt=PROMPT, max_tokens=9, extra_body={"grammar": 'root ::= "a"{5}'})
    assert got.choices[0].text == "aaaaa"
    got = client.chat.completions.create(
        model="x", messages=CHAT, max_tokens=200, response_format={"type": "json_object"}, temperature=0.5, seed=1
    )
    assert got.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("schema, right", [
    ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, lambda value: isinstance(value["a"], int)),
    ({"items": [{"type": "integer"}]}, lambda value: len(value) == 1 and isinstance(value[0], int)),
    ({"items": {"enum": [1, 2]}, "maxItems": 3}, lambda value: set(value) <= {1, 2}),
    (
        {"type": "object", "properties": {"b": {"properties": {"c": {"const": 1}}, "required": ["c"]}}, "required": ["b"]},
        lambda value: value["b"]["c"] == 1,
    ),
])  # fmt: skip
def test_types_that_a_schema_leaves_out(server, schema, right):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    asked = {"messages": CHAT, "max_tokens": 200, "temperature": 0, "logit_bias": {str(i): -3 for i in range(15, 25)}}
    (choice,) = server.ok("/v1/chat/completions", **asked, response_format=form)["choices"]
    assert choice["finish_reason"] != "stop" or right(json.loads(choice["message"]["content"]))
    assert choice["message"]["content"][0] in "[{"
    deep = schema
    for _ in range(200):
        deep = {"properties": {"x": deep}}
    form["json_schema"]["schema"] = deep
    assert server.post("/v1/chat/completions", messages=CHAT, max_tokens=1, response_format=form).status_code in (200, 400)


def test_biases_and_tools(client):
    free = client.chat.completions.create(model="x", messages=CHAT, max_tokens=1, temperature=0, logprobs=True, top_logprobs=2)
    first, second = free.choices[0].logprobs.content[0].top_logprobs
    biased = client.chat.completions.create(
        model="x", messages=CHAT, max_tokens=1, temperature=0, extra_body={"logit_bias": [[first.token, False]]}
    )
    assert biased.choices[0].message.content == second.token != first.token
    got = client.chat.completions.create(model="x", messages=CHAT, tools=[TOOL], tool_choice="none", max_tokens=8, temperature=0)
    assert got.choices[0].message.tool_calls is None and got.choices[0].message.content
    chunks = list(
        client.chat.completions.create(model="x", messages=CHAT, tools=[TOOL], max_tokens=8, temperature=0, stream=True, logprobs=True)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_tool_has_to_be_called(client, choice):
    asked = {"model": "x", "messages": CHAT, "tools": [TOOL], "tool_choice": choice, "max_tokens": 100, "temperature": 1, "seed": 3}
    got = client.chat.completions.create(**asked).choices[0]
    (call,) = got.message.tool_calls
    assert got.finish_reason == "tool_calls" and call.function.name == "look_up"
    assert json.loads(call.function.arguments)["word"] in ("spam", "eggs")
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments and final.finish_reason == "tool_calls"


@pytest.mark.slow
def test_responses(client, openai):
    got = client.responses.create(model="x", input="import os", instructions="You write Python.", max_output_tokens=12, temperature=0)
    chat = client.chat.completions.create(model="x", messages=CHAT, max_tokens=12, temperature=0)
    assert got.output_text == chat.choices[0].message.content and got.usage.output_tokens == 12 and got.status == "incomplete"
    with client.responses.stream(
        model="x", input="import os", instructions="You write Python.", max_output_tokens=12, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    events_of_text = list(client.responses.create(model="x", input=[{"role": "user", "content": "x"}], max_output_tokens=5, stream=True))
    assert "".join(e.delta for e in events_of_text if e.type == "response.output_text.delta") == events_of_text[-1].response.output_text
    tool = {"type": "function", **TOOL["function"]}
    called = client.responses.create(model="x", input="import os", tools=[tool], tool_choice="required", max_output_tokens=90)
    assert called.output[0].type == "function_call" and json.loads(called.output[0].arguments)["word"] in ("spam", "eggs")
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(model="x", input="x", previous_response_id="resp_1")


WRONG = [
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 2}, "top_p"), ({"top_k": 1.5}, "top_k"),
    ({"max_tokens": -2}, "max_tokens"), ({"n": 0}, "n"), ({"n": 1000}, "n"), ({"stop": 3}, "stop"), ({"logit_bias": "x"}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"), ({"response_format": {"type": "sound"}}, "response_format"), ({"messages": "string"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"), ({"messages": [3]}, "messages"), ({"tools": [{}]}, "tools"), ({"stream": 1}, "stream"),
    ({"tool_choice": "required"}, "tool_choice"), ({"seed": "x"}, "seed"), ({"samplers": ["dice"]}, "samplers"), ({"model": 3}, "model"),
    ({"chat_template_kwargs": {"enable_thinking": "x"}}, "chat_template_kwargs"), ({"grammar": "root ::= oh no"}, None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields, param", WRONG, ids=lambda value: json.dumps(value)[:40])
def test_what_is_wrong_is_named(server, fields, param, stream):
    """An ordinary HTTP error in a sentence, also where a stream was asked for."""
    body = {"messages": CHAT, "max_tokens": 2, "stream": stream, **fields}
    response = server.post("/v1/chat/completions", **body)
    error = response.json()["error"]
    assert response.status_code == 400 == error["code"] and error["type"] == "invalid_request_error", response.text
    assert (error["param"] or "").startswith(param or "") and len(error["message"]) > 15


def test_the_clients_errors(client, openai):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="x", messages=CHAT * 200)
    error = raised.value.body
    assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == 2048 < error["n_prompt_tokens"]
    with pytest.raises(openai.InternalServerError) as refused:
        client.embeddings.create(model="x", input="text")
    assert refused.value.status_code == 501 and refused.value.response.headers["x-should-retry"] == "false"


def test_prompts_and_prefills_of_chats(server):
    got = server.ok("/v1/chat/completions", messages=CHAT, max_tokens=2, temperature=0, verbose=True)
    rendered = server.ok("/apply-template", messages=CHAT)["prompt"]
    assert got["__verbose"]["prompt"] == rendered and got["__verbose"]["content"] == got["choices"][0]["message"]["content"]
    assert "__verbose" not in server.ok("/v1/chat/completions", messages=CHAT, max_tokens=2)
    # Its text is the end of the prompt, and no part of the answer.
    turns = [*CHAT, {"role": "assistant", "content": "import sys"}]
    got = server.ok("/v1/chat/completions", messages=turns, max_tokens=4, temperature=0, verbose=True)
    assert got["__verbose"]["prompt"].endswith("<|im_start|>assistant\nimport sys")
    assert not got["choices"][0]["message"]["content"].startswith("import sys")
    both = {"messages": turns, "add_generation_prompt": True, "continue_final_message": True}
    assert server.post("/v1/chat/completions", **both).status_code == 400
    twice = [*turns, {"role": "assistant", "content": "x"}]
    assert server.post("/v1/chat/completions", messages=twice).status_code == 400


ASK = {"model": "x", "max_tokens": 20, "extra_body": {"temperature": 0}, "messages": [{"role": "user", "content": "import os"}]}
ANTHROPIC_TOOL = {
    "name": "look_up",
    "description": "A word.",
    "input_schema": {"type": "object", "properties": {"word": {"enum": ["spam"]}}, "required": ["word"], "additionalProperties": False},
}


@pytest.fixture(scope="module")
def claude(server, anthropic):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


@pytest.mark.slow
def test_a_stream_is_the_message(claude, server):
    whole = claude.messages.create(**ASK)
    chat = server.ok("/v1/chat/completions", messages=ASK["messages"], max_tokens=20, temperature=0)
    assert whole.content[0].text == chat["choices"][0]["message"]["content"] and whole.stop_reason == "max_tokens"
    used = whole.usage
    assert used.output_tokens == 20 and used.input_tokens + used.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    with claude.messages.stream(**ASK) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text and final.usage.output_tokens == 20


@pytest.mark.slow
def test_counts_formats_and_stop_sequences(claude):
    asked = {"model": "x", "messages": ASK["messages"], "system": "You write Python."}
    counted = claude.messages.count_tokens(**asked).input_tokens
    used = claude.messages.create(**asked, max_tokens=1).usage
    without = claude.messages.count_tokens(model="x", messages=ASK["messages"]).input_tokens
    assert counted == used.input_tokens + used.cache_read_input_tokens > without
    free = claude.messages.create(**ASK).content[0].text
    stop = free.split()[1]
    got = claude.messages.create(**ASK, stop_sequences=[stop])
    assert got.stop_reason == "stop_sequence" and got.stop_sequence == stop and got.content[0].text == free[: free.index(stop)]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "enum": [42]}}, "required": ["n"], "additionalProperties": False}
    got = claude.messages.create(**ASK, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert json.loads(got.content[0].text) == {"n": 42}


@pytest.mark.slow
def test_tools(claude):
    got = claude.messages.create(**{**ASK, "max_tokens": 90}, tools=[ANTHROPIC_TOOL], tool_choice={"type": "tool", "name": "look_up"})
    (block,) = got.content
    assert block.type == "tool_use" and block.name == "look_up" and block.input == {"word": "spam"} and got.stop_reason == "tool_use"
    with claude.messages.stream(**{**ASK, "max_tokens": 90}, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert [b.input for b in final.content] == [{"word": "spam"}]
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "tool_use", "id": "t", "name": "look_up", "input": {"word": "spam"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "eggs"}]}, {"type": "text", "text": "go on"}]},
    ]  # fmt: skip
    assert claude.messages.create(**{**ASK, "messages": turns}, tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}).content


def test_dialects_count_alike_without_changing_lines(server):
    """Behind it nothing of the system prompt could be reused."""
    asked = {"max_tokens": 1, "messages": ASK["messages"]}
    line = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};You are a tool."
    texts = (line.format("a5145"), line.format("0"), "You are a tool.")
    counts = [server.ok("/v1/messages/count_tokens", **asked, system=text)["input_tokens"] for text in texts]
    assert counts[0] == counts[1] == counts[2]
    assert server.ok("/v1/messages/count_tokens", **asked, system="x-other: cch=1;You")["input_tokens"] > 0
    chat = {"messages": SHORT_CHAT, "max_tokens": 50, "temperature": 0}
    whole = server.ok("/v1/chat/completions", **chat)
    text = whole["choices"][0]["message"]["content"]
    for stop in (None, text[10:14], text[25:27], text[5:6]):
        more = {"stop": [stop]} if stop else {}
        openais = server.ok("/v1/chat/completions", **chat, **more)
        anthropics = server.ok("/v1/messages", **chat, **({"stop_sequences": [stop]} if stop else {}))
        assert openais["choices"][0]["message"]["content"] == "".join(part["text"] for part in anthropics["content"])
        assert openais["usage"]["completion_tokens"] == anthropics["usage"]["output_tokens"] == openais["timings"]["predicted_n"]


IMAGE = {"role": "user", "content": [{"type": "image", "source": {}}]}


@pytest.mark.parametrize("body", [{"messages": "x"}, {"messages": [IMAGE]}, {"messages": [], "tools": 3}])
def test_errors_have_its_shape(server, body):
    response = server.post("/v1/messages", max_tokens=2, **body)
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error" and len(response.json()["error"]["message"]) > 15


@pytest.mark.slow
def test_the_errors_of_anthropics_client(claude, anthropic):
    with pytest.raises(anthropic.BadRequestError, match="exceeds the available context"):
        claude.messages.create(**{**ASK, "messages": [{"role": "user", "content": json.dumps(list(range(3000)))}]})


SHORT_CHAT = [{"role": "user", "content": "write a function"}]


def counted(texts, stops):
    """What stop texts leave of the last of ``texts``, each of a token more, and how many tokens it takes to know: the earliest stop text that is
    complete with the first token that completes any."""
    for n, whole in enumerate(texts, 1):
        if found := [at for s in stops if (at := whole.find(s)) >= 0]:
            return whole[: min(found)], n, "stop"
    return texts[-1], len(texts), "length"


@pytest.mark.slow
def test_usage_is_the_tokens_of_the_text(server):
    """Stop texts are cut from the text at random: within tokens, across them, across blocks; several at once, and some that never come."""
    rng = random.Random(3)
    free = server.ok("/completion", prompt=PROMPT, n_predict=70, temperature=0, ignore_eos=True, return_tokens=True)
    text, tokens = free["content"], free["tokens"]
    assert free["tokens_predicted"] == len(tokens) == 70
    texts = [server.ok("/detokenize", tokens=tokens[:n])["content"] for n in range(1, 71)]
    for _ in range(25):
        stops = []
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(2, len(text) - 8)
            stops.append(text[at : at + rng.randint(1, 8)] if rng.random() < 0.8 else "never there")
        limit = rng.randint(1, 70)
        want, count, reason = counted(texts[:limit], stops)
        more = {"temperature": 0, "ignore_eos": True, "speculative": rng.random() < 0.7}
        body = {"prompt": PROMPT, "max_tokens": limit, "stop": stops, **more}
        got = server.ok("/v1/completions", **body)
        (choice,) = got["choices"]
        assert (choice["text"], got["usage"]["completion_tokens"], choice["finish_reason"]) == (want, count, reason), body
        chunks = [json.loads(e) for e in events(server.post("/v1/completions", **body, stream=True)) if e != b"[DONE]"]
        assert "".join(c["choices"][0]["text"] for c in chunks) == want and chunks[-1]["choices"][0]["finish_reason"] == reason
        native = server.ok("/completion", **body, return_tokens=True)
        assert native["tokens"] == tokens[:count] and native["tokens_predicted"] == count == native["timings"]["predicted_n"]


small = serving("--slots", 1, "--queue", 0, "-n", 400)  # one slot, and nothing waits for it.


@pytest.mark.slow
@pytest.mark.parametrize("who", ["openai", "anthropic"])
def test_clients_that_get_429_come_again(small, who, openai, anthropic):
    """Their own retries, as they are: 429 with Retry-After, and an answer in the end. Without retries they say what happened."""

    def rejected():
        return small.metric("pyspec:rejected_total")

    def answered():
        if who == "openai":
            return client.completions.create(model="x", prompt="a", max_tokens=2).usage.completion_tokens
        return client.messages.create(model="x", messages=SHORT_CHAT, max_tokens=2).usage.output_tokens

    made = openai.OpenAI if who == "openai" else anthropic.Anthropic
    url = f"{small.url}/v1" if who == "openai" else small.url
    with contextlib.ExitStack() as holding, ThreadPoolExecutor(1) as pool:
        holding.enter_context(sent(small, {**ask(1900), "stream": True}))
        wait_for(lambda: small.metric("llamacpp:requests_processing", "llamacpp:requests_deferred") >= 1)
        before, client = rejected(), made(base_url=url, api_key="none", max_retries=0)
        with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as raised:
            answered()
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60 and rejected() == before + 1
        client = client.with_options(max_retries=30)
        late = pool.submit(answered)  # with this client, not with the one before
        wait_for(lambda: rejected() > before + 1)
        holding.close()
        assert late.result(120) <= 2
