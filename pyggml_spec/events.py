"""Events of a generation."""

from dataclasses import dataclass

from .engine.stats import Stats
from .sampling.sampler import TokenLogprob


@dataclass(frozen=True)
class StepEvent:
    """One step of a generation.

    Attributes:
        text: new text; may be empty.
        tokens: ids of this step; none in the last event, which flushes the text.
        stats: a copy of the statistics at this step; in the last event the final statistics.
        logprobs: of the tokens, where requested.
        drafts: of requests of ``concurrent``: drafts that this step verified, the first ``len(tokens) - 1`` of them accepted, unless the text ended before.
        prompt_read: in progress events only: prompt tokens in the caches.
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    prompt_read: int | None = None


@dataclass(frozen=True)
class End:
    """Follows the last event of a request of ``concurrent``. ``error``: what ended it, None for a regular end."""

    error: BaseException | None = None
