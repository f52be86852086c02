"""A slot of the runner: one sequence for its whole life; it never moves.

free -- admit --> folded -- Prefill, Verify() --> folded           its rows are in the caches and in the recurrent state
                  folded -- Verify(drafts), Draft --> open         a block of W rows, none of which counts yet
                  open     -- accept(n) --> uncommitted               n rows count; the state is that before the block
                  uncommitted -- rollback(m) --> uncommitted             m others do
                  uncommitted -- the next step over the slot, settle --> folded       by replaying the rows that count
any -- release --> free
"""

from dataclasses import dataclass, field

import numpy as np

from ..cache.cursor import Cursor

NOTHING = np.empty(0, np.int32)


@dataclass
class Slot:
    """One sequence. ``tokens`` are the rows of its last block, from position ``base`` on; ``ids`` the choices after them.

    The recurrent state holds the tokens before ``base``; the block's accepted rows are folded in by the next step over this slot.
    """

    cursor: Cursor
    used: bool = False
    clean: bool = True  # nothing is left in its rows that a later sequence must not see
    sound: bool = True  # no step of its sequence brought NaN or Inf, of the target or the drafter: what it leaves may be reused
    drafting: bool = True
    candidates: int | None = 0  # see ModelRunner.read_candidates
    masked: bool = False
    base: int = 0
    tokens: np.ndarray = field(default_factory=lambda: NOTHING)
    ids: np.ndarray = field(default_factory=lambda: NOTHING)
    open_rows: int = 0  # of the last block, until accept says how many count
    row: int = 0  # of the last step's choices: the slot's first one

    def folded(self) -> None:
        """What is committed is in the recurrent state; nothing is left to roll back."""
        self.base, self.tokens, self.ids, self.open_rows = self.cursor.committed, NOTHING, NOTHING, 0
