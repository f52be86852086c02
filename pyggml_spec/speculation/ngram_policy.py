"""When to verify what came before (suffix.py), and how many rows of it: whenever that wins more than the step that would run instead.

A step wins the tokens that it is expected to give, less what its milliseconds give at the pace of the last steps. The most tokens per
millisecond of the next step alone would not be the fastest text: behind a token that nobody foresees comes a match, and one plain token gets
there sooner than a dear block. Taking the step that wins most leads to the highest pace there is (Howard's policy iteration): over three
workloads it is within 2.5 % of the best single method, or above it, where tokens per millisecond fell to 12 % below.
"""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from ..engine.options import MOST_SLOTS
from .conditions import Conditioned
from .confidence import as_of_one
from .ngram import LOOKUPS, NgramDrafts, NgramPool

PACE_DECAY = 0.98  # of the tokens and milliseconds of steps, per step
FIRST_WEIGHT = 20  # steps that the first pace counts for
WARMUP = 2  # steps of a new graph that do not count: it is built, and captured by ggml-cuda
COST_RATE = 0.1  # weight of one step in the running cost of its rows
MEASURED_WEIGHT = 4  # steps that a cost counts for which was measured beforehand
SETTLED = 1 / COST_RATE - MEASURED_WEIGHT  # steps after which one has this weight
LONG_RATE = 0.02  # that beyond twice what was measured: behind long texts steps take that long, but some stalled ones prove nothing
FORGET = 0.02  # of what the cost of other rows has become, per step: rows that stalled a few times would never be tried again
FORGETS = 8  # steps together: 3 us less for each of them
ROW_COST = 0.6  # of a plain step, for each further row: on the dear side, until blocks have run
PLAIN_STEPS = 6  # whose median such costs are taken from


class Pace:
    """Tokens per millisecond of the last steps."""

    def __init__(self, tokens: float, milliseconds: float) -> None:
        """What a step brings that is known already."""
        self._tokens, self._milliseconds = FIRST_WEIGHT * tokens, FIRST_WEIGHT * milliseconds

    def observe(self, tokens: int, milliseconds: float) -> None:
        self._tokens = PACE_DECAY * self._tokens + tokens
        self._milliseconds = PACE_DECAY * self._milliseconds + milliseconds

    def wins(self, tokens: float, milliseconds: float) -> float:
        """What a step wins that is expected to bring ``tokens`` in ``milliseconds``."""
        return tokens - self._tokens / self._milliseconds * milliseconds


class Choice(NamedTuple):
    """``drafts`` that each sequence is to verify now, none of some; ``otherwise``: whether those do what they would do otherwise, or take a plain
    token each."""

    drafts: list[list[int]]
    otherwise: bool


# by sequences, where nothing is found, or nothing that is worth it: the answers of most steps of most texts
NOTHING, PLAINLY = ([Choice([[] for _ in range(n)], otherwise) for n in range(MOST_SLOTS + 1)] for otherwise in (True, False))


