"""Width control: how many rows the next block has, or none when plain decoding is faster.

Expected tokens of a block of W rows are E(W) = 1 + a_1 + ... + a_{W-1}, where a_i is the probability that the first i drafts are all
accepted. The width with the most tokens per millisecond, E(W) / cost(W), is used. Costs are measured, because they are not even monotonic
(27B shape on one H200: 1 row 11.1 ms, 2 13.6, 4 19.8, 8 28.9, 16 24.4); acceptance is tracked while running.
"""

from dataclasses import dataclass, field

# Chosen on the drafts of the embedded pair's 20 held-out prompts, replayed with the step costs of several machines: mean speed-up 1.42 (two
# CPU cores, costs 3.0 4.7 6.2 10.5 17.5 ms), 2.25 (the pair on one H200), 1.81 and 1.65 (27B and 4B shapes there); the best fixed width
# reaches 1.43, 2.27, 1.74 and 1.66. A drafter that is never right costs 3 to 4 % of 128 tokens, 1 to 2 % of 2,000.
DECAY = 0.95  # per step, plain ones too: half of the weight lies on the last 13 steps
LONG_DECAY = 0.98
PRIOR_ACCEPTANCE = 0.8  # of the first draft, before anything was seen
PRIOR_WEIGHT = 4.0  # steps that the prior counts for
MARGIN = 1.03  # another width has to be this much better to be worth a change
FIRST_PROBE = 2  # plain steps at least before speculation is tried again; doubled each time it does not pay
LAST_PROBE = 768
# What blocks may lose against plain decoding, so that two unlucky blocks do not decide the next sixty steps (4B shape, 6 tokens per block, 128
# tokens, worst of 100 runs: 1.9 instead of 1.6 times plain decoding), and dear ones are not tried in vain (two fast cores, 6.0 plain steps a
# block: three probes lost 13 % of 128 tokens).
CREDIT = 3.8  # plain steps, as many whole blocks as they pay for: 3 % of 128 tokens
PROBE_LOSS = 0.02  # of the time spent since
SAVINGS = 10  # plain steps that blocks have won and may lose again, at most
TOO_SLOW = 0.6  # a measured cost that a quarter of the real steps undercut by this factor is wrong
COST_RATE = 0.05  # weight of one step in the running cost of its width
WIDER_PROBE = 48  # steps between looks at wider blocks than the one in use
NEVER_PAYS = "plain decoding: no block width would be faster here even if every draft were accepted"


