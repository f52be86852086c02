"""A slot of the runner: one sequence for its whole life; it never moves.

free -- admit --> committed -- Prefill, Verify() --> committed          its rows are in caches and recurrent states
                  committed -- Verify(drafts), Draft --> open           a block of W rows, none of which counts yet
                  open        -- accept(n) --> uncommitted              n rows count; the state is that before the block
                  uncommitted -- rollback(m) --> uncommitted            m others count
                  uncommitted -- the next step, settle --> committed    the rows that count are replayed
any -- release --> free
"""

from dataclasses import dataclass, field

import numpy as np

from ..cache.cursor import Cursor

NOTHING = np.empty(0, np.int32)


@dataclass
class Slot:
    """One sequence. The recurrent state holds the tokens before ``base``.

    Attributes:
        used: whether it has a sequence.
        clean: whether its rows hold nothing that a later sequence must not read.
        sound: whether no step of its sequence computed NaN or Inf, so that what it leaves may be reused.
        drafting: whether drafter rows are computed.
        candidates, masked: as of ``ModelRunner.read_candidates``.
        tokens, ids: of the last block's rows, from position ``base`` on, and the greedy choices after them.
        open_rows: of the last block, until ``accept``.
        row: of the last step's rows, the slot's first one with logits.
    """

    cursor: Cursor
    used: bool = False
    clean: bool = True
    sound: bool = True
    drafting: bool = True
    candidates: int | None = 0
    masked: bool = False
    base: int = 0
    tokens: np.ndarray = field(default_factory=lambda: NOTHING)
    ids: np.ndarray = field(default_factory=lambda: NOTHING)
    open_rows: int = 0
    row: int = 0

    def commit(self) -> None:
        """Everything that counts is in the recurrent state; there is nothing to roll back."""
        self.base, self.tokens, self.ids, self.open_rows = self.cursor.committed, NOTHING, NOTHING, 0
