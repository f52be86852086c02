"""The drafter's part of a step: the nodes that end in ids on the device, and their inputs.

Block   DFlash: [last token, mask, mask, ...] of every slot at once; what one row sees depends on the layer's window.
Chain   MTP, EAGLE-3: a pass for each draft, over one row of every slot; each reads the draft before it and the hidden state that it left.
        gemma4-assistant: the same over the target's K/V rows, of which all drafts see those of committed tokens.
        P-EAGLE: one pass over all drafts' rows, of which those after the first have a mask token and a mask's hidden state.
Model   draft-simple: a pass of a whole small model for each draft.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol, cast

import numpy as np

from ..cache.draft_state import DraftState
from ..cache.hidden import HiddenStateBuffer
from ..cache.kv import KVCache
from ..cache.slots import Slot
from ..drafters.base import ChainInputs, Drafter
from ..drafters.dflash import BlockInputs, DFlash
from ..drafters.model import ModelDrafter
from ..ggml.graph import OPTIONS_PER_DRAW, Graph
from ..ggml.library import Tensor
from ..ggml.step_io import StepFields
from ..models.base import AttentionInputs, RecurrentLayers, TargetInputs
from ..models.decoder import Decoder
from .batch import BatchItem, Draft, GraphKey

Host = dict[str, np.ndarray]
Items = Mapping[int, BatchItem]


class Drafted(NamedTuple):
    """Attributes:
    ids: I32 nodes; ``order`` maps drafts to their values.
    hidden: F32 [n_embd, T]: finite if everything that was computed is.
    logits, confidence: as of ``Chosen`` in drafters/base.py.
    """

    ids: tuple[Tensor, ...]
    hidden: Tensor
    logits: Tensor
    confidence: Tensor | None = None


class Drafting(Protocol):
    """How one kind of drafter takes part in a step."""

    conditional: bool
    """Whether each draft is computed from those before it."""

    def nodes(self, g: Graph, f: StepFields, key: GraphKey, rows: dict, kv: tuple, before: Tensor | None) -> Drafted:
        """``rows``: positions and, where it verifies too, cache rows of the step. ``kv``: the caches it reads. ``before``: F32 [n, S] each slot's
        last hidden state."""

    def fill(self, host: Host, key: GraphKey, items: Items, slots: Sequence[Slot]) -> None:
        """Writes the inputs. Slots that draft nothing read one row and write trash."""

    def count(self, verify_len: int, most: int) -> int:
        """Drafts per slot of a graph of ``verify_len`` rows, where ``most`` are wanted."""

    def order(self, at: int, drafts: int, count: int) -> np.ndarray:
        """Where the drafts of the ``at``-th of ``count`` slots are among all ids, I64 [drafts]."""


class BlockDrafting:
    """Borrows the drafter and its caches. ``alone``: there is one slot, whose rows the drafter shares with the target."""

    def __init__(self, drafter: DFlash, target: Decoder, kv: KVCache, alone: bool) -> None:
        self.drafter, self.target, self.kv, self.alone = drafter, target, kv, alone
        self._block_rows = cache(drafter.block_rows)
        self.conditional = drafter.by_position
        self._windows = [(window, f"draft_first_{window}") for window in sorted(set(drafter.hp.window) - {0})]
        self._kinds = dict(zip(sorted(set(drafter.hp.causal)), ("draft_last", "draft_last_causal")))  # the last visible row's input

    def nodes(self, g: Graph, f: StepFields, key: GraphKey, rows: dict, kv: tuple, before: Tensor | None) -> Drafted:
        count, own = key.slots.count, self.drafter.block_rows(key.verify_len)
        total, alike = own * count, own == key.verify_len
        block = f.input("block", "i32", total)
        draft_rows = rows["kv_rows"] if self.alone and alike and "kv_rows" in rows else f.input("draft_rows", "i64", total)
        positions = rows["positions"] if alike else f.input("draft_positions", "i32", total)
        seen = self._seen(g, f, draft_rows, key)
        hidden = self.drafter.denoise(g, BlockInputs(block, positions, seen, kv, count), self.target)
        drafted = hidden
        if alike:  # row 0 of each block is the last token itself, whose logits are not needed
            drafted = g.slice(hidden, 1, 1, hidden.ne[1] - 1) if self.alone else g.group_tails(hidden, key.verify_len, 1)
        chosen = self.drafter.drafts(g, drafted, block, count, self.target, draws_input(g, f, drafted.ne[1]))
        return Drafted(chosen.ids, hidden, chosen.logits, chosen.confidence)

    def _seen(self, g: Graph, f: StepFields, kv_rows: Tensor, key: GraphKey) -> tuple[AttentionInputs, ...]:
        """What each layer writes and reads; layers that see the same share it."""
        total, count = kv_rows.ne[0], key.slots.count
        last = {causal: f.input(name, "f32", 1, total) for causal, name in self._kinds.items()}
        first = {window: f.input(name, "f32", 1, total) for window, name in self._windows}
        full = kv_rows, self.kv.mask_base, key.kv_bucket
        near = ring_inputs(f, self.kv, key, total) if self.kv.ring else full
        layers = list(zip(self.drafter.hp.window, self.drafter.hp.causal, strict=True))
        seen = {}
        for window, causal in dict.fromkeys(layers):
            rows, base, bucket = near if window else full
            seen[window, causal] = AttentionInputs(rows, g.kv_mask(base, last[causal], first.get(window), bucket, count), bucket)
        return tuple(seen[layer] for layer in layers)

    def fill(self, host: Host, key: GraphKey, items: Items, slots: Sequence[Slot]) -> None:
        block, width = host["block"], self._block_rows(key.verify_len)
        last = [(host[name], causal) for causal, name in self._kinds.items()]
        block[:] = self.drafter.hp.mask_token
        positions = host.get("draft_positions", host["positions"])
        if "draft_positions" in host:
            for at, slot in enumerate(key.slots.slots):
                n = slots[slot].cursor.committed if isinstance(items.get(slot), Draft) else 0
                positions[at * width : (at + 1) * width] = n + np.arange(width)
        for window, name in self._windows:
            host[name][:] = positions - window + 1
        for at, slot in enumerate(key.slots.slots):
            item, n, first, real = items.get(slot), slots[slot].cursor.committed, at * width, 0
            end = first + width
            if isinstance(item, Draft):
                real = self._block_rows(item.verify_len)
                block[first] = slots[slot].cursor.last_token
                if item.masks is not None:
                    block[first + 1 : first + real] = item.masks[: real - 1]
                for rows, causal in last:
                    rows[first : first + real] = n + (np.arange(real) if causal else real - 1)
                    rows[first + real : end] = n + real - 1
            else:
                for rows, _ in last:
                    rows[first:end] = positions[first:end]  # a row that it may see, window or not: attention to none is NaN
            if "draft_rows" in host:
                own = host["draft_rows"][first:end]
                self.kv.rows_for(n, width, real, own)
                own += at * (self.kv.live + self.kv.trash)
            if "draft_near" in host:
                own, near = host["draft_sliding_rows"][first:end], host["draft_near"].reshape(key.slots.count, -1)[at]
                self.kv.ring_rows_for(n, width, real, own)
                own += at * (self.kv.ring + self.kv.trash)
                self.kv.positions_of_ring(int(positions[end - 1]) + 1, near)
            if "draft_positions" in host and real:
                positions[first:end] -= slots[slot].lag_now

    def count(self, verify_len: int, most: int) -> int:
        return verify_len - 1

    def order(self, at: int, drafts: int, count: int) -> np.ndarray:
        return at + count * np.arange(drafts) if self.drafter.by_position else at * drafts + np.arange(drafts)


class ChainDrafting:
    """Borrows the drafter and its caches. The inputs of a draft are those of all slots, one draft after the other."""

    conditional = True

    def __init__(self, drafter: Drafter, target: Decoder, kv: KVCache) -> None:
        self.drafter, self.target, self.kv = drafter, target, kv

    def nodes(self, g: Graph, f: StepFields, key: GraphKey, rows: dict, kv: tuple, before: Tensor | None) -> Drafted:
        assert before is not None
        count, bucket = key.slots.count, key.kv_bucket
        total = key.drafts * count
        tokens = f.input("draft_tokens", "i32", count)
        positions, kv_rows = f.input("draft_positions", "i32", total), f.input("draft_rows", "i64", total)
        last, first = f.input("draft_last", "f32", 1, total), f.input("draft_first", "f32", 1, count) if self.drafter.position_lag else None
        near = f.input("draft_near_first", "f32", 1, total) if self.drafter.window else None
        full = kv_rows, self.kv.mask_base, bucket
        ring = ring_inputs(f, self.kv, key, total) if near is not None and self.kv.ring else full

        def row(i: int, tokens: Tensor, hidden: Tensor) -> ChainInputs:
            at, seen_last = g.slice(positions, 0, i * count, count), g.slice(last, 1, i * count, count)

            def seen(kv_rows: Tensor, base: Tensor, bucket: int, of_first: Tensor | None) -> AttentionInputs:
                mask = g.kv_mask(base, seen_last, of_first, bucket, count)
                return AttentionInputs(g.slice(kv_rows, 0, i * count, count), mask, bucket)

            sliding = seen(*ring, g.slice(near, 1, i * count, count)) if near is not None else None
            return ChainInputs(tokens, hidden, at, seen(*full, first), kv, sliding, i, key.drafts)

        return self._chain(g, f, key, tokens, before, row)

    def _chain(
        self, g: Graph, f: StepFields, key: GraphKey, tokens: Tensor, hidden: Tensor, row: Callable[[int, Tensor, Tensor], ChainInputs]
    ) -> Drafted:
        """One draft after the other. ``row``: of the i-th one, from the tokens and the hidden states before it."""
        count, ids = key.slots.count, []
        draws = draws_input(g, f, key.drafts * count)
        for i in range(key.drafts):
            for_head, hidden = self.drafter.step(g, row(i, tokens, hidden), self.target)
            logits = self.drafter.draft_logits(g, for_head, self.target, i)
            ids.append(self.drafter.choose(g, logits, draws, i * count))
            tokens = g.reshape(ids[-1], count) if ids[-1].ne[0] != count else ids[-1]
        return Drafted(tuple(ids), for_head, logits)  # what is not finite stays so from draft to draft

    def fill(self, host: Host, key: GraphKey, items: Items, slots: Sequence[Slot]) -> None:
        drafts, lag = key.drafts, self.drafter.position_lag
        positions, last, rows = (host[name].reshape(drafts, -1) for name in ("draft_positions", "draft_last", "draft_rows"))
        for at, slot in enumerate(key.slots.slots):
            item, n = items.get(slot), slots[slot].cursor.committed
            real = item.verify_len - 1 if isinstance(item, Draft) else 0
            host["draft_tokens"][at] = slots[slot].cursor.last_token if real else 0
            last[:, at] = n + np.arange(drafts) if real else lag  # a row that it may see: attention to none is NaN
            positions[:, at] = np.maximum(last[:, at] - lag - slots[slot].lag_now * bool(real), 0)
            own = np.empty(drafts, np.int64)
            self.kv.rows_for(n, drafts, real, own)
            rows[:, at] = own + at * (self.kv.live + self.kv.trash)
        if "draft_first" in host:
            host["draft_first"][:] = lag
        if "draft_near_first" in host:
            host["draft_near_first"].reshape(-1)[:] = last.reshape(-1) - self.drafter.window + 1
        if "draft_near" in host:
            host["draft_sliding_rows"][:] = self.kv.in_rings(host["draft_rows"])
            for at, near in enumerate(host["draft_near"].reshape(key.slots.count, -1)):
                self.kv.positions_of_ring(int(last[-1, at]) + 1, near)

    def count(self, verify_len: int, most: int) -> int:
        return most

    def order(self, at: int, drafts: int, count: int) -> np.ndarray:
        return at + count * np.arange(drafts)


class ParallelDrafting(ChainDrafting):
    """Borrows the drafter and its caches. The inputs are those of all drafts, one slot after the other."""

    conditional = False

    def nodes(self, g: Graph, f: StepFields, key: GraphKey, rows: dict, kv: tuple, before: Tensor | None) -> Drafted:
        assert before is not None
        count, bucket, total = key.slots.count, key.kv_bucket, key.drafts * key.slots.count
        tokens, positions, kv_rows = (
            f.input("draft_tokens", "i32", total),
            f.input("draft_positions", "i32", total),
            f.input("draft_rows", "i64", total),
        )
        last, first = f.input("draft_last", "f32", 1, total), f.input("draft_first", "f32", 1, total)
        seen = AttentionInputs(kv_rows, g.kv_mask(self.kv.mask_base, last, first, bucket, count), bucket)
        if total > count:
            n = before.ne[0]
            masks = g.repeat(g.reshape(self.drafter.masked()[1], n, 1), n, total - count, 1)
            before = g.reshape(g.prepend_row(before, g.reshape(masks, n, total - count)), n, total)
        hidden, _ = self.drafter.step(g, ChainInputs(tokens, before, positions, seen, kv, drafts=key.drafts), self.target)
        logits = self.drafter.logits(g, hidden, self.target)
        return Drafted((self.drafter.choose(g, logits, draws_input(g, f, total)),), hidden, logits)

    def fill(self, host: Host, key: GraphKey, items: Items, slots: Sequence[Slot]) -> None:
        drafts, lag = key.drafts, self.drafter.position_lag
        tokens, last, rows = (host[name].reshape(-1, drafts) for name in ("draft_tokens", "draft_last", "draft_rows"))
        tokens[:] = self.drafter.masked()[0]
        positions = host["draft_positions"].reshape(-1, drafts)
        for at, slot in enumerate(key.slots.slots):
            item, n = items.get(slot), slots[slot].cursor.committed
            real = item.verify_len - 1 if isinstance(item, Draft) else 0
            last[at] = n + np.arange(drafts) if real else lag  # a row that it may see: attention to none is NaN
            if real:
                tokens[at, 0] = slots[slot].cursor.last_token
            self.kv.rows_for(n, drafts, real, rows[at])
            rows[at] += at * (self.kv.live + self.kv.trash)
            positions[at] = np.maximum(last[at] - lag - slots[slot].lag_now * bool(real), 0)
        host["draft_first"][:] = lag

    def order(self, at: int, drafts: int, count: int) -> np.ndarray:
        return at * drafts + np.arange(drafts)


class BorrowingDrafting(ChainDrafting):
    """Borrows the drafter and the target's caches: all drafts stand at the last token's position, and nothing is written."""

    def nodes(self, g: Graph, f: StepFields, key: GraphKey, rows: dict, kv: tuple, before: Tensor | None) -> Drafted:
        assert before is not None
        count, bucket = key.slots.count, key.kv_bucket
        tokens, positions = f.input("draft_tokens", "i32", count), f.input("draft_positions", "i32", count)
        last, first = f.input("draft_last", "f32", 1, count), f.input("draft_first", "f32", 1, count)
        ringed = min(bucket, self.kv.ring) if self.kv.ring else 0
        near = f.input("draft_near", "f32", ringed, count) if ringed else self.kv.mask_base
        seen = AttentionInputs(positions, g.kv_mask(self.kv.mask_base, last, None, bucket, count), bucket)
        sliding = AttentionInputs(positions, g.kv_mask(near, last, first, ringed or bucket, count), ringed or bucket)
        return self._chain(g, f, key, tokens, before, lambda i, tokens, hidden: ChainInputs(tokens, hidden, positions, seen, kv, sliding))

    def fill(self, host: Host, key: GraphKey, items: Items, slots: Sequence[Slot]) -> None:
        near = host["draft_near"].reshape(key.slots.count, -1) if "draft_near" in host else None
        for at, slot in enumerate(key.slots.slots):
            real, n = isinstance(items.get(slot), Draft), slots[slot].cursor.committed
            host["draft_tokens"][at] = slots[slot].cursor.last_token if real else 0
            host["draft_positions"][at] = n if real else 0
            host["draft_last"][at] = max(n - 1, 0) if real else 0
            host["draft_first"][at] = n - self.target.window + 1 if real else 0
            if near is not None:
                self.kv.positions_of_ring(n if real else 1, near[at])


class ModelDrafting(ChainDrafting):
    """Borrows the drafter, its caches and the hidden-state buffer, which has the tokens. The first pass has two rows of each slot: the last committed
    token, if its row is missing, and the last token; otherwise the last token and one that writes trash."""

    def __init__(
        self, drafter: ModelDrafter, target: Decoder, kv: KVCache, hidden_states: HiddenStateBuffer, states: DraftState | None = None
    ) -> None:
        self.drafter, self.target, self.kv, self.hidden_states, self.states = drafter, target, kv, hidden_states, states

    def nodes(self, g: Graph, f: StepFields, key: GraphKey, rows: dict, kv: tuple, before: Tensor | None) -> Drafted:
        drafter, count, bucket = cast(ModelDrafter, self.drafter), key.slots.count, key.kv_bucket
        total, ids, draws = (key.drafts + 1) * count, list[Tensor](), draws_input(g, f, key.drafts * count)
        tokens = f.input("draft_tokens", "i32", 2 * count)
        positions, kv_rows = f.input("draft_positions", "i32", total), f.input("draft_rows", "i64", total)
        last, first = f.input("draft_last", "f32", 1, total), f.input("draft_first", "f32", 1, total) if drafter.window else None
        near_rows, near, ringed = (
            ring_inputs(f, self.kv, key, total) if drafter.window and self.kv.ring else (kv_rows, self.kv.mask_base, bucket)
        )
        states: Sequence[RecurrentLayers | None] = [None] * key.drafts
        if self.states is not None:
            self.states.begin_replay(g, f, key.slots)
            states = self.states.passes(g, f, key.slots, key.drafts)
        for i in range(key.drafts):
            at, n = ((i + 1) * count, count) if i else (0, 2 * count)
            of_rows, seen = g.slice(kv_rows, 0, at, n), g.slice(last, 1, at, n)
            mask = g.kv_mask(self.kv.mask_base, seen, None, bucket, count)
            sliding = None
            if first is not None:
                near_mask = g.kv_mask(near, seen, g.slice(first, 1, at, n), ringed, count)
                sliding = AttentionInputs(g.slice(near_rows, 0, at, n), near_mask, ringed)
            own = TargetInputs(of_rows, mask, bucket, drafter.own_tokens(g, tokens), g.slice(positions, 0, at, n), sliding, kv, states[i])
            hidden = drafter.hidden(g, own)
            if not i:
                hidden = g.rows(hidden, f.input("draft_row", "i32", count))
            logits = drafter.logits(g, hidden, self.target)
            ids.append(drafter.choose(g, logits, draws, i * count))
            tokens = g.reshape(ids[-1], count) if ids[-1].ne[0] != count else ids[-1]
        return Drafted(tuple(ids), hidden, logits)

    def fill(self, host: Host, key: GraphKey, items: Items, slots: Sequence[Slot]) -> None:
        drafts, count, method = key.drafts, key.slots.count, self.drafter.method
        positions, rows, own = host["draft_positions"], host["draft_rows"], np.empty(drafts, np.int64)
        known, lacks = {slot: slots[slot].cursor.committed for slot in key.slots.slots}, {}
        for at, slot in enumerate(key.slots.slots):
            item, n = items.get(slot), slots[slot].cursor.committed
            real = item.verify_len - 1 if isinstance(item, Draft) else 0
            missing = self.hidden_states.missing(method, n, slot)
            known[slot] -= missing
            self.kv.rows_for(n, drafts, real, own)
            own += at * (self.kv.live + self.kv.trash)
            after = n + np.arange(drafts) if real else np.zeros(drafts, np.int64)
            tokens, first, last = host["draft_tokens"][2 * at : 2 * at + 2], 2 * at, host["draft_row"]
            tokens[:], last[at] = slots[slot].cursor.last_token if real else 0, first
            positions[first : first + 2], positions[2 * count + at :: count] = after[0], after[1:]
            rows[first : first + 2], rows[2 * count + at :: count] = (own[0], at * (self.kv.live + self.kv.trash) + self.kv.live), own[1:]
            if "draft_near" in host:
                self.kv.positions_of_ring(int(after[-1]) + 1, host["draft_near"].reshape(count, -1)[at])
            if real:
                lacks[slot] = missing > 0
            if real and missing:
                tokens[0] = self.hidden_states.tokens[self.hidden_states.at(n - 1, 1, slot)][0]
                positions[first], rows[first], rows[first + 1], last[at] = n - 1, rows[first] - 1, rows[first], first + 1
        host["draft_last"].reshape(-1)[:] = positions
        if "draft_first" in host:
            host["draft_first"].reshape(-1)[:] = positions - self.drafter.window + 1
        if "draft_near" in host:
            host["draft_sliding_rows"][:] = self.kv.in_rings(rows)
        if self.states is not None:
            self.states.fill_passes(host, key.slots, known, lacks, drafts)


def ring_inputs(f: StepFields, kv: KVCache, key: GraphKey, total: int) -> tuple[Tensor, Tensor, int]:
    """The rows of a ring that drafts are written to, the mask base of those that are read, and their number."""
    ringed = min(key.kv_bucket, kv.ring)
    return f.input("draft_sliding_rows", "i64", total), f.input("draft_near", "f32", ringed, key.slots.count), ringed


def fill_near(host: Host, window: int, kv: KVCache | None, slots: int) -> None:
    """What the sliding layers of a whole model read in prompts and catch-up graphs of so many slots. ``kv``: the drafter's caches."""
    if "near_last" in host and kv is not None:
        rows = host["positions"][: host["near_last"].size]  # the first axis, where there are several
        host["near_last"].reshape(-1)[:] = rows
        host["near_first"].reshape(-1)[:] = rows - window + 1
        if "context_near" in host:
            for near, own in zip(host["context_near"].reshape(slots, -1), rows.reshape(slots, -1)):
                kv.positions_of_ring(int(own[-1]) + 1, near)


