"""Throughput of concurrent sequences, by the number of slots.

Sequences have short prompts and outlast the measurement, so every step has all slots; prefill is excluded. One slot uses the
single-sequence engine.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ..api import Session
from ..engine.engine import Engine
from ..engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from ..errors import ContextError
from .bench import BenchOptions, Repeated, _Decode, _fill

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

    test: str
    slots: int
    runs: list[float] = field(default_factory=list)
    ms_per_step: float = 0.0
    tokens_per_step: float = 0.0
    used: float = 1.0
    widths: dict = field(default_factory=dict)
    slot_bytes: int = 0
    compute_bytes: int = 0


def tokens_needed(options: BenchOptions) -> int:
    """Context per slot, sufficient for the sequence with the highest acceptance."""
    return max(options.depths) + 3 * options.tokens + 64


def bench_slots(session: Session, slots: tuple[int, ...], options: BenchOptions, done: Callable = lambda row: None) -> list[SlotsRow]:
    """Plain and speculative tests for each number of slots, at the first depth; ``done(row)`` after each. Raises ContextError: a depth that
    exceeds the context of a slot."""
    room = session.engine.options.n_ctx
    if tokens_needed(options) > room:
        raise ContextError(
            f"each slot needs {tokens_needed(options)} tokens of context, but has {room}; use `n_ctx` {tokens_needed(options)}"
        )
    rows = []
    for count in slots:
        modes = (PLAIN, SPECULATIVE) if session.drafter is not None else (PLAIN,)
        made = _one_slot(session, options, modes) if count == 1 else _several(session, count, options, modes)
        for row in made:
            done(row)
        rows += made
    return rows


def _one_slot(session: Session, options: BenchOptions, modes) -> list[SlotsRow]:
    legs = [_Decode(session, options, options.depths[0], mode) for mode in modes]
    for repetition in range(options.repetitions + 1):
        for leg in legs:
            leg.run(repetition)
    memory = session.engine.memory()
    out = []
    for leg, mode in zip(legs, modes, strict=True):
        row = leg.row
        out.append(SlotsRow(_name(mode, options, 1), 1, row.runs, row.ms_per_step, row.tokens_per_step, 1.0, row.widths))
        out[-1].slot_bytes, out[-1].compute_bytes = _slot_bytes(memory, 1), memory["compute"]
    return out


def _several(session: Session, count: int, options: BenchOptions, modes) -> list[SlotsRow]:
    with session.batch(count) as scheduler:
        if options.width is not None:
            scheduler.pin_width(options.width)
        rows = {mode: SlotsRow(_name(mode, options, count), count) for mode in modes}
        for repetition in range(options.repetitions + 1):
            for mode in modes:
                _measure(session, scheduler, count, mode, options, repetition, rows[mode])
        memory = scheduler.runner.memory()
        for row in rows.values():
            row.slot_bytes, row.compute_bytes = _slot_bytes(memory, count), memory["compute"]
        return list(rows.values())


def _measure(session: Session, scheduler: Engine, count: int, mode: str, options: BenchOptions, repetition: int, row: SlotsRow) -> None:
    streams = []
    for i in range(count):
        synthetic = options.acceptance(session.engine.options.width - 1, 1000 * repetition + i) if mode == SPECULATIVE else None
        prompt = _fill(session, max(options.depths[0], 8), 2 + i)
        streams.append(scheduler.submit(prompt, GenerationOptions(ENDLESS, mode, ignore_end=True, synthetic=synthetic)))
    while not all(stream.tokens for stream in streams):
        scheduler.step()
    if not repetition and mode == SPECULATIVE:
        scheduler.learn_widths()
    before, widths, engine = scheduler.stats.emitted, Counter(scheduler.stats.widths), scheduler.runner
    steps, computed, used = scheduler.stats.steps, engine.rows_computed, engine.rows_used
    began = time.perf_counter()
    while scheduler.stats.emitted - before < count * options.tokens and not any(stream.ended for stream in streams):
        scheduler.step()
    seconds = time.perf_counter() - began
    emitted, steps = scheduler.stats.emitted - before, scheduler.stats.steps - steps
    scheduler.cancel_all()
    if repetition:
        row.runs.append(emitted / seconds)
        row.ms_per_step, row.tokens_per_step = 1000 * seconds / steps, emitted / steps / count
        row.used = (engine.rows_used - used) / (engine.rows_computed - computed)
        row.widths = dict(scheduler.stats.widths - widths)


def _name(mode: str, options: BenchOptions, count: int) -> str:
    depth = f"@d{options.depths[0]}" if options.depths[0] else ""
    return f"{'tg' if mode == PLAIN else 'spec'}{options.tokens}x{count}{depth}"


def _slot_bytes(memory: dict[str, int], slots: int) -> int:
    return sum(memory.get(name, 0) for name in ("kv", "draft_kv", "recurrent")) // slots
