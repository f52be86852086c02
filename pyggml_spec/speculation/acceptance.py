"""How many draft tokens are accepted: a survival curve per sequence and method, with what all sequences showed as its prior."""

from itertools import accumulate

DECAY = 0.95  # weight of a block one step later: half of the weight lies on the last 13 steps
PRIOR_DECAY = 0.995  # the same of what all sequences showed, per block
ASSUMED_ACCEPTANCE = 0.8  # of a draft token before any was verified
ASSUMED_WEIGHT = 4.0  # blocks that the assumption counts for
PRIOR_SHARE, PRIOR_WEIGHT = 0.125, 16.0  # share of their blocks that all sequences count for in one, and at most so many
LEAST_CHANCE, MOST_CHANCE = 0.01, 0.99  # of a draft token: nothing is certain


class Counts:
    """By position: how often a draft token was verified with all before it accepted (``tries``), and how often it was accepted (``hits``)."""

    def __init__(self, positions: int) -> None:
        self.tries, self.hits = [0.0] * positions, [0.0] * positions

    def count(self, decay: float, offered: int, matched: int) -> None:
        """A block of ``offered`` draft tokens, of which the first ``matched`` were accepted; older blocks weigh ``decay`` less."""
        self.tries, self.hits = [decay * n for n in self.tries], [decay * n for n in self.hits]
        for i in range(min(offered, matched + 1, len(self.tries))):
            self.tries[i] += 1
            self.hits[i] += i < matched


class AcceptancePrior(Counts):
    """Of one method, over all sequences: how often draft token i was accepted when all before it were. Stored between sessions.

    Attributes:
        tries, hits: by position.
        blocks: observed in this process.
    """

    def __init__(self, positions: int, assumed: float = ASSUMED_ACCEPTANCE) -> None:
        super().__init__(positions)
        self.assumed, self.blocks = assumed, 0
        self._odds: dict[float, list[float]] = {}

    def observe(self, tokens: int, matched: int) -> None:
        """A block of ``tokens`` - 1 draft tokens, of which the first ``matched`` were accepted."""
        self.count(PRIOR_DECAY, tokens - 1, matched)
        self.blocks += 1
        self._odds = {}

    def load(self, other: "AcceptancePrior") -> None:
        """Continues from the counts of another one."""
        n = min(len(self.tries), len(other.tries))
        self.tries[:n], self.hits[:n] = other.tries[:n], other.hits[:n]
        self._odds = {}

    @property
    def weight(self) -> float:
        """Blocks that this counts for in a sequence."""
        return min(PRIOR_WEIGHT, ASSUMED_WEIGHT + PRIOR_SHARE * self.tries[0])

    def odds(self, assumed: float) -> list[float]:
        """Of each draft token, given that all before it were accepted. A position that was never verified is like the one before it."""
        if assumed not in self._odds:
            out, chance = [], assumed
            for tries, hits in zip(self.tries, self.hits):
                chance = (hits + ASSUMED_WEIGHT * chance) / (tries + ASSUMED_WEIGHT)
                out.append(_odds(chance))
            self._odds[assumed] = out
        return self._odds[assumed]


class AcceptanceTracker(Counts):
    """Of one sequence and method. A first draft token that is better than the prior's makes the odds of later ones better by the same factor."""

    def __init__(self, prior: AcceptancePrior) -> None:
        super().__init__(len(prior.tries))
        self.prior, self._plain = prior, 0
        self._tokens: list[float] | None = None

    def pause(self, steps: int = 1) -> None:
        """Steps without this method: what was seen fades into the prior."""
        self._plain += steps
        self._tokens = None

    def observe(self, tokens: int, matched: int) -> None:
        """A block of ``tokens`` - 1 draft tokens, of which the first ``matched`` were accepted."""
        self.count(DECAY ** (1 + self._plain), tokens - 1, matched)
        self._plain, self._tokens = 0, None

    def survival(self, assumed: float | None = None, wrong: float = 0.0) -> list[float]:
        """The probability that the first 1, 2, ... draft tokens are accepted. ``wrong``: further blocks that count as rejected."""
        out, alive, better, fade, weight = [], 1.0, 1.0, DECAY**self._plain, self.prior.weight
        for tries, hits, odds in zip(self.tries, self.hits, self.prior.odds(self.prior.assumed if assumed is None else assumed)):
            better *= odds
            chance = (fade * hits + weight * better / (1 + better)) / (fade * tries + weight + wrong)
            better, wrong = _odds(chance) / odds, 0.0
            alive *= chance
            out.append(alive)
        return out

    def tokens(self) -> list[float]:
        """Expected tokens of a step with 0, 1, 2, ... draft tokens."""
        if self._tokens is None:
            self._tokens = list(accumulate(self.survival(), initial=1.0))
        return self._tokens


def _odds(chance: float) -> float:
    bounded = LEAST_CHANCE if chance < LEAST_CHANCE else MOST_CHANCE if chance > MOST_CHANCE else chance  # noqa: FURB136  (in every step)
    return bounded / (1 - bounded)
