"""/v1/completions: prompts with their log probabilities (lm-eval's loglikelihood), the best of several sequences, and text before a suffix."""

import json

import numpy as np
import pytest
from server.running import events
from sessions import fails_with, loaded

from pyggml_spec.errors import SamplingError
from pyggml_spec.sampling.sampler import Sampling

TEXT = "import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        print(name)\n"
demo = loaded(kernels="ggml", n_ctx=512, draft_width=4)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_prompt_is_scored_by_the_models_log_probabilities(demo, slots):
    """In blocks beside another sequence that decodes; what follows is what would follow without, and a cached prefix is not used."""
    ids = demo.tokenizer.encode(TEXT)
    demo.runner.reset(drafting=False)
    logits = demo.runner.logits(ids).astype(np.float64)
    want = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[np.arange(len(ids) - 1), ids[1:]]
    free, other = (demo.generate(*asked)[0] for asked in ((ids, 12), ("def f(x):\n", 60)))
    with demo.concurrent(slots, 512, prefix_memory=64 << 20) as server:
        beside = server.submit("def f(x):\n", 60) if slots > 1 else None
        for prompt in (ids, ids, ids[:1]):
            handle = server.submit(prompt, 12, sampling=Sampling(temperature=0, logprobs=2), scored=True)
            text, stats = handle.result()
            told = handle.prompt_logprobs
            assert [p.token for p in told] == prompt[1:] and stats.reused_tokens == 0
            assert np.allclose([p.logprob for p in told], want[: len(told)], atol=2e-3)  # other shapes of steps
            assert all(len(p.top) == 2 and p.top[0][1] >= p.logprob for p in told)
            assert prompt is not ids or text == free
        handle = server.submit(ids, 0, sampling=Sampling(temperature=0, logprobs=0), scored=True)
        assert handle.result()[1].emitted == 0 and len(handle.prompt_logprobs) == len(ids) - 1
        fails_with(SamplingError, "with logprobs", server.submit, ids, 1, scored=True)
        if beside is not None:
            assert beside.result()[0] == other


def test_echo_with_log_probabilities_as_lm_eval_reads_them(server):
    ids = server.ok("/tokenize", content=TEXT)["tokens"]
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1}
    two = server.ok("/v1/completions", prompt=[ids, ids[:5]], **asked)["choices"]
    assert [c["index"] for c in two] == [0, 1]
    for choice, prompt in zip(two, (ids, ids[:5])):
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(prompt) + 1
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None and max(told["token_logprobs"][1:]) < 0
        assert all(max(top.values()) >= p for p, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:]))
        assert "".join(told["tokens"]) == choice["text"] and told["text_offset"][2] == len("".join(told["tokens"][:2]))
    assert two[0]["text"].startswith(TEXT)
    alone = server.ok("/v1/completions", prompt=TEXT, **{**asked, "max_tokens": 0})["choices"][0]
    assert alone["text"] == TEXT and alone["logprobs"]["token_logprobs"][1:] == pytest.approx(
        two[0]["logprobs"]["token_logprobs"][1:-1], abs=2e-3
    )
    plain = server.ok("/v1/completions", prompt=TEXT, max_tokens=3, temperature=0, echo=True)["choices"][0]
    assert plain["text"].startswith(TEXT) and len(plain["text"]) > len(TEXT) and plain["logprobs"] is None
    chunks = [json.loads(line)["choices"] for line in events(server.post("/v1/completions", prompt=TEXT, stream=True, **asked))[:-1]]
    told = [c for choices in chunks for c in choices]
    assert "".join(c["text"] for c in told) == two[0]["text"]
    assert [t for c in told if c["logprobs"] for t in c["logprobs"]["tokens"]] == two[0]["logprobs"]["tokens"]


def test_the_best_of_several(server):
    asked = {"prompt": TEXT, "max_tokens": 8, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    every = server.ok("/v1/completions", **asked, n=4, logprobs=1)["choices"]
    means = [np.mean(c["logprobs"]["token_logprobs"]) for c in every]
    best = server.ok("/v1/completions", **asked, n=2, best_of=4)
    assert [c["text"] for c in best["choices"]] == [every[i]["text"] for i in np.argsort(means)[::-1][:2]]
    assert [c["index"] for c in best["choices"]] == [0, 1] and best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 32 and len({c["text"] for c in every}) > 1
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        assert server.post("/v1/completions", **asked, **wrong).status_code == 400
    refused = server.post("/v1/completions", **asked, suffix="\n")
    assert refused.status_code == 501 and "fills nothing in" in refused.text
