"""Sampling: llama.cpp's results for the same logits, the target's distribution under speculation, the same text for the same seed.

The distribution tests are seeded, so they give the same result every time. With another seed each would fail with probability ALPHA.
"""

import ctypes
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import llama_cpp as L
import numpy as np
import pytest
from sessions import fails_with, loaded

import pyggml_spec as ps
from pyggml_spec.cache.slots import Cursor
from pyggml_spec.engine.batch import FIRST, GraphKey, Prefill, StepOutput
from pyggml_spec.engine.engine import generate
from pyggml_spec.engine.options import MOST_CANDIDATES
from pyggml_spec.engine.sequence import GenerationOptions
from pyggml_spec.engine.stats import Stats
from pyggml_spec.errors import EngineError, SamplingError
from pyggml_spec.ggml.cores import ThreadCounts
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.sampling.recommended import recommended
from pyggml_spec.sampling.sampler import SAMPLERS, TOKEN_DATA, Sampler, Sampling, TokenLogprob
from pyggml_spec.tools.reference import LlamaReference

ALPHA = 1e-6
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
CHAINS = {
    "default": {},
    "temperature": {**OFF, "temperature": 0.7},
    "hot": {**OFF, "temperature": 1.8},
    "top_k": {**OFF, "top_k": 3},
    "top_p": {**OFF, "top_p": 0.8},
    "min_p": {**OFF, "min_p": 0.15},
    "typical": {**OFF, "typical_p": 0.7},
    "bias": {**OFF, "logit_bias": {0: 1.5, 1: -math.inf, 2: -0.7}},
    "repeat": {**OFF, "repeat_penalty": 1.6, "repeat_last_n": 2},
    "presence and frequency": {**OFF, "presence_penalty": 0.8, "frequency_penalty": 0.5, "repeat_last_n": 2},
    "temperature first": {"temperature": 1.4, "top_p": 0.85, "samplers": ("temperature", "top_p", "top_k"), "top_k": 4},
    "everything": {
        "typical_p": 0.9, "repeat_penalty": 1.3, "presence_penalty": 0.2, "repeat_last_n": 2, "logit_bias": {3: 0.5}, "min_keep": 2,
    },
}  # fmt: skip


def beyond(distance: float, freedom: int) -> float:
    """How likely chance takes a chi-square of so many degrees of freedom further than that."""
    from scipy.special import gammaincc  # here: all of scipy.stats takes a second

    return float(gammaincc(freedom / 2, distance / 2))


def probabilities(s: Sampling, logits, recent) -> np.ndarray:
    """The distribution that a chain stands for, from its definition, in double precision."""
    x = np.array(logits, np.float64)
    alive = np.ones(x.size, bool)

    def p():
        weights = np.where(alive, np.exp(x - x[alive].max()), 0)
        return weights / weights.sum()

    def keep(order, count):
        alive[:] &= np.isin(np.arange(x.size), order[: max(count, s.min_keep, 1)])

    for token, bias in s.logit_bias.items():
        x[token] += bias
    for name in s.samplers:
        ranked = [i for i in np.argsort(-x) if alive[i]]
        if name == "penalties":
            for token in set(recent[-s.repeat_last_n :]):
                x[token] = x[token] / s.repeat_penalty if x[token] > 0 else x[token] * s.repeat_penalty
                x[token] -= s.presence_penalty + s.frequency_penalty * recent[-s.repeat_last_n :].count(token)
        elif name == "top_k" and s.top_k:
            alive[:] &= np.isin(np.arange(x.size), ranked[: s.top_k])
        elif name == "top_p" and s.top_p < 1:
            keep(ranked, int(np.searchsorted(np.cumsum(p()[ranked]), s.top_p)) + 1)
        elif name == "min_p" and s.min_p:
            keep(ranked, int((p()[ranked] >= s.min_p * p().max()).sum()))
        elif name == "typ_p" and s.typical_p < 1:
            information = -np.log(np.where(alive, p(), 1))
            typical = sorted(ranked, key=lambda i: abs(information[i] - (p() * information).sum()))
            keep(typical, int(np.searchsorted(np.cumsum(p()[typical]), s.typical_p, "right")) + 1)
        elif name == "temperature":
            x /= s.temperature
    return p()


