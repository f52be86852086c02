"""K/V rows and states of layers that live on one device, while another computes a chunk of a prompt with copies of their weights.

Before a chunk they are copied to the device that computes it, and its new rows are copied back after it: between steps a sequence is on its own device.
The copies stay valid, so that the next chunk copies only what was written since.
"""

from ..cache.kv import KVCache
from ..cache.recurrent import DeltaState
from ..cache.slots import Cursor
from ..cache.snapshot import Pieces, SequenceMemory
from ..ggml.library import lib


class OffloadCache:
    """Borrows the caches.

    Attributes:
        kv, delta: of these layers, on the device that computes; None where they have no states.
        brought, taken: bytes copied so far, to it and back.
    """

    def __init__(self, kv: KVCache, delta: DeltaState | None, there: SequenceMemory, home: SequenceMemory, slots: int) -> None:
        self.kv, self.delta, self._there, self._home = kv, delta, there, home
        self.brought = self.taken = 0
        self._there_is = [-1] * slots  # by slot, of how many tokens all is there that they left; -1: of none, not even of an empty sequence

    def bring(self, slot: int, cursor: Cursor) -> None:
        """What a slot's committed tokens left, as far as it is not there."""
        n, there_is = cursor.committed, self._there_is[slot]
        if there_is == n <= cursor.min_committed:
            return
        same = max(0, min(there_is, cursor.min_committed, n))
        self.brought += _copy(self._home.rows(same, n - same, False, slot), self._there.rows(same, n - same, False, slot))
        self.brought += _copy(self._home.state(n, slot), self._there.state(n, slot))

    def take_back(self, slot: int, n: int, count: int) -> None:
        """What ``count`` tokens after the first ``n`` left; follow with ``agree`` once they count."""
        self.taken += _copy(self._there.rows(n, count, False, slot), self._home.rows(n, count, False, slot))
        self.taken += _copy(self._there.state(n + count, slot), self._home.state(n + count, slot))
        self._there_is[slot] = n + count

    def agree(self, slot: int, cursor: Cursor) -> None:
        """What was taken back counts: until the cursor moves otherwise, both devices have the same."""
        if self._there_is[slot] == cursor.committed:
            cursor.min_committed = cursor.committed

    def clear(self, slot: int) -> None:
        """Writes zeros over what the slot's sequence left, which may be NaN. The states of one slot alone are brought whole."""
        self._there_is[slot] = -1
        self.kv.fill_slot(slot, 0)
        if self.delta is not None and not self.delta.inline:
            self.delta.fill_slot(slot, 0)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose, as of ``Resources.memory``."""
        return {"kv": self.kv.nbytes} | ({"recurrent": self.delta.nbytes} if self.delta is not None else {})


def _copy(source: Pieces, target: Pieces) -> int:
    """Between devices; waits for both. Returns how many bytes."""
    with source, target:
        for mine, theirs, a, b in zip(source.tensors, target.tensors, source.backends, target.backends, strict=True):
            lib.ggml_backend_tensor_copy_async(a.handle, b.handle, mine, theirs)
        for backend in dict.fromkeys((*source.backends, *target.backends)):
            backend.synchronize()
        return source.nbytes
