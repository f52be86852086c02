"""Which graph each kind of step is.

Every graph has ``width`` rows for each slot of its range, one slot after the other; rows that a slot does not need are switched off.

role      rows                        recurrent state               drafter
prefill   a padded chunk              written directly              K/V rows of the chunk (STREAMED: with copies of the host's weights)
plain     1                           written directly              features into the ring (split, several slots: K/V rows)
verify    W, ids from the host        replay, then left uncommitted    K/V rows of the block, or features into the ring
draft     -                           -                             drafts the blocks alone, to be looked at before they are verified
fused     W, given or drafted         replay, then left uncommitted    drafts the blocks first, then their K/V rows; of others, features into the ring
commit    -                           replay (one slot: into another width)
catchup   8 or the ring's batch       -                             one drafter's K/V rows of the tokens whose features are in the ring
logits    an exact chunk              written directly              -        (all logits readable; parity checks)
capture   an exact chunk              written directly              -        (inputs of named target layers readable; doctor)

Over several devices a step is a chain of graphs (``multi_device/chain.py``): drafts on the last device, then the layers from the first device on, then what
the drafter keeps of them, on the last again. The builders below are written for one device; ``_forward`` changes devices where layers do.

What one slot alone has for speed, and several cannot have: [history ; block] lies as it is read, drafts are the verifier's token ids in place,
and drafter and target write the same rows. Rows of drafters that did not draft wait in a ring until they are due.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from ..cache.hidden import BATCH, HiddenStateBuffer, LastHiddenState
from ..cache.kv import KV_BUCKET, KVCache, buckets_up_to, padded
from ..cache.recurrent import DeltaInputs, DeltaState
from ..cache.slots import SlotRange
from ..drafters.base import ContextInputs, Drafter
from ..drafters.multi import AnyDrafter
from ..errors import EngineError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..ggml.step_io import StepFields, StepIO
from ..models.base import AttentionInputs, DeltaLayers, TargetInputs
from ..models.decoder import Decoder
from ..multi_device.chain import ChainGraph
from ..multi_device.offload_cache import Guests
from ..multi_device.split import Segment, SplitWeights
from .drafting import Asked, Drafting, drafting_of
from .graph_cache import DRAFT_SUM, IDS_SUM, LOGITS_SUM, GraphCache, Step
from .masked import MaskedRows
from .options import MOST_CANDIDATES, fine_width
from .slot import Slot

CANDIDATES = (0, 64, 256, MOST_CANDIDATES)  # of several slots: more than enough never hurts, and each number is a family of graphs


class Carry(NamedTuple):
    """What a chain of drafts begins with: ``before`` F32 [n, S], and the ``rows`` I64 of the boundary that the step's go to."""

    before: Tensor
    rows: Tensor


class BothRows(NamedTuple):
    """The states of guests' layers, which are the ``first`` so many, and those of the others."""

    guests: DeltaInputs
    first: int
    own: DeltaInputs

    def layer(self, g: Graph, index: int, *more: Any) -> Tensor:
        return (self.guests if index < self.first else self.own).layer(g, index, *more)


STREAMED = "streamed"
LATE = "late"
WITHOUT_LAYERS = 4096  # nodes planned for what stands before and behind the layers; a test counts them


class Given(NamedTuple):
    """What the layers of a step are given on the device that computes them: ``rows`` as ``_rows`` makes them, ``delta`` and ``carry`` where there
    are such, ``tokens`` I32 [T]."""

    rows: dict
    delta: DeltaLayers | None
    carry: Carry | None
    tokens: Tensor


class Done(NamedTuple):
    """What the target made of its rows: ``hidden`` F32 [n_embd, T], ``features`` that were captured; both, and what was ``given``, on the last device."""

    hidden: Tensor
    features: list[Tensor]
    given: Given


