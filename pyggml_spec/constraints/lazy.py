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

import numpy as np

from ..errors import EngineError, SamplingError
from ..text.tokenizer import Tokenizer
from .grammar import KINDS, Columns, Grammar, Mask, Vocabulary, allows
from .pattern import MARKS, Budget, Pattern, Program, Thread

MOST_TRIGGERS, MOST_WORD = 64, 256
MOST_LOOKBACK = 4096  # bytes between the start of the constraint and the end of its pattern
KEPT, KEPT_TAILS = 16, 32  # constraints per vocabulary, and masks of each (1 MB for 250,000 tokens)

FEW = 8  # typical tokens between the start of the constraint and the end of its trigger
_SIGNS = re.compile(r"[\\^$.*+?()\[\]{}|/]")  # of patterns
TOO_LONG: list[int] = [-1]  # returned where more than MOST_LOOKBACK bytes precede the trigger's end
MOST_WORK = 200_000  # instructions per call, 0.1 s
MOST_PATTERNS = 8  # each costs a pass over the vocabulary per mask
MOST_SETS, MOST_MASKS = 512, 256  # DFA states; masks, each 30 to 100 ms for 250,000 tokens
MATCHED = 0
_finding = threading.Lock()


# -- search of patterns: a lazily built DFA runs all tokens at once, byte by byte; the Pike VM gives captures for one token


@dataclass(frozen=True)
class SearchState:
    """State at the end of the text: the threads of each pattern, the text from their first capture on, and the number of bytes so far."""

    threads: tuple[tuple[Thread, ...], ...] = ()
    text: bytes = b""
    length: int = 0

    def since(self, start: int) -> bytes:
        """The text from position ``start`` on."""
        return self.text[start - self.length + len(self.text) :]

    def key(self) -> tuple:
        """Equal for states with the same continuations: captures relative to the end, and the text since the first of them."""
        n = self.length
        threads = tuple(
            tuple((at, tuple(m - n if m >= 0 else None for m in captures)) for at, captures in threads) for threads in self.threads
        )
        return threads, self.text, n == 0