class TableTarget:
    """An engine whose logits after a token are that token's row of a table: the loop cannot tell it from a model."""

    def __init__(self, table):
        self.table, self.cursor, self._rows = table, Cursor(1 << 30), None
        self.graphs, self.state = SimpleNamespace(closed=False, waited_us=0), SimpleNamespace(catch_up_us=0)
        self.options = SimpleNamespace(n_ctx=1 << 30, width=4, chunk=512)
        self.target, self.drafter, self.masked, self.unmasked = (
            SimpleNamespace(n_vocab=len(table), weights=SimpleNamespace(adapters=None)),
            None,
            False,
            "",
        )
        self.threads, self.rows_alike = ThreadCounts(()), True
        self.backend = SimpleNamespace(device=SimpleNamespace(kind="cpu"))

    @property
    def slots(self):
        return [self]

    def forward(self, batch, meanwhile=None):
        work = batch.items
        prompt = isinstance(work[0], Prefill)
        tokens = np.array(work[0].tokens[-1:] if prompt else [self.cursor.last_token, *work[0].drafts])
        self._rows = self.table[tokens]
        if prompt:
            self.cursor.advance(len(work[0].tokens), 0)
        times = SimpleNamespace(upload=0, compute=0, read=0)
        return {0: StepOutput(tokens, self._rows.argmax(axis=1), True, True, times)}

    def verify_key(self, width, deferred=True):
        return GraphKey("verify", width, 0, FIRST)

    def candidates(self, row, slot):
        return None, self._rows[row]

    def commit(self, batch, accepted):
        for tokens in accepted.values():
            self.cursor.advance(0 if isinstance(batch.items[0], Prefill) else len(tokens), tokens[-1])

    def prepare(self, *more):
        pass

    read_candidates = abandon = prepare

    def memory(self):
        return {}

    def counts(self):
        return defaultdict(int)


class AsksAgain(Sampler):
    """A wrong acceptance rule: what is not the draft is drawn once more. Accepting with probability p / q after a greedy draft is as wrong."""

    def choose(self, ids, logits, *more):
        first = super().choose(ids, logits, *more)
        return first if first == int(logits.argmax()) else super().choose(ids, logits, *more)


@pytest.fixture(scope="module")
def table():
    return np.random.default_rng(5).normal(0, 1.3, (7, 7)).astype(np.float32)


demo = loaded(n_ctx=512, draft_width=4)
llamas = loaded(kernels="ggml", n_ctx=512, draft_width=4)


def most_likely(table, history, n):
    out = [history[-1]]
    for _ in range(n):
        out.append(int(table[out[-1]].argmax()))
    return out[1:]


def p_value(table, sampling, make=Sampler, count=9000) -> tuple[float, Stats]:
    """Probability of counts at least this far from the chain's distribution, given the two tokens before; and what the run did."""
    sampler, stats = make(sampling, None, len(table)), Stats()
    options = GenerationOptions(count, width=4, sampler=sampler, drafts=partial(most_likely, table))
    tokens = [3, 4] + [t for block in generate(TableTarget(table), [3, 4], options, stats) for t in block]
    sampler.close()
    seen = {}
    for a, b, c in zip(tokens, tokens[1:], tokens[2:]):
        seen.setdefault((a, b), np.zeros(len(table)))[c] += 1
    distance = freedom = 0
    for context, counts in seen.items():
        if counts.sum() < 10:
            continue
        expected = counts.sum() * probabilities(sampling, table[context[1]], list(context))
        assert not counts[expected == 0].any(), f"a token that {sampling.describe()} excludes came out"
        order = np.argsort(expected)
        rare = order[np.cumsum(expected[order]) < 5]  # together one cell, with the next larger one: chi-square needs 5 expected in each
        cells = order[rare.size :]
        o, e = counts[cells], expected[cells]
        o[0], e[0] = o[0] + counts[rare].sum(), e[0] + expected[rare].sum()
        distance, freedom = distance + ((o - e) ** 2 / e).sum(), freedom + len(cells) - 1
    return beyond(distance, freedom), stats


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_speculation_keeps_the_chains_distribution(table, chain):
    """Guards against soft acceptance of greedy drafts, and against penalties that see tokens which were rejected or not yet emitted."""
    p, stats = p_value(table, Sampling(**CHAINS[chain], seed=11))
    assert p > ALPHA and 0 < stats.matched < stats.drafted


@pytest.mark.slow
def test_the_distribution_test_notices_a_wrong_acceptance_rule(table):
    assert p_value(table, Sampling(**OFF, seed=11), AsksAgain)[0] < ALPHA


DRAWS = 200_000  # finds 1 % of probability that is moved between two tokens of more than 5 %
TWENTY = [
    *({**OFF, "temperature": t, **cut} for t in (0.3, 0.6, 0.8, 1.0) for cut in ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1})),
    *(CHAINS[name] for name in ("default", "typical", "bias", "temperature first")),
]  # fmt: skip


