"""Width control: who drafts the next block, how many drafts, and in how many rows they are verified, or none of that where plain decoding is
faster. For one slot or for many.

Expected tokens of a block of W rows are E(W) = 1 + a_1 + ... + a_{W-1}, where a_i is the probability that the first i drafts are all
accepted; of several sequences that share a step, the sum of theirs. The kind of step, a drafter, a width and the rows of the graph, with the
most tokens per millisecond, E(W) / cost, is used: each draft of a chain costs a pass of its own, and graphs there are for a few numbers of
rows, of which more can cost less. Costs are measured, because they are not even monotonic (27B shape on one H200: 1 row 11.1 ms, 2 13.6,
4 19.8, 8 28.9, 16 24.4), and because they depend on how many slots a step covers (there, 16 rows 24 ms, 64 rows 39): beforehand
(``calibrate.py``), or from the steps themselves, each kind TRIES times when a number of slots is first seen, unless fewer and more slots are
known, between which the costs then are taken to lie. AcceptanceTracker is tracked per sequence and drafter.

Blocks may lose against plain decoding what they have won, CREDIT at the start, and PROBE_LOSS of the time, both more where many tokens are asked
for; of that each text TEXT_LOSS and what it has won itself, as soon as it is known how good drafts are. Each begins with TEXT_LOSS at least: what one
unlucky text had lost kept blocks away from those behind it. A block that could lose more than that is
not tried, and more than a third of it only where no other is cheaper: that bounds what a drafter costs that is never right, whatever the costs are,
and lets several blocks say whether it is.
A text for which nothing is left goes on with blocks that pay even if nothing is assumed of drafts and DOUBT more of them are wrong: else three
unlucky blocks at its beginning, whose tokens are the hardest to foresee, were its last ones where blocks are dear. What sequences teach, position
by position, is what the next one begins with. By recorded drafts of 20 texts, eight rounds, with what blocks behind plain steps take longer, the
rules before (what all texts had won any of them could lose, one chance for all positions, and no block without means) gave 1.11 of plain decoding
on average and 0.92 in the worst text with costs of 1.04, 1.59, 2.8, 3.03, 4.44 ms, and these 1.16 and 1.00; 1.60 and 1.24 with 3.86, 5.68, 6.3,
8.05, 14, and these 1.65 and 1.25 (``tests/speculation/test_policy.py``). Where a drafter says what its drafts are worth, blocks count as what they
become: drafts that were not verified bring nothing, and their rows cost nothing (``confidence.py``). A plain step that keeps the drafter's inputs
takes 2 to 4 % more there, so where no block pays by what was seen most texts are decoded without them.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .conditions import Conditioned
from .confidence import Confidence


class StepPlan(NamedTuple):
    """What a decoding step does.

    Attributes:
        method: which drafter drafts; "" for none, or for the only one.
        draft_tokens: draft tokens per sequence; 0 is plain decoding.
        verify_len: rows of the verification graph per sequence, at least ``draft_tokens`` + 1.
    """

    method: str
    draft_tokens: int
    verify_len: int

    @classmethod
    def of(cls, method: str, tokens: int, verify_len: int = 0) -> "StepPlan":
        """A plan by the tokens that a sequence gets at most, one more than its draft tokens."""
        return cls(method, tokens - 1, verify_len or tokens)

    @property
    def tokens(self) -> int:
        """Tokens that a sequence gets at most."""
        return self.draft_tokens + 1

    @property
    def label(self) -> str:
        """For messages."""
        if not self.draft_tokens:
            return "plain decoding"
        return f"width {self.tokens}" + (f" in {self.verify_len} rows" if self.verify_len > self.tokens else "")


PLAIN_STEP = StepPlan("", 0, 1)

# Chosen on the drafts of the embedded pair's 20 held-out prompts, replayed one after the other, 128 tokens each, with the step costs of several
# machines: mean speed-up 2.13 (two fast cores, own kernels), 1.39 (two cores, ggml's), 1.65 (27B shape on one H200); the best fixed width for
# all of them reaches 2.15, 1.40 and 1.57. A drafter that is never right costs 4 % of a first prompt of
# 96 tokens and 0.5 to 1.5 % of those that follow (of 256 tokens 3 %, then 1 to 2.3).
DECAY = 0.95  # per step, plain ones too: half of the weight lies on the last 13 steps
TEAM_DECAY = 0.97  # where drafters are compared, over half as many steps again: both over the better one alone 0.967 to 1.002, with this 0.979 to 1.011
LONG_DECAY = 0.995  # of what all sequences showed, per block
PRIOR_ACCEPTANCE = 0.8  # of the first draft, before anything was seen
ASSUMED_WEIGHT = 4.0  # blocks that this counts for
PRIOR_WEIGHT, SHARE = 16.0, 0.125  # blocks that what other sequences showed counts for in one, at most, and of each of theirs
LEAST_CHANCE = 0.01  # of a draft: nothing is certain
STRANGE, SELDOM = (
    0.08,
    math.log(0.001 / 0.999),
)  # first drafts that are right where a drafter knows nothing of a text, and the odds of such a text
DOUBT = 2.0  # blocks more that may be wrong where a text has lost what it may lose, and drafts go on
MARGIN = 1.03  # another kind has to be this much better to be worth a change; where drafters are compared no more than the one in use is
FIRST_PROBE = 2  # plain steps at least before speculation is tried again; doubled each time it does not pay
LAST_PROBE = 128  # what may be lost bounds tries anyway; with 768 a drafter that was wrong for 600 tokens was found right too late
CREDIT = 3.8  # plain steps, as many whole blocks as they pay for: 3 % of 128 tokens, once per session
PROBE_LOSS = 0.005  # of the time, ever after
# What a text may lose is TEXT_SHARE of the tokens asked for: beside TEXT_LOSS at once, LOSSES at most of its time, and once per session CREDIT_SHARE of
# them, CREDITS at most, in place of CREDIT. By recorded drafts, each of 20 texts the first of its session, 156 tokens asked for, costs of an EPYC 9004 (two
# threads, one) and of a busy Xeon: 1.43, 1.37, 1.15 where CREDIT and PROBE_LOSS gave 1.43, 1.24, 1.07; a drafter that is never right takes 3 to 4 % of that
# first one instead of 2 to 2.5.
TEXT_SHARE, LOSSES, CREDIT_SHARE, CREDITS = 0.02, 0.01, 0.03, 6.0
STAKES, NEAR = 3.0, 1.25  # blocks that what may be lost has to pay for, unless one costs no more than NEAR times what the cheapest one does
TEXT_LOSS = 1.5  # plain steps that a text may lose before it has won any
HOPELESS, LOOK_AGAIN, FOR_A_REST = 0.95, 6, 4.0  # of plain decoding's speed; texts; blocks seen for one that rests
SURE_SHARE, USUAL = 0.08, 96
SAVINGS = 12.0  # plain steps that blocks have won and may lose again, at most
TOO_SLOW = 0.6  # a measured cost that a quarter of the real steps undercut by this factor is wrong
# The first of some blocks finds caches cold: on two cores of an EPYC 9005 0.95 ms behind 30 plain steps, 0.77 behind a prompt, then 0.61, 0.59, 0.57. So it
# says nothing of what blocks cost, unless it took less than SURELY of that. Costs of a slow moment kept blocks away from texts for the rest of a session, and
# so did those that first blocks had made dearer (replays: 1.03 of plain decoding instead of 1.48).
SURELY, LOOK_RATE = 0.9, 0.9
COLD = 4  # steps behind a prompt that find caches cold, plain ones too: 0.84, 0.52, 0.45, 0.40, 0.35 ms, then 0.31; blocks of four 1.45, 1.13, 0.93, then 0.78
LATE_RATE = 0.2  # weight of one block behind plain steps in what those take longer
COST_RATE = 0.05  # weight of one step in the running cost of its kind
MEASURED_WEIGHT = 4  # steps that a cost counts for which was measured beforehand: what the steps of this text take is learnt soon
RUN = 4.0  # blocks in a row that share what the first of them has to catch up with, at least
UNSURE = 8  # plain steps between two such looks: 20 us that a step need not take
WIDER_PROBE = 48  # steps between looks at wider blocks than the one in use
CHAINS = (2, 3, 4, 5, 6, 8, 12, 16)  # rows that count of a chain's blocks: each draft costs a pass of its own
# Steps between looks at another drafter than the one in use, and steps of a look. Recorded drafts of both of the embedded pair's (tests/speculation/test_policy.py):
# 2.3 % behind the best fixed kind on average over the orders, on the worst of four machines, and 5.3 in the worst order.
OTHER_PROBE, OTHER_LOOK = 12, 2
HOPED_ACCEPTANCE = 0.9  # of each draft of another drafter: what it could not win with that is not looked at
WARMUP = 2  # steps of a new graph that do not count: it is built, and captured by ggml-cuda
TRIES = WARMUP + 2
NEVER_PAYS = "plain decoding: no block width would be faster here even if every draft were accepted"


class AcceptancePrior:
    """How often each draft of one drafter was right when all before it were, of all sequences, with a long memory: what a sequence begins with.

    ``assumed``: of the first draft before anything was seen. What was never offered is as good as what comes before it. Kept from session to session
    (``calibrate.py``).
    """

    def __init__(self, positions: int, assumed: float = PRIOR_ACCEPTANCE) -> None:
        self.tries, self.hits, self.assumed = [0.0] * positions, [0.0] * positions, assumed
        self.blocks = 0  # that were observed here
        self._odds: dict[float, list[float]] = {}

    def observe(self, width: int, matched: int) -> None:
        """One block of ``width`` rows whose first ``matched`` drafts were accepted."""
        _count(self, LONG_DECAY, width, matched)
        self.blocks += 1
        self._odds = {}

    def goes_on(self, other: "AcceptancePrior") -> None:
        """As if what another one has seen had been seen here, before anything else."""
        n = min(len(self.tries), len(other.tries))
        self.tries[:n], self.hits[:n] = other.tries[:n], other.hits[:n]
        self._odds = {}

    @property
    def weight(self) -> float:
        """Blocks that this counts for in a sequence: texts differ, so many blocks of few of them say little."""
        return min(PRIOR_WEIGHT, ASSUMED_WEIGHT + SHARE * self.tries[0])

    def odds(self, assumed: float) -> list[float]:
        """Of each draft, that it is right when all before it were."""
        out = self._odds.get(assumed)
        if out is None:
            out, chance = [], assumed
            for tries, hits in zip(self.tries, self.hits):
                chance = (hits + ASSUMED_WEIGHT * chance) / (tries + ASSUMED_WEIGHT)
                out.append(_odds(chance))
            self._odds[assumed] = out
        return out


class AcceptanceTracker:
    """Of one sequence and drafter, per position i (1-based, index i - 1): how often draft i was accepted when all before it were, with
    exponential decay. While the sequence decodes plainly, what was seen fades into the ``record`` of all; a sequence whose first drafts are better than
    theirs has better odds of the later ones by the same factor."""

    def __init__(self, record: AcceptancePrior, decay: float = DECAY) -> None:
        self.record, self.decay = record, decay
        self.tries, self.hits = [0.0] * len(record.tries), [0.0] * len(record.tries)
        self._plain = 0  # plain steps since the last block
        self._tokens: list[float] | None = None

    def pause(self) -> None:
        """A step without drafts."""
        self._plain += 1
        self._tokens = None

    def observe(self, width: int, matched: int) -> None:
        """One block of ``width`` rows whose first ``matched`` drafts were accepted."""
        _count(self, self.decay ** (1 + self._plain), width, matched)
        self._plain, self._tokens = 0, None

    def survival(self) -> list[float]:
        """a_1, a_2, ...."""
        return self._survival(self.record.assumed, 0.0)

    def _survival(self, assumed: float, wrong: float) -> list[float]:
        expected, fade, out, alive, better = self.record.odds(assumed), self.decay**self._plain, [], 1.0, 1.0
        weight = self.record.weight * self._alike(expected[0])
        for tries, hits, odds in zip(self.tries, self.hits, expected):
            better *= odds
            chance = (fade * hits + weight * better / (1 + better)) / (fade * tries + weight + wrong)
            better, wrong = _odds(chance) / odds, 0.0
            alive *= chance
            out.append(alive)
        return out

    def _alike(self, odds: float) -> float:
        """How probable it is, by its first drafts, that this sequence is like the others, whose have these ``odds``, and not one that the drafter knows
        nothing of."""
        right = min(odds / (1 + odds), PRIOR_ACCEPTANCE)  # four misses in a row say little, however good others' drafts were
        if right <= STRANGE:
            return 1.0
        hits, misses = self.hits[0], self.tries[0] - self.hits[0]
        strange = SELDOM + hits * math.log(STRANGE / right) + misses * math.log((1 - STRANGE) / (1 - right))
        return 1 / (1 + math.exp(min(strange, 50.0)))

    def tokens(self) -> list[float]:
        """E(1), E(2), ...."""
        if self._tokens is None:
            self._tokens = list(accumulate(self.survival(), initial=1.0))
        return self._tokens

    def sure_tokens(self) -> list[float]:
        """The same by what was seen alone: nothing is assumed, and DOUBT blocks more were wrong."""
        return list(accumulate(self._survival(0.0, DOUBT), initial=1.0))


def _count(of: AcceptancePrior | AcceptanceTracker, decay: float, width: int, matched: int) -> None:
    of.tries, of.hits = [decay * n for n in of.tries], [decay * n for n in of.hits]
    for i in range(min(width - 1, matched + 1, len(of.tries))):
        of.tries[i] += 1
        of.hits[i] += i < matched


def _odds(chance: float) -> float:
    chance = min(max(chance, LEAST_CHANCE), 1 - LEAST_CHANCE)
    return chance / (1 - chance)


def useful_widths(costs: dict[int, float]) -> list[int]:
    """The widths that could ever be best, in ascending order: no wider block is as cheap, and full acceptance would beat plain decoding."""
    out = []
    for width in sorted(costs):
        wider_is_cheaper = any(other > width and costs[other] <= costs[width] for other in costs)
        if width == 1 or (not wider_is_cheaper and width / costs[width] > 1 / costs[1]):
            out.append(width)
    return out


def chain_plans(drafter: str, rows: Sequence[int]) -> list[StepPlan]:
    """Kinds of steps of a drafter that drafts one by one, for graphs of these ``rows``: each number of drafts in the narrowest of them, and in the
    next one too where that is no more than twice as wide, because it may cost less."""
    out = []
    for width in (w for w in CHAINS if w <= max(rows)):
        fitting = [r for r in sorted(rows) if r >= width][:2]
        out += [StepPlan.of(drafter, width, 0 if r == width else r) for r in fitting if r <= 2 * width or r == fitting[0]]
    return out


def worth_keeping(costs: Mapping[StepPlan, float]) -> dict[StepPlan, float]:
    """Without the kinds of steps that can never be best, because one of the same drafter with as many drafts or more costs no more."""
    return {
        kind: ms
        for kind, ms in costs.items()
        if not any(
            other.method == kind.method and other != kind and other.tokens >= kind.tokens and (cost, -other.tokens) < (ms, -kind.tokens)
            for other, cost in costs.items()
        )
    }


class SpeculationState:
    """What width control knows of one sequence: the acceptance of each drafter, the plain steps that its blocks may still lose, and whether it is decoded
    plainly to its end."""

    def __init__(self, acceptance: dict[str, AcceptanceTracker], disabled: bool = False, tokens: int | None = None) -> None:
        self.acceptance, self.disabled = acceptance, disabled
        self.losses = losses(tokens)
        self.credit = self.allowed = max(CREDIT, min(CREDIT_SHARE * (tokens or 0), CREDITS))
        self.most = SURE_SHARE * max(
            tokens or 0, USUAL
        )  # plain steps that its blocks may have lost in all when they go on because others' were good
        self.won = 0.0  # plain steps, by its blocks so far


def losses(tokens: int | None) -> float:
    """Share of the time that blocks may lose in a text of so many tokens at most, None where nobody says; what it may lose at once is not in it."""
    return PROBE_LOSS if not tokens else max(PROBE_LOSS, min(TEXT_SHARE - TEXT_LOSS / tokens, LOSSES))


@dataclass
class _Use:
    """What is in use for a number of slots."""

    kind: StepPlan | None = None
    plain: int = 0  # steps since the last block
    row: int = 0  # blocks since the last plain step, or since the text began
    steps: int = 0  # since the text began
    wait: int = FIRST_PROBE  # plain steps until blocks are tried again
    unsure: int = 0  # plain steps until it is looked again whether blocks pay that nothing is left for
    since_wider: int = 0
    since_other: int = 0
    probing: bool = False
    late: float = 0.0  # milliseconds that a block behind plain steps takes longer: it computes the drafter's rows of those, too


class SpeculationPolicy(Conditioned):
    """Chooses the kind of each step. ``widths``: of every drafter; ``costs``: milliseconds by kind for one slot, None to learn them; ``more``:
    further kinds of these drafters.

    Attributes:
        confidence: by drafter, of those that say what their drafts are worth.
    """

    _apart = ("costs", "measured", "_tries", "_guesses", "_between", "_settled", "_seen", "_fast", "_allowed", "_slower", "_before")

    def __init__(
        self, widths: Mapping[str, Sequence[int]], costs: Mapping[StepPlan, float] | None = None, more: Iterable[StepPlan] = ()
    ) -> None:
        self.widths = {name: tuple(sorted(w for w in of if w > 1)) for name, of in widths.items() if any(w > 1 for w in of)}
        self.measured: dict[StepPlan, float] = dict(costs or {})
        self.costs: dict[tuple[int, StepPlan], float] = {}  # milliseconds by (slots that the graph covers, kind)
        others = {kind for kind in (*(costs or ()), *more) if kind.method in self.widths and kind.tokens <= max(self.widths[kind.method])}
        named = {name: {kind for kind in others if kind.method == name} for name in self.widths}
        self.kinds = [
            PLAIN_STEP,
            *(kind for name, of in self.widths.items() for kind in sorted({*named[name], *(StepPlan.of(name, width) for width in of)})),
        ]
        if costs:
            # not only useful_widths: where a wide block seemed cheaper than a narrow one in a busy moment, the steps themselves tell
            plain = costs[PLAIN_STEP]
            self.kinds = [kind for kind in self.kinds if kind == PLAIN_STEP or kind.tokens * plain > costs.get(kind, float("inf"))]
            self.costs = {(1, kind): costs[kind] for kind in self.kinds}
        self.confidence: dict[str, Confidence] = {}
        self.changes = 0
        self._decay, self._margin = (TEAM_DECAY, 1.0) if len(self.widths) > 1 else (DECAY, MARGIN)
        self.priors = {name: AcceptancePrior(max(of) - 1) for name, of in self.widths.items()}
        self._allowed: float | None = None  # plain steps that blocks may still lose
        self._rested = 0  # texts in a row
        self._turns = list(self.widths)  # whose turn it is to be tried again
        self._tries: Counter = Counter(dict.fromkeys(self.costs, TRIES))
        self._guesses: set[tuple[int, StepPlan]] = set()  # costs that nothing was measured of yet
        self._between: set[int] = set()  # numbers of slots that began with guesses
        self._settled: set[int] = {1} if costs else set()
        self._uses: dict[int, _Use] = {}
        self._slower = self._before = (
            1.0  # than under the first condition, plain steps of one slot; and under that which its costs were guessed from
        )
        self._seen: Counter = Counter()
        self._fast: Counter = Counter()

    @classmethod
    def measured_for(cls, drafter: str, costs: Mapping[int, float], others: Mapping[StepPlan, float] | None = None) -> "SpeculationPolicy":
        """Of one drafter, from milliseconds by width, 1 being plain decoding; ``others``: of other kinds of steps, other drafters' too."""
        kinds = {StepPlan.of(drafter, width) if width > 1 else PLAIN_STEP: ms for width, ms in costs.items()} | dict(others or {})
        widths = {drafter: [width for width in costs if width > 1]}
        for kind in others or ():
            widths.setdefault(kind.method, []).append(kind.tokens)
        return cls(widths, kinds)

    # -- a sequence

    def should_disable(self) -> bool:
        """Whether the next sequence alone is better off without what drafters need of it: what was seen is so far from paying here that only every
        LOOK_AGAIN-th text tries a block, of as many more as fewer blocks were seen. Each that does loses that block, and 3 % of its plain steps."""
        if self._allowed is None or 1 not in self._settled or len(self.kinds) == 1:
            return False
        if self._rested + 1 >= min(LOOK_AGAIN, 1 + min(record.tries[0] for record in self.priors.values()) / FOR_A_REST):
            return False
        speed, late = self._speeds(1, [self._begun()]), self._late
        pays = [
            ms_tokens * self.cost(1, kind) / (self.cost(1, kind) + late / RUN) for kind, ms_tokens in speed.items() if kind != PLAIN_STEP
        ]
        return max(pays, default=0.0) < HOPELESS * speed[PLAIN_STEP]

    @property
    def _text_loss(self) -> float:
        """Plain steps that a text may lose before it has won any: one block at least of the kind that promises most, or else none would ever be tried again."""
        speed = self._speeds(1, [self._begun()])
        best = max(
            (kind for kind in speed if kind != PLAIN_STEP), key=speed.__getitem__, default=PLAIN_STEP
        )  # there is none where none could ever pay
        return max(TEXT_LOSS, (self.cost(1, best) + self._late) / self.costs[1, PLAIN_STEP] - 1)

    @property
    def _late(self) -> float:
        """Milliseconds that a block of one slot takes longer behind plain steps."""
        return self._uses[1].late if 1 in self._uses else 0.0

    def _begun(self, rests: bool = False, tokens: int | None = None) -> SpeculationState:
        return SpeculationState({name: AcceptanceTracker(record, self._decay) for name, record in self.priors.items()}, rests, tokens)

    def begin(self, rests: bool = False, tokens: int | None = None) -> SpeculationState:
        """A sequence that will be drafted for, of so many ``tokens`` at most; ``rests``: that will not, because control was ``resting`` when it began."""
        self._rested = self._rested + 1 if rests else 0
        self._infer()
        if 1 in self._uses:
            self._uses[1] = _Use(late=self._late)
        drafted = self._begun(rests, tokens)
        if 1 in self._settled:
            loss = self._text_loss
            if self._allowed is not None and not rests:
                self._allowed = max(self._allowed, loss)
            if any(record.weight == PRIOR_WEIGHT for record in self.priors.values()):
                drafted.allowed = loss
        return drafted

    # -- a step

    def expected(self, sequences: Sequence[SpeculationState | None]) -> dict[StepPlan, float]:
        """Tokens that a step of each kind is expected to give; None is a sequence that is decoded plainly."""
        drafted = [s for s in sequences if s is not None]
        plain = len(sequences) - len(drafted)
        out = {PLAIN_STEP: float(len(sequences))}
        for name in self.widths:
            curves = [s.acceptance[name].tokens() for s in drafted]
            sums = curves[0] if len(curves) == 1 else [sum(column) for column in zip(*curves)]
            out |= {kind: plain + sums[min(kind.tokens, len(sums)) - 1] for kind in self.kinds if kind.method == name}
        return out

    def choose(self, covered: int, sequences: Sequence[SpeculationState | None]) -> StepPlan:
        """The kind of the next step of these sequences, in a graph that covers so many slots."""
        drafted = [s for s in sequences if s is not None]
        if not drafted:
            return PLAIN_STEP
        if covered not in self._settled and not self.calibrated(covered):
            return next(kind for kind in reversed(self.kinds) if self._tries[covered, kind] < TRIES)
        use = self._uses.get(covered)
        if use is None:
            use = self._uses[covered] = _Use()
        use.probing = False
        plain = self.costs[covered, PLAIN_STEP]
        if (use.kind == PLAIN_STEP and use.plain < use.wait) or any(s.disabled for s in drafted):
            use.kind = use.kind or PLAIN_STEP
            return PLAIN_STEP
        late = use.late if use.plain else 0.0
        allowed = self._may_lose(drafted)
        sure: Collection[StepPlan] = ()
        if allowed is not None and self._cheapest(covered) + late > plain * (1 + allowed):
            if use.plain >= use.unsure:
                sure, use.unsure = self._sure(covered, sequences, late), use.plain + UNSURE
            if not sure:
                use.kind = use.kind or PLAIN_STEP
                return PLAIN_STEP
        speed = self._speeds(covered, sequences)
        if self._allowed is None and len(speed) > 1:
            first = max((kind for kind in speed if kind != PLAIN_STEP), key=speed.__getitem__)
            self._allowed = self._credit(self.cost(covered, first) / plain - 1, max(s.credit for s in drafted))
            allowed = self._may_lose(drafted)
        if use.kind is None:
            use.kind = max(speed, key=speed.__getitem__)
            if use.kind == PLAIN_STEP:
                return PLAIN_STEP
        may, least = plain * (allowed or 0.0), self._cheapest(covered) + late - plain
        most = plain + min(may, max(may / STAKES, NEAR * least))
        affordable = [kind for kind in self.kinds if kind.tokens > 1 and (self.cost(covered, kind) + late <= most or kind in sure)]
        if use.kind != PLAIN_STEP and use.kind not in affordable:
            affordable += self._sure(covered, sequences, late)
        if not affordable:
            return PLAIN_STEP
        if use.kind == PLAIN_STEP:
            use.probing = True
            return self._probe(covered, affordable)
        if use.since_wider >= WIDER_PROBE:
            use.since_wider = 0
            wider = [kind for kind in affordable if kind.method == use.kind.method and kind.tokens > use.kind.tokens]
            if wider:
                use.probing = True
                return min(wider, key=lambda kind: (kind.tokens, self.cost(covered, kind)))
        if len(self.widths) > 1 and (other := self._other(covered, len(sequences), use, affordable, speed)) is not None:
            use.probing = True
            return other
        if use.kind in affordable:
            return use.kind
        best = max((PLAIN_STEP, *affordable), key=speed.__getitem__)  # until more has been won
        return use.kind if best == PLAIN_STEP and self.cost(covered, use.kind) + late <= plain + may else best

    def expected_tokens_each(self, covered: int, kind: StepPlan, sequences: Sequence[SpeculationState | None]) -> list[float]:
        """Tokens that each gets of a block of the kind chosen last, as expected; if it is only tried, as they would be were most drafts right."""
        use = self._uses.get(covered)
        if use is not None and use.probing:
            hoped = AcceptanceTracker(AcceptancePrior(kind.tokens - 1, HOPED_ACCEPTANCE)).tokens()[-1]
            return [hoped if s is not None else 1.0 for s in sequences]
        curves = [s.acceptance[kind.method].tokens() if s is not None else [1.0] for s in sequences]
        return [curve[min(kind.tokens, len(curve)) - 1] for curve in curves]

    def fall_back(self, covered: int, sequences: Sequence[SpeculationState | None]) -> bool:
        """Whether the block chosen last, which somebody else keeps from running, is not worth much here either; then plain steps are in use from now on,
        and blocks are tried again after some of them. Else nothing would teach otherwise."""
        use = self._uses.get(covered)
        if use is None or use.kind is None or use.probing:
            return False
        speed = self._speeds(covered, sequences)
        if use.kind != PLAIN_STEP and speed[use.kind] > MARGIN * speed[PLAIN_STEP]:
            return False
        use.kind = PLAIN_STEP
        return True

    def _may_lose(self, drafted: Sequence[SpeculationState]) -> float | None:
        """Plain steps that the next block may lose if none of its drafts is right; None before the first one."""
        return None if self._allowed is None else min(self._allowed, sum([s.allowed for s in drafted]) / len(drafted))

    def _sure(self, covered: int, sequences: Sequence[SpeculationState | None], late: float) -> list[StepPlan]:
        """Blocks that would be faster than plain decoding by what was seen alone, even if DOUBT more of them brought nothing."""
        out: list[StepPlan] = []
        plain, count = self.costs[covered, PLAIN_STEP], len(sequences)
        if any(s is not None and s.won < -s.most for s in sequences):
            return out
        for name in self.widths:
            curves = [s.acceptance[name].sure_tokens() if s is not None else None for s in sequences]
            for kind in self.kinds:
                if kind.method == name:
                    tokens = sum([curve[min(kind.tokens, len(curve)) - 1] if curve is not None else 1.0 for curve in curves])
                    if tokens * plain > count * (self.cost(covered, kind) + late / RUN):
                        out.append(kind)
        return out

    def _other(
        self, covered: int, sequences: int, use: _Use, affordable: Sequence[StepPlan], speed: Mapping[StepPlan, float]
    ) -> StepPlan | None:
        """Another drafter's best block, OTHER_LOOK steps in a row, if it is its turn to be looked at: nobody else tells what it is worth now.
        None where it would be slower even if most of its drafts were right."""
        use.since_other += 1
        if use.since_other <= OTHER_PROBE or use.kind is None:
            return None
        if use.since_other > OTHER_PROBE + OTHER_LOOK:
            use.since_other = 0
            return None
        others = [kind for kind in affordable if kind.method != use.kind.method]
        if not others:
            return None
        hoped = AcceptanceTracker(AcceptancePrior(max(kind.tokens for kind in others) - 1, HOPED_ACCEPTANCE)).tokens()
        most = max(hoped[kind.tokens - 1] / self.cost(covered, kind) for kind in others)
        return max(others, key=speed.__getitem__) if most > speed[use.kind] / sequences else None

    def cost(self, covered: int, kind: StepPlan) -> float:
        """Milliseconds that such a step is expected to take, which are fewer than all of its rows take where its drafter's doubts cut blocks."""
        ms, doubts = self.costs[covered, kind], self.confidence.get(kind.method)
        return ms if doubts is None else max(ms - self._slower * doubts.saves(kind.tokens, covered), self.costs[covered, PLAIN_STEP])

    def _cheapest(self, covered: int) -> float:
        """Milliseconds of the cheapest block."""
        return min((self.cost(covered, kind) for kind in self.kinds if kind.tokens > 1), default=float("inf"))

    def _credit(self, extra: float, credit: float) -> float:
        """As many whole blocks, that cost ``extra`` plain steps more than one, as ``credit`` pays for."""
        return extra * int(credit / extra) if extra > 0 else credit

    def _probe(self, covered: int, affordable: Sequence[StepPlan]) -> StepPlan:
        """The block that is tried again: of the drafter whose turn it is, the best one if it has become good. A wide one that is right says
        more than many narrow ones."""
        name = next(name for name in self._turns if any(kind.method == name for kind in affordable))
        self._turns.remove(name)
        self._turns.append(name)
        hoped = AcceptanceTracker(AcceptancePrior(max(self.widths[name]) - 1)).tokens()
        return max((kind for kind in affordable if kind.method == name), key=lambda kind: hoped[kind.tokens - 1] / self.cost(covered, kind))

    def _speeds(self, covered: int, sequences: Sequence[SpeculationState | None]) -> dict[StepPlan, float]:
        """Expected tokens per millisecond."""
        costs = self.costs
        if self.confidence:
            return {kind: tokens / self.cost(covered, kind) for kind, tokens in self.expected(sequences).items()}
        return {kind: tokens / costs[covered, kind] for kind, tokens in self.expected(sequences).items()}

    def tokens_per_ms(self, covered: int, kind: StepPlan, sequences: Sequence[SpeculationState | None]) -> float:
        """Tokens per millisecond that steps of this kind are expected to give, or plain ones where those give more: milliseconds as they were measured."""
        speed = self._speeds(covered, sequences) if covered in self._settled else {}
        return self._slower * max(speed.get(kind, 0.0), speed.get(PLAIN_STEP, 0.0))

    def observe(
        self,
        covered: int,
        kind: StepPlan,
        milliseconds: float,
        sequences: Sequence[SpeculationState | None],
        matched: Sequence[int],
        known: bool = True,
        late: float = 0.0,
    ) -> None:
        """Records a step, how long it took, and how many drafts of each sequence it accepted. ``known`` False: the time is of something else
        too, a prompt or forced tokens. ``late``: those milliseconds of it in which the drafter caught up with steps before: no part of what such steps
        cost, but of what a block behind plain steps does."""
        behind, own = self._uses.get(covered), milliseconds - late
        cold = behind is not None and ((kind != PLAIN_STEP and behind.row == 0) or (covered == 1 and behind.steps < COLD))
        cold = cold and covered in self._settled and (covered, kind) not in self._guesses
        if known and not cold:
            self._learn(covered, kind, own)
        elif known and own < SURELY * self.costs[covered, kind]:
            self._learn(covered, kind, own, LOOK_RATE)
        drafted = [(s, n) for s, n in zip(sequences, matched) if s is not None and not s.disabled]
        for s, n in drafted:
            for name, acceptance in s.acceptance.items():
                acceptance.observe(kind.tokens, n) if name == kind.method else acceptance.pause()
            if kind.method:
                self.priors[kind.method].observe(kind.tokens, n)
        use = self._uses.get(covered)
        if use is None or use.kind is None or not drafted:
            return
        plain, cost = kind == PLAIN_STEP, 1.0
        use.steps += 1
        if not plain:
            cost = self.cost(covered, kind)
            if use.plain:
                whole = self.costs[covered, kind]  # what doubts save of others is no part of its cost
                late = min(late, 2 * whole)  # one that stalled proves nothing: 90 ms, once, kept blocks away for the rest of a session
                if known:
                    use.late += LATE_RATE * (late + min(max(own - whole, 0.0), 2 * whole) - use.late)
                cost += max(use.late, late)
            cost /= self.costs[covered, PLAIN_STEP]
        won = 1 + sum([n for _, n in drafted]) / len(drafted) - cost
        if self._allowed is not None:
            may = sum([s.losses for s, _ in drafted]) / len(drafted)
            self._allowed = max(0.0, min(self._allowed + won + may * cost, SAVINGS))
        for s, n in drafted:
            s.allowed = max(0.0, s.allowed + 1 + n - (1 - s.losses) * cost)
            s.won += 1 + n - cost
        if plain:
            use.plain += 1
            use.row = 0
            return
        use.plain = use.unsure = 0
        use.row += 1
        use.since_wider += 1
        speed = self._speeds(covered, sequences)
        best = max(speed, key=speed.__getitem__)
        if best != use.kind and speed[best] > self._margin * speed[use.kind]:
            self.changes += 1
            use.kind = best
        if use.kind != PLAIN_STEP or won > 0:
            use.wait = FIRST_PROBE
        elif use.probing:
            use.wait = min(2 * use.wait, LAST_PROBE)

    # -- costs

    @property
    def _costs_of_now(self) -> dict[tuple[int, StepPlan], float]:
        return self.costs

    def _unmeasured(self) -> None:
        self.measured, self._seen, self._fast, self._before = {}, Counter(), Counter(), self._slower
        self._tries.update({key: TRIES - self._tries[key] for key in self.costs if self._tries[key] > TRIES})

    def condition_changed(self, condition: Hashable, looks: int, sequences: Iterable[SpeculationState | None]) -> bool:
        """``under`` for these sequences, which try anew what pays where it is another condition."""
        if not self.under(condition, looks):
            return False
        self._uses = {covered: _Use(late=use.late, steps=use.steps) for covered, use in self._uses.items()}
        for s in (s for s in sequences if s is not None and 1 in self._settled):
            s.allowed, s.won = max(s.allowed, self._text_loss), max(s.won, 0.0)
        return True

    def _learn(self, covered: int, kind: StepPlan, milliseconds: float, least_rate: float = 0.0) -> None:
        key = covered, kind
        known, tries = self.costs.get(key), self._tries[key] + 1
        self._tries[key] = tries
        if self._is_new(key, milliseconds):
            self._guesses.discard(key)
            self._compare(key)
            return
        if tries <= TRIES:
            if tries <= WARMUP:
                return
            self.costs[key] = milliseconds if known is None or key in self._guesses else min(known, milliseconds)
            self._guesses.discard(key)
            return
        assert known is not None
        measured = self.measured.get(kind) if covered == 1 else None
        if measured is not None:
            self._seen[kind] += 1
            self._fast[kind] += milliseconds < TOO_SLOW * measured
        least, most = (measured / 2, measured * 2) if measured is not None else (0.0, 2 * known)
        rate = max(COST_RATE, 1 / (tries - TRIES + MEASURED_WEIGHT), least_rate)
        self.costs[key] = known + rate * (min(max(milliseconds, least), most) - known)  # one stalled step proves nothing
        self._compare(key)
        if measured is not None and kind != PLAIN_STEP:
            self._infer()

    def _compare(self, key: tuple[int, StepPlan]) -> None:
        self._like(key)
        if self._condition is not None and (plain := (1, PLAIN_STEP)) in self._base:
            self._slower = self._before * self.costs[plain] / self._base[plain]

    def _infer(self) -> None:
        """What kinds of blocks cost that were measured beforehand and never seen: as much less than that as those that were seen, or else as plain steps."""
        if not self._seen or len(self._seen) == len(self.kinds):
            return
        faster = {kind: self.costs[1, kind] / self.measured[kind] for kind in self.kinds if self._seen[kind] and kind in self.measured}
        blocks = [ratio for kind, ratio in faster.items() if kind != PLAIN_STEP]
        least = min(blocks or faster.values())
        for kind in self.kinds:
            if kind in self.measured and kind not in faster:
                self.costs[1, kind] = self.measured[kind] * (least if least < SURELY else 1.0)

    def calibrated(self, covered: int) -> bool:
        """Whether the cost of every kind is known with this number of slots, or guessed to lie between those of fewer and of more."""
        if covered in self._settled:
            return True
        if all(self._tries[covered, kind] >= TRIES for kind in self.kinds) or self._guess(covered):
            self._settled.add(covered)
            return True
        return False

    def _guess(self, covered: int) -> bool:
        known = self._settled - self._between
        fewer, more = max((c for c in known if c < covered), default=0), min((c for c in known if c > covered), default=0)
        if not fewer or not more:
            return False
        share = (covered - fewer) / (more - fewer)
        for kind in self.kinds:
            if (covered, kind) not in self.costs:
                self.costs[covered, kind] = (1 - share) * self.costs[fewer, kind] + share * self.costs[more, kind]
                self._guesses.add((covered, kind))
        self._between.add(covered)
        return True

    @property
    def costs_outdated(self) -> bool:
        """Whether steps ran much faster than their measured cost: the costs were then taken while the machine was busy."""
        return any(n >= 8 and self._fast[kind] > n // 4 for kind, n in self._seen.items())

    # -- in words

    @property
    def never_pays(self) -> bool:
        """Whether no block could be faster than plain decoding, however many drafts were accepted."""
        return len(self.kinds) == 1

    @property
    def useful(self) -> list[int]:
        """``useful_widths`` by what steps of one slot cost now; empty where that is not known."""
        if 1 not in self._settled:
            return []
        least: dict[int, float] = {}
        for kind in self.kinds:
            if kind.verify_len == kind.tokens:
                least[kind.tokens] = min(self.costs[1, kind], least.get(kind.tokens, float("inf")))
        return useful_widths(least)

    def reason(self, sequence: SpeculationState) -> str:
        """Why the last step of one sequence alone was what it was, in one sentence."""
        if self.never_pays:
            return NEVER_PAYS
        speed = {kind: 1000 * tokens_ms for kind, tokens_ms in self._speeds(1, [sequence]).items()}
        use = self._uses.get(1)
        mine = use.kind if use is not None and use.kind is not None else max(speed, key=speed.__getitem__)
        best = max((kind for kind in speed if kind != mine), key=speed.__getitem__)
        if mine == PLAIN_STEP:
            acceptance = sequence.acceptance[best.method]
            share = f"{100 * acceptance.survival()[0]:.0f} %"
            known = (
                f"first draft accepted {share}" if acceptance.record.tries[0] else f"no draft yet, {share} of the first ones assumed right"
            )
            return f"plain decoding: {speed[mine]:.0f} tok/s expected, {self._named(best)} would give {speed[best]:.0f} ({known})"
        return f"{self._named(mine)}: {speed[mine]:.0f} tok/s expected, {self._named(best)} would give {speed[best]:.0f}"

    def _named(self, kind: StepPlan) -> str:
        return f"{kind.label} of {kind.method}" if len(self.widths) > 1 and kind.method else kind.label
