"""Benchmarks of one loaded pair: prefill, plain and speculative decoding at several depths.

Figures are mean and sample deviation of repetitions in one process, interleaved against drift of the machine. The baseline is plain
decoding in the same session.
"""

import statistics
from dataclasses import dataclass, field

import numpy as np

from ..api import Session
from ..engine.engine import generate
from ..engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from ..engine.stats import Stats
from ..errors import ContextError
from ..speculation.synthetic import SyntheticAcceptance

TESTS = {PLAIN: "tg", SPECULATIVE: "spec"}


@dataclass(frozen=True)
class BenchOptions:
    """Attributes:
    prompts: prompt lengths for prefill; empty for none.
    tokens: tokens generated per repetition; 0 for none.
    depths: tokens in the context before each measurement.
    repetitions: measured runs per test, after one warm-up run.
    synthetic: mean accepted tokens per step, drawn at random; None for real acceptance.
    rates: acceptance rate per draft position, drawn at random, instead of ``synthetic``.
    width: rows per block; None for the policy's choice.
    """

    prompts: tuple[int, ...] = (512,)
    tokens: int = 128
    depths: tuple[int, ...] = (0,)
    repetitions: int = 5
    synthetic: float | None = None
    width: int | None = None
    rates: tuple[float, ...] = ()

    def acceptance(self, drafts: int, seed: int) -> SyntheticAcceptance | None:
        """Synthetic acceptance for blocks of at most ``drafts`` drafts, or None."""
        if self.rates:
            return SyntheticAcceptance.of_rates(self.rates, seed)
        return SyntheticAcceptance(self.synthetic, drafts, seed) if self.synthetic is not None else None


@dataclass
class Repeated:
    """A test: ``runs``, a figure per repetition, and other figures of the last one.

    Attributes:
        test: named as in llama-bench (pp512, tg128, spec128, @d4096 for a depth).
        runs: tokens per second.
    """

    test: str
    runs: list[float] = field(default_factory=list)
    ms_per_step: float = 0.0
    tokens_per_step: float = 0.0
    widths: dict = field(default_factory=dict)

    def take(self, stats: Stats) -> None:
        """Adds a repetition."""
        self.runs.append(stats.tokens_per_second)
        self.ms_per_step, self.tokens_per_step = 1000 * stats.seconds["decode"] / stats.steps, stats.tokens_per_step
        self.widths = dict(stats.widths)

    @property
    def mean(self) -> float:
        """Tokens per second."""
        return statistics.fmean(self.runs)

    @property
    def deviation(self) -> float:
        """Sample deviation of the runs; 0 for one run."""
        return statistics.stdev(self.runs) if len(self.runs) > 1 else 0.0

    def as_dict(self) -> dict:
        return {**vars(self), "mean": self.mean, "deviation": self.deviation, "median": statistics.median(self.runs)}


@dataclass
class BenchRow(Repeated):
    """A test of one sequence."""

    phases_us: dict = field(default_factory=dict)
    expert_hit_rate: float | None = None
    replay_rate: float | None = None  # as in Stats

    def take(self, stats: Stats) -> None:
        """Adds a repetition."""
        super().take(stats)
        self.phases_us = {k: v / stats.steps for k, v in stats.host_us.items()}
        self.expert_hit_rate, self.replay_rate = stats.expert_hit_rate, stats.replay_rate


def bench(session: Session, options: BenchOptions, done=lambda row: None) -> list[BenchRow]:
    """Runs every test; ``done(row)`` after each repetition. Raises ContextError: depth and prompt exceed the context."""
    room = session.runner.options.n_ctx
    need = max(options.depths) + max([*options.prompts, options.tokens + 8])
    if need > room:
        raise ContextError(f"the deepest measurement needs {need} tokens of context, but there are {room}; use `n_ctx` {need}")
    prefills = [(BenchRow(leg_name(f"pp{n}", depth)), n, depth) for depth in options.depths for n in options.prompts]
    modes = modes_of(session) if options.tokens else ()
    decodes = [(BenchRow(leg_name(f"{TESTS[mode]}{options.tokens}", depth)), mode, depth) for depth in options.depths for mode in modes]
    for repetition in range(options.repetitions + 1):
        for row, n, depth in prefills:
            speed = _prefill_speed(session, n, depth, repetition)
            row.runs += [speed] if repetition else []
            done(row)
        for row, mode, depth in decodes:
            stats = decode(session, options, depth, mode, repetition)
            if repetition:
                row.take(stats)
            done(row)
    return [row for row, *_ in [*prefills, *decodes]]


def modes_of(session: Session) -> tuple[str, ...]:
    """Modes to compare."""
    return (PLAIN, SPECULATIVE) if session.drafter is not None else (PLAIN,)


def leg_name(test: str, depth: int) -> str:
    return f"{test}@d{depth}" if depth else test


def random_ids(session: Session, count: int, seed: int) -> list[int]:
    """Token ids of a text of ``count`` tokens."""
    return np.random.default_rng(seed).integers(0, min(session.target.n_vocab, 50000), count).tolist()


def _prefill_speed(session: Session, n: int, depth: int, repetition: int) -> float:
    session.runner.reset(drafting=False)
    if depth:
        session.runner.prefill(random_ids(session, depth, 1))
    stats = Stats()
    for _ in generate(session.runner, random_ids(session, n, repetition), GenerationOptions(1, PLAIN), stats):
        pass
    return n / stats.seconds["prefill"]


def decode(session: Session, options: BenchOptions, depth: int, mode: str, repetition: int) -> Stats:
    """Statistics of one generation."""
    engine, stats, speculative = session.runner, Stats(), mode == SPECULATIVE
    engine.reset(drafting=speculative)
    width, synthetic = engine.options.width, options.acceptance(engine.options.width - 1, repetition) if speculative else None
    loop = GenerationOptions(options.tokens + 1, mode, options.width or width, ignore_end=True, synthetic=synthetic)
    policy = session.new_policy() if speculative and options.width is None else None
    for _ in generate(engine, random_ids(session, max(depth, 8), 2), loop, stats, policy=policy):
        pass
    return stats
