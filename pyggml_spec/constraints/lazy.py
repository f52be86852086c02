"""Lazy constraints: the text is free until a trigger (word, token or pattern) comes; from there on it has to match.

"Let me look that up. <tool_call>{"name": "weather", ..."
free, may end                 ^ constrained from here on

The constraint includes the trigger, as in llama.cpp. A token that ends a trigger and continues in a way that is not allowed is masked.
With patterns, words become patterns too; the constraint starts at the first non-empty group of the first match, or at the match.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import EngineError, SamplingError
from ..text.tokenizer import Tokenizer
from .grammar import KINDS, Grammar, Mask, Vocabulary, allows
from .pattern import Budget, Pattern
from .search import Search, SearchState

MOST_TRIGGERS, MOST_WORD = 64, 256
MOST_LOOKBACK = 4096  # bytes between the start of the constraint and the end of its pattern
KEPT, KEPT_TAILS = 16, 32  # constraints per vocabulary, and masks of each (1 MB for 250,000 tokens)

FEW = 8  # typical tokens between the start of the constraint and the end of its trigger
TOO_LONG: list[int] = [-1]  # returned where more than MOST_LOOKBACK bytes precede the trigger's end


@dataclass
class _Before:
    """Cached state of a constraint before its trigger.

    Attributes:
        over: tokens that may end a word and continue after it.
        bits: masks by the partial word that the text ends with.
        search: for patterns, if any.
    """

    over: tuple[int, ...]
    bits: OrderedDict[Any, np.ndarray] = field(default_factory=OrderedDict)
    search: Search | None = None


known_states: "WeakKeyDictionary[Vocabulary, OrderedDict[tuple, _Before]]" = WeakKeyDictionary()
_finding = threading.Lock()


class LazyGrammar(Mask):
    """State of one generation before and after a trigger; same interface as ``Grammar``.

    Attributes:
        ended: an end token was accepted.
    """

    def __init__(self, kind: str, text: str, triggers: Sequence[str | int | Pattern], tokenizer: Tokenizer) -> None:
        """``kind``, ``text``: the constraint, which includes the trigger; ``triggers``: words, token ids, or patterns. Raises
        SamplingError: the constraint is invalid, does not start with a trigger that is a word or token, or a pattern is refused."""
        self.kind, self.ended = kind, False
        self._vocabulary = Vocabulary.of(tokenizer)
        self._inner, self._begun = Grammar(kind, text, tokenizer), False
        self._tokens = {t for t in triggers if isinstance(t, int)}
        self._words = tuple(t.encode() for t in triggers if isinstance(t, str))
        self._longest = max(map(len, self._words), default=1)
        self._begins = frozenset(word[:k] for word in self._words for k in range(1, len(word)))
        self._tail: bytes | SearchState = b""  # partial word at the end of the text
        self._free = np.packbits(np.ones(8 * self._vocabulary.n_bytes, bool), bitorder="little")
        self._free[-(-self._vocabulary.n_vocab // 8) :] = 0
        if self._vocabulary.n_vocab % 8:
            self._free[self._vocabulary.n_vocab // 8] = (1 << self._vocabulary.n_vocab % 8) - 1
        for trigger in triggers:
            if isinstance(trigger, Pattern):  # pattern matches are checked when they occur
                continue
            begins = [trigger] if isinstance(trigger, int) else self._vocabulary.tokens_of(trigger.encode())
            if self._inner.fits(begins) < len(begins):
                raise SamplingError(
                    f"the {KINDS[kind]} does not begin with its trigger {trigger!r}; let it begin with it, or drop the trigger"
                )
        self._before = _before(self._vocabulary, kind, text, tuple(triggers), self._words)
        if self._before.search is not None:
            self._tail = self._before.search.begin
        try:
            self.bits()  # up to 40 ms for a large vocabulary: at the start, not in a step
        except EngineError as error:
            raise SamplingError(str(error)) from None

    @property
    def complete(self) -> bool:
        """Whether an end token may come."""
        return self.ended or not self._begun or self._inner.complete

    @property
    def slow(self) -> bool:
        """As ``Grammar.slow``."""
        return self._begun and self._inner.slow

    @property
    def pending(self) -> bool:
        """As ``Grammar.pending``."""
        return self._begun and self._inner.pending

    def late(self, patience: float = 0.0) -> bool:
        """As ``Grammar.late``."""
        return self._begun and self._inner.late(patience)

    def fits(self, tokens: Sequence[int]) -> int:
        """Length of the longest allowed prefix of ``tokens``."""
        return self._inner.fits(tokens) if self._begun else self._fits(tokens, self._budget())

    def _fits(self, tokens: Sequence[int], budget: Budget) -> int:
        tail = self._tail
        for i, token in enumerate(tokens):
            if token in self._vocabulary.ends:
                return i + 1
            fed, tail = self._advance(tail, int(token), budget)
            if fed is TOO_LONG:
                return i
            if fed is not None and len(fed) > FEW:
                inner = self._inner.copy()
                return i + 1 + inner.fits(tokens[i + 1 :]) if inner.feed(fed) else i
            if fed is not None:
                passed = self._inner.fits([*fed, *tokens[i + 1 :]]) - len(fed)
                return i + 1 + passed if passed >= 0 else i
        return len(tokens)

    def _budget(self) -> Budget:
        """A budget for one call."""
        return self._before.search.budget() if self._before.search is not None else Budget()

    def bits(self) -> np.ndarray:
        """As ``Grammar.bits``."""
        return self._bits(self._budget())

    def _bits(self, budget: Budget) -> np.ndarray:
        if self._begun:
            return self._inner.bits()
        known, key = self._before.bits, self._tail.key() if isinstance(self._tail, SearchState) else self._tail
        with _finding:
            bits = known.get(key)
        if bits is None:
            bits = self._free.copy()
            for token in (
                self.end_search(budget) if isinstance(self._tail, SearchState) else (t for t in self._before.over if not self.allows(t))
            ):
                bits[token >> 3] &= 255 ^ 1 << (token & 7)
            with _finding:
                known[key] = bits
                while len(known) > KEPT_TAILS:
                    known.popitem(last=False)
        return bits.copy()

    def end_search(self, budget: Budget) -> Iterator[int]:
        """Tokens that end a pattern in a way that the constraint does not allow; one mask per start of the constraint."""
        search, place = self._before.search, self._tail
        assert search is not None and isinstance(place, SearchState)
        masks: dict[int, np.ndarray | None] = {}
        for token in map(int, search.ending(place, budget)):
            if token in self._tokens or token in self._vocabulary.ends:
                continue
            start = search.advance(place, token, budget)[1]
            if start is None or start > place.length or self._vocabulary.is_special(token):
                if not self._fits([token], budget):
                    yield token
                continue
            if start not in masks:
                masks[start] = self._mask_after(place.since(start))
            if (may := masks[start]) is None or not allows(may, token):
                yield token

    def _mask_after(self, text: bytes) -> np.ndarray | None:
        """The constraint's mask after ``text``; None if the text is not allowed."""
        if len(text) > MOST_LOOKBACK:
            return None
        inner = self._inner.copy()
        return inner.bits() if inner.feed(self._vocabulary.tokens_of(text)) else None

    def _walk(self, follow: Callable[[np.ndarray], int | None], most: int | None = None) -> tuple[list[int], list[np.ndarray]]:
        """A copy advances along ``follow`` while tokens are allowed."""
        if self._begun:
            return self._inner._walk(follow, most)
        path: list[int] = []
        copy, budget = self._copy(), self._budget()
        out = [copy._bits(budget)]
        while len(path) != most and (token := follow(out[-1])) is not None:
            if token in self._vocabulary.ends or not allows(out[-1], token):
                break
            copy._accept(token, budget)
            path.append(int(token))
            out.append(copy._bits(budget))
        return path, out

    def _copy(self) -> "LazyGrammar":
        copy = LazyGrammar.__new__(LazyGrammar)
        copy.__dict__.update(self.__dict__)
        copy._inner = self._inner.copy()
        return copy

    def forced(self, most: int) -> list[int]:
        """Jump-forward tokens, as ``Grammar.forced``."""
        return self._inner.forced(most) if self._begun else []

    def accept(self, token: int) -> None:
        """Accepts ``token``. Raises EngineError: it is not allowed, or patterns exceed their budget."""
        self._accept(token, self._budget())

    def _accept(self, token: int, budget: Budget) -> None:
        if self._begun or token in self._vocabulary.ends:
            if self._begun:
                self._inner.accept(token)
            self.ended = token in self._vocabulary.ends
            return
        fed, tail = self._advance(self._tail, int(token), budget)
        if fed is None:
            self._tail = tail
            return
        if fed is TOO_LONG or not self._inner.feed(fed):
            raise EngineError(f"the {KINDS[self.kind]} does not allow what comes with its trigger")
        self._begun = True

    def _advance(self, tail: bytes | SearchState, token: int, budget: Budget) -> tuple[list[int] | None, bytes | SearchState]:
        """(tokens for the constraint if ``token`` ends a trigger, else None; the next tail)."""
        if token in self._tokens:
            return [token], tail
        if isinstance(tail, SearchState):
            assert self._before.search is not None
            place, start = self._before.search.advance(tail, token, budget)
            if start is None:
                return None, place
            if start == tail.length and not self._vocabulary.is_special(token):
                return [token], place
            return (self._vocabulary.tokens_of(place.since(start)) if tail.length - start <= MOST_LOOKBACK else TOO_LONG), place
        text = tail + self._vocabulary.pieces[token]
        found = [at for at in map(text.find, self._words) if at >= 0]
        if found:
            at = min(found)
            return [token] if at == len(tail) and not self._vocabulary.is_special(token) else self._vocabulary.tokens_of(text[at:]), tail
        text = text[-self._longest + 1 :] if self._longest > 1 else b""
        return None, next((text[i:] for i in range(len(text)) if text[i:] in self._begins), b"")


