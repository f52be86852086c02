"""Prefix caching: prompts with a common prefix are computed once, for one slot or many.

A prompt is cut into chunks. A chunk's key is the hash of its tokens and of the previous key, so prompts with a common prefix share its chunks. Kinds of
data of a chunk: ``rows`` are K/V rows of its tokens; ``state`` after its last token is all besides rows, of recurrent models and those with a ring.

A chunk's rows are in place (left by the slot's previous prompt), on the device, or in a file; its state
on the device or in a file. A prompt resumes after the deepest chunk with a state, if the rows of all chunks up to it are available.

                        one slot, by hand                            slots of a scheduler
    grain               the prefill chunk                            at most GRAIN: the prefill next to decoding on a CPU
    rows are reused     by whole chunks                              by tokens, where the model needs rows only
    rows are copied     before another prompt overwrites them        as soon as a later state is kept: the slot can change hands at any time
    states are kept     every 4th chunk, the last two, and where     every 16th chunk, around a prompt's last pass, where prompts diverge at a
                        prompts diverge                              chunk boundary, and at ends
    ends                none                                         of responses, for the next turn, and of shared prompts: within a chunk,
                                                                     under their own key
    files               written after the response                   what a sequence left, in a writer thread

With one slot, reused rows come from the graph that would compute them now, so cached and uncached runs are equal bit for bit; hence the grain of a
whole chunk, and generated tokens are recomputed because a one-row step rounds differently. With several slots, rows of any pass are reused.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, takewhile
from typing import Any

import numpy as np

from ..ggml.device import kernels_in_use
from ..ggml.library import lost_reason
from .kv import padded
from .prefix_files import PrefixFiles, PrefixWriter, Refused
from .snapshot import Pieces

STATE_EVERY, SHARED_STATE_EVERY = 4, 16  # chunks, of one slot and of several
GRAIN = 128  # tokens per chunk of several slots


ROWS, STATE = "rows", "state"
REMEMBERED = 1 << 12  # chunk keys kept (0.5 kB each); beyond that the oldest without data are dropped


@dataclass(eq=False, slots=True)
class Chunk:
    """A chunk of ``count`` tokens after ``index`` whole chunks, the last one with key ``before``; ``ids`` where known. ``used``: clock of the last use
    of each kind of data."""

    key: bytes
    index: int
    count: int
    data: dict[str, Pieces] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    before: bytes = b""
    ids: np.ndarray | None = None

    def alike(self, ids: np.ndarray) -> int:
        """Length of the common prefix with ``ids``."""
        if self.ids is None:
            return 0
        n = min(self.count, ids.size)
        differ = np.flatnonzero(self.ids[:n] != ids[:n])
        return int(differ[0]) if differ.size else n


def chunk_keys(ids: np.ndarray, grain: int, seed: bytes) -> list[bytes]:
    """One key per whole chunk of ``grain`` tokens of I64 ``ids``; ``seed`` hashes everything else that has to match."""
    parts = (ids[start : start + grain].tobytes() for start in range(0, ids.size - grain + 1, grain))
    return list(accumulate(parts, lambda key, part: hashlib.sha256(key + part).digest(), initial=seed))[1:]


def end_keys(ids: np.ndarray, before: bytes) -> list[bytes]:
    """Keys of the first 1, 2, ... tokens of I64 ``ids`` after the chunk with key ``before``."""
    sofar, keys = hashlib.sha256(b"end" + before), []
    for token in ids:
        sofar.update(token.tobytes())
        keys.append(sofar.digest())
    return keys


class ChunkStore:
    """Owns the copies; least recently used ones are dropped for new ones. ``clock``: logical time of uses."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used_bytes = self.clock = 0
        self.chunks: dict[bytes, Chunk] = {}

    def chunk(self, key: bytes, index: int, count: int, before: bytes = b"", ids: np.ndarray | None = None) -> Chunk:
        chunk = self.chunks.setdefault(key, Chunk(key, index, count))
        if ids is not None and chunk.ids is None:
            chunk.before, chunk.ids = before, ids.copy()
        return chunk

    def begins(self, before: bytes, ids: np.ndarray) -> tuple[Chunk, int] | None:
        """Of the stored chunks after the key ``before``: the one with the longest common prefix with ``ids``, and its length."""
        found = [(chunk.alike(ids), chunk) for chunk in self.chunks.values() if chunk.before == before and ROWS in chunk.data]
        n, chunk = max(found, key=lambda item: item[0], default=(0, None))
        return (chunk, n) if chunk is not None and n else None

    def keep(self, chunk: Chunk, kind: str, pieces: Pieces, spare: Iterable[Chunk] = (), wait: bool = True) -> bool:
        """Stores a copy of ``pieces`` (``wait`` as of ``Pieces.copy``); False if it does not fit without the chunks in ``spare``, or memory is out."""
        if self.chunks.setdefault(chunk.key, chunk) is not chunk:  # dropped meanwhile, and entered again by another prompt
            return False
        chunk.used.setdefault(kind, 0)
        if kind == STATE:
            chunk.used[kind] = self.clock
        if not self._make_room(pieces.nbytes, {id(c) for c in spare} | {id(chunk)}):
            return False
        copy = pieces.copy(wait)
        if copy is None:
            return False
        chunk.data[kind] = copy
        self.used_bytes += copy.nbytes
        return True

    def _make_room(self, need: int, spare: set[int]) -> bool:
        """Drops the least recently used copies, deepest first, until ``need`` bytes are free."""
        if need > self.budget:
            return False
        found = [(c.used[kind], -c.index, kind, c) for c in self.chunks.values() for kind in c.data if id(c) not in spare]
        for _, _, kind, chunk in sorted(found, key=lambda item: item[:3]):
            if self.used_bytes + need <= self.budget:
                break
            self.drop((chunk,), kind)
        return self.used_bytes + need <= self.budget

    def drop(self, chunks: Iterable[Chunk], *kinds: str) -> None:
        """Frees the copies of ``chunks``, or only those of these kinds."""
        for chunk in chunks:
            for kind in kinds or tuple(chunk.data):
                copy = chunk.data.pop(kind)
                self.used_bytes -= copy.nbytes
                copy.close()

    def forget(self, needed: Iterable[Chunk] = ()) -> None:
        """Drops the oldest keys without data, except ``needed`` ones."""
        surplus = len(self.chunks) - REMEMBERED
        if surplus > 0:
            used = {id(c) for c in needed}
            for key in [key for key, c in self.chunks.items() if not c.data and id(c) not in used][:surplus]:
                del self.chunks[key]

    def clear(self) -> None:
        """Drops all chunks."""
        self.drop(self.chunks.values())
        self.chunks = {}