def most_nodes(target: Decoder, drafter: AnyDrafter | None) -> int:
    """Nodes that no step of this pair exceeds: layers take 28 to 66, and three for each expert that a token uses; slots, scales, biases and
    the rotation of quantised rows take at most 40 more.
    """
    experts = getattr(target, "experts", None)
    per_layer = 160 + (4 * experts.n_used if experts is not None else 0)
    members = drafter.methods if drafter is not None else ()
    passes = sum(member.n_layer * (member.block_size if member.chained else 1) for member in members)
    return WITHOUT_LAYERS + (target.n_layer + passes) * per_layer + sum(member.extra_nodes for member in members)


class StepGraphs(GraphCache):
    """Builds and keeps the graphs of one engine."""

    def __init__(
        self,
        segments: Sequence[Segment],
        io: StepIO,
        target: Decoder,
        drafter: AnyDrafter | None,
        kv: KVCache,
        draft_kv: KVCache | None,
        delta: DeltaState | None,
        ring: HiddenStateBuffer | None,
        last_hidden: LastHiddenState | None,
        widths: dict[str, tuple[int, ...]],
        slots: int,
        most: int = 0,
    ) -> None:
        """``most``: slots that any of these graphs covers, 0 for all."""
        widest = max(BATCH, *(width for of_role in widths.values() for width in of_role))
        super().__init__(segments, io, widths, buckets_up_to(kv.live), slots, widest, most_nodes(target, drafter), most)
        self.target, self.drafter = target, drafter
        self.kv, self.draft_kv, self.delta, self.ring, self.last_hidden = kv, draft_kv, delta, ring, last_hidden
        self._first = drafter.method if drafter is not None else ""
        self.draft_parts: dict[str, Drafting] = {}
        if drafter is not None and draft_kv is not None:
            self.draft_parts = {member.method: drafting_of(member, target, kv, draft_kv, slots == 1) for member in drafter.methods}
        members = drafter.methods if drafter is not None else ()
        self.chain = next((member for member in members if member.chained), None)
        self.masked: MaskedRows | None = None
        self.guests: Guests | None = None
        # whether it may be decided between two graphs how many drafts are verified, and whether ids that are looked up will be
        self.looked_at = self.given = False
        self._visiting: Guests | None = None  # while the graph of a chunk is built that the first device's layers are only guests in
        self.drafting = self.can_draft
        self._blocks = widths["verify"]
        self._fine = all(segment.backend.device.kind == "cpu" for segment in self.segments)  # whether padding costs more than a graph
        self._builders = {
            "prefill": self._prefill,
            "logits": self._logits,
            "capture": self._capture,
            "plain": self._plain,
            "verify": self._verify,
            "commit": self._commit,
        }
        for method in self.draft_parts:
            self._builders[self.role("catchup", method)] = partial(self._catchup, method)
            self._builders[self.role("fused", method)] = partial(self._fused, method)
            self._builders[self.role("draft", method)] = partial(self._draft, method)

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

    def role(self, kind: str, method: str) -> str:
        """The role of steps in which ``method`` drafts, "" being the first drafter's: each has its own, because their topologies differ."""
        return kind if method in ("", self._first) else f"{kind} {method}"

    def method_of(self, name: str) -> str:
        """Who drafts where ``name`` is asked for, "" being the first drafter's.

        Raises:
            EngineError: nobody of that name.
        """
        method = name or self._first
        if method not in self.draft_parts:
            raise EngineError(f"nobody drafts as {method!r} here: {' and '.join(self.draft_parts) or 'there is no drafter'}")
        return method

    def of_drafts(self, kind: str, method: str, width: int, most: int) -> tuple[str, tuple[int, ...], int]:
        """Role, what else its graph differs in, and drafts of each slot, of a step of ``width`` rows in which ``method`` drafts ``most`` or more."""
        drafts = self.draft_parts[method].count(width, most)
        return self.role(kind, method), (drafts,) if drafts < width - 1 else (), drafts

    def draft_order(self, method: str, at: int, drafts: int, covered: SlotRange) -> np.ndarray:
        """Where the drafts of the ``at``-th slot are among those of all, I64 [drafts]."""
        return self.draft_parts[method].order(at, drafts, covered.count)

    @property
    def late(self) -> tuple[str, ...]:
        """What else graphs of steps that verify given ids differ in where drafters' rows wait."""
        return (LATE,) if self.ring is not None and self.drafting else ()

    def chunk_width(self, rows: int) -> int:
        """Rows per slot of the graph that computes ``rows`` rows of a prompt."""
        planned = next(w for w in self._widths["prefill"] if rows <= w)
        return min(planned, fine_width(rows)) if self._fine else planned

    def copies(self, rows: int) -> tuple[str, ...]:
        """What graphs of chunks of so many rows differ in: STREAMED where they compute with copies of weights that lie in host memory."""
        streams = self.target.weights.streams
        if self.target.weights.guests is not None and self.guests is None:  # of a lane, where no prompts are read
            return ()
        return (STREAMED,) if streams and rows >= min(stream.rows for stream in streams) else ()

    def variants(self, role: str, width: int) -> list[tuple]:
        return [(), (STREAMED,)] if role == "prefill" and self.copies(width) else [()]

    def asked(self, role: str) -> tuple:
        return (True, 0, False) if role == "commit" or role.startswith("draft") else super().asked(role)

    def certain_span(self, role: str, rows: int) -> int:
        """Cache rows that a step reads which leaves ``rows`` tokens, all of them certain. Exact ones read what llama.cpp would: where a sum
        over rows is split depends on their number."""
        if role in ("logits", "capture"):
            return min(padded(rows), self.kv.live)
        return self.kv.bucket(rows, KV_BUCKET if self.slots == 1 and role == "prefill" else None)

    def plan_largest(self) -> None:
        """Plans the largest graph of every role that a generation uses: what does not fit is said now, and no buffer grows later."""
        live, width = self.kv.live, self._blocks[-1]
        self.get("prefill", self._widths["prefill"][-1], live, SlotRange(0, 1))
        self.plan_catch_ups()
        self.plan_decoding()
        if self.delta is not None:
            inline = self.delta.inline
            self.get("commit", width, 0, None, 0 if inline else width, width > 1 or not inline)

    def plan_decoding(self) -> None:
        """Those of them that tokens are decoded by."""
        live = self.kv.live
        self.get("plain", 1, live)
        if self._blocks[-1] == 1:
            return
        sure = [self.role("fused", method) for method in self.draft_parts]
        looked = [self.role("draft", method) for method in self.draft_parts if self.looked_at]
        if self.given or looked:
            looked.append("verify")
        if any(self._member(method).confident for method in self.draft_parts):
            sure, looked = [*sure, *looked], []
        for role in sure:
            self.get(role, self._widths[role][-1], live)
        for role in looked:  # by constraints, if they come, or where a match is found: captured then
            self.build(role, self._widths[role][-1], live)

    def plan_catch_ups(self) -> None:
        """Those of all drafters, the largest first."""
        for method in self.draft_parts if self.ring is not None and self.drafting else ():
            for width in reversed(cast(HiddenStateBuffer, self.ring).catch_ups):
                self.catching_up(method, width, self.every)

    def catching_up(self, method: str, width: int, covered: SlotRange) -> Step:
        """The graph that catches up, the same one whatever steps are to be read of the slots, and whoever is drafted for in this one."""
        aimed = self.drafting, self.candidates, self.kept
        self.drafting, self.candidates, self.kept = True, 0, False
        try:
            return self.get(self.role("catchup", method), width, 0, covered)
        finally:
            self.drafting, self.candidates, self.kept = aimed

    # -- parts

    def _rows(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        total = width * covered.count
        positions, kv_rows = f.input("positions", "i32", total), f.input("kv_rows", "i64", total)
        q_last = f.input("q_last", "f32", 1, total)
        mask = g.kv_mask(self.kv.mask_bases[g.segment], q_last, None, span, covered.count)
        sliding = self._sliding(g, f, kv_rows, q_last, span, covered.count) if self.target.window else None
        kv = self._caches(g, self.kv, covered)
        return {"positions": positions, "kv_rows": kv_rows, "mask": mask, "kv_bucket": span, "sliding": sliding, "kv": kv}

    def _caches(self, g: Graph, kv: KVCache, covered: SlotRange) -> tuple:
        """The K/V tensors of these slots; rows are counted from the first one. Of another device's layers they are as they are: nobody asks."""
        guests = self._visiting.kv.layers if self._visiting is not None and kv is self.kv else ()
        views = [*guests, *kv.layers[len(guests) :]]
        if self.slots == 1:
            return tuple(views)
        for i in (*range(len(guests)), *self._own_caches(g, kv)):
            k, v = (g.slots(tensor, covered.first, covered.count) for tensor in (views[i].k, views[i].v))
            g.expand(k)  # now: between rope and row write it would keep ggml-cuda from fusing them
            g.expand(v)
            views[i] = views[i]._replace(k=k, v=v)
            if (indexer := views[i].indexer) is not None:
                views[i] = views[i]._replace(indexer=g.slots(indexer, covered.first, covered.count))
        return tuple(views)

    def _own_caches(self, g: Graph, kv: KVCache) -> range:
        """Which of the caches are on the device whose part is being built."""
        if kv is not self.kv:
            return range(len(kv.layers))
        segment = self.segments[g.segment]
        return range(self.target.caches_before(segment.first)[0], self.target.caches_before(segment.end)[0])

    def _sliding(self, g: Graph, f: StepFields, kv_rows: Tensor, q_last: Tensor, span: int, slots: int) -> AttentionInputs:
        """What sliding layers write and see: a ring of rows, or all rows where the context is no longer than one.

        Rows of a ring beyond the span hold nothing yet. All of gemma4's would be 1.3 GB per step at 31B, 7 % of what its weights are.
        """
        rows, near = kv_rows, self.kv.mask_bases[g.segment]
        q_first = f.input("q_first", "f32", 1, kv_rows.ne[0])
        if self.kv.ring:
            span = min(span, self.kv.ring)
            rows, near = f.input("sliding_rows", "i64", kv_rows.ne[0]), f.input("sliding_near", "f32", span, slots)
        return AttentionInputs(rows, g.kv_mask(near, q_last, q_first, span, slots), span)

    def _replay(self, g: Graph, f: StepFields, covered: SlotRange, width: int, width_to: int, replay: bool) -> None:
        """Commits what these slots' blocks of ``width`` rows left."""
        assert self.delta is not None
        pool = self.delta.pool(g.segment)
        if pool is None:
            return
        keep = f.input("keep", "f32", 1, width * covered.count) if replay else None
        tail = f.input(pool.tail, "i32", *self.delta.tail_shape(covered, pool))
        self.delta.begin(g, covered, width, width_to, keep, tail)

    def _block_states(self, g: Graph, f: StepFields, width: int, covered: SlotRange) -> DeltaInputs | None:
        """The states under blocks that are left uncommitted."""
        if self.delta is None:
            return None
        self._replay(g, f, covered, width, width, True)
        return DeltaInputs(self.delta, width, True, take=self._take(f, width, covered))

    def _direct_states(self, g: Graph, f: StepFields, width: int, covered: SlotRange) -> DeltaLayers | None:
        """The states under rows that are certain. One slot's plain token lies behind its history, as a block of one row does."""
        if self.delta is None:
            return None
        if width == 1 and self.delta.inline:
            self._replay(g, f, covered, 1, 1, False)
            return DeltaInputs(self.delta, 1, False)
        return self._chunk_states(g, f, width, covered, self._take(f, 1, covered) if width == 1 else None)

    def _chunk_states(self, g: Graph, f: StepFields, width: int, covered: SlotRange, take: Tensor | None = None) -> DeltaLayers | None:
        if self.delta is None:
            return None
        on = f.input("on", "f32", 1, width * covered.count)
        last = f.input("last", "i32", self.delta.history_rows, covered.count)
        self.delta.begin(g, covered, 0, 0, None, None)
        own = DeltaInputs(self.delta, 0, False, on, last, take)
        guests = self._visiting.delta if self._visiting is not None else None
        if guests is None:
            return own
        guests.begin(g, covered, 0, 0, None, None)
        return BothRows(DeltaInputs(guests, 0, False, on, last, take), guests.shape.layers, own)

    def _take(self, f: StepFields, width: int, covered: SlotRange) -> Tensor | None:
        """Where [history ; block] of each of several slots is gathered from."""
        assert self.delta is not None
        return None if self.delta.inline else f.input("take", "i32", (self.delta.history_rows + width) * covered.count)

    def _entered(self, segment: int) -> None:
        self.target.weights.enter(segment)

    def _streamed(self, g: Graph, layer: int, x: Tensor) -> None:
        """Nodes of ``layer`` come now: behind it and its weights, if they are copies, and with what came before done with its own."""
        assert self._visiting is not None
        (stream,), end = self.target.weights.streams, self.segments[1].first
        if 0 < layer <= end:
            g.expand(x)
            stream.end(g, layer - 1)
        if layer < end:
            stream.begin(g, layer)
            cast(SplitWeights, self.target.weights).visit()
        elif layer == end:
            self.target.weights.enter(1)

    def _begin(self, g: Graph, segment: int = 0) -> None:
        """The first device of a step."""
        if isinstance(g, ChainGraph):
            g.enter(segment % len(self.segments))

    def _captures(self) -> tuple[int, ...]:
        return self.drafter.captures if self.drafter is not None and self.drafting else ()

    def _forward(self, g: Graph, given: Callable[[], Given], now: Given | None = None, capture: tuple[int, ...] | None = None) -> Done:
        """The layers. ``given`` makes what they are given on the device whose part is being built; ``now``: it has, on the first."""
        capture = self._captures() if capture is None else capture
        now = given() if now is None else now
        if not self.split:
            return Done(*self.target.forward(g, TargetInputs(tokens=now.tokens, delta=now.delta, **now.rows), capture), now)
        chain, here = cast(ChainGraph, g), [now]
        parts = [chain.part]  # of each segment's layers
        firsts, ends = [segment.first for segment in self.segments], [segment.end for segment in self.segments]
        if self._visiting is not None:
            firsts[1] = ends[0] = 0

        def rows() -> TargetInputs:
            return TargetInputs(tokens=here[-1].tokens, delta=here[-1].delta, cross=cross, **here[-1].rows)

        def cross(layer: int, tensors: tuple) -> tuple[TargetInputs, tuple] | None:
            crossed = None
            if len(parts) < len(self.segments) and layer == firsts[len(parts)]:
                chain.enter(len(parts))
                parts.append(chain.part)
                here.append(given())
                tensors = tuple(x if x is None else chain.bring(x, parts[-2]) for x in tensors)
                crossed = rows(), tensors
            if self._visiting is not None:
                self._streamed(g, layer, tensors[0])
            return crossed

        hidden, features = self.target.forward(g, rows(), capture)
        made = [next((i for i, end in enumerate(ends) if v < end), len(ends) - 1) for v in capture]
        return Done(hidden, [chain.bring(x, parts[i]) for x, i in zip(features, made, strict=True)], here[-1])

    def _carry(self, g: Graph, f: StepFields, rows: int, covered: SlotRange, ready: tuple[Drafter, ...] | None = None) -> Carry | None:
        """What each slot's last committed token left, and where what ``rows`` rows leave goes; None where no drafter reads it that is ``ready``."""
        if not self.drafting or self.last_hidden is None or not any(member.chained for member in self._all_unless(ready)):
            return None
        return Carry(g.rows(self.last_hidden.table, f.input("before", "i32", covered.count)), f.input("last_hidden", "i64", rows))

    def _all_unless(self, members: tuple[Drafter, ...] | None) -> tuple[Drafter, ...]:
        return members if members is not None else self.drafter.methods if self.drafter is not None else ()

    def _member(self, method: str) -> Drafter:
        assert self.drafter is not None
        return next(member for member in self.drafter.methods if member.method == method)

    def _wait(self, g: Graph, f: StepFields, done: Done) -> None:
        """Stores what drafters will read of the rows that are ``done``."""
        assert self.ring is not None
        read = [*done.features, done.hidden] if self.chain is not None else done.features
        at = f.input("ring_rows", "i64", done.hidden.ne[1])
        for table, x in zip(self.ring.tables, read, strict=True):
            g.kv_write_rows(table, g.reshape(x, x.ne[0], 1, x.ne[1]), at)

    def _context(
        self, g: Graph, f: StepFields, done: Done, draft_kv: tuple, certain: bool = False, last: Tensor | None = None,
        ready: tuple[Drafter, ...] | None = None,
    ) -> None:  # fmt: skip
        """The drafters' K/V rows of the target's rows, which are ``done``: hidden, and what was captured. ``certain``: they are not those of blocks,
        and ``last`` I32 [slots] says which of them is each slot's last one, where it has several. ``ready``: of these drafters, None for all of them."""
        if not self.drafting:
            return
        assert self.drafter is not None
        hidden, features, (rows, _, carry, tokens) = done
        shifted, positions = None, rows["positions"]
        by_layer = dict(zip(self.drafter.captures, features))
        chain = self.chain
        if carry is not None and chain is not None:
            left = chain.carry(g, hidden, [by_layer[layer] for layer in chain.captures], self.target)
            joined = g.prepend_row(carry.before, left)
            shifted = g.leading_rows(joined, joined.ne[1] - 1)
            kept = joined if not certain else left if last is None else g.rows(left, last)
            if chain.position_lag:
                positions = f.input("draft_context", "i32", positions.ne[0])
        for member in self._all_unless(ready):
            at = positions if member.position_lag else rows["positions"]
            context = ContextInputs(
                tokens, [by_layer[layer] for layer in member.captures], shifted if member.chained else None, at, rows["kv_rows"]
            )
            member.context_rows(g, context, self._own_layers(member, draft_kv), self.target)
        if carry is not None and self.last_hidden is not None:
            g.kv_write_rows(self.last_hidden.table, g.reshape(kept, kept.ne[0], 1, kept.ne[1] * kept.ne[2]), carry.rows)

    def _own_layers(self, drafter: Drafter, draft_kv: tuple) -> tuple:
        """Those of all drafters' caches that are this one's."""
        assert self.drafter is not None
        before = self.drafter.methods[: self.drafter.methods.index(drafter)]
        first = sum(len(member.kv_shapes()) for member in before)
        return draft_kv[first : first + len(drafter.kv_shapes())]

    def _layers_of(self, g: Graph, method: str, draft_kv: tuple, covered: SlotRange) -> tuple:
        """What ``method`` drafts from: layers of its own, unless it borrows the target's."""
        assert self.drafter is not None
        member = self._member(method)
        return self._caches(g, self.kv, covered) if member.shares_kv else self._own_layers(member, draft_kv)

    def _draft_caches(self, g: Graph, covered: SlotRange) -> tuple:
        return self._caches(g, self.draft_kv, covered) if self.drafting and self.draft_kv is not None else ()

    def _emit(self, g: Graph, f: StepFields, hidden: Tensor) -> dict:
        """Greedy ids of all rows, and the sum of each hidden row: not finite if anything in it is NaN or Inf.

        On the CPU the host takes the argmax of the logits where they lie: ggml's own is one scalar loop on one thread, 0.4 ms for each row
        of a 248k vocabulary against 0.04.
        """
        f.output(IDS_SUM, "f32", g.sum_rows(hidden))
        logits = self.target.logits(g, hidden)
        in_host = self.backend.device.kind == "cpu" and not self.candidates and not self.kept
        if self.kept and self.masked is not None and self.masked.fits(logits):
            self.masked.keep(g, logits)
        elif in_host or self.candidates is None:
            g.keep_output(logits)
        if not in_host:
            f.output("ids", "i32", g.argmax(logits))
        if self.candidates:
            f.output(LOGITS_SUM, "f32", g.sum_rows(logits))
            best, values = g.top_k_unordered(logits, min(self.candidates, logits.ne[0]))
            f.output("best_ids", "i32", best)
            f.output("best_logits", "f32", values)
        return {"logits": logits}

    # -- the graphs

    def _prefill(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange, *more: str) -> dict:
        self.target.weights.streaming = STREAMED in more
        self._visiting = self.guests if STREAMED in more else None
        try:
            return self._chunk(g, f, width, span, covered)
        finally:
            self.target.weights.streaming, self._visiting = False, None

    def _chunk(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        out_row: list[Tensor] = []

        def given() -> Given:
            if self._visiting is not None and g.segment == 0:  # it embeds, and computes no layer
                tokens = f.tokens(width * covered.count)
                nothing = dict.fromkeys(("positions", "kv_rows", "mask"), tokens) | {"kv_bucket": 0, "sliding": None, "kv": ()}
                return Given(nothing, None, None, tokens)
            rows, delta = self._rows(g, f, width, span, covered), self._chunk_states(g, f, width, covered)
            out_row[:] = [f.input("out_row", "i32", covered.count)]
            return Given(rows, delta, self._carry(g, f, covered.count, covered), f.tokens(width * covered.count))

        self._begin(g)
        done = self._forward(g, given)
        out = self._emit(g, f, g.rows(done.hidden, out_row[0]))
        self._context(g, f, done, self._draft_caches(g, covered), True, out_row[0])
        return out

    def _plain(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        def given() -> Given:
            rows, delta = self._rows(g, f, 1, span, covered), self._direct_states(g, f, 1, covered)
            carry = self._carry(g, f, covered.count, covered) if self.ring is None else None
            return Given(rows, delta, carry, f.tokens(covered.count))

        self._begin(g)
        done = self._forward(g, given)
        out = self._emit(g, f, done.hidden)
        if self.drafting and self.ring is not None:
            self._wait(g, f, done)
        else:
            self._context(g, f, done, self._draft_caches(g, covered), True)
        return out

    def _verify(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange, late: str = "") -> dict:
        """``late``: all drafters' rows wait."""

        def given() -> Given:
            rows, delta = self._rows(g, f, width, span, covered), self._block_states(g, f, width, covered)
            carry = None if late else self._carry(g, f, (width + 1) * covered.count, covered)
            return Given(rows, delta, carry, f.tokens(width * covered.count))

        self._begin(g)
        done = self._forward(g, given)
        out = self._emit(g, f, done.hidden)
        self._wait(g, f, done) if late else self._context(g, f, done, self._draft_caches(g, covered))
        return out

    def _fused(self, method: str, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange, drafts: int | None = None) -> dict:
        """``method`` drafts; ``drafts``: of each slot, one less than its rows unless it is said."""
        total, drafts = width * covered.count, width - 1 if drafts is None else drafts
        ready = (self._member(method),) if self.ring is not None else None
        self._begin(g, -1)
        rows, draft_kv = self._rows(g, f, width, span, covered), self._draft_caches(g, covered)
        carry = self._carry(g, f, (width + 1) * covered.count, covered, ready)
        delta = self._block_states(g, f, width, covered) if not self.split else None
        own, before = self._layers_of(g, method, draft_kv, covered), carry.before if carry is not None else None
        drafted = self.draft_parts[method].nodes(g, f, Asked(width, drafts, covered), rows, span, own, before)
        if self.slots == 1 and drafts == width - 1:
            tokens = f.drafted_tokens(width, drafted.ids)
            g.expand(drafted.ids[-1])
        else:
            tokens = f.picked_tokens(total, drafted.ids)
        f.output(DRAFT_SUM, "f32", g.sum_rows(drafted.hidden))
        now = Given(rows, delta, carry, tokens)

        def given() -> Given:
            """On another device than that of the drafter."""
            rows, delta = self._rows(g, f, width, span, covered), self._block_states(g, f, width, covered)
            return Given(rows, delta, self._carry(g, f, (width + 1) * covered.count, covered, ready), cast(ChainGraph, g).bring(tokens, 0))

        self._begin(g)
        done = self._forward(g, given, None if self.split else now)
        out = self._emit(g, f, done.hidden)
        self._context(g, f, done, self._draft_caches(g, covered) if self.split else draft_kv, ready=ready)
        if ready is not None and len(self.draft_parts) > 1:
            self._wait(g, f, done)
        return {**out, "draft_logits": drafted.logits}

    def _draft(self, method: str, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        """Its K/V rows are written again by the verification, from what the target makes of the tokens."""
        assert self.drafter is not None and self.draft_kv is not None
        self._begin(g, -1)
        rows = {"positions": f.input("positions", "i32", width * covered.count)}
        chained = self.last_hidden is not None and self._member(method).chained
        before = (
            g.rows(self.last_hidden.table, f.input("before", "i32", covered.count)) if chained and self.last_hidden is not None else None
        )
        draft_kv = self._layers_of(g, method, self._draft_caches(g, covered), covered)
        drafted = self.draft_parts[method].nodes(g, f, Asked(width, width - 1, covered), rows, span, draft_kv, before)
        f.outputs("drafts", drafted.ids)
        f.output(DRAFT_SUM, "f32", g.sum_rows(drafted.hidden))
        if drafted.confidence is not None:
            f.output("confidence", "f32", drafted.confidence)
        return {}

    def _commit(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange, width_to: int, replay: bool) -> None:
        """``width`` is the one that is left; ``span`` plays no part."""
        if self.delta is None:
            raise EngineError("a model without recurrent state has nothing to commit")
        for segment in self.delta.segments:
            self._begin(g, segment)
            self._replay(g, f, covered, width, width_to, replay)

    def _catchup(self, method: str, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> None:
        """As if a prompt brought the rows; ``span`` plays no part."""
        assert self.ring is not None and self.draft_kv is not None
        member = self._member(method)
        self._begin(g, -1)
        total = width * covered.count
        at = f.input("ring_at", "i32", total)
        features = [g.rows(table, at) for table in self.ring.tables]
        hidden = features.pop() if self.chain is not None else features[0]
        rows = {"positions": f.input("positions", "i32", total), "kv_rows": f.input("kv_rows", "i64", total)}
        carry = self._carry(g, f, covered.count, covered, (member,))
        tokens = f.input("ring_tokens", "i32", total) if carry is not None else at
        last = f.input("last", "i32", covered.count) if carry is not None else None
        done = Done(hidden, features, Given(rows, None, carry, tokens))
        self._context(g, f, done, self._caches(g, self.draft_kv, covered), True, last, (member,))

    def _exact(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange, capture: tuple[int, ...]) -> Done:
        def given() -> Given:
            rows, delta = self._rows(g, f, width, span, covered), self._chunk_states(g, f, width, covered)
            return Given(rows, delta, None, f.tokens(width * covered.count))

        self._begin(g)
        return self._forward(g, given, None, capture)

    def _logits(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange) -> dict:
        logits = self.target.logits(g, self._exact(g, f, width, span, covered, ()).hidden)
        g.expand(logits)
        return {"logits": logits}

    def _capture(self, g: Graph, f: StepFields, width: int, span: int, covered: SlotRange, layers: tuple[int, ...]) -> dict:
        done = self._exact(g, f, width, span, covered, layers)
        for feature in done.features:
            g.keep_output(feature)
        return {**self._emit(g, f, done.hidden), "features": done.features}
