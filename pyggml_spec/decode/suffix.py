"""Drafts from what was written before: the tokens that came behind the longest match of the last ones.

A sequence looks in its own prompt and output, and in sequences that have ended (``Corpus``). The longest match wins, and of equally long ones the
last. No model drafts here, so it works for every architecture; the ids are verified like any drafts.

Whether a match is worth a step is known before it: matches of a length were right so often, and a step of so many rows costs so much. What a
match is worth is learnt from every one that is found, drafted or not: what came instead is compared with it, which costs nothing. Without that
gate, drafts of this kind cost a third of the speed where nothing repeats (32 % on a summary; docs/drafters.md has the source).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

MOST_TOKENS = 1 << 18  # of ended sequences together: about 40 MB with their index
MOST_LOOKS = 16  # matches of the shortest length that are compared, the last ones first
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # lengths of matches are told apart by these lower bounds
PRIOR_WEIGHT = 3.0  # matches that the prior counts for
DECAY = 0.97  # of what was seen, per match of the same kind


@dataclass(frozen=True)
class Lookup:
    """How matches are looked for.

    Attributes:
        least, most: tokens of a match; what it has beyond ``most`` does not make it better.
        shared: whether sequences that have ended count, too.
    """

    least: int = 3
    most: int = 32
    shared: bool = True


# llama.cpp's: the last match of so many tokens wins, however far it goes on. Its drafts are not gated, and up to 48 or 64 tokens long
LOOKUPS = {
    "suffix": Lookup(),
    "ngram-simple": Lookup(12, 12, False),
    "ngram-map-k": Lookup(12, 12, False),
    "ngram-mod": Lookup(24, 24, True),
}


class Index:
    """Tokens in a row, and where each run of ``least`` of them was seen. A token below 0 is a border that no match crosses."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # the end of the last run of these tokens
        self._before: list[int] = []  # by the end of a run: the end of the one before it, -1 for none

    def extend(self, tokens: Sequence[int]) -> None:
        all_tokens, least, last, before = self.tokens, self.least, self._last, self._before
        for token in tokens:
            all_tokens.append(token)
            run, end = tuple(all_tokens[-least:]), len(all_tokens)
            usable = end >= least and min(run) >= 0
            before.append(last.get(run, -1) if usable else -1)
            if usable:
                last[run] = end

    def longest(self, tail: Sequence[int], most: int, itself: bool) -> tuple[int, int]:
        """(length, end) of the longest match of the end of ``tail``, (0, 0) for none. ``itself``: ``tail`` are these very tokens."""
        best, found, tokens = 0, 0, self.tokens
        end = self._last.get(tuple(tail[-self.least :]), -1)
        if itself and end == len(tokens):
            end = self._before[end - 1]
        for _ in range(MOST_LOOKS):
            if end < 0:
                break
            n, bound = self.least, min(most, end, len(tail))
            while n < bound and tokens[end - 1 - n] == tail[-1 - n]:
                n += 1
            if n > best:
                best, found = n, end
                if n >= most:
                    break
            end = self._before[end - 1]
        return best, found