@dataclass
class Reuse:
    """What a prompt did not have to compute.

    Attributes:
        tokens: leading prompt tokens in the caches.
        chunks: number of chunks by source: "in place", "memory", "disk".
        notes: sentences about data that could not be used.
    """

    tokens: int = 0
    chunks: dict[str, int] = field(default_factory=lambda: {"in place": 0, "memory": 0, "disk": 0})
    notes: list[str] = field(default_factory=list)


@dataclass
class SlotPrefix:
    """The prompt of a slot; its first ``done`` chunks are in place (with one slot: while the engine is in ``epoch``).

    Attributes:
        owner: prefixes are not shared between owners.
        usable: number of chunks that it may resume after; one token has to be left to compute.
        known: number of leading chunks that an earlier prompt shares.
    """

    ids: np.ndarray
    chunks: list[Chunk]
    drafting: bool
    owner: str
    usable: int
    known: int
    epoch: int = -1
    done: int = 0
    resumed: int = 0  # chunks restored, not computed
    wanted: set[int] = field(default_factory=set)  # depths whose state is to be kept
    kept: list[Chunk] = field(default_factory=list)  # copied from this slot
    damaged: bool = False  # a file was refused: deeper ones were not read, and are written again
    saved: bool = False
    # after so many chunks: chunks within which this prompt can resume, and the number of tokens; longest first
    ends: tuple[int, list[tuple[Chunk, int]]] = (-1, [])


