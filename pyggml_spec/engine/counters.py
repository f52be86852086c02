"""Counters of the runner over one generation."""

from dataclasses import asdict
from typing import Any

from .runner import ModelRunner
from .stats import Stats

WARMUP_STEPS = 2
SINCE_LOAD = ("graphs_built", "buffer_growths")  # counted since load, not since the generation began


class Counters:
    """Of a runner with one slot, for its only sequence."""

    def __init__(self, engine: ModelRunner) -> None:
        self._engine, self._before = engine, counts(engine)
        self._warm: dict[str, Any] | None = None

    def warm(self) -> None:
        """The first WARMUP_STEPS steps are done: later builds delay a step."""
        self._warm = counts(self._engine)

    def fill(self, stats: Stats) -> None:
        """Writes the counts so far into ``stats``."""
        now = counts(self._engine)
        for key, value in now.items():
            before: Any = 0 if key in SINCE_LOAD else self._before[key]
            setattr(stats, key, value - before if isinstance(value, int) else {k: v - before[k] for k, v in value.items()})
        warm = self._warm or now
        built, ahead = (now[key] - warm[key] for key in ("graphs_built", "graphs_built_ahead"))
        stats.graphs_built_after_warmup = built - ahead
        stats.buffer_growths_after_warmup = now["buffer_growths"] - warm["buffer_growths"]
        stats.memory = self._engine.memory()


def counts(engine: ModelRunner) -> dict[str, Any]:
    """All counters of ``engine`` by the names that they have in ``Stats``."""
    counters = engine.graphs.counters().values()
    out: dict[str, Any] = {
        "graphs_built": sum(c.graphs_built for c in counters),
        "graphs_built_ahead": engine.built_ahead,
        "buffer_growths": sum(c.buffer_growths for c in counters),
        "computes": sum(c.computes for c in counters),
        "uploads": engine.io.uploads,
        "upload_bytes": engine.io.upload_bytes,
        "reads": engine.io.reads,
        "read_bytes": engine.io.read_bytes,
    }
    if (experts := engine.expert_counts()) is not None:
        out["experts"] = experts
    return {**out, "cuda_graphs": asdict(engine.io.replay)} if engine.io.replay is not None else out
