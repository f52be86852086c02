"""A slot of an engine, what it can be asked to do in a step, and what comes back.

A slot is one sequence for its whole life and never moves:

    free -- admit --> folded -- Prompt, Verify() --> folded            its rows are in the caches and in the recurrent state
                      folded -- Verify(drafts), Draft --> open         a block of W rows, none of which counts yet
                      open     -- accept(n) --> unfolded               n rows count; the state is that before the block
                      unfolded -- rollback(m) --> unfolded             m others do
                      unfolded -- the next step over the slot, settle --> folded       by replaying the rows that count
    any -- release --> free
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cache.cursor import Cursor
from ..ggml.step_io import StepTimes

Ids = Sequence[int] | np.ndarray
"""Token ids, I64 [n] if they are an array."""

NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True)
class Prompt:
    """Tokens that certainly come next: they are committed by the step, and the choice after the last one becomes pending.

    ``more``: others follow at once, and nobody asks what this step chose. Over several devices nobody waits for it then: the first device goes on
    with the next step while the others compute this one. Nothing is pending before the last one.
    """

    tokens: Ids
    more: bool = False

    @property
    def rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Verify:
    """The pending token and given drafts behind it; without drafts a plain token, which is committed by the step. Follow with ``accept``."""

    drafts: Ids = ()

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts)


@dataclass(frozen=True)
class Draft:
    """The pending token and ``width`` - 1 drafts of the drafter's. Follow with ``accept``.

    ``masks``: I32 [width - 1] ids to draft from instead of mask tokens; the drafts are then worth nothing, but varied. Chains have none. ``check``:
    asked, once the drafts (I32 [width - 1]) are made, how many of them are worth verifying; fewer rows are computed then, the first one always.
    ``verified``: rows of the graph that verifies them, 0 for ``width``: more rows can cost less (27B shape on one H200: 8 rows 26 ms, 16 21).
    ``weigh``: of the same drafts, how many are worth verifying by what the drafter says of each, F32 [W - 1] by slot, where it does: asked once
    for all slots of a step that have it, because the rows of one are the rows of all.
    ``drafter``: the method of the one that drafts, "" for the first; in a step of several slots the same one does for all of them.
    """

    width: int
    masks: np.ndarray | None = None
    check: Callable[[np.ndarray], int] | None = None
    verified: int = 0
    drafter: str = ""
    weigh: Callable[[Mapping[int, np.ndarray]], int] | None = None

    @property
    def rows(self) -> int:
        return self.width


Work = Prompt | Verify | Draft


@dataclass(slots=True)
class StepResult:
    """What a step brought one slot.

    Attributes:
        tokens: I32 [W] the ids of its rows: [pending, draft 1, ...], or those of a prompt.
        ids: I32 [W] greedy choice after each row; of a prompt I32 [1], after its last one.
        draft_finite: False if the drafter produced NaN or Inf.
        target_finite: False if the target did.
        times: host microseconds of the whole step.
    """

    tokens: np.ndarray
    ids: np.ndarray
    draft_finite: bool
    target_finite: bool
    times: StepTimes


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
    candidates: int | None = 0  # see Engine.read_candidates
    masked: bool = False
    base: int = 0
    tokens: np.ndarray = field(default_factory=lambda: NOTHING)
    ids: np.ndarray = field(default_factory=lambda: NOTHING)
    open_rows: int = 0  # of the last block, until accept says how many count
    row: int = 0  # of the last step's choices: the slot's first one

    def folded(self) -> None:
        """What is committed is in the recurrent state; nothing is left to roll back."""
        self.base, self.tokens, self.ids, self.open_rows = self.cursor.committed, NOTHING, NOTHING, 0
