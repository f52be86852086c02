"""One step: what each slot contributes (``Batch``), which graph computes it (``GraphKey``), and what comes back (``StepOutput``)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..cache.slots import SlotRange
from ..ggml.step_io import StepTimes
from ..models.adapters import Chosen
from .prompt import PictureRows
from .sequence import Sequence as SequenceState

Ids = Sequence[int] | np.ndarray
"""Token ids, I64 [n] if they are an array."""

FIRST = SlotRange(0, 1)


@dataclass(frozen=True)
class Prefill:
    """Prompt tokens. They are committed by the step; the greedy token after the last one becomes the last token.

    ``pictures``: rows of pictures, which have negative ids in ``tokens``.
    ``more``: another chunk follows at once and this chunk's ids are not read. Over several devices the next chunk then starts on the first device
    while the others still compute this one. ``scored``: logits of all rows can be read (``ModelRunner.row_logits``); at most a block's rows.
    """

    tokens: Ids
    more: bool = False
    scored: bool = False
    pictures: PictureRows | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Verify:
    """The last token and given drafts; without drafts one decode step, committed at once. Follow with ``accept``."""

    drafts: Ids = ()

    @property
    def rows(self) -> int:
        return 1 + len(self.drafts)


@dataclass(frozen=True)
class Draft:
    """The last token and ``verify_len`` - 1 tokens of the drafter. Follow with ``accept``.

    ``masks``: I32 [verify_len - 1] ids in place of mask tokens (block drafters only), for measurements. ``check``: called with the drafts,
    I32 [verify_len - 1]; returns how many to verify. ``weigh``: called once per step with the drafter's confidence, F32 [verify_len - 1] by slot; returns how many to verify in
    each. ``padded_len``: rows of the graph that verifies them, 0 for ``verify_len``. ``drafter``: drafting method, "" for the first; one per step.
    """

    verify_len: int
    masks: np.ndarray | None = None
    check: Callable[[np.ndarray], int] | None = None
    padded_len: int = 0
    drafter: str = ""
    weigh: Callable[[Mapping[int, np.ndarray]], int] | None = None

    @property
    def rows(self) -> int:
        return self.verify_len

    @property
    def proposes(self) -> bool:
        """Whether the drafts are read on the host before they are verified: two graphs in place of one."""
        return self.check is not None or self.weigh is not None


BatchItem = Prefill | Verify | Draft


@dataclass(slots=True)
class StepOutput:
    """What a step computed for one slot.

    Attributes:
        tokens: I32 [W] the ids of its rows: [last token, draft 1, ...], or those of a prompt.
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


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What distinguishes one graph from another. ``GraphKey.of`` interns: steps mostly compare keys by identity.

    Attributes:
        kind: prefill, plain, verify, fused, draft, commit, catchup, logits or capture.
        verify_len: rows per slot.
        kv_bucket: cache rows that are read, a multiple of the cache's span.
        slots: the range of slots that is covered.
        method: drafting method of kind fused, draft and catchup.
        n_drafts: tokens that are drafted per slot, -1 for ``verify_len`` - 1.
        streamed: whether layers are computed with streamed copies of weights in host memory.
        deferred: whether drafter rows are left to the hidden-state buffer.
        layers: captured target layers, of kind capture.
        next_len, replay: of kind commit: rows of the next block, and whether accepted rows are replayed.
        pictures: whether some rows are those of pictures.
        drafting: whether drafter rows, or what they are computed from, are written.
        candidates: largest logits per row that are read with the ids; None: whole rows, on demand.
        masked: whether logits stay on the device for constrained choices.
        adapters: of the target, as of ``models.adapters.Chosen``.
    """

    kind: str
    verify_len: int
    kv_bucket: int
    slots: SlotRange
    method: str = ""
    n_drafts: int = -1
    streamed: bool = False
    deferred: bool = False
    layers: tuple[int, ...] = ()
    next_len: int = 0
    replay: bool = False
    pictures: bool = False
    drafting: bool = False
    candidates: int | None = 0
    masked: bool = False
    adapters: Chosen = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._values()))

    def __hash__(self) -> int:
        return self._hash

    def _values(self) -> tuple[Any, ...]:
        shape = self.kind, self.verify_len, self.kv_bucket, self.slots, self.method, self.n_drafts, self.streamed, self.deferred
        return *shape, self.layers, self.next_len, self.replay, self.pictures, self.drafting, self.candidates, self.masked, self.adapters

    @staticmethod
    @lru_cache(maxsize=1 << 12)
    def of(*args: Any, **more: Any) -> "GraphKey":
        """The same object for the same values."""
        return GraphKey(*args, **more)

    def at(self, kv_bucket: int, slots: SlotRange | None = None) -> "GraphKey":
        """The key of the same graph for another K/V bucket, or other slots."""
        kind, verify_len, _, old, *more = self._values()
        return GraphKey.of(kind, verify_len, kv_bucket, slots or old, *more)

    @property
    def family(self) -> "GraphKey":
        """Graphs that differ in slots, K/V bucket and sampling only have the same family."""
        return GraphKey.of(self.kind, self.verify_len, 0, FIRST, *self._values()[4:12])

    @property
    def drafts(self) -> int:
        """Tokens that are drafted per slot."""
        return self.n_drafts if self.n_drafts >= 0 else self.verify_len - 1

    @property
    def total(self) -> int:
        """Rows of all slots."""
        return self.verify_len * self.slots.count


NO_KEY = GraphKey("", 0, 0, FIRST)
UNSET: Any = ()  # of collections that are replaced, never added to: a batch is made in every step


@dataclass(slots=True)
class Batch:
    """One forward pass over some slots. The scheduler fills ``items``; the runner fills in the rest.

    Attributes:
        items: what each slot contributes, by slot.
        plan: the speculation policy's choice for this step; the runner does not read it.
        decoding, prefilling: sequences that can decode, and those with prompt tokens to compute.
        sequences: all admitted sequences, by slot.
        constrained, masked: decoding sequences under constraints, and those whose masks are computed during the step.
        errors: by slot, an error that ends its sequence alone.
        began: start, by the clock of nanoseconds; ``ms``: duration.
        graph_rows: rows that a graph verifies for the longest decode item, 0 in a prefill step.
        checked, version: the items, and the runner's slots, for which all fields from here on but ``context`` and ``kv_bucket`` hold: a batch that is
            computed again takes the same graph.
        rows: rows that count, by slot.
        is_block: whether some rows may turn out wrong.
        context: tokens of the longest sequence before the step.
        computed: the items as the graph computes them: drafts that the host has read are given ones.
        proposed: by slot, whether drafts that the host has read are finite; ``drafted``: K/V rows that a whole model wrote meanwhile.
        slots, kind, verify_len, kv_bucket, method, n_drafts, streamed, deferred, pictures, drafting, candidates, keep_logits (masked), layers, adapters: as
            of ``GraphKey``.
        kv_from: fewest tokens that ``kv_bucket`` is the bucket of.
        key: of the graph, once all of these are known.
    """

    items: dict[int, BatchItem]
    plan: Any = None
    decoding: list[SequenceState] = UNSET
    prefilling: list[SequenceState] = UNSET
    sequences: Mapping[int, SequenceState] = UNSET
    constrained: list[SequenceState] = UNSET
    masked: list[SequenceState] = UNSET
    errors: dict[int, Exception] = field(default_factory=dict)
    began: int = 0
    ms: float = 0.0
    graph_rows: int = 0
    checked: Any = None
    version: int = -1
    rows: dict[int, int] = UNSET
    is_block: bool = False
    context: int = 0
    computed: Mapping[int, BatchItem] = UNSET
    proposed: dict[int, bool] = UNSET
    drafted: Mapping[int, int] = UNSET
    slots: SlotRange = FIRST
    kind: str = ""
    verify_len: int = 1
    kv_from: int = 0
    kv_bucket: int = 0
    method: str = ""
    n_drafts: int = -1
    streamed: bool = False
    deferred: bool = False
    pictures: bool = False
    drafting: bool = False
    candidates: int | None = 0
    keep_logits: bool = False
    adapters: Chosen = ()
    layers: tuple[int, ...] = ()
    key: GraphKey = NO_KEY

    def make_key(self) -> GraphKey:
        """``key``: of the graph that computes this batch."""
        self.key = GraphKey.of(
            self.kind, self.verify_len, self.kv_bucket, self.slots, self.method, self.n_drafts, self.streamed, self.deferred, self.layers, 0, False,
            self.pictures, self.drafting, self.candidates, self.keep_logits, self.adapters,
        )  # fmt: skip
        return self.key