def fill_lagging(host: Host) -> None:
    """Of a chain's rows of committed tokens: the first one has no hidden state before it, but needs a position, and others do not see it."""
    if "draft_context" in host:
        np.maximum(host["positions"][: host["draft_context"].size] - 1, 0, out=host["draft_context"])
    if "context_last" in host:
        rows = host["positions"][: host["context_last"].size]
        host["context_last"].reshape(-1)[:] = rows
        host["context_first"].reshape(-1)[:] = np.minimum(rows, 1)


def apply_lag(host: Host, slots: Sequence[Slot]) -> None:
    """Turns row numbers of these slots into positions."""
    for at, slot in enumerate(slots):
        if lag := slot.lag_now:
            for name in ("positions", "draft_context"):
                if name in host:
                    rows = host[name].reshape(len(slots), -1)[at]
                    np.maximum(rows - lag, 0, out=rows)


def draws_input(g: Graph, f: StepFields, drafts: int) -> Tensor | None:
    """Noise of the drafts in the order of their ids, where the device can draw."""
    return f.input("draft_draws", "i32", OPTIONS_PER_DRAW, drafts) if g.backend.draws else None


def fill_draws(host: Host, key: GraphKey, items: Items, slots: Sequence[Slot], drafting: Drafting) -> None:
    """Sampled sequences draft with the noise that their tokens are drawn with, where a draft's distribution follows the drafts before it: the later
    rows of a parallel block hold averages over all of them, whose argmax is right more often."""
    draws, count, drafts = host["draft_draws"].reshape(-1, OPTIONS_PER_DRAW), key.slots.count, key.drafts
    for at, slot in enumerate(key.slots.slots):
        options_of = slots[slot].draft_options
        if options_of is not None and isinstance(items.get(slot), Draft):
            drawn = drafts if drafting.conditional else 1
            draws[drafting.order(at, drafts, count)[:drawn]] = options_of(drawn)


def drafting_of(
    drafter: Drafter, target: Decoder, kv: KVCache, draft_kv: KVCache, alone: bool, hidden_states: HiddenStateBuffer | None = None,
    states: DraftState | None = None,
) -> Drafting:  # fmt: skip
    """How ``drafter`` takes part in a runner's steps. ``kv``: the target's caches."""
    if isinstance(drafter, ModelDrafter):
        assert hidden_states is not None
        return ModelDrafting(drafter, target, draft_kv, hidden_states, states)
    if drafter.shares_kv:
        return BorrowingDrafting(drafter, target, kv)
    if drafter.parallel:
        return ParallelDrafting(drafter, target, draft_kv)
    if drafter.chained:
        return ChainDrafting(drafter, target, draft_kv)
    assert isinstance(drafter, DFlash)
    return BlockDrafting(drafter, target, draft_kv, alone)
