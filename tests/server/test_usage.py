"""Usage is the tokens of the text, for every stop text and every limit, at every endpoint; clients that are turned away come again by themselves."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from server.running import Running, wait_for
from server.test_queue import ask, sent

PROMPT = "def quicksort(items):\n"
CHAT = [{"role": "user", "content": "write a function"}]


def counted(server, tokens, stops):
    """The text that stop texts leave of ``tokens``, and how many of these it takes to know: the earliest stop text that is complete with the first
    token that completes any."""
    for n in range(1, len(tokens) + 1):
        whole = server.ok("/detokenize", tokens=tokens[:n])["content"]
        if found := [at for s in stops if (at := whole.find(s)) >= 0]:
            return whole[: min(found)], n, "stop"
    return server.ok("/detokenize", tokens=tokens)["content"], len(tokens), "length"


def test_usage_is_the_tokens_of_the_text(server):
    """Stop texts are cut from the text at random: within tokens, across them, across blocks; several at once, and some that never come."""
    rng = random.Random(3)
    free = server.ok("/completion", prompt=PROMPT, n_predict=70, temperature=0, ignore_eos=True, return_tokens=True)
    text, tokens = free["content"], free["tokens"]
    assert free["tokens_predicted"] == len(tokens) == 70
    for _ in range(25):
        stops = []
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(2, len(text) - 8)
            stops.append(text[at : at + rng.randint(1, 8)] if rng.random() < 0.8 else "never there")
        limit = rng.randint(1, 70)
        want, count, reason = counted(server, tokens[:limit], stops)
        body = {
            "prompt": PROMPT,
            "max_tokens": limit,
            "temperature": 0,
            "ignore_eos": True,
            "stop": stops,
            "speculative": rng.random() < 0.7,
        }
        got = server.ok("/v1/completions", **body)
        assert (got["choices"][0]["text"], got["usage"]["completion_tokens"], got["choices"][0]["finish_reason"]) == (
            want,
            count,
            reason,
        ), body
        native = server.ok("/completion", **body, return_tokens=True)
        assert native["tokens"] == tokens[:count] and native["tokens_predicted"] == count == native["timings"]["predicted_n"]


def test_every_dialect_counts_alike(server):
    chat = {"messages": CHAT, "max_tokens": 50, "temperature": 0}
    whole = server.ok("/v1/chat/completions", **chat)
    text = whole["choices"][0]["message"]["content"]
    for stop in (None, text[10:14], text[25:27], text[5:6]):
        more = {"stop": [stop]} if stop else {}
        openais = server.ok("/v1/chat/completions", **chat, **more)
        anthropics = server.ok("/v1/messages", **chat, **({"stop_sequences": [stop]} if stop else {}))
        assert openais["choices"][0]["message"]["content"] == "".join(part["text"] for part in anthropics["content"])
        assert openais["usage"]["completion_tokens"] == anthropics["usage"]["output_tokens"] == openais["timings"]["predicted_n"]


@pytest.fixture(scope="module")
def small():
    """One slot, and nothing waits for it."""
    with Running("--slots", 1, "--queue", 0, "-n", 400) as running:
        yield running


@pytest.mark.parametrize("who", ["openai", "anthropic"])
def test_clients_that_get_429_come_again(small, who, openai, anthropic):
    """Their own retries, as they are: 429 with Retry-After, and an answer in the end. Without retries they say what happened."""

    def rejected():
        return small.metric("pyspec:rejected_total")

    def answered():
        if who == "openai":
            return client.completions.create(model="x", prompt="a", max_tokens=2).usage.completion_tokens
        return client.messages.create(model="x", messages=CHAT, max_tokens=2).usage.output_tokens

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
        late = pool.submit(answered)
        wait_for(lambda: rejected() > before + 1)
        holding.close()
        assert late.result(120) <= 2