def left_by(sampling: Sampling, logits: np.ndarray) -> np.ndarray:
    """What the chain leaves, as ``pgs_draw`` takes it."""
    sampler = Sampler(sampling, None, logits.size)
    sampler.choose(None, logits)
    left = sampler.left.copy()
    sampler.close()
    return left


def draws_of(left: np.ndarray, seeds, index: int) -> np.ndarray:
    data = ffi.from_buffer("pgs_candidate[]", left)
    return left["id"][[lib.pgs_draw(data, left.size, seed, index, 0) for seed in seeds]]


def unlikely(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value; cells of less than 5 count together."""
    assert not counts[expected == 0].any()
    rare = expected < 5
    o, e = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    o, e = o[e > 0], e[e > 0]
    return beyond((((o - e) ** 2) / e).sum(), o.size - 1)


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(TWENTY)))
def test_two_drawn_tokens_have_the_chains_joint_distribution(table, at):
    """The first token's distribution, and the second one's given the first: noise of one index says nothing about that of the next."""
    sampling = Sampling(**TWENTY[at], seed=1)
    chances = [probabilities(sampling, row, []) for row in table]
    first = draws_of(left_by(sampling, table[3]), range(DRAWS), 0)
    joint = np.zeros(table.shape)
    for token in set(first.tolist()):
        seeds = np.flatnonzero(first == token).tolist()
        joint[token] = np.bincount(draws_of(left_by(sampling, table[token]), seeds, 1), minlength=len(table))
    p = [unlikely(joint.sum(axis=1), DRAWS * chances[3])]
    p.append(unlikely(joint.ravel(), DRAWS * (chances[3][:, None] * np.array(chances)).ravel()))
    assert min(p) > ALPHA / len(TWENTY)
    low, high = np.argsort(chances[3])[-2:]
    if chances[3][low] > 0.05:
        wrong = chances[3].copy()
        wrong[[low, high]] += (0.01, -0.01)
        assert unlikely(joint.sum(axis=1), DRAWS * wrong) < ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0])
def test_a_drafter_with_the_same_noise_agrees_more_often_than_its_argmax(temperature):
    """At least (1 - d) / (1 + d), d the total variation (Daliri, Musco, Suresh 2024), where the argmax agrees with probability p(argmax q)."""
    rng = np.random.default_rng(8)
    target = rng.normal(0, 2, 60).astype(np.float32)
    chains = [x.astype(np.float32) / temperature for x in (target, target + rng.normal(0, 0.7, 60))]
    one, other = (np.array([*zip(range(60), x, x)], TOKEN_DATA) for x in chains)
    chances, drafted = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in chains)
    seeds = range(40_000)
    chosen, drafts = draws_of(one, seeds, 5), draws_of(other, seeds, 5)
    distance = np.abs(chances - drafted).sum() / 2
    agreed, noise = (chosen == drafts).mean(), 4 / 200  # four standard deviations
    assert (1 - distance) / (1 + distance) - noise < agreed < 1 - distance + noise
    assert temperature < 0.5 or agreed > chances[drafted.argmax()] + 0.05
    assert (draws_of(one, seeds, 6) == draws_of(other, seeds, 7)).mean() < (chances * drafted).sum() + noise


class Letters:
    """A tokenizer whose tokens are the letters a to f and an end token."""

    n_vocab, path = 7, Path("letters")

    def pieces(self):
        return [*(bytes([c]) for c in b"abcdef"), b"<end>"]

    def is_end(self, token):
        return token == 6

    def control_tokens(self):
        return {"<end>": 6}

    def encode(self, text, special=False, bos=True):
        return [c - ord("a") for c in (text if isinstance(text, bytes) else text.encode()) if ord("a") <= c <= ord("f")]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_speculation_keeps_the_distribution_under_a_grammar(table, temperature):
    """Guards against a grammar that moves by rejected drafts, and against masks of another row."""
    sampling = Sampling(**{**OFF, "temperature": temperature}, seed=17, grammar='root ::= ([a-c] [b-f])* "!"')
    sampler, allowed = Sampler(sampling, Letters(), 7), [{0, 1, 2}, {1, 2, 3, 4, 5}]

    # drafts are what the grammar leaves, or a token that it forbids: both kinds occur
    stats, options = Stats(), GenerationOptions(9000, width=4, sampler=sampler, drafts=partial(most_likely, table))
    tokens = [t for block in generate(TableTarget(table), [3, 4], options, stats) for t in block]
    sampler.close()
    assert 0 < stats.matched < stats.drafted and len(tokens) == 9000
    distance = freedom = 0
    for parity in (0, 1):
        choices = sorted(allowed[parity])
        for before in range(7):
            counts = np.bincount([t for i, t in enumerate(tokens) if i and i % 2 == parity and tokens[i - 1] == before], minlength=7)
            assert set(counts.nonzero()[0]) <= allowed[parity]
            if counts.sum() < 50:
                continue
            weights = np.exp(table[before].astype(float) / temperature)[choices]
            expected = counts.sum() * weights / weights.sum()
            distance, freedom = distance + ((counts[choices] - expected) ** 2 / expected).sum(), freedom + len(choices) - 1
    assert freedom > 10 and beyond(distance, freedom) > ALPHA


def llama_chain(s: Sampling, n_vocab, vocab=None):
    """The chain that common_sampler_init makes, without its last draw."""
    chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
    entries = (L.llama_logit_bias * max(1, len(s.logit_bias)))(*s.logit_bias.items())
    penalties = s.repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
    makers = {
        "penalties": lambda: L.llama_sampler_init_penalties(n_vocab, *penalties),
        "top_k": lambda: L.llama_sampler_init_top_k(s.top_k),
        "typ_p": lambda: L.llama_sampler_init_typical(s.typical_p, s.min_keep),
        "top_p": lambda: L.llama_sampler_init_top_p(s.top_p, s.min_keep),
        "min_p": lambda: L.llama_sampler_init_min_p(s.min_p, s.min_keep),
        "temperature": lambda: L.llama_sampler_init_temp_ext(s.temperature, 0.0, 1.0),
        **dict.fromkeys(("dry", "top_n_sigma", "xtc"), lambda: L.llama_sampler_init_top_k(0)),  # in test_feedback.py
        "infill": lambda: L.llama_sampler_init_infill(vocab),
    }
    parts = [L.llama_sampler_init_logit_bias(n_vocab, len(s.logit_bias), entries)] if s.logit_bias else []
    for part in [*parts, *(makers[name]() for name in s.samplers)]:
        L.llama_sampler_chain_add(chain, part)
    return chain


def uniform(seed: int, index: int, tokens: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon et al. 2011) in numpy: key (seed, 0), counter (index, 0, token / 4, 0), lane token mod 4."""
    low = np.uint64(0xFFFFFFFF)
    c = [
        np.full(tokens.size, index, np.uint64),
        np.zeros(tokens.size, np.uint64),
        tokens.astype(np.uint64) // 4,
        np.zeros(tokens.size, np.uint64),
    ]
    key = [seed, 0]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> 32) ^ c[1] ^ np.uint64(key[0]), b & low, (a >> 32) ^ c[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (np.array(c)[tokens % 4, np.arange(tokens.size)] + 0.5) / 2.0**32


def llama_array(logits):
    """All tokens with their logits, as libllama's samplers take them; the array keeps its memory."""
    data = np.zeros(logits.size, TOKEN_DATA)
    data["id"], data["logit"] = np.arange(logits.size), logits
    return L.llama_token_data_array((L.llama_token_data * logits.size).from_buffer(data), logits.size, -1, False)


def llama_choice(chain, logits, seed, index):
    """What libllama's chain leaves, and the argmax of log-probability plus Gumbel noise."""
    array = llama_array(logits)
    L.llama_sampler_apply(chain, array)
    left = np.ctypeslib.as_array(ctypes.cast(array.data, ctypes.POINTER(ctypes.c_float)), (array.size, 3))
    ids, logits = left.view(np.int32)[:, 0].copy(), left[:, 1].astype(np.float64)
    token = int(ids[np.argmax(logits - np.log(-np.log(uniform(seed, index, ids))))])
    L.llama_sampler_accept(chain, token)
    return token


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_same_candidates_as_llama_cpps_chain(chain):
    """Order, parameters and history, over a vocabulary that takes libllama's large-array paths; noise by another implementation."""
    n, rng = 3000, np.random.default_rng(1)
    values = {**CHAINS[chain], "repeat_last_n": 16}
    sampling = Sampling(**values, seed=42)
    sampler, oracle = Sampler(sampling, None, n), llama_chain(sampling, n)
    prompt = rng.integers(0, n, 30).tolist()
    sampler.accept_prompt(prompt)
    for token in prompt:
        L.llama_sampler_accept(oracle, token)
    for i in range(25):
        logits = rng.normal(0, 3, n).astype(np.float32)
        assert sampler.choose(None, logits) == llama_choice(oracle, logits, 42, i)
    sampler.close()
    L.llama_sampler_free(oracle)


FILLING = ("top_k", "top_p", "infill")  # as llama.vim and llama.vscode ask for it


@pytest.mark.slow
def test_filling_in_chooses_as_llama_cpp_does(demo):
    tokenizer, rng, n = demo.tokenizer, np.random.default_rng(4), demo.tokenizer.n_vocab
    sampling, ends = Sampling(samplers=FILLING, seed=3), 0
    few, count, ours = Sampler(sampling, tokenizer, n), sampling.candidates(), Sampler(sampling, tokenizer, n)
    oracle = llama_chain(sampling, n, int(ffi.cast("uintptr_t", tokenizer.vocab)))
    for i in range(60):
        logits = rng.normal(0, 1, n).astype(np.float32)
        logits[rng.permutation(n)[:4]] += 8
        logits[[t for t in range(n) if tokenizer.is_end(t)]] += 3 + i % 4
        best = np.argpartition(-logits, count)[:count].astype(np.int32)
        token = llama_choice(oracle, logits, 3, i)
        assert ours.choose(None, logits) == few.choose(best, logits[best]) == token
        ends += tokenizer.is_end(token)
    assert 5 < ends < 55 and not Sampling(temperature=0, samplers=(*FILLING, "temperature")).is_greedy  # an end may come before the largest
    for sampler in (few, ours):
        sampler.close()
    L.llama_sampler_free(oracle)
    for values in ({}, {"temperature": 0, "samplers": (*FILLING, "temperature")}):
        sampling = Sampling(**{"samplers": FILLING, "seed": 5, **values})
        text = demo.generate("def total(items):\n    ", 40, sampling=sampling)[0]
        assert text == demo.generate("def total(items):\n    ", 40, mode="reference", sampling=sampling)[0]


def test_biases_and_filling_in(demo):
    for values in ({"top_k": 0}, {"top_k": 257}, {"samplers": ("infill", "top_k")}, {"samplers": ("top_p", "infill")}):
        fails_with(SamplingError, "it needs a top_k from 1 to 256 before it", Sampling, **{"samplers": FILLING, **values})
    fails_with(SamplingError, "a constraint may not", Sampling, samplers=FILLING, grammar='root ::= "a"')
    sampling, n = Sampling(samplers=FILLING), demo.tokenizer.n_vocab
    with pytest.raises(SamplingError, match="a token of 513 bytes"):
        Sampler(sampling, SimpleNamespace(vocab=demo.tokenizer.vocab, longest_piece=513), n)
    fails_with(SamplingError, "needs a tokenizer", Sampler, sampling, None, n)
    fails_with(SamplingError, "4096", lambda: demo.generate("a", 4, sampling=Sampling(logit_bias={4096: 1.0})))
    assert demo.generate("a", 4)[1].emitted == 4
    floats = {"temp": 0.6000000238418579, "top_p": 0.949999988079071, "min_p": 0.0, "penalty_repeat": 1.0499999523162842}
    keys = {**floats, "top_k": 20, "penalty_last_n": 64}
    values, refused = recommended({f"general.sampling.{key}": value for key, value in keys.items()} | {"general.name": "x"})
    want = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repeat_penalty": 1.05, "repeat_last_n": 64}
    assert values == want and not refused and recommended({"general.name": "x"}) == ({}, [])


@pytest.mark.parametrize(
    "order", [SAMPLERS, ("temperature", "top_k", "top_p"), ("min_p", "top_k", "penalties", "temperature"), ("top_k", "typ_p")]
)
def test_the_largest_logits_are_enough(order):
    """What the device sends instead of whole rows must lead to the same tokens, penalties and forbidden tokens included."""
    n, rng = 2000, np.random.default_rng(2)
    sampling = Sampling(samplers=order, typical_p=0.9, repeat_penalty=1.5, repeat_last_n=40, logit_bias={7: -math.inf, 9: -2.0}, seed=5)
    count = sampling.candidates()
    assert 40 <= count < n and count % 32 == 0
    few, all_of_them = Sampler(sampling, None, n), Sampler(sampling, None, n)
    for _ in range(200):
        logits = rng.normal(0, 1, n).astype(np.float32) + 4 * (np.arange(n) < 60)  # the same few are always the largest, and penalised
        best = rng.permutation(np.argpartition(-logits, count)[:count]).astype(np.int32)
        assert few.choose(best, logits[best]) == all_of_them.choose(None, logits)
    few.close()
    all_of_them.close()


def test_rows_that_are_asked_for_or_empty():
    for values in (
        {"top_k": 0}, {"logprobs": 0}, {"grammar": "root ::= [a-z]+", "top_k": 0}, {"logit_bias": {1: 0.1}}, {"repeat_penalty": 0.9},
        {"samplers": ("top_p", "top_k")}, {"top_k": MOST_CANDIDATES + 1}, {"temperature": 0, "typical_p": 0.5, "top_k": 0},
    ):  # fmt: skip
        assert Sampling(**values).candidates() is None, values
    assert Sampling(temperature=0, top_k=0, repeat_penalty=1.1).candidates() == 96
    assert Sampling(grammar="root ::= [a-z]+").candidates() == 64
    assert Sampling(grammar="root ::= [a-z]+", temperature=0, top_k=0).candidates() == 0, "the device is asked for the likeliest one"
    sampler = Sampler(Sampling(seed=1, logit_bias=dict.fromkeys(range(9), -math.inf)), None, 9)
    fails_with(EngineError, "leaves no token", lambda: sampler.choose(None, np.zeros(9, np.float32)))
    sampler.close()


@pytest.mark.slow
def test_the_same_text_as_llama_cpps_logits_chain_and_the_same_noise(demo, llamas):
    """All together: plain decoding here, llama_decode, libllama's chain and numpy's noise there."""
    sampling = Sampling(seed=7, repeat_penalty=1.1)
    ids = demo.tokenizer.encode("class Stack:\n    def ")
    ours = [t for event in llamas.steps(ids, 40, mode="plain", sampling=sampling) for t in event.tokens]
    oracle, theirs = LlamaReference(demo.target.file.path, demo.backend.device, 512, 512, 1), []
    chain = llama_chain(sampling, demo.target.n_vocab)
    for token in ids:
        L.llama_sampler_accept(chain, token)
    feed = ids
    while len(theirs) < 40:
        theirs.append(llama_choice(chain, oracle.logits(feed)[-1], 7, len(theirs)))
        feed = theirs[-1:]
    L.llama_sampler_free(chain)
    oracle.close()
    assert ours == theirs
    greedy, _ = demo.generate("def f(", 60)
    for sampling in (Sampling(temperature=0), Sampling(temperature=0, logprobs=0), Sampling(temperature=0, logit_bias={1: 0.0}, top_k=0)):
        text, stats = demo.generate("def f(", 60, sampling=sampling)
        assert text == greedy and stats.matched > 0 and stats.seed is None
    text, stats = demo.generate("def f(", 40, sampling=Sampling(temperature=1.5))
    assert demo.generate("def f(", 40, sampling=Sampling(temperature=1.5, seed=stats.seed))[0] == text
    list(demo.steps("def f(", 20))
    assert demo.runner.slots[0].candidates == 0 and demo._sampler(None, False) is None
    ids, sampling = demo.tokenizer.encode("def f(a, b):\n"), Sampling(seed=1, temperature=1.3, top_k=5, logprobs=3)
    events = list(demo.steps(ids, 24, sampling=sampling))
    tokens, told = [t for event in events for t in event.tokens], [p for event in events for p in event.logprobs]
    assert [p.token for p in told] == tokens
    demo.runner.reset(drafting=False)
    logits = demo.runner.logits([*ids, *tokens]).astype(np.float64)[len(ids) - 1 : -1]
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for p, row in zip(told, want):
        assert p.logprob == pytest.approx(row[p.token], abs=2e-3)  # other batch shapes
        assert [t for t, _ in p.top] == np.argsort(-row)[:3].tolist() and p.top[0][1] >= p.logprob


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["default", "hot", "typical", "presence and frequency", "everything"])
def test_speculative_text_equals_reference_text_for_the_same_seed(demo, chain):
    sampling = Sampling(**CHAINS[chain], seed=3)
    text, stats = demo.generate("import os\n\n\ndef walk(path):\n", 40, sampling=sampling)
    again, _ = demo.generate("import os\n\n\ndef walk(path):\n", 40, sampling=sampling)
    plain, plain_stats = demo.generate("import os\n\n\ndef walk(path):\n", 40, sampling=sampling, mode="reference")
    assert text == again == plain and stats.drafted > stats.matched and stats.seed == plain_stats.seed == 3
    other, _ = demo.generate("import os\n\n\ndef walk(path):\n", 40, sampling=Sampling(**CHAINS[chain], seed=4))
    assert other != text


