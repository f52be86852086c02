"""Prompts that begin alike are computed once, whichever slots they are in.

As prefix.py for one sequence, with two differences. Rows are copied as soon as a state behind them is kept (without states: at once), because
a slot is given to the next sequence at any time; on a GPU that is a fraction of a millisecond per pass. And a pass that several slots share
can round otherwise than the same rows alone: what is reused is what some pass of this engine computed, not always the very same bits.

States are kept where a pass ends a chunk, and (1) every STATE_EVERY chunks, (2) before or after a prompt's last pass, (3) where prompts part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .copies import ROWS, STATE, Chunk, Copies, chunk_keys
from .snapshot import Pieces

GRAIN = 128  # tokens per chunk: what a pass beside decoding sequences takes
STATE_EVERY = 16


class SlotPrefixes:
    """Borrows the batch engine; owns its copies. ``budget``: bytes on the device for them."""

    def __init__(self, engine: Any, budget: int) -> None:
        self.engine, self._copies = engine, Copies(engine.backend, budget)
        self.grain = min(engine.options.chunk, GRAIN)

    @property
    def used_bytes(self) -> int:
        return self._copies.used_bytes

    def keys(self, tokens: Sequence[int], drafting: bool) -> list[bytes]:
        """One per whole chunk. Rows of a sequence that is not drafted for lack the drafter's, and are kept apart."""
        return chunk_keys(np.asarray(tokens, np.int64), self.grain, bytes([drafting]))

    def enter(self, keys: list[bytes]) -> int:
        """Registers a prompt; how many leading tokens some prompt before had as well. Call it once, before the prompt is computed."""
        known = next((i for i, key in enumerate(keys) if key not in self._copies.chunks), len(keys))
        self._copies.clock += 1
        chunks = self._chunks(keys)
        for chunk in chunks:
            chunk.used[ROWS] = self._copies.clock
        self._copies.forget(chunks)
        return known * self.grain

    def bring_back(self, slot: int, keys: list[bytes], total: int) -> int:
        """Fills ``slot`` as far as there are copies; how many tokens of its prompt of ``total`` it then has. One at least is left."""
        engine, filled = self.engine, self.engine.slots[slot].cursor.committed
        done = filled // self.grain
        depth = self._deepest(keys[: (total - 1) // self.grain], done)
        if depth == done or filled % self.grain:
            return filled
        chunks = self._chunks(keys[:depth])
        for chunk in chunks[done:]:
            with self._rows(slot, chunk) as pieces:
                chunk.copies[ROWS].write_to(pieces, engine.backend)
        if engine.sequence.stateful:
            chunks[-1].used[STATE] = self._copies.clock
            with engine.sequence.state(depth * self.grain, slot) as pieces:
                chunks[-1].copies[STATE].write_to(pieces, engine.backend)
        engine.resume(depth * self.grain, slot=slot)
        return depth * self.grain

    def computed(self, slot: int, keys: list[bytes], wanted: bool) -> None:
        """Keeps what a pass of the slot's prompt has added; ``wanted``: also the state behind it, whatever the depth."""
        engine, now = self.engine, self.engine.slots[slot].cursor.committed
        depth, stateful = now // self.grain, self.engine.sequence.stateful
        if stateful and (now % self.grain or not (wanted or depth % STATE_EVERY == 0)):
            return
        if engine.rollback_range(slot) != (now, now):  # it came with a block, and its state is still pending
            return
        chunks = self._chunks(keys[:depth])
        for chunk in chunks:
            if ROWS not in chunk.copies:
                with self._rows(slot, chunk) as pieces:
                    if not self._copies.keep(chunk, ROWS, pieces, chunks):
                        return
        if stateful and chunks and STATE not in chunks[-1].copies:
            with engine.sequence.state(now, slot) as pieces:
                self._copies.keep(chunks[-1], STATE, pieces, chunks)

    def _deepest(self, keys: list[bytes], done: int) -> int:
        depth = done
        for i, key in enumerate(keys[done:], done):
            chunk = self._copies.chunks.get(key)
            if chunk is None or ROWS not in chunk.copies:
                break
            if not self.engine.sequence.stateful or STATE in chunk.copies:
                depth = i + 1
        return depth

    def _chunks(self, keys: list[bytes]) -> list[Chunk]:
        return [self._copies.chunk(key, i) for i, key in enumerate(keys)]

    def _rows(self, slot: int, chunk: Chunk) -> Pieces:
        return self.engine.sequence.rows(chunk.index * self.grain, self.grain, self.engine.slots[slot].drafting, slot)

    def close(self) -> None:
        self._copies.clear()
