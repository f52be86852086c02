"""Incremental pattern search: which tokens of the vocabulary end a match, and where the match starts.

A lazily built DFA runs all tokens at once, byte by byte; the Pike VM gives captures for one token. Each call has a budget of MOST_WORK
instructions.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import EngineError, SamplingError
from .grammar import Vocabulary
from .pattern import MARKS, Budget, Captures, Pattern, Program

MOST_WORK = 200_000  # instructions per call, 0.1 s
MOST_PATTERNS = 8  # each costs a pass over the vocabulary per mask
MOST_SETS, MOST_MASKS = 512, 256  # DFA states; masks, each 30 to 100 ms for 250,000 tokens
MATCHED = 0


@dataclass(frozen=True)
class SearchState:
    """State at the end of the text: the threads of each pattern, the text from their first capture on, and the number of bytes so far."""

    threads: tuple[tuple[tuple[int, Captures], ...], ...] = ()
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


class _Pieces:
    """The vocabulary's tokens sorted by length, longest first, as byte columns."""

    _all: ClassVar["WeakKeyDictionary[Vocabulary, _Pieces]"] = WeakKeyDictionary()

    def __init__(self, pieces: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, pieces), np.int32, len(pieces))
        self.order = np.argsort(-lengths, kind="stable").astype(np.int32)
        self.at = (np.cumsum(lengths) - lengths)[self.order]
        self.flat = np.frombuffer(b"".join(pieces), np.uint8)
        ordered = -lengths[self.order]
        self.counts = [int(np.searchsorted(ordered, -k)) for k in range(int(lengths.max(initial=0)))]  # tokens longer than k bytes

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "_Pieces":
        if vocabulary not in cls._all:
            cls._all[vocabulary] = cls(vocabulary.pieces)
        return cls._all[vocabulary]


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

    def number(self, threads: Sequence[tuple[int, Captures]], budget: Budget) -> int:
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

    def ending(self, threads: Sequence[tuple[int, Captures]], pieces: _Pieces, budget: Budget) -> np.ndarray:
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
            raise SamplingError(
                f"there are {len(patterns)} patterns and words as triggers, but at most {MOST_PATTERNS} are possible; put several into one, "
                "like a|b"
            )
        self._programs = [Program(pattern) for pattern in patterns]
        self._tables = [_Table(program) for program in self._programs]
        self._pieces, self._vocabulary = vocabulary.pieces, vocabulary
        self._known: dict[tuple, np.ndarray] = {}  # token ids or a bit mask, whichever is smaller
        self._looking = threading.Lock()
        self.begin = SearchState(tuple(program.begin for program in self._programs))

    def budget(self) -> Budget:
        """A budget for one call."""
        return Budget(MOST_WORK)

    def advance(self, place: SearchState, token: int, budget: Budget) -> tuple[SearchState, int | None]:
        """The state after ``token``, and where the constraint starts if a match ends there, else None. Raises EngineError: the budget is
        exceeded."""
        piece = self._pieces[token]
        text, length = place.text + piece, place.length + len(piece)
        after: list[tuple[tuple[int, Captures], ...]] = []
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
                pieces, out = _Pieces.of(self._vocabulary), np.zeros(len(self._pieces), bool)
                for table, threads in zip(self._tables, place.threads):
                    out |= table.ending(threads, pieces, budget)
                found = out.nonzero()[0].astype(np.int32)
                self._known[key] = found if found.nbytes <= out.size // 8 else np.packbits(out)
            return found if found.dtype == np.int32 else np.unpackbits(found, count=len(self._pieces)).nonzero()[0]