@pytest.mark.slow
def test_candidates_chosen_on_the_device_give_the_same_tokens(demo, monkeypatch):
    """The graph that a GPU runs, on the CPU: so many largest logits per row in the step's one read."""
    engine, sampling = demo.runner, Sampling(seed=9, repeat_penalty=1.2, repeat_last_n=20)
    prompt, out = demo.tokenizer.encode("def quicksort(items):\n"), []
    for candidates in (sampling.candidates(), None):
        sampler = Sampler(sampling, None, demo.target.n_vocab)
        read = lambda count, slot=0, masked=False: setattr(engine.slots[0], "candidates", candidates or 0)  # noqa: E731
        monkeypatch.setattr(engine, "read_candidates", read)
        engine.reset()
        stats = Stats()
        blocks = list(generate(engine, prompt, GenerationOptions(50, width=4, sampler=sampler), stats))
        out.append([t for block in blocks for t in block])
        sampler.close()
        ids, logits = engine.candidates(0)
        assert logits.size == (candidates or demo.target.n_vocab) and (ids is None) == (candidates is None)
        assert stats.reads == stats.computes - len({"commit"}) and stats.graphs_built_after_warmup == 0
    assert out[0] == out[1] and stats.matched > 0
    monkeypatch.undo()
    assert demo.generate("def quicksort(items):\n", 20)[1].sampling == "greedy"  # and the way back