class PrefixCache:
    """Borrows the engine; owns the copies.

    One slot: call ``begin`` instead of ``engine.reset``. Several: ``enter`` per admitted prompt and ``restore`` before each of its passes. Then
    ``computed`` after every pass; at the end ``save``, or with several slots ``store_end`` before the slot is released.

    Args:
        budget: bytes on the device; least recently used copies go first.
        files: persistent storage.
        shared: the slots belong to a scheduler.
    """

    def __init__(self, engine: Any, budget: int, files: PrefixFiles | None = None, shared: bool = False) -> None:
        self.engine, self.files, self.store = engine, files, ChunkStore(budget)
        self.notes: list[str] = []
        self._alone = not shared
        self.grain: int = engine.options.chunk if self._alone else min(engine.options.chunk, GRAIN)  # tokens per chunk
        self._places: dict[int, SlotPrefix] = {}
        self.writer = PrefixWriter(files) if files is not None and shared else None

    @property
    def used_bytes(self) -> int:
        return self.store.used_bytes

    # -- a prompt

    def begin(self, tokens: Sequence[int], drafting: bool = True, owner: str = "") -> Reuse:
        """Resets the engine and restores as much of ``tokens`` as possible; the caller computes the rest (at least one)."""
        engine, drafting = self.engine, drafting and self.engine.drafter is not None
        old = self._in_place()
        engine.reset(drafting)
        if old is not None:
            old.epoch = engine.epoch
        self.save()
        place = self.enter(0, tokens, drafting, owner)
        if old is not None:
            pairs = zip(old.chunks[: old.done], place.chunks)
            place.done = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
            self._keep_rows(0, old, old.chunks[place.done : self._useful(old)], place.chunks)  # which the new prompt will overwrite
        reuse = self.restore()
        reuse.notes = self.take_notes()
        return reuse

    def known(self, tokens: Sequence[int], drafting: bool, owner: str = "") -> int:
        """Number of leading chunks that an earlier prompt shares."""
        return self._seen(self.keys_of(np.asarray(tokens, np.int64), drafting, owner))

    def enter(self, slot: int, tokens: Sequence[int], drafting: bool, owner: str = "") -> SlotPrefix:
        """Registers the prompt of a slot before its computation. Data of other owners is not used."""
        ids = np.asarray(tokens, np.int64)
        keys = self.keys_of(ids, drafting, owner)
        known = self._seen(keys)
        chunks = self._chunks(keys, ids, self._seed(drafting, owner))
        place = self._places[slot] = SlotPrefix(
            ids, chunks, drafting, owner, min(len(chunks), max(0, ids.size - 1) // self.grain), known, self.engine.epoch
        )
        if self._alone:
            n = len(keys)
            place.wanted = {d for d in range(1, n + 1) if d % STATE_EVERY == 0 or d > n - 2 or d == known}
        self._forget()
        return place

    def restore(self, slot: int = 0) -> Reuse:
        """Restores the slot as far as possible; returns the tokens that it then has."""
        engine, place, reuse = self.engine, self._places[slot], Reuse()
        reuse.tokens = had = engine.slots[slot].cursor.committed
        if had % self.grain:
            return reuse
        if not self._alone:
            place.done = had // self.grain
        tokens = self._restore(slot, place, reuse, had)
        if tokens > had or self._alone:
            reuse.tokens = tokens
            engine.resume(reuse.tokens, slot=slot)
            place.done = place.resumed = tokens // self.grain
        return reuse

    def resume(self, tokens: int) -> None:
        """One slot: the first ``tokens`` tokens are in place, from wherever."""
        self.engine.resume(tokens)
        self._places[0].done = tokens // self.grain

    def computed(self, slot: int = 0, wanted: bool = False) -> None:
        """Notes the prompt's progress and keeps wanted data; ``wanted``: also the state at this depth."""
        place, now = self._in_place(slot), self.engine.slots[slot].cursor.committed
        depth, stateful = now // self.grain, self.engine.sequence.stateful
        if place is None or not self.engine.slots[slot].sound:
            return
        if self._alone:
            if now % self.grain or depth != place.done + 1 or depth > len(place.chunks):
                return
            place.done, wanted = depth, depth in place.wanted
        elif self.engine.rollback_range(slot) != (now, now):  # computed in a block whose state is not committed yet
            return
        if stateful and (now % self.grain or not (wanted or (not self._alone and depth % SHARED_STATE_EVERY == 0))):
            return
        chunks = place.chunks[:depth]
        if not self._alone:
            self.engine.settle(slot)  # drafters may lack the rows of the last tokens
        if not self._alone and not self._keep_rows(slot, place, chunks, chunks):
            return
        if stateful and chunks and STATE not in chunks[-1].data:
            self._keep_state(slot, place, chunks, depth * self.grain, () if self._alone else chunks)

    def discard(self, slot: int) -> None:
        """Drops the copies made from the slot's prompt: on several devices only its last chunk shows whether all values are finite."""
        place = self._places.get(slot)
        if place is not None:
            self.store.drop(place.kept)
            place.kept = []

    def store_end(self, slot: int, ids: Sequence[int], write: bool = False) -> None:
        """Keeps the state of the slot's sequence, whose tokens begin ``ids``, for the next turn of a conversation.

        ``write``: also in files. For several slots; accepted rows have to be committed.
        """
        place, engine = self._places.get(slot), self.engine
        n = engine.slots[slot].cursor.committed
        if place is None or self._alone or not 0 < n <= len(ids):
            return
        if not engine.slots[slot].sound:
            self._note("a sequence is not kept for later prompts: its drafter or its target gave NaN or Inf")
            return
        settled = np.asarray(ids[:n], np.int64)
        seed = self._seed(place.drafting, place.owner)
        chunks = self._chunks(self.keys_of(settled, place.drafting, place.owner), settled, seed)
        if rest := n % self.grain:
            before, tail = chunks[-1].key if chunks else seed, settled[n - rest :]
            chunks.append(self.store.chunk(end_keys(tail, before)[-1], len(chunks), rest, before, tail))
            chunks[-1].used[ROWS] = self.store.clock
        engine.settle(slot)
        if self._keep_rows(slot, place, chunks, chunks) and engine.sequence.stateful:
            self._keep_state(slot, place, chunks, n, chunks)
        self._forget()
        if write and self.writer is not None:
            self._write(chunks, place.resumed if place.damaged else len(chunks))

    def _write(self, chunks: list[Chunk], again: int) -> None:
        """Queues data of ``chunks`` for the writer up to the last state; from chunk ``again`` on, existing files are overwritten."""
        assert self.writer is not None
        last = max((i + 1 for i, c in enumerate(chunks) if not self.engine.sequence.stateful or STATE in c.data), default=0)
        for chunk in chunks[:last]:
            if ROWS not in chunk.data:  # later chunks would be unusable
                return
            for kind, copy in chunk.data.items():
                if self.writer.wants(chunk.key, kind, copy.nbytes, chunk.index >= again):
                    self.writer.put(chunk.key, kind, copy.read())

    def save(self) -> None:
        """Writes new data of the last prompt to the files, if any; failures become notes."""
        place = self._in_place()
        if self.files is None or place is None or place.saved or not self._alone:
            return
        place.saved = True
        try:
            for chunk in place.chunks[: self._useful(place)]:
                again = place.damaged and chunk.index >= place.resumed
                if again or not self.files.has(chunk.key, ROWS):
                    with self._rows(0, chunk, place.drafting) as pieces:
                        self.files.store(chunk.key, ROWS, pieces.read())
                if STATE in chunk.data and (again or not self.files.has(chunk.key, STATE)):
                    self.files.store(chunk.key, STATE, chunk.data[STATE].read())
            self.files.trim()
        except Refused as refused:
            self.notes.append(str(refused))

    def take_notes(self) -> list[str]:
        """Sentences about data that could not be used or written, since the last call."""
        notes, self.notes = self.notes, []
        for source in (self.files, self.writer):
            notes += source.take_notes() if source is not None else []
        return notes

    # -- restoring

    def _restore(self, slot: int, place: SlotPrefix, reuse: Reuse, had: int) -> int:
        """Fills the caches beyond the first ``had`` tokens; returns the tokens in place. A refused file is skipped, and the next best one is used."""
        in_place = place.done
        while True:
            depth, end, of_end = self._deepest(place)
            last = end if end is not None else place.chunks[depth - 1] if depth else None
            if last is None or (tokens := last.index * self.grain + (of_end or last.count)) <= had:
                return had
            try:
                for source in chain(
                    self._bring_rows(slot, place.chunks[place.done : depth], place.drafting),
                    self._bring_rows(slot, [end] if end is not None else [], place.drafting, of_end),
                ):
                    reuse.chunks[source] += 1
                    place.done = min(place.done + 1, depth)
                if self.engine.sequence.stateful:
                    self._fill_state(slot, last, place.drafting)
                reuse.chunks["in place"] = min(in_place, depth)
                return tokens
            except Refused as refused:
                place.damaged = True
                self.notes.append(str(refused))

    def _bring_rows(self, slot: int, chunks: list[Chunk], drafting: bool, first: int = 0) -> Iterator[str]:
        """Fills the rows of ``chunks`` of equal size in order; yields their sources. ``first``: only so many tokens of each, of copies."""
        missing = [chunk for chunk in chunks if ROWS not in chunk.data]
        nbytes = 0
        if missing:
            with self._rows(slot, missing[0], drafting) as pieces:
                nbytes = pieces.nbytes
        contents = self.files.load_each((c.key for c in missing), ROWS, nbytes) if missing and self.files is not None else iter(())
        for chunk in chunks:
            chunk.used[ROWS] = self.store.clock
            if 0 < first < chunk.count and ROWS in chunk.data:
                position = chunk.index * self.grain
                with self.engine.sequence.rows(position, first, drafting, slot) as pieces, chunk.data[ROWS].first_rows(first) as part:
                    part.write_to(pieces)
                yield "memory"
                continue
            with self._rows(slot, chunk, drafting) as pieces:
                if ROWS in chunk.data:
                    chunk.data[ROWS].write_to(pieces)
                else:
                    pieces.write(next(contents))
            yield "memory" if ROWS in chunk.data else "disk"

    def _deepest(self, place: SlotPrefix) -> tuple[int, Chunk | None, int]:
        """(chunks to resume after, a partial chunk after them or None, its number of usable tokens)."""
        depth, rows, stateful = 0, 0, self.engine.sequence.stateful
        for i, chunk in enumerate(place.chunks):
            if i >= place.done and not self._has(chunk, ROWS):
                break
            rows = i + 1
            if rows <= place.usable and (not stateful or self._has(chunk, STATE)):
                depth = rows
        if self._alone:
            return depth, None, 0
        rows = min(rows, place.usable)
        if place.ends[0] != rows:
            place.ends = rows, self._ends(place, rows)
        for end, n in place.ends[1]:
            if self._has(end, ROWS) and (not stateful or self._has(end, STATE)) and (n == end.count or ROWS in end.data):
                return rows, end, n
        return depth, None, 0

    def _ends(self, place: SlotPrefix, rows: int) -> list[tuple[Chunk, int]]:
        """Partial chunks after ``rows`` others that this prompt can resume within, with the number of tokens: known ends, and where rows suffice
        the longest common prefix. One token has to be left to compute."""
        first, before = rows * self.grain, place.chunks[rows - 1].key if rows else self._seed(place.drafting, place.owner)
        ids = place.ids[first : min(first + self.grain, place.ids.size) - 1]
        keys = end_keys(ids, before)
        found = [(self.store.chunk(key, rows, n), n) for n, key in enumerate(keys, 1) if self._is_known(key)]
        if not self.engine.sequence.stateful and (begun := self.store.begins(before, ids)) is not None:
            found.append(begun)
        return sorted(found, key=lambda item: -item[1])

    def _fill_state(self, slot: int, chunk: Chunk, drafting: bool) -> None:
        chunk.used[STATE] = self.store.clock
        with self.engine.sequence.state(chunk.index * self.grain + chunk.count, drafting, slot) as pieces:
            if STATE in chunk.data:
                chunk.data[STATE].write_to(pieces)
            else:
                assert self.files is not None  # _deepest checked it
                pieces.write(self.files.load(chunk.key, STATE, pieces.nbytes))
                self._keep(chunk, STATE, pieces)

    def _useful(self, place: SlotPrefix) -> int:
        """Number of chunks in place that a prompt can resume after: rows after the deepest state are useless."""
        if not self.engine.sequence.stateful:
            return place.done
        return max((i + 1 for i, chunk in enumerate(place.chunks[: place.done]) if self._has(chunk, STATE)), default=0)

    def _has(self, chunk: Chunk, kind: str) -> bool:
        return kind in chunk.data or (self.files is not None and self.files.has(chunk.key, kind))

    # -- copies and their budget

    def _keep_rows(self, slot: int, place: SlotPrefix, chunks: Sequence[Chunk], keep: Sequence[Chunk]) -> bool:
        """Copies the rows of ``chunks`` without a copy; False if they do not fit without the chunks in ``keep``."""
        for chunk in chunks:
            if ROWS not in chunk.data:
                with self._rows(slot, chunk, place.drafting) as pieces:
                    if not self._keep(chunk, ROWS, pieces, keep):
                        return False
                place.kept.append(chunk)
        return True

    def _keep_state(self, slot: int, place: SlotPrefix, chunks: Sequence[Chunk], n: int, keep: Sequence[Chunk]) -> None:
        """Copies the state after the slot's ``n`` tokens, the last of ``chunks``; marks a kept one as used."""
        chunks[-1].used[STATE] = self.store.clock
        if STATE not in chunks[-1].data:
            with self.engine.sequence.state(n, place.drafting, slot) as pieces:
                self._keep(chunks[-1], STATE, pieces, keep)
            place.kept.append(chunks[-1])

    def _forget(self) -> None:
        """Limits the number of known chunk keys; those of slots stay."""
        self.store.forget(chunk for place in self._places.values() for chunk in chain(place.chunks, (end for end, _ in place.ends[1])))

    def _keep(self, chunk: Chunk, kind: str, pieces: Pieces, keep: Sequence[Chunk] = ()) -> bool:
        wait = self.engine.devices.under_way is None
        kept, need, budget = self.store.keep(chunk, kind, pieces, keep, wait), pieces.nbytes, self.store.budget
        if kind == STATE and need > budget and (budget or self.files is not None):
            self._note(
                f"the prefix cache of {budget / (1 << 20):.1f} MiB cannot hold one state of this model, {need / (1 << 20):.1f} MiB: "
                "nothing is reused; give it more memory"
            )
        return kept

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # -- helpers

    def _in_place(self, slot: int = 0) -> SlotPrefix | None:
        """The slot's prompt; with one slot, unless another sequence was begun since."""
        place = self._places.get(slot)
        return place if place is not None and (not self._alone or place.epoch == self.engine.epoch) else None

    def _seed(self, drafting: bool, owner: str = "") -> bytes:
        """Everything besides tokens that chunks have to share. Rows with and without capture are kept apart: the graphs may round differently."""
        return (self.files.layout_digest if self.files is not None else b"") + bytes([drafting]) + owner.encode()

    def keys_of(self, ids: np.ndarray, drafting: bool, owner: str = "") -> list[bytes]:
        """One key per whole chunk; none if the prompt is invalid, which its computation reports."""
        if ids.ndim != 1 or ids.size > self.engine.options.n_ctx:
            return []
        return chunk_keys(ids, self.grain, self._seed(drafting, owner))

    def _chunks(self, keys: list[bytes], ids: np.ndarray, seed: bytes) -> list[Chunk]:
        """The chunks of these keys and tokens, marked as used."""
        self.store.clock += 1
        grain, befores = self.grain, [seed, *keys]
        chunks = [self.store.chunk(key, i, grain, befores[i], ids[i * grain : (i + 1) * grain]) for i, key in enumerate(keys)]
        for chunk in chunks:
            chunk.used[ROWS] = self.store.clock
        return chunks

    def _seen(self, keys: list[bytes]) -> int:
        """Number of leading chunks that are known."""
        return sum(1 for _ in takewhile(self._is_known, keys))

    def _is_known(self, key: bytes) -> bool:
        return key in self.store.chunks or (self.files is not None and self.files.has(key, ROWS))

    def _rows(self, slot: int, chunk: Chunk, drafting: bool) -> Pieces:
        return self.engine.sequence.rows(chunk.index * self.grain, chunk.count, drafting, slot)

    def clear(self) -> None:
        """Drops all prompts and copies. Files stay."""
        self.store.clear()
        self._places.clear()

    def close(self) -> None:
        """Writes outstanding data and frees the copies."""
        with ExitStack() as stack:
            stack.callback(self.clear)
            if self.writer is not None:
                stack.callback(self.writer.close)
            if not self.engine.graphs.closed and lost_reason(self.engine.io.workers) is None:  # a lost worker cannot be read
                self.save()


def layout_of(
    engine: Any, versions: dict[str, str], progress: Callable[[str, int, int], None] = lambda what, done, total: None, shared: bool = False
) -> str:
    """Everything that rows and states depend on, one "what: value" per line; data of different layouts is never mixed.

    Model files are identified by a hash of their contents; ``progress`` receives (file, bytes done, total) while it is computed. ``shared``: slots of a
    scheduler.
    """
    members = engine.drafter.methods if engine.drafter is not None else ()
    files = {"target": engine.target.file} | {"drafter" if at == 0 else f"drafter {at + 1}": m.file for at, m in enumerate(members)}
    weights, chunk, segments = engine.target.weights, engine.options.chunk, engine.resources.segments
    lines = {
        "adapters": weights.adapters and ", ".join(f"BLAKE3 {a.identity}" for a in weights.adapters.all) + f" {weights.adapters.default}",
        "experts": weights.placement and _digest(weights.placement),  # the host's experts round differently
        # wide chunks are computed on the device
        "copies of the host's weights": weights.streams and f"for chunks of {min(stream.rows for stream in weights.streams)} rows",
        "slots": shared and f"shared, chunks of {min(chunk, GRAIN)}",
        **{
            what: f"{file.metadata['general.architecture']} of {file.nbytes} bytes, BLAKE3 {file.identity(partial(progress, what))}"
            for what, file in files.items()
        },
        "chunk": chunk,
        "cache": engine.sequence.describe(),
        "device": "; ".join(  # attention on the CPU sums by thread
            f"{b.device.kind} {b.device.description}, {b.threads} threads, {b.kernels} kernels" for b in (s.backend for s in segments)
        ),
        "rope": engine.target.file.rope and repr(engine.target.file.rope),
        "rope factors": engine.target.is_long(padded(engine.options.n_ctx)) and "of long contexts",
        "split": len(segments) > 1 and ", ".join(map(str, segments)),
        "build": _digest(kernels_in_use()),  # with a patch, kernels of the same version round in another way
        **{what: versions[what] for what in ("pyggml_spec", "llama_cpp_python", "ggml_commit")},
    }
    return "\n".join(f"{what}: {value}" for what, value in lines.items() if value)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
