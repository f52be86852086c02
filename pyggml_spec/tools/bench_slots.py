"""Throughput of concurrent sequences, by the number of slots.

Sequences have short prompts and outlast the measurement, so every step has all slots; prefill is excluded. One slot uses the
single-sequence engine.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..api import Session
from ..engine.engine import Engine
from ..engine.sequence import SPECULATIVE, GenerationOptions
from ..errors import ContextError
from .bench import TESTS, BenchOptions, Repeated, decode, leg_name, modes_of, random_ids

ENDLESS = 1 << 30


@dataclass
class SlotsRow(Repeated):
    """One test: tg or spec, tokens per sequence and slots (spec128x4).

    Attributes:
        runs: total tokens per second.
        tokens_per_step: mean tokens per sequence and step.
        used: share of computed rows that belong to a sequence.
        slot_bytes: K/V rows and recurrent state of one slot.
    """

    slots: int = 1
    used: float = 1.0
    slot_bytes: int = 0
    compute_bytes: int = 0


def tokens_needed(options: BenchOptions) -> int:
    """Context per slot, sufficient for the sequence with the highest acceptance."""
    return max(options.depths) + 3 * options.tokens + 64


def bench_slots(session: Session, slots: tuple[int, ...], options: BenchOptions, done: Callable = lambda row: None) -> list[SlotsRow]:
    """Plain and speculative tests for each number of slots, at the first depth; ``done(row)`` after each. Raises ContextError: a depth that
    exceeds the context of a slot."""
    need, room = tokens_needed(options), session.runner.options.n_ctx
    if need > room:
        raise ContextError(f"each slot needs {need} tokens of context, but has {room}; use `n_ctx` {need}")
    out: list[SlotsRow] = []
    for count in slots:
        names = {mode: leg_name(f"{TESTS[mode]}{options.tokens}x{count}", options.depths[0]) for mode in modes_of(session)}
        rows = {mode: SlotsRow(name, slots=count) for mode, name in names.items()}
        memory = _measure_one(session, options, rows) if count == 1 else _measure_several(session, count, options, rows)
        for row in rows.values():
            row.slot_bytes = sum(memory.get(name, 0) for name in ("kv", "draft_kv", "recurrent")) // count
            row.compute_bytes = memory["compute"]
            done(row)
        out += rows.values()
    return out


def _measure_one(session: Session, options: BenchOptions, rows: dict[str, SlotsRow]) -> dict[str, int]:
    for repetition in range(options.repetitions + 1):
        for mode, row in rows.items():
            stats = decode(session, options, options.depths[0], mode, repetition)
            if repetition:
                row.take(stats)
    return session.runner.memory()


def _measure_several(session: Session, count: int, options: BenchOptions, rows: dict[str, SlotsRow]) -> dict[str, int]:
    with session.batch(count) as scheduler:
        if options.width is not None:
            scheduler.pin_width(options.width)
        for repetition in range(options.repetitions + 1):
            for mode, row in rows.items():
                _measure(session, scheduler, count, mode, options, repetition, row)
        return scheduler.runner.memory()


def _measure(session: Session, scheduler: Engine, count: int, mode: str, options: BenchOptions, repetition: int, row: SlotsRow) -> None:
    streams = []
    for i in range(count):
        synthetic = options.acceptance(session.runner.options.width - 1, 1000 * repetition + i) if mode == SPECULATIVE else None
        prompt = random_ids(session, max(options.depths[0], 8), 2 + i)
        streams.append(scheduler.submit(prompt, GenerationOptions(ENDLESS, mode, ignore_end=True, synthetic=synthetic)))
    while not all(stream.tokens for stream in streams):
        scheduler.step()
    if not repetition and mode == SPECULATIVE:
        scheduler.learn_widths()
    before, widths, engine = scheduler.stats.emitted, Counter(scheduler.stats.widths), scheduler.runner
    steps, computed, used = scheduler.stats.steps, engine.totals.rows_computed, engine.totals.rows_used
    began = time.perf_counter()
    while scheduler.stats.emitted - before < count * options.tokens and not any(stream.ended for stream in streams):
        scheduler.step()
    seconds = time.perf_counter() - began
    emitted, steps = scheduler.stats.emitted - before, scheduler.stats.steps - steps
    scheduler.cancel_all()
    if repetition:
        row.runs.append(emitted / seconds)
        row.ms_per_step, row.tokens_per_step = 1000 * seconds / steps, emitted / steps / count
        row.used = (engine.totals.rows_used - used) / (engine.totals.rows_computed - computed)
        row.widths = dict(scheduler.stats.widths - widths)