def test_probabilities_after_the_samplers_are_those_of_the_draw(demo):
    """Of the tokens that the chain left, after temperature and penalties; the same from a row's largest logits as from all of them."""
    rng, n = np.random.default_rng(5), demo.target.n_vocab
    sampling = Sampling(seed=3, temperature=1.3, top_k=5, top_p=0.9, min_p=0, repeat_penalty=1.5, logprobs=8, logprobs_after=True)
    assert sampling.candidates() == Sampling(temperature=1.3, top_k=5, repeat_penalty=1.5).candidates() < n
    whole, few = Sampler(sampling, demo.tokenizer, n), Sampler(sampling, demo.tokenizer, n)
    seen = []
    for _ in range(20):
        logits = rng.normal(0, 3, n).astype(np.float32)
        token, largest = whole.choose(None, logits), np.argsort(-logits)[: sampling.candidates()].astype(np.int32)
        assert few.choose(largest, logits[largest]) == token
        (told,), (again,) = whole.take_logprobs(), few.take_logprobs()
        assert again == told and told.token == token
        penalised = logits.astype(np.float64)
        for i in set(seen[-64:]):
            penalised[i] = penalised[i] / 1.5 if penalised[i] > 0 else penalised[i] * 1.5
        best = np.argsort(-penalised)[:5]
        shares = np.exp(penalised[best] - penalised[best[0]])  # top_p comes before the temperature
        left = best[: int(np.searchsorted(np.cumsum(shares / shares.sum()), 0.9)) + 1]
        want = np.exp((penalised[left] - penalised[left[0]]) / 1.3)
        assert [i for i, _ in told.top] == left.tolist()
        assert np.exp([p for _, p in told.top]) == pytest.approx(want / want.sum(), abs=1e-5)
        assert dict(told.top)[token] == told.logprob
        seen.append(token)
    for sampler in (whole, few):
        sampler.close()
    even = Sampler(Sampling(seed=3, temperature=1, top_k=0, top_p=1, min_p=0, logprobs=3, logprobs_after=True), demo.tokenizer, n)
    for peaks, first in (((70, 9, 50, 20), [9, 20, 50]), ((70,), [70, 0, 1]), ((), [0, 1, 2])):  # of equals, the lowest ids
        logits = np.zeros(n, np.float32)
        logits[list(peaks)] = 2
        token = even.choose(None, logits)
        assert [i for i, _ in even.take_logprobs()[0].top] == first
    assert even.logprob_after(token, 0).top == () and len(even.logprob_after(token, n + 1).top) == n
    even.close()
    logits = rng.normal(0, 3, n).astype(np.float32)
    greedy = Sampler(Sampling(temperature=0, logprobs=3, logprobs_after=True), demo.tokenizer, n)
    token = greedy.choose(None, logits)
    assert greedy.take_logprobs()[0] == TokenLogprob(token, 0.0, ((token, 0.0),))  # nothing else could come
    greedy.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["speculative", "plain", "reference"])
