#!/usr/bin/env python3
"""Replays recorded and synthetic drafts under the speculation policy, on tables of step costs, and compares with the best fixed plan.

    replay_policy.py [--half tuned|held-out|both] [--old FOLDER]

A text is, per number of tokens of a block, how many of the draft tokens after each token are accepted (``record_drafts.py``). Texts 1, 3, 5, ... of each
recording may be used for choosing constants; the others are held out. ``--old``: a folder with the modules width.py, conditions.py and confidence.py, whose
``WidthControl`` is compared. What is not recorded is a model: blocks after plain steps take longer by what the drafter catches up with, first blocks
find cold caches, the first steps after a prompt too, and plain steps that keep a drafter's inputs take 3 % longer on CPUs. Clocks have 8 % of noise, and
one step in a hundred stalls.
"""

import argparse
import importlib
import json
import random
import statistics
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyggml_spec.speculation.policy import PLAIN_STEP, ROW_COST, SpeculationPolicy, StepPlan, chain_plans, estimate

DATA = Path(__file__).parent.parent / "tests" / "speculation"
TOKENS, METHOD, CHAIN = (2, 4, 8, 16), "draft-dflash", "draft-mtp"
Text = dict[int, list[int]]


@dataclass(frozen=True)
class Machine:
    """``costs``: milliseconds by rows. Factors or shares of a plain step: ``late``, ``cold`` after 1 to 8 plain steps, and after more; ``start``: of the
    first steps after a prompt; ``keep``: of plain steps that keep the drafter's inputs; ``wrong``: of what was measured, by rows.
    ``build``: milliseconds before the first block of a width."""

    costs: dict[int, float]
    late: tuple[float, float] = (0.12, 0.48)
    cold: tuple[float, float] = (1.3, 1.5)
    start: tuple[float, ...] = (2.6, 1.65, 1.4, 1.25, 1.1)
    start_block: tuple[float, ...] = (1.86, 1.45, 1.19)
    keep: float = 1.03
    wrong: tuple[tuple[int, float], ...] = ()
    build: float = 0.0


GPU: dict[str, Any] = {"late": (0.06, 0.08), "cold": (1.0, 1.0), "start": (), "start_block": (), "keep": 1.005}
MACHINES = {
    "27B H200": Machine({1: 11.1, 2: 13.6, 4: 19.8, 8: 28.9, 16: 24.4}, **GPU),
    "27B H200 native": Machine({1: 5.86, 2: 6.57, 4: 6.80, 8: 7.20, 16: 8.75}, **GPU),
    "4B H200": Machine({1: 2.85, 2: 3.93, 4: 5.05, 8: 7.31, 16: 6.25}, **GPU),
    "2 cores native": Machine({1: 1.0, 2: 1.24, 4: 1.33, 8: 1.73, 16: 3.27}),
    "2 cores ggml": Machine({1: 3.0, 2: 4.7, 4: 6.2, 8: 10.5, 16: 17.5}),
    "1 core": Machine({1: 1.03, 2: 1.8, 4: 2.05, 8: 3.2, 16: 6.0}),
    "2 cache domains": Machine({1: 0.34, 2: 0.83, 4: 1.04, 8: 1.77, 16: 2.22}),
    "hardly pays": Machine({1: 1.01, 2: 3.19, 4: 4.63, 8: 6.42, 16: 7.51}),
}
WRONG = {
    "2 cores native, blocks measured x2": Machine(MACHINES["2 cores native"].costs, wrong=((2, 2), (4, 2), (8, 2), (16, 2))),
    "4B H200, 16 rows measured x0.5": Machine(MACHINES["4B H200"].costs, **GPU, wrong=((16, 0.5),)),
}
IID = [f"iid{p}" for p in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)]
REGIMES = ["good-bad", "bad-good", "slow start", "alternating"]


def digits(name: str) -> Any:
    return json.loads((DATA / f"recorded_{name}.json").read_text())


