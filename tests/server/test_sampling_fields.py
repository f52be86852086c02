"""How tokens are chosen, of requests that are alike and of those that only look so."""

from types import SimpleNamespace

from pyggml_spec.sampling.sampler import Sampling
from pyggml_spec.server import sampling
from pyggml_spec.server.bodies import Generation


def test_what_requests_ask_for_is_made_once_and_mixed_up_never(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_CACHED", 8)
    limits, tokenizer = sampling.Limits(Sampling(top_k=7), None, 64), SimpleNamespace(n_vocab=9)

    def asked(**body):
        return sampling.sampling(Generation(**body), limits, tokenizer, None, None)

    assert asked(temperature=0) is asked(temperature=0) and asked(temperature=0).top_k == 7
    told = [asked(temperature=1).describe(), asked(temperature=1.0).describe()]
    assert told == [Sampling(temperature=t, top_k=7).describe() for t in (1, 1.0)]
    assert asked(seed=3).seed == 3 and asked(seed=4).seed == 4 and asked(seed=-1).seed is None
    assert asked(logit_bias={"3": 1}).logit_bias == {3: 1.0} and not asked().logit_bias
    assert sampling.sampling(Generation(), limits, tokenizer, None, ("regex", "a+")).regex == "a+" and asked().regex is None
    for seed in range(100):
        assert asked(seed=seed).seed == seed and len(limits.cached) <= 8
