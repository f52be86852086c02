"""The nodes of each kind of graph, and which graph computes a step.

Every graph has ``verify_len`` rows for each slot of its range, one slot after the other; rows that a slot does not need are switched off.

kind      rows                       recurrent state              drafter
prefill   a padded chunk             written directly             K/V rows of the chunk
plain     1                          written directly             hidden states into the buffer (several devices and slots: K/V rows)
verify    given ids                  replay, then left to commit  K/V rows of the block; deferred: hidden states into the buffer
draft     -                          -                            drafts alone; the host reads them before they are verified
fused     drafted ids                replay, then left to commit  drafts first, then its K/V rows; of other drafters, hidden states
commit    -                          replay (one slot: into another verify_len)
catchup   8 or a batch of the buffer -                            one drafter's K/V rows of the tokens in the hidden-state buffer
logits    an exact chunk             written directly             -  (all logits readable, for parity checks)
capture   an exact chunk             written directly             -  (inputs of target layers readable, for the doctor)

One slot alone is faster: [history ; block] lies as it is read, drafts are the verifier's token ids in place, and drafter and target write the
same rows. Over several devices ``multi_device.devices`` adds the same nodes to a chain of graphs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from ..cache.hidden import BATCH, HiddenStateBuffer
from ..cache.kv import KV_BUCKET, KVCache, buckets_up_to, padded
from ..cache.recurrent import RecurrentInputs
from ..cache.slots import Slot, SlotRange
from ..drafters.base import ContextInputs, Drafter
from ..drafters.model import ModelDrafter
from ..drafters.multi import AnyDrafter
from ..errors import EngineError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..ggml.step_io import StepFields, StepIO
from ..models.base import AttentionInputs, PictureInputs, RecurrentLayers, TargetInputs
from ..models.decoder import Decoder
from .batch import FIRST, Batch, GraphKey
from .graph_cache import DRAFT_SUM, IDS_SUM, LOGITS_SUM, GraphCache
from .options import MOST_CANDIDATES, fine_width
from .prompt import AXES
from .resources import Resources

CANDIDATES = (0, 64, 256, MOST_CANDIDATES)  # of several slots: each number is a family of graphs, and a larger one always works
NODES_BESIDE_LAYERS = 4096  # planned for what stands before and after the layers; a test counts them
KINDS = "prefill", "logits", "capture", "plain", "verify", "fused", "draft", "commit", "catchup"


class Carry(NamedTuple):
    """What a chain of drafts begins with: ``before`` F32 [n, S], and the ``rows`` I64 where this step's last hidden states go."""

    before: Tensor
    rows: Tensor


class Inputs(NamedTuple):
    """What layers read on one device: ``rows`` of ``GraphBuilder.rows``, ``tokens`` I32 [T]."""

    rows: dict
    recurrent: RecurrentLayers | None
    carry: Carry | None
    tokens: Tensor


class Done(NamedTuple):
    """Of the target's rows: ``hidden`` F32 [n_embd, T], the captured ``features``, and the ``inputs`` of the last device."""

    hidden: Tensor
    features: list[Tensor]
    inputs: Inputs


def most_nodes(target: Decoder, drafter: AnyDrafter | None) -> int:
    """Nodes that no step of this pair exceeds: layers take 28 to 150, and three for each expert that a token uses; slots, scales, biases and the
    rotation of quantised rows take at most 40 more."""
    experts = getattr(target, "experts", None)
    adapters = getattr(target.weights, "adapters", None)
    per_layer = 192 + (4 * experts.n_used if experts is not None else 0) + (40 * len(adapters.all) if adapters is not None else 0)
    members = drafter.methods if drafter is not None else ()
    passes = sum(member.n_layer * ((member.block_size if member.one_by_one else 1) + member.rows_read_rows) for member in members)
    return NODES_BESIDE_LAYERS + (target.n_layer + passes) * per_layer + sum(member.extra_nodes for member in members)


