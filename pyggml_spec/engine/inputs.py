"""Inputs of a step: positions, cache rows, token ids, and which rows are switched off."""

from typing import Any

import numpy as np

from ..ggml.library import ffi, lib
from .batch import Batch, Draft, Prefill, Verify
from .drafting import apply_lag, fill_draws, fill_lagging, fill_near
from .graph_cache import Step
from .resources import Resources


class InputBuilder:
    """Writes the host's fields of a step: ``batch.verify_len`` rows of each covered slot, of which ``batch.rows`` count."""

    def __init__(self, resources: Resources) -> None:
        r = resources
        self._slots, self._target, self._drafting, self._alone = r.slots, r.target, r.drafting, len(r.slots) == 1
        self._kv, self._recurrent, self._hidden_states, self._last_hidden = r.kv, r.recurrent, r.hidden_states, r.last_hidden
        self._draft_state = r.draft_state
        self._window = max([member.window for member in r.members if member.whole_model], default=0)
        self._draft_kv = r.draft_kv
        self._by_axis, self._tables, self._synchronize = r.target.by_axis, r.pictures, r.synchronize
        self._committed, self._real = (ffi.new("int64_t[]", len(r.slots)) for _ in range(2))

    def certain(self, step: Step, batch: Batch) -> None:
        """Of prompts and plain tokens."""
        self._rows(step, batch)
        host, width, first_slot = step.host, batch.verify_len, batch.slots.first
        tokens = host["tokens"]
        if len(batch.rows) < batch.slots.count:
            tokens[:] = 0
        for slot, item in batch.computed.items():
            first = (slot - first_slot) * width
            if isinstance(item, Prefill):
                n = batch.rows[slot]
                tokens[first : first + n] = item.tokens if item.pictures is None else np.maximum(item.tokens, 0)
                tokens[first + n : first + width] = tokens[
                    first + n - 1
                ]  # padding rows are real tokens: NaN in one would leak through 0 * NaN
            else:
                tokens[first : first + width] = self._slots[slot].cursor.last_token
        if self._last_hidden is not None:
            self._last_hidden_rows(host, batch)
        if "tail" in host and self._recurrent is not None:  # rows of the blocks before that are committed to the states first
            self._recurrent.fill_commit(step.fields.at, batch.slots)
        if "take" in host:
            assert self._recurrent is not None
            self._recurrent.fill_take(host["take"], width, batch.slots, single=True)
        if "hidden_rows" in host:
            self._deferred(host, batch)
        fill_near(host, self._window, self._draft_kv, batch.slots.count)
        if "draft_on" in host and self._draft_state is not None:
            self._draft_state.fill_rows(host, batch.slots, batch.rows)
        if batch.pictures:
            self._pictures(host, batch)
        else:
            self._lag(host, batch)

    def block(self, step: Step, batch: Batch) -> None:
        """Of blocks, given or drafted by the same graph."""
        self._rows(step, batch)
        host, width = step.host, batch.verify_len
        known = host.get("given", host["tokens"])
        drafting = "draft_last" in host
        if not drafting or "given" in host:  # or else the drafter writes all but the first
            known[: width * batch.slots.count] = 0
        for slot, item in batch.computed.items():
            first = (slot - batch.slots.first) * width
            if isinstance(item, Prefill):
                known[first : first + len(item.tokens)] = item.tokens
                continue
            known[first] = self._slots[slot].cursor.last_token
            if isinstance(item, Verify) and len(item.drafts):
                known[first + 1 : first + 1 + len(item.drafts)] = item.drafts
        if self._last_hidden is not None:
            self._last_hidden_rows(host, batch)
        if drafting:
            self._drafts(host, batch)
        if self._recurrent is not None:
            self._recurrent.fill_commit(step.fields.at, batch.slots)
            if "take" in host:
                self._recurrent.fill_take(host["take"], width, batch.slots)
        if "hidden_rows" in host:
            self._deferred(host, batch)
        self._lag(host, batch)

    def draft(self, step: Step, batch: Batch) -> None:
        """Of drafts alone."""
        host, width = step.host, batch.verify_len
        host["positions"][:] = 0
        for slot, item in batch.computed.items():
            if isinstance(item, Draft):
                at = (slot - batch.slots.first) * width
                host["positions"][at : at + width] = self._slots[slot].cursor.committed + np.arange(width)
        if self._last_hidden is not None and "before" in host:
            host["before"][:] = [self._last_hidden.row(slot) for slot in batch.slots.slots]
        self._fill_drafter(host, batch)
        self._lag(host, batch)

    def _lag(self, host: dict[str, np.ndarray], batch: Batch) -> None:
        """Positions of rows after pictures. Last: what is visible goes by rows."""
        if self._by_axis and any(self._slots[slot].lag is not None for slot in batch.slots.slots):
            apply_lag(host, self._slots[batch.slots.part])

    def _pictures(self, host: dict[str, np.ndarray], batch: Batch) -> None:
        """Rows of pictures of the only item."""
        ((slot, item),) = batch.computed.items()
        assert isinstance(item, Prefill) and item.pictures is not None
        n, (at, embeddings, positions, last) = batch.rows[slot], item.pictures
        self._synchronize()
        for table in self._tables:
            table.put(embeddings)
        rows, is_token = host["picture_rows"], host["is_token"]
        rows[:], is_token[:] = self._tables[0].rows, 1
        rows[at], is_token[at] = np.arange(len(at)), 0
        if positions is not None and self._by_axis:
            by_axis = host["positions"].reshape(len(positions), -1)
            by_axis[:, :n], by_axis[:, n:] = positions, positions[:, -1:]
            if "draft_context" in host:
                np.maximum(by_axis[0] - 1, 0, out=host["draft_context"])
        if "sliding_last" in host:
            host["sliding_last"][:] = host["q_last"]
            host["sliding_last"][:n] = last
        if self._target.both_ways == "all":
            host["q_last"][:n] = last

    def _rows(self, step: Step, batch: Batch) -> None:
        """Positions and cache rows. A slot without an item reads its first row and writes trash."""
        for at, slot in enumerate(batch.slots.slots):
            self._committed[at], self._real[at] = self._slots[slot].cursor.committed, batch.rows.get(slot, 0)
        if step.rows is None:
            step.rows = self._pointers(step, batch.verify_len, batch.slots.count)
        lib.pgs_fill_rows(step.rows, self._committed, self._real)
        if "q_scale" in step.host:
            scale, length = self._target.temperature
            positions = step.host["positions"].astype(np.float32) + np.float32(self._target.temperature_from)
            times = np.floor(positions / np.float32(length)).astype(np.float64)
            step.host["q_scale"].reshape(-1)[:] = np.log(times + 1) * np.float32(scale) + 1

    def _pointers(self, step: Step, width: int, count: int) -> Any:
        """The fields that C fills in."""
        kv, near = self._kv, step.host.get("sliding_near")
        sizes = {"width": width, "count": count, "live": kv.live, "ring": kv.ring, "trash": kv.trash, "window": self._target.window}
        sizes |= {
            "near": near.size // count if near is not None else 0,
            "history": self._recurrent.history_rows if self._recurrent is not None else 0,
            "chunked": self._target.chunked,
            "draft_ring": self._draft_kv.ring if self._draft_kv is not None else 0,
        }
        names = ("positions", "kv_rows", "q_last", "q_first", "sliding_rows", "sliding_near", "context_ring", "on", "last", "out_row")
        return ffi.new("pgs_rows *", sizes | {name: step.fields.at[name] for name in names if name in step.fields.at})

    def _deferred(self, host: dict[str, np.ndarray], batch: Batch) -> None:
        """Where hidden states for drafters go."""
        assert self._hidden_states is not None
        at, width = host["hidden_rows"], batch.verify_len
        if self._alone:
            at[:] = self._hidden_states.at(self._slots[0].cursor.committed, width)
            return
        at[:] = self._hidden_states.trash
        for slot, n in batch.rows.items():
            if (s := self._slots[slot]).drafting:
                first = (slot - batch.slots.first) * width
                at[first : first + n] = self._hidden_states.at(s.cursor.committed, n, slot)

    def _fill_drafter(self, host: dict[str, np.ndarray], batch: Batch) -> None:
        drafting = self._drafting[batch.method]
        drafting.fill(host, batch.key, batch.computed, self._slots)
        if (draws := host.get("draft_draws")) is not None:
            draws[:] = 0
            if any(self._slots[slot].draft_options is not None for slot in batch.rows):
                fill_draws(host, batch.key, batch.computed, self._slots, drafting)

    def _drafts(self, host: dict[str, np.ndarray], batch: Batch) -> None:
        """What the drafter reads, and which of its ids belong to which row."""
        drafting, key, width = self._drafting[batch.method], batch.key, batch.verify_len
        self._fill_drafter(host, batch)
        if "source" not in host:  # one slot, whose drafts are the target's ids in place
            return
        total = key.total
        host["source"][:] = np.arange(total)
        for at, slot in enumerate(batch.slots.slots):
            if isinstance(item := batch.computed.get(slot), Draft):
                first, real = at * width + 1, item.verify_len - 1
                host["source"][first : first + real] = total + drafting.order(at, key.drafts, batch.slots.count)[:real]

    def _last_hidden_rows(self, host: dict[str, np.ndarray], batch: Batch) -> None:
        """Each slot's last hidden state, and where those of this step go: the last of certain rows; of blocks the one before and all."""
        last_hidden = self._last_hidden
        if last_hidden is None or "last_hidden" not in host:
            return
        fill_lagging(host)
        kept = host["last_hidden"].reshape(batch.slots.count, -1)
        most = kept.shape[1]
        for at, slot in enumerate(batch.slots.slots):
            host["before"][at] = last_hidden.row(slot)
            last_hidden.fill(slot, min(batch.rows[slot] + 1, most) if slot in batch.rows else 0, kept[at])
