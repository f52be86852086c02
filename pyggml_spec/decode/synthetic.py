"""Synthetic acceptance: engine speed at a given acceptance, whatever the drafter is worth. Benchmarks only; the text is not the target's.

Same definition as llama-server's --spec-synth-len: every draft is accepted with the same probability p, given that all before it were, and
p is chosen so that a full block emits L tokens on average, the target's own token included: L = 1 + p + p^2 + ... + p^n for n drafts.
"""

import random

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
        self.length, self.p = length, conditional_probability(length, drafts)
        self._random = random.Random(seed)

    def draw(self, drafts: int) -> int:
        """How many of the next block's ``drafts`` drafts count as accepted."""
        matched = 0
        while matched < drafts and self._random.random() < self.p:
            matched += 1
        return matched
