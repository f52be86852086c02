"""What a generation gives, step by step."""

from dataclasses import dataclass

from .decode.stats import Stats
from .sampling.sampler import TokenLogprob


@dataclass(frozen=True)
class StepEvent:
    """One step of a generation.

    Attributes:
        text: what is new of it; may be empty.
        tokens: the ids that came out; none in the last event, which flushes the text.
        stats: the statistics as they were then, a copy of its own; in the last event those of the whole generation.
        logprobs: of the tokens, if they were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
