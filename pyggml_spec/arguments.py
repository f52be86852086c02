"""The optional arguments of a generation, by name: what type checkers and editors know of ``generate(**options)``."""

from collections.abc import Callable, Sequence
from typing import TypedDict

from .engine.stats import Stats
from .events import End, StepEvent
from .models.adapters import Chosen
from .sampling.sampler import Sampling
from .speculation.synthetic import SyntheticAcceptance
from .text.stream import LineLimits


class RequestOptions(TypedDict, total=False):
    """Of any request; what each of them means: ``Session.steps``."""

    mode: str | None
    sampling: Sampling | None
    stop: Sequence[str]
    ignore_end: bool
    special: bool


class SubmitOptions(RequestOptions, total=False):
    """Of a request among others."""

    reuse: bool
    scored: bool
    adapters: Chosen | None
    progress: bool
    synthetic: SyntheticAcceptance | None
    lines: LineLimits
    sink: Callable[[StepEvent | End], object] | None
    owner: str


class GenerateOptions(RequestOptions, total=False):
    """Of a generation that has the session to itself."""

    append: bool
    synthetic: SyntheticAcceptance | None
    prefill_progress: Callable[[int, int], None] | None
    interrupted: Callable[[], bool] | None
    stats: Stats | None
