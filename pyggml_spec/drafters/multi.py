"""Several drafters of one target, of which one drafts in each step: to caches and graphs they are one drafter with the layers of all."""

from collections.abc import Sequence

from ..errors import PairError
from ..models.base import KVShape, Target
from .base import Drafter


class Team:
    """Two or more drafters; attributes and methods of the same names as ``Drafter``'s say what of all of them together is needed.

    Raises:
        PairError: two that draft in the same way.
    """

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members = tuple(members)
        for chained, what in ((False, "blocks"), (True, "chains")):
            alike = [member for member in self.members if member.chained == chained]
            if len(alike) > 1:
                raise PairError(f"{' and '.join(member.title for member in alike)} both draft {what}; name one of them with `spec`")
        self._chain = next((member for member in self.members if member.chained), None)

    @property
    def method(self) -> str:
        """Of the one that drafts where nobody says who does."""
        return self.members[0].method

    @property
    def title(self) -> str:
        return " and ".join(member.title for member in self.members)

    @property
    def block_size(self) -> int:
        return max(member.block_size for member in self.members)

    @property
    def captures(self) -> tuple[int, ...]:
        """Of all of them, each layer once."""
        return tuple(sorted({layer for member in self.members for layer in member.captures}))

    @property
    def chained(self) -> bool:
        return self._chain is not None

    @property
    def borrows(self) -> bool:
        return any(member.borrows for member in self.members)

    def kv_shapes(self) -> list[KVShape]:
        return [shape for member in self.members for shape in member.kv_shapes()]

    def check_pair(self, target: Target) -> None:
        for member in self.members:
            member.check_pair(target)

    def carried(self, target: Target) -> int:
        assert self._chain is not None
        return self._chain.carried(target)


Drafts = Drafter | Team
"""Whoever drafts for a target."""


def together(members: Sequence[Drafter]) -> Drafts | None:
    """One drafter, a team of several, or None."""
    return None if not members else members[0] if len(members) == 1 else Team(members)