def from_runs(runs: Sequence[int]) -> Text:
    return {n: [min(run, n - 1) for run in runs] for n in TOKENS}


def recorded() -> list[Text]:
    return [{int(n): [int(c, 16) for c in row] for n, row in text.items()} for text in digits("drafts")]


def chains() -> list[Text]:
    return [from_runs([int(c, 16) for c in text["16"]]) for text in digits("chains")]


def synthetic(kind: str, seed: int, tokens: int = 512) -> Text:
    rng = random.Random(f"{kind}{seed}")

    def chance(at: int) -> float:
        if kind.startswith("iid"):
            return float(kind[3:])
        early, late, limit = {
            "good-bad": (0.85, 0.1, 256),
            "bad-good": (0.1, 0.85, 256),
            "slow start": (0.1, 0.85, 40),
            "never": (0, 0, 0),
        }.get(kind, (0.9, 0.15, 0))
        return (0.9 if at // 50 % 2 == 0 else 0.15) if kind == "alternating" else early if at < limit else late

    return from_runs([next((j for j in range(15) if rng.random() >= chance(at)), 15) for at in range(tokens)])


class Clock:
    """Milliseconds of the steps of one text."""

    def __init__(self, machine: Machine, costs: Mapping[StepPlan, float], disabled: bool = False) -> None:
        self.machine, self.costs, self.disabled, self.plain, self.steps = machine, costs, disabled, 0, 0

    def step(self, plan: StepPlan) -> tuple[float, float]:
        """(milliseconds, of which the drafter caught up)."""
        m, n = self.machine, self.steps
        self.steps += 1
        if plan == PLAIN_STEP:
            self.plain += 1
            return m.costs[1] * (m.start[n] if n < len(m.start) else 1.0) * (1.0 if self.disabled else m.keep), 0.0
        late, factor = 0.0, m.start_block[n] if n < len(m.start_block) else 1.0
        if self.plain:
            late, factor = m.costs[1] * m.late[self.plain > 8], max(factor, m.cold[self.plain > 8])
        self.plain = 0
        return self.costs[plan] * factor + late, late


def plain_ms(machine: Machine, tokens: int) -> float:
    return machine.costs[1] * (tokens + sum(factor - 1 for factor in machine.start[:tokens]))


def plan_costs(machine: Machine, measured: bool = False, chain: bool = False) -> dict[StepPlan, float]:
    """Milliseconds by plan: of a block drafter, and of a chain beside it, whose draft tokens take 0.08 of a plain step each."""
    wrong = dict(machine.wrong if measured else ())
    out = {StepPlan.of(METHOD, n) if n > 1 else PLAIN_STEP: ms * wrong.get(n, 1) for n, ms in machine.costs.items()}
    if chain:
        out |= {p: machine.costs[p.verify_len] * 0.93 + 0.08 * machine.costs[1] * p.draft_tokens for p in chain_plans(CHAIN, TOKENS)}
    return out


class New:
    """The policy as the scheduler drives it, for one slot."""

    def __init__(self, costs: Mapping[StepPlan, float]) -> None:
        self.policy = SpeculationPolicy(costs, costs)

    def begin(self, tokens: int) -> bool:
        disabled = self.policy.should_disable()
        self.state = self.policy.begin(disabled, tokens)
        return disabled

    def choose(self) -> StepPlan:
        return self.policy.choose(1, [self.state])

    def observe(self, plan: StepPlan, ms: float, matched: int, late: float, built: float) -> None:
        self.policy.observe(1, plan, ms, [self.state], [matched], True, late, built)


class Estimated(New):
    """As in a first session: costs are estimates."""

    def __init__(self, costs: Mapping[StepPlan, float]) -> None:
        gpu = costs[PLAIN_STEP] * 3 > min(ms for plan, ms in costs.items() if plan.tokens == max(TOKENS))
        row_cost = ROW_COST["gpu" if gpu else "cpu"]
        self.policy = SpeculationPolicy(costs, estimate(costs, row_cost, {METHOD: 0.1, CHAIN: 0.08}, {CHAIN}), relative=True)


def old_rules(folder: Path) -> Callable[[Mapping[StepPlan, float]], Any]:
    """``WidthControl`` of a folder, with the same interface."""
    package = types.ModuleType("old_rules")
    package.__path__ = [str(folder)]
    sys.modules["old_rules"] = package
    width = importlib.import_module("old_rules.width")

    class Old:
        def __init__(self, costs: Mapping[StepPlan, float]) -> None:
            self.plans = {p: width.Kind(p.method, p.tokens, p.verify_len if p.verify_len > p.tokens else 0) for p in costs}
            self.back = {kind: plan for plan, kind in self.plans.items()}
            widths: dict[str, list[int]] = {}
            for plan in costs:
                if plan.draft_tokens:
                    widths.setdefault(plan.method, []).append(plan.tokens)
            self.control = width.WidthControl(widths, {self.plans[p]: ms for p, ms in costs.items()})

        def begin(self, tokens: int) -> bool:
            disabled = self.control.resting()
            self.state, self.plain, self.unheard = self.control.begin(disabled, tokens), 0, 0
            return disabled

        def choose(self) -> StepPlan:
            if not self.unheard % 32:
                self.kind = self.control.choose(1, [self.state])
            return self.back[self.kind]

        def observe(self, plan: StepPlan, ms: float, matched: int, late: float, built: float) -> None:
            self.control.observe(1, self.kind, ms, [self.state], [matched], True, late)
            self.plain = self.plain + 1 if plan == PLAIN_STEP else 0
            self.unheard = 1 if self.plain > 16 and self.plain % 8 else 0

    return Old


def right_of(text: Text | tuple[Text, Text], plan: StepPlan, at: int) -> int:
    """Accepted draft tokens of a block there; of two texts, the second one is the chain's."""
    own = text if isinstance(text, dict) else text[plan.method == CHAIN]
    return min(own[next(n for n in TOKENS if plan.tokens <= n)][at], plan.draft_tokens)


def session(
    make: Callable[[Mapping[StepPlan, float]], Any], machine: Machine, texts: Sequence[Any], seed: int = 0, most: int = 1 << 30
) -> list[float]:
    """Speedups over plain decoding of texts one after the other."""
    chain = not isinstance(texts[0], dict)
    real, rng, out = plan_costs(machine, chain=chain), random.Random(seed), []
    policy, graphs = make(plan_costs(machine, True, chain)), {PLAIN_STEP}
    for text in texts:
        tokens = min(most, len((text if isinstance(text, dict) else text[0])[16]))
        at, spent = 0, 0.0
        clock = Clock(machine, real, policy.begin(tokens))
        while at < tokens:
            plan = policy.choose()
            matched = min(right_of(text, plan, at), tokens - 1 - at) if plan.draft_tokens else 0
            ms, late = clock.step(plan)
            noise = rng.lognormvariate(0, 0.08) * (2.5 if rng.random() < 0.01 else 1)
            built = 0.0 if plan in graphs else machine.build
            graphs.add(plan)
            policy.observe(plan, ms * noise, matched, late * noise, built)
            spent, at = spent + ms + built, at + matched + 1
        out.append(plain_ms(machine, tokens) / spent)
    return out


def best_fixed(machine: Machine, texts: Sequence[Any], most: int = 1 << 30) -> tuple[float, float]:
    """Mean speedup of the best fixed plan per text, and of the one that is best for all of them."""
    table = []
    for text in texts:
        row, tokens = [], min(most, len((text if isinstance(text, dict) else text[0])[16]))
        costs = plan_costs(machine, chain=not isinstance(text, dict))
        for plan in costs:
            clock, at, spent = Clock(machine, costs, True), 0, 0.0
            while at < tokens:
                spent += clock.step(plan)[0]
                at += 1 + (min(right_of(text, plan, at), tokens - 1 - at) if plan.draft_tokens else 0)
            row.append(plain_ms(machine, tokens) / spent)
        table.append(row)
    return statistics.fmean(map(max, table)), max(statistics.fmean(column) for column in zip(*table))


def suites(half: str) -> dict[str, list[list[Any]]]:
    """Sessions by name."""
    held = half == "held-out"

    def pick(texts: list[Any]) -> list[Any]:
        return texts if half == "both" else texts[held::2]

    def orders(texts: list[Any], n: int) -> list[list[Any]]:
        return [random.Random(1000 + seed).sample(texts, len(texts)) for seed in range(n)]

    base, work = 100 * held, digits("workloads")
    texts = [from_runs([int(c, 16) for c in work[name]][i : i + 500]) for name in ("copy", "prose", "json") for i in (0, 500, 1000)]
    kinds = [*IID, *REGIMES, "never"]
    return {
        "recorded 400": orders(pick(recorded()), 2),
        "recorded 160": orders([{n: row[:160] for n, row in text.items()} for text in pick(recorded())], 2),
        "chains 400": orders(pick(chains()), 1),
        "two drafters": orders(pick(list(zip(recorded(), chains()))), 1),
        "workloads 500": orders(pick(texts), 2),
        "iid": [[synthetic(kind, base + 10 * s + i) for i in range(4)] for kind in IID for s in range(1)],
        "regimes": [[synthetic(kind, base + 10 * s + i) for i in range(4)] for kind in REGIMES for s in range(2)],
        "mixed": [[synthetic(random.Random(base + s * 50 + i).choice(kinds), base + s * 50 + i) for i in range(12)] for s in range(2)],
        "never": [[synthetic("never", i, 256) for i in range(8)]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("tuned", "held-out", "both"), default="tuned")
    parser.add_argument("--old", type=Path)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    rules = {"measured": New, "estimated": Estimated} | ({"old": old_rules(args.old)} if args.old else {})
    print(f"Half: {args.half}. Mean speedup over plain decoding / least of a text.\n")
    print(
        "| machine | texts | best fixed per text / one for all |"
        + "".join(f" {name} |" for name in rules)
        + "\n|---|---|---|"
        + "---|" * len(rules)
    )
    worst: dict[tuple[str, bool], float] = {}
    against: dict[tuple[str, str], list[float]] = {}
    for machine_name, machine in (MACHINES | WRONG).items():
        for name, sessions in suites(args.half).items():
            if (args.only and name not in args.only) or (machine_name in WRONG and name != "recorded 400"):
                continue
            cells, (per_text, one) = [], best_fixed(machine, [text for texts in sessions[:1] for text in texts])
            for rule, make in rules.items():
                runs = [session(make, machine, texts, seed) for seed, texts in enumerate(sessions)]
                gains = [gain for run in runs for gain in run]
                if name == "never":
                    later = statistics.fmean(runs[0][1:])
                    cells.append(f"first {runs[0][0]:.3f}, later {later:.3f}")
                    against.setdefault((rule, name), []).append(later)
                    continue
                cells.append(f"{statistics.fmean(gains):.3f} / {min(gains):.2f}")
                key = rule, name in ("iid", "regimes", "mixed")
                worst[key] = min(worst.get(key, 9.0), *gains)
                if name not in ("iid", "regimes", "mixed"):
                    against.setdefault((rule, name), []).append(statistics.fmean(gains) / one)
                else:
                    against.setdefault((rule, name), []).append(statistics.fmean(gains))
            print(f"| {machine_name} | {name} | {per_text:.3f} / {one:.3f} | " + " | ".join(cells) + " |", flush=True)
    print("\nMeans over machines (recorded: of the best fixed plan for all texts; synthetic and never: of plain decoding):\n")
    for (rule, name), values in against.items():
        print(f"* {rule}, {name}: {statistics.fmean(values):.3f}, worst machine {min(values):.3f}")
    for (rule, made), value in worst.items():
        print(f"* {rule}: worst {'synthetic' if made else 'recorded'} text {value:.3f}")


if __name__ == "__main__":
    main()
