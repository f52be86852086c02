"""Where patterns come to an end in a text that grows by tokens: which tokens of a vocabulary end one, and where what they found begins.

Which ones: all tokens at once, byte by byte, through a table from (set of ways, byte) to the next set, which is filled as it is used. Where: by the ways
themselves, for one token. Both count what they look at, and say so when it is too much: no text and no expression takes longer than ``MOST_WORK`` parts.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import EngineError
from .grammar import Vocabulary
from .pattern import Pattern, Program, Saves

MOST_WORK = 200_000  # parts of expressions per mask, 0.1 s: a mask of 250,000 tokens behind a usual pattern looks at some hundreds
MOST_SETS, MOST_MASKS = (
    512,
    256,
)  # sets of ways in a table; sets behind which a text stood: a mask of 250,000 tokens takes 30 to 100 ms, once
MATCHED = 0


@dataclass(frozen=True)
class Place:
    """A text's end: the ways of each pattern that are open there, and the text."""

    ways: tuple[tuple[tuple[int, Saves], ...], ...] = ()
    text: bytes = b""

    def key(self) -> tuple:
        """The same for places from which everything goes on alike: marks count from the end, with what was said since the first of them."""
        n = len(self.text)
        marks = [mark for ways in self.ways for _, saves in ways for mark in saves if mark >= 0]
        ways = tuple(tuple((at, tuple(m - n if m >= 0 else None for m in saves)) for at, saves in ways) for ways in self.ways)
        return ways, self.text[min(marks, default=n) :], n == 0


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

    def number(self, ways: Sequence[tuple[int, Saves]]) -> int:
        key = tuple(sorted(at for at, _ in ways))
        found = self._numbers.get(key)
        if found is not None:
            return found
        found = self._numbers[key] = len(self._sets)
        self._sets.append(key)
        if found == len(self.next):
            self.next = np.concatenate([self.next, np.full_like(self.next, -1)])
            self.ends = np.concatenate([self.ends, np.zeros_like(self.ends)])
        self.ends[found] = self.program.at_end([(at, self.program.none) for at in key], 0) is not None
        return found

    def ending(self, ways: Sequence[tuple[int, Saves]], pieces: _Pieces, most: int) -> np.ndarray:
        """Bool [n_vocab]: tokens at whose end the text has a match."""
        if len(self._sets) > MOST_SETS:
            self.clear()
        at = np.full(pieces.order.size, self.number(ways), np.int32)
        for k, count in enumerate(pieces.counts):
            byte = pieces.flat[pieces.at[:count] + k]
            after = self.next[at[:count], byte]
            if (unknown := after < 0).any():
                for pair in np.unique(at[:count][unknown].astype(np.int64) << 8 | byte[unknown]):
                    self._fill(int(pair >> 8), int(pair & 255))
                    if self.program.work > most:
                        raise _too_much()
                after = self.next[at[:count], byte]
            at[:count] = after
        out = np.empty(at.size, bool)
        out[pieces.order] = self.ends[at]
        return out

    def _fill(self, number: int, byte: int) -> None:
        program = self.program
        out, matched = program.step([(at, program.none) for at in self._sets[number]], byte, 0, None)
        after = MATCHED if matched is not None else self.number(out)
        self.next[number, byte] = after


class Search:
    """Several patterns over one vocabulary, in the order in which they count."""

    def __init__(self, patterns: Sequence[Pattern], vocabulary: Vocabulary) -> None:
        """Raises SamplingError: one is refused."""
        self._programs = [Program(pattern) for pattern in patterns]
        self._tables = [_Table(program) for program in self._programs]
        self._pieces, self._vocabulary = vocabulary.pieces, vocabulary
        self._known: dict[tuple, np.ndarray] = {}  # tokens by their ids, or a bit each, whichever is less
        self._looking = threading.Lock()
        self.begin = Place(tuple(program.begin for program in self._programs))

    def past(self, place: Place, token: int) -> tuple[Place, int | None]:
        """The place behind ``token``, and where a constraint begins that it triggers; None if it triggers none."""
        text = place.text + self._pieces[token]
        after: list[tuple[tuple[int, Saves], ...]] = []
        for program, ways in zip(self._programs, place.ways):
            open_ways, matched = list(ways), None
            for at in range(len(place.text), len(text)):
                open_ways, matched = program.step(open_ways, text[at], at + 1, matched)
            last = program.at_end(open_ways, len(text))
            matched = last if last is not None else matched
            if matched is not None:
                return Place((), text), program.start(matched)
            after.append(tuple(open_ways))
        return Place(tuple(after), text), None

    def ending(self, place: Place) -> np.ndarray:
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
                    out |= table.ending(ways, pieces, table.program.work + MOST_WORK)
                found = out.nonzero()[0].astype(np.int32)
                self._known[key] = found if found.nbytes <= out.size // 8 else np.packbits(out)
            return found if found.dtype == np.int32 else np.unpackbits(found, count=len(self._pieces)).nonzero()[0]

    def allowance(self) -> int:
        """What ``check`` is given: the work until which all is well."""
        return sum(program.work for program in self._programs) + MOST_WORK

    def check(self, allowance: int) -> None:
        """Raises EngineError: too much was looked at since."""
        if sum(program.work for program in self._programs) > allowance:
            raise _too_much()


def _too_much() -> EngineError:
    return EngineError(f"the patterns of the triggers take more than {MOST_WORK} steps for one token; make them simpler")
