"""What a generation gives, step by step."""

from dataclasses import dataclass

from .spec.sampling import TokenLogprob
from .spec.stats import Stats


@dataclass(frozen=True)
class StepEvent:
    """One step of a generation: new ``text`` (may be empty), its ``tokens``, the statistics so far, and ``logprobs`` if they were asked for."""

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