class GraphBuilder:
    """Adds the nodes of one graph on one device; ``multi_device.devices`` overrides ``enter``, ``bring`` and ``forward``.

    Attributes:
        one_part: whether drafts and layers are in the same part of the step.
    """

    one_part = True

    def __init__(self, resources: Resources, key: GraphKey, g: Graph, f: StepFields) -> None:
        r = self.resources = resources
        self.key, self.g, self.f, self.count = key, g, f, key.slots.count
        self.target, self.drafter, self.alone = r.target, r.drafter, len(r.slots) == 1
        self.kv, self.draft_kv, self.recurrent, self.hidden_states, self.last_hidden = (
            r.kv,
            r.draft_kv,
            r.recurrent,
            r.hidden_states,
            r.last_hidden,
        )

    def build(self) -> dict:
        """Adds all nodes; returns the tensors that callers read themselves."""
        weights = self.target.weights
        weights.chosen = self.key.adapters
        try:
            return getattr(self, f"_{self.key.kind}")() or {}
        finally:
            weights.chosen = ()

    # -- devices

    def enter(self, segment: int) -> None:
        """Nodes from now on are computed by this segment's device."""

    def bring(self, tensor: Tensor, part: int) -> Tensor:
        """A tensor of an earlier part of the step, for nodes of this one."""
        return tensor

    def forward(self, inputs: Callable[[], Inputs], now: Inputs | None = None, capture: tuple[int, ...] | None = None) -> Done:
        """The target's layers. ``inputs`` adds what they read; ``now``: the same, where it was added already."""
        now = inputs() if now is None else now
        rows = TargetInputs(tokens=now.tokens, delta=now.recurrent, **now.rows)
        return Done(*self.target.forward(self.g, rows, self.captures if capture is None else capture), now)

    # -- inputs

    def rows(self) -> dict:
        """Positions, cache rows and masks of the step's rows."""
        g, f, total, bucket = self.g, self.f, self.key.total, self.key.kv_bucket
        axes = AXES if self.key.pictures and self.target.by_axis else 1
        positions, kv_rows = f.input("positions", "i32", axes * total), f.input("kv_rows", "i64", total)
        q_last = f.input("q_last", "f32", 1, total)
        mask = g.kv_mask(
            self.kv.mask_bases[g.segment], q_last, None, bucket, self.count, self._columns() if g.backend.narrow_masks else None
        )
        sliding = self._sliding(kv_rows, q_last) if self.target.window else None
        return {
            "positions": positions,
            "kv_rows": kv_rows,
            "mask": mask,
            "kv_bucket": bucket,
            "sliding": sliding,
            "kv": self.caches(self.kv),
            "n_ctx": padded(self.resources.options.n_ctx),
            "pictures": self._pictures() if self.key.pictures else None,
            "q_scale": g.reshape(f.input("q_scale", "f32", total), 1, 1, total) if self.target.temperature[0] else None,
        }

    def _columns(self) -> int | None:
        """Columns of the mask of a prompt's rows, which all see what is in front of the tokens that its K/V bucket may end with; None for all."""
        readers = [self.target, *(cast(ModelDrafter, member).model for member in self.resources.members if member.whole_model)]
        if self.key.kind != "prefill" or not self.alone or not all(reader.narrow for reader in readers):
            return None
        return self.kv.unsettled(self.key.kv_bucket, self.key.total)

    def _pictures(self) -> PictureInputs:
        """Rows of pictures among the step's rows."""
        g, f, table = self.g, self.f, self.resources.pictures[self.g.segment]
        return PictureInputs(
            g.rows(table.table, f.input("picture_rows", "i32", self.key.total)), f.input("is_token", "f32", 1, self.key.total)
        )

    def _sliding(self, kv_rows: Tensor, q_last: Tensor) -> AttentionInputs:
        """What sliding layers write and read: a ring of rows, or all rows where the context is no longer than one."""
        g, f, rows, near, bucket = self.g, self.f, kv_rows, self.kv.mask_bases[self.g.segment], self.key.kv_bucket
        q_first = f.input("q_first", "f32", 1, kv_rows.ne[0])
        if self.key.pictures:  # of which sliding layers may see more than others
            q_last = f.input("sliding_last", "f32", 1, kv_rows.ne[0])
        if self.kv.ring:  # rows of a ring beyond the bucket hold nothing yet
            bucket = min(bucket, self.kv.ring)
            rows, near = f.input("sliding_rows", "i64", kv_rows.ne[0]), f.input("sliding_near", "f32", bucket, self.count)
        return AttentionInputs(rows, g.kv_mask(near, q_last, q_first, bucket, self.count), bucket)

    def caches(self, kv: KVCache) -> tuple:
        """The K/V tensors of the covered slots; rows are counted from the first one."""
        g, slots, views = self.g, self.key.slots, self.cache_layers(kv)
        if self.alone:
            return tuple(views)
        for i in self.local_caches(kv):
            k, v = (g.slice(tensor, 2, slots.first, slots.count) for tensor in (views[i].k, views[i].v))
            g.expand(k)  # now: between rope and row write it would keep ggml-cuda from fusing them
            g.expand(v)
            views[i] = views[i]._replace(k=k, v=v)
            if (indexer := views[i].indexer) is not None:
                views[i] = views[i]._replace(indexer=g.slice(indexer, 2, slots.first, slots.count))
        return tuple(views)

    def cache_layers(self, kv: KVCache) -> list:
        return list(kv.layers)

    def local_caches(self, kv: KVCache) -> list[int]:
        """Which of the caches are on the device whose part is being built."""
        return list(range(len(kv.layers)))

    def _replay(self, next_len: int, replay: bool) -> None:
        """Commits what blocks of ``verify_len`` rows left."""
        assert self.recurrent is not None
        pool = self.recurrent.pool(self.g.segment)
        if pool is None:
            return
        keep = self.f.input("keep", "f32", 1, self.key.total) if replay else None
        tail = self.f.input(pool.tail, "i32", *self.recurrent.tail_shape(self.key.slots, pool))
        self.recurrent.begin(self.g, self.key.slots, self.key.verify_len, next_len, keep, tail)

    def _block_states(self) -> RecurrentInputs | None:
        """The states under blocks that are left to commit."""
        if self.recurrent is None:
            return None
        self._replay(self.key.verify_len, True)
        return RecurrentInputs(self.recurrent, self.key.verify_len, True, take=self._take(self.key.verify_len))

    def _plain_states(self) -> RecurrentLayers | None:
        """The states under plain tokens. One slot's token lies after its history, as a block of one row does."""
        if self.recurrent is None:
            return None
        if self.recurrent.inline:
            self._replay(1, False)
            return RecurrentInputs(self.recurrent, 1, False)
        return self.chunk_states(self._take(1))

    def chunk_states(self, take: Tensor | None = None) -> RecurrentLayers | None:
        """The states under rows that are written directly."""
        if self.recurrent is None:
            return None
        on = self.f.input("on", "f32", 1, self.key.total)
        last = self.f.input("last", "i32", self.recurrent.history_rows, self.count)
        self.recurrent.begin(self.g, self.key.slots, 0, 0, None, None)
        return RecurrentInputs(self.recurrent, 0, False, on, last, take)

    def _take(self, rows: int) -> Tensor | None:
        """Where [history ; block] of each of several slots is gathered from."""
        assert self.recurrent is not None
        return None if self.recurrent.inline else self.f.input("take", "i32", (self.recurrent.history_rows + rows) * self.count)

    def _carry(self, rows: int, ready: tuple[Drafter, ...] | None = None) -> Carry | None:
        """Each slot's last hidden state, and where those of ``rows`` rows go; None where no drafter that is ``ready`` reads them."""
        if not self.key.drafting or self.last_hidden is None or not any(member.chained for member in self._members(ready)):
            return None
        return Carry(self._before(self.last_hidden.table), self.f.input("last_hidden", "i64", rows))

    def _before(self, table: Tensor) -> Tensor:
        return self.g.rows(table, self.f.input("before", "i32", self.count))

    # -- drafters

    @property
    def captures(self) -> tuple[int, ...]:
        return self.drafter.captures if self.drafter is not None and self.key.drafting else ()

    def _members(self, ready: tuple[Drafter, ...] | None) -> tuple[Drafter, ...]:
        return ready if ready is not None else self.drafter.methods if self.drafter is not None else ()

    def _draft_caches(self) -> tuple:
        return self.caches(self.draft_kv) if self.key.drafting and self.draft_kv is not None else ()

    def _own_layers(self, drafter: Drafter, draft_kv: tuple) -> tuple:
        """One drafter's of the caches of all drafters."""
        assert self.drafter is not None
        before = self.drafter.methods[: self.drafter.methods.index(drafter)]
        first = sum(len(member.kv_shapes()) for member in before)
        return draft_kv[first : first + len(drafter.kv_shapes())]

    def _read_by(self, member: Drafter, draft_kv: tuple) -> tuple:
        """The caches that a drafter reads: its own, unless it borrows the target's."""
        return self.caches(self.kv) if member.shares_kv else self._own_layers(member, draft_kv)

    def _defer(self, done: Done) -> None:
        """Stores what drafters will read of the rows that are ``done``."""
        assert self.hidden_states is not None
        if not self.hidden_states.tables:
            return
        read = [*done.features, done.hidden] if self.resources.chain is not None else done.features
        at = self.f.input("hidden_rows", "i64", done.hidden.ne[1])
        for table, x in zip(self.hidden_states.tables, read, strict=True):
            self.g.kv_write_rows(table, self.g.reshape(x, x.ne[0], 1, x.ne[1]), at)

    def _context(
        self, done: Done, draft_kv: tuple, certain: bool = False, last: Tensor | None = None, ready: tuple[Drafter, ...] | None = None
    ) -> None:
        """Drafter K/V rows of the target's rows.

        Args:
            certain: the rows are not those of a block.
            last: I32 [slots] each slot's last row, where there are several certain ones.
            ready: the drafters, None for all.
        """
        if not self.key.drafting:
            return
        assert self.drafter is not None
        g, (hidden, features, (rows, _, carry, tokens)) = self.g, done
        shifted, positions, chain = None, rows["positions"], self.resources.chain
        by_layer, ring = dict(zip(self.drafter.captures, features)), self._ring_rows(self._members(ready))
        if carry is not None and chain is not None:
            left = chain.carry(g, hidden, [by_layer[layer] for layer in chain.captures], self.target)
            joined = g.prepend_row(carry.before, left)
            shifted = g.slice(joined, 1, 0, joined.ne[1] - 1)
            kept = joined if not certain else left if last is None else g.rows(left, last)
            if chain.position_lag:
                positions = self.f.input("draft_context", "i32", self.key.total)
        for member in self._members(ready):
            if member.whole_model and self.key.kind not in ("prefill", "catchup"):
                continue  # drafts have their rows, and others wait in the hidden-state buffer
            at = positions if member.position_lag else rows["positions"]
            read = [by_layer[layer] for layer in member.captures]
            seen: tuple = ()
            if member.whole_model:
                seen = (
                    AttentionInputs(rows["kv_rows"], rows["mask"], rows["kv_bucket"]),
                    self._near(member, rows, ring),
                    self._draft_states(),
                )
            elif member.rows_read_rows:
                seen = (self._lagging(rows["kv_rows"]),)
            context = ContextInputs(tokens, read, shifted if member.chained else None, at, rows["kv_rows"], *seen)._replace(
                pictures=rows.get("pictures"), sliding_rows=ring
            )
            member.context_rows(g, context, self._own_layers(member, draft_kv), self.target)
        if carry is not None and self.last_hidden is not None:
            g.kv_write_rows(self.last_hidden.table, g.reshape(kept, kept.ne[0], 1, kept.ne[1] * kept.ne[2]), carry.rows)

    def _ring_rows(self, members: tuple[Drafter, ...]) -> Tensor | None:
        """The rows of these drafters' rings that the step's rows are written to."""
        ringed = self.draft_kv is not None and self.draft_kv.ring and any(shape.sliding for one in members for shape in one.kv_shapes())
        return self.f.input("context_ring", "i64", self.key.total) if ringed else None

    def _lagging(self, kv_rows: Tensor) -> AttentionInputs:
        """What the rows of a chain's committed tokens read of each other: all but the first token's."""
        assert self.draft_kv is not None
        last, first = (self.f.input(name, "f32", 1, self.key.total) for name in ("context_last", "context_first"))
        return AttentionInputs(
            kv_rows, self.g.kv_mask(self.draft_kv.mask_base, last, first, self.key.kv_bucket, self.count), self.key.kv_bucket
        )

    def _draft_states(self) -> RecurrentLayers | None:
        """Those of a whole model, under rows of committed tokens; before prompts, they are committed already."""
        states = self.resources.draft_state
        if states is None:
            return None
        if self.key.kind == "catchup":
            states.begin_replay(self.g, self.f, self.key.slots)
        else:
            states.begin(self.g, self.key.slots, 0, 0, None, None)
        return states.chunk(self.g, self.f, self.key.slots, self.key.total)

    def _near(self, member: Drafter, rows: dict, ring: Tensor | None) -> AttentionInputs | None:
        """What the sliding layers of a whole model read. ``ring``: the rows that they are written to, if not all are kept."""
        if not member.window:
            return None
        assert self.draft_kv is not None
        last, bucket = self.f.input("near_last", "f32", 1, self.key.total), rows["kv_bucket"]
        first = self.f.input("near_first", "f32", 1, self.key.total)
        kv_rows, near = rows["kv_rows"], self.draft_kv.mask_base
        if ring is not None:
            bucket = min(bucket, self.draft_kv.ring)
            kv_rows, near = ring, self.f.input("context_near", "f32", bucket, self.count)
        return AttentionInputs(kv_rows, self.g.kv_mask(near, last, first, bucket, self.count), bucket)

    def _emit(self, hidden: Tensor) -> dict:
        """Greedy ids of all rows, and sums that are not finite if anything in a row is not. On the CPU the host takes the argmax: ggml's own is one
        scalar loop, 0.4 ms per row of a 248k vocabulary against 0.04."""
        g, f, key, masked = self.g, self.f, self.key, self.resources.masked
        f.output(IDS_SUM, "f32", g.sum_rows(hidden))
        logits = self.target.logits(g, hidden)
        in_host = self.resources.backend.device.kind == "cpu" and not key.candidates and not key.masked
        if key.masked and masked is not None and masked.fits(logits):
            masked.keep(g, logits)
        elif in_host or key.candidates is None:
            g.keep_output(logits)
        if not in_host:
            f.output("ids", "i32", g.argmax(logits))
        if key.candidates:
            f.output(LOGITS_SUM, "f32", g.sum_rows(logits))
            best, values = g.top_k_unordered(logits, min(key.candidates, logits.ne[0]))
            f.output("best_ids", "i32", best)
            f.output("best_logits", "f32", values)
        return {"logits": logits}

    def _inputs(self, states: Callable[[], RecurrentLayers | None], carry: int = 0) -> Callable[[], Inputs]:
        """``carry``: rows whose last hidden states are kept, 0 for none."""
        return lambda: Inputs(self.rows(), states(), self._carry(carry) if carry else None, self.f.tokens(self.key.total))

    # -- kinds

    def _prefill(self) -> dict:
        self.target.weights.streaming = self.key.streamed
        try:
            out_row: list[Tensor] = []

            def inputs() -> Inputs:
                rows, recurrent = self.rows(), self.chunk_states()
                out_row[:] = [self.f.input("out_row", "i32", self.count)]
                return Inputs(rows, recurrent, self._carry(self.count), self.f.tokens(self.key.total))

            self.enter(0)
            done = self.forward(inputs)
            out = self._emit(self.g.rows(done.hidden, out_row[0]))
            self._context(done, self._draft_caches(), True, out_row[0])
            return out
        finally:
            self.target.weights.streaming = False

    def _plain(self) -> dict:
        self.enter(0)
        done = self.forward(self._inputs(self._plain_states, self.count if self.hidden_states is None else 0))
        out = self._emit(done.hidden)
        if self.key.drafting and self.hidden_states is not None:
            self._defer(done)
        else:
            self._context(done, self._draft_caches(), True)
        return out

    def _verify(self) -> dict:
        self.enter(0)
        done = self.forward(self._inputs(self._block_states, 0 if self.key.deferred else self.key.total + self.count))
        out = self._emit(done.hidden)
        self._defer(done) if self.key.deferred else self._context(done, self._draft_caches())
        return out

    def _fused(self) -> dict:
        f, key, member = self.f, self.key, self.resources.member(self.key.method)
        ready = (member,) if self.hidden_states is not None else None
        self.enter(-1)
        rows, draft_kv = self.rows(), self._draft_caches()
        carry = self._carry(key.total + self.count, ready)
        recurrent = self._block_states() if self.one_part else None
        own, before = self._read_by(member, draft_kv), carry.before if carry is not None else None
        drafted = self.resources.drafting[key.method].nodes(self.g, f, key, rows, own, before)
        if self.alone and key.n_drafts < 0:
            tokens = f.drafted_tokens(key.verify_len, drafted.ids)
            self.g.expand(drafted.ids[-1])
        else:
            tokens = f.picked_tokens(key.total, drafted.ids)
        f.output(DRAFT_SUM, "f32", self.g.sum_rows(drafted.hidden))

        def inputs() -> Inputs:
            rows, recurrent = self.rows(), self._block_states()
            return Inputs(rows, recurrent, self._carry(key.total + self.count, ready), self.bring(tokens, 0))

        self.enter(0)
        done = self.forward(inputs, Inputs(rows, recurrent, carry, tokens) if self.one_part else None)
        out = self._emit(done.hidden)
        self._context(done, draft_kv if self.one_part else self._draft_caches(), ready=ready)
        if self.hidden_states is not None and any(method != key.method for method in self.hidden_states.others):
            self._defer(done)
        return {**out, "draft_logits": drafted.logits}

    def _draft(self) -> None:
        """Drafter K/V rows are written again by the verification, from the target's hidden states."""
        self.enter(-1)
        f, member = self.f, self.resources.member(self.key.method)
        rows = {"positions": f.input("positions", "i32", self.key.total)}
        before = self._before(self.last_hidden.table) if member.chained and self.last_hidden is not None else None
        own = self._read_by(member, self._draft_caches())
        drafted = self.resources.drafting[self.key.method].nodes(self.g, f, self.key, rows, own, before)
        f.output("drafts", "i32", *drafted.ids)
        f.output(DRAFT_SUM, "f32", self.g.sum_rows(drafted.hidden))
        if drafted.confidence is not None:
            f.output("confidence", "f32", drafted.confidence)

    def _commit(self) -> None:
        if self.recurrent is None:
            raise EngineError("a model without recurrent state has nothing to commit")
        for segment in self.recurrent.segments:
            self.enter(segment)
            self._replay(self.key.next_len, self.key.replay)

    def _catchup(self) -> None:
        """As if a prompt brought the rows."""
        assert self.hidden_states is not None and self.draft_kv is not None
        f, member, total = self.f, self.resources.member(self.key.method), self.key.total
        self.enter(-1)
        rows: dict = {"positions": f.input("positions", "i32", total), "kv_rows": f.input("kv_rows", "i64", total)}
        if member.whole_model:
            seen, tokens = f.input("q_last", "f32", 1, total), f.input("hidden_tokens", "i32", total)
            mask = self.g.kv_mask(self.draft_kv.mask_base, seen, None, self.key.kv_bucket, self.count)
            rows |= {"mask": mask, "kv_bucket": self.key.kv_bucket}
            return self._context(Done(tokens, [], Inputs(rows, None, None, tokens)), self.caches(self.draft_kv), ready=(member,))
        at = f.input("hidden_at", "i32", total)
        features = [self.g.rows(table, at) for table in self.hidden_states.tables]
        hidden = features.pop() if self.resources.chain is not None else features[0]
        carry = self._carry(self.count, (member,))
        tokens = f.input("hidden_tokens", "i32", total) if carry is not None else at
        last = f.input("last", "i32", self.count) if carry is not None else None
        self._context(Done(hidden, features, Inputs(rows, None, carry, tokens)), self.caches(self.draft_kv), True, last, (member,))
        return None

    def _exact(self, capture: tuple[int, ...]) -> Done:
        self.enter(0)
        return self.forward(self._inputs(self.chunk_states), None, capture)

    def _logits(self) -> dict:
        logits = self.target.logits(self.g, self._exact(()).hidden)
        self.g.expand(logits)
        return {"logits": logits}

    def _capture(self) -> dict:
        done = self._exact(self.key.layers)
        for feature in done.features:
            self.g.keep_output(feature)
        return {**self._emit(done.hidden), "features": done.features}


