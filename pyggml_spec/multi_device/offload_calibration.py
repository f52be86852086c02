"""From how many rows on chunks of a prompt are computed with copies of weights that lie in host memory: measured, and kept as costs of steps are.

Copying takes as long for 32 rows as for 512, and the host's products take about as long as there are rows: so the first chunk that copies make
faster says that all wider ones are, too.
"""

import statistics
import time
from typing import NamedTuple

import numpy as np

from ..engine.runner import ModelRunner
from ..folders import cache_folder
from ..speculation.calibrate import SEED, Waiting, cost_key, keep, kept

RUNS = 3  # of each chunk, after one that is not counted
NEVER = 1 << 30  # rows


class Chunk(NamedTuple):
    """Milliseconds of a chunk of ``rows`` rows: as the ``host`` computes what it has, and with ``copies`` of it on the device."""

    rows: int
    host: float
    copies: float


def chunk_cost(engine: ModelRunner, rows: int, copies: bool) -> float:
    """Milliseconds of a chunk of ``rows`` rows, with copies or without: the median of RUNS. Forgets the sequence. Leaves the streams at that."""
    random, runs = np.random.default_rng(SEED), []
    for stream in engine.target.weights.streams:
        stream.rows = 1 if copies else NEVER
    for _ in range(1 + RUNS):
        ids = random.integers(0, engine.target.n_vocab, rows)
        engine.reset()
        began = time.perf_counter()
        engine.prefill(ids.tolist())
        runs.append(time.perf_counter() - began)
    engine.reset()
    return 1000 * statistics.median(runs[1:])


def chunk_costs(engine: ModelRunner) -> list[Chunk]:
    """Of ascending chunks, up to the first that copies make faster."""
    out: list[Chunk] = []
    for rows in engine.resources.chunks:
        if rows >= engine.options.n_ctx:
            break
        out.append(Chunk(rows, chunk_cost(engine, rows, False), chunk_cost(engine, rows, True)))
        if out[-1].copies < out[-1].host:
            break
    return out


def cached_chunk_costs(engine: ModelRunner) -> list[Chunk]:
    """``chunk_costs``, from the cache if they were measured before: the same chunks go the same way in every session then."""
    chunks = engine.resources.chunks
    names = {f"{rows} rows, {way}": (rows, way) for rows in chunks for way in ("host", "copies")}
    path = cache_folder() / f"chunks-{cost_key(engine, chunks)}.json"
    stored = kept(path, names) or {}
    found = [
        Chunk(rows, stored[rows, "host"], stored[rows, "copies"]) for rows in chunks if {(rows, "host"), (rows, "copies")} <= stored.keys()
    ]
    if found:
        return found
    with Waiting(engine) as waiting:
        found = chunk_costs(engine)
    if found and not waiting.much:
        keep(path, {f"{chunk.rows} rows, {way}": getattr(chunk, way) for chunk in found for way in ("host", "copies")})
    return found


def settle(engine: ModelRunner) -> Chunk | None:
    """Has all chunks from the first on that copies make faster computed with them, and says what that one took; None if there was nothing to
    measure. If copies make none faster, the last one that was measured: the streams then take none."""
    found = cached_chunk_costs(engine)
    rows = next((chunk.rows for chunk in found if chunk.copies < chunk.host), NEVER)
    for stream in engine.target.weights.streams:
        stream.rows = rows
    return found[-1] if found else None
