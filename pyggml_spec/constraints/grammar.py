"""Grammar constraints: the texts allowed by a GBNF or Lark grammar, a JSON schema or a regular expression.

Every kind is translated to an llguidance grammar; a matcher returns the mask of allowed tokens and advances by accepted tokens only.
Masks slower than SLOW_S are computed by a worker thread; meanwhile the scheduler skips the sequence (``late``).
"""

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cache, cached_property
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from ..cancel import Work
from ..errors import ConstraintError, EngineError, SamplingError
from ..large_stack import on_large_stack
from ..text.tokenizer import Tokenizer
from . import gbnf, json_schema, lark_rules
from .productive import TokenTable

T = TypeVar("T")
THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))  # for slow masks; leaves cores to the steps
KINDS = {"grammar": "grammar", "json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
STACK = 256 << 20  # bytes of stack; 20,000 chained rules take 100 MiB to compile
KEPT = 64  # compiled grammars per vocabulary
MASKS = 8192  # per compiled grammar; the lexer keeps 1.5 kB per state
LEAST_ITEMS, ITEMS_PER_TOKEN = 100_000, 4  # per mask; single-character rules take two items per character
SLOW_S, HEAVY_S = 0.005, 0.001  # CPU time of a mask, and of consuming a token, above which a thread does it
QUICK_S = 0.001  # below this, masks are computed on demand again
DEADLINE_S = 1.0  # thread time per token
FEED_S = 0.1  # for all tokens of one feed()
_AMBIGUOUS = "it is too ambiguous, that is, a text can be read in too many ways; write it so that there is one, like s ::= [a-z]+ for s ::= s s | [a-z]"
_CLEARER = {
    "Too many items": _AMBIGUOUS,
    "Current row has": _AMBIGUOUS,
    "oneOf constraints": "oneOf is possible where its schemas exclude each other by their types or by a constant; use anyOf",
    "NoExtensionBias": "no token continues it",
}
_PROBE = b'{"name": [1, true]}\n'


def limits(n_vocab: int) -> LLParserLimits:
    """Limits of one grammar; beyond them it is refused or the generation ends with an error."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=500_000,  # about 14,000 per ms
        step_max_items=max(LEAST_ITEMS, ITEMS_PER_TOKEN * n_vocab),
        max_lexer_states=50_000,  # 1 to 2 kB each
        verbose_errors=False,
    )


@dataclass
class _Compiled:
    """A compiled grammar. ``masks``: masks computed by it and its copies, which share a lexer; ``slow``: whether the first mask was slow."""

    matcher: LLMatcher
    slow: bool
    masks: int = 0


class Columns:
    """A vocabulary's tokens sorted by length, longest first, as byte columns. ``counts``: how many are longer than k bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, pieces), np.int32, len(pieces))
        self.order = np.argsort(-lengths, kind="stable").astype(np.int32)
        self.at = (np.cumsum(lengths) - lengths)[self.order]
        self.flat = np.frombuffer(b"".join(pieces), np.uint8)
        self.counts = [int(np.searchsorted(-lengths[self.order], -k)) for k in range(int(lengths.max(initial=0)))]


class Vocabulary:
    """A tokenizer's vocabulary for llguidance, and a cache of compiled grammars. One per tokenizer, see ``of``.
    Construction takes seconds for 250,000 tokens; compiling a grammar takes milliseconds."""

    _all: ClassVar["weakref.WeakKeyDictionary[Tokenizer, Vocabulary]"] = weakref.WeakKeyDictionary()
    _making = threading.Lock()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.n_vocab, self.n_bytes = tokenizer.n_vocab, 4 * -(-tokenizer.n_vocab // 32)
        self._tokenizer = weakref.ref(tokenizer)
        self._inside = threading.local()  # exceptions raised in callbacks, per thread
        self.pieces = pieces = tokenizer.pieces()
        self.ends = [i for i in range(self.n_vocab) if tokenizer.is_end(i)]
        if not self.ends:
            raise SamplingError(f"{tokenizer.path.name} has no end token, which every grammar ends with")
        # jump-forward uses the tokenizer's own tokens, if encoding is byte-exact (some tokenizers insert a space)
        self.canonical = b"".join(pieces[i] for i in tokenizer.encode(_PROBE, bos=False)) == _PROBE
        self.special = frozenset({*self.ends, *tokenizer.control_tokens().values()})
        this = weakref.ref(self)  # llguidance keeps the table

        def encode(text: bytes | str) -> list[int]:
            return vocabulary.encode(text) if (vocabulary := this()) is not None else []

        table = TokenTable(pieces, self.ends[0], sorted(self.special), encode)
        self._ll = LLTokenizer(TokenizerWrapper(table), eos_token=self.ends)
        self.compiled: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        self._compiling = threading.Lock()
        self.lazy: OrderedDict[tuple, Any] = OrderedDict()  # what lazy constraints have in common

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """The instance of ``tokenizer``."""
        with cls._making:
            if tokenizer not in cls._all:
                cls._all[tokenizer] = cls(tokenizer)
            return cls._all[tokenizer]

    def compile(self, kind: str, text: str) -> tuple[LLMatcher, bool]:
        """A matcher at the start of the constraint (cached per text), and whether its masks are slow. ``kind``: one of KINDS. Raises
        SamplingError: the text is invalid, or exceeds a limit of time or memory."""
        with self._compiling:
            known = self.compiled.pop((kind, text), None)
            if known is None:
                source = self.source_of(kind, text)
                try:
                    matcher, slow = on_large_stack(STACK, lambda: self._matcher(source))
                except RuntimeError:
                    raise SamplingError(f"there is no memory to compile the {KINDS[kind]}; make it smaller") from None
                if why := matcher.get_error() or "; ".join(matcher.get_grammar_warnings()):
                    raise SamplingError(f"the {KINDS[kind]} is refused: {_reason(why)}")
                known = _Compiled(matcher, slow)
            self.compiled[kind, text] = known
            while len(self.compiled) > KEPT:
                self.compiled.popitem(last=False)
            return known.matcher.deep_copy(), known.slow

    def _matcher(self, source: str) -> tuple[LLMatcher, bool]:
        matcher = LLMatcher(self._ll, source, log_level=0, limits=limits(self.n_vocab))
        began = time.thread_time()
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds grammars that no token can start
        slow = time.thread_time() - began > SLOW_S
        self._raise()  # re-raised in the calling thread
        return matcher, slow

    @cached_property
    def columns(self) -> Columns:
        return Columns(self.pieces)

    @cached_property
    def permissive_matcher(self) -> LLMatcher:
        """A matcher that accepts any token, needed as a second one by ``consume``; to be copied."""
        return LLMatcher(self._ll, "start: /(?s:.*)/\n", log_level=0)

    def count_mask(self, kind: str, text: str) -> None:
        """Counts a mask; after MASKS of them the next request compiles the grammar again, which frees the lexer's states."""
        known = self.compiled.get((kind, text))
        if known is not None:
            known.masks += 1
            if known.masks >= MASKS:
                self.forget(kind, text)

    def forget(self, kind: str, text: str) -> None:
        """Drops a compiled grammar: copies share its lexer and its limits."""
        self.compiled.pop((kind, text), None)  # without the lock, which is held while a grammar is compiled

    def source_of(self, kind: str, text: str) -> str:
        free = "" if self.canonical and kind != "grammar" else '%llguidance {"no_forcing": true}\n'
        if kind == "grammar":  # as in llama.cpp, every tokenisation of the text is allowed
            return free + gbnf.lark(gbnf.parse(text), self._token_id)
        if kind == "json_schema":
            schema = json_schema.checked(text)
            return f"{free}start: %json {schema}\n" if free else LLMatcher.grammar_from_json_schema(schema)
        gbnf.check_text(text, KINDS[kind])
        if kind == "regex":
            return f"{free}start: /{regex_to_lark(text, use_ascii='d')}/\n"
        json_schema.check_embedded(text)
        lark_rules.check(text)
        return free + text

    def tokens_of(self, text: bytes) -> list[int]:
        """Tokens with these bytes; no control tokens."""
        return list(self._ll.tokenize_bytes(text))

    def _token_id(self, text: str) -> int | None:
        ids = self._encoded(text, special=True)
        return ids[0] if len(ids) == 1 else None

    def _encoded(self, text: bytes | str, special: bool = False) -> list[int]:
        if (tokenizer := self._tokenizer()) is None:
            raise EngineError("the session is closed: load the model again")
        return tokenizer.encode(text, special, bos=False)

    def encode(self, text: bytes | str) -> list[int]:
        """Callback of llguidance, which must not raise: exceptions are kept for ``_raise``."""
        try:
            return self._encoded(text)
        except BaseException as error:
            self._inside.raised = error
            return self._ll.greedy_tokenize(text) if isinstance(text, str) else []

    def _raise(self) -> None:
        error, self._inside.raised = getattr(self._inside, "raised", None), None
        if error is not None:
            raise error

    def check(self, kind: str, matcher: LLMatcher) -> None:
        """Raises an exception kept by a callback, or the matcher's error."""
        self._raise()
        if matcher.is_error():
            raise ConstraintError(f"the {KINDS[kind]} cannot continue: {_reason(matcher.get_error())}")


class Mask:
    """What constraints derive from ``bits``, ``fits`` and ``_walk``."""

    _vocabulary: Vocabulary

    def bits(self) -> np.ndarray:
        raise NotImplementedError

    def fits(self, tokens: Sequence[int]) -> int:
        raise NotImplementedError

    def _walk(self, follow: Callable[[np.ndarray], int | None], most: int | None = None) -> tuple[list[int], list[np.ndarray]]:
        raise NotImplementedError

    def allows(self, token: int) -> bool:
        """Whether ``token`` is allowed next."""
        return self.fits([token]) == 1

    def mask(self) -> np.ndarray:
        """Bool [n_vocab]: the tokens that may come next."""
        return np.unpackbits(self.bits(), count=self._vocabulary.n_vocab, bitorder="little").view(bool)

    def ahead(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """Masks here and after each of ``tokens``; stops at a token that is not allowed or ends the text, and at a slow mask."""
        left = iter(tokens)
        return self._walk(lambda bits: next(left, None))[1]

    def some(self, most: int) -> tuple[list[int], list[np.ndarray]]:
        """Up to ``most`` allowed tokens (deterministic, no end token), and their masks as ``ahead`` returns them."""
        ends = self._vocabulary.ends
        return self._walk(lambda bits: next((token for token in first_set(bits) if token not in ends), None), most)


class Grammar(Mask):
    """State of one generation in a constraint. ``ended``: an end token was accepted; ``slow``: masks are computed by a worker thread."""

    def __init__(self, kind: str, text: str, tokenizer: Tokenizer) -> None:
        """``kind``: one of KINDS. Raises SamplingError: the text is invalid; with position."""
        self.kind, self._text, self._vocabulary = kind, text, Vocabulary.of(tokenizer)
        self._matcher, self.slow = self._vocabulary.compile(kind, text)
        self._job: Work | None = None
        self._bits: np.ndarray | None = None  # mask of the next token, if computed
        self.ended = False

    def copy(self) -> "Grammar":
        """A copy in the same state."""
        self._synchronize()
        copy = Grammar.__new__(Grammar)
        copy.__dict__.update(self.__dict__)
        copy._matcher = self._matcher.deep_copy()
        return copy

    @property
    def complete(self) -> bool:
        """Whether an end token may come."""
        self._synchronize()
        return self.ended or self._matcher.is_accepting()

    @property
    def pending(self) -> bool:
        """Whether the mask is being computed by a thread."""
        return self._job is not None and not self._job.done()

    def late(self, patience: float = 0.0) -> bool:
        """Whether the mask is not ready after ``patience`` seconds. Raises ConstraintError: it takes longer than DEADLINE_S."""
        if (job := self._job) is None or wait([job], patience).done:
            return False
        if job.began and time.monotonic() - job.began > DEADLINE_S:
            self._vocabulary.forget(self.kind, self._text)
            why = f"the mask of the next token took more than {DEADLINE_S:g} s, most likely because {_AMBIGUOUS}"
            raise ConstraintError(f"the {KINDS[self.kind]} cannot continue: {why}")
        return True

    def fits(self, tokens: Sequence[int]) -> int:
        """Length of the longest allowed prefix of ``tokens``."""
        self._synchronize()
        tokens = [int(token) for token in tokens]
        if len(tokens) == 1 and self._bits is not None and allows(self._bits, tokens[0]):
            return 1  # jump-forward masks hold canonical tokens only, so tokens not in it are validated
        n = self._checked(self._matcher.validate_tokens(tokens))
        if n < len(tokens) and tokens[n] in self._vocabulary.ends and n == 0:
            return int(self.complete)
        return n

    def feed(self, tokens: Sequence[int]) -> bool:
        """Consumes existing text; returns False and keeps the state if it is not allowed. Raises ConstraintError: it takes longer than
        FEED_S."""
        self._synchronize()
        matcher, began = self._matcher.deep_copy(), time.thread_time()
        for token in tokens:
            if matcher.try_consume_tokens([int(token)]) < 1:
                return False
            if time.thread_time() - began > FEED_S:
                raise ConstraintError(f"the {KINDS[self.kind]} cannot continue after its trigger: most likely, {_AMBIGUOUS}")
        self._matcher, self._bits = matcher, None
        self.slow = self.slow or time.thread_time() - began > HEAVY_S * max(1, len(tokens))
        return True

    def bits(self) -> np.ndarray:
        """U8 [4 ceil(n_vocab / 32)]: mask of allowed tokens, one bit each, lowest bit first."""
        self._synchronize()
        if self._bits is None:
            bits, self.slow = self._timed()
            self._bits = bits if self.slow else None
            return bits
        return self._bits.copy()

    def _timed(self) -> tuple[np.ndarray, bool]:
        """``bits``, and whether it was slow."""
        self._vocabulary.count_mask(self.kind, self._text)
        began = time.thread_time()
        bits = self.compute_bits()
        return bits, self.slow or time.thread_time() - began > SLOW_S

    def compute_bits(self) -> np.ndarray:
        bits = np.frombuffer(self._checked(self._matcher.compute_bitmask()), np.uint8)[: self._vocabulary.n_bytes].copy()
        whole = self.ended or self._matcher.is_accepting()
        for end in self._vocabulary.ends:
            bits[end >> 3] = bits[end >> 3] & (255 ^ 1 << (end & 7)) | whole << (end & 7)
        if not bits.any():
            why = "no token is allowed, and the text cannot end here; allow one of the two"
            raise ConstraintError(f"the {KINDS[self.kind]} cannot continue: {why}")
        return bits

    def _walk(self, follow: Callable[[np.ndarray], int | None], most: int | None = None) -> tuple[list[int], list[np.ndarray]]:
        """Advances along ``follow`` while tokens are allowed, then rolls back."""
        path: list[int] = []
        out, slow = [self.bits()], self.slow
        try:
            while not slow and len(path) != most and (token := follow(out[-1])) is not None:
                if token in self._vocabulary.ends or not allows(out[-1], token):
                    break
                self._checked(self._matcher.consume_token(int(token)))
                path.append(int(token))
                bits, slow = self._timed()
                out.append(bits)
        finally:
            if path:
                self._matcher.rollback(len(path))
        self._checked(None)
        if slow and not self.slow:
            self.slow, self._bits = True, out[0]
        return path, out

    def forced(self, most: int) -> list[int]:
        """Jump-forward: up to ``most`` tokens that are the only continuation, as the tokenizer writes them; no end token."""
        if self.slow or self.ended or most < 1 or self._matcher.is_stopped():
            return []
        return self._checked(self._matcher.compute_ff_tokens())[:most]

    def accept(self, token: int) -> None:
        """Accepts ``token``. Raises EngineError: it is not allowed."""
        self._synchronize()
        if token in self._vocabulary.ends:
            if not self.complete:
                raise EngineError(f"the {KINDS[self.kind]} does not end here")
            self.ended = True
        elif self.slow and self._bits is not None and allows(self._bits, int(token)):
            self._submit(int(token))
        else:
            began = time.thread_time()
            self._checked(self._matcher.consume_token(int(token)))
            self._bits = None
            if time.thread_time() - began > HEAVY_S:
                self.slow = True
                self._submit()

    def _submit(self, *tokens: int) -> None:
        """A thread consumes ``tokens`` and computes the next mask; the matcher is off limits until it is done."""
        self._bits = None
        self._vocabulary.count_mask(self.kind, self._text)

        def work() -> None:
            for token in tokens:
                self._checked(_consume(self._matcher, token, self._vocabulary.permissive_matcher.deep_copy()))
            self._bits = self.compute_bits()

        self._job = _submitted(Work(work))

    def _synchronize(self) -> None:
        """Waits for the worker thread."""
        if (job := self._job) is None:
            return
        try:
            job.result()
        finally:
            if job.done():  # not done after an interrupt: the matcher still belongs to the thread
                self.slow, self._job = job.seconds > QUICK_S, None

    def _checked(self, result: T) -> T:
        try:
            self._vocabulary.check(self.kind, self._matcher)
        except BaseException:
            self._vocabulary.forget(self.kind, self._text)
            raise
        return result


def allows(bits: np.ndarray, token: int) -> bool:
    """Whether ``token`` is set in ``bits``."""
    return 0 <= token < 8 * bits.size and bool(bits[token >> 3] >> (token & 7) & 1)


def only(bits: np.ndarray) -> int | None:
    """The only token set in ``bits``, or None."""
    filled = bits.view(np.uint32).nonzero()[0]
    if filled.size != 1:
        return None
    word = int(bits.view(np.uint32)[filled[0]])
    return None if word & (word - 1) else 32 * int(filled[0]) + word.bit_length() - 1


def first_set(bits: np.ndarray, most: int = 64) -> list[int]:
    """The first tokens set in ``bits``, at least ``most`` of them if there are as many."""
    filled = bits.nonzero()[0][:most]
    return [8 * int(byte) + bit for byte in filled for bit in range(8) if bits[byte] >> bit & 1]


def _reason(message: str) -> str:
    """llguidance's message as part of one sentence."""
    for known, words in _CLEARER.items():
        if known in message:
            return words
    lines = [line.strip() for line in message.split("<state>", maxsplit=1)[0].splitlines()]
    return " ".join(line for line in lines if line)[:400].removeprefix("parser error: ").rstrip(".")


# -- threads for slow masks, so that the step loop never waits for one


def _submitted(work: Work) -> Work:
    """Gives ``work`` to a thread."""
    _queue().put(work)
    return work


def _consume(matcher: LLMatcher, token: int, other: LLMatcher) -> bool:
    """``matcher.consume_token(token)`` without the GIL, which llguidance releases for two matchers but not for one."""
    return bool(_executor().consume_token_par([(matcher, token), (other, token)])[0])


@cache
def _executor() -> LLExecutor:
    return LLExecutor(THREADS)


@cache
def _queue() -> "SimpleQueue[Work]":
    works: SimpleQueue[Work] = SimpleQueue()

    def work_off() -> None:
        while True:
            works.get().run()

    for _ in range(THREADS):
        threading.Thread(target=work_off, name="pyggml_spec masks", daemon=True).start()
    return works


for made in (_queue, _executor):
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=made.cache_clear)  # a forked child has no threads
