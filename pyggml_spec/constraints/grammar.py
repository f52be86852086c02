"""Constraints: the texts that a generation may give, by a GBNF or Lark grammar, a JSON schema or a regular expression.

One library, llguidance, holds them all: each kind of text becomes a grammar of its notation, and a matcher says which tokens may come next.
A matcher moves by accepted tokens only, so that nothing is ever taken back.

Most masks take microseconds and are computed when they are asked for. Those of ambiguous grammars grow from token to token: from the first slow one
on, a thread of their own takes each token and computes what may come behind it, and the scheduler leaves the sequence out until it has (``late``).
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from ..errors import ConstraintError, EngineError, SamplingError
from ..large_stack import on_large_stack
from ..text.tokenizer import Tokenizer
from . import gbnf, json_schema, lark_rules
from .mask_thread import MaskJob, consume

T = TypeVar("T")
KINDS = {"grammar": "grammar", "json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
MAX_TEXT = 1 << 17  # characters of a regular expression or a Lark grammar; gbnf and json_schema have their own
STACK = 256 << 20  # bytes; 20,000 rules, each of which is the next one, take 100 MiB while they are compiled
KEPT = 64  # compiled grammars per vocabulary
MASKS = 8192  # of one: its lexer keeps 1.5 kB of each state that it has seen, of a hostile one a new one behind every token
LEAST_ITEMS, ITEMS_PER_TOKEN = (
    100_000,
    4,
)  # per mask, 1,000 (of an ambiguous grammar) to 20,000 per millisecond; strings of single characters take two
SLOW_S, HEAVY_S = 0.005, 0.001  # processor time of a mask, and of taking a token, from which on a thread does it
QUICK_S = 0.001  # a mask by the thread that took less: the next one is computed when it is asked for
DEADLINE_S = 1.0  # of a thread, for one token
FEED_S = 0.1  # for all tokens that are given at once
_AMBIGUOUS = "it is too ambiguous, that is, a text can be read in too many ways; write it so that there is one, like s ::= [a-z]+ for s ::= s s | [a-z]"
_SAID_BETTER = {
    "Too many items": _AMBIGUOUS,
    "Current row has": _AMBIGUOUS,
    "oneOf constraints": "oneOf is possible where its schemas exclude each other by their types or by a constant; use anyOf",
    "NoExtensionBias": "no token continues it",
}
_PROBE = b'{"name": [1, true]}\n'


def limits(n_vocab: int) -> LLParserLimits:
    """A grammar beyond them is refused, or ends its generation with a sentence."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=500_000,  # about 14,000 per millisecond and mask
        step_max_items=max(LEAST_ITEMS, ITEMS_PER_TOKEN * n_vocab),
        max_lexer_states=50_000,  # 1 to 2 kB each
        verbose_errors=False,
    )


@dataclass
class _Compiled:
    """``masks``: how many were asked of it and its copies, which share what they have worked out. ``slow``: whether its first one took long."""

    matcher: LLMatcher
    slow: bool
    masks: int = 0


