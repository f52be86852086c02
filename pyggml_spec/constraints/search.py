"""Where patterns come to an end in a text that grows by tokens: which tokens of a vocabulary end one, and where what they found begins.

Which ones: all tokens at once, byte by byte, through a table from (set of ways, byte) to the next set, which is filled as it is used. Where: by the ways
themselves, for one token. Both count what they look at, and say so when it is too much: whatever the text and the patterns are, no call takes longer than
``MOST_WORK`` parts of them together.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import EngineError, SamplingError
from .grammar import Vocabulary
from .pattern import MARKS, Pattern, Program, Saves, Work

MOST_WORK = 200_000  # parts of expressions per call, 0.1 s: a mask of 250,000 tokens behind a usual pattern looks at some hundreds
MOST_PATTERNS = 8  # each takes a walk over the vocabulary per mask, and one over the text per token
MOST_SETS, MOST_MASKS = (
    512,
    256,
)  # sets of ways in a table; sets behind which a text stood: a mask of 250,000 tokens takes 30 to 100 ms, once
MATCHED = 0


@dataclass(frozen=True)
class Place:
    """A text's end: the ways of each pattern that are open there, the text from the first of their marks on, and how many bytes it has in all."""

    ways: tuple[tuple[tuple[int, Saves], ...], ...] = ()
    text: bytes = b""
    length: int = 0

    def since(self, start: int) -> bytes:
        """The text from ``start`` on, which is a mark's place."""
        return self.text[start - self.length + len(self.text) :]

    def key(self) -> tuple:
        """The same for places from which everything goes on alike: marks count from the end, with what was said since the first of them."""
        n = self.length
        ways = tuple(tuple((at, tuple(m - n if m >= 0 else None for m in saves)) for at, saves in ways) for ways in self.ways)
        return ways, self.text, n == 0


class _Pieces:
    """A vocabulary's tokens by their length, the longest first, as columns of bytes."""

    _all: ClassVar["WeakKeyDictionary[Vocabulary, _Pieces]"] = WeakKeyDictionary()

    def __init__(self, pieces: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, pieces), np.int32, len(pieces))
        self.order = np.argsort(-lengths, kind="stable").astype(np.int32)
        self.at = (np.cumsum(lengths) - lengths)[self.order]
        self.flat = np.frombuffer(b"".join(pieces), np.uint8)
        ordered = -lengths[self.order]
        self.counts = [int(np.searchsorted(ordered, -k)) for k in range(int(lengths.max(initial=0)))]  # tokens of more than k bytes

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "_Pieces":
        if vocabulary not in cls._all:
            cls._all[vocabulary] = cls(vocabulary.pieces)
        return cls._all[vocabulary]


class _Table:
    """Sets of ways of one program, and where bytes lead from them."""

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

    def number(self, ways: Sequence[tuple[int, Saves]], work: Work) -> int:
        key = tuple(sorted(at for at, _ in ways))
        found = self._numbers.get(key)
        if found is not None:
            return found
        ends = self.program.at_end([(at, self.program.none) for at in key], 0, work) is not None  # first: it may be too much
        found = self._numbers[key] = len(self._sets)
        self._sets.append(key)
        if found == len(self.next):
            self.next = np.concatenate([self.next, np.full_like(self.next, -1)])
            self.ends = np.concatenate([self.ends, np.zeros_like(self.ends)])
        self.ends[found] = ends
        return found

    def ending(self, ways: Sequence[tuple[int, Saves]], pieces: _Pieces, work: Work) -> np.ndarray:
        """Bool [n_vocab]: tokens at whose end the text has a match."""
        if len(self._sets) > MOST_SETS:
            self.clear()
        at = np.full(pieces.order.size, self.number(ways, work), np.int32)
        for k, count in enumerate(pieces.counts):
            byte = pieces.flat[pieces.at[:count] + k]
            after = self.next[at[:count], byte]
            if (unknown := after < 0).any():
                for pair in np.unique(at[:count][unknown].astype(np.int64) << 8 | byte[unknown]):
                    self._fill(int(pair >> 8), int(pair & 255), work)
                after = self.next[at[:count], byte]
            at[:count] = after
        out = np.empty(at.size, bool)
        out[pieces.order] = self.ends[at]
        return out

    def _fill(self, number: int, byte: int, work: Work) -> None:
        program = self.program
        out, matched = program.step([(at, program.none) for at in self._sets[number]], byte, 0, None, work)
        after = MATCHED if matched is not None else self.number(out, work)
        self.next[number, byte] = after


class Search:
    """Several patterns over one vocabulary, in the order in which they count; requests share it, and each call brings its own ``Work``."""

    def __init__(self, patterns: Sequence[Pattern], vocabulary: Vocabulary) -> None:
        """Raises SamplingError: one is refused, or there are too many."""
        if len(patterns) > MOST_PATTERNS:
            raise SamplingError(
                f"there are {len(patterns)} patterns, and words beside them, as triggers, but at most {MOST_PATTERNS} are possible; put several into one, "
                "like a|b"
            )
        self._programs = [Program(pattern) for pattern in patterns]
        self._tables = [_Table(program) for program in self._programs]
        self._pieces, self._vocabulary = vocabulary.pieces, vocabulary
        self._known: dict[tuple, np.ndarray] = {}  # tokens by their ids, or a bit each, whichever is less
        self._looking = threading.Lock()
        self.begin = Place(tuple(program.begin for program in self._programs))

    def work(self) -> Work:
        """For one call."""
        return Work(MOST_WORK)

    def past(self, place: Place, token: int, work: Work) -> tuple[Place, int | None]:
        """The place behind ``token``, and where a constraint begins that it triggers; None if it triggers none.

        Raises:
            EngineError: it takes too long.
        """
        piece = self._pieces[token]
        text, length = place.text + piece, place.length + len(piece)
        after: list[tuple[tuple[int, Saves], ...]] = []
        for program, ways in zip(self._programs, place.ways):
            open_ways, matched = list(ways), None
            for at, byte in enumerate(piece, place.length + 1):
                open_ways, matched = program.step(open_ways, byte, at, matched, work)
            last = program.at_end(open_ways, length, work)
            matched = last if last is not None else matched
            if matched is not None:
                return Place((), text, length), program.start(matched)
            work.spend(len(open_ways) * len(program.none) // MARKS)  # which are read below, and by whoever asks for the key
            after.append(tuple(open_ways))
        first = min((mark for ways in after for _, saves in ways for mark in saves if mark >= 0), default=length)
        return Place(tuple(after), text[first - length + len(text) :], length), None

    def ending(self, place: Place, work: Work) -> np.ndarray:
        """The tokens that trigger behind ``place``, by their ids.

        Raises:
            EngineError: it takes too long.
        """
        key = tuple(tuple(sorted(at for at, _ in ways)) for ways in place.ways)
        with self._looking:
            found = self._known.get(key)
            if found is None:
                if len(self._known) >= MOST_MASKS:
                    raise EngineError(f"the patterns of the triggers stand in more than {MOST_MASKS} different places; make them simpler")
                pieces, out = _Pieces.of(self._vocabulary), np.zeros(len(self._pieces), bool)
                for table, ways in zip(self._tables, place.ways):
                    out |= table.ending(ways, pieces, work)
                found = out.nonzero()[0].astype(np.int32)
                self._known[key] = found if found.nbytes <= out.size // 8 else np.packbits(out)
            return found if found.dtype == np.int32 else np.unpackbits(found, count=len(self._pieces)).nonzero()[0]
