"""What may come after the rows of a step: as many of a row's largest logits as a sampler needs, among all tokens or among some."""

from collections.abc import Sequence

import numpy as np

from ..checks import whole
from ..errors import EngineError
from .masked import MaskedRows, masked_rows
from .options import MOST_CANDIDATES
from .resources import Resources
from .sequences import Sequences

Ask = tuple[int, int, np.ndarray]
"""A slot, a row of its last work, and U8 bits of the tokens to choose from, the lowest one of each byte first."""


class Candidates:
    """Reads from the last step's logits; whoever asks says so before that step.

    Attributes:
        unmasked: why nobody can be asked among some of the tokens, in one sentence; empty where they can, or nobody wanted to.
    """

    def __init__(self, parts: Resources, sequences: Sequences) -> None:
        self._parts, self._sequences = parts, sequences
        self._tried = False  # whether there is room for logits that are kept
        self.unmasked = ""

    def announce(self, count: int | None, slot: int, masked: bool) -> None:
        count = count if count is None else whole(count, "the number of candidates", 0, MOST_CANDIDATES)
        if self._parts.backend.device.kind == "cpu":
            count, masked = 0, False
        self.expect(count, slot, masked)

    def expect(self, count: int | None, slot: int, masked: bool) -> None:
        s = self._parts.slots[slot]
        s.masked = masked and self._room()
        s.candidates = None if masked and not s.masked else count

    def _room(self) -> bool:
        """Makes room, the first time, for logits that stay on the device; whether there is."""
        p = self._parts
        if not self._tried:
            self._tried = True
            rows, self.unmasked = masked_rows(p.backend, p.target.n_vocab, len(p.slots) * p.options.width, MOST_CANDIDATES)
            p.keep_masked(rows)
        return p.graphs.masked is not None

    def after(self, row: int, slot: int) -> tuple[np.ndarray | None, np.ndarray]:
        row = self._row(slot, row)
        if self._parts.last is None or self._parts.graphs.closed:
            raise EngineError("no step has been computed whose candidates could be read")
        return self._parts.last.candidates(row)

    def likeliest(self, asks: Sequence[Ask]) -> list[int]:
        return self._kept([slot for slot, *_ in asks]).likeliest([(self._row(slot, row), bits) for slot, row, bits in asks])

    def largest(self, row: int, bits: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
        return self._kept([slot]).largest(self._row(slot, row), bits, self._parts.slots[slot].candidates or 1)

    def _kept(self, slots: Sequence[int]) -> MaskedRows:
        p = self._parts
        if p.graphs.masked is None or p.last is None or p.graphs.closed or not all(p.slots[slot].masked for slot in slots):
            raise EngineError("no logits were kept to choose from: call read_candidates with `masked` before the step")
        return p.graphs.masked

    def _row(self, slot: int, row: int) -> int:
        """Its place among those of the last step."""
        s = self._sequences.of(slot)
        return s.row + whole(row, f"the row of slot {slot}", 0, max(0, s.ids.size - 1))
