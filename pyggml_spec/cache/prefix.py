"""Prompts that begin alike are computed once, for one slot or for many.

A prompt is cut into chunks; see chunk_store.py. A chunk's rows can be in place (the prompt before in this slot had it too), a copy on the device, or
in a file; its state a copy or in a file. A prompt goes on behind the deepest chunk that has a state and whose rows, and those of all chunks
before it, are there.

                        one slot, begun by hand                               shared by a scheduler
    grain               the prefill's chunk                                   at most GRAIN: what a pass beside decoding sequences takes
    rows are reused     by whole chunks                                       to the token, where rows are all there is
    rows are copied     when another prompt is about to overwrite them        as soon as a state behind them is kept: the slot is given to
                                                                              the next sequence at any time, and others wait for them
    states are kept     every 4th chunk, at the last two, and where a         every 16th chunk, before or after a prompt's last pass, where
                        prompt is seen to leave an older one                  prompts part, if a pass ends a chunk there, and at ends
    ends                none                                                  of answers, for the next turn, and of prompts that several
                                                                              sequences have: in the middle of a chunk, with their own key
    files               written after the text is out                         what a sequence left, by a thread of their own

Of one slot, every part was computed by the graph that would have computed it now, with the same rows in it: cached and uncached runs are equal
bit for bit. That is why the grain is a whole chunk, and why tokens that were generated are computed again: a step of one row rounds otherwise.
A pass that several slots share can round otherwise than the same rows alone: there, what is reused is what some pass of this engine computed,
generated tokens among them.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from ..ggml.device import kernels_in_use
from ..ggml.library import lost_reason
from .chunk_store import ROWS, STATE, Chunk, ChunkStore, chunk_keys, end_keys
from .prefix_files import PrefixFiles, PrefixWriter, Refused
from .snapshot import Pieces

STATE_EVERY, SHARED_STATE_EVERY = 4, 16  # chunks, of one slot and of several
GRAIN = 128  # tokens per chunk of several slots


@dataclass
class Reuse:
    """What a prompt did not have to compute.

    Attributes:
        tokens: leading tokens of the prompt that are in the caches.
        chunks: how many of its chunks were "in place", copied from "memory", read from "disk".
        notes: sentences about what could not be used.
    """

    tokens: int = 0
    chunks: dict[str, int] = field(default_factory=lambda: {"in place": 0, "memory": 0, "disk": 0})
    notes: list[str] = field(default_factory=list)


@dataclass
class SlotPrefix:
    """The prompt of a slot: the first ``done`` of its chunks are in place, of one slot as long as the engine is still in ``epoch``.

    Attributes:
        keys: of its whole chunks.
        owner: whose prompt it is: other owners' are not alike.
        usable: how many of them it may go on behind: a token has to be left to compute.
        known: how many some prompt before had as well.
    """

    ids: np.ndarray
    chunks: list[Chunk]
    drafting: bool
    owner: str
    usable: int
    known: int
    epoch: int = -1
    done: int = 0
    resumed: int = 0  # chunks that were brought back, not computed
    wanted: set[int] = field(default_factory=set)  # depths at which a state is to be kept
    kept: list[Chunk] = field(default_factory=list)  # whose copies were made of what this slot computed
    damaged: bool = False  # a file was refused: the deeper ones were not looked at, and are written again
    saved: bool = False
    # behind so many chunks: what this prompt goes on from that is known to end, or to begin alike, there, and how many tokens of it; most first
    ends: tuple[int, list[tuple[Chunk, int]]] = (-1, [])

    @property
    def keys(self) -> list[bytes]:
        return [chunk.key for chunk in self.chunks]


class PrefixCache:
    """Borrows the engine; owns its copies.

    Of one slot, call ``begin`` in place of ``engine.reset``; of several, ``enter`` once per admitted prompt and ``restore`` before each of its
    passes. Then ``computed`` after every pass; at the end ``save``, of several slots ``store_end`` before the slot is released.

    ``budget``: bytes on the device for copies; the least recently used ones go first. ``files``: where they outlive the process.
    ``shared``: the slots, or the only one, are given to sequence after sequence by a scheduler.
    """

    def __init__(self, engine: Any, budget: int, files: PrefixFiles | None = None, shared: bool = False) -> None:
        self.engine, self.files, self._store = engine, files, ChunkStore(budget)
        self.notes: list[str] = []
        self._alone = not shared
        self.grain: int = engine.options.chunk if self._alone else min(engine.options.chunk, GRAIN)  # tokens per chunk
        self._places: dict[int, SlotPrefix] = {}
        self.writer = PrefixWriter(files) if files is not None and shared else None

    @property
    def used_bytes(self) -> int:
        return self._store.used_bytes

    # -- a prompt

    def begin(self, tokens: Sequence[int], drafting: bool = True) -> Reuse:
        """Resets the engine and brings back as much of ``tokens`` as there is; the caller computes the others (at least one)."""
        engine, drafting = self.engine, drafting and self.engine.drafter is not None
        old = self._in_place()
        engine.reset(drafting)
        if old is not None:
            old.epoch = engine.epoch
        self.save()
        place = self.enter(0, tokens, drafting)
        if old is not None:
            place.done = _alike(old.chunks[: old.done], place.chunks)
            self._rescue(old, place.done, keep=place.chunks)
        reuse = self.restore()
        reuse.notes = self.take_notes()
        return reuse

    def known(self, tokens: Sequence[int], drafting: bool, owner: str = "") -> int:
        """How many leading chunks of these tokens some prompt before had as well."""
        return self._seen(self.keys_of(np.asarray(tokens, np.int64), drafting, owner))

    def enter(self, slot: int, tokens: Sequence[int], drafting: bool, owner: str = "") -> SlotPrefix:
        """Registers the prompt of a slot, before anything of it is computed. What other owners left is not found."""
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
        """Fills the slot as far as there are copies; says how many tokens of its prompt it then has."""
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
        """Of one slot: the first ``tokens`` tokens of the prompt are in place, whatever brought them there."""
        self.engine.resume(tokens)
        self._places[0].done = tokens // self.grain

    def computed(self, slot: int = 0, wanted: bool = False) -> None:
        """Notes that the prompt came this far, and keeps what is wanted here; ``wanted``: also the state, whatever the depth."""
        place, now = self._in_place(slot), self.engine.slots[slot].cursor.committed
        depth, stateful = now // self.grain, self.engine.sequence.stateful
        if place is None or not self.engine.slots[slot].sound:
            return
        if self._alone:
            if now % self.grain or depth != place.done + 1 or depth > len(place.chunks):
                return
            place.done, wanted = depth, depth in place.wanted
        elif self.engine.rollback_range(slot) != (now, now):  # it came with a block, and its state is still pending
            return
        if stateful and (now % self.grain or not (wanted or (not self._alone and depth % SHARED_STATE_EVERY == 0))):
            return
        chunks = place.chunks[:depth]
        if not self._alone:
            self.engine.settle(slot)  # a last token that came with others' plain ones left rows for drafters to compute
        if not self._alone and not self._keep_rows(slot, place, chunks, chunks):
            return
        if stateful and chunks and STATE not in chunks[-1].data:
            self._keep_state(slot, place, chunks, depth * self.grain, () if self._alone else chunks)

    def discard(self, slot: int) -> None:
        """Drops the copies of what the slot's prompt computed, also before and between what it was brought back: over several devices, only its last
        chunk says whether all of them were finite."""
        place = self._places.get(slot)
        if place is not None:
            self._store.drop(place.kept)
            place.kept = []

    def store_end(self, slot: int, ids: Sequence[int], write: bool = False) -> None:
        """Keeps what the slot's sequence has left so far, whose tokens ``ids`` begin with: the next turn of a conversation goes on behind it.

        ``write``: also in files, if there are any. Of several slots; the engine's accepted rows are committed.
        """
        place, engine = self._places.get(slot), self.engine
        n = engine.slots[slot].cursor.committed
        if place is None or self._alone or not 0 < n <= len(ids):
            return
        if not engine.slots[slot].sound:
            self._note("what a sequence left is not kept for later prompts: its drafter or its target gave NaN or Inf")
            return
        settled = np.asarray(ids[:n], np.int64)
        seed = self._seed(place.drafting, place.owner)
        chunks = self._chunks(self.keys_of(settled, place.drafting, place.owner), settled, seed)
        if rest := n % self.grain:
            before, tail = chunks[-1].key if chunks else seed, settled[n - rest :]
            chunks.append(self._store.chunk(end_keys(tail, before)[-1], len(chunks), rest, before, tail))
            chunks[-1].used[ROWS] = self._store.clock
        engine.settle(slot)
        if self._keep_rows(slot, place, chunks, chunks) and engine.sequence.stateful:
            if STATE in chunks[-1].data:
                chunks[-1].used[STATE] = self._store.clock
            else:
                self._keep_state(slot, place, chunks, n, chunks)
        self._forget()
        if write and self.writer is not None:
            self._write(chunks, place.resumed if place.damaged else len(chunks))

    def _write(self, chunks: list[Chunk], again: int) -> None:
        """Hands what is kept of ``chunks`` to the writer, as far as anything can go on behind it; from chunk ``again`` on whatever there is."""
        assert self.writer is not None
        last = max((i + 1 for i, c in enumerate(chunks) if not self.engine.sequence.stateful or STATE in c.data), default=0)
        for chunk in chunks[:last]:
            if ROWS not in chunk.data:  # what lies behind it could not be used
                return
            for kind, copy in chunk.data.items():
                if self.writer.wants(chunk.key, kind, copy.nbytes, chunk.index >= again):
                    self.writer.put(chunk.key, kind, copy.read())

    def save(self) -> None:
        """Writes what the last prompt added to the files, if there are any. What cannot be written is noted, and goes unwritten."""
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
        """What could not be used or written since they were taken last, one sentence each."""
        notes, self.notes = self.notes, []
        for source in (self.files, self.writer):
            notes += source.take_notes() if source is not None else []
        return notes

    # -- bringing back

    def _restore(self, slot: int, place: SlotPrefix, reuse: Reuse, had: int) -> int:
        """Fills the caches beyond the ``had`` tokens that the sequence has; returns how many are there. A file that is refused is left out, and
        the next best place is tried."""
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
                    self._fill_state(slot, last)
                reuse.chunks["in place"] = min(in_place, depth)
                return tokens
            except Refused as refused:
                place.damaged = True
                self.notes.append(str(refused))

    def _bring_rows(self, slot: int, chunks: list[Chunk], drafting: bool, first: int = 0) -> Iterator[str]:
        """Fills the rows of ``chunks``, which have as many tokens each, one after the other; says from where. ``first``: only of so many tokens of each, of
        what has a copy."""
        missing = [chunk for chunk in chunks if ROWS not in chunk.data]
        nbytes = 0
        if missing:
            with self._rows(slot, missing[0], drafting) as pieces:
                nbytes = pieces.nbytes
        contents = self.files.load_each((c.key for c in missing), ROWS, nbytes) if missing and self.files is not None else iter(())
        for chunk in chunks:
            chunk.used[ROWS] = self._store.clock
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
        """How many chunks the prompt can go on behind, and what goes further behind them, if there is something, with how many of its tokens."""
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
        """What this prompt can go on from within the chunk behind ``rows`` others, and how many tokens of it: what is known to end there, and where rows are
        all there is, what begins alike. A token has to be left to compute."""
        first, before = rows * self.grain, place.chunks[rows - 1].key if rows else self._seed(place.drafting, place.owner)
        ids = place.ids[first : min(first + self.grain, place.ids.size) - 1]
        keys = end_keys(ids, before)
        known = [(n, key) for n, key in enumerate(keys, 1) if key in self._store.chunks or (self.files and self.files.has(key, ROWS))]
        found = [(self._store.chunk(key, rows, n), n) for n, key in known]
        if not self.engine.sequence.stateful and (begun := self._store.begins(before, ids)) is not None:
            found.append(begun)
        return sorted(found, key=lambda item: -item[1])

    def _behind(self, chunk: Chunk) -> int:
        """Tokens up to the end of ``chunk``."""
        return chunk.index * self.grain + chunk.count

    def _fill_state(self, slot: int, chunk: Chunk) -> None:
        chunk.used[STATE] = self._store.clock
        with self.engine.sequence.state(self._behind(chunk), slot) as pieces:
            if STATE in chunk.data:
                chunk.data[STATE].write_to(pieces)
            else:
                assert self.files is not None  # or _deepest would not have come here
                pieces.write(self.files.load(chunk.key, STATE, pieces.nbytes))
                self._keep(chunk, STATE, pieces)

    def _useful(self, place: SlotPrefix) -> int:
        """How many of the chunks in place a prompt can ever go on behind: rows after the deepest state are of no use."""
        if not self.engine.sequence.stateful:
            return place.done
        return max((i + 1 for i, chunk in enumerate(place.chunks[: place.done]) if self._has(chunk, STATE)), default=0)

    def _has(self, chunk: Chunk, kind: str) -> bool:
        return kind in chunk.data or (self.files is not None and self.files.has(chunk.key, kind))

    # -- copies and their budget

    def _rescue(self, old: SlotPrefix, same: int, keep: list[Chunk]) -> None:
        """ChunkStore rows that the new prompt will overwrite. The beginnings first: the others are of no use without them."""
        self._keep_rows(0, old, old.chunks[same : self._useful(old)], keep)

    def _keep_rows(self, slot: int, place: SlotPrefix, chunks: Sequence[Chunk], keep: Sequence[Chunk]) -> bool:
        """ChunkStore the rows of ``chunks`` that have no copy; False if that does not fit without those to ``keep``."""
        for chunk in chunks:
            if ROWS not in chunk.data:
                with self._rows(slot, chunk, place.drafting) as pieces:
                    if not self._keep(chunk, ROWS, pieces, keep):
                        return False
                place.kept.append(chunk)
        return True

    def _keep_state(self, slot: int, place: SlotPrefix, chunks: Sequence[Chunk], n: int, keep: Sequence[Chunk]) -> None:
        """ChunkStore the state that the slot's ``n`` tokens left, those of ``chunks``."""
        with self.engine.sequence.state(n, slot) as pieces:
            self._keep(chunks[-1], STATE, pieces, keep)
        place.kept.append(chunks[-1])

    def _forget(self) -> None:
        """What is known of more prompts than are remembered; the slots' own ones may still get copies."""
        self._store.forget(chunk for place in self._places.values() for chunk in chain(place.chunks, (end for end, _ in place.ends[1])))

    def _keep(self, chunk: Chunk, kind: str, pieces: Pieces, keep: Sequence[Chunk] = ()) -> bool:
        wait = self.engine.resources.under_way is None
        kept, need, budget = self._store.keep(chunk, kind, pieces, keep, wait), pieces.nbytes, self._store.budget
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
        """The slot's prompt; of one slot, unless somebody else has begun another sequence since."""
        place = self._places.get(slot)
        return place if place is not None and (not self._alone or place.epoch == self.engine.epoch) else None

    def _seed(self, drafting: bool, owner: str = "") -> bytes:
        """What chunks have to have in common besides tokens. Rows made while drafting and while not are kept apart: graphs that capture features
        may round otherwise."""
        return (self.files.layout_digest if self.files is not None else b"") + bytes([drafting]) + owner.encode()

    def keys_of(self, ids: np.ndarray, drafting: bool, owner: str = "") -> list[bytes]:
        """One key per whole chunk; none of what is no prompt that fits, which whoever computes it refuses."""
        if ids.ndim != 1 or ids.size > self.engine.options.n_ctx:
            return []
        return chunk_keys(ids, self.grain, self._seed(drafting, owner))

    def _chunks(self, keys: list[bytes], ids: np.ndarray, seed: bytes) -> list[Chunk]:
        """The chunks with these keys, of these tokens, which are of use now."""
        self._store.clock += 1
        grain, befores = self.grain, [seed, *keys]
        chunks = [self._store.chunk(key, i, grain, befores[i], ids[i * grain : (i + 1) * grain]) for i, key in enumerate(keys)]
        for chunk in chunks:
            chunk.used[ROWS] = self._store.clock
        return chunks

    def _seen(self, keys: list[bytes]) -> int:
        """How many leading chunks some prompt before had as well."""
        return next(
            (i for i, key in enumerate(keys) if key not in self._store.chunks and not (self.files and self.files.has(key, ROWS))),
            len(keys),
        )

    def _rows(self, slot: int, chunk: Chunk, drafting: bool) -> Pieces:
        return self.engine.sequence.rows(chunk.index * self.grain, chunk.count, drafting, slot)

    def clear(self) -> None:
        """Forgets every prompt and frees the copies. Files stay."""
        self._store.clear()
        self._places.clear()

    def close(self) -> None:
        """Writes what is still to be written, and frees the copies."""
        if not self.engine.graphs.closed and lost_reason(self.engine.io.workers) is None:  # nothing can be read of a worker that is lost
            try:
                self.save()
            finally:
                self._end()
        else:
            self._end()

    def _end(self) -> None:
        try:
            if self.writer is not None:
                self.writer.close()
        finally:
            self.clear()


