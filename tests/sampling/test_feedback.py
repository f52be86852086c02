"""DRY, XTC, dynamic temperature, top-n-sigma, mirostat and adaptive-p: what libllama's chain leaves, given the same draws; the same text with and without drafts."""

import ctypes
from itertools import product

import llama_cpp as L
import numpy as np
import pytest
from sampling.test_sampling import llama_array
from sessions import fails_with, loaded

from pyggml_spec.errors import SamplingError
from pyggml_spec.ggml.library import ffi
from pyggml_spec.sampling.sampler import BREAKERS, SAMPLERS, Sampler, Sampling

ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
DRY = {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_penalty_last_n": 64}
ADAPTIVE = {"samplers": ("top_k", "min_p", "temperature", "adaptive_p")}
SETTINGS = [
    *({**ALL, **DRY, "dry_multiplier": m, "dry_base": b, "dry_allowed_length": n} for m, b, n in product((0.5, 4.0), (1.0, 1.75), (0, 1, 3))),
    *({**DRY, "dry_penalty_last_n": last, "dry_sequence_breakers": words} for last, words in product((1, 7, 200), ((), ("\n",), ("é", "self")))),
    *({**ALL, "temperature": t, "dynatemp_range": r, "dynatemp_exponent": e} for t, r, e in product((0.0, 0.8), (0.5, 1.5), (0.5, 1.0, 3.0))),
    *({"top_n_sigma": n, "temperature": t} for n, t in product((0.5, 1.0, 3.0), (0.7, 1.5))),
    *({**ALL, "xtc_probability": 1.0, "xtc_threshold": t, "min_keep": k} for t, k in product((0.02, 0.1, 0.5), (0, 5))),
    *({"mirostat": v, "mirostat_tau": tau, "mirostat_eta": eta, "temperature": 1.2} for v, tau, eta in product((1, 2), (0.5, 3.0), (0.1, 1.0))),
    *({**ADAPTIVE, "adaptive_target": t, "adaptive_decay": d} for t, d in product((0.0, 0.3, 0.9), (0.0, 0.9))),
    {**DRY, "top_n_sigma": 1.5, "xtc_probability": 1.0, "dynatemp_range": 0.5, "repeat_penalty": 1.2, "logit_bias": {3: 2.0}},
    {**DRY, "adaptive_target": 0.4, "samplers": ("adaptive_p", "dry", "temperature", "xtc"), "xtc_probability": 1.0},
    {"mirostat": 2, "repeat_penalty": 1.5, "logit_bias": {3: 2.0}},
]  # fmt: skip

demo = loaded(n_ctx=512, draft_width=4)


def libllamas(s: Sampling, n: int, vocab: int) -> list:
    """The samplers of common_sampler_init in their order."""
    words = (ctypes.c_char_p * max(1, len(s.dry_sequence_breakers)))(*(word.encode() for word in s.dry_sequence_breakers))
    biases = (L.llama_logit_bias * max(1, len(s.logit_bias)))(*s.logit_bias.items())
    make = {
        "penalties": lambda: L.llama_sampler_init_penalties(n, s.repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty),
        "dry": lambda: L.llama_sampler_init_dry(
            vocab, s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n, words, len(s.dry_sequence_breakers)
        ),
        "top_n_sigma": lambda: L.llama_sampler_init_top_n_sigma(s.top_n_sigma),
        "top_k": lambda: L.llama_sampler_init_top_k(s.top_k),
        "typ_p": lambda: L.llama_sampler_init_typical(s.typical_p, s.min_keep),
        "top_p": lambda: L.llama_sampler_init_top_p(s.top_p, s.min_keep),
        "min_p": lambda: L.llama_sampler_init_min_p(s.min_p, s.min_keep),
        "xtc": lambda: L.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, s.min_keep, 1),
        "temperature": lambda: L.llama_sampler_init_temp_ext(s.temperature, s.dynatemp_range, s.dynatemp_exponent),
    }
    out = [L.llama_sampler_init_logit_bias(n, len(s.logit_bias), biases)] if s.logit_bias else []
    if s.mirostat == 1:
        return [*out, L.llama_sampler_init_temp(s.temperature), L.llama_sampler_init_mirostat(n, 1, s.mirostat_tau, s.mirostat_eta, 100)]
    if s.mirostat == 2:
        return [*out, L.llama_sampler_init_temp(s.temperature), L.llama_sampler_init_mirostat_v2(1, s.mirostat_tau, s.mirostat_eta)]
    out += [make[name]() for name in s.samplers if name != "adaptive_p"]
    return [*out, L.llama_sampler_init_adaptive_p(s.adaptive_target, s.adaptive_decay, 1)] if "adaptive_p" in s.samplers else out


class Follows(Sampler):
    """Chooses ``token`` of what is left, whatever the noise."""

    token = -1

    def pick(self, redraw):
        left = np.frombuffer(ffi.buffer(self.array.data, 12 * self.array.size), np.int32).reshape(-1, 3)[:, 0]
        return int(np.flatnonzero(left == self.token)[0])