class Vocabulary:
    """What the tokens of a tokenizer look like to llguidance, and the grammars that were compiled for them. One per tokenizer, see ``of``.

    Making one takes seconds for 250,000 tokens; compiling a grammar takes milliseconds.
    """

    _all: ClassVar["weakref.WeakKeyDictionary[Tokenizer, Vocabulary]"] = weakref.WeakKeyDictionary()
    _making = threading.Lock()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.n_vocab, self.n_bytes = tokenizer.n_vocab, 4 * -(-tokenizer.n_vocab // 32)
        self._tokenizer = weakref.ref(tokenizer)
        self._inside = threading.local()  # what was raised inside a call of llguidance, by the thread that called
        self.pieces = pieces = tokenizer.pieces()
        self.ends = [i for i in range(self.n_vocab) if tokenizer.is_end(i)]
        if not self.ends:
            raise SamplingError(f"{tokenizer.path.name} has no end token, which every grammar ends with")
        # forced text is given in the tokens that the tokenizer makes of it, where they are exactly that text (some put a space before)
        self.canonical = b"".join(pieces[i] for i in tokenizer.encode(_PROBE, bos=False)) == _PROBE
        special = sorted({*self.ends, *tokenizer.control_tokens().values()})
        self._special = frozenset(special)
        self._ll = LLTokenizer(TokenizerWrapper(_Tokens(pieces, self.ends[0], special, self)), eos_token=self.ends)
        self.compiled: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        self._compiling = threading.Lock()
        self._any: LLMatcher | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """The one of this tokenizer."""
        with cls._making:
            if tokenizer not in cls._all:
                cls._all[tokenizer] = cls(tokenizer)
            return cls._all[tokenizer]

    def compile(self, kind: str, text: str) -> tuple[LLMatcher, bool]:
        """A matcher at the beginning of what ``text`` describes, compiled once per text, and whether its masks take long.

        Args:
            kind: one of KINDS.

        Raises:
            SamplingError: the text is wrong, or what it describes takes too much time or memory.
        """
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
            matcher.compute_bitmask()  # what no token begins is refused like other errors
        slow = time.thread_time() - began > SLOW_S
        self._raise()  # in this thread: nobody else's constraint has to do with it
        return matcher, slow

    def other(self) -> LLMatcher:
        """A matcher that takes any token, for whoever needs a second one."""
        if self._any is None:
            self._any = LLMatcher(self._ll, "start: /(?s:.*)/\n", log_level=0)
        return self._any.deep_copy()

    def masked(self, kind: str, text: str) -> None:
        """Counts a mask; a text with many is compiled anew for the next one who asks, and what it took goes with those who have it."""
        known = self.compiled.get((kind, text))
        if known is not None:
            known.masks += 1
            if known.masks >= MASKS:
                self.forget(kind, text)

    def forget(self, kind: str, text: str) -> None:
        """Compiles this text anew the next time: copies of a matcher share what they have worked out, and its limits."""
        self.compiled.pop((kind, text), None)  # without the lock: this is between two steps, and another text may take a second to compile

    def source_of(self, kind: str, text: str) -> str:
        free = "" if self.canonical and kind != "grammar" else '%llguidance {"no_forcing": true}\n'
        if kind == "grammar":  # as in llama.cpp, all tokens that make up the text are allowed
            return free + gbnf.lark(gbnf.parse(text), self._token_id)
        if kind == "json_schema":
            return json_schema.grammar(text) if not free else f"{free}start: %json {json_schema.checked(text)}\n"
        if len(text) > MAX_TEXT:
            raise SamplingError(f"the {KINDS[kind]} has {len(text)} characters, but at most {MAX_TEXT} are allowed; make it smaller")
        if not text.strip() or "\0" in text:
            raise SamplingError(f"the {KINDS[kind]} {'holds a NUL character; remove it' if text.strip() else 'is empty'}")
        if kind == "regex":
            return f"{free}start: /{regex_to_lark(text, use_ascii='d')}/\n"
        json_schema.check_embedded(text)
        lark_rules.check(text)
        return free + text

    def tokens_of(self, text: bytes) -> list[int]:
        """Tokens that have these bytes; none of them is a control token."""
        return list(self._ll.tokenize_bytes(text))

    def is_special(self, token: int) -> bool:
        """Whether it is an end token or a control token, which matches no text."""
        return token in self._special

    def _token_id(self, text: str) -> int | None:
        ids = self._encoded(text, special=True)
        return ids[0] if len(ids) == 1 else None

    def _encoded(self, text: bytes | str, special: bool = False) -> list[int]:
        if (tokenizer := self._tokenizer()) is None:
            raise EngineError("the session is closed: load the model again")
        return tokenizer.encode(text, special, bos=False)

    def encode(self, text: bytes | str) -> list[int]:
        """Called from inside llguidance, which ends badly if this raises: an interruption waits until it is out again."""
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
        """Raises what was raised inside a call of ``matcher``, or the error that it ended in."""
        self._raise()
        if matcher.is_error():
            raise ConstraintError(f"the {KINDS[kind]} cannot go on: {_reason(matcher.get_error())}")


class Grammar:
    """One generation's position in a constraint.

    Attributes:
        ended: whether an end token was accepted: the text is complete.
        slow: whether a thread of its own computes what may come behind each token.
    """

    def __init__(self, kind: str, text: str, tokenizer: Tokenizer) -> None:
        """
        Args:
            kind: one of KINDS.

        Raises:
            SamplingError: the text is wrong: what about it, and where.
        """
        self.kind, self._text, self._vocabulary = kind, text, Vocabulary.of(tokenizer)
        self._matcher, self.slow = self._vocabulary.compile(kind, text)
        self._job: MaskJob | None = None
        self._bits: np.ndarray | None = None  # what may come here, where that is known already
        self.ended = False

    def copy(self) -> "Grammar":
        """Another one at the same place."""
        self._arrive()
        copy = Grammar.__new__(Grammar)
        copy.__dict__.update(self.__dict__)
        copy._matcher = self._matcher.deep_copy()
        return copy

    @property
    def complete(self) -> bool:
        """Whether what was accepted is a whole text, so that an end token may come."""
        self._arrive()
        return self.ended or self._matcher.is_accepting()

    @property
    def pending(self) -> bool:
        """Whether a thread still works out what may come here."""
        return self._job is not None and not self._job.done

    def late(self, patience: float = 0.0) -> bool:
        """Whether it is still being worked out what may come here, in ``patience`` seconds from now.

        Raises:
            ConstraintError: for too long already.
        """
        if self._job is None or self._job.wait(patience):
            return False
        if self._job.running_s > DEADLINE_S:
            self._vocabulary.forget(self.kind, self._text)
            raise ConstraintError(
                f"the {KINDS[self.kind]} cannot go on: what may come next is not known after {DEADLINE_S:g} s, most likely because {_AMBIGUOUS}"
            )
        return True

    def fits(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may come next, one after the other."""
        self._arrive()
        tokens = [int(token) for token in tokens]
        if len(tokens) == 1 and self._bits is not None and allows(self._bits, tokens[0]):
            return 1  # where text is forced, the bits know the tokenizer's own tokens only: what they lack is looked at, so that timing decides nothing
        n = self._checked(self._matcher.validate_tokens(tokens))
        if n < len(tokens) and tokens[n] in self._vocabulary.ends and n == 0:
            return int(self.complete)
        return n

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        return self.fits([token]) == 1

    def feed(self, tokens: Sequence[int]) -> bool:
        """Moves past text that is there already; False, and stays where it is, if it may not come.

        Raises:
            ConstraintError: it takes too long.
        """
        self._arrive()
        matcher, began = self._matcher.deep_copy(), time.thread_time()
        for token in tokens:
            if matcher.try_consume_tokens([int(token)]) < 1:
                return False
            if time.thread_time() - began > FEED_S:
                raise ConstraintError(f"the {KINDS[self.kind]} cannot go on behind its trigger: most likely, {_AMBIGUOUS}")
        self._matcher, self._bits = matcher, None
        self.slow = self.slow or time.thread_time() - began > HEAVY_S * max(1, len(tokens))
        return True

    def bits(self) -> np.ndarray:
        """U8 [4 ceil(n_vocab / 32)]: the tokens that may come next, a bit each, the lowest one of each byte first."""
        self._arrive()
        if self._bits is None:
            bits, self.slow = self._timed()
            self._bits = bits if self.slow else None
            return bits
        return self._bits.copy()

    def _timed(self) -> tuple[np.ndarray, bool]:
        """``bits``, and whether they took long."""
        self._vocabulary.masked(self.kind, self._text)
        began = time.thread_time()
        bits = self.compute_bits()
        return bits, self.slow or time.thread_time() - began > SLOW_S

    def compute_bits(self) -> np.ndarray:
        bits = np.frombuffer(self._checked(self._matcher.compute_bitmask()), np.uint8)[: self._vocabulary.n_bytes].copy()
        whole = self.ended or self._matcher.is_accepting()
        for end in self._vocabulary.ends:
            bits[end >> 3] = bits[end >> 3] & (255 ^ 1 << (end & 7)) | whole << (end & 7)
        if not bits.any():
            raise ConstraintError(
                f"the {KINDS[self.kind]} cannot go on: no token continues it, and it cannot end here; let it allow one of the two"
            )
        return bits

    def mask(self) -> np.ndarray:
        """Bool [n_vocab]: the tokens that may come next."""
        return np.unpackbits(self.bits(), count=self._vocabulary.n_vocab, bitorder="little").view(bool)

    def ahead(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """``bits`` as they are here and as they would be behind each of ``tokens``, up to one that may not come or that ends the text, or behind which
        they take long."""
        left = iter(tokens)
        return self._walk(lambda bits: next(left, None))[1]

    def some(self, most: int) -> tuple[list[int], list[np.ndarray]]:
        """``most`` tokens that may come, one after the other, always the same ones and no end token; and what ``ahead`` gives for them."""
        ends = self._vocabulary.ends
        return self._walk(lambda bits: next((token for token in first_set(bits) if token not in ends), None), most)

    def _walk(self, follow: Callable[[np.ndarray], int | None], most: int | None = None) -> tuple[list[int], list[np.ndarray]]:
        """Moves along the tokens that ``follow`` names while they may come, and back again."""
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
        """The tokens that certainly come next, if they come as the tokenizer writes them; ``most`` at most, and no end token."""
        if self.slow or self.ended or most < 1 or self._matcher.is_stopped():
            return []
        return self._checked(self._matcher.compute_ff_tokens())[:most]

    def accept(self, token: int) -> None:
        """Moves past ``token``.

        Raises:
            EngineError: it is not allowed here.
        """
        self._arrive()
        if token in self._vocabulary.ends:
            if not self.complete:
                raise EngineError(f"the {KINDS[self.kind]} does not end here")
            self.ended = True
        elif self.slow and self._bits is not None and allows(self._bits, int(token)):
            self._leave(int(token))
        else:
            began = time.thread_time()
            self._checked(self._matcher.consume_token(int(token)))
            self._bits = None
            if time.thread_time() - began > HEAVY_S:
                self.slow = True
                self._leave()

    def _leave(self, *tokens: int) -> None:
        """A thread takes ``tokens`` and computes what may come behind them; until it has, nothing here touches the matcher."""
        self._bits = None
        self._vocabulary.masked(self.kind, self._text)

        def work() -> None:
            for token in tokens:
                self._checked(consume(self._matcher, token, self._vocabulary.other()))
            self._bits = self.compute_bits()

        self._job = MaskJob(work)

    def _arrive(self) -> None:
        """Waits for the thread, if it has something to do."""
        if self._job is None:
            return
        try:
            self._job.finish()
        finally:
            if self._job.done:  # or else this is an interruption, and the matcher still the thread's
                self.slow, self._job = self._job.seconds > QUICK_S, None

    def _checked(self, result: T) -> T:
        try:
            self._vocabulary.check(self.kind, self._matcher)
        except BaseException:
            self._vocabulary.forget(self.kind, self._text)
            raise
        return result


def allows(bits: np.ndarray, token: int) -> bool:
    """Whether ``token`` is among those that ``bits`` stand for."""
    return 0 <= token < 8 * bits.size and bool(bits[token >> 3] >> (token & 7) & 1)


def only(bits: np.ndarray) -> int | None:
    """The token that ``bits`` stand for if it is only one."""
    filled = bits.view(np.uint32).nonzero()[0]
    if filled.size != 1:
        return None
    word = int(bits.view(np.uint32)[filled[0]])
    return None if word & (word - 1) else 32 * int(filled[0]) + word.bit_length() - 1


def first_set(bits: np.ndarray, most: int = 64) -> list[int]:
    """The first tokens that ``bits`` stand for, at least ``most`` if there are so many."""
    filled = bits.nonzero()[0][:most]
    return [8 * int(byte) + bit for byte in filled for bit in range(8) if bits[byte] >> bit & 1]


class _Tokens:
    """A vocabulary in the form that llguidance asks for, and keeps: a strong reference back would keep all of it for ever."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end: int, special: list[int], vocabulary: Vocabulary) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids, self._vocabulary = tokens, end, special, weakref.ref(vocabulary)

    def __call__(self, text: bytes | str) -> list[int]:
        vocabulary = self._vocabulary()
        return vocabulary.encode(text) if vocabulary is not None else []


def _reason(message: str) -> str:
    """llguidance's message as a part of one sentence."""
    for known, words in _SAID_BETTER.items():
        if known in message:
            return words
    lines = [line.strip() for line in message.split("<state>", maxsplit=1)[0].splitlines()]
    return " ".join(line for line in lines if line)[:400].removeprefix("parser error: ").rstrip(".")