class Corpus:
    """Sequences that have ended, at most ``most`` tokens of them: the oldest half is forgotten when there are more."""

    def __init__(self, least: int, most: int = MOST_TOKENS) -> None:
        self.least, self.most, self.index = least, most, Index(least)

    def add(self, tokens: Sequence[int]) -> None:
        if len(tokens) <= self.least:
            return
        self.index.extend([*tokens[-self.most // 2 :], -1])
        if len(self.index.tokens) > self.most:
            kept, self.index = self.index.tokens[-self.most // 2 :], Index(self.least)
            self.index.extend(kept)


class Match(NamedTuple):
    """``drafts`` that came behind the last match of ``length`` tokens, in the sequence's ``own`` text or in another."""

    length: int
    own: bool
    drafts: list[int]

    @property
    def kind(self) -> tuple[bool, int]:
        """Matches that are counted together."""
        return self.own, bisect_right(LENGTHS, self.length)


class Worth:
    """How far matches of one kind were right: per position, how often a draft was when all before it were."""

    def __init__(self, chance: float, positions: int) -> None:
        self.chance = chance  # before anything was seen
        self.tries, self.hits = [0.0] * positions, [0.0] * positions

    def observe(self, matched: int, offered: int) -> None:
        """The first ``matched`` of ``offered`` drafts were right."""
        for i in range(len(self.tries)):
            self.tries[i] *= DECAY
            self.hits[i] *= DECAY
        for i in range(min(offered, matched + 1, len(self.tries))):
            self.tries[i] += 1
            self.hits[i] += i < matched

    def survival(self) -> list[float]:
        """The probability that the first 1, 2, ... drafts are right; what was seen of one position is what the next is thought to be like."""
        out, alive, chance = [], 1.0, self.chance
        for tries, hits in zip(self.tries, self.hits):
            chance = (hits + PRIOR_WEIGHT * chance) / (tries + PRIOR_WEIGHT)
            alive *= chance
            out.append(alive)
        return out


class SuffixPool:
    """What the sequences of a session share: ended ones, and what matches were worth. ``most_drafts``: of one block."""

    def __init__(self, lookup: Lookup = Lookup(), most_drafts: int = 15, most_tokens: int = MOST_TOKENS) -> None:
        self.lookup, self.most_drafts = lookup, most_drafts
        self.corpus = Corpus(lookup.least, most_tokens)
        self._worth: dict[tuple[bool, int], Worth] = {}

    def worth(self, match: Match) -> Worth:
        # a run of 3 that comes again goes on alike about half of the time, one of 12 nearly always
        return self._worth.setdefault(match.kind, Worth(1 - 0.5 ** (match.length / 3), self.most_drafts))

    def sequence(self, prompt: Sequence[int]) -> "SuffixDrafts":
        return SuffixDrafts(self, prompt)


class SuffixDrafts:
    """The drafts of one sequence. Per step: ``find``, perhaps ``tokens``, and ``extend`` with what came out; ``end`` when it has ended."""

    def __init__(self, pool: SuffixPool, prompt: Sequence[int]) -> None:
        self.pool, self.own = pool, Index(pool.lookup.least)
        self.own.extend(prompt)
        self.match: Match | None = None
        self._watched: tuple[Match, int] | None = None  # a match that is being compared with what comes, and where its drafts begin

    def find(self) -> Match | None:
        """What came behind the longest match of the last tokens, if there is one."""
        lookup, own, most = self.pool.lookup, self.own.tokens, self.pool.most_drafts
        length, end = self.own.longest(own, lookup.most, True)
        drafts = _repeated(own[end : end + most], most) if length else []
        if lookup.shared and length < lookup.most:
            corpus = self.pool.corpus.index
            other, end = corpus.longest(own[-lookup.most :], lookup.most, False)
            if other > length and (behind := _until_border(corpus.tokens[end : end + most])):
                length, drafts = other, behind
                self.match = Match(length, False, drafts)
                return self.match
        self.match = Match(length, True, drafts) if drafts else None
        return self.match

    def tokens(self) -> list[float]:
        """The tokens that verifying the first 0, 1, 2, ... drafts of the match is expected to give; [1.0] where there is none."""
        if self.match is None:
            return [1.0]
        return list(accumulate(self.pool.worth(self.match).survival()[: len(self.match.drafts)], initial=1.0))

    def extend(self, tokens: Sequence[int]) -> None:
        """What a step brought."""
        if self._watched is None and self.match is not None:
            self._watched = self.match, len(self.own.tokens)
        self.own.extend(tokens)
        self.match = None
        if self._watched is not None:
            self._judge(*self._watched)

    def _judge(self, match: Match, first: int) -> None:
        came = self.own.tokens[first : first + len(match.drafts)]
        right = next((i for i, (a, b) in enumerate(zip(match.drafts, came)) if a != b), None)
        if right is not None or len(came) == len(match.drafts):
            self.pool.worth(match).observe(len(came) if right is None else right, len(match.drafts))
            self._watched = None

    def end(self) -> None:
        """The sequence has ended: others may repeat it."""
        if self.pool.lookup.shared:
            self.pool.corpus.add(self.own.tokens)


def _repeated(tokens: list[int], count: int) -> list[int]:
    """``count`` tokens: those, over and over. A match that reaches the end of a text is one period before it."""
    return [tokens[i % len(tokens)] for i in range(count)] if tokens else []


def _until_border(tokens: list[int]) -> list[int]:
    return tokens[: next((i for i, token in enumerate(tokens) if token < 0), len(tokens))]
