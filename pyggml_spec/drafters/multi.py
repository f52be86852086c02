"""Several drafters of one target, one of which drafts in each step; caches and graphs have the layers of all."""

from collections.abc import Sequence

from ..errors import PairError
from ..models.base import KVShape
from ..models.decoder import Decoder
from .base import Drafter


class MultiDrafter:
    """Two or more drafters; attributes and methods combine those of ``Drafter``.

    Raises:
        PairError: two drafters of the same kind.
    """

    def __init__(self, methods: Sequence[Drafter]) -> None:
        self.methods = tuple(methods)
        for kind, what in (((False, False), "blocks"), ((True, False), "chains"), ((False, True), "as whole models")):
            alike = [drafter for drafter in self.methods if (drafter.chained, drafter.whole_model) == kind]
            if len(alike) > 1:
                raise PairError(f"{' and '.join(drafter.title for drafter in alike)} both draft {what}; name one of them with `spec`")
        self._chain = next((drafter for drafter in self.methods if drafter.chained), None)
        self.method = self.methods[0].method  # the default
        self.title = " and ".join(drafter.title for drafter in self.methods)
        self.block_size = max(drafter.block_size for drafter in self.methods)
        self.captures = tuple(sorted({layer for drafter in self.methods for layer in drafter.captures}))
        self.chained = self._chain is not None
        self.shares_kv = any(drafter.shares_kv for drafter in self.methods)

    def kv_shapes(self) -> list[KVShape]:
        return [shape for drafter in self.methods for shape in drafter.kv_shapes()]

    def check_pair(self, target: Decoder) -> None:
        for drafter in self.methods:
            drafter.check_pair(target)

    def carry_size(self, target: Decoder) -> int:
        assert self._chain is not None
        return self._chain.carry_size(target)


AnyDrafter = Drafter | MultiDrafter


def combine(methods: Sequence[Drafter]) -> AnyDrafter | None:
    """One drafter, a MultiDrafter, or None."""
    return None if not methods else methods[0] if len(methods) == 1 else MultiDrafter(methods)
