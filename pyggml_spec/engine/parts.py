"""What an engine is made of: options, results, and what they own: caches, the step buffer, graphs."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ..checks import whole
from ..errors import ContextError, EngineError, PairError
from ..ggml.device import Backend
from ..ggml.step_io import StepIO, StepTimes
from ..memory.delta import DeltaState
from ..memory.features import RING, FeatureRing
from ..memory.kv import KVCache
from ..memory.kv_types import KVTypes, check_types
from ..memory.snapshot import SequenceMemory
from ..models.base import KVShape, Target
from ..models.dflash import DFlash
from .graph_store import Step
from .graphs import MOST_CANDIDATES, StepGraphs

TRASH_ROWS = 16
ROW_BYTES = 112  # of the step buffer
WIDTHS = (2, 4, 8, 16)
MOST_CONTEXT, MOST_WIDTH, WIDEST_CHUNK = 1 << 24, 1024, 1 << 14
CHUNKS = (32, 128, 512)  # prefill widths: a tail is padded to the smallest one that holds it


class Closable(Protocol):
    def close(self) -> None: ...


P = TypeVar("P", bound=Closable)


@dataclass(frozen=True)
class EngineOptions:
    """Attributes:
    n_ctx: tokens that the context holds.
    width: rows of a verified block (draft width), 1 for none; never more than the drafter's trained block.
    chunk: widest prefill chunk in tokens.
    kv, draft_kv: what the target's and the drafter's K and V rows are stored as.
    slots: sequences at once, each with ``n_ctx`` tokens of context.
    """

    n_ctx: int = 4096
    width: int = 16
    chunk: int = 512
    kv: KVTypes = KVTypes()
    draft_kv: KVTypes = KVTypes()
    slots: int = 1


def candidate_widths(block_size: int) -> tuple[int, ...]:
    """The block widths that are planned for at load, and that width control chooses from."""
    return tuple(sorted({*(w for w in WIDTHS if w < block_size), block_size}))


def check_options(options: EngineOptions, target: Target, drafter: DFlash | None) -> None:
    """Raises ContextError, EngineError or PairError for options that no engine can have, or a pair that does not fit."""
    whole(options.n_ctx, "the context (`n_ctx`)", 1, MOST_CONTEXT, ContextError)
    whole(options.width, "the block width", 1, MOST_WIDTH)
    whole(options.chunk, "the prefill chunk", 1, WIDEST_CHUNK)
    if drafter is not None:
        drafter.check_pair(target)
        if options.width > drafter.hp.block_size:
            raise PairError(
                f"a draft width of {options.width} is wider than the block of {drafter.hp.block_size} that {drafter.file.path.name} "
                f"was trained for; use `draft_width` {drafter.hp.block_size} or less"
            )


@dataclass(frozen=True)
class StepResult:
    """What one target forward returned.

    Attributes:
        tokens: I32 [W] the verified row ids: [pending, draft 1, ...].
        ids: I32 [W] greedy choice after each row.
        draft_finite: False if the drafter produced NaN or Inf.
        target_finite: False if the target did.
        times: host microseconds.
    """

    tokens: np.ndarray
    ids: np.ndarray
    draft_finite: bool
    target_finite: bool
    times: StepTimes


class EngineParts:
    """Owns caches, graphs and the step buffer; borrows models (with their weights) and the backend.

    The engine says in ``_reserve`` which graphs are planned at once.
    """

    kv_class, graphs_class, planned = KVCache, StepGraphs, False  # planning puts classes without memory here
    ring: FeatureRing | None = None
    delta: DeltaState | None = None
    draft_kv: KVCache | None

    def __init__(self, backend: Backend, target: Target, drafter: DFlash | None, options: EngineOptions) -> None:
        check_options(options, target, drafter)
        self.backend, self.target, self.drafter, self.options = backend, target, drafter, options
        self._last: Step | None = None  # the step whose logits candidates() reads
        self._iota = np.arange(max(options.chunk, options.width, RING), dtype=np.int32)
        self._parts: list[Closable] = []
        try:
            self._allocate()
            self._reserve()
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        raise NotImplementedError

    def _own(self, part: P) -> P:
        self._parts.append(part)
        return part

    def _allocate(self) -> None:
        opt, shape = self.options, self.target.delta_shape()
        widest = max(opt.chunk, opt.width)
        self.chunks = tuple(sorted({*(c for c in CHUNKS if c < opt.chunk), opt.chunk}))
        self.kv = self._cache(self.target.kv_shapes(), opt.kv, self.target.window, widest)
        self.draft_kv = self._cache(self.drafter.kv_shapes(), opt.draft_kv, draft=True) if self.drafter is not None else None
        if shape is not None:
            self.delta = self._own(DeltaState(self.backend, shape, self.target.delta_row(), opt.width, opt.slots, self.planned))
        self.sequence = SequenceMemory(self.kv, self.draft_kv, self.delta, self.target.kv_shapes(), self.target.window)
        tail = 4 * shape.layers * (shape.conv - 1) if shape is not None else 0
        of_slot = ROW_BYTES * widest + tail + 4 * self.kv.ring + 8 * MOST_CANDIDATES * opt.width
        self.io = self._own(StepIO(self.backend, opt.slots * of_slot + 8192))
        if self.drafter is not None and opt.slots == 1:
            self.ring = self._own(FeatureRing(self.backend, self.target.n_embd * len(self.drafter.hp.target_layers)))
        blocks = candidate_widths(opt.width)
        widths = {"prefill": self.chunks, "logits": (opt.chunk,), "plain": (1,), "verify": blocks, "fused": blocks}
        self.graphs = self._own(
            self.graphs_class(
                self.backend, self.io, self.target, self.drafter, self.kv, self.draft_kv, self.delta, self.ring, widths, opt.slots
            )
        )

    def _cache(self, shapes: list[KVShape], types: KVTypes, window: int = 0, widest: int = 0, draft: bool = False) -> KVCache:
        check_types(types, shapes, self.backend, draft)
        return self._own(
            self.kv_class(self.backend, shapes, self.options.n_ctx, TRASH_ROWS, window, widest, types=types, slots=self.options.slots)
        )

    def _check_open(self) -> None:
        if self.graphs.closed:
            raise EngineError("the session is closed: load the model again")

    def _token(self, token: int) -> int:
        return whole(token, "the pending token", 0, self.target.n_vocab - 1)

    def memory(self) -> dict[str, int]:
        """Bytes on the device by purpose."""
        self._check_open()
        out = {"weights": self.target.weights.nbytes, "kv": self.kv.nbytes, "compute": self.graphs.compute_bytes}
        if self.drafter is not None and self.draft_kv is not None:
            out["draft_weights"] = self.drafter.weights.nbytes
            out["draft_kv"] = self.draft_kv.nbytes + (self.ring.nbytes if self.ring is not None else 0)
        if self.delta is not None:
            out["recurrent"] = self.delta.nbytes
        return out

    def close(self) -> None:
        for part in reversed(self._parts):
            part.close()
        self._parts = []
