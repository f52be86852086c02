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


class Repeated:
    """Statistics of dataclasses with ``runs``, one figure per repetition."""

    runs: list[float]

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
    """One test, named as in llama-bench (pp512, tg128, spec128, @d4096 for a depth); tokens per second."""

    test: str
    runs: list[float] = field(default_factory=list)
    ms_per_step: float = 0.0
    tokens_per_step: float = 0.0
    phases_us: dict = field(default_factory=dict)
    widths: dict = field(default_factory=dict)
    expert_hit_rate: float | None = None
    replay_rate: float | None = None  # of the last run, as in Stats


def bench(session: Session, options: BenchOptions, done=lambda row: None) -> list[BenchRow]:
    """Runs every test; ``done(row)`` after each repetition. Raises ContextError: depth and prompt exceed the context."""
    room = session.engine.options.n_ctx
    need = max(options.depths) + max([*options.prompts, options.tokens + 8])
    if need > room:
        raise ContextError(f"the deepest measurement needs {need} tokens of context, but there are {room}; use `n_ctx` {need}")
    legs: list[_Prefill | _Decode] = [_Prefill(session, n, depth) for depth in options.depths for n in options.prompts]
    if options.tokens:
        for depth in options.depths:
            legs.append(_Decode(session, options, depth, PLAIN))
            if session.drafter is not None:
                legs.append(_Decode(session, options, depth, SPECULATIVE))
    for repetition in range(options.repetitions + 1):
        for leg in legs:
            leg.run(repetition)
            done(leg.row)
    return [leg.row for leg in legs]


def _name(test: str, depth: int) -> str:
    return f"{test}@d{depth}" if depth else test


def _fill(session: Session, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, min(session.target.n_vocab, 50000), count).tolist()


class _Prefill:
    def __init__(self, session: Session, n: int, depth: int):
        self.session, self.n, self.depth, self.row = session, n, depth, BenchRow(_name(f"pp{n}", depth))

    def run(self, repetition: int) -> None:
        engine = self.session.engine
        engine.reset(drafting=False)
        if self.depth:
            engine.prefill(_fill(self.session, self.depth, 1))
        stats = Stats()
        for _ in generate(engine, _fill(self.session, self.n, repetition), GenerationOptions(1, PLAIN), stats):
            pass
        if repetition:
            self.row.runs.append(self.n / stats.seconds["prefill"])


class _Decode:
    def __init__(self, session: Session, options: BenchOptions, depth: int, mode: str):
        self.session, self.options, self.depth, self.mode = session, options, depth, mode
        name = "tg" if mode == PLAIN else "spec"
        self.row = BenchRow(_name(f"{name}{options.tokens}", depth))

    def run(self, repetition: int) -> None:
        session, opt = self.session, self.options
        engine, stats, synthetic, widths = session.engine, Stats(), None, None
        width = opt.width or engine.options.width
        if self.mode == SPECULATIVE:
            synthetic = opt.acceptance(engine.options.width - 1, repetition)
            if opt.width is None:
                widths = session.new_policy()
        engine.reset(drafting=self.mode == SPECULATIVE)
        loop = GenerationOptions(opt.tokens + 1, self.mode, width, ignore_end=True, synthetic=synthetic)
        for _ in generate(engine, _fill(session, max(self.depth, 8), 2), loop, stats, policy=widths):
            pass
        if not repetition:
            return
        row = self.row
        row.runs.append(stats.tokens_per_second)
        row.ms_per_step = 1000 * stats.seconds["decode"] / stats.steps
        row.tokens_per_step = stats.tokens_per_step
        row.phases_us = {k: v / stats.steps for k, v in stats.host_us.items()}
        row.widths = dict(stats.widths)
        row.expert_hit_rate, row.replay_rate = stats.expert_hit_rate, stats.replay_rate
