"""Slots: each holds one sequence for its whole life; with its cursor, and ranges of slots.

free -- admit --> committed -- Prefill, Verify() --> committed          its rows are in caches and recurrent states
                  committed -- Verify(drafts), Draft --> open           a block of W rows, none of which counts yet
                  open        -- accept(n) --> uncommitted              n rows count; the state is that before the block
                  uncommitted -- rollback(m) --> uncommitted            m others count
                  uncommitted -- the next step, settle --> committed    the rows that count are replayed
any -- release --> free
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ..errors import ContextError, EngineError


@dataclass(frozen=True)
class SlotRange:
    """The slots [first, first + count) of a graph, also as a range (``slots``) and a slice (``part``)."""

    first: int
    count: int
    slots: range = field(init=False, repr=False, compare=False)
    part: slice = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", range(self.first, self.first + self.count))
        object.__setattr__(self, "part", slice(self.first, self.first + self.count))

    def __hash__(self) -> int:  # part of every graph lookup
        return self.first << 8 | self.count


def covering(slots: Collection[int], n_slots: int) -> SlotRange:
    """The smallest aligned range of 1, 2, 4, 8, ... slots with all of ``slots``, without its last quarter if that is unused, cut at ``n_slots``.

    This keeps the number of graphs below 3 N.
    """
    return _covering(min(slots), max(slots), n_slots)


@lru_cache(maxsize=1 << 12)
def _covering(low: int, high: int, n_slots: int) -> SlotRange:
    size = 1
    while low // size != high // size:
        size *= 2
    first, less = low // size * size, size - size // 4
    return SlotRange(first, min(less if high < first + less else size, n_slots - first))


@dataclass
class Cursor:
    """``committed`` tokens are in the caches (positions 0 .. committed - 1); ``last_token`` is chosen but not yet computed, or None.

    Invariant: committed + (1 if last_token) <= n_ctx + 1; a step may start while committed < n_ctx.

    ``min_committed``, ``max_committed``: extremes of ``committed`` since they were last set to it. Rows below the first, and those more than one
    step above the second, were not written since.
    """

    n_ctx: int
    committed: int = 0
    last_token: int | None = None
    min_committed: int = 0
    max_committed: int = 0

    @property
    def room(self) -> int:
        """Tokens that can still be committed."""
        return self.n_ctx - self.committed

    def check_fits(self, count: int) -> None:
        """Raises ContextError unless ``count`` more tokens fit."""
        if count > self.room:
            raise ContextError(
                f"{count} tokens do not fit: the context holds {self.n_ctx} and {self.committed} are in it; shorten the prompt or raise "
                f"`n_ctx` to {self.committed + count} or more"
            )

    def advance(self, rows: int, last_token: int | None) -> None:
        """Commits ``rows`` more tokens; ``last_token`` is the target's choice after them."""
        committed = self.committed + rows
        if rows < 0 or committed > self.n_ctx:
            raise EngineError(f"the cursor cannot move by {rows} tokens: {self.room} are left")
        self.place(committed, last_token)

    def reset(self) -> None:
        self.place(0, None)

    def place(self, committed: int, last_token: int | None) -> None:
        """Moves the cursor, also back; the caches must hold the tokens before (a slot within its last block)."""
        self.min_committed = min(self.min_committed, committed)
        self.max_committed = max(self.max_committed, committed)
        self.committed, self.last_token = committed, last_token


NOTHING = np.empty(0, np.int32)


@dataclass
class Slot:
    """One sequence. The recurrent state holds the tokens before ``base``.

    Attributes:
        used: whether it has a sequence.
        clean: whether its rows hold nothing that a later sequence must not read.
        sound: whether no step of its sequence computed NaN or Inf, so that what it leaves may be reused.
        drafting: whether drafter rows are computed.
        lag: of so many rows of its sequence, the rows minus their positions, where pictures have fewer positions (M-RoPE); None for 0.
        draft_options: of its sequence's ``Sampler``, whose noise its drafts share; None if greedy.
        candidates, masked: as of ``ModelRunner.read_candidates``.
        adapters: of its sequence: (index, scale) each.
        tokens, ids: of the last block's rows, from position ``base`` on, and the greedy choices after them.
        open_rows: of the last block, until ``accept``.
        row: of the last step's rows, the slot's first one with logits.
    """

    cursor: Cursor
    used: bool = False
    clean: bool = True
    sound: bool = True
    drafting: bool = True
    lag: Callable[[int], int] | None = None
    draft_options: Callable[[int], np.ndarray] | None = None
    candidates: int | None = 0
    masked: bool = False
    adapters: tuple[tuple[int, float], ...] = ()
    base: int = 0
    tokens: np.ndarray = field(default_factory=lambda: NOTHING)
    ids: np.ndarray = field(default_factory=lambda: NOTHING)
    open_rows: int = 0
    row: int = 0

    @property
    def lag_now(self) -> int:
        """Rows minus positions so far."""
        return self.lag(self.cursor.committed) if self.lag is not None else 0

    def commit(self) -> None:
        """Everything that counts is in the recurrent state; there is nothing to roll back."""
        self.base, self.tokens, self.ids, self.open_rows = self.cursor.committed, NOTHING, NOTHING, 0
