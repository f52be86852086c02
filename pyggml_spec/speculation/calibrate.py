"""Costs of steps, measured on this engine's graphs and cached per model, device and version; acceptance priors, cached per pair."""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np

from ..engine.engine import Engine
from ..engine.runner import ModelRunner
from ..engine.sequence import PLAIN, GenerationOptions
from ..engine.stats import MUCH_WAITING
from ..errors import ContextError, PyspecError
from ..files import make_private, replacing
from ..folders import cache_folder
from ..ggml.device import cpu_wait_s, graph_replay_enabled, kernels_in_use
from ..ggml.library import versions
from .policy import PLAIN_STEP, AcceptancePrior, StepPlan

WARMUP, WARM_S = 3, 0.015  # runs, and seconds of runs, that are not counted: CUDA graphs replay from the third on, caches fill
MOST, ENOUGH_S, LIMIT_S = 12, 0.15, 0.6  # runs per width; seconds after which three runs are enough, and after which one is
PLAIN_MORE = 3  # times as many plain steps: all other costs are relative to them
START = [0] * 8  # tokens in the cache before measured steps, at least
FILL, MOST_FILL, FILL_S = [0] * 32, 4, 0.1  # further tokens in the cache, as many chunks as take at most FILL_S: attention reads them
SEED = 2
KEEP_DRAFTS = "PYSPEC_KEEP_DRAFTS"
LEAST_BLOCKS, MOST_BLOCKS = 8, 1e6  # blocks that an entry needs, and that one can have: old ones fade


K = TypeVar("K", int, StepPlan, tuple[int, str])


def step_costs(runner: ModelRunner, steps: Sequence[K], given: bool = False) -> dict[K, float]:
    """``step_cost`` of the steps that fit the context. Resets the sequence.

    Args:
        steps: widths (1: plain decoding), or plans.
        given: verify given ids, without a drafter.

    The tokens of blocks are random: a repeated token would choose the same few experts in every row.
    """
    random = np.random.default_rng(SEED)
    plans = {step: step if isinstance(step, StepPlan) else StepPlan.of("", cast(Any, step)) for step in steps}
    return {
        step: step_cost(runner, plan, random, given) for step, plan in plans.items() if runner.options.n_ctx > len(START) + plan.verify_len
    }


def step_cost(runner: ModelRunner, step: StepPlan, random: np.random.Generator | None = None, given: bool = False) -> float:
    """Milliseconds of one step of this plan, host work included: the median of at most MOST. Resets the sequence. Arguments as of ``step_costs``;
    ``random``: of the tokens of blocks.

    Raises:
        ContextError: the context holds no such step.
    """
    width, rows, random = step.tokens, step.verify_len, random or np.random.default_rng(SEED)
    runner.reset(drafting=width > 1 and runner.drafter is not None)
    runner.prefill(START[: max(1, runner.options.n_ctx - width)])
    began = time.perf_counter()
    for n in range(1, MOST_FILL + 1):
        depth = len(START) + n * len(FILL)
        room = runner.options.n_ctx - depth >= rows + WARMUP + 3
        if depth > runner.options.n_ctx // 2 or not room or time.perf_counter() - began > FILL_S:
            break
        runner.prefill(FILL)
    most, runs, warmup, started = MOST * (PLAIN_MORE if width == 1 else 1), list[float](), WARMUP, time.perf_counter()
    while len(runs) < warmup + most and runner.cursor.room >= rows:
        began = time.perf_counter()
        ids = random.integers(0, runner.target.n_vocab, width - 1)
        if width == 1:
            result = runner.plain_step()
        else:
            result = runner.verify_step(ids.tolist()) if given else runner.fused_step(width, ids, drafter=step.method, verified=rows)
        runner.accept(1, int(result.ids[0]))
        runs.append(time.perf_counter() - began)
        spent = time.perf_counter() - started
        warmup = max(warmup, len(runs)) if spent < WARM_S else warmup
        if spent > LIMIT_S or (spent > ENOUGH_S and len(runs) >= warmup + 3):
            break
    if not runs:
        raise ContextError(f"a context of {runner.options.n_ctx} holds no step of {rows} rows that could be measured; raise it")
    runner.reset()
    return 1000 * statistics.median(runs[warmup:] or runs)


def plain_cost(engine: Engine, most: int, depth: int = 0, take: Callable[[list[int]], object] = lambda block: None) -> float:
    """Milliseconds per token of plain decoding, all host work included: the mean of at most ``most`` steps. Resets the sequence.

    Args:
        depth: tokens in the cache before them, fewer where computing these would take longer than FILL_S.
        take: called with the tokens of each step, as a caller's loop would be.
    """
    runner, runs = engine.runner, list[float]()
    runner.reset()
    room = runner.options.n_ctx - WARMUP - most - 1
    if min(depth, room) > len(FILL):
        began = time.perf_counter()
        runner.prefill(FILL)
        depth = min(depth, room, int(len(FILL) * FILL_S / (time.perf_counter() - began)))
        runner.reset()
    tokens = max(min(depth, room), min(len(START), runner.options.n_ctx - 1), 1)
    options = GenerationOptions(WARMUP + most + 1, PLAIN, runner.options.width, ignore_end=True, reuse=False)
    # these steps are warm: beside them the blocks of a text, which begins cold, would look too dear
    apart = engine.policy.not_learning() if engine.policy is not None else nullcontext()
    with apart, closing(engine.submit([0] * tokens, options, slot=0)) as stream:
        next(stream)  # the token after the prompt
        started = last = time.perf_counter()
        for block in stream:
            take(block)
            now = time.perf_counter()
            runs.append(now - last)
            last, spent = now, now - started
            if spent > LIMIT_S or (spent > ENOUGH_S and len(runs) >= WARMUP + 3):
                break
    runner.reset()
    if not runs:
        raise ContextError(f"a context of {runner.options.n_ctx} holds no plain step that could be measured; raise it")
    return 1000 * statistics.fmean(runs[WARMUP:] or runs)