def test_libllamas_chain_leaves_the_same_tokens_and_logits(demo):
    """62 settings, 20 tokens each. Where libllama draws by itself, ours follows its draws, so that both learn from the same."""
    assert len(SETTINGS) == 62
    tokenizer, n, rng = demo.tokenizer, demo.target.n_vocab, np.random.default_rng(7)
    vocab, changed = int(ffi.cast("uintptr_t", tokenizer.vocab)), 0
    few = rng.permutation(n)[:12]
    for values in SETTINGS:
        sampling = Sampling(**values, seed=1)
        ours, theirs = Follows(sampling, tokenizer, n), libllamas(sampling, n, vocab)
        prompt = [*tokenizer.encode("def a(self):\n    self.a(self.a)\n"), *rng.choice(few[:3], 40).tolist()]
        ours.accept_prompt(prompt)
        for part, token in product(theirs, prompt):
            L.llama_sampler_accept(part, token)
        for _ in range(20):
            logits = rng.normal(0, 1.5, n).astype(np.float32)
            logits[few] += rng.normal(5, 2, few.size).astype(np.float32)  # of which history is made
            array = llama_array(logits)
            for part in theirs:
                L.llama_sampler_apply(part, array)
            left = np.ctypeslib.as_array(ctypes.cast(array.data, ctypes.POINTER(ctypes.c_float)), (array.size, 3))
            ids, weights = left.view(np.int32)[:, 0].copy(), left[:, 1].copy()
            ours.token = int(ids[array.selected if array.selected >= 0 else rng.choice(np.flatnonzero(weights > -np.inf)[:50])])
            assert ours.choose(None, logits) == ours.token
            mine = ours.left
            order, other = np.argsort(mine["id"]), np.argsort(ids)
            assert mine["id"][order].tolist() == ids[other].tolist(), values
            assert mine["logit"][order].tobytes() == weights[other].tobytes(), values
            changed += mine["id"].size < n or mine["logit"].tobytes() != logits[mine["id"]].tobytes()
            for part in theirs:
                L.llama_sampler_accept(part, ours.token)
        ours.close()
        for part in theirs:
            L.llama_sampler_free(part)
    assert changed > 60 * 20


def test_the_chance_of_xtc_is_that_of_its_probability():
    """The random part: whether the likeliest tokens are left out, by seed and index alone."""
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1, min_p=0, xtc_probability=0.3, seed=5)
    sampler, again = Sampler(sampling, None, 4), Sampler(sampling, None, 4)
    counts, cut = np.zeros(4), 0
    for _ in range(4000):
        token = sampler.choose(None, logits)
        assert again.choose(None, logits) == token
        counts[token], cut = counts[token] + 1, cut + (sampler.left.size < 4)
    want = 4000 * (0.7 * np.exp(logits) + 0.3 * np.array([0, 0, 0.75, 0.25]))
    assert abs(cut - 1200) < 5 * (4000 * 0.21) ** 0.5 and (abs(counts - want) < 5 * want**0.5).all()
    sampler.close()
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("values", [
    DRY, {"xtc_probability": 0.5, "xtc_threshold": 0.05}, {"dynatemp_range": 0.7}, {"top_n_sigma": 1.0}, {"mirostat": 1}, {"mirostat": 2, "mirostat_tau": 3.0},
    {**ADAPTIVE, "adaptive_target": 0.6}, {**DRY, "xtc_probability": 0.5, "json_schema": '{"type": "array", "items": {"type": "integer"}}'},
])  # fmt: skip
def test_text_of_a_seed_is_the_same_with_and_without_drafts(demo, values):
    sampling = Sampling(**values, seed=3)
    text, stats = demo.generate("import os\n\n\ndef walk(path):\n", 40, sampling=sampling)
    assert text == demo.generate("import os\n\n\ndef walk(path):\n", 40, sampling=sampling, mode="reference")[0]
    assert stats.drafted > stats.matched and stats.sampling != Sampling(seed=3).describe()


def test_how_many_logits_each_one_needs():
    few, whole = Sampling().candidates(), None
    for values, count in (
        ({"xtc_probability": 0.5}, few), ({"dynatemp_range": 1.0}, few), ({"top_n_sigma": 1.0}, whole), ({"mirostat": 2}, whole), ({**DRY, "dry_penalty_last_n": 32}, 96),
        ({"xtc_probability": 0.5, "samplers": ("xtc", "top_k")}, whole), ({**ADAPTIVE, "adaptive_target": 0.5}, few), ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, few),
    ):  # fmt: skip
        assert Sampling(**values).candidates() == count, values
    assert not Sampling(temperature=0, xtc_probability=0.1).is_argmax and Sampling(temperature=0, mirostat=2).is_argmax
    assert not Sampling(temperature=0, **DRY).is_greedy and Sampling(temperature=0, **DRY).is_argmax
    assert Sampling().samplers == SAMPLERS and Sampling().dry_sequence_breakers == BREAKERS
    for values, words in (
        ({"dry_base": 0.5}, "dry_base is 0.5"), ({"mirostat": 3}, "mirostat is 3"), ({"xtc_probability": 2}, "xtc_probability is 2"),
        ({"dry_sequence_breakers": ("",)}, "1 to 40 bytes"), ({"dry_sequence_breakers": ("x" * 41,)}, "1 to 40 bytes"),
    ):  # fmt: skip
        fails_with(SamplingError, words, Sampling, **values)
    fails_with(SamplingError, "dry needs a tokenizer", Sampler, Sampling(**DRY), None, 10)
