"""The graphs of a step over several slots: one per (role, width, span, range of slots).

Every graph has ``width`` rows for each slot of its range, one slot after the other; rows that a slot does not need are switched off.

role     recurrent state               tokens                                  for
direct   written directly              from the host                           prompts in chunks, plain decoding
logits   written directly              from the host                           all logits readable; parity checks
verify   replay, then left pending     from the host                           given drafts
fused    replay, then left pending     from the host or drafted, row by row    drafting, whatever the other slots do
commit   replay of all slots           -                                       before blocks of another width, or direct rows
"""

from typing import Any

from ..cache.kv import KVCache
from ..cache.recurrent import DeltaRows
from ..cache.slots import DeltaSlots, SlotRange
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..ggml.step_io import StepFields, StepIO
from ..models.base import Rows, Target
from ..models.dflash import BlockRows, DFlash
from .graphs import MEASURED_SPANS, Step, StepGraphs

KEEP_GRAPHS = 32  # per (role, width), the last used; about 2 MB of host memory each


class BatchGraphs(StepGraphs):
    """Builds and keeps the graphs of one batch engine. Owns the roles."""

    delta: DeltaSlots | None

    def __init__(
        self,
        backend: Backend,
        io: StepIO,
        target: Target,
        drafter: DFlash | None,
        kv: KVCache,
        draft_kv: KVCache | None,
        delta: DeltaSlots | None,
        widths: dict[str, tuple[int, ...]],
        slots: int,
    ) -> None:
        super().__init__(backend, io, target, drafter, kv, draft_kv, delta, None, widths)
        self.slots = slots
        self._builders = {
            "direct": self._direct,
            "logits": self._logits_slots,
            "verify": self._verify_slots,
            "fused": self._fused_slots,
            "commit": self._commit_slots,
        }

    def _reserve(self, role: str) -> None:
        """Plans the largest graph of a role first; see StepGraphs. All slots take more than some of them, but not by much at one row.

        When requests that want other candidates come later, everybody waits for this: two spans have to do.
        """
        again = any(reserved == role for reserved, _ in self._reserved)
        few = len(self.spans) if again else max(1, len(self.spans) // MEASURED_SPANS)
        spans = {*self.spans[::few], self.kv.live}
        ranges = {SlotRange(0, self.slots), SlotRange(0, 1)} if role == "direct" else {SlotRange(0, self.slots)}
        shapes = [(w, s, r) for w in self._widths[role] for s in spans for r in ranges if self.reserves(role, w, r)]
        drafting, self.drafting = self.drafting, self.drafter is not None
        try:
            largest = max(shapes, key=lambda shape: self._measured(role, *shape))
            self._keep(self._make(role, *largest), role, *largest)
            self._reserved.add((role, self.candidates))
        finally:
            self.drafting = drafting

    def _measured(self, role: str, *shape: Any) -> int:
        """Bytes that such a graph needs; it is not kept."""
        step = self._make(role, *shape)
        try:
            return step.graph.measure()
        finally:
            step.graph.close()

    @staticmethod
    def reserves(role: str, width: int, seats: SlotRange) -> bool:
        """Whether graphs like this one were planned for: prompts go slot by slot, a chunk of several at once is planned when it is asked for."""
        return role != "direct" or width == 1 or seats.count == 1

    def get(self, role: str, width: int, span: int, *more: Any) -> Step:
        step = super().get(role, width, span, *more)
        key = (role, width, span, *more, self.drafting, self.candidates)
        self._steps[key] = self._steps.pop(key)  # used last, dropped last: never while it runs
        return step

    def _make_room(self, role: str, width: int) -> None:
        family = [key for key in self._steps if key[:2] == (role, width)]
        for key in family[: max(0, len(family) + 1 - KEEP_GRAPHS)]:
            self._steps.pop(key).graph.close()

    # -- parts

    def _caches(self, g: Graph, kv: KVCache, seats: SlotRange) -> tuple:
        """The K/V tensors of these slots; rows are counted from the first one."""
        if self.slots == 1:
            return kv.layers
        views = []
        for layer in kv.layers:
            k, v = (g.slots(tensor, seats.first, seats.count) for tensor in (layer.k, layer.v))
            g.expand(k)  # now: between rope and row write it would keep ggml-cuda from fusing them
            g.expand(v)
            views.append(layer._replace(k=k, v=v))
        return tuple(views)

    def _rows(self, g: Graph, f: StepFields, width: int, span: int, seats: SlotRange) -> dict:
        total = width * seats.count
        positions, kv_rows = f.input("positions", "i32", total), f.input("kv_rows", "i64", total)
        q_last = f.input("q_last", "f32", 1, total)
        mask = g.span_mask(self.kv.near, q_last, None, span, seats.count)
        sliding = self._sliding(g, f, kv_rows, q_last, span, seats.count) if self.target.window else None
        kv = self._caches(g, self.kv, seats)
        return {"positions": positions, "kv_rows": kv_rows, "mask": mask, "span": span, "sliding": sliding, "kv": kv}

    def _begin(self, g: Graph, f: StepFields, width: int, seats: SlotRange) -> DeltaRows | None:
        if self.delta is None:
            return None
        self._replay(g, f, width, seats)
        return DeltaRows(self.delta, width, True, take=self._take_rows(f, width, seats))

    def _replay(self, g: Graph, f: StepFields, width: int, seats: SlotRange) -> None:
        assert self.delta is not None
        keep = f.input("keep", "f32", 1, width * seats.count)
        tail = f.input("tail", "i32", self.delta.history_rows * seats.count * self.delta.shape.layers)
        self.delta.begin_slots(g, seats, width, keep, tail)

    def _begin_direct(self, g: Graph, f: StepFields, width: int, seats: SlotRange) -> DeltaRows | None:
        if self.delta is None:
            return None
        on = f.input("on", "f32", 1, width * seats.count)
        last = f.input("last", "i32", self.delta.history_rows, seats.count)
        self.delta.begin_slots(g, seats, 0, None, None)
        take = self._take_rows(f, 1, seats) if width == 1 else None
        return DeltaRows(self.delta, 0, False, on, last, take)

    def _take_rows(self, f: StepFields, width: int, seats: SlotRange) -> Tensor:
        assert self.delta is not None
        return f.input("take", "i32", (self.delta.history_rows + width) * seats.count)

    def _target(self, g: Graph, tokens: Tensor, rows: dict, delta: DeltaRows | None) -> tuple[Tensor, list[Tensor]]:
        capture = self.drafter.hp.target_layers if self.drafter is not None and self.drafting else ()
        return self.target.forward(g, Rows(tokens=tokens, delta=delta, **rows), capture)

    def _context(self, g: Graph, features: list[Tensor], rows: dict, draft_kv: tuple | None, seats: SlotRange) -> None:
        if self.drafting:
            assert self.drafter is not None and self.draft_kv is not None
            draft_kv = draft_kv or self._caches(g, self.draft_kv, seats)
            self.drafter.context_rows(g, features, rows["positions"], rows["kv_rows"], draft_kv)

    # -- the graphs

    def _direct(self, g: Graph, f: StepFields, width: int, span: int, seats: SlotRange) -> dict:
        rows = self._rows(g, f, width, span, seats)
        delta = self._begin_direct(g, f, width, seats)
        out_row = f.input("out_row", "i32", seats.count) if width > 1 else None
        hidden, features = self._target(g, f.tokens(width * seats.count), rows, delta)
        out = self._emit(g, f, g.rows(hidden, out_row) if out_row is not None else hidden)
        self._context(g, features, rows, None, seats)
        return out

    def _logits_slots(self, g: Graph, f: StepFields, width: int, span: int, seats: SlotRange) -> dict:
        rows = self._rows(g, f, width, span, seats)
        delta = self._begin_direct(g, f, width, seats)
        hidden, features = self._target(g, f.tokens(width * seats.count), rows, delta)
        logits = self.target.logits(g, hidden)
        g.keep(logits)
        self._context(g, features, rows, None, seats)
        return {"logits": logits}

    def _verify_slots(self, g: Graph, f: StepFields, width: int, span: int, seats: SlotRange) -> dict:
        rows = self._rows(g, f, width, span, seats)
        delta = self._begin(g, f, width, seats)
        hidden, features = self._target(g, f.tokens(width * seats.count), rows, delta)
        out = self._emit(g, f, hidden)
        self._context(g, features, rows, None, seats)
        return out

    def _fused_slots(self, g: Graph, f: StepFields, width: int, span: int, seats: SlotRange) -> dict:
        assert self.drafter is not None and self.draft_kv is not None
        total = width * seats.count
        rows = self._rows(g, f, width, span, seats)
        block, draft_rows = f.input("block", "i32", total), f.input("draft_rows", "i64", total)
        masks = self._draft_masks_slots(g, f, total, span, seats)
        draft_kv = self._caches(g, self.draft_kv, seats)
        delta = self._begin(g, f, width, seats)
        hidden = self.drafter.denoise(g, BlockRows(block, rows["positions"], draft_rows, masks, span, draft_kv), self.target)
        # row 0 of a block is the pending token itself: its logits are never needed
        drafts = g.argmax(self.drafter.logits(g, g.tails(hidden, width, 1), self.target))
        tokens = f.picked_tokens(total, drafts)
        f.output("draft_sum", "f32", g.sum_rows(hidden))
        hidden, features = self._target(g, tokens, rows, delta)
        out = self._emit(g, f, hidden)
        self._context(g, features, rows, draft_kv, seats)
        return out

    def _draft_masks_slots(self, g: Graph, f: StepFields, total: int, span: int, seats: SlotRange) -> tuple:
        assert self.drafter is not None and self.draft_kv is not None
        last = f.input("draft_last", "f32", 1, total)
        by_window = {}
        for window in self.drafter.hp.window:
            if window not in by_window:
                first = f.input(f"draft_first_{window}", "f32", 1, total) if window else None
                by_window[window] = g.span_mask(self.draft_kv.near, last, first, span, seats.count)
        return tuple(by_window[window] for window in self.drafter.hp.window)

    def _commit_slots(self, g: Graph, f: StepFields, width: int, span: int, seats: SlotRange) -> None:
        """``width`` is the one that is left; ``span`` plays no part."""
        self._replay(g, f, width, seats)