@dataclass
class Acceptance:
    """Per position i (1-based, index i - 1): how often draft i was accepted when all before it were, with exponential decay."""

    positions: int
    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    all_tries: float = 0.0  # of all positions together, with a long memory: what recent evidence fades into
    all_hits: float = 0.0

    def __post_init__(self) -> None:
        self.tries, self.hits = [0.0] * self.positions, [0.0] * self.positions

    def forget(self) -> None:
        """One step's worth of decay; while decoding plainly, what was seen fades into the prior."""
        for i in range(self.positions):
            self.tries[i] *= DECAY
            self.hits[i] *= DECAY

    def observe(self, width: int, matched: int) -> None:
        """One block of ``width`` rows whose first ``matched`` drafts were accepted."""
        self.forget()
        self.all_tries, self.all_hits = LONG_DECAY * self.all_tries, LONG_DECAY * self.all_hits
        for i in range(min(width - 1, matched + 1)):
            self.tries[i] += 1
            self.hits[i] += i < matched
            self.all_tries += 1
            self.all_hits += i < matched

    def survival(self) -> list[float]:
        """a_1, a_2, ...: each position's prior is the estimate of the one before it, so what was never offered is extrapolated."""
        chance = (self.all_hits + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (self.all_tries + PRIOR_WEIGHT)
        out, alive = [], 1.0
        for tries, hits in zip(self.tries, self.hits):
            chance = (hits + PRIOR_WEIGHT * chance) / (tries + PRIOR_WEIGHT)
            alive *= chance
            out.append(alive)
        return out


def useful_widths(costs: dict[int, float]) -> list[int]:
    """The widths that could ever be best, in ascending order: no wider block is as cheap, and full acceptance would beat plain decoding."""
    out = []
    for width in sorted(costs):
        wider_is_cheaper = any(other > width and costs[other] <= costs[width] for other in costs)
        if width == 1 or (not wider_is_cheaper and width / costs[width] > 1 / costs[1]):
            out.append(width)
    return out


class WidthControl:
    """Chooses the width of the next block. ``costs``: milliseconds per step by width, 1 being plain decoding."""

    def __init__(self, costs: dict[int, float]) -> None:
        self.measured = dict(costs)
        self.costs = dict(costs)  # follows what the steps really take: attention grows, other programs come and go
        self.widths = useful_widths(costs)
        self.acceptance = Acceptance(max(self.widths) - 1)
        self.current = self._best()
        self._probe_width = self.current if self.current > 1 else self.widths[min(1, len(self.widths) - 1)]
        self.changes = 0
        self._plain_steps = 0
        self._probe_after = FIRST_PROBE
        extra = self._extra()
        self._allowed = extra * int(CREDIT * costs[1] / extra) if extra > 0 else 0.0  # milliseconds that blocks may still lose
        self._since_wider = 0
        self._probing = False
        self._seen: dict[int, list[float]] = {}

    def expected(self, width: int) -> float:
        """E(width): expected tokens of a block."""
        return 1.0 + sum(self.acceptance.survival()[: width - 1])

    def speed(self, width: int) -> float:
        """Expected tokens per second at this width."""
        return 1000.0 * self.expected(width) / self.costs[width]

    def _best(self) -> int:
        return max(self.widths, key=self.speed)

    def next(self) -> int:
        """The width of the next step; 1 means a plain step."""
        self._probing = False
        if self.current == 1:
            if len(self.widths) > 1 and self._plain_steps >= self._probe_after and self._allowed >= self._extra():
                self._probing = True
                return self._probe_width
            return 1
        wider = [w for w in self.widths if w > self.current]
        if wider and self._since_wider >= WIDER_PROBE:
            self._since_wider = 0
            self._probing = True
            return wider[0]
        return self.current

    def observe(self, width: int, matched: int, milliseconds: float | None = None) -> None:
        """Records a step of ``next()``'s width, and how long it took, and decides about the following ones."""
        if milliseconds is not None:
            self._seen.setdefault(width, []).append(milliseconds)
            bounded = min(max(milliseconds, self.measured[width] / 2), self.measured[width] * 2)  # one stalled step proves nothing
            self.costs[width] += COST_RATE * (bounded - self.costs[width])
        won = (matched + 1) * self.costs[1] - self.costs[width]
        most = max(SAVINGS * self.costs[1], self._extra())
        # no debts: those of one bad passage, 100 plain steps until the switch, would keep blocks from 5,000 steps that follow it
        self._allowed = max(0.0, min(self._allowed + won + PROBE_LOSS * self.costs[width], most))
        if width == 1:
            self._plain_steps += 1
            self.acceptance.forget()
            return
        self._since_wider += 1
        self.acceptance.observe(width, matched)
        best = self._best()
        if best != self.current and (self.speed(best) > MARGIN * self.speed(self.current)):
            self.changes += 1
            self.current = best
            if best != 1:
                self._probe_after = FIRST_PROBE
        if self.current == 1:
            self._plain_steps = 0
            if self._probing:
                self._probe_after = min(2 * self._probe_after, LAST_PROBE)

    def _extra(self) -> float:
        """Milliseconds that a probe loses if nothing is accepted."""
        return self.costs[self._probe_width] - self.costs[1]

    @property
    def outdated(self) -> bool:
        """Whether steps ran much faster than their measured cost: the costs were then taken while the machine was busy."""
        return any(len(ms) >= 8 and sorted(ms)[len(ms) // 4] < TOO_SLOW * self.measured[w] for w, ms in self._seen.items())

    def reason(self) -> str:
        """Why the current width is in use, in one sentence."""
        if len(self.widths) == 1:
            return NEVER_PAYS
        rivals = [w for w in self.widths if w != self.current]
        best = max(rivals, key=self.speed)
        mine, theirs = self.speed(self.current), self.speed(best)
        if self.current == 1:
            share = f"{100 * self.acceptance.survival()[0]:.0f} %"
            known = (
                f"first draft accepted {share}" if self.acceptance.all_tries else f"no draft yet, {share} of the first ones assumed right"
            )
            return f"plain decoding: {mine:.0f} tok/s expected, width {best} would give {theirs:.0f} ({known})"
        name = "plain decoding" if best == 1 else f"width {best}"
        return f"width {self.current}: {mine:.0f} tok/s expected, {name} would give {theirs:.0f}"
