"""Sampling by libllama's sampler chain, lossless under speculation.

Row j is sampled from the target's processed distribution; verification continues with row j + 1 while the sample equals the draft. The
emitted token is always the target's sample, and each row is sampled once, when its token is emitted: penalties and grammar advance as in plain
decoding. The chain is that of llama.cpp's common_sampler up to its last draw: the sample is the argmax of log-probability plus Gumbel noise that
depends on (seed, index, token) only, so a drafter with the same noise agrees with it more often (csrc/draw.c). The chance of XTC depends on (seed, index) only.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np

from ..constraints.closed_objects import closed_text
from ..constraints.grammar import KINDS, Grammar
from ..constraints.lazy import MOST_TRIGGERS, MOST_WORD, LazyGrammar
from ..constraints.pattern import Pattern
from ..engine.options import MOST_CANDIDATES
from ..errors import ConstraintError, EngineError, SamplingError
from ..ggml.library import LlamaSampler, ffi, lib
from ..suggest import meant
from ..text.tokenizer import Tokenizer
from .feedback import AdaptiveP, Mirostat
from .thinking import Thinking, ThinkingBudget

Allowed = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(mask as of ``Grammar.bits``) -> I32 ids and F32 logits of the most likely allowed tokens, ``Sampling.candidates`` of them; -inf pads."""

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
DRAW_OPTIONS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("seed", "u4"),
        ("index", "u4"),
        ("temperature_first", "i4"),
        ("unused", "i4"),
    ]
)  # pgs_draw_options
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
INFILL = "infill"  # for editors: ends the text where likely, and merges tokens that share a prefix
ADAPTIVE = "adaptive_p"  # the last one of every chain that has it
KNOWN = (*SAMPLERS, INFILL, ADAPTIVE)
BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's, of dry
MOST_BREAKERS, LONGEST_BREAKER = 64, 40  # libllama cuts longer ones off; bytes
MOST_FILLED = 256  # candidates; its cost is quadratic
LONGEST_FILLED = 512  # bytes per token; libllama aborts on longer ones
RANDOM_SEED = lib.LLAMA_DEFAULT_SEED
_ROUND = 32  # candidate counts are multiples of this, to limit the number of graphs
_RANGES = {
    "temperature": (0, 1e4), "top_k": (0, 1 << 30), "top_p": (0, 1), "min_p": (0, 1), "typical_p": (0, 1),
    "repeat_penalty": (1e-3, 1e3), "repeat_last_n": (0, 1 << 24), "presence_penalty": (-1e3, 1e3), "frequency_penalty": (-1e3, 1e3),
    "min_keep": (0, 1 << 30), "seed": (0, RANDOM_SEED - 1), "logprobs": (0, MOST_CANDIDATES),
    "dynatemp_range": (0, 1e4), "dynatemp_exponent": (0, 100), "top_n_sigma": (-1, 1e3), "xtc_probability": (0, 1), "xtc_threshold": (0, 1),
    "dry_multiplier": (0, 1e3), "dry_base": (1, 1e3), "dry_allowed_length": (0, 1 << 20), "dry_penalty_last_n": (0, 1 << 20),
    "mirostat": (0, 2), "mirostat_tau": (0, 100), "mirostat_eta": (0, 10), "adaptive_target": (-1, 1), "adaptive_decay": (0, 0.99),
}  # fmt: skip
_WHOLE = ("top_k", "repeat_last_n", "min_keep", "seed", "logprobs", "dry_allowed_length", "dry_penalty_last_n", "mirostat")


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; defaults are llama.cpp's.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 for all.
        top_p: keep the most likely tokens up to this total probability; 1 for all.
        min_p: keep tokens with at least this probability relative to the most likely one; 0 for all.
        typical_p: keep locally typical tokens up to this total probability; 1 for all.
        repeat_penalty: positive logits of the last ``repeat_last_n`` tokens (prompt included) are divided by it, others multiplied; 1 for
            none.
        presence_penalty, frequency_penalty: subtracted from the logits of those tokens, once and per occurrence.
        logit_bias: added to the logits of these token ids; -inf forbids one.
        seed: 0 .. 2**32 - 2; None draws one (see ``Stats.seed``).
        min_keep: top_p, min_p and typical_p keep at least this many tokens.
        samplers: order of the samplers; missing ones are off. The bias comes first, the draw last. "infill", for editors, needs a top_k of
            at most 256 before it; "adaptive_p" is the last one wherever it stands.
        dynatemp_range: the temperature is within so much of ``temperature``, by the entropy to the power of ``dynatemp_exponent``; 0 for none.
        top_n_sigma: keep tokens within so many standard deviations of the largest logit; 0 or less for all.
        xtc_probability: chance that all tokens of at least ``xtc_threshold`` but the least likely of them are left out.
        dry_multiplier: tokens that would go on with a repetition of the last ``dry_penalty_last_n`` tokens that is longer than
            ``dry_allowed_length`` lose dry_multiplier * dry_base^(length - allowed length); 0 for none. ``dry_sequence_breakers`` end repetitions.
        mirostat: 1 or 2 keeps the surprise of tokens at ``mirostat_tau`` bits, learning at the rate of ``mirostat_eta``, in place of all samplers but the
            temperature; 0 for none.
        adaptive_target: probability near which "adaptive_p" chooses, with the average of recent ones at a decay of ``adaptive_decay``; negative for none.
        grammar: GBNF that the output has to match.
        json_schema, regex, lark: the same as a JSON schema, a regular expression for the whole output, or llguidance's Lark. At most one of
            the four.
        additional_properties: objects of the schema without ``additionalProperties`` allow undescribed keys, as in JSON Schema; by default
            they do not, as in llama.cpp.
        triggers: words, token ids or patterns (``Pattern``); the constraint starts with the first of them, and the text before it is free.
            Empty: the constraint holds from the start.
        thinking: limit of reasoning, whose end is forced where the constraint allows it; forced tokens have probability 1.
        logprobs: report log probabilities of every token and of this many most likely ones, of the model before any sampler.
        logprobs_after: report the probabilities after all samplers instead; removed tokens are left out.

    Raises:
        SamplingError: a value out of range, an unknown sampler, or several constraints.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_keep: int = 0
    samplers: tuple[str, ...] = SAMPLERS
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = BREAKERS
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    grammar: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None
    additional_properties: bool = False
    triggers: tuple[str | int | Pattern, ...] = ()
    thinking: ThinkingBudget | None = None
    logprobs: int | None = None
    logprobs_after: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value, kind = getattr(self, name), "whole number" if name in _WHOLE else "number"
            if value is None and name in ("seed", "logprobs"):
                continue
            right = isinstance(value, int if name in _WHOLE else (int, float)) and not isinstance(value, bool)
            if not right or not low <= value <= high:
                raise SamplingError(f"{name} is {value!r}, but it has to be a {kind} from {low:.10g} to {high:.10g}")
        if self.logprobs_after not in (True, False) or (self.logprobs_after and self.logprobs is None):
            what = f"logprobs_after is {self.logprobs_after!r} and logprobs {self.logprobs!r}"
            raise SamplingError(f"{what}; give True or False, and with True how many logprobs")
        for name, words in KINDS.items():
            if not isinstance(getattr(self, name), (str, type(None))):
                raise SamplingError(f"the {words} is of the type {type(getattr(self, name)).__name__}; give its text")
        right = len(self.triggers) <= MOST_TRIGGERS and all(
            (isinstance(t, str) and 0 < len(t) <= MOST_WORD) or (type(t) is int and t >= 0) or isinstance(t, Pattern) for t in self.triggers
        )
        if not right:
            what = f"at most {MOST_TRIGGERS} words of 1 to {MOST_WORD} characters, token ids, or patterns"
            raise SamplingError(f"the triggers are {self.triggers!r}; give {what}")
        if self.triggers and not self.constrained:
            raise SamplingError("there are triggers but no constraint; give one")
        if not isinstance(self.logit_bias, Mapping):
            raise SamplingError(f"the logit bias is {self.logit_bias!r}; give a number by token id, like {{42: -1.5}}")
        wrong = next((name for name in self.samplers if name not in KNOWN or self.samplers.count(name) > 1), None)
        if wrong is not None:
            order = f"each of {', '.join(KNOWN)} may appear once{meant(wrong, set(KNOWN) - {wrong})}"
            raise SamplingError(f"the samplers {'; '.join(self.samplers)} are no order: {order}")
        if INFILL in self.samplers:
            if "top_k" not in self.samplers[: self.samplers.index(INFILL)] or not 0 < self.top_k <= MOST_FILLED:
                why = f"it needs a top_k from 1 to {MOST_FILLED} before it; the order is {'; '.join(self.samplers)}, and top_k is {self.top_k}"
                raise SamplingError(f"the sampler infill compares each token with each, so {why}")
            if self.constrained:
                raise SamplingError("the sampler infill may end the text anywhere, and a constraint may not; leave one of them out")
        breakers = self.dry_sequence_breakers
        if len(breakers) > MOST_BREAKERS or not all(
            isinstance(b, str) and 0 < len(b.encode()) <= LONGEST_BREAKER and "\0" not in b for b in breakers
        ):
            what = f"at most {MOST_BREAKERS} texts of 1 to {LONGEST_BREAKER} bytes"
            raise SamplingError(f"the dry_sequence_breakers are {str(breakers)[:200]}, but they have to be {what}")
        if self.temperature == 0 and "temperature" not in self.chain:
            raise SamplingError("a temperature of 0 has no effect without temperature in the order of samplers; add it")
        if len(given := [words for name, words in KINDS.items() if getattr(self, name) is not None]) > 1:
            raise SamplingError(f"there are a {' and a '.join(given)}; give one of them")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0 or type(bias) not in (int, float) or not (abs(bias) < 1e300 or bias == -math.inf):
                raise SamplingError(f"the logit bias {bias!r} for token {token!r} has to be a finite number or -inf, for a token id")

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """The samplers that are applied, in their order, as llama.cpp assembles them."""
        if self.mirostat:
            return "temperature", "mirostat"
        return (*(name for name in self.samplers if name != ADAPTIVE), *((ADAPTIVE,) if ADAPTIVE in self.samplers else ()))

    @cached_property
    def on(self) -> frozenset[str]:
        """Those of them that may change anything, and "dynatemp" where the temperature depends on the entropy."""
        neutral = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        does = {
            "penalties": self.repeat_last_n > 0 and not neutral, "dry": self.dry_multiplier > 0 and self.dry_penalty_last_n > 0,
            "top_n_sigma": self.top_n_sigma > 0, "top_k": self.top_k > 0, "typ_p": self.typical_p < 1, "top_p": self.top_p < 1,
            "min_p": self.min_p > 0, "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5, ADAPTIVE: self.adaptive_target >= 0,
        }  # fmt: skip
        dynamic = {"dynatemp"} if self.dynatemp_range > 0 and "temperature" in self.chain and not self.mirostat else set()
        return frozenset(name for name in self.chain if does.get(name, True)) | dynamic

    @property
    def constraint(self) -> tuple[str, str] | None:
        """(one of ``grammar.KINDS``, its text), or None."""
        for kind in KINDS:
            if (text := getattr(self, kind)) is not None:
                return kind, closed_text(text) if kind == "json_schema" and not self.additional_properties else text
        return None

    @property
    def constrained(self) -> bool:
        """Whether there is a constraint."""
        return any(getattr(self, name) is not None for name in KINDS)

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the argmax after bias and penalties: temperature 0 without samplers that may drop it."""
        return self.temperature == 0 and not self.on & {INFILL, "typ_p", "xtc", "dynatemp"}

    @property
    def temperature_class(self) -> str:
        """Requests whose drafts are accepted about equally often: temperatures rounded to quarters; empty if greedy."""
        return "" if self.is_argmax else f"temperature {min(max(round(4 * self.temperature), 1), 6) / 4:g}"

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the argmax of the logits, unconstrained and without logprobs."""
        return self.is_allowed_argmax and not self.constrained and not self.limits_thinking

    @property
    def limits_thinking(self) -> bool:
        """Whether reasoning has a limit."""
        return self.thinking is not None and self.thinking.tokens is not None

    @property
    def is_allowed_argmax(self) -> bool:
        """Whether the choice is the argmax of the allowed logits, without bias, penalties and logprobs."""
        return self.is_argmax and not (self.on & {"penalties", "dry"} or self.logit_bias or self.logprobs is not None)

    def candidates(self) -> int | None:
        """How many of a row's largest logits determine the choice; None: all.

        If bias and penalties lower at most n logits and raise none, the k largest after them are among the k + n largest before. Under a
        constraint the same holds for the allowed tokens.
        """
        if self.is_allowed_argmax:
            return 0
        raising = min(self.presence_penalty, self.frequency_penalty) < 0 or self.repeat_penalty < 1
        raises = max(self.logit_bias.values(), default=0) > 0 or ("penalties" in self.on and raising)
        if raises or (self.logprobs is not None and not self.logprobs_after):
            return None
        on, chain = self.on, self.chain
        first = set(chain[: chain.index("top_k")] if "top_k" in chain else chain)
        sums = on & first & {"top_p", "typ_p", "top_n_sigma", "xtc"} or ("dynatemp" in on and "temperature" in first)  # need all tokens
        k = 1 if self.is_argmax else self.top_k if "top_k" in on and not sums else 0
        lowered = len(self.logit_bias) + self.repeat_last_n * ("penalties" in on) + self.dry_penalty_last_n * ("dry" in on)
        count = -(-(k + lowered) // _ROUND) * _ROUND
        return count if k and count <= MOST_CANDIDATES else None

    def describe(self) -> str:
        """The active settings as a phrase."""
        if self.is_argmax:
            parts = ["greedy"]
        else:
            spread = f" +- {self.dynatemp_range:g}" if "dynatemp" in self.on else ""
            words = {
                "temperature": f"temperature {self.temperature:g}{spread}",
                "top_n_sigma": f"top-n-sigma {self.top_n_sigma:g}",
                "top_k": f"top-k {self.top_k}",
                "typ_p": f"typical {self.typical_p:g}",
                "top_p": f"top-p {self.top_p:g}",
                "min_p": f"min-p {self.min_p:g}",
                "xtc": f"xtc {self.xtc_probability:g} (threshold {self.xtc_threshold:g})",
                "mirostat": f"mirostat {self.mirostat} ({self.mirostat_tau:g} bits)",
                ADAPTIVE: f"adaptive-p {self.adaptive_target:g}",
                INFILL: INFILL,
            }
            parts = [words[name] for name in self.chain if name in self.on and name in words] or ["temperature 1"]
        if "penalties" in self.on:
            values = f"{self.repeat_penalty:g}/{self.presence_penalty:g}/{self.frequency_penalty:g}"
            parts.append(f"penalties {values} (repeat/presence/frequency) over {self.repeat_last_n} tokens")
        if "dry" in self.on:
            parts.append(f"dry {self.dry_multiplier:g} over {self.dry_penalty_last_n} tokens")
        if self.logit_bias:
            parts.append(f"{len(self.logit_bias)} biased tokens")
        if self.constraint is not None:
            parts.append(KINDS[self.constraint[0]] + (" from a trigger on" if self.triggers else ""))
        return ", ".join(parts)


class TopTokens(Sequence[tuple[int, float]]):
    """Pairs (token, log probability) in 12 bytes each; tuples take 120."""

    __slots__ = ("_ids", "_logprobs")

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._ids, self._logprobs = ids.astype(np.int32), logprobs.astype(np.float64)

    def __len__(self) -> int:
        return self._ids.size

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._ids.tolist(), self._logprobs.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a token, under the model or after the samplers, and the most likely (token, logprob) in its place, best
    first."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


class Sampler:
    """Sampler chain of one generation. Owns libllama's samplers.

    Attributes:
        seed: of the random numbers, drawn here if not given; None for greedy decoding.
        count: tokens accepted: the index of the next one's noise.
        logprobs: of the tokens chosen since ``take_logprobs``.
        prompt_logprobs: of the prompt's tokens but the first, where they were scored.
    """

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer | None, n_vocab: int) -> None:
        """``tokenizer``: for constraints; None without one. Raises SamplingError: a bias for a token outside the vocabulary, or an invalid
        grammar."""
        self.sampling, self.n_vocab = sampling, n_vocab
        self.seed = None if sampling.is_argmax else sampling.seed if sampling.seed is not None else secrets.randbelow(RANDOM_SEED)
        self.count, self._draft_options = 0, _draft_options(sampling, self.seed)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        if (outside := max(sampling.logit_bias, default=0)) >= n_vocab:
            raise SamplingError(f"there is a logit bias for token {outside}, but the vocabulary has {n_vocab} tokens")
        self._all_ids = np.arange(n_vocab, dtype=np.int32)
        self.tokens = np.zeros(n_vocab, TOKEN_DATA)
        self.array = ffi.new("llama_token_data_array *")
        self.grammar: Grammar | LazyGrammar | None = None
        self._thinking: Thinking | None = None
        if sampling.thinking is not None and sampling.limits_thinking:
            if tokenizer is None:
                raise SamplingError("a limit of thinking needs a tokenizer")
            self._thinking = Thinking(sampling.thinking, tokenizer)
        if INFILL in sampling.on:
            _filled(tokenizer)
        if "dry" in sampling.on and tokenizer is None:
            raise SamplingError("the sampler dry needs a tokenizer, for its sequence breakers")
        if sampling.constraint is not None:
            if tokenizer is None:
                raise SamplingError("a constraint needs a tokenizer")
            if (outside := max((t for t in sampling.triggers if isinstance(t, int)), default=0)) >= n_vocab:
                raise SamplingError(f"a trigger is token {outside}, but the vocabulary has {n_vocab} tokens")
            lazy = sampling.triggers
            self.grammar = LazyGrammar(*sampling.constraint, lazy, tokenizer) if lazy else Grammar(*sampling.constraint, tokenizer)
        self._parts = list(self._made(tokenizer))
        self.left = self.tokens[:0]  # by the samplers, of the last draw
        self._feedback: Mirostat | AdaptiveP | None = Mirostat(sampling, n_vocab) if sampling.mirostat else None
        if ADAPTIVE in sampling.on:
            self._feedback = AdaptiveP(sampling)

    def _made(self, tokenizer: Tokenizer | None) -> Iterator[tuple[str, LlamaSampler]]:
        s, bias = self.sampling, self.sampling.logit_bias
        make = {
            "penalties": lambda: lib.llama_sampler_init_penalties(
                self.n_vocab, s.repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
            ),
            "dry": lambda: _dry(s, cast(Tokenizer, tokenizer)),
            "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(s.top_n_sigma),
            "top_k": lambda: lib.llama_sampler_init_top_k(s.top_k),
            "typ_p": lambda: lib.llama_sampler_init_typical(s.typical_p, s.min_keep),
            "top_p": lambda: lib.llama_sampler_init_top_p(s.top_p, s.min_keep),
            "min_p": lambda: lib.llama_sampler_init_min_p(s.min_p, s.min_keep),
            "xtc": lambda: lib.llama_sampler_init_xtc(1.0, s.xtc_threshold, s.min_keep, 0),
            "temperature": lambda: lib.llama_sampler_init_temp_ext(
                s.temperature, 0.0 if s.mirostat else s.dynatemp_range, s.dynatemp_exponent
            ),
            INFILL: lambda: lib.llama_sampler_init_infill(_filled(tokenizer)),
        }
        if bias:
            yield "bias", lib.llama_sampler_init_logit_bias(self.n_vocab, len(bias), ffi.new("llama_logit_bias[]", list(bias.items())))
        for name in s.chain:
            if name in s.on and name in make:
                yield name, make[name]()

    def draft_options(self, count: int) -> np.ndarray:
        """``pgs_draw_options`` of drafts of the next ``count`` tokens, I32 [count, 8]: the same noise, and the chain without history. Zeros if greedy."""
        out = np.full(count, self._draft_options)
        if not self.sampling.is_argmax:
            out["index"] = self.count + np.arange(count)
        return out.view(np.int32).reshape(count, -1)

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Penalties include the prompt, the grammar does not."""
        s = self.sampling
        for token in tokens[-max(1, s.repeat_last_n, s.dry_penalty_last_n) :] if s.on & {"penalties", "dry"} else ():
            if token >= 0:  # no row of a picture
                self._accept(int(token))

    def score(self, token: int, logits: np.ndarray) -> None:
        """The prompt goes on with ``token`` after these logits, F32 [n_vocab]."""
        self.prompt_logprobs.append(_logprob(token, logits, self.sampling.logprobs or 0))

    def choose(self, ids: np.ndarray | None, logits: np.ndarray, allowed: Allowed | None = None) -> int:
        """Samples and accepts the next token.

        Args:
            ids: I32 [n] token ids of ``logits``; None for the whole vocabulary.
            logits: F32 [n].
            allowed: returns the largest logits of the allowed tokens; required with ``ids`` under a constraint, which may forbid all of
                them.

        Raises:
            EngineError: a logit is NaN or Inf, or no token is left.
        """
        grammar = self.grammar
        if not math.isfinite(float(logits.sum())):
            raise EngineError("the target's logits hold NaN or Inf: the weights are damaged or overflow on this device")
        if grammar is not None and self.sampling.is_allowed_argmax and ids is None:
            mask = grammar.mask()
            token = int(np.where(mask, logits, np.float32(-np.inf)).argmax())
            if not mask[token]:
                raise self._nothing_left()
        else:
            token = self._draw(ids, logits)
            if grammar is not None and not grammar.allows(token):  # llama.cpp's order: sample first, mask only what is not allowed
                if ids is None:
                    token = self._draw(None, logits, grammar.mask(), redraw=1)
                elif allowed is None:
                    raise EngineError("a constrained choice among candidates needs `allowed`")
                else:
                    token = self._draw(*allowed(grammar.bits()), redraw=1)
        self.take(token)
        if self.sampling.logprobs is not None:
            count = self.sampling.logprobs
            self.logprobs.append(self.logprob_after(token, count) if self.sampling.logprobs_after else _logprob(token, logits, count))
        return token

    def take_forced(self) -> int | None:
        """Accepts the token that ends reasoning at its limit and returns it; None where the choice is free, or a constraint does not allow it."""
        if (
            self._thinking is None
            or (token := self._thinking.forced) is None
            or (self.grammar is not None and not self.grammar.allows(token))
        ):
            return None
        self.take(token)
        if self.sampling.logprobs is not None:
            self.logprobs.append(TokenLogprob(token, 0.0, ((token, 0.0),)))
        return token

    def accepts_argmax(self, token: int | None) -> bool:
        """Accepts ``token``, the argmax of the (allowed) logits, if it is certainly the choice, so that no logits need to be read."""
        if token is None or not self.sampling.is_allowed_argmax or (self.grammar is not None and not self.grammar.allows(token)):
            return False
        self.take(token)
        return True

    @property
    def masks_on_device(self) -> bool:
        """Whether the choice is the argmax of the allowed logits, so the device can apply the mask."""
        return self.grammar is not None and self.sampling.is_allowed_argmax

    def allowed(self) -> np.ndarray:
        """``Grammar.bits`` of the constraint."""
        if self.grammar is None:
            raise EngineError("there is no constraint")
        return self.grammar.bits()

    def take(self, token: int) -> None:
        """Accepts ``token`` in chain and grammar."""
        if self.grammar is not None:
            self.grammar.accept(token)
        self._accept(token)
        if self._feedback is not None:
            self._feedback.accept()
        if self._thinking is not None:
            self._thinking.push(token)
        self.count += 1

    def _accept(self, token: int) -> None:
        for _, part in self._parts:
            lib.llama_sampler_accept(part, token)

    def _draw(self, ids: np.ndarray | None, logits: np.ndarray, allowed: np.ndarray | None = None, redraw: int = 0) -> int:
        tokens = self.tokens[: logits.size]
        tokens["id"] = self._all_ids if ids is None else ids
        tokens["logit"] = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
        array, base = self.array, ffi.from_buffer("llama_token_data[]", tokens)
        array.data, array.size, array.selected, array.sorted = base, logits.size, -1, False
        for name, part in self._parts:
            if name != "xtc" or self._chance(redraw) <= self.sampling.xtc_probability:
                lib.llama_sampler_apply(part, array)
        if (feedback := self._feedback) is not None:
            feedback.apply(array)
        first = array.data - base  # xtc moves it
        left = self.left = tokens[first : first + array.size]
        chosen = self.pick(redraw)
        if chosen < 0:
            raise self._nothing_left()
        if feedback is not None:
            feedback.chose(chosen, left)
        return int(left["id"][chosen])

    def pick(self, redraw: int) -> int:
        """Index of the draw among the tokens that are left, -1 if none is."""
        return lib.pgs_draw(ffi.cast("pgs_candidate *", self.array.data), self.array.size, self.seed or 0, self.count, redraw)

    def _chance(self, redraw: int) -> float:
        """A number below 1 that depends on (seed, index, redraw) only."""
        return np.random.Philox(key=self.seed or 0, counter=[self.count, redraw, 0, 0]).random_raw() / 2.0**64

    def logprob_after(self, token: int, count: int) -> TokenLogprob:
        """Probabilities of the last draw, from the logits that the samplers left."""
        drawn = self.left[self.left["logit"] > -np.inf]
        return _logprob(token, drawn["logit"], count, drawn["id"])

    def _nothing_left(self) -> ConstraintError:
        how = self.sampling.describe()
        return ConstraintError(f"the sampling ({how}) leaves no token to choose from; relax the bias, the temperature or the constraint")

    def forced(self, most: int) -> list[int]:
        """Jump-forward tokens of the constraint, at most ``most``."""
        return self.grammar.forced(most) if self.grammar is not None else []

    @property
    def incomplete(self) -> bool:
        """Whether there is a constraint and the text so far is not complete."""
        if self.grammar is None:
            return False
        with suppress(EngineError):  # the generation has ended
            return self.grammar.pending or not self.grammar.complete
        return True

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        taken, self.logprobs = tuple(self.logprobs), []
        return taken

    def close(self) -> None:
        for _, part in self._parts:
            lib.llama_sampler_free(part)
        self._parts, self.left = [], self.tokens[:0]
        if self._feedback is not None:
            self._feedback.close()
        self.tokens, self._all_ids = np.zeros(0, TOKEN_DATA), np.zeros(0, np.int32)  # 4 MB at 250,000 tokens


def _draft_options(s: Sampling, seed: int | None) -> np.ndarray:
    """DRAW_OPTIONS of every draft of a generation but for its index; zeros if greedy."""
    out, on = np.zeros((), DRAW_OPTIONS), set(s.chain)
    if s.is_argmax:
        return out
    cuts = [s.chain.index(name) for name in ("top_p", "min_p") if name in on]
    out["temperature"] = s.temperature if "temperature" in on else 1
    out["top_k"] = s.top_k if "top_k" in on else 0
    out["top_p"], out["min_p"] = s.top_p if "top_p" in on else 1, s.min_p if "min_p" in on else 0
    out["temperature_first"] = "temperature" in on and bool(cuts) and s.chain.index("temperature") < min(cuts)
    out["seed"] = seed
    return out


def _dry(s: Sampling, tokenizer: Tokenizer) -> LlamaSampler:
    texts = [ffi.new("char[]", text.encode()) for text in s.dry_sequence_breakers]
    options = s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n
    return lib.llama_sampler_init_dry(tokenizer.vocab, *options, ffi.new("char *[]", texts), len(texts))


def _filled(tokenizer: Tokenizer | None) -> Any:
    """The vocabulary for the sampler infill, which aborts on some. Raises SamplingError."""
    if tokenizer is None:
        raise SamplingError("the sampler infill needs a tokenizer")
    if max(lib.llama_vocab_eot(tokenizer.vocab), lib.llama_vocab_eos(tokenizer.vocab)) < 0:
        raise SamplingError("the sampler infill needs a token that ends the text, and the vocabulary has none; leave it out")
    if tokenizer.longest_piece > LONGEST_FILLED:
        what = f"a token of {tokenizer.longest_piece} bytes, and the sampler infill takes {LONGEST_FILLED} at most"
        raise SamplingError(f"the vocabulary has {what}; leave it out")
    return tokenizer.vocab


def _logprob(token: int, logits: np.ndarray, count: int, ids: np.ndarray | None = None) -> TokenLogprob:
    """``ids``: of ``logits``, None for the whole vocabulary."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= math.log(np.exp(wide).sum())
    least = np.partition(wide, -count)[-count] if 0 < count < wide.size else -np.inf  # a full sort of 250,000 takes as long as a step
    best = np.flatnonzero(wide >= least)
    named = best if ids is None else ids[best]
    order = np.lexsort((named, -wide[best]))[:count]
    return TokenLogprob(token, float(wide[token] if ids is None else wide[ids == token][0]), TopTokens(named[order], wide[best[order]]))