def test_limits_and_ends_with_a_sampler(demo, mode):
    sampling, ids = Sampling(seed=2, temperature=1.2), demo.tokenizer.encode("def f(")
    whole = [t for event in demo.steps(ids, 30, mode=mode, sampling=sampling) for t in event.tokens]
    for n in (1, 2, 7):
        events = list(demo.steps(ids, n, mode=mode, sampling=sampling))
        assert [t for event in events for t in event.tokens] == whole[:n] and events[-1].stats.stop_reason == "length"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_said(bad):
    logits = np.zeros(50, np.float32)
    logits[7] = bad
    sampler = Sampler(Sampling(seed=1), None, 50)
    fails_with(EngineError, "NaN or Inf", sampler.choose, None, logits)
    sampler.close()


@pytest.mark.slow
def test_a_nan_in_the_head_is_said_while_candidates_come_from_the_device(pair):
    from pyggml_spec.ggml.library import ffi, lib

    with ps.load(*pair, device="CPU", threads=1, n_ctx=512, draft_width=4) as poisoned:
        lib.ggml_backend_tensor_set(poisoned.target.weights["output_norm.weight"], ffi.new("float[]", [math.inf]), 0, 4)
        poisoned.runner.slots[0].candidates = 32
        fails_with(EngineError, "NaN or Inf", poisoned.runner.prefill, [1, 2, 3])