class NgramPolicy(Conditioned):
    """For the sequences of one engine.

    Args:
        method: of ``suffix.LOOKUPS``.
        costs: milliseconds of a step of one sequence by rows, which verifies given ids; 1: a plain one. The rows that blocks can have.
    """

    _apart = ("_costs", "_alone", "_seen", "_plain")

    def __init__(self, method: str, costs: Mapping[int, float], pool: NgramPool | None = None, estimated: bool = False) -> None:
        """``estimated``: costs are in plain steps, and nothing is chosen before some of those were timed."""
        self.method, self._alone, self._estimated = method, dict(costs), estimated
        self._plain: list[float] | None = [] if estimated else None  # milliseconds of plain steps, until there are enough
        self.widths = tuple(sorted(rows for rows in costs if rows > 1))
        self.pool = pool or NgramPool(LOOKUPS[method], max(self.widths, default=1) - 1)
        self._costs: dict[tuple[int, int], float] = {(1, rows): ms for rows, ms in costs.items()}
        self._seen: dict[tuple[int, int], int] = {}
        self._steps = 0
        self._paces: dict[int, Pace] = {}

    @classmethod
    def unmeasured(cls, method: str, widths: Sequence[int]) -> "NgramPolicy":
        """One whose blocks of ``widths`` rows cost nothing before the first text: it begins with dear estimates, and learns from steps."""
        return cls(method, {rows: 1 + ROW_COST * (rows - 1) for rows in (1, *widths)}, estimated=True)

    def for_slots(self, widths: Sequence[int] = ()) -> "NgramPolicy":
        """For another engine over the same models, with blocks of these ``widths``: what has ended, and what matches were worth, they share."""
        if not self._estimated:
            return NgramPolicy(self.method, self._alone, self.pool)
        other = NgramPolicy.unmeasured(self.method, [rows for rows in widths or self.widths if rows > 1])
        other.pool = self.pool
        return other

    def _learn_plain(self, covered: int, milliseconds: float) -> None:
        """Takes costs from plain steps of so many sequences, once there were enough."""
        assert self._plain is not None
        self._plain.append(milliseconds / (1 + ROW_COST * (covered - 1)))
        if len(self._plain) > WARMUP + PLAIN_STEPS:
            step, self._plain = statistics.median(self._plain[WARMUP:]), None
            self._alone = {rows: step * (1 + ROW_COST * (rows - 1)) for rows in self._alone}
            self._costs = {(1, rows): ms for rows, ms in self._alone.items()}

    def begin(self, prompt: Sequence[int], owner: str = "") -> NgramDrafts:
        """A sequence that looks for matches, in ended ones of the same owner."""
        return self.pool.sequence(prompt, owner)

    def cost(self, covered: int, rows: int) -> float:
        """Milliseconds of a step of so many slots and rows that verifies given ids. Until one has run, as many rows of one sequence cost that."""
        known = self._costs.get((covered, rows))
        if known is not None:
            return known
        return as_of_one(self._alone, covered * rows)

    def finds_nothing(self, covered: int, sequence: NgramDrafts) -> bool:
        """Whether ``choose`` would answer NOTHING for this one sequence beside a plain step, as mostly."""
        return self._plain is not None or (covered in self._paces and not sequence.may_match)

    def choose(
        self, covered: int, sequences: Sequence[NgramDrafts | None], otherwise: Sequence[float], milliseconds: float | None, rows: int
    ) -> Choice:
        """What the sequences do now.

        Args:
            sequences: those of the step, None for one that is not looked up for.
            otherwise: tokens that each is expected to get in the step that runs otherwise, of ``rows`` rows and ``milliseconds`` (None: of a
                width that is pinned, at any cost).
        """
        if self._plain is not None:
            return NOTHING[len(sequences)]
        pace, matches = self._paces.get(covered), [s.find() if s is not None else None for s in sequences]
        any_match = any(matches)
        if not any_match and pace is not None and milliseconds is not None:  # most answers
            if rows == 1:
                return NOTHING[len(sequences)]
            # the one question is whether a plain token brings one to a match sooner
            sooner = pace.wins(float(len(sequences)), self.cost(covered, 1)) > pace.wins(sum(otherwise), milliseconds)
            return PLAINLY[len(sequences)] if sooner else NOTHING[len(sequences)]
        if milliseconds is None:  # all blocks have these rows, whoever drafts
            found = [s.tokens() if s is not None and match is not None else None for s, match in zip(sequences, matches)]
            return Choice(self._cut(sequences, self._better(found, otherwise, rows), rows), True)
        if pace is None:
            pace = self._paces[covered] = Pace(sum(otherwise), milliseconds)
            if not any_match:
                return self.choose(covered, sequences, otherwise, milliseconds, rows)
        best, wins = NOTHING[len(sequences)], pace.wins(sum(otherwise), milliseconds)
        found = [s.tokens() if s is not None and match is not None else None for s, match in zip(sequences, matches)]
        width = 0  # of the block that wins most
        for of in self.widths if rows == 1 else (*self.widths, 1):  # 1: plain tokens, of which a match may be one away
            tokens = sum([1.0 if curve is None else curve[min(of, len(curve)) - 1] for curve in found])
            if (won := pace.wins(tokens, self.cost(covered, of))) > wins:
                width, wins = of, won
        if (
            len(sequences) > 1 and rows > 1 and any(better := self._better(found, otherwise, rows))
        ):  # some look up, and others draft, in one step
            mixed = sum(_up_to(tokens, rows) if of else other for tokens, other, of in zip(found, otherwise, better))
            if pace.wins(mixed, milliseconds) > wins:
                return Choice(self._cut(sequences, better, rows), True)
        if width < 2:
            return PLAINLY[len(sequences)] if width else best
        return Choice(self._cut(sequences, [tokens is not None for tokens in found], width), False)

    @staticmethod
    def _better(found: Sequence[list[float] | None], otherwise: Sequence[float], rows: int) -> list[bool]:
        """Which sequences' matches promise more than what they would do otherwise."""
        return [_up_to(tokens, rows) > other for tokens, other in zip(found, otherwise)]

    @staticmethod
    def _cut(sequences: Sequence[NgramDrafts | None], chosen: Sequence[bool], rows: int) -> list[list[int]]:
        return [s.match.drafts[: rows - 1] if s is not None and s.match is not None and of else [] for s, of in zip(sequences, chosen)]

    @property
    def _costs_of_now(self) -> dict[tuple[int, int], float]:
        return self._costs

    def under(self, condition: Hashable, looks: int = 0) -> bool:
        changed = super().under(condition, looks)
        if changed:
            self._paces = {}
        return changed

    def observe(self, covered: int, rows: int | None, milliseconds: float, tokens: int) -> None:
        """A step brought ``tokens``; ``rows``: of one that only verified given ids, or None."""
        if self._plain is not None:
            if rows == 1:
                self._learn_plain(covered, milliseconds)
            return
        pace = self._paces.get(covered)
        if pace is not None:
            pace.observe(tokens, milliseconds)
        if rows is None:
            return
        key = covered, rows
        if self._is_new(key, milliseconds):
            self._compare(key)
            return
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        seen -= WARMUP  # that count
        if seen <= 0:
            return
        known, measured = self._costs.get(key), self._alone.get(rows) if covered == 1 else None
        if known is None or (seen == 1 and covered > 1):
            self._costs[key] = milliseconds
            return
        most = 2 * (measured or known)  # stalled steps prove nothing
        rate = COST_RATE if seen >= SETTLED else 1 / (seen + MEASURED_WEIGHT)
        cost = known + rate * (min(milliseconds, most) - known)
        if measured is not None and milliseconds > most:
            cost = max(cost, known + LONG_RATE * (min(milliseconds, 2 * max(measured, known)) - known))
        self._costs[key] = cost
        if self._estimated and measured is not None and rows > 1:
            self._alone[rows] = min(measured, cost)
        self._compare(key)
        self._steps += 1
        if measured is not None and not self._steps % FORGETS:
            self._forget(rows)

    def _compare(self, key: tuple[int, int]) -> None:
        if self._condition is not None and self._unseen:
            self._like(key)
            if key[0] == 1 and key in self._base:
                self._alone = {rows: self._costs[key] / self._base[key] * self._base[1, rows] for rows in self._alone}

    def _forget(self, rows: int) -> None:
        """Costs of others than these ``rows`` become what was measured, and longer behind long texts, where all rows take longer. Where plain steps
        are cheaper than measured, that says nothing of others."""
        longer, share = max(1.0, self._costs[1, 1] / self._alone[1]), 1 - (1 - FORGET) ** FORGETS
        for other in self._alone:
            if other not in (1, rows):
                self._costs[1, other] += share * (longer * self._alone[other] - self._costs[1, other])


def _up_to(tokens: list[float] | None, rows: int) -> float:
    """Expected tokens of a block of so many rows; 0 where there is no match."""
    return tokens[min(rows, len(tokens)) - 1] if tokens is not None else 0.0
