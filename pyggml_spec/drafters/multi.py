"""Several drafters of one target, of which one drafts in each step: to caches and graphs they are one drafter with the layers of all."""

from collections.abc import Sequence

from ..errors import PairError
from ..models.base import KVShape
from ..models.decoder import Decoder
from .base import Drafter


class MultiDrafter:
    """Two or more drafters; attributes and methods of the same names as ``Drafter``'s say what of all of them combine is needed.

    Raises:
        PairError: two that draft in the same way.
    """

    def __init__(self, methods: Sequence[Drafter]) -> None:
        self.methods = tuple(methods)
        for chained, what in ((False, "blocks"), (True, "chains")):
            alike = [drafter for drafter in self.methods if drafter.chained == chained]
            if len(alike) > 1:
                raise PairError(f"{' and '.join(drafter.title for drafter in alike)} both draft {what}; name one of them with `spec`")
        self._chain = next((drafter for drafter in self.methods if drafter.chained), None)

    @property
    def method(self) -> str:
        """Of the one that drafts where nobody says who does."""
        return self.methods[0].method

    @property
    def title(self) -> str:
        return " and ".join(drafter.title for drafter in self.methods)

    @property
    def block_size(self) -> int:
        return max(drafter.block_size for drafter in self.methods)

    @property
    def captures(self) -> tuple[int, ...]:
        """Of all of them, each layer once."""
        return tuple(sorted({layer for drafter in self.methods for layer in drafter.captures}))

    @property
    def chained(self) -> bool:
        return self._chain is not None

    @property
    def shares_kv(self) -> bool:
        return any(drafter.shares_kv for drafter in self.methods)

    def kv_shapes(self) -> list[KVShape]:
        return [shape for drafter in self.methods for shape in drafter.kv_shapes()]

    def check_pair(self, target: Decoder) -> None:
        for drafter in self.methods:
            drafter.check_pair(target)

    def carry_size(self, target: Decoder) -> int:
        assert self._chain is not None
        return self._chain.carry_size(target)


AnyDrafter = Drafter | MultiDrafter
"""Whoever drafts for a target."""


def combine(methods: Sequence[Drafter]) -> AnyDrafter | None:
    """One drafter, a team of several, or None."""
    return None if not methods else methods[0] if len(methods) == 1 else MultiDrafter(methods)
