"""K/V rows and states of layers that live on one device, while another computes a chunk of a prompt with copies of their weights.

They stay at home: before a chunk they are copied to where it is computed, and what it left is copied back behind it. So whatever looks at a
sequence between two steps, rewinds it or copies it finds it where it always is.
"""

from ..ggml.library import lib
from .delta import DeltaState
from .kv import KVCache
from .snapshot import Pieces, SequenceMemory


class Guests:
    """Borrows the caches. ``kv``, ``delta``: of these layers, on the device that computes; None where they have no states."""

    def __init__(self, kv: KVCache, delta: DeltaState | None, there: SequenceMemory, home: SequenceMemory) -> None:
        self.kv, self.delta, self._there, self._home = kv, delta, there, home

    def bring(self, slot: int, n: int) -> None:
        """All that the ``n`` committed tokens of a slot left."""
        _copy(self._home.whole(n, False, slot), self._there.whole(n, False, slot))

    def take_back(self, slot: int, n: int, count: int) -> None:
        """What ``count`` tokens behind them left."""
        _copy(self._there.rows(n, count, False, slot), self._home.rows(n, count, False, slot))
        _copy(self._there.state(n + count, slot), self._home.state(n + count, slot))

    def clear(self, slot: int) -> None:
        """Writes zeros over what the slot's sequence left, which may be NaN. The states of one slot alone are brought whole."""
        self.kv.fill_slot(slot, 0)
        if self.delta is not None and not self.delta.inline:
            self.delta.fill_slot(slot, 0)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose, as of ``Parts.memory``."""
        return {"kv": self.kv.nbytes} | ({"recurrent": self.delta.nbytes} if self.delta is not None else {})


def _copy(source: Pieces, target: Pieces) -> None:
    """Between devices; waits for both."""
    with source, target:
        for mine, theirs, a, b in zip(source.tensors, target.tensors, source.backends, target.backends, strict=True):
            lib.ggml_backend_tensor_copy_async(a.handle, b.handle, mine, theirs)
        for backend in dict.fromkeys((*source.backends, *target.backends)):
            backend.synchronize()
