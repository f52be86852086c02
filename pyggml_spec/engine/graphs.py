"""Which graph each kind of step is.

Every graph has ``width`` rows for each slot of its range, one slot after the other; rows that a slot does not need are switched off.

role      rows                        recurrent state               drafter
prefill   a padded chunk              written directly              K/V rows of the chunk
plain     1                           written directly              features into the ring (one slot), K/V rows (several)
verify    W, ids from the host        replay, then left unfolded    K/V rows of the block
draft     -                           -                             drafts the blocks alone, to be looked at before they are verified
fused     W, given or drafted         replay, then left unfolded    drafts the blocks first, then their K/V rows
commit    -                           replay (one slot: into another width)
catchup   RING, of one slot           -                             K/V rows of the tokens whose features are in the ring
logits    an exact chunk              written directly              -        (all logits readable; parity checks)
capture   an exact chunk              written directly              -        (inputs of named target layers readable; doctor)

What one slot alone has for speed, and several cannot have: [history ; block] lies as it is read, drafts are the verifier's token ids in place,
drafter and target write the same rows, and the drafter's rows of plain tokens wait in a ring until they are due.
"""

from collections.abc import Sequence

from ..errors import EngineError
from ..ggml.device import Backend
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..ggml.step_io import StepFields, StepIO
from ..memory.delta import DeltaRows, DeltaState
from ..memory.features import RING, FeatureRing
from ..memory.kv import SPAN, KVCache, padded, spans_up_to
from ..memory.slots import SlotRange
from ..models.base import Rows, Seen, Target
from ..models.dflash import BlockRows, DFlash
from .graph_store import GraphStore
from .masked import MaskedRows
from .slot import Slot

MOST_CANDIDATES = 1024  # of a row's largest logits; beyond, whole rows are read
CANDIDATES = (0, 64, 256, MOST_CANDIDATES)  # of several slots: more than enough never hurts, and each number is a family of graphs


def most_nodes(target: Target, drafter: DFlash | None) -> int:
    """Nodes that no step of this pair exceeds: layers take 28 to 66, and three for each expert that a token uses; slots, scales, biases and
    the rotation of quantised rows take at most 40 more.
    """
    experts = getattr(target, "experts", None)
    per_layer = 160 + (4 * experts.n_used if experts is not None else 0)
    return 4096 + (target.n_layer + (drafter.hp.n_layer if drafter is not None else 0)) * per_layer


