"""The optional arguments of a generation, by name: what type checkers and editors know of ``generate(**options)``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

from .engine.stats import Stats
from .events import End, StepEvent
from .models.placement import ExpertOptions
from .models.rope import RopeOptions
from .sampling.sampler import Sampling
from .speculation.synthetic import SyntheticAcceptance
from .text.stream import LineLimits


class LoadOptions(TypedDict, total=False):
    """Of ``load``, besides the files."""

    device: str | None
    threads: int | None
    kernels: str | None
    n_ctx: int | None
    draft_width: int | None
    graphs: bool
    cache_type_k: str
    cache_type_v: str
    draft_cache_type_k: str
    draft_cache_type_v: str
    chunk: int
    prefix_cache: str | Path | None
    prefix_memory: int | None
    prefix_disk: int | None
    experts: ExpertOptions | None
    spec: Sequence[str] | None
    no_spec: Sequence[str]
    draft_vocab: int | None
    tensor_split: Sequence[float] | None
    offload_prompts: int | str | None
    rope: RopeOptions | None
    progress: Callable[[str, int, int], None]


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