@pytest.mark.parametrize("values, words", [
    ({"temperature": -1}, "temperature is -1"), ({"temperature": math.nan}, "temperature is nan"), ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_k": 2.5}, "top_k is 2.5.*whole"), ({"top_k": True}, "top_k is True"), ({"min_p": -0.1}, "min_p"),
    ({"repeat_penalty": 0}, "repeat_penalty is 0"), ({"seed": 1 << 32}, "seed"), ({"logit_bias": {-1: 1.0}}, "token -1"),
    ({"logit_bias": {1: math.nan}}, "nan"), ({"samplers": ("top_k", "mirostat")}, "mirostat"), ({"samplers": ("top_k", "top_k")}, "once"),
    ({"samplers": ("top_k",), "temperature": 0}, "temperature of 0"), ({"grammar": "root ::= [a]", "json_schema": "{}"}, "one of them"),
    ({"logprobs": -1}, "logprobs is -1"), ({"logprobs_after": True}, "logprobs_after is True and logprobs None"),
    ({"logprobs_after": 3, "logprobs": 1}, "logprobs_after is 3"),
])  # fmt: skip
def test_parameters_out_of_range_are_refused(values, words):
    fails_with(SamplingError, words, Sampling, **values)


@pytest.mark.parametrize(
    "last, prompt, chosen", [(2, [1, 2, 3, 4], 1), (2, [4, 3, 2, 1], 4), (3, [0, 4, 2, 3], 1), (64, [4], 1), (1, [4, 1], 4)]
)
def test_penalties_see_the_end_of_the_prompt(last, prompt, chosen):
    sampler = Sampler(Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=last), None, 5)
    sampler.accept_prompt(prompt)
    assert sampler.choose(None, np.array([0.0, 2.9, 0.0, 0.0, 3.0], np.float32)) == chosen
    sampler.close()