def _before(vocabulary: Vocabulary, kind: str, text: str, triggers: tuple, words: tuple[bytes, ...]) -> _Before:
    """Cached: 0.2 s for 250,000 tokens."""
    key = kind, text, triggers
    with _finding:
        kept = known_states.setdefault(vocabulary, OrderedDict())
        found = kept.get(key)
        if found is not None:
            kept.move_to_end(key)
            return found
    if any(isinstance(t, Pattern) for t in triggers):
        search = Search([t if isinstance(t, Pattern) else Pattern(_escaped(t)) for t in triggers if not isinstance(t, int)], vocabulary)
        found = _Before((), search=search)
    else:
        found = _Before(_over_the_end(vocabulary, words))
    with _finding:
        kept[key] = found
        while len(kept) > KEPT:
            kept.popitem(last=False)
    return found


def _escaped(word: str) -> str:
    """A word as a pattern."""
    return "".join(f"\\{c}" if c in "\\^$.*+?()[]{}|/" else c for c in word)


def _over_the_end(vocabulary: Vocabulary, words: tuple[bytes, ...]) -> tuple[int, ...]:
    """Tokens that can end one of ``words`` and continue after it."""
    if not words:
        return ()
    ends = {word[-k:] for word in words for k in range(1, len(word) + 1)}
    longest, inside = max(map(len, words)), re.compile(b"(?s:(?:%b).)" % b"|".join(map(re.escape, words)))
    return tuple(
        i
        for i, piece in enumerate(vocabulary.pieces)
        if any(piece[:n] in ends for n in range(1, min(len(piece), longest + 1))) or inside.search(piece)
    )
