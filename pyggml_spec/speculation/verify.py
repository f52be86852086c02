"""Which tokens a step gives: the acceptance rule.

The verifier sees [last token, d_1 .. d_{W-1}]; its row j predicts the token after row j. The accepted drafts are the longest prefix with
target_j == d_{j+1}, where target_j is the greedy choice after row j, or a sampler's; that many rows plus one are committed, and the
target's own choice after them becomes the last token. Every token that comes out is therefore the target's choice after exactly the
tokens before it: the drafter decides how many come out per step, never which.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..engine.limits import Limits
from ..engine.runner import ModelRunner
from ..sampling.sampler import Sampler


class Choices:
    """What a step left behind the rows of one sequence, until the next one.

    Attributes:
        greedy: the target's greedy choice after each row.
        allowed: by row, the likeliest token that a constraint allows there, where it has been asked for already.
    """

    def __init__(self, greedy: Sequence[int], engine: ModelRunner, slot: int = 0, allowed: dict[int, int] | None = None) -> None:
        self.greedy, self.allowed, self._engine, self._slot = greedy, allowed if allowed is not None else {}, engine, slot

    def candidates(self, row: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The ids (None: all of the vocabulary) and logits that a sampler chooses from."""
        return self._engine.candidates(row, self._slot)

    @property
    def on_device(self) -> bool:
        """Whether the device can be asked about the tokens that a constraint allows."""
        return self._engine.slots[self._slot].masked

    def likeliest(self, row: int, bits: np.ndarray) -> int:
        """The likeliest of the tokens that ``bits`` stand for."""
        return self._engine.likeliest([(self._slot, row, bits)])[0]

    def largest(self, row: int, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids and logits of as many of them as ``candidates`` gives."""
        return self._engine.largest(row, bits, self._slot)


def first_token(choices: Choices, prompt: Sequence[int], limits: Limits, sampler: Sampler | None) -> int:
    """The target's choice after ``prompt``."""
    if sampler is not None:
        sampler.accept_prompt(prompt)
    token = _choice(choices, 0, sampler)
    limits.passes(token)
    return token


def _choice(choices: Choices, row: int, sampler: Sampler | None) -> int:
    greedy = choices.greedy[row]
    if sampler is None or sampler.accepts_argmax(greedy):
        return greedy
    if sampler.masks_on_device:
        token = choices.allowed.get(row)
        if token is None and choices.on_device:
            token = choices.likeliest(row, sampler.allowed())
        if token is not None and sampler.accepts_argmax(token):
            return token
    return sampler.choose(*choices.candidates(row), partial(choices.largest, row))


def choose_block(
    choices: Choices, drafts: Sequence[int], limits: Limits, sampler: Sampler | None = None, imposed: bool = False
) -> list[int]:
    """The tokens that a verified block gives: the target's choice after row 0, 1, ... while the choice is the next row's draft, up to where
    the sequence ends.

    Args:
        drafts: of the rows 1, 2, ....
        limits: of the sequence, which goes on; asked about every token.
        imposed: they count as chosen, whatever the target says.
    """
    block: list[int] = []
    for j, draft in enumerate([*drafts, None]):
        token = _imposed(choices, j, draft, sampler) if imposed and draft is not None else _choice(choices, j, sampler)
        block.append(token)
        if not limits.passes(token) or token != draft:
            break
    return block


def _imposed(choices: Choices, row: int, draft: int, sampler: Sampler | None) -> int:
    """``draft``; the choice is made, because it takes its time, but under a constraint that goes on behind the draft."""
    if sampler is not None and sampler.grammar is not None:
        sampler.take(draft)
    else:
        _choice(choices, row, sampler)
    return draft
