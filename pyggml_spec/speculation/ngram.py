"""N-gram (prompt lookup) drafting: the tokens that followed the longest match of the last ones.

A sequence searches its own prompt and output, and sequences that have ended (``Corpus``). The longest match wins, of equally long ones the last. Works
for every architecture; drafts are verified like all others. A match is drafted if its expected tokens per millisecond exceed those of the step that
would run instead; what a match would have given is learnt from every one found, drafted or not.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from ..engine.options import MOST_SLOTS
from .acceptance import Counts
from .cost_model import WARMUP, CostModel

MOST_TOKENS = 1 << 18  # of ended sequences together: about 40 MB with their index
MOST_OWNERS = 8  # whose ended sequences are kept apart from the others'; together they have as many tokens again
MOST_LOOKS = 16  # matches of the shortest length that are compared, the last ones first
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # lengths of matches are told apart by these lower bounds
PRIOR_WEIGHT = 3.0  # matches that the prior counts for
DECAY = 0.97  # of what was seen, per match of the same kind
TOKEN_BITS = 32  # of a token in the number that a run is
PACE_DECAY = 0.97  # weight of the tokens and milliseconds of a step, one step later
FIRST_WEIGHT = 20  # steps that the first pace counts for
ROW_COST = 0.6  # of a plain step, for each further row, where verifying was not measured: on the dear side
PLAIN_STEPS = 8  # that run before such estimates are used


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
    """Tokens in a row, and where each run of ``least`` of them was seen. A token below 0 is a border that no match crosses.

    Attributes:
        run: the last run, as one number; None with fewer tokens than it has.
        seen: the end of the run before it that is the same, -1 for none.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.tokens: list[int] = []
        self.run: int | None = None
        self.seen = -1
        self._mask, self._run, self._unbroken = (1 << TOKEN_BITS * least) - 1, 0, 0
        self._last: dict[int, int] = {}  # the end of the last of these runs
        self._before: list[int] = []  # by the end of a run: the end of the one before it, -1 for none

    def extend(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 1 and self._unbroken >= self.least and (token := tokens[0]) >= 0:  # most steps of most texts
            run = self.run = self._run = (self._run << TOKEN_BITS | token) & self._mask
            self.seen = self._last.get(run, -1)
            self.tokens.append(token)
            self._last[run] = len(self.tokens)
            self._before.append(self.seen)
            return
        least, last, before, end = self.least, self._last, self._before, len(self.tokens)
        mask, run, unbroken, seen = self._mask, self._run, self._unbroken, self.seen
        for token in tokens:
            end += 1
            if token < 0:
                unbroken, seen = 0, -1
            else:
                run = (run << TOKEN_BITS | token) & mask
                unbroken += 1
                if unbroken >= least:
                    seen = last.get(run, -1)
                    last[run] = end
            before.append(seen)
        self.tokens += tokens
        self._run, self._unbroken, self.seen, self.run = run, unbroken, seen, run if unbroken >= least else None

    def last(self, run: int) -> int:
        """The end of the last of these runs, -1 for none."""
        return self._last.get(run, -1)

    def longest(self, end: int, tail: Sequence[int], most: int) -> tuple[int, int]:
        """(length, end) of the longest match of the end of ``tail``, of those that end at ``end``, where its last run was seen, and before; (0, 0)
        for none."""
        best, found, tokens = 0, 0, self.tokens
        for _ in range(MOST_LOOKS):
            if end < 0:
                break
            bound = min(most, end, len(tail))
            # slices first: comparing token by token took a third of a step's host time in text with many matches
            if bound > best and (not best or tokens[end - best - 1 : end] == tail[-best - 1 :]):
                if bound == most and tokens[end - most : end] == tail[-most:]:
                    return most, end
                n = max(best, self.least)
                while n < bound and tokens[end - 1 - n] == tail[-1 - n]:
                    n += 1
                best, found = n, end
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
    """``drafts`` that followed the last match of ``length`` tokens, in the sequence's ``own`` text or in another."""

    length: int
    own: bool
    drafts: list[int]

    @property
    def kind(self) -> tuple[bool, int]:
        """Matches that are counted together."""
        return self.own, bisect_right(LENGTHS, self.length)


class Worth(Counts):
    """How far matches of one kind were right. ``chance``: of a draft, before anything was seen."""

    def __init__(self, chance: float, positions: int) -> None:
        super().__init__(positions)
        self.chance = chance
        self._tokens: list[float] | None = None

    def observe(self, matched: int, offered: int) -> None:
        """The first ``matched`` of ``offered`` drafts were right."""
        self.count(DECAY, offered, matched)
        self._tokens = None

    def tokens(self) -> list[float]:
        """The tokens that verifying the first 0, 1, 2, ... drafts is expected to give; what was seen of one position is the prior of the next."""
        if self._tokens is None:
            chances, chance = [], self.chance
            for tries, hits in zip(self.tries, self.hits):
                chance = (hits + PRIOR_WEIGHT * chance) / (tries + PRIOR_WEIGHT)
                chances.append(chance)
            self._tokens = list(accumulate(accumulate(chances, mul), initial=1.0))
        return self._tokens


class NgramPool:
    """What the sequences of a session share: ended ones, and what matches were worth. ``most_drafts``: of one block."""

    def __init__(self, lookup: Lookup = Lookup(), most_drafts: int = 15, most_tokens: int = MOST_TOKENS) -> None:
        self.lookup, self.most_drafts = lookup, most_drafts
        self.corpus = Corpus(lookup.least, most_tokens)
        self._owned: OrderedDict[str, Corpus] = OrderedDict()  # by owner, the last used one last
        self._worth: dict[tuple[bool, int], Worth] = {}

    def worth(self, match: Match) -> Worth:
        # a run of 3 that comes again goes on alike about half of the time, one of 12 nearly always
        kind = match.kind
        if kind not in self._worth:
            self._worth[kind] = Worth(1 - 0.5 ** (match.length / 3), self.most_drafts)
        return self._worth[kind]

    def corpus_of(self, owner: str) -> Corpus:
        """The ended sequences of this owner, "" for none."""
        if not owner:
            return self.corpus
        found = self._owned.pop(owner, None) or Corpus(self.lookup.least, self.corpus.most // MOST_OWNERS)
        self._owned[owner] = found
        if len(self._owned) > MOST_OWNERS:
            self._owned.popitem(last=False)
        return found

    def forget(self) -> None:
        """Forgets the sequences that have ended."""
        self.corpus = Corpus(self.lookup.least, self.corpus.most)
        self._owned.clear()

    def sequence(self, prompt: Sequence[int], owner: str = "") -> "NgramDrafts":
        """One that looks in what the same owner's sequences left."""
        return NgramDrafts(self, prompt, owner)


class NgramDrafts:
    """The drafts of one sequence. Per step: ``find``, perhaps ``tokens``, and ``extend`` with what came out; ``end`` when it has ended."""

    def __init__(self, pool: NgramPool, prompt: Sequence[int], owner: str = "") -> None:
        self.corpus = pool.corpus_of(owner)
        self.pool, self.own, self._shared = pool, Index(pool.lookup.least), pool.lookup.shared
        self.own.extend(prompt)
        self.match: Match | None = None
        self._watched: tuple[Match, int] | None = None  # a match that is being compared with what comes, and where its drafts begin

    @property
    def may_match(self) -> bool:
        """Whether the last tokens were there before: of most texts mostly not."""
        if self.own.seen >= 0:
            return True
        index, run = self.corpus.index, self.own.run
        return self._shared and run is not None and bool(index.tokens) and index.last(run) >= 0

    def find(self) -> Match | None:
        """Tokens that followed the longest match of the last tokens, if there is one."""
        own, pool, self.match = self.own, self.pool, None
        corpus = self.corpus.index
        run = own.run if self._shared and corpus.tokens else None
        elsewhere = -1 if run is None else corpus.last(run)
        if own.seen < 0 and elsewhere < 0:  # most tokens of most texts: 1 us
            return None
        most, longest = pool.most_drafts, pool.lookup.most
        length, end = own.longest(own.seen, own.tokens, longest)
        if elsewhere >= 0 and length < longest:
            other, at = corpus.longest(elsewhere, own.tokens[-longest:], longest)
            if other > length and (following := _until_border(corpus.tokens[at : at + most])):
                self.match = Match(other, False, following)
                return self.match
        if length and (following := _until_border(own.tokens[end : end + most])):  # a border: rows of a picture
            self.match = Match(length, True, _repeated(following, most))
        return self.match

    def tokens(self) -> list[float]:
        """The tokens that verifying the first 0, 1, 2, ... drafts of the match is expected to give; [1.0] where there is none."""
        if self.match is None:
            return [1.0]
        tokens, most = self.pool.worth(self.match).tokens(), 1 + len(self.match.drafts)
        return tokens if len(tokens) <= most else tokens[:most]

    def extend(self, tokens: Sequence[int]) -> None:
        """What a step brought."""
        if self.match is not None:
            if self._watched is None:
                self._watched = self.match, len(self.own.tokens)
            self.match = None
        self.own.extend(tokens)
        if self._watched is not None:
            self._judge(*self._watched)

    def _judge(self, match: Match, first: int) -> None:
        came, drafts = self.own.tokens[first : first + len(match.drafts)], match.drafts
        if came == drafts[: len(came)]:
            right = len(came)
            if right < len(drafts):
                return
        else:
            right = next(i for i, (a, b) in enumerate(zip(drafts, came)) if a != b)
        self.pool.worth(match).observe(right, len(drafts))
        self._watched = None

    def end(self) -> None:
        """The sequence has ended: others may repeat it."""
        if self.pool.lookup.shared:
            self.corpus.add(self.own.tokens)


def _repeated(tokens: list[int], count: int) -> list[int]:
    """``count`` tokens: those, over and over. A match that reaches the end of a text is one period before it."""
    return tokens if len(tokens) == count else (tokens * (count // len(tokens) + 1))[:count]


def _until_border(tokens: list[int]) -> list[int]:
    return tokens if not tokens or min(tokens) >= 0 else tokens[: next(i for i, token in enumerate(tokens) if token < 0)]


class Choice(NamedTuple):
    """``drafts`` that each sequence verifies now, empty for some; ``otherwise``: whether those do what they would do without n-gram drafts, or take a plain
    token each."""

    drafts: list[list[int]]
    otherwise: bool


# by sequences, where no match is found or worth it: shared, because these are the results of most steps
NOTHING, PLAINLY = ([Choice([[] for _ in range(n)], otherwise) for n in range(MOST_SLOTS + 1)] for otherwise in (True, False))


class NgramMethod:
    """Chooses for the sequences of one engine when to verify matches, and how many rows of them.

    A step wins the tokens that it is expected to give, less what its milliseconds give at the pace of the last steps; the step that wins most runs. That
    leads to the highest pace there is (Howard's policy iteration), where the most tokens per millisecond of the next step alone would not: a plain token may
    be one away from a match.

    Args:
        method: of ``LOOKUPS``.
        costs: milliseconds of verifying by rows, one sequence; 1: a plain step. The rows that blocks can have.
        relative: costs are in plain steps, and nothing is chosen before some of those ran.
    """

    def __init__(self, method: str, costs: Mapping[int, float], pool: NgramPool | None = None, relative: bool = False) -> None:
        self.method, self._measured, self._relative = method, dict(costs), relative
        self.widths = tuple(sorted(rows for rows in costs if rows > 1))
        self.pool = pool or NgramPool(LOOKUPS[method], max(self.widths, default=1) - 1)
        self.costs = CostModel({(1, rows): ms for rows, ms in costs.items()}, relative)
        self._timed = not relative
        self._paces: dict[int, tuple[float, float]] = {}  # by slots: tokens and milliseconds of the last steps

    @classmethod
    def unmeasured(cls, method: str, widths: Sequence[int]) -> "NgramMethod":
        """With estimated costs, on the dear side, for blocks of these ``widths``."""
        return cls(method, {rows: 1 + ROW_COST * (rows - 1) for rows in (1, *widths)}, relative=True)

    def for_slots(self, widths: Sequence[int] = ()) -> "NgramMethod":
        """For another engine over the same models: it shares ended sequences and what matches were worth."""
        if not self._relative:
            return NgramMethod(self.method, self._measured, self.pool)
        other = NgramMethod.unmeasured(self.method, [rows for rows in widths or self.widths if rows > 1])
        other.pool = self.pool
        return other

    @property
    def timed(self) -> bool:
        """Whether it is known what a plain step takes."""
        return self._timed

    def tell(self, slots: int, plain_ms: float) -> None:
        """Milliseconds of a plain step of so many slots, where a policy knows them."""
        while self.costs.steps((1, 1)) <= WARMUP:
            self.costs.observe((1, 1), plain_ms / (1 + ROW_COST * (slots - 1)))
        self._timed = True

    def begin(self, prompt: Sequence[int], owner: str = "") -> NgramDrafts:
        """A sequence that looks for matches, in ended ones of the same owner."""
        return self.pool.sequence(prompt, owner)

    def cost(self, slots: int, rows: int) -> float:
        """Milliseconds of verifying so many rows of each slot; until such steps have run, what as many rows of one slot cost."""
        return self.costs.of_rows(slots, rows, (1, *self.widths))

    def finds_nothing(self, slots: int, sequence: NgramDrafts) -> bool:
        """Whether ``choose`` would return NOTHING for this one sequence with a plain step, as mostly."""
        return not self._timed or (slots in self._paces and not sequence.may_match)

    def choose(
        self, slots: int, sequences: Sequence[NgramDrafts | None], otherwise: Sequence[float], ms: float | None, rows: int
    ) -> Choice:
        """What the sequences do now.

        Args:
            sequences: those of the step, None for one without n-gram drafts.
            otherwise: tokens that each is expected to get in the step that runs otherwise, of ``rows`` rows and ``ms`` (None: of a pinned length, at any
                cost).
        """
        n = len(sequences)
        if not self._timed:
            return NOTHING[n]
        matches = [s.find() if s is not None else None for s in sequences]
        if ms is None:
            return Choice(self._cut(sequences, self._better(matches, sequences, otherwise, rows), rows), True)
        if slots not in self._paces:
            self._paces[slots] = FIRST_WEIGHT * sum(otherwise), FIRST_WEIGHT * ms
        pace = self._paces[slots][0] / self._paces[slots][1]
        best, wins, found = 0, sum(otherwise) - pace * ms, any(matches)  # rows of the n-gram step that wins most; 0 where none does
        if rows > 1 and (plain := n - pace * self.cost(slots, 1)) > wins:
            best, wins = 1, plain
        if not found:
            return PLAINLY[n] if best else NOTHING[n]
        curves = [s.tokens() if s is not None and match is not None else None for s, match in zip(sequences, matches)]
        for width in self.widths:
            won = sum([1.0 if curve is None else curve[min(width, len(curve)) - 1] for curve in curves]) - pace * self.cost(slots, width)
            if won > wins:
                best, wins = width, won
        if n > 1 and rows > 1:  # some verify matches, and others draft, in one step
            better = self._better(matches, sequences, otherwise, rows)
            mixed = sum(_up_to(curve, rows) if of else other for curve, other, of in zip(curves, otherwise, better))
            if any(better) and mixed - pace * ms > wins:
                return Choice(self._cut(sequences, better, rows), True)
        if best < 2:
            return PLAINLY[n] if best else NOTHING[n]
        return Choice(self._cut(sequences, [curve is not None for curve in curves], best), False)

    @staticmethod
    def _better(
        matches: Sequence[Match | None], sequences: Sequence[NgramDrafts | None], otherwise: Sequence[float], rows: int
    ) -> list[bool]:
        """Which sequences' matches promise more than what they would do otherwise."""
        return [s is not None and m is not None and _up_to(s.tokens(), rows) > other for m, s, other in zip(matches, sequences, otherwise)]

    @staticmethod
    def _cut(sequences: Sequence[NgramDrafts | None], chosen: Sequence[bool], rows: int) -> list[list[int]]:
        return [s.match.drafts[: rows - 1] if s is not None and s.match is not None and of else [] for s, of in zip(sequences, chosen)]

    def set_condition(self, condition: Hashable, looks: int = 0) -> bool:
        """As of ``CostModel``."""
        changed = self.costs.set_condition(condition, looks)
        if changed:
            self._paces = {}
        return changed

    def observe(self, slots: int, rows: int | None, ms: float, tokens: int) -> None:
        """A step brought ``tokens``; ``rows``: of one that verified n-gram drafts alone, or took plain tokens; else None."""
        if slots in self._paces:
            before = self._paces[slots]
            self._paces[slots] = PACE_DECAY * before[0] + tokens, PACE_DECAY * before[1] + ms
        if not self._timed and rows == 1:
            self.costs.observe((1, 1), ms / (1 + ROW_COST * (slots - 1)))
            self._timed = self.costs.steps((1, 1)) > PLAIN_STEPS
        elif rows is not None:
            self.costs.observe((slots, rows), ms)


def _up_to(tokens: list[float] | None, rows: int) -> float:
    """Expected tokens of a block of so many rows; 0 where there is no match."""
    return tokens[min(rows, len(tokens)) - 1] if tokens is not None else 0.0