@pytest.mark.parametrize("biased", [31, 32, 100])
def test_tokens_that_a_bias_forbids_are_made_up_for_by_more_candidates(biased):
    sampling = Sampling(temperature=0, logit_bias=dict.fromkeys(range(biased), -math.inf))
    logits, count = np.linspace(5, -5, 400).astype(np.float32), sampling.candidates()
    assert biased < count < logits.size
    few, every = Sampler(sampling, None, logits.size), Sampler(sampling, None, logits.size)
    best = np.argsort(-logits)[:count].astype(np.int32)
    assert few.choose(best, logits[best]) == every.choose(None, logits) == biased
    few.close()
    every.close()


@pytest.mark.parametrize("order, samplers", [
    ("top_k;top_p;temperature", ("top_k", "top_p", "temperature")), ("penalties; dry;top-k;typ;nucleus;minp;xtc;temp", ("penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")),
    ("top_k;mirostat", None), ("top_k;top_k", None), (7, None), ("", None),
])  # fmt: skip
def test_orders_by_llama_cpps_names(order, samplers):
    values, refused = recommended({"general.sampling.sequence": order})
    assert values == ({"samplers": samplers} if samplers is not None else {}) and bool(refused) == (samplers is None)
    Sampling(**values)


@pytest.mark.parametrize("key, value", [
    ("temp", -1.0), ("temp", "warm"), ("temp", float("nan")), ("top_k", -1), ("top_p", 1.5), ("penalty_last_n", -1),
    ("xtc_probability", 1.5), ("mirostat", 3),
])  # fmt: skip
def test_what_cannot_be_is_named_and_left_out(key, value):
    values, refused = recommended(
        {f"general.sampling.{key}": value, "general.sampling.top_p": 0.9} if key != "top_p" else {"general.sampling.top_p": value}
    )
    assert len(refused) == 1 and key in refused[0] and set(values) <= {"top_p"} and len(refused[0]) < 100