def cost_key(runner: ModelRunner, widths: Sequence[Any], given: bool = False) -> str:
    """A hash of all that costs depend on: both files (size and first MiB), device, threads, kernels, widths, context, versions, experts."""
    device, placement = runner.backend.device, runner.target.weights.placement
    parts = [
        SEED,
        graph_replay_enabled(),
        kernels_in_use(),
        placement,
        device.name,
        device.description,
        runner.backend.threads,
        runner.backend.kernels,
        widths,
        given,
        runner.options.alone,
        versions(),
        *(map(str, runner.resources.segments) if len(runner.resources.segments) > 1 else ()),
    ]
    return _hash([*parts, *_files(runner)])


def _files(runner: ModelRunner) -> list[Any]:
    """The identity of a pair: size and first MiB of each file, and the size of the drafted vocabulary."""
    members = runner.drafter.methods if runner.drafter is not None else ()
    parts: list[Any] = [f"{member.draft_tokens} tokens" for member in members if member.draft_tokens]
    return parts + [part for file in (runner.target.file, *(member.file for member in members)) for part in file.beginning]


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def known_drafts(runner: ModelRunner) -> dict[str, AcceptancePrior]:
    """Acceptance priors by drafter, of earlier sessions with this pair on any device; empty without a valid entry, or if KEEP_DRAFTS is "0"."""
    if os.environ.get(KEEP_DRAFTS) == "0":
        return {}
    try:
        stored, out = json.loads(_drafts_path(runner).read_text()), {}
        for method, of in stored.items():
            record = AcceptancePrior(len(of["tries"]))
            record.tries, record.hits = [float(n) for n in of["tries"]], [float(n) for n in of["hits"]]
            fits = len(record.hits) == len(record.tries) > 0
            if not fits or not all(0 <= hits <= tries < MOST_BLOCKS for tries, hits in zip(record.tries, record.hits)):
                return {}
            out[method] = record
        return out
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return {}


def keep_drafts(runner: ModelRunner, seen: Mapping[str, AcceptancePrior]) -> None:
    """Stores priors for ``known_drafts`` of later sessions, if this one has seen enough blocks."""
    if os.environ.get(KEEP_DRAFTS) == "0" or sum(record.blocks for record in seen.values()) < LEAST_BLOCKS:
        return
    with suppress(OSError, PyspecError):  # a deleted file, an untrusted folder
        keep(_drafts_path(runner), {method: {"tries": record.tries, "hits": record.hits} for method, record in seen.items()})


def _drafts_path(runner: ModelRunner) -> Path:
    return cache_folder() / f"drafts-{_hash([SEED, *_files(runner)])}.json"


def known_costs(runner: ModelRunner, plans: Sequence[StepPlan]) -> dict[StepPlan, float]:
    """Milliseconds of steps by plan, of earlier sessions with these files on this machine; empty without a valid entry."""
    return kept(_costs_path(runner, plans), {_name(plan): plan for plan in plans}) or {}


def keep_costs(runner: ModelRunner, plans: Sequence[StepPlan], costs: Mapping[StepPlan, float]) -> None:
    """Stores for ``known_costs`` of later sessions what steps have told of these ``plans``."""
    if PLAIN_STEP in costs and len(costs) > 1:
        with suppress(OSError, PyspecError):  # a deleted file, an untrusted folder
            keep(_costs_path(runner, plans), {_name(plan): costs[plan] for plan in plans if plan in costs})


def _costs_path(runner: ModelRunner, plans: Sequence[StepPlan]) -> Path:
    return cache_folder() / f"costs-{cost_key(runner, plans)}.json"


def _name(plan: StepPlan) -> str:
    return "/".join(map(str, plan))


def kept(path: Path, names: dict[str, K]) -> dict[K, float] | None:
    """The costs of an entry, by the values of ``names``; None without a valid entry."""
    try:
        stored = {names[name]: float(ms) for name, ms in json.loads(path.read_text()).items()}
        return stored if all(0 < ms < 1e6 for ms in stored.values()) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None


def keep(path: Path, entry: Mapping[Any, Any]) -> None:
    try:
        make_private(path.parent)
        with replacing(path) as file:
            file.write(json.dumps(entry).encode())
    except OSError:
        pass  # a read-only home or a full disk: measured again next time


class Waiting:
    """A ``with`` block; ``much``: whether other work had this thread's core, or a core of the engine's steps, meanwhile."""

    much = False

    def __init__(self, runner: ModelRunner | None = None) -> None:
        self._runner = runner

    def __enter__(self) -> Self:
        self._calm = self._is_calm()
        self._began, self._waited = time.perf_counter(), cpu_wait_s()
        return self

    def __exit__(self, *exc: object) -> None:
        waited = cpu_wait_s()
        self.much = not (self._calm and self._is_calm())
        if waited is not None and self._waited is not None:
            self.much |= waited - self._waited > MUCH_WAITING * (time.perf_counter() - self._began)

    def _is_calm(self) -> bool:
        if self._runner is not None:
            self._runner.threads.refresh()
        return self._runner is None or self._runner.threads.calm