def layout_of(
    engine: Any, versions: dict[str, str], progress: Callable[[str, int, int], None] = lambda what, done, total: None, shared: bool = False
) -> str:
    """Everything that rows and states depend on, one "what: value" per line: what differs in any of them is never mixed.

    The model files are named by a hash of all their bytes; ``progress`` (which file, bytes done, all) is told while one is computed. ``shared``:
    by a scheduler's slots, whatever their number.
    """
    files = {"target": engine.target.file}
    members = engine.drafter.methods if engine.drafter is not None else ()
    files |= {"drafter" if at == 0 else f"drafter {at + 1}": member.file for at, member in enumerate(members)}
    placement = engine.target.weights.placement  # beside a GPU, the host's experts round in another way
    experts = {"experts": hashlib.sha256(repr(placement).encode()).hexdigest()[:32]} if placement is not None else {}
    if streams := engine.target.weights.streams:  # and wide chunks as the device does
        experts["copies of the host's weights"] = f"for chunks of {min(stream.rows for stream in streams)} rows"
    lines = {
        **experts,
        **({"slots": f"shared, chunks of {min(engine.options.chunk, GRAIN)}"} if shared else {}),
        **{
            what: f"{file.metadata['general.architecture']} of {file.nbytes} bytes, BLAKE3 {file.identity(partial(progress, what))}"
            for what, file in files.items()
        },
        "chunk": engine.options.chunk,
        "cache": engine.sequence.describe(),
        "device": "; ".join(  # attention on the CPU sums by thread
            f"{b.device.kind} {b.device.description}, {b.threads} threads, {b.kernels} kernels"
            for b in (s.backend for s in engine.resources.segments)
        ),
        **({"rope": repr(engine.target.file.rope)} if engine.target.file.rope is not None else {}),
        **({"split": ", ".join(map(str, engine.resources.segments))} if len(engine.resources.segments) > 1 else {}),
        "build": hashlib.sha256(repr(kernels_in_use()).encode()).hexdigest()[
            :32
        ],  # with a patch, kernels of the same version round in another way
        **{what: versions[what] for what in ("pyggml_spec", "llama_cpp_python", "ggml_commit")},
    }
    return "\n".join(f"{what}: {value}" for what, value in lines.items())


def _alike(a: list[Chunk], b: list[Chunk]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x is not y), min(len(a), len(b)))
