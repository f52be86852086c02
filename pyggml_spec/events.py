"""What a generation gives, step by step."""

from dataclasses import dataclass

from .engine.stats import Stats
from .sampling.sampler import TokenLogprob


@dataclass(frozen=True)
class StepEvent:
    """One step of a generation.

    Attributes:
        text: what is new of it; may be empty.
        tokens: the ids that came out; none in the last event, which flushes the text.
        stats: the statistics as they were then, a copy of its own; in the last event those of the whole generation.
        logprobs: of the tokens, if they were asked for.
        drafts: of requests that share steps: the ids that this step verified. The first ``len(tokens) - 1`` of them are those tokens, unless the
            text ended before; the rest was rejected. None where nothing was drafted.
        prompt_read: in events about the progress of a prompt alone: how many of its tokens are in the caches.
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    prompt_read: int | None = None


@dataclass(frozen=True)
class End:
    """What comes behind the last event of a request among others: ``error`` is what ended it, None if it ended by itself."""

    error: BaseException | None = None
