"""Synthetic acceptance: engine speed at a given acceptance, whatever the drafter is worth. Benchmarks only; the text is not the target's.

Same definition as llama-server's --spec-synth-len: every draft is accepted with the same probability p, given that all before it were, and
p is chosen so that a full block emits L tokens on average, the target's own token included: L = 1 + p + p^2 + ... + p^n for n drafts. Or, as
of its --spec-synth-rates, draft i is accepted in the share r_i of all blocks, and those past the last rate never.
"""

import random
from collections.abc import Sequence
from typing import Self

from ..errors import PyspecError


def conditional_probability(length: float, drafts: int) -> float:
    """p for a mean of ``length`` tokens per block of ``drafts`` drafts, by bisection.

    Raises:
        PyspecError: a length outside 1 .. drafts + 1.
    """
    if not 1 <= length <= drafts + 1:
        raise PyspecError(f"a synthetic acceptance of {length} tokens per step is impossible with {drafts} drafts: use 1 to {drafts + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, drafts + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return high


class SyntheticAcceptance:
    """Draws how many drafts of a block count as accepted. Seeded."""

    def __init__(self, length: float, drafts: int, seed: int = 0) -> None:
        self.length, self._chances = length, [conditional_probability(length, drafts)] * drafts
        self._random = random.Random(seed)

    @classmethod
    def of_rates(cls, rates: Sequence[float], seed: int = 0) -> Self:
        """Draft i counts as accepted, with all before it, in the share ``rates[i]`` of all blocks.

        Raises:
            PyspecError: no rates, rates outside 0 .. 1, or rates that rise.
        """
        if not rates or any(not 0 <= b <= a for a, b in zip([1.0, *rates], rates)):
            raise PyspecError(f"acceptance rates by position fall from at most 1 to at least 0; these are {', '.join(map(str, rates))}")
        out = cls(1.0, 1, seed)
        out.length, out._chances = 1 + sum(rates), [b / a if a else 0.0 for a, b in zip([1.0, *rates], rates)]
        return out

    @property
    def p(self) -> float:
        """That the first draft counts as accepted."""
        return self._chances[0]

    def draw(self, drafts: int) -> int:
        """How many of the next block's ``drafts`` drafts count as accepted."""
        matched, chances = 0, self._chances[:drafts]
        while matched < len(chances) and self._random.random() < chances[matched]:
            matched += 1
        return matched