class StepGraphs(GraphCache):
    """The graphs of one runner: which one computes a step, and which are planned at load."""

    def __init__(self, resources: Resources, io: StepIO | None = None, most: int = 0) -> None:
        """``io``: a step buffer of its own; ``most``: slots that any of these graphs covers, 0 for all."""
        r, options = resources, resources.options
        self.resources, self.builder = r, r.devices.builder or GraphBuilder
        self._blocks = r.blocks
        widths = {"prefill": r.chunks, "logits": (options.chunk,), "plain": (1,), "verify": r.blocks}
        for member in r.members:
            own = tuple(w for w in r.blocks if w <= member.block_size) or r.blocks[:1]
            widths |= {self._role_of(kind, member.method): own for kind in ("fused", "draft")}
        widest = max(BATCH, *(width for of_role in widths.values() for width in of_role))
        slots, nodes = len(r.slots), most_nodes(r.target, r.drafter)
        super().__init__(r.devices, io or r.io, widths, buckets_up_to(r.kv.live, r.kv.fine), slots, most or slots, widest, nodes)
        # ggml's kernels round by the rows of a step, so prompts and plain steps have llama.cpp's shapes
        self._as_llama = self._on_cpus and all(s.backend.level is None for s in r.devices.segments)

    def _role_of(self, kind: str, method: str) -> str:
        """The first drafter's graphs have the name of their kind."""
        drafter = self.resources.drafter
        return kind if not method or (drafter is not None and method == drafter.method) else f"{kind} {method}"

    def role(self, key: GraphKey) -> str:
        return self._role_of(f"{key.kind} of pictures" if key.pictures else key.kind, key.method)

    def variants(self, key: GraphKey) -> list[GraphKey]:
        shape = key.kind, key.verify_len, key.kv_bucket, key.slots
        more: dict[str, Any] = {"candidates": key.candidates, "masked": key.masked}
        both = key.kind == "prefill" and self.streams(key.verify_len)
        return [self.key(*shape, method=key.method, streamed=streamed, **more) for streamed in ((False, True) if both else (False,))]

    def _nodes_of(self, key: GraphKey, graph: Graph, fields: StepFields) -> dict:
        if key.kind not in KINDS or (key.kind in ("fused", "draft", "catchup") and key.method not in self.resources.drafting):
            raise EngineError(f"there is no step called {self.role(key)!r}: use one of {', '.join(KINDS)}")
        return self.builder(self.resources, key, graph, fields).build()

    # -- which one a step takes

    def key(self, kind: str, verify_len: int, kv_bucket: int = 0, slots: SlotRange | None = None, **more: Any) -> GraphKey:
        """A key as of sequences that draft, if any can; ``slots`` None: all."""
        values = {"drafting": self.resources.drafter is not None, **more}
        if kind in ("fused", "draft", "catchup") and not values.get("method"):
            values["method"] = self.resources.drafter.method if self.resources.drafter is not None else ""
        return GraphKey.of(kind, verify_len, kv_bucket, slots or self.every, **values)

    def sampling_of(self, batch: Batch, slots: list[Slot]) -> None:
        """What graphs of a batch of these slots write for drafters, and read for sampling."""
        batch.adapters = slots[0].adapters  # of all, see the scheduler
        if self.slots == 1:
            batch.drafting, batch.candidates, batch.keep_logits = slots[0].drafting, slots[0].candidates, slots[0].masked
            return
        batch.keep_logits = any(slot.masked for slot in slots)
        batch.drafting = any(slot.drafting for slot in slots)
        wanted = [slot.candidates for slot in slots]
        batch.candidates = None if None in wanted else next(n for n in CANDIDATES if max(w or 0 for w in wanted) <= n)

    def block_width(self, rows: int) -> int:
        """Rows per slot of the graph that computes blocks of at most ``rows``: one slot has as many graphs as widths; 0 if there is none."""
        return rows if self.slots == 1 else next((w for w in self._blocks if rows <= w), 0)

    def width_for(self, rows: int) -> int:
        """The narrowest block that is planned for and holds ``rows``; 1 for a plain token."""
        return next(w for w in (1, *self._blocks) if rows <= w)

    def drafts_of(self, method: str, verify_len: int, most: int) -> int:
        """``GraphKey.n_drafts`` of a graph in which ``method`` drafts ``most`` tokens or more per slot."""
        drafts = self.resources.drafting[method].count(verify_len, most)
        return drafts if drafts < verify_len - 1 else -1

    def deferred(self, drafting: bool) -> bool:
        """Whether graphs that verify given ids leave all drafter rows to the hidden-state buffer."""
        return self.resources.hidden_states is not None and drafting

    def chunk_width(self, rows: int) -> int:
        """Rows per slot of the graph that computes ``rows`` rows of a prompt."""
        if self._as_llama:
            return rows
        planned = next(w for w in self._widths["prefill"] if rows <= w)
        return min(planned, fine_width(rows)) if self._on_cpus else planned  # elsewhere a graph costs more than padding

    def streams(self, rows: int) -> bool:
        """Whether chunks of so many rows compute with streamed copies of weights in host memory."""
        streams = self.resources.target.weights.streams
        return bool(streams) and self.io is self.resources.io and rows >= min(stream.rows for stream in streams)

    def kv_bucket(self, kind: str, rows: int) -> int:
        """Cache rows that a graph reads which leaves ``rows`` tokens. Exact graphs read what llama.cpp does: where a sum over rows is split depends
        on their number."""
        kv = self.resources.kv
        if kind in ("logits", "capture") or (self._as_llama and kind in ("prefill", "plain")):
            return min(padded(rows), kv.live)
        return kv.bucket(rows, KV_BUCKET if self.slots == 1 and kind == "prefill" else None)

    # -- planned at load

    def plan_largest(self) -> None:
        """Plans the largest graph of every role that a generation uses: what does not fit fails now, and no buffer grows later."""
        r, live, width = self.resources, self.resources.kv.live, self._blocks[-1]
        if r.pictures:  # they need more, and others use that buffer
            self.get(self.key("prefill", self._widths["prefill"][-1], live, FIRST, pictures=True))
        self.get(self.key("prefill", self._widths["prefill"][-1], live, FIRST))
        self.plan_catch_ups()
        self.plan_decoding()
        if r.recurrent is not None:
            inline = r.recurrent.inline
            self.get(commit_key(width, self.every, 0 if inline else width, width > 1 or not inline))

    def plan_decoding(self) -> None:
        """Those of them that decode tokens."""
        r, live = self.resources, self.resources.kv.live
        self.get(self.key("plain", 1, live))
        if self._blocks[-1] == 1:
            return
        own_io = self.io is r.io
        sure = [("fused", method) for method in r.drafting]
        proposed = [("draft", method) for method in r.drafting if own_io]
        if r.options.given or proposed:
            proposed.append(("verify", ""))
        if any(r.member(method).confident for method in r.drafting):
            sure, proposed = [*sure, *proposed], []
        for kind, method in sure:
            self.get(self._largest(kind, method, live))
        for kind, method in proposed:  # by constraints, or where n-grams match: captured then
            self.build(self._largest(kind, method, live))

    def _largest(self, kind: str, method: str, live: int) -> GraphKey:
        return self.key(kind, self._widths[self._role_of(kind, method)][-1], live, method=method)

    def plan_catch_ups(self, drafting: bool = True) -> None:
        """Those of all drafters, the largest first."""
        buffer = self.resources.hidden_states
        for method in self.resources.drafting if buffer is not None and drafting else ():
            member = self.resources.member(method)
            bucket = self.resources.kv.live if member.whole_model or member.rows_read_rows else 0
            for width in reversed(cast(HiddenStateBuffer, buffer).catch_ups):
                self.get(catch_up_key(method, width, self.every, bucket))


def commit_key(verify_len: int, slots: SlotRange, next_len: int, replay: bool) -> GraphKey:
    """Of the graph that commits blocks of ``verify_len`` rows; the next blocks have ``next_len``."""
    return GraphKey.of("commit", verify_len, 0, slots, next_len=next_len, replay=replay, drafting=True)


def catch_up_key(method: str, rows: int, slots: SlotRange, kv_bucket: int = 0) -> GraphKey:
    """Of the graph that computes K/V rows that a drafter lacks. ``kv_bucket``: where they read other rows."""
    return GraphKey.of("catchup", rows, kv_bucket, slots, method, drafting=True)
