"""Which tokens a step gives: the acceptance rule.

The verifier sees [pending, d_1 .. d_{W-1}]; its row j predicts the token after row j. The accepted drafts are the longest prefix with
target_j == d_{j+1}, where target_j is the greedy choice after row j, or a sampler's; that many rows plus one are committed, and the
target's own choice after them becomes the pending token. Every token that comes out is therefore the target's choice after exactly the
tokens before it: the drafter decides how many come out per step, never which.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..sampling.sampler import Sampler
from .limits import Limits
from .synthetic import SyntheticAcceptance

Candidates = Callable[[int], tuple[np.ndarray | None, np.ndarray]]
"""(row) -> the ids (None: all of the vocabulary) and logits that a sampler chooses from after it."""


def first_token(greedy: int, prompt: Sequence[int], limits: Limits, candidates: Candidates, sampler: Sampler | None) -> int:
    """The target's choice after ``prompt``; ``greedy`` is the largest logit's."""
    if sampler is not None:
        sampler.accept_prompt(prompt)
    token = _choice(greedy, 0, candidates, sampler)
    limits.passes(token)
    return token


def _choice(greedy: int, row: int, candidates: Candidates, sampler: Sampler | None) -> int:
    if sampler is None or sampler.takes(greedy):
        return greedy
    return sampler.choose(*candidates(row))


def choose_block(
    greedy: Sequence[int],
    drafts: Sequence[int],
    limits: Limits,
    candidates: Candidates,
    sampler: Sampler | None = None,
    synthetic: SyntheticAcceptance | None = None,
) -> list[int]:
    """The tokens that a verified block gives: the target's choice after row 0, 1, ... while the choice is the next row's draft, up to where
    the sequence ends.

    Args:
        greedy: the target's greedy choice after each row.
        drafts: of the rows 1, 2, ....
        limits: of the sequence, which goes on; asked about every token.
        synthetic: accepts drafts at random instead.
    """
    if synthetic is not None:
        drafts = drafts[: synthetic.draw(len(greedy) - 1)]
    block: list[int] = []
    for j, draft in enumerate([*drafts, None]):
        token = _choice(greedy[j], j, candidates, sampler)
        if synthetic is not None and draft is not None:
            token = draft
        block.append(token)
        if not limits.passes(token) or token != draft:
            break
    return block