class _Table:
    """DFA of one program, built on demand."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.clear()

    def clear(self) -> None:
        self._sets: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {}
        self.next = np.full((64, 256), -1, np.int32)
        self.next[MATCHED] = MATCHED
        self.ends = np.zeros(64, bool)
        self.ends[MATCHED] = True

    def number(self, threads: Sequence[Thread], budget: Budget) -> int:
        key = tuple(sorted(at for at, _ in threads))
        found = self._numbers.get(key)
        if found is not None:
            return found
        ends = self.program.at_end([(at, self.program.none) for at in key], 0, budget) is not None  # may exceed the budget
        found = self._numbers[key] = len(self._sets)
        self._sets.append(key)
        if found == len(self.next):
            self.next = np.concatenate([self.next, np.full_like(self.next, -1)])
            self.ends = np.concatenate([self.ends, np.zeros_like(self.ends)])
        self.ends[found] = ends
        return found

    def ending(self, threads: Sequence[Thread], pieces: Columns, budget: Budget) -> np.ndarray:
        """Bool [n_vocab]: tokens after which the text ends in a match."""
        if len(self._sets) > MOST_SETS:
            self.clear()
        at = np.full(pieces.order.size, self.number(threads, budget), np.int32)
        for k, count in enumerate(pieces.counts):
            byte = pieces.flat[pieces.at[:count] + k]
            after = self.next[at[:count], byte]
            if (unknown := after < 0).any():
                for pair in np.unique(at[:count][unknown].astype(np.int64) << 8 | byte[unknown]):
                    self._fill(int(pair >> 8), int(pair & 255), budget)
                after = self.next[at[:count], byte]
            at[:count] = after
        out = np.empty(at.size, bool)
        out[pieces.order] = self.ends[at]
        return out

    def _fill(self, number: int, byte: int, budget: Budget) -> None:
        program = self.program
        out, matched = program.step([(at, program.none) for at in self._sets[number]], byte, 0, None, budget)
        after = MATCHED if matched is not None else self.number(out, budget)
        self.next[number, byte] = after


class Search:
    """Several patterns over one vocabulary, in order of precedence; shared by requests, each call with its own budget."""

    def __init__(self, patterns: Sequence[Pattern], vocabulary: Vocabulary) -> None:
        """Raises SamplingError: a pattern is refused, or there are too many."""
        if len(patterns) > MOST_PATTERNS:
            what = f"there are {len(patterns)} patterns and words as triggers, but at most {MOST_PATTERNS} are possible"
            raise SamplingError(f"{what}; put several into one, like a|b")
        self._programs = [Program(pattern) for pattern in patterns]
        self._tables = [_Table(program) for program in self._programs]
        self._pieces, self._vocabulary = vocabulary.pieces, vocabulary
        self._known: dict[tuple, np.ndarray] = {}  # token ids or a bit mask, whichever is smaller
        self._looking = threading.Lock()
        self.begin = SearchState(tuple(program.begin for program in self._programs))

    @staticmethod
    def budget() -> Budget:
        """A budget for one call."""
        return Budget(MOST_WORK)

    def advance(self, place: SearchState, token: int, budget: Budget) -> tuple[SearchState, int | None]:
        """The state after ``token``, and where the constraint starts if a match ends there, else None. Raises EngineError: the budget is
        exceeded."""
        piece = self._pieces[token]
        text, length = place.text + piece, place.length + len(piece)
        after: list[tuple[Thread, ...]] = []
        for program, threads in zip(self._programs, place.threads):
            open_ways, matched = list(threads), None
            for at, byte in enumerate(piece, place.length + 1):
                open_ways, matched = program.step(open_ways, byte, at, matched, budget)
            last = program.at_end(open_ways, length, budget)
            matched = last if last is not None else matched
            if matched is not None:
                return SearchState((), text, length), program.start(matched)
            budget.spend(len(open_ways) * len(program.none) // MARKS)  # read below and by key()
            after.append(tuple(open_ways))
        first = min((mark for threads in after for _, captures in threads for mark in captures if mark >= 0), default=length)
        return SearchState(tuple(after), text[first - length + len(text) :], length), None

    def ending(self, place: SearchState, budget: Budget) -> np.ndarray:
        """Ids of the tokens that end a match. Raises EngineError: the budget is exceeded."""
        key = tuple(tuple(sorted(at for at, _ in threads)) for threads in place.threads)
        with self._looking:
            found = self._known.get(key)
            if found is None:
                if len(self._known) >= MOST_MASKS:
                    raise EngineError(f"the patterns of the triggers stand in more than {MOST_MASKS} different places; make them simpler")
                pieces, out = self._vocabulary.columns, np.zeros(len(self._pieces), bool)
                for table, threads in zip(self._tables, place.threads):
                    out |= table.ending(threads, pieces, budget)
                found = out.nonzero()[0].astype(np.int32)
                self._known[key] = found if found.nbytes <= out.size // 8 else np.packbits(out)
            return found if found.dtype == np.int32 else np.unpackbits(found, count=len(self._pieces)).nonzero()[0]


# -- constraints


@dataclass
class _Before:
    """Cached state of a constraint before its trigger. ``over``: tokens that may end a word and continue after it; ``bits``: masks by the partial
    word that the text ends with; ``search``: for patterns, if any."""

    over: tuple[int, ...]
    bits: OrderedDict[Any, np.ndarray] = field(default_factory=OrderedDict)
    search: Search | None = None


class LazyGrammar(Mask):
    """State of one generation before and after a trigger; interface and attributes as of ``Grammar``."""

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
        self._free = np.packbits(np.arange(8 * self._vocabulary.n_bytes) < self._vocabulary.n_vocab, bitorder="little")
        for trigger in triggers:
            if isinstance(trigger, Pattern):  # pattern matches are checked when they occur
                continue
            begins = [trigger] if isinstance(trigger, int) else self._vocabulary.tokens_of(trigger.encode())
            if self._inner.fits(begins) < len(begins):
                what = f"the {KINDS[kind]} does not begin with its trigger {trigger!r}"
                raise SamplingError(f"{what}; let it begin with it, or drop the trigger")
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
        """As ``Grammar.fits``."""
        return self._inner.fits(tokens) if self._begun else self._fits(tokens, Search.budget())

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

    def bits(self) -> np.ndarray:
        """As ``Grammar.bits``."""
        return self._bits(Search.budget())

    def _bits(self, budget: Budget) -> np.ndarray:
        if self._begun:
            return self._inner.bits()
        known, key = self._before.bits, self._tail.key() if isinstance(self._tail, SearchState) else self._tail
        with _finding:
            bits = known.get(key)
        if bits is None:
            bits, over = self._free.copy(), (t for t in self._before.over if not self.allows(t))
            for token in self.end_search(budget) if isinstance(self._tail, SearchState) else over:
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
            if start is None or start > place.length or token in self._vocabulary.special:
                if not self._fits([token], budget):
                    yield token
                continue
            if start not in masks:
                text, inner = place.since(start), self._inner.copy()
                fits = len(text) <= MOST_LOOKBACK and inner.feed(self._vocabulary.tokens_of(text))
                masks[start] = inner.bits() if fits else None
            if (may := masks[start]) is None or not allows(may, token):
                yield token

    def _walk(self, follow: Callable[[np.ndarray], int | None], most: int | None = None) -> tuple[list[int], list[np.ndarray]]:
        """A copy advances along ``follow`` while tokens are allowed."""
        if self._begun:
            return self._inner._walk(follow, most)
        path: list[int] = []
        copy, budget = self._copy(), Search.budget()
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
        self._accept(token, Search.budget())

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
            if start == tail.length and token not in self._vocabulary.special:
                return [token], place
            return (self._vocabulary.tokens_of(place.since(start)) if tail.length - start <= MOST_LOOKBACK else TOO_LONG), place
        text = tail + self._vocabulary.pieces[token]
        found = [at for at in map(text.find, self._words) if at >= 0]
        if found:
            at = min(found)
            return [token] if at == len(tail) and token not in self._vocabulary.special else self._vocabulary.tokens_of(text[at:]), tail
        text = text[-self._longest + 1 :] if self._longest > 1 else b""
        return None, next((text[i:] for i in range(len(text)) if text[i:] in self._begins), b"")


def _before(vocabulary: Vocabulary, kind: str, text: str, triggers: tuple, words: tuple[bytes, ...]) -> _Before:
    """Cached: 0.2 s for 250,000 tokens."""
    key, kept = (kind, text, triggers), vocabulary.lazy
    with _finding:
        found = kept.get(key)
        if found is not None:
            kept.move_to_end(key)
            return found
    if any(isinstance(t, Pattern) for t in triggers):
        patterns = [t if isinstance(t, Pattern) else Pattern(_SIGNS.sub(r"\\\g<0>", t)) for t in triggers if not isinstance(t, int)]
        found = _Before((), search=Search(patterns, vocabulary))
    else:
        found = _Before(_over_the_end(vocabulary, words))
    with _finding:
        kept[key] = found
        while len(kept) > KEPT:
            kept.popitem(last=False)
    return found


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