class StepGraphs(GraphStore):
    """Builds and keeps the graphs of one engine."""

    def __init__(
        self,
        backend: Backend,
        io: StepIO,
        target: Target,
        drafter: DFlash | None,
        kv: KVCache,
        draft_kv: KVCache | None,
        delta: DeltaState | None,
        ring: FeatureRing | None,
        widths: dict[str, tuple[int, ...]],
        slots: int,
    ) -> None:
        widest = max(RING, *(width for of_role in widths.values() for width in of_role))
        super().__init__(backend, io, widths, spans_up_to(kv.live), slots, widest, most_nodes(target, drafter))
        self.target, self.drafter = target, drafter
        self.kv, self.draft_kv, self.delta, self.ring = kv, draft_kv, delta, ring
        self.masked: MaskedRows | None = None
        self.drafting = self.can_draft
        self._blocks = widths["verify"]
        self._builders = {
            "prefill": self._prefill,
            "logits": self._logits,
            "capture": self._capture,
            "plain": self._plain,
            "verify": self._verify,
            "fused": self._fused,
            "draft": self._draft,
            "commit": self._commit,
            "catchup": self._catchup,
        }

    @property
    def can_draft(self) -> bool:
        return self.drafter is not None

    # -- which one a step takes

    def aim(self, slots: Sequence[Slot]) -> None:
        """Says for whom the next graphs are: which of their variants do for all of these slots."""
        if self.slots == 1:
            self.drafting, self.candidates, self.kept = slots[0].drafting, slots[0].candidates, slots[0].masked
            return
        self.kept = any(slot.masked for slot in slots)
        self.drafting = any(slot.drafting for slot in slots)
        wanted = [slot.candidates for slot in slots]
        self.candidates = None if None in wanted else next(n for n in CANDIDATES if max(w or 0 for w in wanted) <= n)

    def block_width(self, rows: int) -> int:
        """Rows per slot of the graph that computes blocks of at most ``rows``: one slot has as many graphs as widths; 0 if there is none."""
        return rows if self.slots == 1 else next((w for w in self._blocks if rows <= w), 0)

    def width_for(self, rows: int) -> int:
        """The narrowest block that is planned for and holds ``rows``; 1 for a plain token."""
        return next(w for w in (1, *self._blocks) if rows <= w)

    def chunk_width(self, rows: int) -> int:
        """Rows per slot of the graph that computes ``rows`` rows of a prompt."""
        return next(w for w in self._widths["prefill"] if rows <= w)

    def certain_span(self, role: str, rows: int) -> int:
        """Cache rows that a step reads which leaves ``rows`` tokens, all of them certain. Exact ones read what llama.cpp would: where a sum
        over rows is split depends on their number."""
        if role in ("logits", "capture"):
            return min(padded(rows), self.kv.live)
        return self.kv.span(rows, SPAN if self.slots == 1 and role == "prefill" else None)

    def plan_largest(self) -> None:
        """Plans the largest graph of every role that a generation uses: what does not fit is said now, and no buffer grows later."""
        live, width = self.kv.live, self._blocks[-1]
        self.get("prefill", self._widths["prefill"][-1], live, SlotRange(0, 1))
        self.get("plain", 1, live)
        if self.ring is not None:
            self.get("catchup", RING, 0)
        if self.drafter is not None and width > 1:
            self.get("fused", width, live)
        if self.delta is not None:
            inline = self.delta.inline
            self.get("commit", width, 0, None, 0 if inline else width, width > 1 or not inline)

    # -- parts

    def _rows(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        total = width * covered.count
        positions, kv_rows = f.input("positions", "i32", total), f.input("kv_rows", "i64", total)
        q_last = f.input("q_last", "f32", 1, total)
        mask = g.span_mask(self.kv.near, q_last, None, span, covered.count)
        sliding = self._sliding(g, f, kv_rows, q_last, span, covered.count) if self.target.window else None
        kv = self._caches(g, self.kv, covered)
        return {"positions": positions, "kv_rows": kv_rows, "mask": mask, "span": span, "sliding": sliding, "kv": kv}

    def _caches(self, g: Graph, kv: KVCache, covered: SlotRange) -> tuple:
        """The K/V tensors of these slots; rows are counted from the first one."""
        if self.slots == 1:
            return kv.layers
        views = []
        for layer in kv.layers:
            k, v = (g.slots(tensor, covered.first, covered.count) for tensor in (layer.k, layer.v))
            g.expand(k)  # now: between rope and row write it would keep ggml-cuda from fusing them
            g.expand(v)
            views.append(layer._replace(k=k, v=v))
        return tuple(views)

    def _sliding(self, g: Graph, f: StepFields, kv_rows: Tensor, q_last: Tensor, span: int, slots: int) -> Seen:
        """What sliding layers write and see: a ring of rows, or all rows where the context is no longer than one.

        Rows of a ring beyond the span hold nothing yet. All of gemma4's would be 1.3 GB per step at 31B, 7 % of what its weights are.
        """
        rows, near = kv_rows, self.kv.near
        q_first = f.input("q_first", "f32", 1, kv_rows.ne[0])
        if self.kv.ring:
            span = min(span, self.kv.ring)
            rows, near = f.input("sliding_rows", "i64", kv_rows.ne[0]), f.input("sliding_near", "f32", span, slots)
        return Seen(rows, g.span_mask(near, q_last, q_first, span, slots), span)

    def _replay(self, g: Graph, f: StepFields, covered: SlotRange, width: int, width_to: int, replay: bool) -> None:
        """Commits what these slots' blocks of ``width`` rows left."""
        assert self.delta is not None
        keep = f.input("keep", "f32", 1, width * covered.count) if replay else None
        tail = f.input("tail", "i32", *self.delta.tail_shape(covered))
        self.delta.begin(g, covered, width, width_to, keep, tail)

    def _block_states(self, g: Graph, f: StepFields, width: int, covered: SlotRange) -> DeltaRows | None:
        """The states under blocks that are left unfolded."""
        if self.delta is None:
            return None
        self._replay(g, f, covered, width, width, True)
        return DeltaRows(self.delta, width, True, take=self._take(f, width, covered))

    def _direct_states(self, g: Graph, f: StepFields, width: int, covered: SlotRange) -> DeltaRows | None:
        """The states under rows that are certain. One slot's plain token lies behind its history, as a block of one row does."""
        if self.delta is None:
            return None
        if width == 1 and self.delta.inline:
            self._replay(g, f, covered, 1, 1, False)
            return DeltaRows(self.delta, 1, False)
        return self._chunk_states(g, f, width, covered, self._take(f, 1, covered) if width == 1 else None)

    def _chunk_states(self, g: Graph, f: StepFields, width: int, covered: SlotRange, take: Tensor | None = None) -> DeltaRows | None:
        if self.delta is None:
            return None
        on = f.input("on", "f32", 1, width * covered.count)
        last = f.input("last", "i32", self.delta.history_rows, covered.count)
        self.delta.begin(g, covered, 0, 0, None, None)
        return DeltaRows(self.delta, 0, False, on, last, take)

    def _take(self, f: StepFields, width: int, covered: SlotRange) -> Tensor | None:
        """Where [history ; block] of each of several slots is gathered from."""
        assert self.delta is not None
        return None if self.delta.inline else f.input("take", "i32", (self.delta.history_rows + width) * covered.count)

    def _forward(self, g: Graph, tokens: Tensor, rows: dict, delta: DeltaRows | None) -> tuple[Tensor, list[Tensor]]:
        capture = self.drafter.hp.target_layers if self.drafter is not None and self.drafting else ()
        return self.target.forward(g, Rows(tokens=tokens, delta=delta, **rows), capture)

    def _context(self, g: Graph, features: list[Tensor], rows: dict, covered: SlotRange, draft_kv: tuple | None = None) -> None:
        if self.drafting:
            assert self.drafter is not None and self.draft_kv is not None
            self.drafter.context_rows(g, features, rows["positions"], rows["kv_rows"], draft_kv or self._caches(g, self.draft_kv, covered))

    def _emit(self, g: Graph, f: StepFields, hidden: Tensor) -> dict:
        """Greedy ids of all rows, and the sum of each hidden row: not finite if anything in it is NaN or Inf.

        On the CPU the host takes the argmax of the logits where they lie: ggml's own is one scalar loop on one thread, 0.4 ms for each row
        of a 248k vocabulary against 0.04.
        """
        f.output("ids_sum", "f32", g.sum_rows(hidden))
        logits = self.target.logits(g, hidden)
        in_host = self.backend.device.kind == "cpu" and not self.candidates and not self.kept
        if self.kept and self.masked is not None and self.masked.fits(logits):
            self.masked.keep(g, logits)
        elif in_host or self.candidates is None:
            g.keep(logits)
        if not in_host:
            f.output("ids", "i32", g.argmax(logits))
        if self.candidates:
            f.output("logits_sum", "f32", g.sum_rows(logits))
            best, values = g.largest(logits, min(self.candidates, logits.ne[0]))
            f.output("best_ids", "i32", best)
            f.output("best_logits", "f32", values)
        return {"logits": logits}

    # -- the graphs

    def _prefill(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        rows = self._rows(g, f, width, span, covered)
        delta = self._chunk_states(g, f, width, covered)
        out_row = f.input("out_row", "i32", covered.count)
        hidden, features = self._forward(g, f.tokens(width * covered.count), rows, delta)
        out = self._emit(g, f, g.rows(hidden, out_row))
        self._context(g, features, rows, covered)
        return out

    def _plain(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        rows = self._rows(g, f, 1, span, covered)
        delta = self._direct_states(g, f, 1, covered)
        hidden, features = self._forward(g, f.tokens(covered.count), rows, delta)
        out = self._emit(g, f, hidden)
        if self.drafting and self.ring is not None:
            g.kv_write_rows(self.ring.rows, g.concat(features), f.input("ring_row", "i64", 1))
        else:
            self._context(g, features, rows, covered)
        return out

    def _verify(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        rows = self._rows(g, f, width, span, covered)
        delta = self._block_states(g, f, width, covered)
        hidden, features = self._forward(g, f.tokens(width * covered.count), rows, delta)
        out = self._emit(g, f, hidden)
        self._context(g, features, rows, covered)
        return out

    def _fused(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        assert self.drafter is not None and self.draft_kv is not None
        total, alone = width * covered.count, self.slots == 1
        rows = self._rows(g, f, width, span, covered)
        block = f.input("block", "i32", total)
        draft_rows = rows["kv_rows"] if alone else f.input("draft_rows", "i64", total)
        masks = self._draft_masks(g, f, total, span, covered)
        draft_kv = self._caches(g, self.draft_kv, covered)
        delta = self._block_states(g, f, width, covered)
        hidden = self.drafter.denoise(g, BlockRows(block, rows["positions"], draft_rows, masks, span, draft_kv), self.target)
        # row 0 of a block is the pending token itself: its logits are never needed
        logits = self.drafter.logits(g, g.tail_rows(hidden, 1) if alone else g.tails(hidden, width, 1), self.target)
        drafts = g.argmax(logits)
        if alone:
            tokens = f.drafted_tokens(width, drafts)
            g.expand(drafts)
        else:
            tokens = f.picked_tokens(total, drafts)
        f.output("draft_sum", "f32", g.sum_rows(hidden))
        hidden, features = self._forward(g, tokens, rows, delta)
        out = self._emit(g, f, hidden)
        self._context(g, features, rows, covered, draft_kv)
        return {**out, "draft_logits": logits}

    def _draft(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        """Its K/V rows are written again by the verification, from what the target makes of the tokens."""
        assert self.drafter is not None and self.draft_kv is not None
        total = width * covered.count
        block, positions, rows = f.input("block", "i32", total), f.input("positions", "i32", total), f.input("draft_rows", "i64", total)
        masks = self._draft_masks(g, f, total, span, covered)
        hidden = self.drafter.denoise(
            g, BlockRows(block, positions, rows, masks, span, self._caches(g, self.draft_kv, covered)), self.target
        )
        f.output("drafts", "i32", g.argmax(self.drafter.logits(g, g.tails(hidden, width, 1), self.target)))
        f.output("draft_sum", "f32", g.sum_rows(hidden))
        return {}

    def _draft_masks(self, g: Graph, f: StepFields, total: int, span: int, covered: SlotRange) -> tuple:
        """One mask per drafter layer; layers with the same window share theirs."""
        assert self.drafter is not None and self.draft_kv is not None
        last = f.input("draft_last", "f32", 1, total)
        by_window: dict[int, Tensor] = {}
        for window in self.drafter.hp.window:
            if window not in by_window:
                first = f.input(f"draft_first_{window}", "f32", 1, total) if window else None
                by_window[window] = g.span_mask(self.draft_kv.near, last, first, span, covered.count)
        return tuple(by_window[window] for window in self.drafter.hp.window)

    def _commit(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange, width_to: int, replay: bool) -> None:
        """``width`` is the one that is left; ``span`` plays no part."""
        if self.delta is None:
            raise EngineError("a model without recurrent state has nothing to commit")
        self._replay(g, f, covered, width, width_to, replay)

    def _catchup(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> None:
        assert self.ring is not None
        rows = {"positions": f.input("positions", "i32", width), "kv_rows": f.input("kv_rows", "i64", width)}
        self._context(g, [self.ring.rows], rows, covered)

    def _logits(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        rows = self._rows(g, f, width, span, covered)
        delta = self._chunk_states(g, f, width, covered)
        hidden, _ = self._forward(g, f.tokens(width * covered.count), rows, delta)
        logits = self.target.logits(g, hidden)
        g.expand(logits)
        return {"logits": logits}

    def _capture(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange, layers: tuple[int, ...]) -> dict:
        rows = self._rows(g, f, width, span, covered)
        delta = self._chunk_states(g, f, width, covered)
        hidden, features = self.target.forward(g, Rows(tokens=f.tokens(width * covered.count), delta=delta, **rows), layers)
        for feature in features:
            g.keep(feature)
        return {**self._emit(g, f, hidden), "features": features}
