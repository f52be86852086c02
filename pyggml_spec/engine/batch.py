"""One step: what each slot contributes (``Batch``), which graph computes it (``GraphKey``), and what comes back (``StepOutput``)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..cache.slots import SlotRange
from ..ggml.step_io import StepTimes
from .sequence import Sequence as SequenceState

Ids = Sequence[int] | np.ndarray
"""Token ids, I64 [n] if they are an array."""

FIRST = SlotRange(0, 1)


@dataclass(frozen=True)
class Prefill:
    """Prompt tokens. They are committed by the step; the greedy token after the last one becomes the last token.

    ``more``: another chunk follows at once and this chunk's ids are not read. Over several devices the next chunk then starts on the first device
    while the others still compute this one.
    """

    tokens: Ids
    more: bool = False

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
    """The last token and ``width`` - 1 tokens of the drafter. Follow with ``accept``.

    ``masks``: I32 [width - 1] ids in place of mask tokens (block drafters only), for measurements. ``check``: called with the drafts, I32 [width - 1];
    returns how many to verify. ``weigh``: called once per step with the drafter's confidence, F32 [width - 1] by slot; returns how many to verify in
    each. ``verified``: rows of the graph that verifies them, 0 for ``width``. ``drafter``: drafting method, "" for the first; one per step.
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
        rows: rows that count, by slot.
        slots: the range of slots that the graph covers; rows of slots without an item are switched off.
        kind: of graph: prefill, plain, verify, fused, draft, logits or capture.
        verify_len: rows per slot of the graph.
        kv_bucket: cache rows that the graph reads.
        method: drafting method, "" where none drafts in this graph.
        drafts: draft tokens per slot that the graph makes.
    """

    items: dict[int, BatchItem]
    plan: Any = None
    decoding: list[SequenceState] = field(default_factory=list)
    prefilling: list[SequenceState] = field(default_factory=list)
    sequences: Mapping[int, SequenceState] = field(default_factory=dict)
    constrained: list[SequenceState] = field(default_factory=list)
    masked: list[SequenceState] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    began: int = 0
    ms: float = 0.0
    graph_rows: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    slots: SlotRange = FIRST
    kind: str = ""
    verify_len: int = 1
    kv_bucket: int = 0
    method: str = ""
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What distinguishes one graph from another. Made by ``GraphKey.of``, which interns: steps compare keys by identity first.

    Attributes:
        kind, verify_len, kv_bucket, slots: as of ``Batch``; also kind commit and catchup.
        method: drafting method, "" for the first drafter's and where none drafts.
        drafts: tokens that are drafted per slot, -1 for ``verify_len`` - 1.
        streamed: whether layers are computed with streamed copies of weights in host memory.
        deferred: whether drafter rows are left to the hidden-state buffer.
        layers: captured target layers, of kind capture.
        to_len, replay: of kind commit: the next block's rows, and whether accepted rows are replayed.
        drafting: whether drafter rows, or what they are computed from, are written.
        candidates: largest logits per row that are read with the ids; None: whole rows, on demand.
        masked: whether logits stay on the device for constrained choices.
    """

    kind: str
    verify_len: int
    kv_bucket: int
    slots: SlotRange
    method: str = ""
    drafts: int = -1
    streamed: bool = False
    deferred: bool = False
    layers: tuple[int, ...] = ()
    to_len: int = 0
    replay: bool = False
    drafting: bool = False
    candidates: int | None = 0
    masked: bool = False

    @staticmethod
    @lru_cache(maxsize=1 << 12)
    def of(*args: Any, **more: Any) -> "GraphKey":
        """The same object for the same values."""
        return GraphKey(*args, **more)

    @property
    def role(self) -> str:
        """Name of the compute buffer that graphs of this kind share."""
        return f"{self.kind} {self.method}" if self.method else self.kind
