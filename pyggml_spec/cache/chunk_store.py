"""Copies of prompt chunks on the device, within a budget.

A prompt is cut into chunks. A chunk's key is the hash of its tokens and of the previous key, so prompts with a common prefix share its chunks.
Kinds of data of a chunk:

    rows    K/V rows of its tokens
    state   state after its last token besides rows; only for recurrent models and those with a ring
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .snapshot import Pieces

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
    key, keys = seed, []
    for start in range(0, ids.size - grain + 1, grain):
        key = hashlib.sha256(key + ids[start : start + grain].tobytes()).digest()
        keys.append(key)
    return keys


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
            self._drop(chunk, kind)
        return self.used_bytes + need <= self.budget

    def _drop(self, chunk: Chunk, kind: str) -> None:
        copy = chunk.data.pop(kind)
        self.used_bytes -= copy.nbytes
        copy.close()

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Frees the copies of ``chunks``."""
        for chunk in chunks:
            for kind in list(chunk.data):
                self._drop(chunk, kind)

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
